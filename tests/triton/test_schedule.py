"""Grids, tables, argument packing and imports: what the backend decides without a device."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")

from portattn.backends.triton import schedule  # noqa: E402
from portattn.backends.triton.schedule import Config  # noqa: E402

from portattn import codeobjects  # noqa: E402

ARCHES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151",
          "gfx1201", ""]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", ["tiles", "gather", "mixed", "chunks"])
def test_every_architecture_has_a_configuration_for_every_head_dim(arch, kind):
    for head_dim in (16, 64, 128, 192, 256, 512):
        for is_float32 in (False, True):
            tile, split = schedule.configs_for(arch, kind, head_dim, is_float32)
            for value in (tile.bm, tile.bn, split.bn, tile.warps, split.warps):
                assert value == schedule.pow2(value)
            assert tile.bm >= 16 and min(tile.bn, split.bn) >= 16 and split.bm == 0
            if arch.startswith("gfx"):
                assert tile.stages == split.stages == 1


@pytest.mark.parametrize(("d", "blocks"), [(1, (16, 0)), (16, (16, 0)), (64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (100,
                                                                                                                        (128, 0)),
                                           (128, (128, 0)), (192, (128, 64)), (256, (256, 0)), (576, (512, 64))])
def test_head_dims_are_padded_as_little_as_two_blocks_allow(d, blocks):
    assert schedule.head_blocks(d) == blocks


def items_of(lens_q: list[int], lens_k: list[int], grid: schedule.Grid, split: Config, group: int, heads_kv: int,
             take: int, merging: int) -> int:
    """How many items the kernel makes of these lengths: the formula of `program` in kernels.py."""
    rows = [n * group if not take or n * group <= take else 0 for n in lens_q]
    tiles = [-(-n // split.bn) for n in lens_k]
    pairs = [-(-r // split.bm) * heads_kv for r in rows]
    total = sum(p * t for p, t in zip(pairs, tiles))
    found = 0
    for p, t in zip(pairs, tiles):
        if grid.fixed_chunk:
            chunk = grid.fixed_chunk
        elif grid.fixed_splits:
            chunk = -(-t // grid.fixed_splits)
        else:
            chunk = max(-(-total // grid.budget), min(-(-total // grid.slots), 32), int((t * merging / 64) ** 0.5))
        found += p * max(1, -(-t // max(1, chunk)))
    return found


@pytest.mark.parametrize("seed", range(200))
def test_the_grid_holds_every_item_whatever_the_lengths(seed):
    rnd = random.Random(seed)
    batch, heads_kv, group = rnd.choice([1, 2, 7, 64, 256]), rnd.choice([1, 2, 8]), rnd.choice([1, 3, 4, 8])
    split = Config(rnd.choice([16, 64]), rnd.choice([32, 64, 128]), 4, 3)
    tile = Config(64, 64, 4, 3)
    max_k, max_q = rnd.choice([1, 100, 5000, 131072]), rnd.choice([1, 4, 300])
    mode = rnd.choice(["splits", "both"])
    lens_q = [rnd.randint(0, max_q) for _ in range(batch)]
    lens_k = [rnd.choice([0, 1, max_k, rnd.randint(0, max_k)]) for _ in range(batch)]
    grid = schedule.grid_for(mode, tile, split, batch=batch, heads_kv=heads_kv, group=group, max_q=max_q, max_k=max_k,
                             total_q=sum(lens_q),
                             kv_bytes=1, slots=rnd.choice([4, 264]), num_splits=rnd.choice([0, 0, 1, 5]),
                             invariant=rnd.random() < 0.3,
                             one_part=False)
    take = split.bm if mode == "both" else 0
    for merging in (1, 154, 5000):
        assert items_of(lens_q, lens_k, grid, split, group, heads_kv, take, merging) <= grid.total - grid.programs


def test_parts_are_fewer_where_merging_them_takes_long():
    merging = lambda rows, dv: schedule.merging(rows, min(16, schedule.pow2(rows)), dv, dv, Config(max(16, rows), 32, 2, 3))
    parts = lambda tiles, m: -(-tiles // max(1, int((tiles * m / 64) ** 0.5)))
    assert parts(256, merging(4, 128)) >= 40  # eight kv heads of one sequence leave multiprocessors idle otherwise
    assert 10 <= parts(256, merging(32, 128)) <= 20 and 8 <= parts(256, merging(16, 512)) <= 24


@pytest.mark.parametrize("seed", range(50))
def test_numbers_of_row_blocks_leave_room_for_every_sequence(seed):
    """Sequence b's blocks start at cu[b] * G // BM + b: they must not run into the next sequence's, nor past the grid."""
    rnd = random.Random(seed)
    lens, group, bm = [rnd.randint(0, 700) for _ in range(rnd.randint(1, 40))], rnd.choice([1, 3, 4, 7]), rnd.choice([16, 64,
                                                                                                                      128])
    starts, at = [], 0
    for b, n in enumerate(lens):
        starts.append((at * group // bm + b, -(-n * group // bm)))
        at += n
    ends = [s for s, _ in starts[1:]] + [at * group // bm + len(lens)]
    assert all(s + blocks <= end for (s, blocks), end in zip(starts, ends))


def test_batch_invariance_ignores_the_batch_and_its_bounds():
    common = dict(heads_kv=8, group=4, layout="paged", head_dim=128, invariant=True)
    modes = {schedule.pick_mode(132, batch=b, max_q=q, max_k=k, total_q=t, **common)
             for b in (1, 500) for q in (1, 512) for k in (16, 100000) for t in (None, 1, 5000)}
    assert modes == {"both"}


class Kernel:
    """What Launch asks of a compiled kernel."""

    run, function = None, 1234

    class metadata:
        num_warps, shared, num_ctas = 4, 5000, 1

        class target:
            warp_size = 32


TYPES = (("q", "*bf16"), ("k", "*bf16"), ("scale", "fp32"), ("left", "i32"), ("stride", "i64"), ("n", "i32"), ("m", "i32"), ("s",
                                                                                                                             "i64"))


def launched(monkeypatch, driver) -> None:
    from portattn.backends.triton import launch

    monkeypatch.setattr(launch, "_driver", driver)
    launch.Launch(Kernel(), launch.Spec("attend", TYPES, (), (), 4, 1), (1 << 40, 7, -8, -(1 << 41)), 3, 0)(99, 1 << 50, 2, 0.5,
                                                                                                            -1)


def holds_arguments(pointers) -> None:
    read = lambda i, code: struct.unpack_from("=" + code, ctypes.string_at(pointers[i], 8))[0]
    assert [read(0, "Q"), read(1, "Q"), read(2, "f"), read(3, "i")] == [1 << 50, 2, 0.5, -1]
    assert [read(4, "q"), read(5, "i"), read(6, "i"), read(7, "q")] == [1 << 40, 7, -8, -(1 << 41)]
    assert [read(8, "Q"), read(9, "Q")] == [0, 0]  # Triton's scratch arguments


def test_arguments_are_packed_as_a_c_compiler_lays_them_out(monkeypatch):
    class Driver:
        launch_ex = None

        def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
            assert [x.value for x in (function, gx, gy, gz, bx, by, bz, shared, stream)] == [1234, 3, 1, 1, 128, 1, 1, 5000, 99]
            holds_arguments(pointers)
            self.done = True
            return 0

    driver = Driver()
    launched(monkeypatch, driver)
    assert driver.done


def test_the_short_launch_passes_cuda_h_s_configuration(monkeypatch):
    class Driver:
        launch = None

        def launch_ex(self, config, function, pointers, extra):
            raw = ctypes.string_at(ctypes.addressof(config._obj), 56)
            assert struct.unpack("=7I4xQQI4x", raw) == (3, 1, 1, 128, 1, 1, 5000, 99, 0, 0)
            holds_arguments(pointers)
            self.done = True
            return 0

    driver = Driver()
    launched(monkeypatch, driver)
    assert driver.done


def test_a_refused_short_launch_is_repeated_the_long_way(monkeypatch):
    class Driver:
        calls = []

        def launch_ex(self, *_):
            self.calls.append("short")
            return 801

        def launch(self, *_):
            self.calls.append("long")
            return 0

    launched(monkeypatch, Driver())
    assert Driver.calls == ["short", "long"]


def test_a_launch_that_fails_is_a_kernel_error(monkeypatch):
    class Driver:
        launch_ex = None

        def launch(self, *_):
            return 700

    from portattn.errors import KernelError

    with pytest.raises(KernelError, match="error 700"):
        launched(monkeypatch, Driver())


def test_the_hip_runtime_that_torch_has_loaded_is_the_one_that_launches(monkeypatch):
    from portattn.backends.triton import launch

    from portattn import driver

    opened, hip = [], SimpleNamespace(hipModuleLaunchKernel=SimpleNamespace())

    def load(name):
        opened.append(name)
        if name.endswith(".so"):
            raise OSError(name)
        return hip

    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(driver, "mapped", lambda name: ["/torch/lib/libamdhip64.so.6"])
    assert launch._Driver().launch is hip.hipModuleLaunchKernel and opened == ["/torch/lib/libamdhip64.so.6"]
    opened.clear()
    monkeypatch.setattr(driver, "mapped", lambda name: [])
    launch._Driver()
    assert opened == ["libamdhip64.so", "libamdhip64.so.7"], "a system that has numbered names only"


def test_a_missing_or_broken_triton_is_a_reason():
    code = ("import sys; sys.modules['triton'] = None\n"
            "import torch, portattn; from portattn.backends import triton as t\n"
            "print([r.code for r in t.probe(torch.device('cpu'))])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['not_installed']"


def test_importing_portattn_imports_no_triton():
    code = "import sys, portattn; from portattn.backends import triton as t; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_shared_memory_is_met_by_stages_then_keys_then_rows():
    config, seen = Config(64, 32, 4, 2), []
    while config is not None:
        seen.append(tuple(config))
        config = config.smaller()
    assert seen == [(64, 32, 4, 2), (64, 32, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)]


def test_native_conversions_follow_the_hardware():
    machine = lambda arch: schedule.Machine(arch, 1, 1)
    assert machine("sm_89").converts(torch.float8_e4m3fn) and not machine("sm_86").converts(torch.float8_e4m3fn)
    assert machine("gfx942").converts(torch.float8_e4m3fnuz) and not machine("gfx942").converts(torch.float8_e4m3fn)
    assert machine("gfx1201").converts(torch.float8_e4m3fn) and not machine("gfx90a").converts(torch.float8_e5m2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a GPU")
def test_tune_says_that_there_is_nothing_to_measure(capsys):
    from portattn.backends.triton import tune

    assert tune.main([]) == 3 and "no CUDA or HIP device" in capsys.readouterr().out


def test_a_record_of_this_machine_goes_before_the_shipped_table(tmp_path, monkeypatch):
    from portattn.backends.triton import tune

    shipped = schedule.configs_for("gfx942", "tiles", 128, False)
    blocks = {size: [16, 16, 1, 1] for size in (64, 128, 256, 512)}
    splits = {size: [16, 1, 1] for size in blocks}
    record = dict(arch="gfx942", tiles=blocks, gather=blocks, mixed={n: [*c, 32] for n, c in blocks.items()}, splits=splits, tiles32=blocks,
                  splits32=splits)
    (tmp_path / "triton-tuning.yaml").write_text(tune.render(record), encoding="utf-8")
    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path))
    schedule.configs_for.cache_clear()
    try:
        assert schedule.configs_for("gfx942", "tiles", 128, False) == (Config(16, 16, 1, 1), Config(0, 16, 1, 1))
        assert schedule.configs_for("gfx942", "mixed", 128, False)[1] == Config(0, 32, 1, 1)
        assert schedule.configs_for("gfx950", "tiles", 128, False) == shipped  # the record speaks of one architecture
    finally:
        schedule.configs_for.cache_clear()


WHOLE = "- arch: [gfx942]\n" + "".join(f"  {kind}: {{64: {row}, 128: {row}, 256: {row}, 512: {row}}}\n" for kind, row in (
    ("tiles", [16, 16, 1, 1]), ("splits", [16, 1, 1]), ("tiles32", [16, 16, 1, 1]), ("splits32", [16, 1, 1])))


@pytest.mark.parametrize("text", [
    "", "\0\1", "- arch: [gfx942", "just words", "arch: [gfx942]", "- 3", "- arch: gfx942\n", WHOLE[:-40], WHOLE.replace("512:", "500:"),
    WHOLE.replace("[16, 1, 1]", "[16, 1]"), WHOLE.replace("[16, 1, 1]", "[16, 1, x]"), WHOLE + "  hopper: {64: [1]}\n", WHOLE + "  mixed: 3\n", None,
], ids=lambda x: repr(x)[:24])
def test_a_record_that_is_none_is_left_out_with_a_note(tmp_path, monkeypatch, text):
    """Cut off by a full disk, or of another version: calls must not end for it."""
    shipped = schedule.configs_for("gfx942", "tiles", 128, False)
    path = tmp_path / "triton-tuning.yaml"
    path.mkdir() if text is None else path.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(codeobjects, "_notes", {})
    schedule.configs_for.cache_clear()
    schedule.hoppers.cache_clear()
    try:
        assert schedule.configs_for("gfx942", "tiles", 128, False) == shipped
        assert schedule.hoppers("gfx942", 64) == ()
        assert len(codeobjects.notes()) == 1 and str(path) in codeobjects.notes()[0]
    finally:
        schedule.configs_for.cache_clear()
        schedule.hoppers.cache_clear()


def test_the_shipped_tables_are_of_the_form_that_a_record_must_have():
    assert all(map(schedule._is_table, schedule.tables())) and len(schedule.tables()) > 4


@pytest.mark.parametrize("value", ["1", "0", "", "true", "False", "ON", "off", "no", "yes", "y", "2", " 1"])
def test_the_interpreter_is_on_where_triton_has_it_on(monkeypatch, value):
    """TRITON_INTERPRET=off beside a GPU must not decline the GPU."""
    import triton
    from portattn.backends.triton.launch import interpreting

    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreting() == triton.knobs.runtime.interpret


def test_tensor_maps_describe_only_nested_strides():
    from portattn.backends.triton.calls import _nested

    k = torch.empty(2, 128, 4, 64, dtype=torch.float16)
    assert _nested(k) and _nested(k[:, ::2]) and _nested(k[:, :, ::2]) and _nested(k[0]) and _nested(k[:1])
    head_major = torch.empty(2, 4, 128, 64, dtype=torch.float16).transpose(1, 2)
    assert not _nested(head_major)
    assert not _nested(k[:1].expand(2, -1, -1, -1)) and not _nested(k[:, :, :1].expand(-1, -1, 4, -1))


def test_tune_measures_every_kind_and_keeps_the_fastest(monkeypatch, capsys):
    """A device that is imagined: a configuration's time is its number of rows plus its keys; those of 128 rows do not compile."""
    import triton.testing
    from portattn.backends.triton import calls, tune

    measured = []

    class Attention:
        def __init__(self, call, hopper):
            if hopper:
                blocks, = schedule.hoppers("sm_90", 64)
                if blocks.groups == 3 and blocks.bn == 64:
                    raise RuntimeError("out of resources")
                measured.append(("hopper", call, blocks))
                return
            tile, split = schedule.configs_for("sm_90", call, 64, False)
            if call != "splits" and tile.bm == 128:
                raise RuntimeError("out of resources")
            self.described = (call, tile, split, None)
            measured.append((call, tile, split))

        def __call__(self, call):
            pass

    def bench(run, **_):
        run()
        kind, tile, split = measured[-1]
        if kind == "hopper":  # three groups cost something once and win with keys
            return 50 + 4 * tile - split.groups * (tile - 1500) + split.stages + (0 if split.turns else 7)
        return (split.bn if kind == "splits" else tile.bm + tile.bn) * 1e-3

    monkeypatch.setattr(calls, "Attention", Attention)
    monkeypatch.setattr(calls, "machine_of", lambda device: schedule.Machine("sm_90", 132, 227 << 10))
    monkeypatch.setattr(tune, "_call", lambda device, kind, size, keys=None: keys or kind)
    monkeypatch.setattr(triton.testing, "do_bench", bench)
    shipped = {kind: schedule.configs_for("sm_90", kind, 128, False) for kind in ("tiles", "gather", "gather8", "mixed")}
    record = tune.measure(torch.device("cuda", 0), [64], list(tune.MEASURED))
    assert {kind for kind, *_ in measured} == {"hopper", "tiles", "gather", "gather8", "splits", "mixed"}
    assert record["hopper"][64] == [3, 128, 2, 160, 1] and record["hopper_short"][64] == [2, 128, 2, 240, 1, 1024]
    assert record["hopper"][128] == list(schedule.hoppers("sm_90", 128)[-1][:-1]) and 256 not in record["hopper_short"]
    assert record["tiles"][64] == [64, 32, 4, 3] and record["gather"][64] == [64, 32, 4, 3]
    assert record["mixed"][64][:2] == [64, 32] and len(record["mixed"][64]) == 5
    assert record["splits"][64][0] == 32  # 16 keys have one stage only, which is for HIP
    assert record["tiles"][128] == list(shipped["tiles"][0]) and record["gather"][128] == list(shipped["gather"][0])
    assert record["gather8"][64] == [64, 32, 4, 3] and record["gather8"][128] == list(shipped["gather8"][0]) != record["gather"][128]
    assert "RuntimeError" in capsys.readouterr().out


def test_tune_tries_only_blocks_of_hopper_that_fit():
    """As an H200 had it: 8, 6 and 1 of the candidates ran; what is shipped is among them."""
    from portattn.backends.triton import tune

    for size, count in ((64, 8), (128, 6), (256, 1)):
        fitting = [o for o in tune.HOPPERS if tune.fits(size, o, 227 << 10)]
        assert len(fitting) == count
        assert {tuple(h[:5]) for h in schedule.hoppers("sm_90", size)} <= set(fitting)


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariance_chooses_the_kernel_without_the_batch(monkeypatch, invariant):
    from portattn.backends.triton import calls

    from portattn.problem import Call

    monkeypatch.setattr(calls, "machine_of", lambda device: schedule.Machine("sm_90", 132, 227 << 10))
    monkeypatch.setattr(calls, "interpreting", lambda: False)
    chosen = set()
    for batch in (1, 64):
        q, k = torch.empty(batch, 1024, 4, 64, dtype=torch.float16), torch.empty(batch, 1024, 4, 64, dtype=torch.float16)
        call = Call(q, k, k, softmax_scale=1.0, causal=True, window_right=0, max_seqlen_q=1024, max_seqlen_k=1024,
                    batch_invariant=invariant)
        run = calls.Attention(call)
        chosen.add(run._descriptors(call, run.shape))
    assert len(chosen) == (1 if invariant else 2)
