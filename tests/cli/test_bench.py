"""`portattn bench`: its arithmetic, its peers' correctness, and that a wrong result is reported. No time is asserted."""

import json
import math
import sys

import pytest
import torch

from portattn import api, bench, cli, reference


def test_a_race_runs_everyone_and_lets_the_slow_sit_out():
    ran = {"fast": 0, "slow": 0}

    def run(name, n):
        def fn():
            ran[name] += 1
            torch.randn(n)
        return fn

    times = bench.race({"fast": run("fast", 1), "slow": run("slow", 2_000_000)}, 0.05)
    assert len(times["fast"]) == len(times["slow"]) >= 5
    assert (
        None not in times["fast"] and times["slow"][:3] != [None] * 3 and times["slow"][3:] == [None] * (len(times["slow"]) - 3)
    )
    assert ran["fast"] > ran["slow"] > 0


def test_ratios_are_medians_within_a_round():
    theirs, ours = [2.0, 4.0, 9.0, None, 40.0], [1.0, 2.0, 3.0, 1.0, 10.0]
    mid, low, high = bench.compare(theirs, ours)  # 2, 2, 3, 4
    assert mid == 2.5 and low <= 2.5 <= high


def test_a_peer_that_computes_something_else_is_named_and_left_out():
    ones = torch.ones(4)
    lines = bench.contest(
        "dense", "x", {"portattn": lambda: ones, "wrong": lambda: ones * 2, "right": lambda: ones.clone()}, 0.01, torch.float32
    )
    assert [line.against for line in lines] == ["", "right"]
    assert "portattn and wrong differ" in lines[0].note and math.isnan(lines[0].value)


def test_the_tiled_peer_is_right():
    q, k, v = torch.randn(130, 4, 16), torch.randn(150, 2, 16), torch.randn(150, 2, 16)
    out = torch.empty_like(q)
    bench.torch_tiled(q, k, v, out)
    want = reference.attention(q[None], k[None], v[None], causal=True)[0][0]
    assert bench.difference(out, want) < 1e-6


def test_the_gathering_peer_is_right():
    pages = bench.Pages((40, 40), torch.float32)
    q = torch.randn(2, bench.HEADS, bench.DIM)
    want = reference.attention_paged(q[:, None], pages.k, pages.v, pages.table, pages.lens, causal=True)[0][:, 0]
    assert bench.difference(pages.decode(q, 2, 40)(), want) < 1e-6


def test_pages_are_each_used_once():
    pages = bench.Pages((100, 17, 1), torch.float32)
    used = [int(pages.table[b, i]) for b, n in enumerate((7, 2, 1)) for i in range(n)]
    assert sorted(used) == list(range(10))


@pytest.fixture
def small(monkeypatch):
    """Workloads of a size that a test can afford."""
    for name, value in dict(HEADS=4, HEADS_KV=2, DIM=16).items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.parametrize("suite, args", [
    (bench._dense, (2, 70, torch.float32)),
    (bench._varlen, ((5, 70, 1), torch.float32)),
    (bench._decode, (3, 40, torch.bfloat16)),
    (bench.mixed, (True,)),
])
def test_every_peer_of_a_suite_agrees_with_portattn_and_is_timed(small, suite, args):
    lines = suite(*args, 0.01)
    assert [line.note for line in lines] == ["", ""]
    assert all(0 < line.low <= line.ratio <= line.high for line in lines), lines


def test_import_cost_is_measured_in_a_child():
    took, *besides = bench.child(bench._IMPORT).split()
    assert 0 < float(took) < 30 and besides == ["False"] * 3  # no CUDA context, no triton, no thread


def test_what_import_does_besides_is_told(monkeypatch):
    monkeypatch.setattr(bench, "child", lambda code: "0.01 False True True")
    (line,) = bench.import_cost(True, 0)
    assert "makes an import of triton, a thread" in line.note and line.value == pytest.approx(10)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a process its peak memory")
def test_peak_memory_sees_a_large_temporary():
    code = ("import torch, portattn.bench as b\n"
            "class A:\n    attention = staticmethod(lambda q, k, v, **kw: torch.ones(64 << 20).sum())\n"  # 256 MiB
            "b.api = A\nprint(b.peak_of_everything(128, 5))")
    assert int(bench.child(code)) > 200e6


def test_overhead_is_reported_as_text_and_json_without_noise(capsys, tmp_path):
    file = tmp_path / "out.json"
    assert cli.main(["bench", "--suites", "overhead", "--quick", "--seconds", "0.02", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out  # quiet where there is no terminal
    lines = json.loads(file.read_text())["lines"]
    assert [line["what"] for line in lines] == ["dense", "varlen", "paged", "every feature named"]
    assert all(line["value"] is not None and line["unit"] == "us" for line in lines), lines


def test_json_to_standard_output_is_json_alone(monkeypatch, capsys):
    monkeypatch.setitem(bench.RUN, "dense", lambda quick, budget_s: [bench.Line("dense", "x", math.nan, "ms")])
    assert cli.main(["bench", "--suites", "dense", "--json", "-"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["what"] == "x" and line["value"] is None


def test_a_suite_that_fails_is_a_line_and_exit_code_one_and_the_others_run(monkeypatch, capsys):
    monkeypatch.setitem(bench.RUN, "dense", lambda quick, budget_s: 1 / 0)
    monkeypatch.setitem(bench.RUN, "decode", lambda quick, budget_s: [bench.Line("decode", "eight sequences", 1.0, "ms")])
    assert cli.main(["bench", "--suites", "dense,decode"]) == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out and "eight sequences" in out


def test_a_wrong_result_is_exit_code_one(monkeypatch, capsys):
    right = api.attention_varlen
    monkeypatch.setattr(api, "attention_varlen", lambda *a, **kw: right(*a, **kw) * 1.5)
    assert cli.main(["bench", "--suites", "overhead", "--quick", "--seconds", "0.01"]) == 1
    assert "differs from plain torch" in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setitem(bench.RUN, "dense", lambda quick, budget_s: [])
    cli.main(["bench", "--suites", "dense"])
    assert "[1/1] dense" in capsys.readouterr().err


def test_a_workload_is_named_before_its_first_peer_only():
    lines = [bench.Line("dense", "1 x 8", 2.0, "ms", r, 0.5, 3.0, peer) for r, peer in ((1.5, "sdpa"), (0.9, "tiled"))]
    first, second = bench.rows([*lines])
    assert "1 x 8" in first and "2 ms" in first and "1.50 x sdpa (0.50 to 3.00)" in first
    assert "1 x 8" not in second and " ms" not in second and "0.90 x tiled" in second


@pytest.mark.parametrize("argv, said", [(["--suites", "dnse"], "dnse"), (["--seconds", "0"], "--seconds: wanted more than 0"), (["--seconds", "nan"], "nan"),
                                        (["--threads", "0"], "--threads: wanted at least 1"), (["--json", "no such folder/x"], "no such folder")])
def test_wrong_usage_is_told_before_anything_is_measured(argv, said, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_report", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", *argv])
    assert exit.value.code == 2 and said in capsys.readouterr().err
