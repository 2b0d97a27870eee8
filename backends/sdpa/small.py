"""Problems of at most a few thousand scores on CPU, where the number of torch calls is the cost: all scores at once.

Masks and distances follow from lengths and window alone, so they are kept.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import arith
from .tiled import INF, Rules

MOST_SCORES = 1 << 14  # batch x heads x Sq x Sk
_ZERO = torch.zeros(1, dtype=torch.float32, device="cpu")
_LEAST = torch.finfo(torch.float32).min


@functools.lru_cache(maxsize=64)
def hidden(sq: int, sk: int, left: int, right: int) -> tuple[Tensor | None, bool]:
    """What each row must not see, bool (Sq, Sk) or None, and whether some row sees nothing."""
    away = _away(sq, sk)
    mask = None
    if right >= 0:
        mask = away < -right
    if left >= 0:
        mask = away > left if mask is None else mask | (away > left)
    if mask is None or not bool(mask.any()):
        return None, sk == 0
    return mask, bool(mask.all(-1).any())


def _away(sq: int, sk: int) -> Tensor:
    return torch.arange(sk - sq, sk, device="cpu")[:, None] - torch.arange(sk, device="cpu")


@functools.lru_cache(maxsize=64)
def far(sq: int, sk: int) -> Tensor:
    """|position - key|, float32 (Sq, Sk)."""
    return _away(sq, sk).abs().float()


def attend(q: Tensor, k: Tensor, v: Tensor, rules: Rules, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """out (B, Sq, Hq, Dv) of q's dtype, contiguous, and lse (B, Sq, Hq); k, v (B, Sk, Hkv, D|Dv), no length 0."""
    scale, left, right, softcap, bias, slopes, sinks = rules
    before = v.shape[1] - q.shape[1] - left
    if left >= 0 and before > 0:  # keys that no row sees: what they hold must not matter. Positions count from the end
        k, v, bias = k[:, before:], v[:, before:], bias if bias is None else bias[..., before:]
    (batch, sq, hq, dim), (_, sk, heads, dim_v) = q.shape, v.shape
    dtype = q.dtype
    if dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    units, group = batch * heads, hq // heads
    rows = q.view(batch, sq, heads, group, dim).permute(0, 2, 3, 1, 4).reshape(units, group * sq, dim)
    kt = k.permute(0, 2, 3, 1).reshape(units, dim, sk)
    alpha = scale / softcap if softcap else scale
    reduced = arith.reduced("cpu")
    apart = reduced or alpha == 0  # as a factor of the product, 0 would keep BLAS from looking at NaN
    s = arith.product(rows, kt).mul_(alpha) if apart else torch.baddbmm(_ZERO, rows, kt, beta=0, alpha=alpha)
    s = s.view(batch, hq, sq, sk)
    if softcap:
        s.tanh_().mul_(softcap)
    mask, empty = hidden(sq, sk, left, right)
    if slopes is not None:
        s.addcmul_(slopes.view(-1, hq, 1, 1), far(sq, sk), value=-1)
    if bias is not None:
        empty = True  # perhaps
        s = s.masked_fill_(bias.logical_not(), -INF) if bias.dtype == torch.bool else s.add_(bias)
    if mask is not None:
        s.masked_fill_(mask, -INF)
    lse = total = None
    if want_lse or empty or sinks is not None:
        top = s.amax(-1, keepdim=True)
        if sinks is not None:
            sinks = sinks.view(hq, 1, 1)
            top = torch.maximum(top, sinks)
        if empty:
            top = top.clamp_min_(_LEAST)  # -inf - _LEAST is -inf still, and gives 0
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total += (sinks - top).exp_()
        if want_lse:
            lse = total.log().add_(top)
        if empty:
            total = total.clamp_min_(0.5)  # it is 0, or at least 1
    else:
        p = s.softmax(-1)
    values = v.transpose(1, 2).reshape(units, sk, dim_v)
    p = p.view(units, group * sq, sk)
    out = (arith.product(p, values) if reduced else torch.bmm(p, values)).view(batch, hq, sq, dim_v)
    if total is not None:
        out /= total
    out = out.transpose(1, 2)
    out = out.contiguous() if dtype == torch.float32 else out.to(dtype, memory_format=torch.contiguous_format)
    return out, lse.squeeze(-1).transpose(1, 2).contiguous() if want_lse else None


__all__ = ["MOST_SCORES", "attend"]
