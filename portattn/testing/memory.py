"""Tensors over a large address range that hold little memory, for tests of 64-bit offsets."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from .target import Declined

_NORESERVE = {"linux": 0x4000, "darwin": 0x0040}  # mmap.MAP_NORESERVE, named in Python 3.13 only


def sparse(elements: int, dtype: torch.dtype, device: str) -> Tensor:
    """A 1-D tensor whose memory is not touched: lazily committed on the CPU, really allocated on a GPU.

    Raises Declined where the system refuses.
    """
    size = elements * dtype.itemsize
    if torch.device(device).type == "cpu":
        flag = _NORESERVE.get(sys.platform)
        if flag is None:
            raise Declined("address_space", "lazily committed memory", sys.platform)
        try:
            area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flag)
        except (OSError, ValueError, OverflowError) as error:
            raise Declined("address_space", f"{size >> 30} GiB of address space", str(error)) from None
        return torch.frombuffer(area, dtype=dtype)
    try:
        return torch.empty(elements, dtype=dtype, device=device)
    except RuntimeError as error:
        raise Declined("device_memory", f"{size >> 30} GiB on {device}", str(error).splitlines()[0]) from None


def spread(x: Tensor, axis: int, stride: int, around: float = float("nan")) -> Tensor:
    """x as a view whose `axis` has this stride, its other axes contiguous, in the middle of a sparse buffer.

    Where an offset that has wrapped to a negative 32-bit number would land, the buffer holds `around`.
    """
    rest = [d for d in range(x.dim()) if d != axis]
    inner = [x.shape[d] for d in rest]
    block = max(1, x.numel() // max(x.shape[axis], 1))
    assert stride >= block
    base = 1 << 31
    buffer = sparse(base + stride * (x.shape[axis] - 1) + block, x.dtype, str(x.device))
    strides, step = [0] * x.dim(), 1
    for d, n in zip(reversed(rest), reversed(inner)):
        strides[d], step = step, step * n
    strides[axis] = stride
    view = torch.as_strided(buffer, x.shape, strides, base)
    for i in range(x.shape[axis]):
        wrapped = base + (i * stride + (1 << 31)) % (1 << 32) - (1 << 31)
        if 0 <= wrapped and wrapped + block <= buffer.numel():
            buffer[wrapped : wrapped + block] = around
    view.copy_(x)
    return view
