"""What a translated call costs over the native call that it becomes: at most 3 us in every form.

Measured on CPU with tiny shapes, where the host's time is all there is. Other work on the machine makes it fail, so it runs by choice:

    PORTATTN_TEST_OVERHEAD=1 python -m pytest -s tests/compat/test_overhead.py
"""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch

from portattn import attention, attention_paged, attention_varlen
from portattn.compat import flash_attn as fa2
from portattn.compat import flash_attn_interface as fa3
from portattn.compat import vllm_flash_attn as vllm

LIMIT_US = 3.0
ROUNDS = int(os.environ.get("PORTATTN_OVERHEAD_ROUNDS", "3000"))
CALLS = 8  # in a row: a look at the clock costs 0.05 us

pytestmark = pytest.mark.skipif(not os.environ.get("PORTATTN_TEST_OVERHEAD"), reason="feature: set PORTATTN_TEST_OVERHEAD=1 on a quiet machine")

BATCH, PAGE = 2, 4
Q, *KEYS = torch.randn(BATCH, 1, 2, 16), torch.randn(BATCH, 8, 1, 16), torch.randn(BATCH, 8, 1, 16)
ROWS, *KEY_ROWS = (x.flatten(0, 1) for x in (Q, *KEYS))
QKV, KV = torch.randn(BATCH, 8, 3, 2, 16), torch.randn(BATCH, 8, 2, 1, 16)
NEW = dict(k=torch.randn(BATCH, 1, 1, 16), v=torch.randn(BATCH, 1, 1, 16))
TURNED = NEW | dict(rotary_cos=torch.randn(8, 8), rotary_sin=torch.randn(8, 8))
PAGES = [torch.randn(4, PAGE, 1, 16), torch.randn(4, PAGE, 1, 16)]
TABLE, OWN_ROWS = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
LENS, LENS_AFTER, FIVES, SIXES = (torch.tensor(x, dtype=torch.int32) for x in ([5, 3], [6, 4], [5, 5], [6, 6]))
CU_Q, CU_K, CU_PAGES = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 8, 16], [0, 5, 8]))
OUT, INDICES = torch.empty_like(ROWS), torch.tensor([0, 1], dtype=torch.int32)
PACKED, HALVES = QKV.unbind(2), KV.unbind(2)
RAGGED, PACKED_ROWS = (ROWS, *KEY_ROWS, CU_Q, CU_K, 1, 8), QKV.flatten(0, 1)
SPLIT_ROWS = PACKED_ROWS.unbind(1)
OVER_PAGES = (ROWS, *PAGES, TABLE, LENS)

FORMS = {  # name: (the translated call, the native call that computes the same)
    "dense": (lambda: fa2.flash_attn_func(Q, *KEYS, causal=True), lambda: attention(Q, *KEYS, causal=True)),
    "dense, FlashAttention 3": (lambda: fa3.flash_attn_func(Q, *KEYS, causal=True), lambda: attention(Q, *KEYS, causal=True)),
    "dense, with lse": (lambda: fa2.flash_attn_func(Q, *KEYS, causal=True, return_attn_probs=True),
                        lambda: attention(Q, *KEYS, causal=True, return_lse=True)),
    "dense, with lse, FlashAttention 3": (lambda: fa3.flash_attn_func(Q, *KEYS, causal=True, return_attn_probs=True),
                                          lambda: attention(Q, *KEYS, causal=True, return_lse=True)),
    "dense, qkv in one tensor": (lambda: fa2.flash_attn_qkvpacked_func(QKV, causal=True), lambda: attention(*PACKED, causal=True)),
    "dense, k and v in one tensor": (lambda: fa2.flash_attn_kvpacked_func(Q, KV, causal=True), lambda: attention(Q, *HALVES, causal=True)),
    "varlen": (lambda: fa2.flash_attn_varlen_func(*RAGGED, causal=True), lambda: attention_varlen(*RAGGED, causal=True)),
    "varlen, FlashAttention 3": (lambda: fa3.flash_attn_varlen_func(*RAGGED, causal=True), lambda: attention_varlen(*RAGGED, causal=True)),
    "varlen, with lse": (lambda: fa2.flash_attn_varlen_func(*RAGGED, causal=True, return_attn_probs=True),
                         lambda: attention_varlen(*RAGGED, causal=True, return_lse=True)),
    "varlen, qkv in one tensor": (lambda: fa2.flash_attn_varlen_qkvpacked_func(PACKED_ROWS, CU_K, 8, causal=True),
                                  lambda: attention_varlen(*SPLIT_ROWS, CU_K, CU_K, 8, 8, causal=True)),
    "varlen with a block table": (
        lambda: fa2.flash_attn_varlen_func(ROWS, *PAGES, CU_Q, CU_PAGES, 1, 8, causal=True, block_table=TABLE),
        lambda: attention_paged(*OVER_PAGES, cu_seqlens_q=CU_Q, max_seqlen_q=1, causal=True)),
    "vLLM's varlen": (lambda: vllm.flash_attn_varlen_func(ROWS, *KEY_ROWS, 1, CU_Q, 8, CU_K, causal=True),
                      lambda: attention_varlen(*RAGGED, causal=True)),
    "vLLM's varlen over pages": (
        lambda: vllm.flash_attn_varlen_func(q=ROWS, k=PAGES[0], v=PAGES[1], out=OUT, cu_seqlens_q=CU_Q, max_seqlen_q=1, seqused_k=LENS, max_seqlen_k=8,
                                            softmax_scale=0.25, causal=True, block_table=TABLE, fa_version=2),
        lambda: attention_paged(*OVER_PAGES, cu_seqlens_q=CU_Q, max_seqlen_q=1, out=OUT, causal=True, softmax_scale=0.25)),
    "kvcache of ragged queries over pages, FlashAttention 3": (
        lambda: fa3.flash_attn_with_kvcache(ROWS, *PAGES, cache_seqlens=LENS, page_table=TABLE, cu_seqlens_q=CU_Q, max_seqlen_q=1, causal=True),
        lambda: attention_paged(*OVER_PAGES, cu_seqlens_q=CU_Q, max_seqlen_q=1, causal=True)),
    "kvcache with cache_batch_idx": (
        lambda: fa2.flash_attn_with_kvcache(Q, *KEYS, cache_seqlens=LENS, cache_batch_idx=INDICES, causal=True),
        lambda: attention_paged(Q, *KEYS, OWN_ROWS, LENS, causal=True)),
    "kvcache over pages with lse": (
        lambda: fa2.flash_attn_with_kvcache(Q, *PAGES, cache_seqlens=LENS, block_table=TABLE, causal=True, return_softmax_lse=True),
        lambda: attention_paged(Q, *OVER_PAGES[1:], causal=True, return_lse=True)),
}
for fa, at in ((fa2, "block_table"), (fa3, "page_table")):
    of = "kvcache" if fa is fa2 else "FlashAttention 3's kvcache"
    for cache, keys, table, given in (("pages", PAGES, TABLE, {at: TABLE}), ("a contiguous cache", KEYS, OWN_ROWS, {})):
        for lens, length, before, after in (("", LENS, LENS, LENS_AFTER), (", one length for all", 5, FIVES, SIXES)):
            for new, now, options in (("", before, {}), (" with an append", after, NEW),
                                      (" with a turned append", after, TURNED)):
                turned = dict(rotary_interleaved=True) if "rotary_cos" in options else {}
                FORMS[f"{of} over {cache}{new}{lens}"] = (
                    partial(fa.flash_attn_with_kvcache, Q, *keys, cache_seqlens=length, causal=True, **options, **given),
                    partial(attention_paged, Q, *keys, table, now, causal=True, **options, **turned))


def _result(got):
    return got[0] if isinstance(got, tuple) else got


def _microseconds(call) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def overhead(translated, native) -> tuple[float, float, float]:
    """(fastest round over fastest round, median of the rounds' differences, the native call's fastest), us."""
    pairs = [(_microseconds(native), _microseconds(translated)) for _ in range(ROUNDS)]
    differences = sorted(b - a for a, b in pairs)
    fastest = min(a for a, _ in pairs)
    return min(b for _, b in pairs) - fastest, differences[len(differences) // 2], fastest


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
@pytest.mark.parametrize("form", FORMS)
def test_a_translated_call_costs_at_most_3_us_over_the_native_one(form, mode):
    translated, native = FORMS[form]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mode():
            torch.testing.assert_close(_result(translated()), _result(native()), rtol=0, atol=0)
            fastest, median, whole = overhead(translated, native)
    finally:
        torch.set_num_threads(threads)
    print(f"\n{form}, {mode.__name__}: {fastest:.2f} us over {whole:.1f} by the fastest rounds, {median:.2f} by the median difference")
    assert fastest <= LIMIT_US
