"""Prefill tiles after decodes as the compilers made them, executed instruction by instruction, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from portattn import instances, reference
from portattn.instances import limits_of
from portattn.problem import Call
from portattn.testing.tolerance import close_lse, close_out
from tests.simt.test_decode import paged, poisoned_left

from . import launch, program
from .test_attention import ARCHS, CHIEF, check


@pytest.mark.parametrize("arch", ARCHS)
def test_chunks_beside_decodes_in_any_order(arch):
    call, args, kw = paged([150, 33, 200, 0, 90], q_lens=[70, 1, 100, 0, 2], dim=128)
    first = check(arch, call, args, kw, grid=4, tiles=True)
    again = launch.attention(arch, call, grid=4, tiles=True, order=program.RANDOM, seed=3)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


OPTIONS = [
    dict(window=(40, 0), softcap=3.0, page=7), dict(causal=False, page=1, sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])),
    dict(offset=3, alibi_slopes=torch.tensor([0.5, 0.1, 0.0, 2.0])), dict(batch_invariant=True, window=(30, 5), index=torch.int64),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("arch", CHIEF)
def test_masks_and_options(arch, options):
    check(arch, *paged([150, 40], q_lens=[90, 3], dim=128, **dict(options)), grid=2, tiles=True)


@pytest.mark.parametrize("page, offset", [(16, 0), (7, 0), (16, 3)])
@pytest.mark.parametrize("arch", CHIEF)
def test_pages_left_of_every_window_may_hold_anything(arch, page, offset):
    call, args, kw = paged([200, 133, 90], q_lens=[100, 40, 1], dim=128, window=(20, 0), page=page, offset=offset)
    check(arch, poisoned_left(call), args, kw, grid=2, tiles=True)


@pytest.mark.parametrize("dtype, dim, dim_v, cache", [(torch.float16, 64, 64, None), (torch.bfloat16, 256, 200, None), (torch.float16, 128, 128, "e4m3"),
                                                      (torch.float16, 96, 96, None), (torch.bfloat16, 64, 25, None)])
@pytest.mark.parametrize("arch", CHIEF)
def test_types_and_head_sizes(arch, dtype, dim, dim_v, cache):
    more = dict(k_scale=torch.tensor(0.7), v_scale=torch.tensor([1.1, 0.4])) if cache else {}
    check(arch, *paged([100, 40], dim=dim, dim_v=dim_v, dtype=dtype, cache=cache, q_lens=[90, 1], **more), grid=2, tiles=True)


@pytest.mark.parametrize("dtype, cache, lens, q_lens, options", [
    (torch.float16, "e4m3", [150, 33, 200], [100, 1, 70], dict(window=(30, 0), page=7)), (torch.bfloat16, "e5m2", [140, 70], [130, 65], dict(page=48)),
    (torch.float16, "e4m3fnuz", [131, 40], [80, 3], dict(softcap=3.0, dim_v=90)),
])
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_head_size_96_with_8_bit_caches_has_the_fewest_registers_to_spare(arch, dtype, cache, lens, q_lens, options):
    """On gfx90a, where a scalar register was once kept in a vector one; in every order of waves and blocks."""
    call, args, kw = paged(lens, q_lens=q_lens, dim=96, dtype=dtype, cache=cache, k_scale=torch.tensor(0.7), v_scale=torch.tensor([1.1, 0.4]), **dict(options))
    first = check(arch, call, args, kw, grid=4, tiles=True)
    for order in (program.REVERSE, program.RANDOM):
        again = launch.attention(arch, call, grid=4, tiles=True, order=order, seed=5)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_dense_and_varlen_prefill(arch):
    if reason := program.missing(arch):
        pytest.skip(reason)
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 80, h, 128, generator=g).half() for h in (4, 2, 2))
    out, lse, stats = launch.attention(arch, Call(q, k, v, 128**-0.5, causal=True, max_seqlen_q=80, max_seqlen_k=80), grid=2, tiles=True)
    want, want_lse = reference.attention(q, k, v, causal=True)
    plain, plain_lse = reference.plain(reference.attention, q, k, v, causal=True)
    close_out(out, want, plain, q.dtype)
    close_lse(lse, want_lse, plain_lse, q.dtype)
    cu = torch.tensor([0, 80, 160])
    ragged = Call(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), 128**-0.5, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=80,
                  max_seqlen_k=80)
    assert torch.equal(launch.attention(arch, ragged, grid=2, tiles=True)[0].view_as(out), out)


@pytest.mark.parametrize("arch, matrix_clocks, most", [("gfx90a", 64 * 64, 1180), ("gfx942", 64 * 32, 1130)])
def test_the_prefill_loop_issues_few_instructions_beside_its_matrices(arch, matrix_clocks, most):
    """Of a wave, for 32 rows times 64 keys: what is executed, counted as it runs. `most` is what the loop takes today (csrc_hip/prefill.hip
    has the numbers; four clocks to issue one). LDS: no two words of a bank at once."""
    if reason := program.missing(arch):
        pytest.skip(reason)
    shape = instances.staged_prefill_shape("bfloat16", "bfloat16", 128, limits_of(arch))
    waves, counted = shape.threads // 64, []
    for keys in (512, 1024):
        g = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, n, 1, 128, generator=g).bfloat16() for n in (shape.rows, keys, keys))
        call = Call(q, k, v, 128**-0.5, max_seqlen_q=shape.rows, max_seqlen_k=keys)
        counted.append(launch.attention(arch, call, grid=1, tiles=True)[2])
    per = lambda name: (getattr(counted[1], name) - getattr(counted[0], name)) / 8  # of 64 keys
    assert shape.rows == 32 * waves and per("instructions") <= most * waves
    assert matrix_clocks >= 0.45 * 4 * per("instructions") / waves
    assert per("shared_cycles") == per("shared_least")
