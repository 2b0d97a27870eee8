"""Paged caches: lengths and tables on the host (CPU), or on the device (everything else).

On the host, each sequence's visible pages are gathered into buffers that a thread keeps, a few thousand tokens at a
time, so that what is gathered is still in the processor's cache when it is used; partial results are merged by their
lse. No slot past a length and no table entry past its page is touched. On the device, lengths.py does the work.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from . import append, arith, fused, holes, small, tiled
from .merging import merge_states
from .tiled import Rules

BIG_PAGE = 512  # tokens; larger pages are copied as far as they are in use, not gathered whole
KEPT_BYTES = 1 << 25  # of one gather buffer
FRESH = 1 << 14  # elements; memory so small comes without page faults, and a kept buffer costs more

_kept = threading.local()


def chunk_tokens() -> int:
    """Tokens gathered at a time: 1024 a thread, 4 MB of keys and values in bf16 with 8 heads of 128."""
    return 1024 * min(torch.get_num_threads(), 16)


def buffer(name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` elements of this thread's buffer, which grows up to KEPT_BYTES; beyond, fresh memory."""
    if numel * dtype.itemsize > KEPT_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    buffers = _kept.__dict__
    found = buffers.get((name, dtype))
    if found is None or found.numel() < numel:
        with torch.inference_mode(False):  # else later calls outside could not write into it
            found = buffers[name, dtype] = torch.empty(max(numel, 1 << 12), dtype=dtype, device="cpu")
    return found[:numel]


def gather(cache: Tensor, table: Tensor, first: int, last: int, name: str) -> Tensor:
    """Tokens first..last of nb sequences, (nb, last - first, Hkv, D): `cache` (N, P, Hkv, D), `table` (nb, M), on CPU.

    All sequences have these tokens. The result is a view of the cache, or lies in this thread's buffer.
    """
    size, heads, dim = cache.shape[1:]
    p0, p1 = first // size, -(-last // size)
    nb = table.shape[0]
    kind = cache.dtype
    if kind.itemsize == 1:
        cache = cache.view(torch.uint8)
    if size >= BIG_PAGE:
        ids = table[:, p0:p1].tolist()
        if nb == 1 and p1 - p0 == 1:
            found = cache[ids[0][0], first - p0 * size : last - p0 * size].unsqueeze(0)
        else:
            found = buffer(name, nb * (last - first) * heads * dim, cache.dtype).view(nb, last - first, heads, dim)
            for row, pages in zip(found, ids):
                for i, page in enumerate(pages):
                    lo, hi = max(first, (p0 + i) * size), min(last, (p0 + i + 1) * size)
                    row[lo - first : hi - first].copy_(cache[page, lo - (p0 + i) * size : hi - (p0 + i) * size])
        return found.view(kind) if kind.itemsize == 1 else found
    count = p1 - p0
    found = buffer(name, nb * count * size * heads * dim, cache.dtype).view(nb * count, size, heads, dim)
    torch.index_select(cache, 0, table[:, p0:p1].reshape(-1), out=found)
    found = found.view(nb, count * size, heads, dim)[:, first - p0 * size : last - p0 * size]
    return found.view(kind) if kind.itemsize == 1 else found


def decode(q: Tensor, call, n: int) -> tuple[Tensor, Tensor | None]:
    """out and lse to be reshaped to q's (B, 1, Hq, D) and (B, 1, Hq): one query token each over its first n keys.

    Few tokens: the shortest way from a table to the fused operator.
    """
    (batch, _, hq, dim), (_, size, heads, _) = q.shape, call.k.shape
    pages = -(-n // size)
    ids = call.block_table.flatten() if pages == call.block_table.shape[1] else call.block_table[:, :pages].reshape(-1)
    shape, strides = (batch, heads, n, dim), (pages * size * heads * dim, dim, heads * dim, 1)
    if ids.shape[0] * size * heads * dim <= FRESH:
        k, v = call.k.index_select(0, ids), call.v.index_select(0, ids)
    else:
        k, v = (
            torch.index_select(c, 0, ids, out=buffer(name, ids.shape[0] * size * heads * dim, c.dtype).view(-1, size, heads, dim))
            for c, name in ((call.k, "k"), (call.v, "v"))
        )
    k, v = k.as_strided(shape, strides), v.as_strided(shape, strides)
    if n < holes.least_keys():
        out, lse = small.attend(q, k.transpose(1, 2), v.transpose(1, 2), Rules(call.softmax_scale), call.return_lse)
        return out, lse
    q = q.view(batch, heads, hq // heads, dim)
    if call.return_lse:
        return fused.flash(q, k, v, call.softmax_scale)
    return F.scaled_dot_product_attention(q, k, v, scale=call.softmax_scale), None


def rescaled(x: Tensor, scale: Tensor | float | None, b: int, count: int, plain: torch.dtype) -> Tensor:
    """x (nb, n, Hkv, D) times its scale, in float32; x itself where it is q's dtype and has none. Sequences b .. b + count."""
    if scale is None:
        return x if x.dtype == plain else x.float()
    if isinstance(scale, Tensor):
        scale = scale[b : b + count, None, :, None] if scale.dim() == 2 else scale if scale.dim() == 0 else scale[:, None]
    return x.float() * scale


def attend_host(
    q: Tensor,
    starts: list[int],
    lens: list[int],
    call,
    rules: Rules,
    out: Tensor,
    lse: Tensor | None,
    fast: bool,
    state_alone: bool,
) -> None:
    """Fills out (T, Hq, Dv) and lse (T, Hq) for q (T, Hq, D); sequence b owns rows starts[b] .. starts[b + 1].

    `fast`: the fused operator may serve decodes.
    """
    table, cache = call.block_table, call.k
    (_, hq, dim), heads, dim_v = q.shape, cache.shape[2], call.v.shape[3]
    group, slopes = hq // heads, rules.slopes
    chunk = chunk_tokens()
    few = max(1, tiled.FEW_ROWS // group)
    left, bare = rules.left, rules._replace(sinks=None, slopes=None)
    b, batch, work = 0, len(lens), arith.work_dtype(q.device, q.dtype)
    while b < batch:
        lo, rows, n = starts[b], starts[b + 1] - starts[b], max(lens[b], 0)
        nb = 1
        # Neighbours of the same length share a call.
        if rows == 1 and fast and not state_alone and n <= chunk and (slopes is None or slopes.dim() == 1):
            most = min(chunk // max(n, 1), batch - b)
            while nb < most and starts[b + nb + 1] - starts[b + nb] == 1 and lens[b + nb] == lens[b]:
                nb += 1
        span = slice(lo, lo + rows * nb)
        part, part_lse = out[span], lse[span] if lse is not None else None
        first = max(0, n - rows - left) if left >= 0 else 0
        if rows == 0:
            pass
        elif n == 0 or first >= n:
            tiled.fill_empty(part[None], part_lse[None] if lse is not None else None, rules.sinks, 0, 0)
        else:
            mine = slopes if slopes is None or slopes.dim() == 1 else slopes[b : b + nb]
            chunked = rows <= few
            direct = fast and rows == 1
            step = chunk if chunked else n - first
            states = []
            q_part = q[span].view(nb, rows, hq, dim)
            if state_alone:
                q_part = q_part.clone()  # alignment changes how matmuls sum
            for c0 in range(first, n, step):
                c1 = min(c0 + step, n)
                fuse = direct and c1 - c0 >= holes.least_keys()
                k, v = (
                    rescaled(gather(c, table[b : b + nb], c0, c1, name), scale, b, nb, q.dtype)
                    for c, name, scale in ((call.k, "k", call.k_scale), (call.v, "v", call.v_scale))
                )
                if not fuse and chunked and k.dtype != work:
                    k, v = (
                        buffer(name, x.numel(), work).view(x.shape).copy_(x) for name, x in (("k in work", k), ("v in work", v))
                    )
                if fuse:
                    one = mine if mine is None or mine.dim() == 1 else mine[0]
                    states.append(fused.decode(q_part[:, 0], k, v, rules.scale, one, n - 1 - c0))
                    continue
                if c0 == first and c1 == n and (rules.sinks is None or not chunked):
                    tiled.attend(
                        q_part,
                        k,
                        v,
                        rules._replace(slopes=mine),
                        part.view(nb, rows, hq, dim_v),
                        part_lse.view(nb, rows, hq) if lse is not None else None,
                        None,
                        state_alone,
                        n - rows - c0,
                    )
                    continue
                piece, piece_lse = (
                    q.new_empty(nb, rows, hq, dim_v, dtype=torch.float32),
                    q.new_empty(nb, rows, hq, dtype=torch.float32),
                )
                tiled.attend(q_part, k, v, bare._replace(slopes=mine), piece, piece_lse, None, state_alone, n - rows - c0)
                states.append((piece.view(nb * rows, hq, dim_v), piece_lse.view(nb * rows, hq)))
            if len(states) == 1 and rules.sinks is None:
                part.copy_(states[0][0])
                if lse is not None:
                    part_lse.copy_(states[0][1])
            elif states:
                whole_out, whole_lse = merge_states(
                    torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states]), rules.sinks
                )
                part.copy_(whole_out)
                if lse is not None:
                    part_lse.copy_(whole_lse)
        b += nb


def fetch_pages(call, plain: torch.dtype):
    """What lengths.attend calls for keys of a paged cache."""

    def take(cache: Tensor, page: Tensor, place: Tensor, scale: Tensor | float | None, b: slice) -> Tensor:
        kind = cache.dtype
        if kind.itemsize == 1:
            x = cache.view(torch.uint8)[page, place].view(kind)
        else:
            x = cache[page, place]
        return rescaled(x, scale, b.start, b.stop - b.start, plain)

    def fetch(b: slice, at: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        size = call.k.shape[1]
        entry = (at // size).clamp(max=call.block_table.shape[1] - 1)
        gone = there.logical_not()
        page = call.block_table[b].to(torch.int64).gather(1, entry).clamp(0, call.k.shape[0] - 1)
        place = (at % size).masked_fill(gone, 0)
        return take(call.k, page, place, call.k_scale, b), take(call.v, page, place, call.v_scale, b)

    return fetch


def positions(call, starts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of the `rows` query tokens, on the device: its sequence, its position, and whether it belongs to one. int64."""
    t = torch.arange(rows, device=call.q.device)
    if call.cu_seqlens_q is None:
        b = t // call.q.shape[1]
    else:
        b = (t[:, None] >= starts[None, 1:]).sum(1)  # sequences that end at or before t; (T, B) booleans
    real = b < starts.shape[0] - 1
    b = b.clamp(max=starts.shape[0] - 2)
    lens = call.kv_lens.to(torch.int64).clamp(min=0)
    position = t - starts.index_select(0, b + 1) + lens.index_select(0, b)
    return b, position, real


def append_and_turn(call, starts: Tensor, host: bool) -> Tensor:
    """Writes k_new and v_new, turned, into the caches; returns q as (T, Hq, D), turned if there are angles."""
    q = call.q.flatten(0, 1) if call.cu_seqlens_q is None else call.q
    rows = q.shape[0]
    if rows == 0 or starts.shape[0] == 1:
        return q
    b, position, real = positions(call, starts, rows)
    if call.k_new is not None and call.k.numel() + call.v.numel() and call.block_table.shape[1]:
        k_new, v_new = (x.flatten(0, 1) if call.cu_seqlens_q is None else x for x in (call.k_new, call.v_new))
        if call.rotary_cos is not None:
            k_new = append.rotate(k_new, position, call.rotary_cos, call.rotary_sin, call.rotary_interleaved)
        size, width = call.k.shape[1], call.block_table.shape[1]
        write = real & (position >= 0) & (position < width * size)
        at = position.masked_fill(write.logical_not(), 0)
        page = call.block_table.to(torch.int64).flatten().index_select(0, b * width + at // size)
        write = write & (page >= 0) & (page < call.k.shape[0])  # -1 would be the last page
        page = page.masked_fill(write.logical_not(), 0)
        for new, cache, scale in ((k_new, call.k, call.k_scale), (v_new, call.v, call.v_scale)):
            append.store(append.scaled(new, scale, cache.dtype, b), cache, page, at % size, write, host)
    if call.rotary_cos is not None:
        q = append.rotate(q, position, call.rotary_cos, call.rotary_sin, call.rotary_interleaved).to(q.dtype)
    return q


__all__ = ["append_and_turn", "attend_host", "fetch_pages", "gather"]
