"""hopper.py on the CPU, through gluon_host.py: values against the float64 reference, poisoned neighbours, the protocol of barriers;
and compiled for sm_90: wgmma, TMA, no spills, softmax between the two waits of the inner loop."""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
import subprocess
from pathlib import Path

import gluon_host as host
import numpy as np
import pytest
import torch

from portattn import reference

triton = pytest.importorskip("triton", minversion="3.4")

from portattn.backends.triton import schedule  # noqa: E402
from portattn.backends.triton.launch import interpreting  # noqa: E402

module = host.kernels()
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
needs_gluon = pytest.mark.skipif(OLD, reason="hopper.py compiles with Triton 3.6 and newer")


def run(q, k, v, causal, window, sinks, cu=None, used=None, groups=2, bn=64, stages=2, qs=2, turns=True, programs=3, strip=3,
        ahead=True, lse_form=0):
    """(out, lse) of the kernel, tensors as calls.py would pass them; cu: (cu_seqlens_q, cu_seqlens_k)."""
    (*batch, tokens, heads_q, d), heads_kv = q.shape, k.shape[-2]
    group = heads_q // heads_kv
    pack = schedule.packed(group)
    ones = [1] * len(batch)
    len_q, len_k = (tokens, k.shape[-3]) if cu is None else (int(np.diff(cu[0]).max()), int(np.diff(cu[1]).max()))
    sequences = batch[0] if cu is None else len(cu[0]) - 1
    heads = heads_q // pack
    if cu is None:
        blocks = sequences * heads * -(-tokens * pack // (64 * groups))
    else:
        blocks = (tokens * pack // (64 * groups) + sequences) * heads
    left, right = window[0], 0 if causal else window[1]
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full((*batch, heads_q, tokens) if lse_form else q.shape[:-1], np.nan, np.float32)
    counters = np.zeros(2, np.int32)
    rows = lambda t: t.reshape(*t.shape[:-2], heads_kv * d)
    pointer = lambda x: None if x is None else host.Pointer(x)
    host.launch(
        module.attend_hopper, min(programs, blocks), ahead=ahead, q_desc=host.Descriptor(q, [*ones, 64 // pack, pack, d]),
        k_desc=host.Descriptor(rows(k), [*ones, bn, d]), v_desc=host.Descriptor(rows(v), [*ones, bn, d]), out=host.Pointer(out),
        lse=host.Pointer(lse), used_k=pointer(used), cu_q=pointer(cu and cu[0]), cu_k=pointer(cu and cu[1]), sinks=pointer(sinks),
        counters=host.Pointer(counters), scale=host.tensor(np.float32(d**-0.5)), window_left=host.tensor(left),
        window_right=host.tensor(right), o_b=host.tensor(tokens * heads_q * d), o_s=host.tensor(heads_q * d), o_h=host.tensor(d),
        k_h=d, v_h=d, batch=host.tensor(sequences), heads=host.tensor(heads), len_q=host.tensor(len_q), len_k=host.tensor(len_k),
        programs=host.tensor(blocks), group=host.tensor(strip), lse_rows=host.tensor(tokens), LSE_FORM=lse_form, NC=groups, PACK=pack, G=group, BN=bn, D=d, STAGES=stages, QS=qs,
        LEFT=left >= 0, RIGHT=right >= 0, SEARCH=16, TURNS=turns, CONSUMER_REGISTERS=240)
    assert not counters.any(), "the next launch finds them zero"
    return out, lse


def close(got, want, limit):
    got, want = torch.from_numpy(got).double(), want.double()
    same = got == want  # infinities
    assert torch.where(same, 0.0, (got - want).abs()).max() < limit


DENSE = {
    "full": (2, 130, 130, 2, 2, 64, False, (-1, -1), {}),
    "causal": (2, 300, 300, 2, 2, 64, True, (-1, -1), {}),
    "fewer keys than queries": (1, 300, 130, 2, 1, 64, True, (-1, -1), {}),
    "packed heads, more keys": (1, 100, 250, 4, 1, 64, True, (-1, -1), dict(bn=128)),
    "three groups, group of three": (1, 130, 130, 6, 2, 128, True, (-1, -1), dict(groups=3)),
    "window": (1, 200, 260, 2, 2, 64, False, (70, 20), dict(stages=3)),
    "one slot of Q": (2, 300, 300, 2, 2, 64, True, (-1, -1), dict(qs=1)),
    "no turns": (1, 300, 300, 1, 1, 64, False, (-1, -1), dict(turns=False)),
    "one program": (1, 200, 200, 2, 2, 64, True, (-1, -1), dict(programs=1, strip=1)),
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("sink", "ahead"), [(False, True), (True, False)])
def test_dense_attention_is_right(name, sink, ahead):
    batch, sq, sk, heads_q, heads_kv, d, causal, window, options = DENSE[name]
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((batch, sq, heads_q, d), *[(batch, sk, heads_kv, d)] * 2))
    sinks = rng.standard_normal(heads_q).astype(np.float32) if sink else None
    out, lse = run(q, k, v, causal, window, sinks, ahead=ahead, **options)
    t = torch.from_numpy
    want, want_lse = reference.attention(t(q), t(k), t(v), causal=causal, window_size=window, sinks=t(sinks) if sink else None)
    close(out, want, 4e-3)
    close(lse, want_lse, 1e-4)


@pytest.mark.parametrize("used", [None, [60, 0, 64, 250, 9]])
@pytest.mark.parametrize(("heads_q", "heads_kv", "options"), [(2, 1, {}), (3, 3, dict(qs=1, groups=3)), (8, 2, dict(bn=128))])
def test_ragged_sequences_see_nothing_of_their_neighbours(used, heads_q, heads_kv, options):
    """Unused keys and the rows around the sequences hold NaN; queries past the last sequence are not written."""
    lens_q, lens_k, d = [100, 0, 33, 250, 1], [100, 5, 64, 250, 30], 64
    rng = np.random.default_rng(3)
    q = rng.standard_normal((sum(lens_q) + 5, heads_q, d)).astype(np.float16)
    k, v = (rng.standard_normal((sum(lens_k) + 7, heads_kv, d)).astype(np.float16) for _ in "kv")
    cu = tuple(np.cumsum([0, *n]).astype(np.int32) for n in (lens_q, lens_k))
    for b, n in enumerate(used or lens_k):
        k[cu[1][b] + n : cu[1][b + 1]] = v[cu[1][b] + n : cu[1][b + 1]] = np.nan
    k[cu[1][-1] :] = v[cu[1][-1] :] = np.nan
    used = None if used is None else np.array(used, np.int32)
    out, lse = run(q, k, v, True, (-1, -1), None, cu=cu, used=used, ahead=used is None, **options)
    t = torch.from_numpy
    want, want_lse = reference.attention_varlen(t(q), t(k), t(v), t(cu[0]), t(cu[1]), causal=True,
                                                seqused_k=None if used is None else t(used))
    close(out[: cu[0][-1]], want[: cu[0][-1]], 4e-3)
    close(lse[: cu[0][-1]], want_lse[: cu[0][-1]], 1e-4)
    assert np.isnan(out[cu[0][-1] :]).all()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", ["fewer keys than queries", "packed heads, more keys", "ragged"])
def test_lse_has_its_heads_first_where_the_caller_says_so(name, sink):
    """As portattn/dialect.py: form 1, and form 2 with +inf where a row sees no key."""
    rng = np.random.default_rng(5)
    half = lambda *shape: rng.standard_normal(shape).astype(np.float16)
    if name == "ragged":
        (heads_q, heads_kv), lens_q, lens_k = (4, 2), [100, 0, 33, 70], [40, 5, 64, 70]
        q, k, v = half(sum(lens_q), heads_q, 64), half(sum(lens_k), heads_kv, 64), half(sum(lens_k), heads_kv, 64)
        options = dict(cu=tuple(np.cumsum([0, *n]).astype(np.int32) for n in (lens_q, lens_k)))
    else:
        batch, sq, sk, heads_q, heads_kv, *_, options = DENSE[name]
        q, k, v = half(2, sq, heads_q, 64), half(2, sk, heads_kv, 64), half(2, sk, heads_kv, 64)
    sinks = rng.standard_normal(heads_q).astype(np.float32) if sink else None
    out, lse = run(q, k, v, True, (-1, -1), sinks, **options)
    empty = lse == -np.inf
    assert empty.any() == (not sink and name != "packed heads, more keys")
    for form in (1, 2):
        again, by_heads = run(q, k, v, True, (-1, -1), sinks, lse_form=form, **options)
        assert np.array_equal(again, out)
        assert np.array_equal(by_heads.swapaxes(-1, -2), np.where(empty, np.inf, lse) if form == 2 else lse)


LOOP_END = "                acc, p, den, shrink, top = warpgroup_mma_wait(0, deps=[o, p, den, shrink, top])\n                sync()\n"
V_FREE = "                mbarrier.arrive(v_empty.index(v_slot), count=1)\n"
SCORES_END, K_FREE = "    s = warpgroup_mma_wait(1, deps=[s])\n    sync()\n", "    mbarrier.arrive(k_empty.index(slot), count=1)\n"
RECORD = "".join(f"        {name} = read(records, r_slot, {i})\n" for i, name in enumerate(
    ("b", "head", "row0", "q_first", "len_q", "len_k", "lo", "full_lo", "full_hi"), 1)) + "        sync()\n"
RECORD_FREE = "        mbarrier.arrive(r_empty.index(r_slot), count=1)\n"
FAULTS = {  # (what stands in hopper.py, what is planted)
    "a slot of V is free before its matmul has read it": (LOOP_END + V_FREE, V_FREE + LOOP_END),
    "a slot of K is free before its matmul has read it": (SCORES_END + K_FREE, K_FREE + SCORES_END),
    "a record is free before it is read": (RECORD + RECORD_FREE, RECORD_FREE + RECORD),
    "nobody waits for K": ("    mbarrier.wait(k_full.index(slot), phase)\n", ""),
    "nobody waits for V": ("mbarrier.wait(v_full.index(v_slot), v_phase", "mbarrier.wait(v_full.index(v_slot), v_phase ^ 1"),
    "nobody waits for Q": ("            mbarrier.wait(q_full.index(w * QS + q_slot), q_phase)\n", ""),
    "a slot of V is never free": (LOOP_END + V_FREE, LOOP_END),
    "a turn is never over": ("        mbarrier.arrive(turn.index((w + 1) % NC), count=1)\n", "        pass\n"),
    "the producer waits for no free slot of K": ("                mbarrier.wait(k_empty.index(slot), phase ^ 1)\n", ""),
    "the producer waits for no free slot of Q": ("                mbarrier.wait(q_empty.index(w * QS + q_slot), q_phase ^ 1)\n", ""),
    "the producer expects too few bytes": ("mbarrier.expect(v_full.index(slot), BN * D * 2)", "mbarrier.expect(v_full.index(slot), BN * D)"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_emulation_sees_planted_faults(fault, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    source = host.SOURCE.read_text(encoding="utf-8")
    if fault:
        right, wrong = FAULTS[fault]
        assert right in source
        source = source.replace(right, wrong)
    monkeypatch.setitem(globals(), "module", host.kernels(source))
    rng = np.random.default_rng(1)
    with pytest.raises((AssertionError, host.Stuck)) if fault else contextlib.nullcontext():
        for ahead, keys, stages in ((True, 600, 2), (False, 600, 2), (True, 60, 8)):  # few keys: the producer is ahead by blocks of rows
            q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(np.float16) for n in (600, keys, keys))
            out, _ = run(q, k, v, False, (-1, -1), None, programs=1, stages=stages, ahead=ahead)
            assert np.isfinite(out).all()
            close(out, reference.attention(*map(torch.from_numpy, (q, k, v)))[0], 4e-3)


SHAPES = {
    "d128": dict(),
    "d64": dict(d=64, dv=64, right=False, group=1),
    "d256": dict(d=256, dv=256, group=3),
    "varlen": dict(layout="varlen", cu_q_dtype=torch.int32, cu_k_dtype=torch.int32),
    "varlen, window, lse, sinks": dict(layout="varlen", cu_q_dtype=torch.int32, cu_k_dtype=torch.int32,
                                       kv_lens_dtype=torch.int32, left=True, lse=True, sinks=torch.bfloat16,
                                       dtype=torch.float16, kv_dtype=torch.float16, out_dtype=torch.float16),
}


@pytest.mark.aot
@needs_gluon
@pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET=1: nothing is compiled")
@pytest.mark.parametrize("name", SHAPES)
def test_softmax_runs_between_the_waits_for_scores_and_for_output(name, tmp_path):
    from test_aot import BASE, compile_for, spills

    shape = schedule.Shape(**(BASE | SHAPES[name]))
    for config in schedule.hoppers("sm_90", shape.d):
        kernel = compile_for(schedule.hopper_spec(shape, config, 32), "sm_90")
        assert kernel.metadata.shared <= 227 * 1024
        assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.bulk.tensor" in kernel.asm["ptx"]
        assert spills(kernel, "sm_90", tmp_path) <= 512  # bytes a thread, for what is kept across a block of rows
        cuda_13 = int(re.search(r"\.version (\d)", kernel.asm["ptx"])[1]) > 8
        cubin = tmp_path / "kernel.cubin"
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
        loops = inner_loops(sass)
        assert len(loops) == config.groups
        for loop in loops:
            scores, output = [m.start() for m in re.finditer(r"WARPGROUP\.DEPBAR", loop)]
            exps = [m.start() for m in re.finditer(r"MUFU\.EX2", loop)]
            assert len(exps) > config.bn // 2 and all(scores < e < output for e in exps)
            assert loop.rindex("HGMMA") < scores
            # Of some 600 instructions. Three groups have 160 registers a thread: enough for the ptxas of CUDA 12 (Triton 3.6), not
            # for that of CUDA 13 (Triton 3.9). One compiler makes the same code of the same source every time.
            assert len(re.findall(r"\b(?:STL|LDL)\b", loop)) <= (70 if config.groups == 3 and cuda_13 else 0)


@pytest.mark.aot
@needs_gluon
@pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET=1: nothing is compiled")
def test_tensor_maps_and_numbers_stand_where_the_machine_code_reads_them(monkeypatch):
    from portattn.backends.triton import launch as launching
    from portattn.backends.triton.calls import _map_of, _rows_of_all_heads
    from test_aot import BASE, compile_for

    shape = schedule.Shape(**(BASE | dict(lse=True)))
    config = schedule.hopper_for("sm_90", 128, 4096)
    spec = schedule.hopper_spec(shape, config, 32)
    compiled_kernel = compile_for(spec, "sm_90")

    class Kernel:
        run, function, metadata, asm = None, 77, compiled_kernel.metadata, compiled_kernel.asm

    encoded, launched = [], []

    class Driver:
        launch_ex = None

        def encode(self, room, kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, outside):
            assert room.value % 64 == 0
            encoded.append((kind, rank, address.value, list(dims), list(strides)[: rank - 1], list(box), list(steps), swizzle))
            return 0

        def launch(self, *arguments):
            launched.append(arguments)
            return 0

    monkeypatch.setattr(launching, "_driver", Driver())
    q, k = torch.empty(2, 300, 32, 128, dtype=torch.bfloat16), torch.empty(1, 400, 8, 128, dtype=torch.bfloat16).as_strided(
        (1, 400, 8, 128), (3, 1024, 128, 1))
    boxes = schedule.hopper_boxes(shape, config)
    layouts = [schedule.hopper_layout(len(box)) for box in boxes]
    maps = [_map_of(q.dtype, tuple(q.shape), q.stride(), boxes[0], layouts[0])]
    maps += [_map_of(k.dtype, *_rows_of_all_heads(k), boxes[1], layouts[1])] * 2
    fixed = list(range(1, 13))
    launch = launching.Launch(Kernel(), spec, fixed, 5, 0, maps)
    for _ in range(2):  # the second time nothing is encoded
        launch(9, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 0.25, -1, 3)
    assert [e[2] for e in encoded] == [1 << 12, 1 << 13, 1 << 14]
    assert encoded[0][:7] == (9, 4, 1 << 12, [128, 32, 300, 2], [256, 8192, 300 * 8192], [64, 4, 16, 1], [1] * 4)
    assert encoded[1][3:6] == ([1024, 400, 1], [2048, 400 * 2048], [64, config.bn, 1])
    pointers = launched[0][9]
    assert len(pointers) == compiled_kernel.asm["ptx"].split(".entry")[1].split(")")[0].count(".param")
    value = lambda i, code: struct.unpack_from("=" + code, ctypes.string_at(pointers[i], 8))[0]
    assert [value(i, "i") for i in range(1, 5)] == [2, 300, 32, 128]
    assert [value(i, "q") for i in range(5, 9)] == [300 * 4096, 4096, 128, 1]
    after = 9 + 7 + 7  # out, lse, counters, scale, windows, strides
    assert [value(after + i, "q") for i in range(3)] == [1 << 15, 1 << 16, 1 << 17]
    assert value(after + 3, "f") == 0.25 and [value(after + 4 + i, "i") for i in range(2)] == [-1, 3]
    assert [value(after + 6 + i, "q" if i < 3 else "i") for i in range(12)] == fixed


def inner_loops(sass: str) -> list[str]:
    """Bodies between a label and a jump back to it that hold matmuls and no other such body; spinning on barriers stands
    behind the EXIT."""
    found = []
    for jump in re.finditer(r"BRA[^;]*`\((\.L_x_\d+)\)", sass):
        label = sass.find(f"\n{jump[1]}:")
        body = sass[label : jump.start()] if 0 <= label < jump.start() else ""
        if "HGMMA" in body and "MUFU.EX2" in body and "EXIT" not in body:
            found.append((label, jump.start(), body))
    return [body for lo, hi, body in found if not any(lo <= a and b <= hi and (a, b) != (lo, hi) for a, b, _ in found)]


@needs_gluon
def test_a_wrong_answer_or_an_error_puts_hopper_aside_with_its_reason(monkeypatch):
    """On the second chance tensor maps go through Triton's own launcher."""
    from portattn.backends.triton import calls, launch

    ways = []

    def answered(*_):
        ways.append(launch.own_maps)
        return "known answer: error 1" if len(ways) < good else ""

    monkeypatch.setattr(calls, "_answered", answered)
    monkeypatch.setattr(calls, "_troubles", {})
    monkeypatch.setattr(calls, "_capturing", lambda: True)
    assert calls.hopper_trouble(0, "sm_90", torch.float16, 64) and not calls.hopper_notes()  # asked again outside of the capture
    monkeypatch.setattr(calls, "_capturing", lambda: False)
    for good, why in ((1, ""), (2, ""), (3, "known answer: error 1")):
        monkeypatch.setattr(launch, "own_maps", True)
        monkeypatch.setattr(calls, "_troubles", {})
        ways.clear()
        assert calls.hopper_trouble(0, "sm_90", torch.float16, 64) == why
        assert ways == [True, False][: min(good, 2)]
        assert calls.hopper_trouble(0, "sm_90", torch.float16, 64) == why and len(ways) == min(good, 2)  # asked once
        assert bool(calls.hopper_notes()) == bool(why)
