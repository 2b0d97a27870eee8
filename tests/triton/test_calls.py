"""What calls.py gives to a launch, with no GPU: pointers in the kernel's order, whichever way a call came."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
from portattn.backends.triton import calls, launch  # noqa: E402

from portattn.backends import triton as adapter  # noqa: E402
from portattn.problem import Call  # noqa: E402
from portattn.registry import DIRECT  # noqa: E402
from tests import refusals  # noqa: E402


@pytest.fixture
def launches(triton_without_gpu):
    """The arguments of every launch; the kernels are compiled by nobody."""
    seen: list = []
    triton_without_gpu(seen)
    return seen


def paged(**changed) -> Call:
    bf = lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
    return Call(bf(3, 1, 8, 64), bf(5, 16, 2, 64), bf(5, 16, 2, 64), 0.125, causal=True, max_seqlen_q=1, max_seqlen_k=64,
                block_table=torch.zeros(3, 4, dtype=torch.int32), kv_lens=torch.zeros(3, dtype=torch.int32), out=bf(3, 1, 8, 64))._replace(**changed)


CALLS = {
    "decode": paged(),
    "without-out": paged(out=None),
    "lse": paged(return_lse=True),
    "everything": paged(alibi_slopes=torch.ones(8), sinks=torch.ones(8), k_scale=torch.ones(2), v_scale=torch.ones(3, 2), return_lse=True),
    "number": paged(k_scale=2.0, v_scale=torch.ones(()), window_left=5),
    "ragged": paged(q=torch.zeros(3, 8, 64).bfloat16(), out=torch.zeros(3, 8, 64).bfloat16(), cu_seqlens_q=torch.tensor([0, 1, 2, 3])),
}


def directly(run, call, **changed):
    t = call._replace(**changed)
    return run.direct(t.q, t.k, t.v, t.block_table, t.kv_lens, *(getattr(t, name) for name in DIRECT), t.out)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_taken_directly_launches_what_it_launches_otherwise(launches, name):
    call = CALLS[name]
    bound = types.SimpleNamespace(state={}, verbatim=True, direct=None)
    adapter.attention(call, bound)
    run = bound.state["triton"]
    assert bound.direct == run.direct and run.taken_directly
    got = directly(run, call)
    out, lse = got if call.return_lse else (got, None)
    assert out is call.out or call.out is None and out.shape == call.q.shape and out.dtype == call.q.dtype
    first, second = map(list, launches)
    assert second[4] == out.data_ptr() and (lse is None or second[5] == lse.data_ptr())
    for place in [4] * (call.out is None) + [5] * (lse is not None):  # results that are made anew
        first[place] = second[place]
    assert first == second


def test_what_needs_a_closer_look_is_not_taken_directly(launches, monkeypatch):
    call = paged(sinks=torch.zeros(8, dtype=torch.bfloat16))
    run = calls.Attention(call)
    assert directly(run, call) is None, "the first of its kind is prepared by a call"
    run(call)
    shifted = torch.zeros(call.k.numel() + 1, dtype=torch.bfloat16)[1:].view(call.k.shape)
    buffer = torch.zeros(call.q.numel() + 64, dtype=torch.bfloat16)
    for changed in (dict(k=shifted), dict(out=call.q), dict(q=buffer[:1536].view(3, 1, 8, 64), out=buffer[64:].view(3, 1, 8, 64)),
                    dict(out=buffer[:1536].view(3, 1, 8, 64), sinks=buffer[8:16])):
        assert directly(run, call, **changed) is None, changed.keys()
    monkeypatch.setattr(calls, "_current_device", lambda: 1)
    assert directly(run, call) is None and len(launches) == 1


def test_out_over_a_scale_is_not_taken_directly(launches):
    call = paged(k_scale=torch.ones(2), v_scale=2.0)
    run = calls.Attention(call)
    run(call)
    out = torch.zeros(call.q.numel() // 2)
    assert directly(run, call, out=out.view(torch.bfloat16).view(call.q.shape), k_scale=out[2:4]) is None and len(launches) == 1


def test_appends_and_turned_queries_are_calls(launches):
    new = torch.zeros(3, 1, 2, 64, dtype=torch.bfloat16)
    for call in (paged(k_new=new, v_new=new), paged(rotary_cos=torch.ones(64, 16), rotary_sin=torch.ones(64, 16)), paged(q=torch.zeros(0, 1, 8, 64).bfloat16(), out=None)):
        assert not calls.Attention(call).taken_directly


@pytest.mark.parametrize("name", ["k", "v"])
def test_new_tokens_over_a_cache_are_refused_before_anything_is_launched(launches, name):
    refusals.refuses_tokens_over_a_cache(calls.Attention, paged(), name, launches.clear)
    assert not launches


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_known_call_on_what_was_freed_is_refused_before_it_is_launched(launches, name):
    call = paged()
    run = calls.Attention(call)
    run(call)
    refusals.refuses_what_was_freed(run, directly, call, name)
    assert len(launches) == 1


def test_a_launch_in_a_thread_without_a_context_leaves_its_device(monkeypatch):
    current, contexts, on = [0], set(), []

    def exchange(device):
        before, current[0] = current[0], device
        return before

    def set_device(device):
        current[0] = device
        contexts.add(device)

    def enqueue(stream, changing):
        on.append(current[0])
        return 0 if contexts == {1} else launch.NO_CONTEXT

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    ready = object.__new__(launch.Launch)
    ready.device, ready.driver, ready._enqueue = 1, object(), enqueue
    ready(0)
    assert on == [0, 1] and current == [0]
