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
from ..dialect import AFTER, BEFORE, KEPT, lengths, plus
from ..errors import ArgumentError

ANY = (-1, -1)
_INF, _NAN = float("inf"), float("nan")
_is_compiling = torch.compiler.is_compiling


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


def lse_of_fa2(lse: Tensor) -> Tensor:
    """+inf for a row that sees no key, as FlashAttention 2 has it; lse itself is given up."""
    return lse.nan_to_num(_NAN, _INF, _INF) if lse.requires_grad else lse.nan_to_num_(_NAN, _INF, _INF)


# ------------------------------------------------------------------ small tensors that are asked for again and again
# What is kept never changes, and nothing on a device that a graph or another stream may still read is let go.
_rows: dict[Any, Tensor] = {}  # keys leave the device out on CPU: hashing one costs as much as the rest of a lookup
_equal: dict[tuple[int, int], Tensor] = {}


def row_table(batch: int, like: Tensor) -> Tensor:
    """(B, 1) int32 of 0 .. B - 1: the block table under which row b of a contiguous cache is page b. Kept, but for graph captures."""
    if _is_compiling():
        return torch.arange(batch, dtype=torch.int32, device=like.device)[:, None]
    key = batch if like.is_cpu else (batch, like.device)
    table = _rows.get(key)
    if table is None:
        # A copy from the host waits until the values are there, so any stream may read them later; not in a capture, whose memory is the graph's.
        if len(_rows) >= KEPT or capturing(like.device):
            return torch.arange(batch, dtype=torch.int32, device=like.device)[:, None]
        table = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None].to(like.device)
        if type(table) is Tensor:  # a fake one is of its mode only
            _rows[key] = table
    return table


def equal_lengths(length: int, batch: int, like: Tensor) -> Tensor:
    """(B,) int32, all `length`. Every layer of a step asks for the same ones; kept on CPU, where no stream can still be reading them."""
    if not like.is_cpu or _is_compiling():
        return torch.full((batch,), length, dtype=torch.int32, device=like.device)
    lens = _equal.get((length, batch))
    if lens is None:
        lens = torch.full((batch,), length, dtype=torch.int32, device="cpu")
        if len(_equal) >= KEPT:
            _equal.clear()
        if type(lens) is Tensor:
            _equal[length, batch] = lens
    return lens


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
def plain_kvcache(call: str, q: Tensor, k_cache: Tensor, k: Tensor | None, cache_seqlens: int | Tensor | None, block_table: Tensor | None,
                  cache_batch_idx: Tensor | None) -> tuple[Tensor, Tensor, int] | None:
    """(block_table, lengths, what they count) of a call whose other arguments attention_paged takes as they are, or None where there is more to
    translate.

    For calls with 4-D q, as many new keys or none, no left pads, and q turned as it is masked: what engines repeat for every layer.
    """
    if k is not None and (cache_seqlens is None or k.shape[1] != q.shape[1]):
        return None
    if cache_batch_idx is not None:
        if block_table is not None:
            return None
        block_table = cache_batch_idx.unsqueeze(1)
    elif block_table is None:
        batch = q.shape[0]
        block_table = _rows.get(batch) if q.is_cpu else None
        if block_table is None or batch > k_cache.shape[0] or _is_compiling():
            block_table = _own_rows(call, batch, k_cache)
    if type(cache_seqlens) is not Tensor and not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _from_host(call, cache_seqlens, 0 if k is None else q.shape[1], k_cache, block_table)
    return block_table, cache_seqlens, AFTER if k is None else BEFORE


def _own_rows(call: str, batch: int, k_cache: Tensor) -> Tensor:
    """The table under which sequence b lies in row b of a contiguous cache."""
    if batch > k_cache.shape[0]:
        raise ArgumentError(f"{call}: k_cache: wanted at least {batch} rows, one a sequence of q, got {k_cache.shape[0]}")
    return row_table(batch, k_cache)


def _from_host(call: str, length: int | None, new: int, k_cache: Tensor, table: Tensor) -> Tensor:
    """One length for all, None: the whole cache. Raises where it and `new` tokens are more than the cache has room for: lengths on the device are
    looked at under PORTATTN_CHECK=1 only."""
    batch, pages = table.shape
    room = pages * k_cache.shape[1] - new
    if length is None:
        length = room
    if length > room:
        raise ArgumentError(f"{call}: cache_seqlens: wanted at most {room}, as the block_table has {pages} pages of {k_cache.shape[1]} "
                            f"tokens a sequence and {new} are appended, got {length}")
    lens = _equal.get((length, batch)) if table.is_cpu else None
    return equal_lengths(length, batch, table) if lens is None or _is_compiling() else lens


def kvcache(call: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
            rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None,
            block_table: Tensor | None, rotary_interleaved: bool, causal: bool, window_size: tuple[int, int], cu_seqlens_q: Tensor | None = None,
            cu_seqlens_k_new: Tensor | None = None, rotary_seqlens: Tensor | None = None, k_scale: Tensor | None = None,
            v_scale: Tensor | None = None, append_first: bool = False) -> tuple:
    """flash-attn's kvcache arguments as attention_paged's: (q, k_cache, v_cache, block_table, lengths, k, v, rotary_cos, rotary_sin, and what
    the lengths count).

    What portattn has by itself is only named differently. The rest (left pads; k_new not of q's lengths; q turned at one position
    for all its rows, or at rotary_seqlens; all with append_first) is turned and appended here, and what is returned attends to it.
    """
    ragged = cu_seqlens_q is not None
    if block_table is None:
        batch = cu_seqlens_q.shape[0] - 1 if ragged else q.shape[0]
        block_table = _own_rows(call, batch, k_cache) if cache_batch_idx is None else cache_batch_idx.unsqueeze(1)
    elif cache_batch_idx is not None:
        raise ArgumentError(f"{call}: cache_batch_idx: wanted None together with a block table, which says where each sequence lies")

    if k is None:
        if v is not None or rotary_cos is not None:
            name = "v" if v is not None else "rotary_cos"
            raise ArgumentError(f"{call}: {name}: wanted together with k to append, as flash-attn does, got k=None")
        if not isinstance(cache_seqlens, Tensor):
            cache_seqlens = _from_host(call, cache_seqlens, 0, k_cache, block_table)
        if cache_leftpad is None:
            return q, k_cache, v_cache, block_table, cache_seqlens, None, None, None, None, AFTER
        return *_skipped(q, k_cache, v_cache, block_table, cache_seqlens, cache_leftpad), None, None, None, None, AFTER

    if cache_seqlens is None:
        raise ArgumentError(f"{call}: cache_seqlens: wanted the lengths before the append of k and v, got None")
    if cu_seqlens_k_new is None:
        new, alike = k.shape[1], not ragged and k.shape[1] == q.shape[1]
    else:
        new, alike = 0, cu_seqlens_k_new is cu_seqlens_q  # how many, the device knows
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _from_host(call, cache_seqlens, new, k_cache, block_table)
    # flash-attn turns every row of q at cache_seqlens unless the mask depends on the position.
    together = rotary_cos is not None and not causal and window_size == ANY and (ragged or q.shape[1] != 1)
    if alike and not together and cache_leftpad is None and rotary_seqlens is None and not append_first:
        return q, k_cache, v_cache, block_table, cache_seqlens, k, v, rotary_cos, rotary_sin, BEFORE

    start = cache_seqlens
    lens = plus(start, new) if cu_seqlens_k_new is None else start + lengths(cu_seqlens_k_new)
    if rotary_cos is not None:
        at = start if rotary_seqlens is None else rotary_seqlens
        q = rotate(q, _positions(q, at, cu_seqlens_q, not together), rotary_cos, rotary_sin, rotary_interleaved)
        k = rotate(k, _positions(k, at, cu_seqlens_k_new, True), rotary_cos, rotary_sin, rotary_interleaved)
    _append(k, v, k_cache, v_cache, block_table, start, cu_seqlens_k_new, k_scale, v_scale)
    if cache_leftpad is None:
        return q, k_cache, v_cache, block_table, lens, None, None, None, None, AFTER
    return *_skipped(q, k_cache, v_cache, block_table, lens, cache_leftpad), None, None, None, None, AFTER


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


def single_token_pages(k_cache: Tensor, v_cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as pages of one token, and the table of their slots. Caches whose pages do not follow each other in memory are copied for it."""
    page_size = k_cache.shape[1]
    slots = table[..., None].long() * page_size + torch.arange(page_size, device=table.device)
    single = lambda cache: cache.reshape(-1, 1, *cache.shape[2:])
    return single(k_cache), single(v_cache), slots.flatten(1).int()


def _skipped(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, leftpad: Tensor) -> tuple[Tensor, ...]:
    """(q, the caches as pages of one token, a table that starts at each sequence's left pad, the lengths from there)."""
    k_cache, v_cache, slots = single_token_pages(k_cache, v_cache, table)
    width = slots.shape[1]
    position = (leftpad[:, None].long() + torch.arange(width, device=table.device)).clamp(0, max(width - 1, 0))
    return q, k_cache, v_cache, torch.gather(slots, 1, position), lens - leftpad
