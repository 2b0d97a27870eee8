"""The append and merge kernels on the host device against the reference; 8-bit rounding against every code."""

from __future__ import annotations

import math

import pytest
import torch

from portattn import reference
from portattn.problem import Call

from . import host

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")

EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal stored values, NaN equal to NaN; float32 within an ulp, since the reference divides in float64."""
    if got.dtype is torch.float32:
        assert torch.allclose(got, want, rtol=3e-7, atol=0)
        return
    assert torch.equal(got.float().nan_to_num(nan=12345.0), want.float().nan_to_num(nan=12345.0))


@pytest.mark.parametrize("cache", EIGHT, ids=lambda d: str(d)[6:])
def test_storing_rounds_to_nearest_even_and_saturates(cache):
    codes = torch.arange(256, dtype=torch.uint8).view(cache).float()
    exact = codes[torch.isfinite(codes)].unique()
    between = (exact[1:] + exact[:-1]) / 2
    edges = torch.cat([exact, between, between * 1.001, between * 0.999, torch.tensor([1e9, -1e9, math.inf, -math.inf, math.nan, 1e-12])])
    x = torch.nn.functional.pad(edges, (0, -len(edges) % 32)).view(-1, 1, 32)
    caches = [torch.zeros(len(x), 1, 1, 32, dtype=cache) for _ in range(2)]
    host.append(x, x, *caches, slots=torch.arange(len(x)))
    want, _ = reference.cache_append(x, x, *[torch.zeros_like(c) for c in caches], torch.arange(len(x)))
    same(caches[0], want)


@pytest.mark.parametrize("dtype, cache", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, EIGHT[0])])
@pytest.mark.parametrize("scaled", [False, True])
def test_slots_are_written_and_negative_ones_skipped(dtype, cache, scaled):
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(6, 2, 40, generator=g).to(dtype), torch.randn(6, 2, 24, generator=g).to(dtype)
    caches = [torch.zeros(3, 8, 2, d).to(cache) for d in (40, 24)]
    slots = torch.tensor([23, -1, 0, 9, -7, 8])
    scales = dict(k_scale=torch.tensor([0.5, 3.0]), v_scale=0.7) if scaled else {}
    want = reference.cache_append(k, v, *[c.clone() for c in caches], slots, **scales)
    host.append(k, v, *caches, slots=slots, **scales)
    same(caches[0], want[0])
    same(caches[1], want[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_call_appends_turned_keys_where_they_land(ragged, interleaved):
    g = torch.Generator().manual_seed(1)
    rnd = lambda *s: torch.randn(*s, generator=g).half()
    caches = [torch.zeros(9, 5, 2, 32).half() for _ in range(2)]
    table, lens = torch.tensor([[3, 1, 7], [0, 2, 8], [4, 5, 6]]), torch.tensor([11, 2, 0], dtype=torch.int32)
    angle = torch.arange(20)[:, None] * 0.4 ** torch.arange(8)
    kw = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=interleaved)
    if ragged:
        cu = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
        k, v, q = rnd(9, 2, 32), rnd(9, 2, 32), rnd(9, 4, 32)  # the last row belongs to no sequence
        kw |= dict(cu_seqlens_q=cu)
    else:
        k, v, q = rnd(3, 3, 2, 32), rnd(3, 3, 2, 32), rnd(3, 3, 4, 32)
    want = reference.caches_after(q, *caches, table, lens, k=k, v=v, **kw)
    call = Call(q, *caches, 1.0, block_table=table, kv_lens=lens, k_new=k, v_new=v, **kw)
    host.append(k, v, *caches, call=call)
    for got, expected in zip(caches, want):
        assert (got.double() - expected.double()).abs().max() <= 2e-3 and torch.equal(got == 0, expected == 0)


def test_tokens_past_the_table_and_slots_past_the_cache_go_nowhere():
    whole = torch.full((8, 4, 2, 8), 3.0)
    caches, new = [whole[1:7], whole[1:7]], torch.ones(2, 1, 2, 8)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    for lens in ([5, 9], [2**31 - 1, 400]):
        call = Call(torch.ones(2, 1, 4, 8), *caches, 1.0, block_table=table, kv_lens=torch.tensor(lens), k_new=new, v_new=new)
        host.append(new, new, *caches, call=call)
    host.append(new[:, 0], new[:, 0], *caches, slots=torch.tensor([24, 2**40]))
    assert (whole == 3).all()


@pytest.mark.parametrize("wild", [torch.tensor([-1, 6], dtype=torch.int32), torch.tensor([6, -1]), torch.tensor([2**32 + 1, -(2**32) + 1])])
def test_tokens_of_pages_outside_the_cache_go_nowhere(wild):
    whole = torch.full((8, 4, 2, 8), 3.0)
    caches, new = [whole[1:7], whole[1:7]], torch.ones(3, 2, 2, 8)
    table = torch.stack((torch.tensor([2, 0, 4]), torch.tensor([*wild, 5])), 1).to(wild.dtype)  # of each sequence the second page is live
    call = Call(torch.ones(3, 2, 4, 8), *caches, 1.0, block_table=table, kv_lens=torch.tensor([7, 5, 8]), k_new=new, v_new=new)
    host.append(new, new, *caches, call=call)  # the second sequence's first token lands in page 0
    written = (whole == 1).all((2, 3)).nonzero().tolist()
    assert written == [[1, 3], [6, 2], [6, 3]] and ((whole == 3) | (whole == 1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -math.inf, 9.0])])
def test_states_merge_exactly_and_empty_ones_do_nothing(dtype, sinks):
    g = torch.Generator().manual_seed(2)
    outs, lses = torch.randn(4, 5, 3, 40, generator=g).to(dtype), 3 * torch.randn(4, 5, 3, generator=g)
    lses[1], lses[:, 2] = -math.inf, -math.inf
    outs[1] = math.nan
    outs[:, 2] = math.nan
    out, lse = host.merge(outs, lses, sinks)
    want, want_lse = reference.merge_states(outs, lses, sinks=sinks)
    assert torch.allclose(out.double(), want, atol={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype])
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
