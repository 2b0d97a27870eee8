"""Whether two strided tensors share memory: told from addresses, sizes and strides alone, so that nothing waits for a device.

Most tensors lie apart, and their ends say so. Views of one buffer may lie between each other (out in a slot beside q's in a
packed tensor): then the runs of bytes of one are looked for among those of the other.
"""

from __future__ import annotations

import functools
from typing import Iterable, Sequence

import torch
from torch import Tensor

MOST_RUNS = 1 << 22  # of a tensor; of those that lie in more pieces it is not told


def reach(x: Tensor) -> int:
    """Bytes from the first element's to the last one's end; 0 without elements."""
    if x.numel() == 0:
        return 0
    return (sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


class Reaches:
    """How far `out` and inputs reach: a first look at calls like the one that it was made of. An input that is None is left out."""

    __slots__ = ("out", "inputs")

    def __init__(self, out: Tensor | None, inputs: Iterable[tuple[int, Tensor | None]]):
        self.out = 0 if out is None else reach(out)
        self.inputs = [(n, reach(x)) for n, x in inputs if x is not None]

    def near(self, at: int, addresses: Sequence[int]) -> list[int]:
        """The numbers of the inputs that may share memory with `out` at this address; input n lies at addresses[n]."""
        end, found = at + self.out, []
        for n, far in self.inputs:
            if addresses[n] < end and at < addresses[n] + far:
                found.append(n)
        return found


def share(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a byte. A tensor without elements has no address, and one that is only said to be has none to tell."""
    if any(torch._C._dispatch_keys(t).has(torch._C.DispatchKey.Python) for t in (x, other)):
        return False
    at, to = x.data_ptr(), other.data_ptr()
    return bool(at and to) and -reach(x) < at - to < reach(other) and meet(x, other, at - to)


def meet(x: Tensor, out: Tensor, offset: int) -> bool:
    """Whether x, which begins `offset` bytes after `out`, shares a byte with it."""
    runs = [_runs(tuple(t.shape), t.stride(), t.element_size()) for t in (x, out)]
    return _meet(*runs, offset)


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """A tensor as (bytes of a run, (count, distance in bytes) of each axis of runs): axes that follow each other are one."""
    axes = sorted((stride * size, n) for n, stride in zip(shape, strides) if n > 1 and stride)
    run, kept = size, []
    for distance, n in axes:
        if not kept and distance == run:
            run *= n
        elif kept and distance == kept[-1][0] * kept[-1][1]:
            kept[-1] = (kept[-1][0] * n, kept[-1][1])
        else:
            kept.append((n, distance))
    return run, tuple(kept)


@functools.lru_cache(maxsize=1024)
def _meet(first: tuple, second: tuple, offset: int) -> bool:
    (length, axes), (other, other_axes) = first, second
    if not axes and not other_axes:  # two blocks
        return offset < other and -offset < length
    starts, others = _starts(axes), _starts(other_axes)
    if starts is None or others is None:
        return offset == 0
    starts = starts + offset
    before = torch.searchsorted(others, starts + length) - 1  # the last of the other's runs that begins before a run's end
    return bool(((before >= 0) & (others[before.clamp(min=0)] + other > starts)).any())


def _starts(axes: tuple[tuple[int, int], ...]) -> Tensor | None:
    """Where the runs begin, in bytes, sorted."""
    starts, count = torch.zeros(1, dtype=torch.int64, device="cpu"), 1
    for n, distance in axes:
        count *= n
        if count > MOST_RUNS:
            return None
        starts = (starts + distance * torch.arange(n, dtype=torch.int64, device="cpu")[:, None]).flatten()
    return starts.sort().values


__all__ = ["Reaches", "meet", "reach", "share"]
