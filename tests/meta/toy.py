"""A correct backend in plain torch, made of small steps: each broken toy replaces one of them (broken.py).

It works sequence by sequence in float32, so that batch mates cannot matter, and gathers only keys inside the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from portattn.capability import Capability, Range
from portattn.manifest import KV_DTYPES, Manifest
from portattn.problem import FEATURES, Call

INF = float("inf")


def manifest(name: str, **changes) -> Manifest:
    """All features, any head dim; `changes` are fields of its one capability."""
    fields = dict(id="all", layouts=("dense", "varlen", "paged", "cache_append", "merge_states"),
                  dtypes=("float32", "float16", "bfloat16"),
                  kv_dtypes=KV_DTYPES, head_dims=Range(max=576), features=FEATURES, memory="quadratic")
    return Manifest(name, f"toy {name}", -1000, (Capability(**{**fields, **changes}),))


class Toy:
    """The adapter. Tensors of one sequence: q (Lq, Hq, D), k (Lk, Hkv, D), v (Lk, Hkv, Dv)."""

    def probe(self, device: torch.device) -> tuple:
        return ()

    # ---------------------------------------------------------------- steps, each of them right
    def position(self, len_q: int, len_k: int) -> Tensor:
        return torch.arange(len_q) + len_k - len_q

    def visible(self, call: Call, len_q: int, len_k: int) -> Tensor:
        at, key = self.position(len_q, len_k)[:, None], torch.arange(len_k)[None, :]
        seen = torch.ones(len_q, len_k, dtype=torch.bool)
        if call.causal:
            seen &= key <= at
        if call.window_left >= 0:
            seen &= key >= at - call.window_left
        if call.window_right >= 0:
            seen &= key <= at + call.window_right
        return seen

    def kv_head(self, heads_q: int, heads_kv: int) -> Tensor:
        return torch.arange(heads_q) // (heads_q // heads_kv)

    def soften(self, s: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(s / cap) if cap else s

    def sinks(self, call: Call) -> Tensor | None:
        return call.sinks

    def slopes(self, call: Call, b: int) -> Tensor | None:
        slopes = call.alibi_slopes
        return slopes[b] if slopes is not None and slopes.dim() == 2 else slopes

    def bias(self, call: Call, b: int, shape: tuple[int, ...]) -> Tensor | None:
        return None if call.bias is None else call.bias.expand(call.q.shape[0], *shape)[b]

    def scores(self, call: Call, q: Tensor, k: Tensor, b: int) -> Tensor:
        q, k = q.clone(), k.clone()  # matmul of torch 2.14 sums in another order where rows are aligned in another way
        s = self.soften(call.softmax_scale * torch.einsum("ihd,jhd->hij", q, k), call.softcap)
        slopes = self.slopes(call, b)
        if slopes is not None:
            gap = (self.position(len(q), len(k))[:, None] - torch.arange(len(k))[None, :]).abs().to(s.device)
            s = s - slopes.float()[:, None, None] * gap
        seen = self.visible(call, len(q), len(k)).to(s.device)
        bias = self.bias(call, b, tuple(s.shape))
        if bias is not None:
            seen = seen & bias if bias.dtype == torch.bool else seen
            s = s + bias.float() if bias.dtype != torch.bool else s
        return s.masked_fill(~seen, -INF)

    def softmax(self, s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights (H, Lq, Lk) and lse (Lq, H); a sink is a column without a value."""
        column = s.new_full((s.shape[0],), -INF) if sinks is None else sinks.float()
        s = torch.cat([s, column[:, None, None].expand(-1, s.shape[1], 1)], -1)
        top = s.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -INF, 0.0)
        e = torch.exp(s - top)
        total = e.sum(-1, keepdim=True)
        return (e / total.masked_fill(total == 0, 1.0))[..., :-1], self.lse((top + total.log())[..., 0].T)

    def lse(self, lse: Tensor) -> Tensor:
        return lse

    def read(self, cache: Tensor, table: Tensor, length: int, scale, b: int) -> Tensor:
        """(L, Hkv, D) float32 out of a cache."""
        page = cache.shape[1]
        at = torch.arange(length)
        ids = table[: -(-length // page)].long()
        raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        rows = raw[ids[at.to(ids.device) // page], at.to(ids.device) % page] if length else raw[:0, 0]
        return rows.view(cache.dtype).float() * self.scale(scale, b)

    def scale(self, scale, b: int):
        if not isinstance(scale, Tensor):
            return 1.0 if scale is None else scale
        scale = scale[b] if scale.dim() == 2 else scale
        return scale[:, None] if scale.dim() else scale

    def write(self, cache: Tensor, slot: int, row: Tensor, scale, b: int) -> None:
        row = row.float() / self.scale(scale, b)
        if cache.element_size() == 1:
            top = torch.finfo(cache.dtype).max
            row = row.clamp(-top, top)
        cache[slot // cache.shape[1], slot % cache.shape[1]] = row.to(cache.dtype)

    def angle_position(self, len_q: int, len_k: int) -> Tensor:
        return self.position(len_q, len_k)

    def turn(self, call: Call, x: Tensor, at: Tensor) -> Tensor:
        if call.rotary_cos is None:
            return x
        half, at = call.rotary_cos.shape[1], at.clamp(min=0).to(x.device)
        c, s = call.rotary_cos.float()[at][:, None], call.rotary_sin.float()[at][:, None]
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if call.rotary_interleaved else (slice(0, half),
                                                                                                slice(half, 2 * half))
        out = x.float().clone()
        a, b = x[..., pairs[0]].float(), x[..., pairs[1]].float()
        out[..., pairs[0]], out[..., pairs[1]] = a * c - b * s, b * c + a * s
        return out

    def first_written(self) -> int:
        return 0

    def append(self, call: Call, b: int, rows: slice, length: int) -> None:
        at = self.position(rows.stop - rows.start, length)
        keys = self.turn(call, self.flat(call.k_new)[rows], at)
        for i, position in enumerate(at.tolist()):
            if position >= self.first_written():
                slot = int(call.block_table[b, position // call.k.shape[1]]) * call.k.shape[1] + position % call.k.shape[1]
                self.write(call.k, slot, keys[i], call.k_scale, b)
                self.write(call.v, slot, self.flat(call.v_new)[rows][i], call.v_scale, b)

    # ---------------------------------------------------------------- the calls
    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1) if x.dim() == 4 else x

    def length(self, call: Call, b: int) -> int:
        return max(int(call.kv_lens[b]), 0)

    def spans(self, call: Call):
        """(b, its rows of q, its keys or its length) of every sequence."""
        if call.cu_seqlens_q is None:
            batch, length = call.q.shape[:2]
            starts = [b * length for b in range(batch + 1)]
        else:
            starts = call.cu_seqlens_q.tolist()
        cu_k = call.cu_seqlens_k.tolist() if call.cu_seqlens_k is not None else None
        for b in range(len(starts) - 1):
            rows = slice(starts[b], starts[b + 1])
            if call.block_table is not None:
                yield b, rows, self.length(call, b)
            elif cu_k is not None:
                used = cu_k[b + 1] - cu_k[b] if call.seqused_k is None else int(call.seqused_k[b])
                yield b, rows, slice(cu_k[b], cu_k[b] + used)
            else:
                yield b, rows, slice(b * call.k.shape[1], (b + 1) * call.k.shape[1])

    def sequence(self, call: Call, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.kv_head(q.shape[1], k.shape[1]).to(k.device)
        p, lse = self.softmax(self.scores(call, q.float(), k.float()[:, heads], b), self.sinks(call))
        return torch.einsum("hij,jhe->ihe", p, v.float()[:, heads]), lse

    def attention(self, call: Call, bound):
        spans = list(self.spans(call))
        if call.k_new is not None:
            for b, rows, length in spans:
                self.append(call, b, rows, length)
        q, parts = self.flat(call.q), []
        for b, rows, keys in spans:
            if call.block_table is not None:
                k = self.read(call.k, call.block_table[b], keys, call.k_scale, b)
                v = self.read(call.v, call.block_table[b], keys, call.v_scale, b)
                q_b = self.turn(call, q[rows], self.angle_position(rows.stop - rows.start, keys))
            else:
                k, v, q_b = self.flat(call.k)[keys], self.flat(call.v)[keys], q[rows]
            parts.append(self.sequence(call, b, q_b, k, v))
        rest = len(q) - sum(len(p[0]) for p in parts)
        parts.append((q.new_zeros(rest, q.shape[1], call.v.shape[-1], dtype=torch.float32),
                      q.new_zeros(rest, q.shape[1], dtype=torch.float32)))
        out, lse = (torch.cat(x) for x in zip(*parts))
        return self.finish(call, out.view(*call.q.shape[:-1], call.v.shape[-1]), lse.reshape(call.q.shape[:-1]))

    def finish(self, call: Call, out: Tensor, lse: Tensor):
        out = out.to(call.q.dtype) if call.out is None else call.out.copy_(out)
        return (out, lse) if call.return_lse else out

    def cache_append(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound) -> None:
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                self.write(k_cache, slot, k[i], k_scale, 0)
                self.write(v_cache, slot, v[i], v_scale, 0)

    def merge_states(self, outs, lses, sinks, bound):
        every = lses if sinks is None else torch.cat([lses, sinks.float().expand(1, *lses.shape[1:])])
        top = every.detach().amax(0).clamp(min=-3e38)
        total = torch.exp(every - top).sum(0)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        weight = torch.exp(lses - top) / total
        parts = outs.float().masked_fill((lses == -INF)[..., None], 0.0)
        return (weight[..., None] * parts).sum(0).to(outs.dtype), (top + total.log()).masked_fill(empty, -INF)
