"""Shared by the tests of backends/cpu: every instruction set that this machine has, in one process.

Units that it may lack run emulated (emulated.h): AVX512-BF16's and AMX's packing and tiling over plain C++.
"""

from __future__ import annotations

import importlib
import os

import pytest

from portattn import registry
from portattn.processor import cpu_arch

library = importlib.import_module("portattn.backends.cpu.library")
sets = library.sets
_PLAIN = ("-DPA_EMULATED", f"-I{os.path.dirname(os.path.abspath(__file__))}", f"-I{sets.HERE}", "-Wno-psabi")
EMULATED = {"emulated_bf16": _PLAIN, "emulated_amx": (*_PLAIN, "-DPA_EMULATED_AMX")}


def choose(isa: str, monkeypatch) -> None:
    """Calls run on kernels of this instruction set from here on; skips where there are none."""
    if isa in EMULATED:
        monkeypatch.setitem(sets.SETS, isa, EMULATED[isa])
        monkeypatch.setattr(library, "able", lambda: tuple(EMULATED))
    elif isa not in library.able():
        pytest.skip(f"this machine lacks {isa}")
    monkeypatch.setenv("PORTATTN_CPU_ISA", isa)
    registry.forget()
    if no := library.missing():
        pytest.skip(str(no))


@pytest.fixture(params=sets.OF_ARCH.get(cpu_arch(), ("portable",)))
def isa(request, monkeypatch) -> str:
    """Each instruction set that this kind of CPU may have."""
    choose(request.param, monkeypatch)
    yield request.param
    registry.forget()


@pytest.fixture(params=EMULATED)
def emulated(request, monkeypatch) -> str:
    """Units that this CPU may lack, in plain C++ (seconds where others take milliseconds)."""
    choose(request.param, monkeypatch)
    yield request.param
    registry.forget()
