"""New tokens and the caches that they are written to: where they share memory, some would be read after others were written.

Validation looks at the tensors of a first call. Of a known one an adapter looks at addresses, or its kernels do.
"""

from __future__ import annotations

from torch import Tensor

from . import freed, overlaps
from .errors import ArgumentError, faults

KEPT = 4096  # addresses of calls of a kind


class Appended:
    """How far k, v, k_cache and v_cache of calls of a kind reach."""

    __slots__ = ("apart", "_reaches")

    def __init__(self, *tensors: Tensor):
        self.apart: set[tuple[int, ...]] = set()  # addresses that were looked at: layers come again and again
        self._reaches = [overlaps.reach(x) for x in tensors]

    def look(self, call: str, addresses: tuple[int, ...], *tensors: Tensor) -> None:
        """Raises an ArgumentError if k or v at these addresses shares memory with a cache, or one has none; callers ask `apart` before."""
        if min(addresses) < freed.LOW:
            freed.refuse(call, **dict(zip(("k", "v", "k_cache", "v_cache"), tensors)))
        places = list(zip(addresses, self._reaches))
        if any(-far < at - cache < room for at, far in places[:2] for cache, room in places[2:]):
            refuse(call, *tensors)
        if len(self.apart) >= KEPT:
            self.apart.clear()
        self.apart.add(addresses)


def refuse(call: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises an ArgumentError where new tokens share memory with a cache."""
    lines = ["{}: wanted {}, got {}".format(name, *wanted(cache_name)) for name, x in (("k", k), ("v", v))
             for cache_name, cache in (("k_cache", k_cache), ("v_cache", v_cache)) if overlaps.share(x, cache)]
    if lines:
        raise ArgumentError(faults(call, lines))


def wanted(cache_name: str) -> tuple[str, str]:
    """What an error says was wanted of new tokens, and came."""
    return "memory of its own", f"some of the memory of {cache_name}"


__all__ = ["Appended", "refuse", "wanted"]
