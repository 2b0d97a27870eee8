"""What a translated call costs over the native call that it becomes.

In operations of torch and instructions of Python, which are counted in every run. In time, at most 3 us in every form: measured
on CPU with tiny shapes, where the host's time is all there is. Other work on the machine makes it fail, so it runs by choice:

    PORTATTN_TEST_OVERHEAD=1 python -m pytest -s tests/compat/test_overhead.py
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter

import pytest
import torch
from forms import forms

import portattn
from portattn import recent

LIMIT_US = 3.0
LIMIT_INSTRUCTIONS = 200  # 34 to 150 on CPython 3.11
ROUNDS = int(os.environ.get("PORTATTN_OVERHEAD_ROUNDS", "2000"))
CALLS = 8  # in a row: a look at the clock costs 0.05 us
MODES = pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])

FORMS = forms()


def _result(got):
    return got[0] if isinstance(got, tuple) else got


def _known(form):
    """(the translated call, the native call), made often enough that both are recognised."""
    translated, native = FORMS[form]
    for _ in range(4):
        torch.testing.assert_close(_result(translated()), _result(native()), rtol=0, atol=0)
    return translated, native


# ------------------------------------------------------------------ counted
def _operations(call) -> Counter:
    """Operations of torch that Python calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    return Counter(e.name.removeprefix("aten::") for e in seen.events() if e.name.startswith("aten::") and e.cpu_parent is None)


def _instructions(call) -> int:
    count, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.usefixtures("cpu_kernels")
@MODES
@pytest.mark.parametrize("form", FORMS)
def test_a_translated_call_adds_no_operation(form, mode):
    if not recent._Guards:
        pytest.skip("package: this torch has other guards, every call is translated")
    with portattn.use("cpu"), mode():
        translated, native = _known(form)
        ours, theirs = _operations(native), _operations(translated)
        assert theirs == ours
        more = _instructions(translated) - _instructions(native)
    print(f"\n{form}, {mode.__name__}: {more} instructions more")
    assert more <= LIMIT_INSTRUCTIONS


# ------------------------------------------------------------------ timed
def _microseconds(call) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def overhead(translated, native) -> tuple[float, float]:
    """(median of the rounds' differences, median of the native call's time) in us, of the fastest quarter of the rounds.

    A round runs both calls, one right after the other. Other work on the machine, and a clock that changes, slow some rounds: the
    fastest ones saw the least of it, and both of their halves ran alike, which the fastest halves of different rounds do not.
    """
    rounds = sorted(((_microseconds(native), _microseconds(translated)) for _ in range(ROUNDS)), key=sum)[: ROUNDS // 4]
    median = lambda values: sorted(values)[len(rounds) // 2]
    return median(b - a for a, b in rounds), median(a for a, _ in rounds)


@pytest.fixture
def alone():
    """One thread on one core, without garbage collection."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    gc.disable()
    yield
    gc.enable()
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.mark.skipif(not os.environ.get("PORTATTN_TEST_OVERHEAD"),
                    reason="feature: set PORTATTN_TEST_OVERHEAD=1 on a quiet machine")
@MODES
@pytest.mark.parametrize("form", FORMS)
def test_a_translated_call_costs_at_most_3_us_over_the_native_one(alone, form, mode):
    with mode():
        more, whole = overhead(*_known(form))
    print(f"\n{form}, {mode.__name__}: {more:.2f} us over {whole:.1f}")
    assert more <= LIMIT_US
