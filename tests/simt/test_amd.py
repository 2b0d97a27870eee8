"""The shared kernels over csrc_hip's own warp.h and mma.h, on an emulated AMD device, against the float64 reference.

gfx9 runs waves of 64 with MFMA, gfx11 and gfx12 waves of 32 with their WMMA. The emulation's layouts come from AMD's
Matrix Instruction Calculator, not from mma.h; waves and blocks also run in reverse and random order.
"""

from __future__ import annotations

import random

import pytest
import torch

from portattn import reference
from portattn.problem import Call
from portattn.testing.tolerance import close_lse, close_out

from . import host
from .test_decode import check, paged, poisoned_left

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")

GFX = {"gfx9": dict(wave=64, gfx=9), "gfx11": dict(wave=32, gfx=11), "gfx12": dict(wave=32, gfx=12)}


def how(target: str, **more):
    """The decode kernel as it is shipped: pieces wait in registers, one stage; two waves keep the runs short."""
    return GFX[target] | dict(stages=1, waves=2, grid=6) | more


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_head_sizes_and_types(target, dtype, dim):
    check(*paged([37, 5, 129], dim=dim, dtype=dtype), **how(target))


@pytest.mark.parametrize("target", GFX)
def test_head_size_256_passes_in_halves_where_registers_are_short(target):
    check(*paged([40, 70], dim=256, heads=(2, 1)), **how(target, waves=3, grid=3))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("dim, dim_v", [(36, 36), (33, 20), (80, 80)])
def test_odd_head_sizes_are_padded(target, dim, dim_v):
    check(*paged([40, 100], dim=dim, dim_v=dim_v), **how(target))


@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("target", GFX)
def test_bits_do_not_depend_on_the_order_of_lanes_and_blocks(order, target):
    call, args, kw = paged([200, 70, 33], len_q=3)
    first = check(call, args, kw, **how(target))
    again = host.decode(call, order=order, seed=5, **how(target))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("grid", [2, 14, 60])
def test_ragged_lengths_at_any_number_of_workers(target, grid):
    check(*paged([37, 200, 0, 5, 64]), **how(target, grid=grid))


OPTIONS = [
    dict(window=(10, 0)), dict(window=(-1, 2), causal=False, len_q=4), dict(softcap=2.0), dict(causal=False, len_q=5),
    dict(alibi_slopes=torch.tensor([[0.5, 0.1, 0.0, 2.0], [0.3, 0.2, 0.9, 1.0]])), dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])),
    dict(k_scale=torch.tensor([[0.5, 2.0], [1.5, 1.0]]), v_scale=torch.tensor([0.25, 3.0])), dict(page=7), dict(page=1), dict(offset=3, page=7),
]


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_masks_and_options(target, options):
    check(*paged([90, 45], **dict(options)), **how(target))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("page", [1, 7, 16, 48])
def test_pages_left_of_every_window_may_hold_anything(page, target):
    call, args, kw = paged([100, 333, 30], len_q=3, window=(16, 0), page=page)
    check(poisoned_left(call), args, kw, **how(target))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("options", [dict(dim=256, heads=(2, 1)), dict(dim=80, dim_v=36, cache="e5m2"), dict(offset=1), dict(batch_invariant=True, q_lens=[2, 9, 40])],
                         ids=lambda o: "-".join(o))
def test_pages_left_of_windows_with_other_loads(options, target):
    """Pieces that wait in halves, of 8 bits, that are not aligned; cuts, and several tiles of a sequence."""
    call, args, kw = paged([100, 333, 90], window=(20, 0), alibi_slopes=torch.full((options.get("heads", (4, 2))[0],), 0.1), **dict(options))
    check(poisoned_left(call), args, kw, **how(target))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("cache", ["e4m3", "e5m2", "e4m3fnuz"])
def test_eight_bit_caches_are_widened_on_their_way(target, cache):
    check(*paged([70, 33], cache=cache, k_scale=torch.tensor(0.7), v_scale=torch.tensor([1.1, 0.4])), **how(target))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("group", [3, 8, 16])
def test_group_sizes(target, group):
    check(*paged([60, 20], heads=(2 * group, 2), len_q=2), **how(target))


@pytest.mark.parametrize("target", GFX)
def test_mixed_query_lengths_and_rows_without_keys(target):
    check(*paged([50, 100, 17, 3], q_lens=[1, 40, 0, 5], index=torch.int64), **how(target))


@pytest.mark.parametrize("target", GFX)
def test_dense_and_varlen(target):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 64, generator=g).half() for n, h in ((3, 4), (70, 2), (70, 2)))
    out, lse = host.decode(Call(q, k, v, 0.125, causal=True, max_seqlen_q=3, max_seqlen_k=70), **how(target))
    want, want_lse = reference.attention(q, k, v, causal=True)
    plain, plain_lse = reference.plain(reference.attention, q, k, v, causal=True)
    close_out(out, want, plain, q.dtype)
    close_lse(lse, want_lse, plain_lse, q.dtype)
    cu_q, cu_k = torch.tensor([0, 3, 6]), torch.tensor([0, 70, 140])
    ragged = Call(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), 0.125, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3,
                  max_seqlen_k=70)
    again, _ = host.decode(ragged, **how(target))
    assert torch.equal(again.view_as(out), out)


@pytest.mark.parametrize("target", GFX)
def test_batch_invariant_rows_are_the_same_bits_alone_and_in_a_batch(target):
    call, args, kw = paged([600, 40], batch_invariant=True)
    out, lse = check(call, args, kw, **how(target))
    alone = call._replace(q=call.q[:1], block_table=call.block_table[:1], kv_lens=call.kv_lens[:1])
    got, got_lse = host.decode(alone, **how(target, grid=2))
    assert torch.equal(got[0], out[0]) and torch.equal(got_lse[0], lse[0])


@pytest.mark.parametrize("target", GFX)
def test_ones_for_values_give_ones(target):
    """A sum over half of the lanes would halve them."""
    for n in (33, 63, 64, 65):
        call, args, kw = paged([n], heads=(1, 1))
        call.v[~call.v.isnan()] = 1.0
        out, _ = host.decode(call, **how(target, grid=1))
        assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("target", GFX)
def test_random_problems(target):
    random.seed(7)
    for seed in range(4):
        lens = [random.choice([0, 1, 15, 16, 17, 63, 64, 65, 130]) for _ in range(random.randint(1, 4))]
        call, args, kw = paged(lens, heads=random.choice([(2, 1), (6, 2)]), page=random.choice([16, 5, 64]), seed=seed,
                               q_lens=[random.randint(0, 9) for _ in lens] if random.random() < 0.5 else None,
                               window=random.choice([(-1, -1), (20, 0)]), batch_invariant=random.random() < 0.3)
        if call.q.numel():
            check(call, args, kw, **how(target, grid=random.choice([4, 12]), order=host.RANDOM, seed=seed))
