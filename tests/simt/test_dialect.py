"""Lengths counted otherwise, and lse with heads first (portattn/dialect.py), as the kernels read and write them: bit for bit what
they make of the same call said in portattn's own way."""

from __future__ import annotations

import pytest
import torch

from portattn import dialect, reference
from portattn.problem import Call

from . import host
from .test_append_merge import same
from .test_decode import paged
from .test_plain import decode as plain
from .test_prefill_sm90 import prefill_sm90

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")

FORMS = [dialect.OURS, dialect.HEADS_FIRST, dialect.FLASH_ATTN_2]
COUNTINGS = [dialect.AFTER, dialect.BEFORE, dialect.PREFIX_SUMS]
KERNELS = {  # name: (the kernel, a call's lengths and options)
    "decode": (lambda call: host.decode(call, grid=6), ([40, 0, 300], dict(len_q=3))),
    "decode, ragged": (lambda call: host.decode(call, grid=6), ([40, 0, 300, 9], dict(q_lens=[3, 1, 2, 4]))),
    "decode, invariant": (lambda call: host.decode(call, grid=6), ([40, 0, 700], dict(batch_invariant=True))),
    "decode, waves of 64": (lambda call: host.decode(call, wave=64, waves=2, grid=6), ([40, 0, 300, 9], dict(q_lens=[3, 1, 2, 4]))),
    "mixed": (lambda call: host.mixed(call, parts=4), ([150, 0, 40], dict(q_lens=[70, 2, 1]))),
    "mixed, alike": (lambda call: host.mixed(call, parts=2), ([90, 20], dict(len_q=40))),
    "plain": (lambda call: plain(call, workers=3), ([37, 300, 0, 5], {})),
    "plain, ragged": (lambda call: plain(call, workers=3), ([37, 300, 0, 5, 33], dict(q_lens=[1, 1, 1, 1, 1]))),
    "prefill_sm90": (prefill_sm90, ([150, 20], dict(len_q=70))),
    "prefill_sm90, ragged": (prefill_sm90, ([150, 0, 40], dict(q_lens=[70, 40, 33]))),
}


def said(call: Call, counting: int, form: int) -> Call:
    """The call with lengths that count so and an lse of this form."""
    lens = call.kv_lens
    q_lens = call.q.shape[1] if call.cu_seqlens_q is None else call.cu_seqlens_q.diff()
    if counting == dialect.BEFORE:  # below zero where a sequence has fewer keys than queries
        lens = (lens - q_lens).to(lens.dtype)
    if counting == dialect.PREFIX_SUMS:
        lens = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(lens.dtype)
    return call._replace(kv_lens=lens, counting=counting, lse_form=form)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["32", "64"])
@pytest.mark.parametrize("counting", COUNTINGS)
@pytest.mark.parametrize("name", KERNELS)
def test_lengths_and_lse_are_as_the_caller_says(name, counting, index):
    run, (lens, options) = KERNELS[name]
    if "plain" in name and index is torch.int64:
        pytest.skip("feature: plain.h reads lengths of 32 bits")
    call, *_ = paged(lens, index=index, **options)
    out, lse = run(call._replace(out=None))
    unseen = lse == -float("inf")
    assert unseen.any() and not unseen.all()
    for form in FORMS:
        got, got_lse = run(said(call, counting, form))
        assert torch.equal(got, out)
        got_lse = got_lse.mT if form else got_lse
        assert torch.equal(got_lse, lse.masked_fill(unseen, float("inf")) if form == dialect.FLASH_ATTN_2 else lse)


@pytest.mark.parametrize("kernel", [lambda call: host.decode(call, grid=6), lambda call: host.mixed(call, parts=2), prefill_sm90],
                         ids=["decode", "mixed", "prefill_sm90"])
def test_of_dense_keys_too_and_a_sink_stays_what_it_is(kernel):
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, heads, 64, generator=g).bfloat16() for n, heads in ((70, 4), (40, 2), (40, 2)))
    call = Call(q, k, v, 0.125, causal=True, window_right=0, max_seqlen_q=70, max_seqlen_k=40)
    for sinks in (None, torch.tensor([1.0, -2.0, 0.5, 8.0])):
        out, lse = kernel(call._replace(sinks=sinks))
        got, got_lse = kernel(call._replace(sinks=sinks, lse_form=dialect.FLASH_ATTN_2))
        want = lse if sinks is not None else lse.masked_fill(lse == -float("inf"), float("inf"))
        assert got_lse.shape == (2, 4, 70) and torch.equal(got, out) and torch.equal(got_lse.mT, want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["32", "64"])
@pytest.mark.parametrize("counting", COUNTINGS)
@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
def test_an_append_lands_by_lengths_counted_otherwise(ragged, counting, index):
    g = torch.Generator().manual_seed(1)
    q_lens = torch.tensor([3, 1, 2] if ragged else [2, 2, 2], dtype=torch.int32)
    cu = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int() if ragged else None
    lead = (6,) if ragged else (3, 2)
    k, v = torch.randn(*lead, 2, 32, generator=g).half(), torch.randn(*lead, 2, 32, generator=g).half()
    caches = [torch.zeros(9, 5, 2, 32).half() for _ in range(2)]
    table, lens = torch.tensor([[4, 1], [0, 2], [8, 3]], dtype=torch.int32), torch.tensor([7, 1, 10], dtype=index)
    q = torch.zeros(*lead, 4, 32).half()
    call = Call(q, *caches, 1.0, causal=True, window_right=0, max_seqlen_q=3, max_seqlen_k=10, block_table=table, kv_lens=lens,
                cu_seqlens_q=cu, k_new=k, v_new=v)
    wanted = reference.caches_after(q, *caches, table, lens, k=k, v=v, cu_seqlens_q=cu)
    assert wanted[0].any()
    host.append(k, v, *caches, call=said(call, counting, dialect.OURS))
    for got, want in zip(caches, wanted):
        same(got, want)
