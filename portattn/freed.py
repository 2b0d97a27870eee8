"""Tensors whose storage was freed, as by `untyped_storage().resize_(0)`: FSDP and offloaders do it.

Their address is null, or their offset into nothing. Validation asks the storage of every tensor. A known call's addresses alone are looked
at, where they are at hand: of a tensor with one below LOW the storage is asked again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, faults
from .overlaps import reach
from .problem import Call

LOW = 1 << 36  # bytes; kLow of backends/cpu/params.h
_PYTHON = torch._C.DispatchKey.Python  # has what is no tensor in memory: fake ones, wrappers
_HAVE_ADDRESSES = ("cpu", "cuda", "mps", "xpu")


def shortage(x: Tensor) -> tuple[int, int] | None:
    """(bytes that a tensor needs of its storage, bytes that there are) where those are fewer."""
    try:
        have = x.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # it has none: sparse ones, a transform's
        return None
    size = x.itemsize
    before = x.storage_offset() * size
    if before + x.numel() * size <= have or x.device.type not in _HAVE_ADDRESSES or torch._C._dispatch_keys(x).has(_PYTHON):
        return None
    far = reach(x)
    return (before + far, have) if far and have < before + far else None


def wanted(short: tuple[int, int]) -> tuple[str, str]:
    """What an error says was wanted, and came."""
    return f"a storage of {short[0]} bytes", f"one of {short[1]}, as after resize_({short[1]})"


def refuse(call: str, **given: Any) -> None:
    """Raises an ArgumentError that names the tensors, or lists of them, without memory, if there are any."""
    lines = []
    for name, x in given.items():
        for t in x if isinstance(x, (list, tuple)) else (x,):
            if isinstance(t, Tensor) and (short := shortage(t)):
                lines.append("{}: wanted {}, got {}".format(name, *wanted(short)))
    if lines:
        raise ArgumentError(faults(call, lines))


def refuse_of(call: Call) -> str:
    """`refuse` for all that a backend was given; the function's name."""
    name, tensors = named(call)
    refuse(name, **tensors)
    return name


def named(call: Call) -> tuple[str, dict[str, Any]]:
    """(function, tensors by their names there) of what a backend was given: arguments of `refuse`."""
    paged = call.block_table is not None
    names = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v"} if paged else {}
    function = "attention_paged" if paged else "attention_varlen" if call.cu_seqlens_q is not None else "attention"
    return function, {names.get(name, name): x for name, x in zip(call._fields, call) if isinstance(x, Tensor)}


__all__ = ["LOW", "named", "refuse", "refuse_of", "shortage", "wanted"]
