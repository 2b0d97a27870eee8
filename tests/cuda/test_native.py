"""portattn/native.py over the fake driver: every pointer where params.h has it, workspaces, alignment, grids."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
import types
from pathlib import Path

import pytest
import torch

from portattn import dialect, instances, manifest, native, verdicts
from portattn.instances import Shape, limits_of
from portattn.native_backend import NativeBackend
from portattn.problem import Call, Problem
from portattn.registry import DIRECT, Bound
from portattn.validate import Normal
from tests import refusals

from .fakes import log, params

LIMITS = native.Limits(227 << 10, 228 << 10, 132)


@pytest.fixture
def device(fake, monkeypatch):
    """A native.Device on CPU tensors, torch's CUDA functions answered by hand."""
    state = {"stream": 0x90, "capturing": False}
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state["capturing"], raising=False)
    d = native.Device(fake[0], torch.device("cpu", 0), "sm_90", LIMITS)
    d.state, d.library = state, fake[1]
    return d


def problem(**changed):
    return Problem("paged", "cuda", "sm_90", "bfloat16", "bfloat16", 8, 2, 64, 64, 16, "decode", "bfloat16", causal=True)._replace(**changed)


def paged(**changed):
    bf = lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
    call = Call(bf(3, 1, 8, 64), bf(5, 16, 2, 64), bf(5, 16, 2, 64), 0.125, causal=True, max_seqlen_q=1, max_seqlen_k=64,
                block_table=torch.zeros(3, 4, dtype=torch.int32), kv_lens=torch.zeros(3, dtype=torch.int64), out=bf(3, 1, 8, 64))
    return call._replace(**changed)


def seen(device) -> dict:
    """The struct of the last launch, by field."""
    codes = "<" + "".join(code for _, code in native.ATTENTION)
    raw = ctypes.string_at(params(device.library), struct.calcsize(codes))
    return dict(zip((name for name, _ in native.ATTENTION), struct.unpack(codes, raw)))


def test_every_tensor_is_where_the_struct_has_it(device):
    f = lambda *s: torch.ones(*s)
    call = paged(alibi_slopes=f(3, 8), sinks=f(8), k_scale=f(2), v_scale=f(3, 2), rotary_cos=f(64, 16), rotary_sin=f(64, 16), return_lse=True)
    out, lse = native.Attention(device, call, problem(lse=True))(call)
    got = seen(device)
    want = {"q": call.q, "k": call.k, "v": call.v, "out": out, "lse": lse, "lengths": call.kv_lens, "block_table": call.block_table,
            "alibi": call.alibi_slopes, "sinks": call.sinks, "k_scale": call.k_scale, "v_scale": call.v_scale, "rotary_cos": call.rotary_cos,
            "rotary_sin": call.rotary_sin}
    assert {name: got[name] for name in want} == {name: x.data_ptr() for name, x in want.items()}
    assert out is call.out and got["cu_q"] == got["cu_k"] == 0 and got["partial"] and got["counters"]
    assert (got["alibi_batch"], got["scale_head_k"], got["scale_batch_v"], got["rotary_dim"]) == (8, 1, 2, 32)
    assert got["flags"] & native.LENGTHS_64 and not got["flags"] & native.TABLE_64 and got["flags"] & native.SINKS_FLOAT


def test_ragged_calls_name_their_prefix_sums(device):
    q, k = torch.zeros(7, 8, 64).half(), torch.zeros(90, 2, 64).half()
    cu_q, cu_k, used = torch.tensor([0, 3, 7]), torch.tensor([0, 40, 90], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    call = Call(q, k, k.clone(), 1.0, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=used, max_seqlen_q=4, max_seqlen_k=50)
    native.Attention(device, call, problem(layout="varlen", dtype="float16", kv_dtype="float16", page_size=0))(call)
    got = seen(device)
    assert (got["cu_q"], got["cu_k"], got["lengths"]) == (cu_q.data_ptr(), cu_k.data_ptr(), used.data_ptr())
    assert got["flags"] & native.CU_Q_64 and not got["flags"] & native.CU_K_64 and got["batch"] == 2 and got["q_batch"] == 0


def test_what_is_not_aligned_is_said_call_by_call(device):
    call = paged()
    run = native.Attention(device, call, problem())
    run(call)
    assert seen(device)["flags"] & native.ALIGNED and seen(device)["flags"] & native.OUT_ALIGNED
    shifted = torch.zeros(call.k.numel() + 1, dtype=torch.bfloat16)[1:].view(call.k.shape)
    run(call._replace(k=shifted))
    assert not seen(device)["flags"] & native.ALIGNED and seen(device)["flags"] & native.OUT_ALIGNED
    run(call._replace(out=torch.zeros(call.q.numel() + 1, dtype=torch.bfloat16)[1:].view(call.q.shape)))
    assert seen(device)["flags"] & native.ALIGNED and not seen(device)["flags"] & native.OUT_ALIGNED


def test_a_stream_has_one_workspace_and_each_capture_its_own(device):
    call = paged()
    run = native.Attention(device, call, problem())
    places = []
    for stream, capturing in ((0x90, False), (0x90, False), (0x91, False), (7, True), (7, True), (0x90, False)):
        device.state.update(stream=stream, capturing=capturing)
        run(call)
        places.append(seen(device)["counters"])
    assert places[0] == places[1] == places[5] and len({places[0], places[2], places[3]}) == 3 and places[3] == places[4]
    assert seen(device)["partial"] % 16 == 0


def test_a_workspace_grows_and_is_zeroed(device):
    w = device.workspaces
    first = w.get(1, native.Room(10, 100))
    assert w.get(1, native.Room(4000, 100)) == first and w.get(1, native.Room(10, 10**6)) != first
    counters = w.eager[1][3][:4096].view(torch.int32)
    assert counters.data_ptr() == w.get(1, native.Room(1, 1))[1] and not counters.any()


def test_new_tokens_are_appended_first(device):
    new = torch.zeros(3, 1, 2, 64, dtype=torch.bfloat16)
    call = paged(k_new=new, v_new=new.clone())
    device.library.fake_reset()
    native.Attention(device, call, problem(append=True))(call)
    launches = [x for x in log(device.library) if x.startswith("launch")]
    assert len(launches) == 2 and launches[0].startswith("launch grid 3 1 1 block 128 1 1 shared 0")


@pytest.mark.parametrize("name", ["k", "v"])
def test_new_tokens_over_a_cache_are_refused_before_anything_is_launched(device, name):
    refusals.refuses_tokens_over_a_cache(lambda call: native.Attention(device, call, problem(append=True)), paged(), name, device.library.fake_reset)
    assert not [x for x in log(device.library) if x.startswith("launch")]


@pytest.mark.parametrize("starts, longest", [([0], 0), ([0], 7), ([0, 0, 0], 0)])
@pytest.mark.parametrize("append", [False, True])
def test_rows_of_no_sequence_launch_nothing(device, starts, longest, append):
    """A graph's padding alone: no kernel may look for the sequence of a row among none."""
    q, new, cu, batch = torch.zeros(4, 8, 64).bfloat16(), torch.zeros(4, 2, 64).bfloat16(), torch.tensor(starts), len(starts) - 1
    call = paged(q=q, out=None, cu_seqlens_q=cu, max_seqlen_q=longest, block_table=torch.zeros(batch, 4, dtype=torch.int32),
                 kv_lens=torch.zeros(batch, dtype=torch.int64), return_lse=True)
    call = call._replace(k_new=new, v_new=new) if append else call
    bound = Bound(problem(lse=True, append=append), "cuda", None, None, {})
    for form, shape in ((0, (4, 8)), (1, (8, 4))):
        bound.state = {}
        out, lse = NativeBackend("cuda", lambda index: device).attention(call._replace(lse_form=form), bound)
        assert out.shape == (4, 8, 64) and out.dtype == q.dtype and lse.shape == shape and lse.dtype == torch.float32
    assert not [line for line in log(device.library) if "aunch" in line]


def directly(run, call, **changed):
    """`run.direct` on a call's tensors."""
    t = call._replace(**changed)
    return run.direct(t.q, t.k, t.v, t.block_table, t.kv_lens, *(getattr(t, name) for name in DIRECT), t.out)


DIRECTLY = {
    "general": paged(),
    "without-out": paged(out=None),
    "lse": paged(return_lse=True, out=None),
    "everything": paged(alibi_slopes=torch.ones(8), sinks=torch.ones(8), k_scale=torch.ones(2), v_scale=torch.ones(3, 2), return_lse=True),
    "ragged": paged(q=torch.zeros(3, 8, 64).bfloat16(), out=torch.zeros(3, 8, 64).bfloat16(), cu_seqlens_q=torch.tensor([0, 1, 2, 3])),
}


@pytest.mark.parametrize("name", DIRECTLY)
def test_a_call_taken_directly_launches_what_it_launches_otherwise(device, name):
    call, bound = DIRECTLY[name], Bound(problem(lse=DIRECTLY[name].return_lse), "cuda", None, None, {})
    bound.normal = Normal()
    backend = NativeBackend("cuda", lambda index: device)
    backend.attention(call, bound)
    want, run = seen(device), bound.state["run"]
    assert bound.direct == run.direct
    device.library.fake_reset()
    got = directly(run, call)
    out, lse = got if call.return_lse else (got, None)
    assert out is call.out or call.out is None and out.shape == call.q.shape and out.dtype == call.q.dtype
    assert len([x for x in log(device.library) if x.startswith("launch")]) == 1
    want |= {"out": out.data_ptr(), "lse": lse.data_ptr() if lse is not None else 0}
    assert seen(device) == want


def test_what_needs_a_closer_look_is_not_taken_directly(device, monkeypatch):
    call = paged(sinks=torch.zeros(8, dtype=torch.bfloat16))
    run = native.Attention(device, call, problem())
    buffer = torch.zeros(call.q.numel() + 64, dtype=torch.bfloat16)
    shifted = lambda t: torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    device.library.fake_reset()
    for changed in (dict(k=shifted(call.k)), dict(v=shifted(call.v)), dict(out=call.q), dict(out=call.k.view(-1)[:1536].view(3, 1, 8, 64)),
                    dict(q=buffer[:1536].view(3, 1, 8, 64), out=buffer[64:].view(3, 1, 8, 64)),
                    dict(out=buffer[:1536].view(3, 1, 8, 64), sinks=buffer[8:16])):
        assert directly(run, call, **changed) is None, changed.keys()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert directly(run, call) is None and not log(device.library)


@pytest.mark.parametrize("changed", [dict(convert=1), dict(check=True), dict(lse_after=1), dict(swap=True), None], ids=str)
def test_calls_whose_tensors_or_results_are_changed_are_not_taken_directly(device, changed):
    bound = Bound(problem(), "cuda", None, None, {})
    bound.normal, bound.extra = Normal(**changed or {}), None if changed else lambda *x: x
    NativeBackend("cuda", lambda index: device).attention(paged(), bound)
    assert bound.direct is None
    new = torch.zeros(3, 1, 2, 64, dtype=torch.bfloat16)
    for call in (paged(k_new=new, v_new=new), paged(rotary_cos=torch.ones(64, 16), rotary_sin=torch.ones(64, 16))):
        assert not native.Attention(device, call, problem()).taken_directly


def test_empty_calls_launch_nothing(device):
    call = paged(q=torch.zeros(0, 1, 8, 64, dtype=torch.bfloat16), out=None, block_table=torch.zeros(0, 4, dtype=torch.int32),
                 kv_lens=torch.zeros(0, dtype=torch.int32), return_lse=True)
    device.library.fake_reset()
    out, lse = native.Attention(device, call, problem())(call)
    assert out.shape == (0, 1, 8, 64) and lse.shape == (0, 1, 8) and not log(device.library)


def test_grids_are_bounded_by_the_device_and_by_the_work(device):
    def grid(call, p):
        native.Attention(device, call, p)(call)
        return tuple(map(int, log(device.library)[-1].split()[2:4]))

    assert grid(paged(), problem()) == (2, 3), "three sequences of at most one unit of 64 keys, two kv heads"
    many = paged(block_table=torch.zeros(3, 4000, dtype=torch.int32), max_seqlen_k=64000)
    lines, workers = grid(many, problem())
    assert lines == 2 and lines * workers == 2 * LIMITS.sms
    wide = torch.zeros(3, 80, 8, 64, dtype=torch.bfloat16)
    assert grid(paged(q=wide, out=wide.clone(), max_seqlen_q=80), problem(q_len="extend")) == (3 * 3 * 2, 1), "tiles of 128 rows, no parts"


def test_eight_threads_share_one_bound_call(device):
    calls = [paged() for _ in range(8)]
    run = native.Attention(device, calls[0], problem())
    errors = []

    def work(call):
        try:
            for _ in range(100):
                assert run(call) is call.out
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(c,)) for c in calls]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and 1 <= len(run.launch.records[0]) <= 8


@pytest.mark.parametrize("heads_kv", [1, 2, 3, 5, 8, 16, 32, 128])
@pytest.mark.parametrize("workers", [1, 7, 132, 264, 1000])
def test_lines_leave_few_workers_idle(heads_kv, workers):
    d = native.dealing(heads_kv, workers)
    assert d["lines"] * d["line_heads"] == heads_kv and workers - d["lines"] * d["workers"] <= workers / 50


def test_division_by_constants_is_exact():
    for d in [*range(2, 600), 12345, 1 << 20, (1 << 20) + 1]:
        inverse, shift = native.division(d)
        for a in (0, 1, d - 1, d, d + 1, 7 * d - 1, 2**31 - 1, 2**31 - d):
            assert (a * inverse >> 32) >> shift == a // d


# ------------------------------------------------------------------ plain.h
@pytest.fixture
def hopper(device):
    """The fake device with clusters; HIP's driver has none whatever the limits say."""
    if device.driver.vendor.name == "hip":
        pytest.skip("device: HIP has no clusters")
    device.limits = LIMITS._replace(sms=64, wgmma=True, clusters=True, overlap=True)
    return device


def plain(**changed):
    return paged(kv_lens=torch.zeros(3, dtype=torch.int32))._replace(**changed)


def kernels(run) -> tuple[str, str]:
    """The kernel that serves, and the one for pointers that are not aligned."""
    return run.launch.function.what.split("-")[0], run.general.launch.function.what.split("-")[0] if run.general else ""


def launches(device) -> list[str]:
    return [x for x in log(device.library) if x.startswith("launch")]


@pytest.mark.parametrize("changed", [
    dict(kv_lens=torch.zeros(3, dtype=torch.int64)), dict(batch_invariant=True), dict(out=torch.zeros(3, 1, 8, 64)), dict(k_scale=torch.ones(2)), dict(alibi_slopes=torch.ones(8)),
], ids=lambda c: next(iter(c)))
def test_calls_that_ask_for_more_are_not_plain(hopper, changed):
    assert kernels(native.Attention(hopper, plain(), problem()))[0] == "plain"
    assert kernels(native.Attention(hopper, plain(**changed), problem()))[0] == "decode"


@pytest.mark.parametrize("changed", [dict(sinks=torch.ones(8)), dict(sinks=torch.ones(8, dtype=torch.bfloat16)), dict(softcap=2.0), dict(window_left=3)], ids=str)
def test_sinks_softcap_and_left_windows_are_plain(hopper, changed):
    call = plain(**changed)
    run = native.Attention(hopper, call, problem())
    run(call)
    at = seen(hopper)
    assert kernels(run)[0] == "plain"
    assert (at["softcap"], at["window_left"]) == (call.softcap, changed.get("window_left", (1 << 31) - 1)) and at["sinks"] == (call.sinks.data_ptr() if "sinks" in changed else 0)


def test_a_window_has_no_more_units_than_lie_in_it():
    """The most that any place of the window has: its rows see window_left + 1 keys each, and start anywhere."""
    shape = Shape(None, 0, 0, 16, 1)
    for left in (0, 1, 14, 15, 16, 17, 100):
        for rows in (1, 2, 5):
            call = plain(max_seqlen_k=1 << 20, max_seqlen_q=rows, window_left=left)
            most = max((last - 1) // 16 - max(0, last - rows - left) // 16 + 1 for last in range(rows, 400))
            assert native.units_of(call, shape) == most
    assert native.units_of(plain(max_seqlen_k=40, window_left=100), shape) == 3


def test_scales_of_eight_bit_caches_may_be_tensors_in_plain_calls(hopper):
    one, heads = torch.tensor(2.0), torch.ones(3, 2)
    call = plain(k=paged().k.to(torch.float8_e4m3fn), v=paged().v.to(torch.float8_e4m3fn), k_scale=one, v_scale=heads)
    run = native.Attention(hopper, call, problem(kv_dtype="float8_e4m3fn", kv_scale=True))
    run(call)
    at = seen(hopper)
    assert kernels(run)[0] == "plain" and (at["k_scale"], at["v_scale"]) == (one.data_ptr(), heads.data_ptr())
    assert [at[f"scale_{axis}_{x}"] for x in "kv" for axis in ("batch", "head")] == [0, 0, 2, 1]


def test_without_clusters_the_general_kernel_serves(device):
    assert kernels(native.Attention(device, plain(), problem()))[0] == "decode"


def test_a_line_is_a_cluster_as_large_as_the_device_runs_all_at_once(hopper, monkeypatch):
    native.Attention(hopper, plain(), problem())(plain())
    assert launches(hopper)[-1].startswith("launch grid 2 16 1 block 256 1 1") and launches(hopper)[-1].endswith("stream 0x90 cluster 1 16 1 overlapping 1")
    assert any(x == "attribute 14 1" for x in log(hopper.library)), "more than 8 blocks are asked for first"
    monkeypatch.setenv("FAKE_BLOCKS_IN_CLUSTERS", "24")
    native.Attention(hopper, plain(), problem())(plain())
    assert launches(hopper)[-1].startswith("launch grid 2 8 1 ") and launches(hopper)[-1].endswith("cluster 1 8 1 overlapping 1")
    monkeypatch.setenv("FAKE_BLOCKS_IN_CLUSTERS", "1")
    run = native.Attention(hopper, plain(), problem())
    run(plain())
    assert option(run, "clusters") == "0" and "cluster" not in launches(hopper)[-1], "clusters that are too small are none"


H200 = {16: 7, 8: 15, 4: 30, 2: 66}  # clusters that one runs at the same time: not every GPC has all its multiprocessors


@pytest.mark.parametrize("heads, blocks, expected", [
    (8, 132, (8, 8)), (16, 132, (16, 4)), (32, 132, (32, 2)), (4, 132, (4, 16)), (1, 132, None), (8, 66, (8, 8)), (8, 3, (2, 1)),
])
def test_clusters_run_all_at_once(heads, blocks, expected):
    found = native.clusters_of(heads, 10**6, blocks, H200.__getitem__)
    assert found == expected and (found is None or heads % found.lines == 0 and found.lines * found.size <= blocks)


def test_few_keys_need_few_blocks():
    assert native.clusters_of(1, 10, 132, H200.__getitem__) == (1, 16) and native.clusters_of(1, 40, 132, H200.__getitem__) is None


def test_the_known_answer_of_a_plain_step_is_merged_from_several_blocks(hopper):
    capability = next(c for c in manifest.load(os.fspath(Path(__file__).parent.parent.parent / "backends" / "cuda")).capabilities if c.id == "step_sm90")
    made = []
    adapter = types.SimpleNamespace(attention=lambda call, bound: made.append((call, bound.problem)) or (call.q, call.q))
    verdicts._attention(Bound(problem(head_dim=128, head_dim_v=128), "cuda", capability, adapter, {}), torch.device("cpu"))[0]()
    (call, its_problem), = made
    hopper.limits = LIMITS._replace(wgmma=True, clusters=True)
    run = native.Attention(hopper, call, its_problem)
    longest = -(-int(call.kv_lens.max()) // 128)
    assert run.plain and longest > 1 and run.launch.values["workers"] > longest, "every unit is another block's"


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_plain_call_on_a_pointer_that_is_not_aligned_takes_the_general_kernel(hopper, name):
    call = plain()
    run = native.Attention(hopper, call, problem())
    run(call)
    assert seen(hopper)["flags"] == native.ALIGNED | native.OUT_ALIGNED | native.UNIFORM_PAGES | native.PAGED
    x = getattr(call, name)
    shifted = torch.zeros(x.numel() + 1, dtype=torch.bfloat16)[1:].view(x.shape)
    run(call._replace(**{name: shifted}))
    assert seen(hopper)[name] == shifted.data_ptr() and kernels(run) == ("plain", "decode")
    run(call)
    assert seen(hopper)[name] == x.data_ptr()


def test_a_cluster_launched_in_another_context_is_launched_again_as_a_cluster(hopper, monkeypatch):
    run = native.Attention(hopper, plain(), problem())
    monkeypatch.setenv("FAKE_FAIL", "launch:1:201")
    run(plain())
    first, second = launches(hopper)
    assert first == second and "cluster 1 16 1" in second


def ragged(**changed):
    bf = lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
    return plain(q=bf(72, 8, 64), out=bf(72, 8, 64), max_seqlen_q=70, cu_seqlens_q=torch.tensor([0, 1, 71, 72], dtype=torch.int32))._replace(**changed)


def option(run, name: str) -> str:
    return re.search(rf"-{name}(\d+)", run.launch.function.what)[1]


def test_from_some_sequences_on_blocks_are_no_clusters_and_from_many_on_several_share_a_multiprocessor(hopper):
    bf = lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
    batch = lambda n: plain(q=bf(n, 1, 8, 64), out=bf(n, 1, 8, 64), block_table=torch.zeros(n, 4, dtype=torch.int32), kv_lens=torch.zeros(n, dtype=torch.int32))
    for n, clusters, blocks in ((23, "1", "1"), (24, "0", "1"), (47, "0", "1"), (48, "0", "2")):
        turned = batch(n)._replace(q=batch(n).q[:, 0], out=batch(n).out[:, 0], cu_seqlens_q=torch.arange(n + 1, dtype=torch.int32))  # of one token each
        for call, ragged in ((batch(n), "0"), (turned, "1")):
            run = native.Attention(hopper, call, problem())
            run(call)
            instance = native.kernel_of(call, problem(), hopper.limits).instance
            assert run.launch.function.what.startswith(f"{instance} ")
            assert (option(run, "clusters"), option(run, "blocks"), option(run, "ragged")) == (clusters, blocks, ragged)
            assert bool(seen(hopper)["counters"]) == (clusters == "0"), "free blocks meet in the workspace"
            assert not seen(hopper)["flags"] & native.TILED, "what comes next is not this call's"
            assert seen(hopper)["cu_q"] == (turned.cu_seqlens_q.data_ptr() if ragged == "1" else 0)


@pytest.mark.parametrize("parts, tiles, expected", [(33, 64, 32), (33, 33, 33), (33, 32, 32), (33, 16, 32), (33, 8, 32), (33, 1, 33), (33, 20, 33), (33, 2048, 33),
                                                    (33, 100, 33), (33, 34, 33), (1, 5, 1)])
def test_parts_end_where_sequences_of_one_length_do(parts, tiles, expected):
    assert native.even_parts(parts, tiles) == expected


# ------------------------------------------------------------------ tensor maps
def maps(device) -> tuple[int, ...]:
    """(addresses of k, v, q and out, rows of a box of keys, boxes of a block) in the last launch's second argument."""
    get = device.library["fake_maps"]
    get.restype = ctypes.c_void_p
    raw = ctypes.string_at(get(), 520)
    return (*(struct.unpack_from("Q", raw, 128 * i)[0] for i in range(4)), *struct.unpack_from("2i", raw, 512))


ALL_MAPPED = native.MAPPED | native.MAPPED_Q | native.MAPPED_OUT


def chunk(**changed):
    bf = lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
    return plain(q=bf(3, 70, 8, 64), out=bf(3, 70, 8, 64), max_seqlen_q=70)._replace(**changed)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("make", [plain, chunk])
def test_a_known_call_on_what_was_freed_is_refused_before_it_is_launched(hopper, make, name):
    call = make()
    run = native.Attention(hopper, call, problem())
    run(call)
    before = len(launches(hopper))
    refusals.refuses_what_was_freed(run, directly, call, name)
    assert len(launches(hopper)) == before


def test_tensor_maps_follow_the_tensors_and_say_a_page_is_a_box(hopper):
    call = chunk()
    run = native.Attention(hopper, call, problem(q_len="extend"))
    encoded = len([x for x in log(hopper.library) if x.startswith("map")])
    for _ in range(2):
        run(call)
    assert seen(hopper)["flags"] & ALL_MAPPED == ALL_MAPPED
    assert maps(hopper) == (*(x.data_ptr() for x in (call.k, call.v, call.q, call.out)), 16, 8)
    found = [x for x in log(hopper.library) if x.startswith("map")]
    assert len(found) == encoded + 4 and "shape 64 2 16 5 box 64 1" in found[-3] and "shape 64 8 70 3 box 64 4" in found[-1], "once for two calls on the same tensors"
    other = call._replace(k=call.k.clone())
    run(other)
    assert maps(hopper)[:3] == (other.k.data_ptr(), call.v.data_ptr(), call.q.data_ptr())


def test_what_no_map_describes_takes_the_other_copies(hopper, monkeypatch):
    call = chunk()
    run = native.Attention(hopper, call, problem(q_len="extend"))
    shifted = torch.zeros(call.k.numel() + 1, dtype=torch.bfloat16)[1:].view(call.k.shape)
    run(call._replace(k=shifted))
    assert not seen(hopper)["flags"] & (native.MAPPED | native.ALIGNED) and seen(hopper)["flags"] & native.MAPPED_Q
    for name, flag in (("q", native.MAPPED_Q), ("out", native.MAPPED_OUT)):
        x = getattr(call, name)
        run(call._replace(**{name: torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)}))
        assert seen(hopper)["flags"] & ALL_MAPPED == ALL_MAPPED & ~flag
    run(call)
    assert seen(hopper)["flags"] & ALL_MAPPED == ALL_MAPPED
    monkeypatch.setenv("FAKE_FAIL", "map:0:1")
    hopper.library.fake_reset()
    refused = native.Attention(hopper, call, problem(q_len="extend"))
    refused(call)
    assert seen(hopper)["flags"] & native.ALIGNED and not seen(hopper)["flags"] & ALL_MAPPED
    assert (option(run, "boxed"), option(run.general, "boxed"), option(refused, "boxed")) == ("1", "0", "0"), "the kernel that takes boxes alone needs maps"


def test_an_out_that_boxes_cannot_bring_changes_nothing_else(hopper):
    call = chunk(out=torch.zeros(3 * 70 * 8 * 64 + 8, dtype=torch.bfloat16)[4:-4].view(3, 70, 8, 64))
    run = native.Attention(hopper, call, problem(q_len="extend"))
    run(call)
    assert run.general is None and option(run, "boxed") == "1" and seen(hopper)["flags"] & ALL_MAPPED == ALL_MAPPED & ~native.MAPPED_OUT


@pytest.mark.parametrize("changed, boxed", [
    (dict(), "1"), (dict(k=torch.zeros(6, 24, 2, 64, dtype=torch.bfloat16), v=torch.zeros(6, 24, 2, 64, dtype=torch.bfloat16)), "0"),
    (dict(rotary_cos=torch.zeros(4096, 32), rotary_sin=torch.zeros(4096, 32)), "0"),
    (dict(q=torch.zeros(3, 70, 96, 64, dtype=torch.bfloat16), out=torch.zeros(3, 70, 96, 64, dtype=torch.bfloat16)), "0"),  # 48 a token: whole ones fill 96 rows of 128
    (dict(q=torch.zeros(3, 70, 14, 64, dtype=torch.bfloat16), out=torch.zeros(3, 70, 14, 64, dtype=torch.bfloat16)), "1"),
    (dict(k=torch.zeros(6, 16, 2, 64, dtype=torch.float8_e5m2), v=torch.zeros(6, 16, 2, 64, dtype=torch.float8_e5m2)), "1"),
    (dict(out=torch.zeros(3, 70, 8, 64)), "1"),
], ids=["all", "pages", "rotary", "group", "seven", "e5m2", "float"])
def test_the_kernel_that_takes_boxes_alone_serves_where_they_bring_q_keys_and_values(hopper, changed, boxed):
    call = chunk(**changed)
    asked = problem(q_len="extend", num_heads_q=call.q.shape[2], kv_dtype=str(call.k.dtype)[6:])
    run = native.Attention(hopper, call, asked)
    run(call)
    assert option(run, "boxed") == boxed and run.launch.function.what.startswith(f"{native.kernel_of(call, asked, hopper.limits).instance} ")


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("changed, flags", [
    (dict(q=torch.zeros(3, 70, 6, 64, dtype=torch.bfloat16), out=torch.zeros(3, 70, 6, 64, dtype=torch.bfloat16)), None),  # three heads: 126 of 128 rows, and no box of 16
    (dict(rotary_cos=torch.zeros(4096, 32), rotary_sin=torch.zeros(4096, 32)), native.MAPPED_OUT),
    (dict(out=torch.zeros(3, 70, 8, 64)), native.MAPPED_Q),
    (dict(q=torch.zeros(3, 70, 8, 68, dtype=torch.bfloat16)[..., :64]), native.MAPPED_OUT),  # strides of 8 bytes
], ids=["group", "rotary", "float", "strides"])
def test_q_and_out_are_mapped_where_boxes_are_what_the_kernel_takes(hopper, changed, flags, boxed):
    shape = instances.prefill_sm90_shape("bfloat16", "bfloat16", 64, boxed)
    _, mapped = native.tile_maps(hopper.driver.encode_map, call := chunk(**changed), native.mapped(call.out), shape, 64, native.OUT_ALIGNED)
    assert mapped == (flags if flags is not None else native.MAPPED_Q if boxed else 0)


def test_in_a_mixed_batch_tokens_and_tiles_run_side_by_side(hopper):
    run = native.Attention(hopper, ragged(), problem())
    run(ragged())
    first, second = launches(hopper)[-2:]
    assert first.startswith("launch grid 2 16 1 ") and first.endswith("cluster 1 16 1 overlapping 1") and second.endswith("overlapping 1")
    assert "plain" in run.before.function.what and "ragged1" in run.before.function.what and "prefill_sm90" in run.launch.function.what
    assert seen(hopper)["flags"] & run.before.values["flags"] & native.TILED and seen(hopper)["cu_q"]


@pytest.mark.parametrize("tokens, batch, tiles", [(70, 3, True), (8, 3, False), (8, 70, True), (4, 70, False), (1, 70, False)])
def test_sequences_that_look_equal_take_one_launch_whatever_they_are(hopper, tokens, batch, tiles):
    """Ragged ones may be shorter where rows of q belong to no sequence: tiles leave none out. Of few rows, tiles are for many sequences."""
    bf = lambda *s: torch.zeros(*s, dtype=torch.bfloat16)
    table, lens = torch.zeros(batch, 4, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    for q, cu in ((bf(batch, tokens, 8, 64), None), (bf(batch * tokens, 8, 64), torch.zeros(batch + 1, dtype=torch.int32))):
        call = plain(q=q, out=q.clone(), max_seqlen_q=tokens, cu_seqlens_q=cu, block_table=table, kv_lens=lens)
        before = len(launches(hopper))
        run = native.Attention(hopper, call, problem(q_len="extend" if tokens > 1 else "decode"))
        run(call)
        assert len(launches(hopper)) == before + 1 and ("prefill_sm90" in run.launch.function.what) == tiles
        assert not tiles or seen(hopper)["flags"] & native.ALL_TILES
    if tokens > 64 // 4:  # what another sequence's padding decides would change a short one's bits
        run = native.Attention(hopper, call._replace(batch_invariant=True), problem(q_len="extend"))
        run(call)
        assert run.before is not None and not seen(hopper)["flags"] & native.ALL_TILES


def test_no_other_threads_tiles_come_between_the_two_launches_of_a_mixed_batch(hopper):
    first, second, tiles = (native.Attention(hopper, call, problem(q_len=q_len)) for call, q_len in ((ragged(), "decode"), (ragged(), "decode"), (chunk(), "extend")))
    threads, before = [threading.Thread(target=second, args=(ragged(),)), threading.Thread(target=tiles, args=(chunk(),))], first.before

    def slow(*args):
        before(*args)
        [t.start() for t in threads]
        [t.join(0.2) for t in threads]

    first.before = slow
    count = len(launches(hopper))
    first(ragged())
    [t.join() for t in threads]
    seen = ["plain" if "cluster" in x else "tiles" for x in launches(hopper)[count:]]
    assert seen[:2] == ["plain", "tiles"] and sorted(seen[2:]) == ["plain", "tiles", "tiles"]
    assert first.turns is tiles.turns is hopper.tiles and native.Attention(hopper, plain(), problem()).turns is None


def test_every_launch_may_begin_before_the_one_before_has_ended_where_the_device_can(hopper):
    new = torch.zeros(3, 1, 2, 64, dtype=torch.bfloat16)
    calls = [plain(), paged(k_new=new, v_new=new), ragged(batch_invariant=True), chunk()]
    for can, said in (True, "overlapping 1"), (False, "stream 0x90"):
        hopper.limits = hopper.limits._replace(overlap=can, clusters=False)
        before = len(launches(hopper))
        for call in calls:
            native.Attention(hopper, call, problem(q_len="extend"))(call)
        outs, lses = torch.zeros(2, 3, 8, 64), torch.zeros(2, 3, 8)
        native.Merge(hopper, outs, lses, None, "")(outs, lses, None)
        assert len(launches(hopper)) - before == 7 and all(x.endswith(said) for x in launches(hopper)[before:])


@pytest.mark.parametrize("dim, batch, tokens, heads, rows", [
    (64, 2, 8192, 16, 192), (64, 8, 2048, 16, 192), (64, 1, 1024, 8, 128), (64, 2, 8192, 64, 192), (128, 2, 8192, 16, 192), (128, 32, 512, 16, 128),
    (96, 4, 4096, 16, 192), (256, 4, 4096, 16, 128),
])
def test_tiles_are_larger_where_all_multiprocessors_end_sooner_with_them(hopper, dim, batch, tokens, heads, rows):
    """Under batch_invariant the other sequences decide nothing, and larger tiles have keys in other blocks."""
    hopper.limits = hopper.limits._replace(sms=132)
    def tile(heads_q=heads, **more):
        k = torch.zeros(1, 1, 1, dim, dtype=torch.bfloat16).expand(batch, tokens, heads, dim)
        q = k[:, :, :1].expand(batch, tokens, heads_q, dim)
        call = Call(q, k, k, 1.0, causal=True, max_seqlen_q=tokens, max_seqlen_k=tokens, **more)
        asked = problem(layout="dense", page_size=0, q_len="prefill", num_heads_q=heads_q, num_heads_kv=heads, head_dim=dim, head_dim_v=dim)
        return native.kernel_of(call, asked, hopper.limits).rows
    assert tile() == rows and tile(batch_invariant=True) == 128 and tile(48 * heads) == 128, "48 heads: not in boxes, so not in larger tiles"


@pytest.mark.parametrize("batch, tokens, group, cache, tiles", [
    (64, 4, 8, None, True), (64, 4, 4, None, False), (64, 4, 4, torch.float8_e4m3fn, True), (2, 4, 4, torch.float8_e4m3fn, False), (64, 1, 8, None, False),
    (64, 1, 16, torch.float8_e4m3fn, True), (20, 1, 16, torch.float8_e4m3fn, False), (64, 1, 8, torch.float8_e5m2, False), (64, 1, 16, torch.float8_e5m2, True), (64, 4, 8, torch.float8_e4m3fnuz, False),
])
def test_few_rows_are_tiles_where_that_is_faster(hopper, batch, tokens, group, cache, tiles):
    """More rows than decode reads keys for at a time, of enough sequences; of 8 bits few. Under batch_invariant never: the other sequences must decide nothing."""
    hopper.limits = hopper.limits._replace(sms=132)
    def kernel(**more):
        k = torch.zeros(1, 16, 1, 128, dtype=cache or torch.bfloat16).expand(batch, 16, 8, 128)
        q = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(batch, tokens, 8 * group, 128)
        lens = torch.ones(batch, dtype=torch.int32)
        call = Call(q, k, k, 1.0, causal=True, max_seqlen_q=tokens, max_seqlen_k=16, kv_lens=lens, block_table=lens[:, None], **more)
        asked = problem(q_len="decode" if tokens == 1 else "extend", num_heads_q=8 * group, num_heads_kv=8, kv_dtype=str(k.dtype)[6:], head_dim=128, head_dim_v=128)
        return native.kernel_of(call, asked, hopper.limits).instance.kernel
    assert (kernel() == "prefill_sm90") == tiles and kernel(batch_invariant=True) != "prefill_sm90"


def test_a_mixed_batch_that_asks_for_more_is_computed_one_launch_after_the_other(hopper):
    run = native.Attention(hopper, ragged(batch_invariant=True), problem())
    run(ragged(batch_invariant=True))
    assert run.before.function.what.startswith("decode") and not any("cluster" in x for x in launches(hopper))
    assert run.before.values["flags"] & native.TILED and not run.launch.values["flags"] & native.TILED


# ------------------------------------------------------------------ AMD: decode and tiles are launches of their own
@pytest.fixture
def amd(device):
    if device.driver.vendor.name != "hip":
        pytest.skip("device: not AMD's")
    device.limits = limits_of("gfx942", 304)
    return device


def test_tiles_follow_the_decodes_of_a_ragged_call(amd):
    q = torch.zeros(75, 8, 64, dtype=torch.bfloat16)
    call = paged(q=q, out=q.clone(), cu_seqlens_q=torch.tensor([0, 70, 71, 75], dtype=torch.int32), max_seqlen_q=70)
    run = native.Attention(amd, call, problem(q_len="extend"))
    run(call)
    few, many = [tuple(map(int, x.split()[2:4])) for x in launches(amd)[-2:]]
    assert run.before.function.what.startswith("decode-") and run.before.values["flags"] & native.TILED, "which leaves sequences of many rows alone"
    assert run.launch.function.what.startswith("prefill-") and not seen(amd)["flags"] & native.TILED
    assert few == (run.before.values["lines"], run.before.values["workers"]) and many == (native.most_tiles(call, 128), 1), "a block a tile of 128 rows"


def test_tiles_are_alone_where_all_sequences_are_as_long(amd):
    q = torch.zeros(3, 80, 8, 64, dtype=torch.bfloat16)
    call = paged(q=q, out=q.clone(), max_seqlen_q=80)
    run = native.Attention(amd, call, problem(q_len="extend"))
    assert run.before is None and run.launch.function.what.startswith("prefill-")


def test_a_workspace_that_does_not_fit_is_torchs_error_and_the_next_call_works(device, monkeypatch):
    call = paged()
    run = native.Attention(device, call, problem())

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as m:
        m.setattr(native.torch, "empty", full)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            run(call)
    assert run(call) is call.out and not device.workspaces.captured


# ------------------------------------------------------------------ what flash-attn's callers say otherwise (portattn/dialect.py)
@pytest.mark.parametrize("ragged", [False, True])
def test_tensors_within_one_are_found_by_their_place_and_the_strides_that_were_bound(device, ragged):
    whole = torch.zeros(*((8,) if ragged else (2, 4)), 3, 8, 64, dtype=torch.bfloat16)
    q, k, v = whole.unbind(-3)
    cu = torch.tensor([0, 4, 8], dtype=torch.int32) if ragged else None
    call = Call(q, k, v, 0.125, causal=True, max_seqlen_q=4, max_seqlen_k=4, cu_seqlens_q=cu, cu_seqlens_k=cu)
    run = native.Attention(device, call, problem(layout="varlen" if ragged else "dense", num_heads_kv=8, page_size=0))
    assert run(call).shape == q.shape
    views = seen(device)
    out = run(call._replace(q=whole, k=whole, v=whole, within=tuple(x.data_ptr() - whole.data_ptr() for x in (q, k, v))))
    packed = seen(device)
    assert out.shape == q.shape and packed["out"] == out.data_ptr()
    assert all(packed[name] == views[name] for name in views if name != "out") and packed["k"] == k.data_ptr() != whole.data_ptr()


@pytest.mark.parametrize("form", [dialect.OURS, dialect.HEADS_FIRST, dialect.FLASH_ATTN_2])
def test_lse_is_as_the_caller_wants_it_by_its_strides(device, form):
    call = paged(q=torch.zeros(3, 2, 8, 64, dtype=torch.bfloat16), out=None, max_seqlen_q=2, return_lse=True, lse_form=form)
    _, lse = native.Attention(device, call, problem(lse=True))(call)
    ours = lse.mT if form else lse
    assert lse.shape == ((3, 8, 2) if form else (3, 2, 8)) and lse.is_contiguous()
    assert tuple(seen(device)[f"lse_{axis}"] for axis in ("batch", "token", "head")) == ours.stride()
    assert bool(seen(device)["flags"] & native.UNSEEN_INF) == (form == dialect.FLASH_ATTN_2)
