"""Prefill tiles and decode parts in one launch on the host device, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from portattn import native, reference
from portattn.problem import Call
from portattn.testing.tolerance import close_lse, close_out

from . import host
from .test_decode import paged, poisoned_left

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")


def check(call, args, kw, **how):
    out, lse = host.mixed(call, **how)
    want, want_lse = reference.attention_paged(*args, **kw)
    plain, plain_lse = reference.plain(reference.attention_paged, *args, **kw)
    close_out(out, want, plain, call.q.dtype)
    close_lse(lse, want_lse, plain_lse, call.q.dtype)
    return out, lse


@pytest.mark.parametrize("wave, waves", [(32, 4), (64, 2)])
@pytest.mark.parametrize("options", [
    dict(), dict(causal=False), dict(window=(40, 0)), dict(window=(30, 5), causal=False), dict(softcap=3.0), dict(offset=1),
    dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])), dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.0, 2.0])), dict(page=7),
], ids=lambda o: "-".join(o) or "causal")
def test_chunks_beside_decodes(options, wave, waves):
    check(*paged([150, 33, 200, 0, 90], q_lens=[70, 1, 40, 0, 2], **options), parts=6, wave=wave, waves=waves)


def test_more_queries_than_keys_and_no_keys_at_all():
    out, lse = check(*paged([20, 0], len_q=70), parts=2)
    assert not out[1].any() and (lse[1] == float("-inf")).all() and not out[0, :50].any()


@pytest.mark.parametrize("dim, dim_v, m, n", [(128, 128, 2, 32), (96, 40, 2, 64), (256, 256, 1, 32), (20, 20, 2, 16)])
def test_head_dims(dim, dim_v, m, n):
    check(*paged([100, 40], dim=dim, dim_v=dim_v, heads=(2, 1), q_lens=[90, 1], dtype=torch.float16), parts=2, m=m, n=n, stages=2)


def test_eight_bit_cache_scales_and_float_out():
    call, args, kw = paged([100, 40], cache="e4m3", q_lens=[60, 3], k_scale=torch.tensor(0.7), v_scale=torch.tensor([[1.1, 0.4], [2.0, 1.0]]))
    check(call._replace(out=torch.empty(63, 4, 65)[..., :64]), args, kw, parts=4)


@pytest.mark.parametrize("page", [1, 16, 48])
def test_pages_left_of_every_window_may_hold_anything(page):
    call, args, kw = paged([300, 133, 90], q_lens=[150, 40, 1], window=(20, 0), page=page)
    check(poisoned_left(call), args, kw, parts=6)


def test_rotary_turns_q():
    angle = torch.arange(140)[:, None] * 0.3 ** torch.arange(16)
    check(*paged([130, 45], q_lens=[80, 2], rotary_cos=angle.cos(), rotary_sin=angle.sin()), parts=4)


@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
def test_bits_do_not_depend_on_the_order_of_lanes_and_blocks(order):
    call, args, kw = paged([200, 70, 33], q_lens=[50, 1, 20])
    first, again = host.mixed(call, parts=6), host.mixed(call, parts=6, order=order, seed=3)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_batch_invariant_bits_are_those_of_the_decode_kernel():
    call, args, kw = paged([600, 200, 40], q_lens=[1, 80, 3], batch_invariant=True)
    out, lse = check(call, args, kw, parts=6)
    alone = call._replace(q=call.q[:1], cu_seqlens_q=torch.tensor([0, 1]), block_table=call.block_table[:1], kv_lens=call.kv_lens[:1],
                          max_seqlen_q=1)
    got, got_lse = host.decode(alone, grid=4)
    assert torch.equal(got[0], out[0]) and torch.equal(got_lse[0], lse[0])


def test_dense_prefill():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 80, h, 64, generator=g).half() for h in (4, 2, 2))
    out, lse = host.mixed(Call(q, k, v, 0.125, causal=True, max_seqlen_q=80, max_seqlen_k=80), parts=2)
    close_out(out, reference.attention(q, k, v, causal=True)[0], reference.plain(reference.attention, q, k, v, causal=True)[0], q.dtype)


@pytest.mark.parametrize("kv", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("dim", native.HEAD_DIMS)
@pytest.mark.parametrize("shared_kib", [99, 163, 227])
def test_every_instance_fits_the_device_that_it_is_chosen_for(kv, dim, shared_kib):
    limits = native.Limits(shared_kib << 10, (shared_kib + 1) << 10, 100)
    for choose in (native.decode_shape, native.mixed_shape):
        shape = choose("bfloat16", kv, dim, limits)
        assert shape.shared <= limits.shared_block and shape.blocks * (shape.shared + 1024) <= limits.shared_sm


@pytest.mark.parametrize("dim, kv", [(64, "bfloat16"), (64, "float8_e4m3fn")])
def test_the_host_knows_the_kernels_shared_memory_and_struct(dim, kv):
    limits = native.Limits(227 << 10, 228 << 10, 132)
    for kernel, choose in (("decode", native.decode_shape), ("mixed", native.mixed_shape)):
        shape = choose("bfloat16", kv, dim, limits)
        options = {name[3:].lower(): value for name, value in shape.instance.options if name != "PA_BLOCKS"}
        library = host.build(kernel, 32, **options)
        assert library.portattn_simt_shared_bytes() == shape.shared
        if kernel == "decode":
            assert library.portattn_simt_params_bytes() == len(native.pack(native.ATTENTION, {}))
