"""The errors that portattn raises; each is also the Python built-in that callers expect."""

from __future__ import annotations


class PortattnError(Exception):
    """Base of every error that portattn raises on purpose."""


class ArgumentError(PortattnError, ValueError):
    """An argument has a wrong value, shape, dtype or device; the text lists every fault of the call."""


class ArgumentTypeError(PortattnError, TypeError):
    """An argument is of a wrong Python type; the text lists every fault of the call."""


ONLY_ONCE = "portattn: gradients of gradients: attention can be differentiated once"  # a RuntimeError, as torch's own of that kind


def faults(call: str, lines: list[str]) -> str:
    """The text of an error that lists what is wrong with a call."""
    return f"{call}: " + (f"{len(lines)} faults\n  " if len(lines) > 1 else "") + "\n  ".join(lines)


class NoBackendError(PortattnError, NotImplementedError):
    """No backend can run the problem; the text lists each one with its reasons and a fix.

    Attributes:
        problem: the ``Problem`` that was asked for, or None where the call fits no backend at all.
        rejected: ``{backend name: tuple of Reason}``.
    """

    def __init__(self, message: str, problem=None, rejected=None):
        super().__init__(message)
        self.problem = problem
        self.rejected = dict(rejected or {})


class KernelError(PortattnError, RuntimeError):
    """A kernel could not be loaded or launched; the text carries the driver's words and the problem."""
