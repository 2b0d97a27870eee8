"""Tiles for lengths that lie on the device: nothing here is read back, and every shape follows from the caller's bounds.

Sequences are padded to a tile's rows and keys by gathers; which of them exist, and what they see, are masks computed
on the device. So a call can be captured in a graph and replayed with other lengths. Slots that must not be read are
never fetched: their positions are pointed at slot 0 before the gather, their scores masked and their values zeroed.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor

from . import arith, tiled
from .tiled import INF, Limits, Rules

Fetch = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor]]
INVARIANT_ROWS, INVARIANT_KEYS = 16, 512  # one tile for every request, whatever its batch: decode wastes 15 rows


class Ragged(NamedTuple):
    """Query rows (T, Hq, D), where each sequence starts, and its lengths: int64 (B,) on the device."""

    q: Tensor
    starts: Tensor
    q_lens: Tensor
    k_lens: Tensor
    max_q: int
    max_k: int
    square: bool = False  # every q_len equals its k_len


def rows_of(x: Tensor, starts: Tensor) -> Callable[[slice, Tensor, Tensor], Tensor]:
    """Fetches rows of a ragged (T, H, D) at positions (nb, n) of sequences b, where they exist."""

    def fetch(b: slice, at: Tensor, there: Tensor) -> Tensor:
        index = (starts[b, None] + at).masked_fill(there.logical_not(), 0)
        return x.index_select(0, index.flatten()).view(*at.shape, *x.shape[1:])

    return fetch


def attend(
    r: Ragged,
    heads: int,
    dim_v: int,
    fetch: Fetch,
    rules: Rules,
    out: Tensor,
    lse: Tensor | None,
    limit: Limits,
    invariant: bool = False,
) -> None:
    """Fills out (T, Hq, Dv) and lse (T, Hq); `fetch(b, positions, there)` gives k, v (nb, n, Hkv, D|Dv) of sequences b."""
    total, hq, dim = r.q.shape
    batch, group, device = r.starts.shape[0], hq // heads, r.q.device
    if out.numel() == 0 and (lse is None or lse.numel() == 0):
        return
    if batch == 0 or r.max_q == 0 or r.max_k == 0:
        tiled.fill_empty(out[None], lse[None] if lse is not None else None, rules.sinks, 0, 0)
        return
    left, right = rules.left, rules.right
    square = r.square and not invariant  # whose chunks would begin elsewhere than those of the same request in another batch
    rows = INVARIANT_ROWS if invariant else min(limit.rows, r.max_q)
    rows = max(1, min(rows, limit.scores // (heads * group)))
    span = r.max_k if left < 0 or right < 0 else min(r.max_k, left + right + rows)
    most = max(1, min(limit.scores // (heads * group * rows), limit.copies // (heads * (dim + dim_v) * 4)))
    keys = min(INVARIANT_KEYS, most) if invariant else tiled.even(span, most)
    nb_most = 1 if invariant else max(1, min(batch, most // keys))
    work = arith.work_dtype(device, r.q.dtype)
    tile = tiled.Tile(r.q, rules, work, 0, 0, True)
    fetch_q = rows_of(r.q, r.starts)
    # One row more than there is, for what padding computes. Rows of no sequence stay (0, -inf).
    kept = out.new_zeros(total + 1, hq, dim_v)
    kept_lse = out.new_full((total + 1, hq), -INF, dtype=torch.float32) if lse is not None else None
    sinks2 = rules.sinks.unflatten(0, (heads, group)) if rules.sinks is not None else None
    for b0 in range(0, batch, nb_most):
        b = slice(b0, min(b0 + nb_most, batch))
        nb = b.stop - b0
        q_len, k_len = r.q_lens[b, None], r.k_lens[b, None]
        for lo in range(0, r.max_q, rows):
            i = torch.arange(lo, lo + rows, device=device).expand(nb, rows)
            exists = i < q_len
            place = i if square else i + (k_len - q_len)
            folded = tile.fold(fetch_q(b, i, exists).unflatten(2, (heads, group)))
            shape = (nb, heads, group, rows)
            first, k0, k1 = None, 0, r.max_k
            if left >= 0 and right >= 0 and not square:
                first, k1 = (place[:, :1] - left).clamp(min=0), span  # each sequence begins elsewhere
            elif square:
                k0, k1 = tiled.visible_keys(lo, lo + rows, 0, r.max_k, left, right)
            state = None
            for c0 in range(k0, max(k1, k0 + 1), keys):
                n = keys if invariant else min(keys, max(k1, k0 + 1) - c0)
                at = torch.arange(c0, c0 + n, device=device).expand(nb, n)
                at = at if first is None else at + first
                there = at < k_len
                if left >= 0:
                    there = there & (at >= place[:, :1] - left)  # no row of the tile sees those before: they may hold anything
                k, v = fetch(b, at, there)
                v = v.masked_fill(there.logical_not()[:, :, None, None], 0)
                sink = sinks2 if c0 == k0 else None
                whole, part = tile.scores5(folded, tiled.copy_heads(k, work).transpose(1, 2), shape, sink)
                seen = there[:, None, :]
                if right >= 0:
                    seen = seen & (at[:, None, :] <= place[:, :, None] + right)
                if left >= 0:
                    seen = seen & (at[:, None, :] >= place[:, :, None] - left)
                if rules.slopes is not None:
                    far = tiled.distance(place, at)[:, None, None]
                    part.sub_(tiled.slopes_part(rules.slopes, b, slice(0, heads), heads) * far)
                part.masked_fill_(seen.logical_not()[:, None, None], -INF)
                got = tiled.settle(tile.closed(whole, part, sink), tiled.copy_heads(v, work), True, True, False)
                state = got if state is None else tiled.merge(*state, *got)
            to = (r.starts[b, None] + i).masked_fill(exists.logical_not(), total).flatten()
            kept.index_put_(
                (to,), state[0].view(*shape, dim_v).permute(0, 3, 1, 2, 4).reshape(nb * rows, hq, dim_v).to(kept.dtype)
            )
            if kept_lse is not None:
                kept_lse.index_put_((to,), state[1].view(shape).permute(0, 3, 1, 2).reshape(nb * rows, hq))
    out.copy_(kept[:total])
    if lse is not None:
        lse.copy_(kept_lse[:total])


__all__ = ["Ragged", "attend", "rows_of"]
