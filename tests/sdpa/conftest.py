"""Shared by the tests of backends/sdpa: its modules, and other devices pretended on CPU."""

from __future__ import annotations

import importlib
from typing import Any, Callable

import pytest
import torch
from torch import Tensor

import portattn
from portattn import reference, registry
from portattn.testing.tolerance import close_lse, close_out

sdpa = importlib.import_module("portattn.backends.sdpa")


@pytest.fixture
def pretend(monkeypatch) -> Callable[..., None]:
    """pretend("mps", (2, 6)): the backend decides as if CPU tensors lay on that device under that torch version."""

    def start(kind: str, version: tuple[int, int] | None = None) -> None:
        registry.forget()
        monkeypatch.setattr(sdpa.holes, "kind", lambda device: kind)
        if version is not None:
            monkeypatch.setattr(sdpa.holes, "release", lambda *_: version)

    monkeypatch.setenv("PORTATTN_VERIFY", "0")
    yield start
    registry.forget()


def check(call: str, *args: Any, rows: int | None = None, **kw: Any) -> None:
    """The public call on backend sdpa is within C-TOL of the float64 reference; `rows`: how many of a ragged q count."""
    oracle = getattr(reference, call)
    want, plain = oracle(*args, **kw), reference.plain(oracle, *args, **kw)
    got = getattr(portattn, call)(*args, **{**kw, "return_lse": True}, backend="sdpa")
    for close, x, y, z in zip((close_out, close_lse), got, want, plain):
        close(x[:rows], y[:rows], z[:rows], args[0].dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)
