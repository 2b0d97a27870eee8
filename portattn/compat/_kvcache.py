"""flash_attn_with_kvcache of FlashAttention 2 and 3 as attention_paged.

flash-attn's lengths count before an append, its rotary position of q depends on the mask, a cache may start at a left pad. What
attention_paged has by itself is only named differently; the rest is done here, on the device and without waiting for it.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ..api import _attention_paged, attention_paged, cache_append
from ..dialect import AFTER, BEFORE, ViewsOfLast, lengths, plus
from ..errors import ArgumentError, ArgumentTypeError
from ..recent import Recent
from ._translate import (
    ANY,
    ForwardOnly,
    equal_lengths,
    kept_rows,
    rotate,
    row_table,
    sequence_of,
    single_token_pages,
    wants_gradients,
    window,
)

CALL = "flash_attn_with_kvcache"
_recent = Recent()
_columns = ViewsOfLast(lambda rows: rows.unsqueeze(1))


def attend(lse: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
           rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None,
           cache_leftpad: Tensor | None, block_table: Tensor | None, softmax_scale: float | None, causal: bool, window_size: Any,
           softcap: float, rotary_interleaved: bool, num_splits: int, return_lse: bool, alibi_slopes: Tensor | None = None,
           k_scale: Tensor | None = None, v_scale: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
           max_seqlen_q: int | None = None, cu_seqlens_k_new: Tensor | None = None, rotary_seqlens: Tensor | None = None) -> Any:
    """out, or (out, lse of the form `lse`).

    What engines repeat for every layer needs no more than a table and lengths that are kept. Such a call is recognised as those
    of api.py are, and goes to what serves it without being translated again.
    """
    if window_size is not ANY:
        window_size = window(window_size)
    softcap = softcap if softcap > 0 else 0.0
    appends, turns = k is not None or v is not None, rotary_cos is not None or rotary_sin is not None
    on_device = isinstance(cache_seqlens, Tensor)
    options = (lse, appends, turns, on_device or type(cache_seqlens), cache_batch_idx is None, block_table is None, softmax_scale,
               not causal, window_size, softcap, not rotary_interleaved, num_splits, not return_lse, alibi_slopes is None,
               k_scale is None, v_scale is None, cu_seqlens_q is None, max_seqlen_q, cu_seqlens_k_new is None,
               softmax_scale.__class__, softcap.__class__, num_splits.__class__, max_seqlen_q.__class__)
    tensors = (q, k_cache, v_cache)
    if on_device:
        tensors += (cache_seqlens,)
    if appends:
        tensors += (k, v)
    if turns:
        tensors += (rotary_cos, rotary_sin)
    if block_table is not None:
        tensors += (block_table,)
    elif cache_batch_idx is not None:
        tensors += (cache_batch_idx,)
    if cu_seqlens_q is not None:
        tensors += (cu_seqlens_q,)
    if alibi_slopes is not None or k_scale is not None or v_scale is not None:
        tensors += tuple(x for x in (alibi_slopes, k_scale, v_scale) if x is not None)
    known = None
    if cache_leftpad is None and rotary_seqlens is None and (cu_seqlens_k_new is None or cu_seqlens_k_new is cu_seqlens_q):
        known = _recent.find(options, tensors)
    if known is not None:
        bound, batch, room = known
        if cache_batch_idx is not None:
            table = _columns.of(cache_batch_idx)
        else:
            table = kept_rows(batch, q) if block_table is None else block_table
        lens = cache_seqlens
        if not on_device:
            length = room if lens is None else lens
            lens = equal_lengths(length, batch, q) if length <= room else None
        if table is not None and lens is not None:
            return _attention_paged(bound, q, k_cache, v_cache, table, lens, cu_seqlens_q, k, v, rotary_cos, rotary_sin, k_scale,
                                    v_scale, alibi_slopes)
    if wants_gradients(q, k_cache, v_cache, k, v):
        return ForwardOnly.apply(CALL, lambda q, k_cache, v_cache, k, v: attend(
            lse, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
            softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits, return_lse, alibi_slopes, k_scale, v_scale,
            cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new, rotary_seqlens), q, k_cache, v_cache, k, v)
    causal = bool(causal)
    given = q, k_cache, v_cache, k
    q, k_cache, v_cache, table, lens, k, v, rotary_cos, rotary_sin, counting = translated(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        rotary_interleaved, causal, window_size, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, k_scale, v_scale)
    found: list = []
    got = attention_paged(q, k_cache, v_cache, table, lens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, k=k, v=v,
                          rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=bool(rotary_interleaved),
                          softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                          alibi_slopes=alibi_slopes, num_splits=num_splits, k_scale=k_scale, v_scale=v_scale,
                          return_lse=bool(return_lse), _counting=counting, _lse=lse, _found=found)
    if found and all(a is b for a, b in zip(given, (q, k_cache, v_cache, k))):
        _recent.keep(options, tensors, (found[0], table.shape[0], _room(k_cache, table, k, cu_seqlens_k_new)), found[0])
    return got


def _own_rows(batch: int, k_cache: Tensor) -> Tensor:
    """The table under which sequence b lies in row b of a contiguous cache."""
    if batch > k_cache.shape[0]:
        raise ArgumentError(f"{CALL}: k_cache: wanted at least {batch} rows, one a sequence of q, got {k_cache.shape[0]}")
    return row_table(batch, k_cache)


def _room(k_cache: Tensor, table: Tensor, k: Tensor | None, cu_seqlens_k_new: Tensor | None) -> int:
    """The longest sequence that the table has pages for, before k is appended. Of ragged k, the device knows how many."""
    return table.shape[1] * k_cache.shape[1] - (0 if k is None or cu_seqlens_k_new is not None else k.shape[1])


def _from_host(length: int | None, room: int, k_cache: Tensor, table: Tensor) -> Tensor:
    """One length for all, None: the whole cache. Raises above `room`; PORTATTN_CHECK=1 checks lengths on the device."""
    if length is None:
        length = room
    elif not isinstance(length, (numbers.Integral, torch.SymInt)):
        raise ArgumentTypeError(f"{CALL}: cache_seqlens: wanted an int, a tensor of lengths or None, got {length!r}")
    batch, pages = table.shape
    if length > room:
        page_size = k_cache.shape[1]
        raise ArgumentError(f"{CALL}: cache_seqlens: wanted at most {room}, as the block_table has {pages} pages of {page_size} "
                            f"tokens a sequence and {pages * page_size - room} are appended, got {length}")
    return equal_lengths(length, batch, table)


def translated(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
               rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None,
               cache_leftpad: Tensor | None, block_table: Tensor | None, rotary_interleaved: bool, causal: bool,
               window_size: tuple[int, int], cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
               rotary_seqlens: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
               append_first: bool = False) -> tuple:
    """flash-attn's arguments as attention_paged's: (q, k_cache, v_cache, block_table, lengths, k, v, rotary_cos, rotary_sin, what
    the lengths count).

    What portattn has by itself is only named differently. The rest (left pads; k_new not of q's lengths; q turned at one position
    for all its rows, or at rotary_seqlens; all with append_first) is turned and appended here; what is returned attends to it.
    """
    ragged = cu_seqlens_q is not None
    if block_table is None:
        batch = cu_seqlens_q.shape[0] - 1 if ragged else q.shape[0]
        block_table = _own_rows(batch, k_cache) if cache_batch_idx is None else cache_batch_idx.unsqueeze(1)
    elif cache_batch_idx is not None:
        raise ArgumentError(f"{CALL}: cache_batch_idx: wanted None together with a block table, which says where each sequence "
                            "lies")

    if k is None:
        if v is not None or rotary_cos is not None or rotary_sin is not None:
            name = "v" if v is not None else "rotary_cos" if rotary_cos is not None else "rotary_sin"
            raise ArgumentError(f"{CALL}: {name}: wanted together with k to append, as flash-attn does, got k=None")
        if not isinstance(cache_seqlens, Tensor):
            cache_seqlens = _from_host(cache_seqlens, _room(k_cache, block_table, None, None), k_cache, block_table)
        if cache_leftpad is None:
            return q, k_cache, v_cache, block_table, cache_seqlens, None, None, None, None, AFTER
        return *_skipped(q, k_cache, v_cache, block_table, cache_seqlens, cache_leftpad), None, None, None, None, AFTER

    if cache_seqlens is None:
        raise ArgumentError(f"{CALL}: cache_seqlens: wanted the lengths before the append of k and v, got None")
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = _from_host(cache_seqlens, _room(k_cache, block_table, k, cu_seqlens_k_new), k_cache, block_table)
    # flash-attn turns every row of q at cache_seqlens unless the mask depends on the position.
    together = rotary_cos is not None and not causal and window_size == ANY and (ragged or q.shape[1] != 1)
    alike = cu_seqlens_k_new is cu_seqlens_q if ragged or cu_seqlens_k_new is not None else k.shape[1] == q.shape[1]
    if alike and not together and cache_leftpad is None and rotary_seqlens is None and not append_first:
        return q, k_cache, v_cache, block_table, cache_seqlens, k, v, rotary_cos, rotary_sin, BEFORE

    # Rounded once, to the caches' dtype: cache_append itself rounds float32 to 8 bits.
    kinds = (torch.float32,) * 2 if k_cache.dtype.itemsize == 1 and k.dtype == v.dtype == q.dtype else (k.dtype, v.dtype)
    k, v, start = k.float(), v.float(), cache_seqlens
    lens = plus(start, k.shape[1]) if cu_seqlens_k_new is None else start + lengths(cu_seqlens_k_new)
    if rotary_cos is not None:
        at = start if rotary_seqlens is None else rotary_seqlens
        q = rotate(q, _positions(q, at, cu_seqlens_q, not together), rotary_cos, rotary_sin, rotary_interleaved)
        k = rotate(k, _positions(k, at, cu_seqlens_k_new, True), rotary_cos, rotary_sin, rotary_interleaved)
    _append(k, v, kinds, k_cache, v_cache, block_table, start, cu_seqlens_k_new, k_scale, v_scale)
    if cache_leftpad is None:
        return q, k_cache, v_cache, block_table, lens, None, None, None, None, AFTER
    return *_skipped(q, k_cache, v_cache, block_table, lens, cache_leftpad), None, None, None, None, AFTER


def _positions(x: Tensor, start: Tensor, cu_seqlens: Tensor | None, follow: bool) -> Tensor:
    """Rotary positions of x's rows: start of the sequence, plus the row's place in it if `follow`."""
    if cu_seqlens is None:
        place = torch.arange(x.shape[1], device=x.device) if follow else torch.zeros(x.shape[1], dtype=torch.int64,
                                                                                     device=x.device)
        return start[:, None] + place
    sequence, place = sequence_of(x.shape[0], cu_seqlens)
    return start[sequence] + place if follow else start[sequence]


def _append(k: Tensor, v: Tensor, kinds: tuple[torch.dtype, torch.dtype], k_cache: Tensor, v_cache: Tensor, table: Tensor,
            start: Tensor, cu_seqlens: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Writes k and v (float32, already turned), as tensors of these kinds, at `start`, `start` + 1, … of each sequence."""
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
    cache_append(_divided(k, k_scale, sequence).to(kinds[0]), _divided(v, v_scale, sequence).to(kinds[1]), k_cache, v_cache, slot)


def _divided(x: Tensor, scale: Tensor | None, sequence: Tensor) -> Tensor:
    """x (T, H, D) by a scale (), (H,) or (B, H)."""
    return x if scale is None else x / (scale[sequence] if scale.dim() == 2 else scale)[..., None]


def _skipped(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, leftpad: Tensor) -> tuple[Tensor, ...]:
    """(q, the caches as pages of one token, a table that starts at each sequence's left pad, the lengths from there)."""
    k_cache, v_cache, slots = single_token_pages(k_cache, v_cache, table)
    width = slots.shape[1]
    position = (leftpad[:, None].long() + torch.arange(width, device=table.device)).clamp(0, max(width - 1, 0))
    return q, k_cache, v_cache, torch.gather(slots, 1, position), lens - leftpad
