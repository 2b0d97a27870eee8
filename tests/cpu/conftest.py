"""Shared by the tests of backends/cpu: every instruction set that this machine has, in one process."""

from __future__ import annotations

import importlib

import pytest

from portattn import registry

library = importlib.import_module("portattn.backends.cpu.library")



@pytest.fixture(params=("portable", "avx2", "avx512"))
def isa(request, monkeypatch) -> str:
    """Calls run on kernels of this instruction set."""
    if request.param not in library.able():
        pytest.skip(f"this machine lacks {request.param}")
    monkeypatch.setenv("PORTATTN_CPU_ISA", request.param)
    registry.forget()
    if no := library.missing():
        pytest.skip(str(no))
    yield request.param
    registry.forget()
