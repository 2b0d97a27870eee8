"""Tensor maps: what the copy engine of Hopper and newer GPUs knows of a tensor, encoded by the CUDA driver."""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import torch

from .errors import KernelError

BYTES, ALIGNMENT = 128, 64  # of a CUtensorMap
SWIZZLE_NONE, SWIZZLE_128 = 0, 3
KINDS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType; 8 bits as bytes


class TensorMap:
    """A CUtensorMap of cuda.h, encoded anew where its tensor's address changes.

    Args:
        encode: the driver's cuTensorMapEncodeTiled.
        dtype: one of KINDS.
        shape, strides: of the tensor, in elements; the last axis is contiguous, the others' strides are multiples of 16 bytes.
        box: what a copy takes, an extent an axis.
        swizzle: CUtensorMapSwizzle, of the box in shared memory.
        address: where the map is to stand, a multiple of 64; None: in memory of its own.
    """

    def __init__(self, encode: Any, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int,
                 address: int | None = None):
        if address is None:
            self._room = ctypes.create_string_buffer(BYTES + ALIGNMENT)
            address = -(-ctypes.addressof(self._room) // ALIGNMENT) * ALIGNMENT
        rank = len(shape)
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        # Axes from the innermost on; no interleaving, 128-byte sectors promoted in L2, zeros outside.
        self._rest = (wide(*reversed(shape)), wide(*(s * dtype.itemsize for s in reversed(strides[:-1]))), narrow(*reversed(box)),
                      narrow(*[1] * rank), 0, swizzle, 2, 0)
        self._encode, self._kind, self._rank = encode, KINDS[dtype], rank
        self.address, self.pointer = address, -1

    def move(self, pointer: int) -> None:
        """Has the map describe the tensor at this address; KernelError where the driver refuses."""
        error = self._encode(ctypes.c_void_p(self.address), self._kind, self._rank, ctypes.c_void_p(pointer), *self._rest)
        if error:
            raise KernelError(f"tensor map: the driver refused address {pointer:#x}, error {error}")
        self.pointer = pointer


__all__ = ["ALIGNMENT", "BYTES", "KINDS", "SWIZZLE_128", "SWIZZLE_NONE", "TensorMap"]
