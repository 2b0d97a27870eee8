"""What the spellings share: windows, lengths, tables of contiguous caches, lse layouts, and the calls that need more than renaming.

The modules beside this one keep a peer's signatures and return shapes and call portattn's public functions. Where SPEC-level
conventions differ (flash-attn's lengths count before an append, its rotary position of q depends on the mask, a cache may start
at a left pad), the difference is translated here, on the device and without waiting for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import cache_append
from ..device import capturing
from ..errors import ArgumentError

ANY = (-1, -1)
_INF = float("inf")


def refuse(call: str, name: str, value: Any, why: str) -> None:
    """Raises for an argument that asks for something portattn does not compute."""
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(f"{call}: {name}: {why}, got {shown}")


def refuse_dropout(call: str, dropout_p: float) -> None:
    refuse(call, "dropout_p", dropout_p, "wanted 0.0: portattn is for inference and drops no probabilities (in evaluation flash-attn wants 0.0 too)")


def window(given: Any) -> tuple[int, int]:
    """(left, right) as portattn takes it: None and any negative number are unbounded; lists and tensors become ints."""
    if given is None or (type(given) is tuple and given == ANY):
        return ANY
    left, right = map(int, given)
    return max(left, -1), max(right, -1)


def lse_heads_first(lse: Tensor) -> Tensor:
    """(..., S, H) to flash-attn's (..., H, S), contiguous: engines index it as such from their own kernels."""
    return lse.transpose(-1, -2).contiguous()


def lse_of_fa2(lse: Tensor) -> Tensor:
    """As `lse_heads_first`, and +inf for a row that sees no key, as FlashAttention 2 has it."""
    lse = lse_heads_first(lse)
    return lse.masked_fill(lse == -_INF, _INF)


# ------------------------------------------------------------------ contiguous caches as pages
_rows: dict[tuple[int, torch.device], Tensor] = {}


def row_table(batch: int, device: torch.device) -> Tensor:
    """(B, 1) int32 of 0 .. B - 1: the block table under which row b of a contiguous cache is page b. Kept, but for graph captures."""
    if torch.compiler.is_compiling():
        return torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    table = _rows.get((batch, device))
    if table is None:
        if capturing(device):  # its memory would belong to the graph
            return torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        # A copy from the host waits until the values are there, so any stream may read them later.
        table = torch.arange(batch, dtype=torch.int32)[:, None].to(device)
        if len(_rows) >= 1024:
            _rows.clear()
        _rows[batch, device] = table
    return table


def lengths(cu_seqlens: Tensor) -> Tensor:
    """(B,) from (B + 1,) prefix sums."""
    return cu_seqlens.diff()


def sequence_of(rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `rows` ragged rows: its sequence, and its place in it. Rows past the last sequence count on in that one."""
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    return sequence, row - cu_seqlens[sequence]


def rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) turned at position (...), in float32, rounded to x's dtype. Positions outside the table are clamped to it."""
    position = position.clamp(0, max(cos.shape[0] - 1, 0)).long()
    c, s = cos[position].float().unsqueeze(-2), sin[position].float().unsqueeze(-2)
    dim = 2 * cos.shape[-1]
    turned = x[..., :dim].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), x[..., dim:]), -1)


# ------------------------------------------------------------------ flash-attn's kvcache
_counts: dict[tuple[int, torch.device], Tensor] = {}


def _plus(lens: Tensor, n: int) -> Tensor:
    """lens + n; adding a kept tensor costs half of adding a Python number."""
    count = _counts.get((n, lens.device))
    if count is None:
        if torch.compiler.is_compiling() or capturing(lens.device) or len(_counts) >= 1024:
            return lens + n
        count = _counts[n, lens.device] = torch.tensor(n, dtype=torch.int32).to(lens.device)
    return lens + count


def kvcache(call: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
            rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None,
            block_table: Tensor | None, rotary_interleaved: bool, causal: bool, window_size: tuple[int, int], cu_seqlens_q: Tensor | None = None,
            cu_seqlens_k_new: Tensor | None = None, rotary_seqlens: Tensor | None = None, k_scale: Tensor | None = None,
            v_scale: Tensor | None = None) -> tuple:
    """flash-attn's kvcache arguments as attention_paged's: (q, k_cache, v_cache, block_table, kv_lens, k, v, rotary_cos, rotary_sin).

    What portattn has by itself is only named differently. The rest (left pads; k_new not of q's lengths; q turned at one position
    for all its rows, or at rotary_seqlens) is turned and appended here, and what is returned attends to it.
    """
    ragged = cu_seqlens_q is not None
    if block_table is None:
        batch = cu_seqlens_q.shape[0] - 1 if ragged else q.shape[0]
        if cache_batch_idx is not None:
            block_table = cache_batch_idx[:, None]
        elif batch > k_cache.shape[0]:
            raise ArgumentError(f"{call}: k_cache: wanted at least {batch} rows, one a sequence of q, got {k_cache.shape[0]}")
        else:
            block_table = row_table(batch, q.device)
    elif cache_batch_idx is not None:
        raise ArgumentError(f"{call}: cache_batch_idx: wanted None together with a block table, which says where each sequence lies")

    if k is None:
        if v is not None or rotary_cos is not None:
            name = "v" if v is not None else "rotary_cos"
            raise ArgumentError(f"{call}: {name}: wanted together with k to append, as flash-attn does, got k=None")
        if cache_seqlens is None:
            cache_seqlens = block_table.shape[1] * k_cache.shape[1]
        if not isinstance(cache_seqlens, Tensor):
            _check_room(call, cache_seqlens, 0, k_cache, block_table)
            cache_seqlens = torch.full((block_table.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
        if cache_leftpad is None:
            return q, k_cache, v_cache, block_table, cache_seqlens, None, None, None, None
        return *_skipped(q, k_cache, v_cache, block_table, cache_seqlens, cache_leftpad), None, None, None, None

    if cache_seqlens is None:
        raise ArgumentError(f"{call}: cache_seqlens: wanted the lengths before the append of k and v, got None")
    if cu_seqlens_k_new is None:
        new, alike = k.shape[1], not ragged and k.shape[1] == q.shape[1]
        if not isinstance(cache_seqlens, Tensor):
            _check_room(call, cache_seqlens, new, k_cache, block_table)
        lens = _plus(cache_seqlens, new) if isinstance(cache_seqlens, Tensor) else torch.full(
            (block_table.shape[0],), cache_seqlens + new, dtype=torch.int32, device=q.device)
    else:
        new, alike = lengths(cu_seqlens_k_new), cu_seqlens_k_new is cu_seqlens_q
        lens = new + cache_seqlens
    # flash-attn turns every row of q at cache_seqlens unless the mask depends on the position.
    together = rotary_cos is not None and not causal and window_size == ANY and (ragged or q.shape[1] != 1)
    if alike and not together and cache_leftpad is None and rotary_seqlens is None:
        return q, k_cache, v_cache, block_table, lens, k, v, rotary_cos, rotary_sin

    start = lens - new
    if rotary_cos is not None:
        at = start if rotary_seqlens is None else rotary_seqlens
        q = rotate(q, _positions(q, at, cu_seqlens_q, not together), rotary_cos, rotary_sin, rotary_interleaved)
        k = rotate(k, _positions(k, at, cu_seqlens_k_new, True), rotary_cos, rotary_sin, rotary_interleaved)
    _append(k, v, k_cache, v_cache, block_table, start, cu_seqlens_k_new, k_scale, v_scale)
    if cache_leftpad is None:
        return q, k_cache, v_cache, block_table, lens, None, None, None, None
    return *_skipped(q, k_cache, v_cache, block_table, lens, cache_leftpad), None, None, None, None


def _check_room(call: str, length: int, new: int, k_cache: Tensor, table: Tensor) -> None:
    """Raises where a length from the host is beyond the cache. Lengths on the device are looked at under PORTATTN_CHECK=1 only."""
    room = table.shape[1] * k_cache.shape[1]
    if length + new > room:
        raise ArgumentError(f"{call}: cache_seqlens: wanted at most {room - new}, as the block_table has {table.shape[1]} pages of {k_cache.shape[1]} "
                            f"tokens a sequence and {new} are appended, got {length}")


def _positions(x: Tensor, start: Tensor, cu_seqlens: Tensor | None, follow: bool) -> Tensor:
    """Rotary positions of x's rows: start of the sequence, plus the row's place in it if `follow`."""
    if cu_seqlens is None:
        place = torch.arange(x.shape[1], device=x.device) if follow else torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
        return start[:, None] + place
    sequence, place = sequence_of(x.shape[0], cu_seqlens)
    return start[sequence] + place if follow else start[sequence]


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, start: Tensor, cu_seqlens: Tensor | None,
            k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Writes k and v (already turned) at `start`, `start` + 1, … of each sequence."""
    batch, page_size = table.shape[0], k_cache.shape[1]
    if cu_seqlens is None:
        sequence = torch.arange(batch, device=k.device)[:, None].expand(k.shape[:2]).flatten()
        place = torch.arange(k.shape[1], device=k.device).expand(k.shape[:2]).flatten()
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        owned = True
    else:
        sequence, place = sequence_of(k.shape[0], cu_seqlens)
        owned = torch.arange(k.shape[0], device=k.device) < cu_seqlens[-1]
    position = start[sequence].long() + place
    column = position // page_size
    inside = (position >= 0) & (column < table.shape[1]) & owned
    page = table[sequence, column.clamp(0, max(table.shape[1] - 1, 0))].long()
    slot = torch.where(inside, page * page_size + position % page_size, -1)
    scaled = lambda x, scale: x if scale is None else (x.float() / (scale[sequence] if scale.dim() == 2 else scale)[..., None]).to(x.dtype)
    cache_append(scaled(k, k_scale), scaled(v, v_scale), k_cache, v_cache, slot)


def _skipped(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, leftpad: Tensor) -> tuple[Tensor, ...]:
    """(q, the caches as pages of one token, a table that starts at each sequence's left pad, the lengths from there). Caches whose
    pages do not follow each other in memory are copied for it."""
    page_size, width = k_cache.shape[1], table.shape[1] * k_cache.shape[1]
    position = (leftpad[:, None].long() + torch.arange(width, device=table.device)).clamp(0, max(width - 1, 0))
    slots = torch.gather(table.long(), 1, position // page_size) * page_size + position % page_size
    single = lambda cache: cache.reshape(-1, 1, *cache.shape[2:])
    return q, single(k_cache), single(v_cache), slots.int(), lens - leftpad
