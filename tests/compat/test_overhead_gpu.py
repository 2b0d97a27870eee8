"""What a translated call adds where a GPU's backend serves it: no operation of torch (6 to 9 us each on such a host) and no launch.

The backends' own host code runs here, on CPU tensors and over a driver that has no GPU.
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from forms import forms
from test_overhead import LIMIT_INSTRUCTIONS, MODES, _instructions, _operations

import portattn
from portattn import manifest, native, recent, registry
from portattn.compat import _translate
from portattn.native_backend import NativeBackend

FORMS = forms(dtype=torch.float16, dim=64, page=16)
FEATURES = ["causal", "window", "rotary", "append", "lse"]
CAPABILITY = dict(id="any", layouts=["dense", "varlen", "paged"], devices=["cpu"], dtypes=["float16"], features=FEATURES)


class Function:
    """A kernel of which only the launches are counted."""

    handle, shared = 1, 0
    driver = types.SimpleNamespace(launch_ex=None)

    def __init__(self, launches: list):
        self.raw = lambda *_: launches.append(1) and None or 0


@contextlib.contextmanager
def served_by(adapter, name: str):
    registry.register(manifest.parse(dict(schema=1, name=name, title=name, priority=1, capabilities=[CAPABILITY]), name), adapter)
    try:
        with portattn.use(name):
            yield
    finally:
        registry.unregister(name)
        registry.forget()


@contextlib.contextmanager
def _cuda(_, launches: list):
    from portattn.backends import cuda

    driver = types.SimpleNamespace(function=lambda *_: Function(launches), encode_map=None)
    limits = native.Limits(227 << 10, 228 << 10, 132)
    backend = NativeBackend("cuda", lambda index: native.Device(driver, torch.device("cpu", 0), "sm_90", limits))
    with served_by(types.SimpleNamespace(attention=backend.attention, DIALECT=cuda.DIALECT), "native_without_gpu"):
        yield


@contextlib.contextmanager
def _triton(triton_without_gpu, launches: list):
    triton_without_gpu(launches)
    from portattn.backends import triton

    with served_by(types.SimpleNamespace(attention=triton.attention, DIALECT=triton.DIALECT), "triton_without_gpu"):
        yield


@pytest.fixture(params=[_cuda, _triton], ids=["native", "triton"])
def launches(request, monkeypatch, triton_without_gpu):
    """The launches of a backend that serves the calls."""
    monkeypatch.setenv("PORTATTN_VERIFY", "0")
    for name, answer in (("getDevice", lambda: 0), ("getCurrentRawStream", lambda index: 0), ("isCurrentStreamCapturing", lambda: False)):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", answer, raising=False)
    seen: list = []
    with request.param(triton_without_gpu, seen):
        yield seen


@MODES
@pytest.mark.parametrize("form", FORMS)
def test_a_translated_call_adds_no_operation_and_no_launch(launches, form, mode):
    if not recent._Guards:
        pytest.skip("package: this torch has other guards, every call is translated")
    translated, call = FORMS[form]
    with mode():
        for _ in range(4):
            translated(), call()
        launches.clear()
        ours, count = _operations(call), len(launches)
        theirs = _operations(translated)
        assert count and len(launches) == 2 * count
        assert theirs == ours
        more = _instructions(translated) - _instructions(call)
    print(f"\n{form}, {mode.__name__}: {more} instructions more")
    assert more <= LIMIT_INSTRUCTIONS


def test_one_length_for_all_is_made_once_in_a_row_on_each_stream(monkeypatch):
    state = dict(stream=0, capturing=False)
    monkeypatch.setattr(_translate, "_stream_of", lambda index: state["stream"])
    monkeypatch.setattr(_translate, "capturing", lambda device: state["capturing"])
    monkeypatch.setattr(_translate, "_equal_on", {})
    like = types.SimpleNamespace(is_cpu=False, is_cuda=True, device=torch.device("meta"))  # as a GPU's tensor answers
    made = lambda length=5, batch=2: _translate.equal_lengths(length, batch, like)
    first = made()
    assert made() is first and first.shape == (2,) and first.dtype == torch.int32
    assert made(6) is not first and made() is not first and made(5, 3).shape == (3,)
    here = made()
    state["stream"] = 7
    there = made()
    assert there is not here and made() is there
    state["capturing"] = True
    assert made() is not there and made() is not made(), "a graph's memory is its own"
    state.update(stream=0, capturing=False)
    assert made() is here
