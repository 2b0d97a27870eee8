"""Reading what the fake driver of fake_driver.c saw."""

from __future__ import annotations

import ctypes


def log(library: ctypes.CDLL) -> list[str]:
    """One line a call."""
    return library.fake_log().decode().splitlines()


def params(library: ctypes.CDLL) -> int:
    """The address of the last launch's struct."""
    get = library["fake_params"]
    get.restype = ctypes.c_void_p
    return get()
