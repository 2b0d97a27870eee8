"""A Llama-type decoder in plain torch. It knows nothing of caches, batches or backends: attention is a function it is given.

All tokens of a step stand in one flat dimension T, whatever sequences they belong to. Every layer but attention treats
them one by one, and `attend(layer, q, k, v)` is the one place where sequences exist.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q (T, Hq, D), k (T, Hkv, D), v (T, Hkv, D)) -> (T, Hq, D)


class Config(NamedTuple):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    max_position: int  # positions that the model was trained for
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class Layer(NamedTuple):
    attention_norm: Tensor  # (hidden,)
    qkv: Tensor  # ((Hq + 2 Hkv) D, hidden): the three projections in one matrix
    output: Tensor  # (hidden, Hq D)
    mlp_norm: Tensor
    gate_up: Tensor  # (2 intermediate, hidden)
    down: Tensor  # (hidden, intermediate)


class Llama:
    """Weights and the forward pass; rotary pairs lie next to each other (2i, 2i + 1), as GGUF files store them."""

    def __init__(self, config: Config, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Tensor):
        self.config, self.embedding, self.layers, self.norm, self.head = config, embedding, layers, norm, head
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=embedding.device) / config.head_dim
        angles = torch.outer(torch.arange(config.max_position, device=embedding.device).float(), config.rope_theta**-pairs)
        self.cos, self.sin = angles.cos(), angles.sin()  # float32 (max_position, head_dim / 2)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Logits (T or len(rows), vocabulary) of tokens (T,) that stand at positions (T,) of their sequences."""
        c = self.config
        heads = (c.num_heads_q, c.num_heads_kv, c.num_heads_kv)
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            qkv = F.linear(self._normed(x, layer.attention_norm), layer.qkv).view(len(tokens), sum(heads), c.head_dim)
            q, k, v = qkv.split(heads, dim=1)
            out = attend(i, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            x = x + F.linear(out.flatten(1), layer.output)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        if rows is not None:
            x = x[rows]
        return F.linear(self._normed(x, self.norm), self.head)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, in float32 as the models were trained."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * y.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[2i], x[2i + 1]) of x (T, H, D) by the angles of cos and sin (T, 1, D / 2)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
