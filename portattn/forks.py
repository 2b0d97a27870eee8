"""What a forked child starts anew: the other threads of its parent are not there, and never release what they held."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable


def in_child(forget: Callable[[], Any]) -> None:
    """Has every forked child call `forget` first; nothing where processes are not forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def lock(module: dict[str, Any]) -> Any:
    """A reentrant lock for the `_lock` of a module, given by its globals(), that a child has anew: a thread may hold it for the seconds
    of a first compilation."""
    in_child(lambda: module.update(_lock=threading.RLock()))
    return threading.RLock()


__all__ = ["in_child", "lock"]
