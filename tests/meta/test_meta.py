"""The tester is tested: the correct toy passes, and each broken one is caught by the rule that names its fault."""

import io
import json
import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
from broken import BROKEN  # noqa: E402
from toy import Toy, manifest  # noqa: E402

from portattn import registry  # noqa: E402
from portattn.testing import runner, target  # noqa: E402
from portattn.testing.cases import Case, build  # noqa: E402
from portattn.testing.target import RULES, Target, default_device  # noqa: E402


@pytest.fixture
def backend():
    """Registers backends for one test: backend(adapter, name, **manifest changes) -> name."""
    names = []

    def add(adapter=None, name="toy", **changes):
        names.append(registry.register(manifest(name, **changes), adapter or Toy()))
        return names[-1]

    yield add
    for name in names:
        registry.unregister(name)


@pytest.mark.parametrize("found, vendor, want", [("cuda", "cuda", dict(cuda="cuda", triton="cuda", hip="cpu", cpu="cpu", sdpa="cpu")),
                                                 ("cuda", "hip", dict(cuda="cpu", triton="cuda", hip="cuda")), (None, "", dict(cuda="cpu", triton="cpu", cpu="cpu"))])
def test_a_backend_is_tested_on_the_accelerator_that_is_native_to_it(monkeypatch, found, vendor, want):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(found))
    monkeypatch.setattr(target, "vendor", lambda kind: vendor)
    assert {name: default_device(name) for name in want} == want


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_backend_is_caught_by_its_rule(backend, name):
    broken = BROKEN[name]
    backend(broken.adapter(), name.lower(), **broken.manifest)
    report = runner.run(name.lower(), text=f"{broken.rule} {broken.test}")
    assert {r.rule for r in report.results} == {broken.rule}
    assert report.count("failed") >= 1, f"{name} passed {broken.test} of {broken.rule}"
    assert report.exit_code == runner.RED


@pytest.mark.parametrize("rule", [r for r in RULES if r not in ("C-GRAPH", "C-COMPILE")])
def test_the_correct_toy_passes(backend, rule):
    report = runner.run(backend(), text=rule)
    assert report.exit_code == runner.GREEN, runner.summary(report)


def test_every_rule_has_a_broken_backend_or_needs_more_than_an_adapter():
    """C-ERR, C-NOSYNC, C-GRAPH and C-COMPILE are the layer's or a GPU's to break."""
    assert set(RULES) - {b.rule for b in BROKEN.values()} == {"C-ERR", "C-NOSYNC", "C-GRAPH", "C-COMPILE"}


def test_every_rule_has_tests():
    assert {c.rule for c in runner.checks()} == set(RULES)


def test_a_backend_that_declines_everything_is_not_green(backend):
    report = runner.run(backend(name="never", dtypes=("float16",), layouts=("dense",),
                                head_dims=__import__("portattn.capability").capability.Range(values=(999,))),
                        text="C-LEN")
    assert report.count("declined") and not report.count("passed") and not report.count("failed")
    assert report.exit_code == runner.NOTHING


def test_a_backend_that_does_not_work_here_is_not_green(backend):
    from portattn import Reason

    class Absent(Toy):
        def probe(self, device):
            return (Reason("driver", "a driver", "none"),)

    report = runner.run(backend(Absent(), "absent"))
    assert report.exit_code == runner.NOTHING and "driver" in report.unusable


def test_declined_is_apart_from_failed_and_carries_codes(backend):
    report = runner.run(backend(name="half", features=("causal", "lse")), text="C-ORDER test_the_order")
    assert report.count("declined") and not report.count("failed")
    codes = {code for r in report.results for code in r.codes}
    assert codes <= {"softcap", "alibi", "bias", "sinks", "window"} and "softcap" in codes


def test_a_backend_that_declares_little_passes_with_little(backend):
    for rule in ("C-ALIGN", "C-NODROP", "C-GRAD", "C-SPLIT", "C-ERR"):
        report = runner.run(backend(name=f"small{rule[2:].lower()}", layouts=("dense",), dtypes=("float32",), kv_dtypes=(),
                                    features=("causal",)), text=rule)
        assert report.exit_code == runner.GREEN, runner.summary(report)


def test_xfails_are_apart_from_failures_and_stale_ones_are_reported(backend):
    text = "C-ALIGN test_causal_is_bottom_right"
    name = backend(BROKEN["TopLeftMask"].adapter(), "topleft")
    assert runner.run(name, text=text).exit_code == runner.RED
    report = runner.run(name, text=text, xfails=["test_causal_is_bottom_right*"])
    assert report.count("xfailed") and not report.count("failed") and report.exit_code == runner.GREEN
    square = "test_causal_is_bottom_right[dense-f16-h4x4-d64-q64k64-causal]"
    report = runner.run(name, text=text, xfails=["test_causal_is_bottom_right*", square])
    assert report.stale == (square,) and report.exit_code == runner.RED


def test_the_command_lists_runs_and_reports(backend, tmp_path, capsys):
    name, file = backend(), tmp_path / "report.json"
    assert runner.main(["--backend", name, "--filter", "C-WINDOW test_window_none", "--json", str(file)]) == runner.GREEN
    assert "green" in capsys.readouterr().out
    data = json.loads(file.read_text())
    assert data["counts"]["passed"] == 1 and data["rules"]["C-WINDOW"]["passed"] == 1 and data["results"][0]["id"].startswith("test_window_none")
    assert runner.main(["--backend", name, "--filter", "C-WINDOW", "--list"]) == runner.GREEN
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and all(line.startswith("C-WINDOW") for line in lines)


@pytest.mark.parametrize("argv", [[], ["--backend", "nobody"], ["--backend", "toy", "--level", "slow"],
                                  ["--backend", "toy", "--filter", "nothing like it"],
                                  ["--backend", "toy", "--device", "toaster"], ["--backend", "toy", "--xfails", "no such file"],
                                  ["--backend", "toy", "--case", "dense-f32-oops"], ["--backend", "toy", "--json", "no such folder/report.json"],
                                  ["--backend", "toy", "--record", "--filter", "C-GQA"]])
def test_wrong_usage_has_its_own_exit_code(backend, argv, capsys):
    backend()
    assert runner.main(argv) == runner.USAGE
    assert capsys.readouterr().err.strip()


def test_one_case_can_be_pasted_back(backend, capsys):
    assert runner.main(["--backend", backend(), "--case", "paged-f32-h6x2-d24-p3-q2k11*2-causal-sinks-poison"]) == runner.GREEN
    assert "1 passed" in capsys.readouterr().out


def test_case_ids_parse_back():
    seen = 0
    for check in runner.checks():
        for case in check.cases(Target("sdpa"), "full"):
            if case is not None:
                assert Case.parse(str(case)) == case
                seen += 1
    assert seen > 500
    with pytest.raises(ValueError, match="oops"):
        Case.parse("dense-f32-oops")


def test_the_same_id_makes_the_same_numbers():
    case = Case.parse("paged-bf16-h8x2-d64-p16-q1k37*2+q5k5-causal-w16.0-sinks")
    assert all((a == b).all() for a, b in zip(build(case).args, build(case).args))


def test_recording_keeps_the_manifest_and_replaces_the_same_run(backend, tmp_path):
    from portattn import manifest as manifests

    folder = tmp_path / "toy"
    folder.mkdir()
    file = folder / "backend.yaml"
    file.write_text("schema: 1  # kept\nname: toy\ntitle: T\npriority: 1\ncapabilities:\n  - {id: a, layouts: [dense], dtypes: [float32]}\n")
    report = runner.Report("toy", "cpu", "quick", (runner.Result("t", "C-TOL", "passed"), runner.Result("u", "C-TOL",
                                                                                                        "declined")))
    for _ in range(2):
        runner.record(report, str(file))
    runner.record(report._replace(level="full"), str(file))
    found = manifests.load(folder).verified
    assert [(v["level"], v["passed"], v["declined"], v["failed"]) for v in found] == [("quick", 1, 1, 0), ("full", 1, 1, 0)]
    assert "# kept" in file.read_text()
    with pytest.raises(ValueError, match="whole run"):
        runner.record(report._replace(whole=False), str(file))


def test_a_recording_that_is_interrupted_leaves_the_manifest(tmp_path, monkeypatch):
    file = tmp_path / "backend.yaml"
    file.write_text("schema: 1\n")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.record(runner.Report("toy", "cpu", "quick", (runner.Result("t", "C-TOL", "passed"),)), str(file))
    assert file.read_text() == "schema: 1\n"


def test_progress_goes_to_a_log_now_and_then():
    def log(every: float) -> list[str]:
        stream = io.StringIO()
        show = runner._Progress(stream, every)
        show(0, 2, None, "first")
        show(1, 2, runner.Result("first", "C-ERR", "failed"), "second")
        show(2, 2, runner.Result("second", "C-ERR", "passed"), "")
        return stream.getvalue().splitlines()

    assert log(30.0) == []
    assert log(-1.0) == ["0/2 in 0 s  first", "1/2, 1 failed in 0 s  second", "2/2, 1 failed in 0 s  "]
