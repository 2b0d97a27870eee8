"""What the last few kinds of call of a function were, recognised without a key.

An engine's calls are alike, layer after layer. torch's guards compare types, dtypes, devices, shapes, strides and requires_grad
of all tensors of a call in one C call, a few tenths of a microsecond where a key of them costs three. They keep no tensor alive.
"""

from __future__ import annotations

import operator
from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import config, registry

try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:
    _Guards = None

OPTIONS = 64  # sets of options that are kept
KINDS = 8  # kinds of tensors that are kept with each, looked at one after the other
_WAITING = 4
_is_compiling, _modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_grad_mode, _is_nested = torch.is_grad_enabled, operator.attrgetter("is_nested")
_order = registry.current_order
_state = config.call_state


def is_hidden() -> bool:
    """Whether guards do not see what changes a call: modes, tangents, or that torch.compile traces it."""
    return _is_compiling() or bool(_modes()) or forward_ad._current_level >= 0


def _apart(options: tuple, tensors: tuple) -> tuple[tuple, tuple]:
    """The tensors each once, as guards want them, and options that say where they all were."""
    places = {id(x): n for n, x in enumerate(tensors)}
    if len(places) == len(tensors):
        return options, tensors
    return (options, *(places[id(x)] for x in tensors)), tuple(tensors[n] for n in places.values())


def guard(tensors: tuple) -> Callable[..., bool] | None:
    """torch's check whether other tensors are like these, each of which stands there once; None if this torch has no such check."""
    global _Guards
    try:
        check = _Guards and _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check and check(*tensors) else None
    except Exception:  # not the interface that this torch has: keys will do
        _Guards = None
        return None


class Recent:
    """The kinds of call of one function that are known by sight, each with what was decided for it."""

    __slots__ = ("kinds", "_waiting")

    def __init__(self) -> None:
        self.forget()
        registry._listeners.append(self.forget)

    def forget(self) -> None:
        self.kinds: dict[tuple, tuple[tuple, ...]] = {}  # replaced, never changed: threads read it
        self._waiting: tuple[Any, ...] = ()

    def find(self, options: tuple, tensors: tuple) -> Any:
        """What was kept for a call with these options and tensors like these; None if nothing was, or where torch.compile traces.

        1, 1.0 and True are equal here, so a function whose errors tell them apart has to tell them apart in `options`.
        """
        if _is_compiling() or _modes() or forward_ad._current_level >= 0:  # is_hidden(), a call less
            return None
        try:
            if any(map(_is_nested, tensors)):  # one in guards' hands ends the process
                return None
            for check, kept in self.kinds.get((options, _order(), _state(), _grad_mode()), ()):
                if check(*tensors):
                    return kept
        except (AttributeError, TypeError):  # an option that is mutable, or something that is no tensor: validation says what is wrong
            return None
        return self.find(*_apart(options, tensors)) if len({*map(id, tensors)}) < len(tensors) else None

    def keep(self, options: tuple, tensors: tuple, kept: Any, decided: Any) -> None:
        """Has the next such call find `kept`, if `decided` is among what was decided last: guards cost 10 us to make."""
        if not _Guards:
            return
        if decided not in self._waiting:
            self._waiting = (decided, *self._waiting[: _WAITING - 1])
        elif all(isinstance(x, Tensor) for x in tensors):
            options, tensors = _apart(options, tensors)
            check = guard(tensors)
            if check:
                key, kinds = (options, _order(), _state(), _grad_mode()), dict(self.kinds)
                kinds[key] = ((check, kept), *kinds.pop(key, ())[: KINDS - 1])
                self.kinds = dict(list(kinds.items())[-OPTIONS:])


__all__ = ["Recent", "guard", "is_hidden"]
