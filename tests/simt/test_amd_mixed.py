"""Prefill tiles after decodes over csrc_hip's own headers on an emulated AMD device: keys and values through registers, values turned."""

from __future__ import annotations

import pytest
import torch

from . import host
from .test_amd import GFX
from .test_decode import paged, poisoned_left
from .test_mixed import check

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")


def how(target: str, **more):
    """`m`: where the head size allows it MFMA's tiles have 32 rows, so rows come in pairs of 16."""
    return GFX[target] | dict(stages=1, waves=2, parts=4, m=2 if target == "gfx9" else 1, n=32) | more


OPTIONS = [
    dict(), dict(causal=False), dict(window=(40, 0)), dict(window=(30, 5), causal=False, softcap=3.0), dict(offset=1), dict(page=7),
    dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])), dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.0, 2.0])),
]


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "causal")
def test_chunks_beside_decodes(options, target):
    check(*paged([150, 33, 70, 0, 90], q_lens=[70, 1, 40, 0, 2], **options), **how(target))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("dtype, dim, dim_v, n", [(torch.float16, 128, 128, 64), (torch.bfloat16, 80, 40, 32), (torch.float16, 96, 91, 64), (torch.float16, 256, 256, 16)])
def test_head_sizes_and_types(target, dtype, dim, dim_v, n):
    n = max(n, 32) if target == "gfx9" else n
    check(*paged([100, 40], dim=dim, dim_v=dim_v, heads=(2, 1), q_lens=[90, 1], dtype=dtype), **how(target, n=n))


def test_several_large_tiles_a_wave():
    check(*paged([100, 40], heads=(2, 1), q_lens=[90, 1]), **how("gfx9", m=4))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("options", [dict(page=1), dict(page=7), dict(), dict(page=48), dict(offset=3, page=16), dict(cache="e5m2", dim=96, dim_v=80, index=torch.int64)],
                         ids=lambda o: "-".join(o) or "page16")
def test_pages_left_of_every_window_may_hold_anything(options, target):
    call, args, kw = paged([300, 133, 90], q_lens=[150, 40, 1], window=(20, 0), **dict(options))
    check(poisoned_left(call), args, kw, **how(target))


@pytest.mark.parametrize("target", GFX)
def test_eight_bit_caches_and_scales(target):
    call, args, kw = paged([100, 40], cache={"gfx9": "e4m3fnuz", "gfx11": "e5m2", "gfx12": "e4m3"}[target], q_lens=[70, 3], k_scale=torch.tensor(0.7), v_scale=torch.tensor([[1.1, 0.4], [2.0, 1.0]]))
    check(call._replace(out=torch.empty(73, 4, 65)[..., :64]), args, kw, **how(target))


@pytest.mark.parametrize("target", GFX)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_group_sizes_with_rotary(target, group):
    angle = torch.arange(140)[:, None] * 0.3 ** torch.arange(16)
    check(*paged([130, 45], heads=(2 * group, 2), q_lens=[80, 2], rotary_cos=angle.cos(), rotary_sin=angle.sin()), **how(target))


@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("target", GFX)
def test_bits_do_not_depend_on_the_order_of_lanes_and_blocks(order, target):
    call, args, kw = paged([200, 70, 33], q_lens=[70, 1, 20])
    first, again = host.mixed(call, **how(target)), host.mixed(call, order=order, seed=3, **how(target))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("target", GFX)
def test_batch_invariant_bits_are_those_of_the_decode_kernel(target):
    call, args, kw = paged([300, 120, 40], q_lens=[1, 70, 3], batch_invariant=True)
    out, lse = check(call, args, kw, **how(target))
    alone = call._replace(q=call.q[:1], cu_seqlens_q=torch.tensor([0, 1]), block_table=call.block_table[:1], kv_lens=call.kv_lens[:1], max_seqlen_q=1)
    got, got_lse = host.decode(alone, grid=4, **GFX[target], stages=1, waves=2)
    assert torch.equal(got[0], out[0]) and torch.equal(got_lse[0], lse[0])


@pytest.mark.parametrize("target", GFX)
def test_nan_in_a_value_reaches_only_rows_that_see_it(target):
    """A row's block of keys may hold it; a row of another sequence must not."""
    call, args, kw = paged([90, 90], q_lens=[80, 80])
    call.v[call.block_table[0, 2], 3] = float("nan")
    out, _ = host.mixed(call, **how(target))
    assert out[79].isnan().all() and not out[80:].isnan().any()
