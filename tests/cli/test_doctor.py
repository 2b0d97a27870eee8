"""The doctor: its report, its text, its exit code, and that nothing it asks can bring it down."""

import io
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import types

import pytest
import torch

import portattn
from portattn import cli, codeobjects, doctor, matrix, registry, survey, verdicts
from portattn.capability import Capability
from portattn.findings import Finding
from portattn.manifest import Manifest
from portattn.native_backend import NativeBackend
from portattn.survey import Imports, World


@pytest.fixture(autouse=True)
def apart(monkeypatch, cache_folder):
    """No variables of the caller, and verdicts of its own."""
    for name in [n for n in os.environ if n.startswith("PORTATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PORTATTN_CACHE", str(cache_folder))
    registry.forget()
    yield
    registry.forget()


def look(**facts):
    """A doctor's world: this CPU, and what a test makes up."""
    return World(**{"torch": torch.__version__, "devices": survey.look_devices()[:1], **facts})


def report(monkeypatch, checks=False, **facts):
    monkeypatch.setattr(doctor, "look", lambda imports: look(**facts))
    return doctor.report(checks=checks, imports=Imports({}))


def toy(attention, **adapter):
    """Registers a backend `toy` that is asked before all others."""
    c = Capability("any", ("dense",), ("float32",), features=("causal", "lse"))
    registry.register(Manifest("toy", "a toy", 10_000, (c,)), types.SimpleNamespace(attention=attention, **adapter))


@pytest.fixture
def unregister():
    yield
    if "toy" in registry.manifests():
        registry.unregister("toy")


# ------------------------------------------------------------------ the report
def test_a_real_report_is_json_and_finds_a_working_backend():
    found = doctor.report(imports=Imports({}))
    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
    assert found["devices"][0]["device"] == "cpu"
    assert {b["name"] for b in found["backends"]} == set(registry.manifests())
    computed = [c for c in found["checks"] if c["backend"] == "sdpa" and c["device"] == "cpu"]
    assert {(c["call"], c["dtype"]) for c in computed} == {(call, dtype) for call in doctor.CHECKED for dtype in doctor.DTYPES}
    assert all(c["ok"] and 0 <= c["error"] < 0.05 and c["seconds"] > 0 for c in computed), computed
    assert {line["call"] for line in found["choices"]} == set(doctor.CALLS)
    assert all(line["backend"] for line in found["choices"] if line["device"] == "cpu")


@pytest.mark.usefixtures("cpu_kernels")
def test_the_command_prints_json_and_exits_zero_when_well():
    done = subprocess.run(
        [sys.executable, "-m", "portattn", "doctor", "--json", "--no-checks"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_an_error_is_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "report", lambda checks: {**REPORT, "ok": False, "findings": [Finding("error", "x", "bad", "mend it")._asdict()]}
    )
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "bad" in text and "fix: mend it" in text and "1 error" in text


@pytest.mark.usefixtures("cpu_kernels")
def test_a_wrong_backend_is_found_by_computing(monkeypatch, unregister):
    toy(lambda call, bound: (call.q * 0.0, torch.zeros(call.q.shape[:3])))
    found = report(monkeypatch, checks=True)
    wrong = [c for c in found["checks"] if c["backend"] == "toy"]
    assert [(c["call"], c["dtype"], c["ok"]) for c in wrong] == [("dense", "float32", False)]
    (error,) = [f for f in found["findings"] if f["level"] == "error"]
    assert error["code"] == "check" and "toy on cpu" in error["text"] and "is right" in error["text"]
    assert "verdicts" in error["fix"] and not next(b for b in found["backends"] if b["name"] == "toy")["level"] == "ready"
    assert not found["ok"]


def test_a_backend_that_ends_the_process_is_a_failed_check(monkeypatch, tmp_path):
    """Backends other than torch's own compute in a child; here the child dies at its second job."""
    code = (
        "import json, os, sys\njobs = json.loads(sys.argv[-1])\n"
        "for job in jobs:\n    if job['dtype'] == 'float16': os._exit(139)\n"
        "    print(json.dumps({**job, 'ok': True, 'error': 0.0, 'seconds': 1.0, 'detail': ''}), flush=True)\n"
    )
    monkeypatch.setattr(
        doctor, "_child", lambda args, errors: subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    )
    jobs = [{"backend": "b", "device": "cpu", "call": "dense", "dtype": d} for d in doctor.DTYPES]
    found = list(doctor._in_children(jobs))
    assert [(c["dtype"], c["ok"]) for c in found] == [("float32", True), ("float16", False), ("bfloat16", True)]
    assert "ended the process, code 139" in found[1]["detail"]


def test_a_child_that_fails_at_its_import_is_told_with_the_error(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['portattn.findings'] = None\n")
    monkeypatch.setattr(doctor, "child_environment", lambda: {**os.environ, "PYTHONPATH": str(tmp_path)})
    (found,) = doctor._in_children([{"backend": "sdpa", "device": "cpu", "call": "dense", "dtype": "float32"}])
    assert re.fullmatch("ended the process, code 1: ModuleNotFoundError: .*portattn.findings.*", found["detail"])


def test_a_backend_that_hangs_is_a_failed_check(monkeypatch):
    monkeypatch.setattr(doctor, "CHECK_LIMIT_S", 0.5)
    monkeypatch.setattr(
        doctor,
        "_child",
        lambda args, errors: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, text=True),
    )
    (found,) = doctor._in_children([{"backend": "b", "device": "cpu", "call": "dense", "dtype": "float32"}])
    assert not found["ok"] and "not finished" in found["detail"]


def test_many_jobs_may_take_longer_together_than_one(monkeypatch):
    """Eight GPUs whose kernels are compiled: minutes in which nothing hangs."""
    code = (
        "import json, sys, time\n"
        "for job in json.loads(sys.argv[-1]):\n    time.sleep(0.7)\n"
        "    print(json.dumps({**job, 'ok': True, 'error': 0.0, 'seconds': 1.0, 'detail': ''}), flush=True)\n"
    )
    monkeypatch.setattr(doctor, "CHECK_LIMIT_S", 2.0)
    monkeypatch.setattr(
        doctor, "_child", lambda args, errors: subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    )
    jobs = [{"backend": "b", "device": f"cuda:{i}", "call": "dense", "dtype": "float16"} for i in range(4)]
    found = list(doctor._in_children(jobs))
    assert [(c["device"], c["ok"]) for c in found] == [(job["device"], True) for job in jobs]


def test_a_family_that_ended_an_earlier_process_is_told_and_not_run_again(monkeypatch):
    job = {"backend": "sdpa", "device": "cpu", "call": "dense", "dtype": "float32"}
    assert doctor.compute(job)["ok"]
    (file,) = (pathlib.Path(os.environ["PORTATTN_CACHE"]) / "verdicts").iterdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file.write_text(json.dumps({"running": ended.pid, "host": socket.gethostname()}))
    registry.forget()
    monkeypatch.setattr(verdicts, "measure", lambda bound, device: pytest.fail("it was run"))
    found = doctor.compute(job)
    assert not found["ok"] and "an earlier process ended" in found["detail"] and os.environ["PORTATTN_CACHE"] in found["fix"]


def test_the_child_computes_what_it_is_told(monkeypatch):
    job = {"backend": "sdpa", "device": "cpu", "call": "dense", "dtype": "float32"}
    (found,) = doctor._in_children([job])
    assert found["ok"] and found["error"] < 1e-4, found


def test_a_raising_probe_makes_its_backend_broken_and_the_rest_goes_on(monkeypatch, unregister):
    def probe(device):
        raise OSError("driver says no")

    toy(lambda call, bound: None, probe=probe)
    found = report(monkeypatch)
    state = next(b for b in found["backends"] if b["name"] == "toy")
    assert state["level"] == "broken" and "driver says no" in state["reasons"][0]["have"]
    assert any(f["level"] == "error" and "driver says no" in f["text"] for f in found["findings"])
    assert found["choices"] and all(line["backend"] not in (None, "toy") for line in found["choices"])


def test_a_plugin_that_raises_at_import_is_reported(monkeypatch):
    monkeypatch.setitem(
        registry._known(),
        "plug",
        registry._broken(
            "plug", registry.Reason("import", "an importable plug", "KeyError: 'gfx1151'", "python -c 'import plug'")
        ),
    )
    found = report(monkeypatch)
    assert any(
        f["level"] == "error" and "plug is broken" in f["text"] and "gfx1151" in f["text"] and f["fix"] for f in found["findings"]
    )


def test_a_quarantined_family_is_shown(monkeypatch):
    bad = verdicts.Verdict(
        "sdpa", "cpu x86_64", "any-dense-prefill", "float32", False, float("nan"), "raised RuntimeError: x", False
    )
    monkeypatch.setattr(registry, "known_answers", lambda: [bad])
    found = report(monkeypatch)
    assert found["verdicts"][0]["error"] is None
    assert any(f["code"] == "quarantined" and "any-dense-prefill" in f["text"] and f["fix"] for f in found["findings"])


def test_trouble_with_compiled_kernels_is_told_here_and_from_children(monkeypatch):
    monkeypatch.setattr(codeobjects, "_notes", {"a": ("/cache/kernels: cannot be written: No space left on device", "another folder")})
    told = ["/cache/kernels/x.cubin: damaged; it is compiled again", ""]
    found = list(doctor._of_kernels([{"notes": [told]}, {"notes": [told]}, {}]))
    assert [(f.text, f.fix) for f in found] == [("/cache/kernels: cannot be written: No space left on device", "another folder"), tuple(told)]
    assert {f.level for f in found} == {"warning"}


@pytest.mark.usefixtures("cpu_kernels")
def test_an_order_that_names_no_backend_is_an_error_and_not_a_crash(monkeypatch):
    monkeypatch.setenv("PORTATTN_BACKEND", "sdpa,tritn")
    found = report(monkeypatch, checks=True)
    assert [f["code"] for f in found["findings"] if f["level"] == "error"] == ["order"]
    assert "'tritn'" in next(f["text"] for f in found["findings"] if f["code"] == "order")


@pytest.mark.usefixtures("cpu_kernels")
def test_a_device_that_nothing_serves_is_an_error(monkeypatch):
    monkeypatch.setattr(
        registry, "choose", lambda problem, device: (_ for _ in ()).throw(registry.NoBackendError("no backend can run dense"))
    )
    found = report(monkeypatch)
    (error,) = [f for f in found["findings"] if f["level"] == "error"]
    assert error["code"] == "no-backend" and "on cpu" in error["text"]


@pytest.mark.parametrize("name", ["manifests", "backends", "probe", "choose", "covering", "bind", "known_answers"])
def test_no_part_of_the_registry_can_bring_it_down(monkeypatch, name):
    def refuse(*args, **kwargs):
        raise RuntimeError("refused")

    monkeypatch.setattr(registry, name, refuse)
    found = report(monkeypatch, checks=True)
    assert found["devices"] and doctor.text(found, doctor.Style(io.StringIO()))


# ------------------------------------------------------------------ the text
REPORT = {
    "portattn": "0.1.0",
    "python": "3.12.1",
    "torch": "2.13.0",
    "torch_build": "CUDA 13.0",
    "triton": None,
    "os": "Linux 6.1 x86_64",
    "threads": 4,
    "devices": [
        {
            "device": "cpu",
            "kind": "cpu",
            "arch": "x86_64",
            "name": "a CPU",
            "memory": 8 << 30,
            "free": 0,
            "uuid": "",
            "problem": "",
            "mig": False,
            "fp8": (),
        },
        {
            "device": "cuda:0",
            "kind": "cuda",
            "arch": "sm_90",
            "name": "NVIDIA H200 MIG 1g.18gb",
            "memory": 16 << 30,
            "free": 15 << 30,
            "uuid": "x",
            "problem": "",
            "mig": True,
            "fp8": ("e4m3fn", "e5m2"),
        },
    ],
    "backends": [
        {
            "name": "triton",
            "title": "Triton kernels",
            "level": "unavailable",
            "devices": {},
            "reasons": [
                {"code": "not_installed", "need": "triton >=3.4", "have": "not installed", "fix": "pip install 'triton>=3.4'"}
            ],
            "untried": {},
        },
        {"name": "sdpa", "title": "torch SDPA", "level": "ready", "devices": {}, "reasons": [], "untried": {}},
    ],
    "choices": [
        {
            "device": "cpu",
            "call": call,
            "dtype": dtype,
            "backend": "cpu" if (call, dtype) == ("dense", "float32") else "sdpa",
            "detail": "any",
        }
        for call in doctor.CALLS
        for dtype in doctor.DTYPES
    ],
    "checks": [
        {
            "backend": "sdpa",
            "device": "cpu",
            "call": call,
            "dtype": dtype,
            "error": 1.5e-6,
            "seconds": 2e-3,
            "ok": True,
            "detail": "",
        }
        for call in doctor.CHECKED
        for dtype in doctor.DTYPES
    ],
    "verdicts": [],
    "variables": {"PORTATTN_CHECK": "1"},
    "packages": {},
    "findings": [],
    "ok": True,
    "seconds": 1.25,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_the_text_says_each_thing_once_and_in_one_line():
    text = doctor.text(REPORT, doctor.Style(io.StringIO()))
    for line in (
        "cuda:0   NVIDIA H200 MIG 1g.18gb, sm_90, 16.0 GiB (15.0 GiB free), MIG slice, fp8 e4m3fn, e5m2",
        "cpu      a CPU, x86_64, 4 threads, 8.0 GiB",
        "triton  unavailable: not_installed: need triton >=3.4, have not installed",
        "fix: pip install 'triton>=3.4'",
        "sdpa    ready: torch SDPA",
        "dense: cpu (float32); sdpa (float16, bfloat16)",
        "varlen, paged decode, paged prefill, append, cache_append, merge_states: sdpa",
        "sdpa on cpu (dense, varlen, paged decode): float32 1.5e-06, float16 1.5e-06, bfloat16 1.5e-06, 2 ms",
        "PORTATTN_CHECK=1",
        "No trouble found.",
    ):
        assert text.count(line) == 1, line


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1200", "gfx1201"])
def test_an_owner_of_an_amd_machine_is_told_what_the_kernels_rest_on_and_the_command_that_records_a_run(monkeypatch, arch):
    monkeypatch.setattr(registry, "probe", lambda name, device: () if name == "hip" else (registry.Reason("toy", "x", "y"),))
    states = doctor._backends([survey.Device("cuda:0", "hip", arch, "an AMD GPU")])
    said = doctor.text({**REPORT, "backends": states}, doctor.Style(io.StringIO()))
    assert said.count("on cuda:0 compiled, emulated; not run on AMD hardware; portattn conformance --backend hip --level full --record") == 1
    run = registry.manifests()["hip"]._replace(verified=({"arch": arch, "device": "an AMD GPU", "passed": 1},))
    assert matrix.untried(run, arch) == ""


def test_a_failed_computation_is_marked_in_its_row():
    checks = [
        {**c, "ok": False, "error": 3.0} if (c["call"], c["dtype"]) == ("varlen", "float16") else c for c in REPORT["checks"]
    ]
    assert "float16 FAILED: varlen" in doctor.text({**REPORT, "checks": checks}, doctor.Style(io.StringIO()))


def test_colours_only_on_a_terminal_and_never_with_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in doctor.text(REPORT, doctor.Style(Terminal()))
    assert "\x1b[" not in doctor.text(REPORT, doctor.Style(io.StringIO()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in doctor.text(REPORT, doctor.Style(Terminal()))


def test_marks_are_ascii_where_the_encoding_lacks_others():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    doctor.text(REPORT, doctor.Style(stream)).encode("cp1252")


def test_a_backends_own_self_test_speaks_before_its_result(monkeypatch):
    bind = registry.bind

    def bound(*args, **kwargs):
        found = bind(*args, **kwargs)
        own = {n: getattr(found.adapter, n) for n in dir(found.adapter) if not n.startswith("_")}
        says = lambda device: ("ballot: thread 3 has 0x0, wants 0x1; 1 threads differ",)
        monkeypatch.setattr(found, "adapter", types.SimpleNamespace(**own | {"selftest": says}))
        return found

    monkeypatch.setattr(registry, "bind", bound)
    found = doctor.compute({"backend": "sdpa", "device": "cpu", "call": "dense", "dtype": "float32"})
    assert not found["ok"] and "self-test of warp.h: ballot: thread 3" in found["detail"]


def test_without_numpy_kernels_are_checked_but_for_the_self_test_of_their_primitives(monkeypatch):
    """torch does not require NumPy."""
    monkeypatch.setattr(codeobjects, "_notes", {})
    monkeypatch.delattr(portattn, "selftest", raising=False)
    monkeypatch.delitem(sys.modules, "portattn.selftest", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert NativeBackend("cuda", lambda index: pytest.fail("no device is needed")).selftest(torch.device("cuda", 0)) == ()
    (finding,) = doctor._of_kernels([])
    assert finding.level == "warning" and "numpy" in finding.text and finding.fix == "pip install numpy"
