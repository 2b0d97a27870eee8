"""What flash-attn's callers say otherwise: lengths that count before an append or are prefix sums, and an lse whose heads come
first.

The calls of portattn.compat say so. An adapter with DIALECT = True reads such lengths and writes such an lse as it is, and finds
q, k and v within one tensor; for the others `after` and `lse_as` translate, on the device and without waiting for it, and q, k
and v are views: a tensor operation each, up to a quarter of a tiny call on CPU.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
from torch import Tensor

from .device import capturing
from .problem import Call

AFTER, BEFORE, PREFIX_SUMS = range(3)  # BEFORE: an append of as many tokens as q has; PREFIX_SUMS: (B + 1,)
OURS, HEADS_FIRST, FLASH_ATTN_2 = range(3)  # lse (..., S, H); (..., H, S); (..., H, S) with +inf where a row sees no key
KEPT = 1024  # small tensors that are asked for again and again; none that a graph or another stream may still read is let go
_INF, _NAN = float("inf"), float("nan")
_is_compiling = torch.compiler.is_compiling
_counts: dict[Any, Tensor] = {}


def after(lens: Tensor, counting: int, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """kv_lens (B,) of lengths that are counted otherwise."""
    if counting == PREFIX_SUMS:
        return lengths(lens)
    return plus(lens, q.shape[1]) if cu_seqlens_q is None else lens + lengths(cu_seqlens_q)


def lse_as(form: int, lse: Tensor) -> Tensor:
    """Our lse, which is given up, in another form; contiguous: engines index it as such from their own kernels."""
    lse = lse.mT.contiguous()
    if form == FLASH_ATTN_2:
        lse = lse.nan_to_num(_NAN, _INF, _INF) if lse.requires_grad else lse.nan_to_num_(_NAN, _INF, _INF)
    return lse


def lse_shape(call: Call) -> tuple[int, ...]:
    """The shape of the lse that a call asks for."""
    *lead, tokens, heads = call.q.shape[:-1]
    return (*lead, heads, tokens) if call.lse_form else (*lead, tokens, heads)


def plus(lens: Tensor, n: int) -> Tensor:
    """lens + n; adding a kept tensor costs half of adding a Python number."""
    if type(lens) is not Tensor:  # a fake one takes no real one beside it
        return lens + n
    key = n if lens.is_cpu else (n, lens.device)  # hashing a device costs as much as the rest of a lookup
    count = _counts.get(key)
    if count is None:
        if len(_counts) >= KEPT or _is_compiling() or capturing(lens.device):
            return lens + n
        count = torch.tensor(n, dtype=torch.int32, device="cpu").to(lens.device)
        if type(count) is Tensor:  # a fake one is of its mode only
            _counts[key] = count
    return lens + count


class ViewsOfLast:
    """`make` of the tensor that was asked for last, kept for the next layer's call with the same one: a view costs about a
    microsecond."""

    def __init__(self, make: Callable[[Tensor], Any]):
        self.make, self.last = make, (None, 0, 0, None)

    def of(self, x: Tensor) -> Any:
        last, pointer, n, views = self.last
        if last is not x or pointer != x.data_ptr() or n != x.numel():  # the latter two: set_() and resize_()
            views = self.make(x)
            with contextlib.suppress(RuntimeError):  # a batch of vmap's has no address
                self.last = (x, x.data_ptr(), x.numel(), views)
        return views


_ends = ViewsOfLast(lambda cu_seqlens: (cu_seqlens[1:], cu_seqlens[:-1]))


def lengths(cu_seqlens: Tensor) -> Tensor:
    """(B,) from (B + 1,) prefix sums: one subtraction of two views."""
    if type(cu_seqlens) is not Tensor or _is_compiling():
        return cu_seqlens.diff()
    ends, starts = _ends.of(cu_seqlens)
    return ends - starts
