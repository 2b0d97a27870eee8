"""Exact attention in plain torch on tiles of scores: every feature, memory O(N), any device.

Query heads that share a key head are folded into the rows, so a tile is two batched matmuls around torch's one-pass
softmax. Keys and values are copied once, head-major and in the working dtype. A tile normally spans all visible keys
of its rows; where that would be too large, key chunks are computed apart and merged by their lse.

Lengths are known on the host here (dense tensors; one sequence of a ragged batch on CPU): rows and keys that the mask
hides wholly are never computed, and only the corners of a tile are masked. lengths.py serves lengths on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import arith, holes

INF = float("inf")
FEW_ROWS = 64  # query tokens x group; so few do not pay for a copy of K and V
MOST_KEYS = 1 << 15  # a tile: torch adds up a row of probabilities in float32, one after the other in each lane of a vector


class Rules(NamedTuple):
    """What becomes of q.k: C-ORDER of the contract."""

    scale: float
    left: int = -1  # keys before the position that are visible; -1: all
    right: int = -1  # keys after it; 0 is causal
    softcap: float = 0.0
    bias: Tensor | None = None  # 4-D, broadcastable to (B, Hq, Sq, Sk); bool or float
    slopes: Tensor | None = None  # float32 (Hq,) or (B, Hq)
    sinks: Tensor | None = None  # (Hq,)


class Limits(NamedTuple):
    """Sizes that bound a tile: measured defaults for a device, lowered in tests."""

    rows: int  # query tokens a tile
    scores: int  # elements of a tile of scores
    copies: int  # bytes of the copies of K and V


def limits(device: torch.device) -> Limits:
    """64 query tokens beat 128 and 256 on CPU at every length; 2 M scores (8 MB) stay in its last cache level."""
    kind = holes.kind(device)
    ceiling = holes.score_limit(kind)
    if kind == "cpu":
        threads = max(torch.get_num_threads(), 2)
        return Limits(64, min(ceiling, 1 << 24, threads << 20), 1 << 25)
    return Limits(128, min(ceiling, 1 << 25), 1 << 28)


class Cut(NamedTuple):
    """How a problem is cut: sequences, key heads, query tokens and keys a tile."""

    batch: int
    heads: int
    rows: int
    keys: int


@functools.lru_cache(maxsize=4096)
def cut(batch: int, sq: int, keys: int, group: int, heads: int, dims: int, limit: Limits) -> Cut:
    """The tiles for `keys` visible at once to `limit.rows` rows; `dims` is D + Dv."""
    keys = even(keys, MOST_KEYS)
    rows = max(1, min(sq, limit.rows, limit.scores // (group * keys)))
    keys = max(1, min(keys, limit.scores // (group * rows)))
    units = max(1, min(batch * heads, limit.scores // (group * rows * keys), limit.copies // (keys * dims * 4)))
    if units >= heads:
        return Cut(units // heads, heads, rows, keys)
    return Cut(1, -(-heads // -(-heads // units)), rows, keys)  # even parts


def even(n: int, most: int) -> int:
    """The size of the fewest equal parts of n, none above `most`."""
    return -(-n // -(-n // most))


# ------------------------------------------------------------------ masks and scores
def visible_rows(sq: int, sk: int, offset: int, left: int, right: int) -> tuple[int, int]:
    """The range of rows that see at least one key by their position, i + offset."""
    if sk == 0:
        return 0, 0
    first = max(0, -offset - right) if right >= 0 else 0
    last = min(sq, sk + left - offset) if left >= 0 else sq
    return (first, last) if first < last else (0, 0)


def visible_keys(lo: int, hi: int, offset: int, sk: int, left: int, right: int) -> tuple[int, int]:
    """The range of keys that rows lo..hi see together."""
    first = max(0, lo + offset - left) if left >= 0 else 0
    last = min(sk, hi + offset + right) if right >= 0 else sk
    return first, last


def _corner(rows: int, width: int, diagonal: int, upper: bool, device: torch.device) -> Tensor:
    ones = torch.ones(rows, width, dtype=torch.bool, device=device)
    return ones.triu(diagonal) if upper else ones.tril(diagonal)


_kept_corner = functools.lru_cache(maxsize=256)(_corner)  # CPU only: memory made during a graph capture belongs to its graph


def hide(scores: Tensor, lo: int, hi: int, c0: int, c1: int, offset: int, left: int, right: int) -> None:
    """Fills what rows lo..hi must not see of keys c0..c1 with -inf; scores (..., rows, keys). Touches only the corners."""
    make = _kept_corner if scores.device.type == "cpu" else _corner
    if right >= 0:
        first = max(c0, lo + offset + right + 1)
        if first < c1:
            mask = make(hi - lo, c1 - first, lo + offset + right + 1 - first, True, scores.device)
            scores[..., first - c0 :].masked_fill_(mask, -INF)
    if left >= 0:
        last = min(c1, hi - 1 + offset - left)
        if last > c0:
            mask = make(hi - lo, last - c0, lo + offset - left - c0 - 1, False, scores.device)
            scores[..., : last - c0].masked_fill_(mask, -INF)


def distance(positions: Tensor, keys: Tensor) -> Tensor:
    """float32 |position - key| of (..., rows) and (..., keys)."""
    return (positions.unsqueeze(-1) - keys.unsqueeze(-2)).abs().float()


def add_bias(scores: Tensor, bias: Tensor, b: slice, h: slice, rows: slice, keys: slice) -> None:
    """Adds a slice of the bias, or hides by it; scores (nb, nh, G, rows, keys), h counts key heads."""
    part = bias_part(bias, b, h, rows, keys, scores.shape[2])
    if part.dtype == torch.bool:
        scores.masked_fill_(part.logical_not(), -INF)
    else:
        scores.add_(part)


def bias_part(bias: Tensor, b: slice, h: slice, rows: slice, keys: slice, group: int) -> Tensor:
    """The 5-D view of the bias that belongs to a tile, still broadcast where the bias is."""
    pick = lambda axis, s: s if bias.shape[axis] > 1 else slice(None)
    part = bias[pick(0, b), pick(1, slice(h.start * group, h.stop * group)), pick(2, rows), pick(3, keys)]
    return part.unflatten(1, (-1, group)) if bias.shape[1] > 1 else part.unsqueeze(1)


def slopes_part(slopes: Tensor, b: slice, h: slice, heads: int) -> Tensor:
    """(nb or 1, nh, G, 1, 1) of (Hq,) or (B, Hq)."""
    per = slopes.unflatten(-1, (heads, -1))
    return per[None, h, :, None, None] if slopes.dim() == 1 else per[b, h, :, None, None]


# ------------------------------------------------------------------ one tile
def settle(scores: Tensor, v: Tensor, check: bool, want_lse: bool, in_place: bool) -> tuple[Tensor, Tensor | None]:
    """Softmax over keys and the product with v (U, n, Dv): out (U, M, Dv) and lse (U, M, 1).

    `scores` is (U, M, n) or, with a sink as the last column, (U, M, n + 1). `check` finds rows that see nothing, by
    their scores: all -inf (NaN is no such row, and stays NaN).
    """
    top = scores.amax(-1, keepdim=True).float() if check or want_lse else None
    # In place on CPU: a fresh tile costs page faults. The kernel reads each value of a row before it writes it.
    probs = torch.softmax(scores, -1, out=scores) if in_place else scores.softmax(-1)
    lse = top - probs.amax(-1, keepdim=True).log() if want_lse else None  # the largest probability is exp(top - lse)
    probs = probs[..., : v.shape[1]]
    empty = top == -INF if check else None
    if check and in_place:  # on CPU; such a row is NaN now, and a product may hand that on: cpu-amx-nan-rows of holes.py
        probs.masked_fill_(empty, 0.0)
    nan = probs[..., :1].isnan() if in_place and v.dtype == torch.bfloat16 and arith.cpu_has_amx() else None  # softmax makes rows NaN as a whole
    if nan is not None and bool(nan.any()):
        probs.masked_fill_(nan, 0.0)
    else:
        nan = None
    out = arith.product(probs if probs.dtype == v.dtype else probs.to(v.dtype), v)
    if nan is not None:
        out = out.masked_fill(nan, torch.nan)
    if check:
        out = out.masked_fill(empty, 0.0)
        if want_lse:
            lse = lse.masked_fill(empty, -INF)
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The state over both sets of keys: out (..., Dv), lse (..., 1); an empty state changes nothing."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == -INF, 0.0)
    return out * (lse - base).exp() + more * (more_lse - base).exp(), total


class Tile:
    """Buffers and the steps from rows and keys to scores, for one working dtype; made once a call."""

    def __init__(self, like: Tensor, rules: Rules, work: torch.dtype, scores: int, rows: int, portable: bool):
        self.rules, self.work, self.cpu = rules, work, not portable
        self.alpha = rules.scale / rules.softcap if rules.softcap else rules.scale
        if self.cpu:
            self.rows = like.new_empty(rows, dtype=work)
            self.scores = like.new_empty(scores, dtype=torch.float32)

    def fold(self, q: Tensor) -> Tensor:
        """q (nb, r, nh, G, D) as (nb * nh, G * r, D) in the working dtype."""
        nb, r, nh, group, dim = q.shape
        q = q.permute(0, 2, 3, 1, 4)
        if not self.cpu:
            return q.to(self.work).reshape(nb * nh, group * r, dim)
        return self.rows[: q.numel()].view(q.shape).copy_(q).view(nb * nh, group * r, dim)

    def products(self, rows: Tensor, kt: Tensor, sink: bool) -> tuple[Tensor, Tensor]:
        """alpha * rows @ kt: the whole (U, M, n + sink) and its part (U, M, n) for the keys."""
        (units, m, _), n = rows.shape, kt.shape[-1]
        if not self.cpu:
            part = arith.product(rows, kt).mul_(self.alpha)
            return part, part
        whole = self.scores[: units * m * (n + sink)].view(units, m, n + sink)
        part = whole[..., :n] if sink else whole
        if self.alpha == 0 or arith.reduced("cpu"):  # a factor of 0 would keep BLAS from looking at NaN
            part.copy_(arith.product(rows, kt)).mul_(self.alpha)
        else:
            torch.baddbmm(part, rows, kt, beta=0, alpha=self.alpha, out=part)
        return whole, part

    def scores5(self, rows: Tensor, kt: Tensor, shape: tuple[int, int, int, int], sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores before alibi, bias and mask: (U, M, n + sink), and the keys' part as (nb, nh, G, r, n). `sink` is (nh, G)."""
        whole, part = self.products(rows, kt, sink is not None)
        part = part.view(*shape, kt.shape[-1])
        if self.rules.softcap:
            part.tanh_().mul_(self.rules.softcap)
        if sink is not None:
            column = sink[None, :, :, None, None]
            if self.cpu:
                whole.view(*shape, -1)[..., -1:].copy_(column)
        return whole, part

    def closed(self, whole: Tensor, part: Tensor, sink: Tensor | None) -> Tensor:
        """The scores to take the softmax of, once alibi, bias and mask are in: with the sink's column."""
        if sink is None or self.cpu:
            return whole
        column = sink.to(part.dtype)[None, :, :, None, None].expand(*part.shape[:-1], 1)
        return torch.cat([part, column], -1).view(whole.shape[0], whole.shape[1], -1)


def heads_of(x: Tensor, work: torch.dtype, few: bool) -> Tensor:
    """x (nb, n, nh, D) as (nb * nh, n, D) in the working dtype: a copy, but for `few` rows a view where one will do."""
    if few and x.shape[0] == 1 and x.dtype == work:
        return x[0].transpose(0, 1)
    return copy_heads(x, work)


def copy_heads(x: Tensor, work: torch.dtype) -> Tensor:
    """x (nb, n, nh, D) as contiguous (nb * nh, n, D) in the working dtype."""
    nb, n, nh, dim = x.shape
    return x.new_empty(nb, nh, n, dim, dtype=work).copy_(x.transpose(1, 2)).view(nb * nh, n, dim)


# ------------------------------------------------------------------ the whole
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    out: Tensor,
    lse: Tensor | None,
    limit: Limits | None = None,
    alone: bool = False,
    offset: int | None = None,
    portable: bool | None = None,
) -> None:
    """Fills out (B, Sq, Hq, Dv) and lse (B, Sq, Hq) float32; q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv).

    `alone` computes each sequence by itself, so that its bits do not depend on the batch. `offset` is row 0's position
    in k, Sk - Sq unless k is a part of the keys. `portable` keeps to operators that every device has (default: but on CPU).
    """
    (batch, sq, hq, dim), (_, sk, heads, dim_v) = q.shape, v.shape
    if out.numel() == 0 and (lse is None or lse.numel() == 0):
        return
    limit = limit or limits(q.device)
    portable = holes.kind(q.device) != "cpu" if portable is None else portable
    _, left, right, _, bias, slopes, sinks = rules
    offset = sk - sq if offset is None else offset
    first, last = visible_rows(sq, sk, offset, left, right)
    fill_empty(out, lse, sinks, first, last)
    if first == last:
        return
    group = hq // heads
    ka, kb = visible_keys(first, last, offset, sk, left, right)
    once = kb - ka
    if left >= 0 and right >= 0:
        once = min(once, left + right + min(limit.rows, last - first))
    c = cut(1 if alone else batch, last - first, once, group, heads, dim + dim_v, limit)
    step = even(last - first, c.rows) if last - first < 2 * c.rows else c.rows
    exact, work = arith.score_dtype(q.device, q.dtype), arith.work_dtype(q.device, q.dtype, lse is not None)
    tile = Tile(
        q,
        rules,
        exact,
        c.batch * c.heads * group * step * (c.keys + (sinks is not None)),
        c.batch * c.heads * group * step * dim,
        portable,
    )
    few = not portable and (last - first) * group <= FEW_ROWS and not alone  # a view's alignment changes how matmuls sum
    q5, out5 = q.unflatten(2, (heads, group)), out.unflatten(2, (heads, group))
    lse5 = lse.unflatten(2, (heads, group)) if lse is not None else None
    sinks2 = sinks.unflatten(0, (heads, group)) if sinks is not None else None
    row_numbers = key_numbers = None
    if slopes is not None:
        row_numbers = torch.arange(offset, offset + sq, device=q.device)
        key_numbers = torch.arange(sk, device=q.device)
    for b0 in range(0, batch, c.batch):
        b = slice(b0, min(b0 + c.batch, batch))
        for h0 in range(0, heads, c.heads):
            h = slice(h0, min(h0 + c.heads, heads))
            nb, nh = b.stop - b0, h.stop - h0
            kh, vh = (heads_of(x[b, ka:kb, h], kind, few) for x, kind in ((k, exact), (v, work)))
            for lo in range(first, last, step):
                hi = min(lo + step, last)
                k0, k1 = visible_keys(lo, hi, offset, sk, left, right)
                rows, shape = tile.fold(q5[b, lo:hi, h]), (nb, nh, group, hi - lo)
                chunked = k1 - k0 > c.keys
                state = None
                for c0 in range(k0, k1, c.keys):
                    c1 = min(c0 + c.keys, k1)
                    sink = sinks2[h] if sinks is not None and c0 == k0 else None
                    whole, part = tile.scores5(rows, kh[:, c0 - ka : c1 - ka].transpose(1, 2), shape, sink)
                    if slopes is not None:
                        _alibi(
                            not portable, part, slopes_part(slopes, b, h, heads), distance(row_numbers[lo:hi], key_numbers[c0:c1])
                        )
                    if bias is not None:
                        add_bias(part, bias, b, h, slice(lo, hi), slice(c0, c1))
                    hide(part, lo, hi, c0, c1, offset, left, right)
                    got = settle(
                        tile.closed(whole, part, sink),
                        vh[:, c0 - ka : c1 - ka],
                        bias is not None or chunked,
                        lse is not None or chunked,
                        not portable,
                    )
                    state = got if state is None else merge(*state, *got)
                out5[b, lo:hi, h].copy_(state[0].view(*shape, dim_v).permute(0, 3, 1, 2, 4))
                if lse is not None:
                    lse5[b, lo:hi, h].copy_(state[1].view(shape).permute(0, 3, 1, 2))


def _alibi(in_place: bool, scores: Tensor, slopes: Tensor, far: Tensor) -> None:
    if in_place:
        scores.addcmul_(slopes, far, value=-1)
    else:
        scores.sub_(slopes * far)


def fill_empty(out: Tensor, lse: Tensor | None, sinks: Tensor | None, first: int, last: int) -> None:
    """Rows outside first..last see no key: 0, and an lse of -inf or the sink."""
    for rows in (slice(0, first), slice(last, out.shape[1])):
        if rows.start < rows.stop:
            out[:, rows].zero_()
            if lse is not None:
                lse[:, rows].fill_(-INF) if sinks is None else lse[:, rows].copy_(sinks)


__all__ = ["Limits", "Rules", "attend", "limits"]
