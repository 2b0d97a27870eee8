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
from functools import partial

import pytest
import torch

import portattn
from portattn import attention, attention_paged, attention_varlen, recent
from portattn.compat import flash_attn as fa2
from portattn.compat import flash_attn_interface as fa3
from portattn.compat import vllm_flash_attn as vllm

LIMIT_US = 3.0
LIMIT_INSTRUCTIONS = 200  # 34 to 150 on CPython 3.11
ROUNDS = int(os.environ.get("PORTATTN_OVERHEAD_ROUNDS", "2000"))
CALLS = 8  # in a row: a look at the clock costs 0.05 us
MODES = pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])

BATCH, PAGE = 2, 4
Q, K, V = torch.randn(BATCH, 1, 2, 16), torch.randn(BATCH, 8, 1, 16), torch.randn(BATCH, 8, 1, 16)
ROWS, KEYS, VALUES = (x.flatten(0, 1) for x in (Q, K, V))
QKV, KV = torch.randn(BATCH, 8, 3, 2, 16), torch.randn(BATCH, 8, 2, 1, 16)
NEW = dict(k=torch.randn(BATCH, 1, 1, 16), v=torch.randn(BATCH, 1, 1, 16))
TURNED = NEW | dict(rotary_cos=torch.randn(8, 8), rotary_sin=torch.randn(8, 8))
PAGES, V_PAGES = torch.randn(4, PAGE, 1, 16), torch.randn(4, PAGE, 1, 16)
TABLE, OWN_ROWS = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
LENS, LENS_AFTER, FIVES, SIXES = (torch.tensor(x, dtype=torch.int32) for x in ([5, 3], [6, 4], [5, 5], [6, 6]))
CU_Q, CU_K, CU_PAGES = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 8, 16], [0, 5, 8]))
OUT, INDICES = torch.empty_like(ROWS), torch.tensor([0, 1], dtype=torch.int32)
(PACKED_Q, PACKED_K, PACKED_V), (HALF_K, HALF_V), PACKED_ROWS = QKV.unbind(2), KV.unbind(2), QKV.flatten(0, 1)
ROWS_Q, ROWS_K, ROWS_V = PACKED_ROWS.unbind(1)

FORMS = {  # name: (the translated call, the native call that computes the same)
    "dense": (lambda: fa2.flash_attn_func(Q, K, V, causal=True), lambda: attention(Q, K, V, causal=True)),
    "dense, FlashAttention 3": (lambda: fa3.flash_attn_func(Q, K, V, causal=True), lambda: attention(Q, K, V, causal=True)),
    "dense, with lse": (lambda: fa2.flash_attn_func(Q, K, V, causal=True, return_attn_probs=True),
                        lambda: attention(Q, K, V, causal=True, return_lse=True)),
    "dense, with lse, FlashAttention 3": (lambda: fa3.flash_attn_func(Q, K, V, causal=True, return_attn_probs=True),
                                          lambda: attention(Q, K, V, causal=True, return_lse=True)),
    "dense, qkv in one tensor": (lambda: fa2.flash_attn_qkvpacked_func(QKV, causal=True),
                                 lambda: attention(PACKED_Q, PACKED_K, PACKED_V, causal=True)),
    "dense, k and v in one tensor": (lambda: fa2.flash_attn_kvpacked_func(Q, KV, causal=True),
                                     lambda: attention(Q, HALF_K, HALF_V, causal=True)),
    "varlen": (lambda: fa2.flash_attn_varlen_func(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True),
               lambda: attention_varlen(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True)),
    "varlen, FlashAttention 3": (lambda: fa3.flash_attn_varlen_func(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True),
                                 lambda: attention_varlen(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True)),
    "varlen, with lse": (
        lambda: fa2.flash_attn_varlen_func(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True, return_attn_probs=True),
        lambda: attention_varlen(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True, return_lse=True)),
    "varlen, qkv in one tensor": (lambda: fa2.flash_attn_varlen_qkvpacked_func(PACKED_ROWS, CU_K, 8, causal=True),
                                  lambda: attention_varlen(ROWS_Q, ROWS_K, ROWS_V, CU_K, CU_K, 8, 8, causal=True)),
    "varlen with a block table": (
        lambda: fa2.flash_attn_varlen_func(ROWS, PAGES, V_PAGES, CU_Q, CU_PAGES, 1, 8, causal=True, block_table=TABLE),
        lambda: attention_paged(ROWS, PAGES, V_PAGES, TABLE, LENS, cu_seqlens_q=CU_Q, max_seqlen_q=1, causal=True)),
    "vLLM's varlen": (lambda: vllm.flash_attn_varlen_func(ROWS, KEYS, VALUES, 1, CU_Q, 8, CU_K, causal=True),
                      lambda: attention_varlen(ROWS, KEYS, VALUES, CU_Q, CU_K, 1, 8, causal=True)),
    "vLLM's varlen over pages": (
        lambda: vllm.flash_attn_varlen_func(q=ROWS, k=PAGES, v=V_PAGES, out=OUT, cu_seqlens_q=CU_Q, max_seqlen_q=1,
                                            seqused_k=LENS, max_seqlen_k=8, softmax_scale=0.25, causal=True, block_table=TABLE,
                                            fa_version=2),
        lambda: attention_paged(ROWS, PAGES, V_PAGES, TABLE, LENS, cu_seqlens_q=CU_Q, max_seqlen_q=1, out=OUT, causal=True,
                                softmax_scale=0.25)),
    "kvcache of ragged queries over pages, FlashAttention 3": (
        lambda: fa3.flash_attn_with_kvcache(ROWS, PAGES, V_PAGES, cache_seqlens=LENS, page_table=TABLE, cu_seqlens_q=CU_Q,
                                            max_seqlen_q=1, causal=True),
        lambda: attention_paged(ROWS, PAGES, V_PAGES, TABLE, LENS, cu_seqlens_q=CU_Q, max_seqlen_q=1, causal=True)),
    "kvcache with cache_batch_idx": (
        lambda: fa2.flash_attn_with_kvcache(Q, K, V, cache_seqlens=LENS, cache_batch_idx=INDICES, causal=True),
        lambda: attention_paged(Q, K, V, OWN_ROWS, LENS, causal=True)),
    "kvcache over pages with lse": (
        lambda: fa2.flash_attn_with_kvcache(Q, PAGES, V_PAGES, cache_seqlens=LENS, block_table=TABLE, causal=True,
                                            return_softmax_lse=True),
        lambda: attention_paged(Q, PAGES, V_PAGES, TABLE, LENS, causal=True, return_lse=True)),
}
for fa, at in ((fa2, "block_table"), (fa3, "page_table")):
    of = "kvcache" if fa is fa2 else "FlashAttention 3's kvcache"
    for cache, keys, table, given in (("pages", (PAGES, V_PAGES), TABLE, {at: TABLE}),
                                      ("a contiguous cache", (K, V), OWN_ROWS, {})):
        for lens, length, before, after in (("", LENS, LENS, LENS_AFTER), (", one length for all", 5, FIVES, SIXES)):
            for new, now, options in (("", before, {}), (" with an append", after, NEW),
                                      (" with a turned append", after, TURNED)):
                turned = dict(rotary_interleaved=True) if "rotary_cos" in options else {}
                FORMS[f"{of} over {cache}{new}{lens}"] = (
                    partial(fa.flash_attn_with_kvcache, Q, *keys, cache_seqlens=length, causal=True, **options, **given),
                    partial(attention_paged, Q, *keys, table, now, causal=True, **options, **turned))


OPERATIONS = {  # what a form's meaning adds to the native call: FlashAttention 2's dropout mask, which is empty
    "dense, with lse": ["new_empty"], "varlen, with lse": ["new_empty"],
}


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


@MODES
@pytest.mark.parametrize("form", FORMS)
def test_a_translated_call_adds_no_operation_that_its_meaning_does_not_ask_for(form, mode):
    if not recent._Guards:
        pytest.skip("package: this torch has other guards, every call is translated")
    with portattn.use("cpu"), mode():
        translated, native = _known(form)
        ours, theirs = _operations(native), _operations(translated)
        assert theirs - ours == Counter(OPERATIONS.get(form, [])) and not ours - theirs
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
