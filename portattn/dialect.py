"""What flash-attn's callers say otherwise: lengths that count before an append or are prefix sums, and an lse whose heads come first.

The calls of portattn.compat say so. An adapter with DIALECT = True reads such lengths and writes such an lse as it is; for the others `after` and
`heads_first` translate, on the device and without waiting for it: a tensor operation each, up to a quarter of a tiny call on CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .device import capturing

AFTER, BEFORE, PREFIX_SUMS = range(3)  # BEFORE: an append of as many tokens as q has; PREFIX_SUMS: (B + 1,)
KEPT = 1024  # small tensors that are asked for again and again; none that a graph or another stream may still read is let go
_is_compiling = torch.compiler.is_compiling
_counts: dict[Any, Tensor] = {}
_ends: tuple = (None, 0, 0, None, None)


def after(lens: Tensor, counting: int, q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """kv_lens (B,) of lengths that are counted otherwise."""
    if counting == PREFIX_SUMS:
        return lengths(lens)
    return plus(lens, q.shape[1]) if cu_seqlens_q is None else lens + lengths(cu_seqlens_q)


def heads_first(lse: Tensor) -> Tensor:
    """(..., S, H) to flash-attn's (..., H, S), contiguous: engines index it as such from their own kernels."""
    return lse.mT.contiguous()


def plus(lens: Tensor, n: int) -> Tensor:
    """lens + n; adding a kept tensor costs half of adding a Python number."""
    key = n if lens.is_cpu else (n, lens.device)  # hashing a device costs as much as the rest of a lookup
    count = _counts.get(key)
    if count is None:
        if len(_counts) >= KEPT or _is_compiling() or capturing(lens.device):
            return lens + n
        count = torch.tensor(n, dtype=torch.int32, device="cpu").to(lens.device)
        if type(count) is Tensor:  # a fake one is of its mode only
            _counts[key] = count
    return lens + count


def lengths(cu_seqlens: Tensor) -> Tensor:
    """(B,) from (B + 1,) prefix sums: one subtraction of two views, which are kept for the next layer's call with the same tensor."""
    global _ends
    if type(cu_seqlens) is not Tensor or _is_compiling():
        return cu_seqlens.diff()
    of, pointer, n, ends, starts = _ends
    if of is not cu_seqlens or pointer != cu_seqlens.data_ptr() or n != cu_seqlens.numel():  # the latter two: set_() and resize_()
        ends, starts = cu_seqlens[1:], cu_seqlens[:-1]
        _ends = (cu_seqlens, cu_seqlens.data_ptr(), cu_seqlens.numel(), ends, starts)
    return ends - starts
