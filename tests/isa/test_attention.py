"""Decode as the compilers made it, executed instruction by instruction for every architecture, against the float64 reference.

This is what an emulated source (tests/simt) cannot show: register allocation, waits, spills to lanes, the accumulation registers of
CDNA, dual instructions and scalar code of RDNA. Waves and blocks also run in reverse and random order.
"""

from __future__ import annotations

import os

import pytest
import torch

from portattn import instances, reference
from portattn.instances import GFX, limits_of
from portattn.testing.tolerance import close_lse, close_out
from tests.simt.test_decode import paged, poisoned_left

from . import launch, program

FULL = bool(os.environ.get("PORTATTN_HIP_FULL"))
ARCHS = list(GFX)
# One of each generation; its neighbours are made of the same instructions, and run the first test.
CHIEF = ARCHS if FULL else ["gfx942", "gfx950", "gfx1100", "gfx1201"]


def check(arch, call, args, kw, **how):
    if reason := program.missing(arch):
        pytest.skip(reason)
    out, lse, stats = launch.attention(arch, call, **how)
    want, want_lse = reference.attention_paged(*args, **kw)
    plain, plain_lse = reference.plain(reference.attention_paged, *args, **kw)
    close_out(out, want, plain, call.q.dtype)
    close_lse(lse, want_lse, plain_lse, call.q.dtype)
    return out, lse, stats


@pytest.mark.parametrize("arch", ARCHS)
def test_ragged_lengths_in_any_order_of_waves_and_blocks(arch):
    call, args, kw = paged([200, 70, 0, 33, 129], dim=128)
    first = check(arch, call, args, kw, grid=6)
    for order in (program.REVERSE, program.RANDOM):
        again = launch.attention(arch, call, grid=6, order=order, seed=3)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


OPTIONS = [
    dict(window=(10, 0), softcap=2.0), dict(causal=False, len_q=5, page=7), dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0]), page=1),
    dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.0, 2.0]), len_q=3), dict(q_lens=[1, 40], index=torch.int64), dict(offset=3, batch_invariant=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("arch", CHIEF)
def test_masks_and_options(arch, options):
    check(arch, *paged([90, 45], dim=128, **dict(options)), grid=6)


@pytest.mark.parametrize("page, offset", [(16, 0), (1, 0), (7, 3)])
@pytest.mark.parametrize("arch", CHIEF)
def test_pages_left_of_every_window_may_hold_anything(arch, page, offset):
    call, args, kw = paged([100, 233, 30], dim=128, len_q=2, window=(16, 0), page=page, offset=offset)
    check(arch, poisoned_left(call), args, kw, grid=5)


@pytest.mark.parametrize("dtype, dim, cache", [(torch.float16, 64, None), (torch.bfloat16, 256, None), (torch.float16, 128, "e4m3")])
@pytest.mark.parametrize("arch", CHIEF)
def test_types_and_head_sizes(arch, dtype, dim, cache):
    more = dict(k_scale=torch.tensor(0.7), v_scale=torch.tensor([1.1, 0.4])) if cache else {}
    check(arch, *paged([70, 40], dim=dim, dtype=dtype, cache=cache, **more), grid=4)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_every_byte_of_keys_and_values_is_loaded_once_and_by_sixteen(arch):
    """One sequence of whole units: what the loop moves, counted as it runs."""
    call, args, kw = paged([512], dim=128, heads=(4, 1), dtype=torch.bfloat16)
    _, _, stats = check(arch, call, args, kw, grid=1)
    needed = 2 * 512 * 128 * 2 + call.q.numel() * 2
    assert 16 * stats.wide_loads == needed and stats.load_bytes <= 1.05 * needed, "the rest are lengths and page ids"


@pytest.mark.parametrize("arch, bytes_a_clock, clocks, matrix_clocks, most", [
    ("gfx942", 5.3e12 / 304 / 2.1e9, 4, 16, 0.84),  # MI300X: a compute unit's part of its memory; a wave of 64 issues in four clocks
    ("gfx1100", 0.96e12 / 48 / 2.4e9, 1, 32, 0.48),  # RX 7900 XTX: a pair of compute units, four waves on four SIMDs
])
def test_the_decode_loop_is_bound_by_memory(arch, bytes_a_clock, clocks, matrix_clocks, most):
    """Clocks to issue a unit (64 keys and values of 256 bytes, a block's four waves beside each other) against clocks to load it.

    In flight: a block has the next unit's 32 KiB under way, memory of 1000 clocks latency needs 8.3 KiB. `most` is what the loop
    takes today (csrc_hip/decode.hip has the numbers); all its instructions are counted as if they could not overlap.
    """
    counted = [check(arch, *paged([keys], dim=128, heads=(4, 1)), grid=1)[2] for keys in (512, 1024)]
    per = lambda name: (getattr(counted[1], name) - getattr(counted[0], name)) / 8  # of a unit
    issue = (per("instructions") / 4 - 16) * clocks + 16 * matrix_clocks
    load = 2 * 64 * 256 / bytes_a_clock
    assert issue <= most * load, f"{issue:.0f} clocks to issue, {load:.0f} to load"
    assert per("shared_cycles") == per("shared_least") <= 0.35 * load, "no two words of a bank at once"


def broken(arch: str, change) -> program.Program:
    instance = instances.decode_shape("bfloat16", "bfloat16", 128, limits_of(arch)).instance
    made = program.Program(arch, program.objects.made(arch, instance))
    assert change(made.insts)
    return made


@pytest.mark.parametrize("arch, what", [("gfx942", "waits"), ("gfx942", "barriers"), ("gfx942", "accumulation registers"), ("gfx1201", "waits"),
                                        ("gfx1201", "barriers")])
def test_a_broken_object_is_found(arch, what, monkeypatch):
    """The tester is tested: waits that do not wait, a barrier left out, data from the wrong register file."""
    if reason := program.missing(arch):
        pytest.skip(reason)
    op = program.machine().isa_op

    def change(insts):
        count = 0
        for i in insts:
            if what == "waits" and i.op == op(b"s_wait"):
                i.waits[0] = -1
            elif what == "barriers" and i.op == op(b"s_barrier"):
                i.op = op(b"s_nop")
            elif what == "accumulation registers" and i.op == op(b"ds_store_b128") and i.o[1].index >= 256:
                i.o[1].index -= 256
            else:
                continue
            count += 1
        return count

    made = broken(arch, change)
    monkeypatch.setattr(launch.program, "program", lambda *_: made)
    call, args, kw = paged([200, 70], dim=128)
    with pytest.raises((AssertionError, RuntimeError)):
        check(arch, call, args, kw, grid=6, order=program.REVERSE)
