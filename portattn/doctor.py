"""`portattn doctor`: what this machine can do, what stands in the way, and the command that mends it.

It shows versions, devices, each backend's state, what each kind of call would choose, and the error and time of real
tiny computations; then findings (portattn/findings.py). It never raises: every probe is guarded, and computations
that could end the process (all but torch's own on the CPU) run in a child.

Exit codes: 0 all is well or only notes and warnings; 1 an error: something that should work does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import IO, Any, Callable, Iterable, Iterator

from . import config
from .findings import Finding, examine, fp8_formats, worst_first
from .survey import Device, Imports, child_environment, guarded, look

CHECK_LIMIT_S = 60.0  # the longest that a job may take in a child, its start and compilation included
DTYPES = ("float32", "float16", "bfloat16")
CALLS: dict[str, dict[str, Any]] = {  # kinds of call, as fields of a Problem with heads 32/8 and head_dim 128
    "dense": dict(layout="dense", causal=True),
    "varlen": dict(layout="varlen", causal=True),
    "paged decode": dict(layout="paged", page_size=16, q_len="decode", causal=True),
    "paged prefill": dict(layout="paged", page_size=16, q_len="extend", causal=True),
    "append": dict(layout="paged", page_size=16, q_len="decode", causal=True, append=True, rotary=True),
    "cache_append": dict(layout="cache_append", page_size=16),
    "merge_states": dict(layout="merge_states"),
}
CHECKED = ("dense", "varlen", "paged decode")  # the kinds that are computed, not only chosen


def report(checks: bool = True, imports: Imports | None = None) -> dict[str, Any]:
    """Everything that the doctor knows, as data that JSON can hold; `checks=False` leaves the computations out."""
    started = time.perf_counter()
    findings: list[Finding] = []

    def part(what: str, ask: Callable[[], Any], default: Any) -> Any:
        try:
            return ask()
        except Exception as exc:
            findings.append(
                Finding("error", "doctor", f"{what} could not be looked at: {type(exc).__name__}: {exc}", "report it")
            )
            return default

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = look(imports or Imports())
        chosen = part("choices", lambda: _choices(world.devices), [])
        computed = part("computations", lambda: _checks(world.devices), []) if checks else []
        states = part("backends", lambda: _backends(world.devices), [])
        verdicts = part("verdicts", _verdicts, [])
    for what, find in (
        ("backends", lambda: _of_backends(states)),
        ("the order", lambda: _of_order()),
        ("choices", lambda: _of_choices(chosen)),
        ("computations", lambda: _of_checks(computed)),
        ("verdicts", lambda: _of_verdicts(verdicts, computed)),
        ("kernels", lambda: _of_kernels(computed)),
    ):
        findings += part(what, lambda: list(find()), [])
    findings = worst_first([*findings, *examine(world)])
    from .version import __version__

    return {
        "portattn": __version__,
        "python": platform.python_version(),
        "torch": world.torch,
        "torch_build": f"CUDA {world.cuda}" if world.cuda else f"ROCm {world.hip}" if world.hip else "no GPU",
        "triton": world.packages["triton"].version if "triton" in world.packages else None,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": world.threads,
        "devices": [{**d._asdict(), "mig": d.mig, "fp8": fp8_formats(d.kind, d.arch)} for d in world.devices],
        "backends": states,
        "choices": chosen,
        "checks": computed,
        "verdicts": verdicts,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("PORTATTN_")},
        "packages": {name: p._asdict() for name, p in world.packages.items()},
        "findings": [f._asdict() for f in findings],
        "ok": not any(f.level == "error" for f in findings),
        "seconds": round(time.perf_counter() - started, 3),
    }


# ------------------------------------------------------------------ backends and choices
def _reasons(reasons: Iterable[Any]) -> list[dict[str, str]]:
    return [r._asdict() for r in reasons]


def _backends(devices: Iterable[Device]) -> list[dict[str, Any]]:
    """State of every backend, and its reasons on each device. Called last, when calls have shown what works."""
    from . import matrix, registry

    found = []
    for name, m in registry.manifests().items():
        on = {d.device: _reasons(guarded(lambda d=d: registry.probe(name, d.device), ())) for d in devices if not d.problem}
        untried = {d.device: text for d in devices if not on.get(d.device, True) and (text := matrix.untried(m, d.arch))}
        found.append({"name": name, "title": m.title, "level": "", "reasons": [], "devices": on, "untried": untried})
    states = registry.backends()
    for backend in found:
        backend["level"], backend["reasons"] = states[backend["name"]].level, _reasons(states[backend["name"]].reasons)
    return found


def problem(device: Device, call: str, dtype: str) -> Any:
    """The Problem that stands for a kind of call on a device."""
    from .problem import Problem

    return Problem(
        device=device.kind,
        arch=device.arch,
        dtype=dtype,
        kv_dtype=dtype,
        num_heads_q=32,
        num_heads_kv=8,
        head_dim=128,
        head_dim_v=128,
        out_dtype=dtype,
        **CALLS[call],
    )


def _choices(devices: Iterable[Device]) -> list[dict[str, Any]]:
    """What each kind of call would choose on each device, a line per dtype."""
    from . import registry
    from .errors import PortattnError

    found = []
    for d in devices:
        for call in CALLS if not d.problem else ():
            for dtype in DTYPES:
                line: dict[str, Any] = {"device": d.device, "call": call, "dtype": dtype, "backend": None, "detail": ""}
                try:
                    choice = registry.choose(problem(d, call, dtype), d.device)
                    line.update(backend=choice.backend, detail=choice.capability.id)
                except PortattnError as exc:
                    line["detail"] = str(exc)
                except Exception as exc:
                    line["detail"] = f"{type(exc).__name__}: {exc}"
                found.append(line)
    return found


# ------------------------------------------------------------------ computations
def _checks(devices: Iterable[Device]) -> list[dict[str, Any]]:
    """A tiny computation of each kind, on each backend that serves the device, in each dtype that it takes."""
    from . import registry

    here, away = [], []
    for d in devices:
        for name in registry.manifests():
            if d.problem or guarded(lambda: registry.probe(name, d.device), ("raised",)):
                continue
            for call in CHECKED:
                for dtype in DTYPES:
                    if guarded(lambda: registry.covering(name, problem(d, call, dtype))[0], None) is not None:
                        job = {"backend": name, "device": d.device, "call": call, "dtype": dtype}
                        (here if _safe_here(name, d) else away).append(job)
    return [compute(job) for job in here] + list(_in_children(away))


def _safe_here(name: str, device: Device) -> bool:
    """Torch's own kernels on the CPU end no process; a backend that this process registered exists here only."""
    from . import registry

    return (name, device.kind) == ("sdpa", "cpu") or not isinstance(registry._known()[name].module, str)


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """The job with error (against the float64 reference), seconds (of a second run), ok, detail and fix.

    A family that is quarantined, in this process or on disk, is not run again: it may have ended an earlier process.
    """
    import torch

    from . import codeobjects, registry, verdicts
    from .device import facts

    result = {**job, "error": None, "seconds": None, "ok": False, "detail": "", "fix": ""}
    try:
        device = torch.device(job["device"])
        kind = facts(device)
        asked = problem(Device(job["device"], kind.device, kind.arch), job["call"], job["dtype"])
        bound = registry.bind(asked, device, job["backend"], check=False)
        if quarantined := verdicts.first_use(bound, device):
            return {**result, "detail": f"quarantined: {quarantined.have}", "fix": quarantined.fix, "notes": codeobjects.notes_and_fixes()}
        error, result["seconds"] = verdicts.measure(bound, device)
        if faults := getattr(bound.adapter, "selftest", lambda _: ())(device):  # of the primitives that its kernels are made of
            return {**result, "detail": f"self-test of warp.h: {'; '.join(faults)}"[:300]}
        limit = verdicts.TOLERANCE[job["dtype"]]
        result["error"] = error if math.isfinite(error) else None  # JSON has no infinity
        result["ok"] = error <= limit
        result["detail"] = "" if result["ok"] else f"error {error:.3g}, at most {limit:.3g} is right"
    except Exception as exc:
        result["detail"] = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
    return {**result, "notes": codeobjects.notes_and_fixes()}


def _in_children(jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Runs jobs in a child process; one that dies or hangs is a result too, and the rest go to a new child."""
    while jobs:
        done = 0
        with guarded(tempfile.TemporaryFile, contextlib.nullcontext()) as said:  # a pipe that nobody reads would fill up
            try:
                child = _child(["-m", "portattn.doctor", json.dumps(jobs)], said)
            except OSError as exc:
                ended = f"cannot start a child process: {exc}"
            else:
                late = threading.Event()
                for line in _lines(child, late):
                    if (result := guarded(lambda: json.loads(line), None)) and isinstance(result, dict):
                        done += 1
                        yield result
                ended = f"not finished after {CHECK_LIMIT_S:.0f} s" if late.is_set() else f"ended the process, code {child.wait()}{_last_words(said)}"
        if done < len(jobs):
            yield {**jobs[done], "error": None, "seconds": None, "ok": False, "detail": ended, "fix": ""}
        jobs = jobs[done + 1:]


def _lines(child: subprocess.Popen, late: threading.Event) -> Iterator[str]:
    """What a child prints, line by line; one that lets a line wait longer than CHECK_LIMIT_S is ended, and is `late`."""

    def end() -> None:
        late.set()
        child.kill()

    with child:
        while True:
            timer = threading.Timer(CHECK_LIMIT_S, end)
            timer.start()
            try:
                line = child.stdout.readline()
            finally:
                timer.cancel()
            if not line:
                return
            yield line


def _child(args: list[str], errors: IO[bytes] | None) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *args], env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=errors or subprocess.DEVNULL, text=True, errors="replace")


def _last_words(errors: IO[bytes] | None) -> str:
    """The last line that a child wrote to stderr, of a traceback the error; "" where it wrote none."""
    if errors is None:
        return ""
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4000))
    lines = [" ".join(line.split()) for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


def _verdicts() -> list[dict[str, Any]]:
    from . import registry

    found = []
    for verdict in registry.known_answers():
        data = verdict._asdict()
        data["error"] = data["error"] if data["error"] == data["error"] else None  # JSON has no NaN
        found.append(data)
    return found


# ------------------------------------------------------------------ findings about portattn itself
def _of_backends(states: list[dict]) -> Iterator[Finding]:
    for backend in states:
        for r in backend["reasons"] if backend["level"] == "broken" else ():
            yield Finding(
                "error", "backend", f"{backend['name']} is broken: {r['code']}: need {r['need']}, have {r['have']}", r["fix"]
            )


def _of_order() -> Iterator[Finding]:
    from . import registry

    for name in filter(None, (n.strip() for n in config.get("PORTATTN_BACKEND").split(","))):
        if name not in registry.manifests():
            yield Finding("error", "order", f"PORTATTN_BACKEND names {name!r}, which is no backend: every call raises",
                          f"PORTATTN_BACKEND={','.join(registry.manifests())}, or a part of it")


def _of_choices(chosen: list[dict]) -> Iterator[Finding]:
    """Devices for which some kind of call has no backend; an order that names no backend is a finding already."""
    if list(_of_order()):
        return
    for device in dict.fromkeys(line["device"] for line in chosen):
        if none := [line for line in chosen if line["device"] == device and line["backend"] is None]:
            calls = ", ".join(f"{line['call']} {line['dtype']}" for line in none)
            yield Finding("error", "no-backend", f"no backend serves {calls} on {device}: {' '.join(none[0]['detail'].split())}",
                          f"portattn explain --device {device} says more")


def _of_checks(computed: list[dict]) -> Iterator[Finding]:
    failed: dict[tuple[str, str, str, str], list[str]] = {}
    for c in computed:
        if not c["ok"]:
            failed.setdefault((c["backend"], c["device"], c["detail"], c["fix"]), []).append(f"{c['call']} {c['dtype']}")
    for (backend, device, detail, fix), calls in failed.items():
        text = f"{backend} on {device} failed a tiny {', '.join(calls)}: {detail}"
        yield Finding("error", "check", text, fix or _without(backend))


def _of_verdicts(verdicts: list[dict], computed: list[dict]) -> Iterator[Finding]:
    """Quarantined families, but for those of a backend whose computations have failed just now."""
    failed = {c["backend"] for c in computed if not c["ok"]}
    for v in verdicts:
        if not v["ok"] and v["backend"] not in failed:
            yield Finding(
                "error",
                "quarantined",
                f"{v['backend']} {v['family']} {v['dtype']} on {v['device']} is quarantined: {v['detail']}",
                f"after mending it, delete {os.path.join(config.cache_dir(), 'verdicts')}",
            )


def _of_kernels(computed: list[dict]) -> Iterator[Finding]:
    """What went wrong with folders and files of compiled kernels, here and in the children that computed: it costs time, not results."""
    from . import codeobjects

    told = [tuple(note) for c in computed for note in c.get("notes", ())]
    for text, fix in dict.fromkeys([*codeobjects.notes_and_fixes(), *told]):
        yield Finding("warning", "kernels", text, fix)


def _without(name: str) -> str:
    from . import registry

    others = ",".join(n for n in registry.manifests() if n != name)
    say = f"portattn conformance --backend {name} says more"
    return f"PORTATTN_BACKEND={others} leaves it out; {say}" if others else say


# ------------------------------------------------------------------ text
class Style:
    """Marks and colours: colours only on a terminal and without NO_COLOR, other marks where the encoding lacks them."""

    COLOURS = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1"}
    MARKS = {"good": ("✓", "+"), "bad": ("✗", "x"), "warn": ("!", "!"), "dim": ("·", "-")}

    def __init__(self, stream: Any):
        self.colour = (
            bool(getattr(stream, "isatty", lambda: False)())
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        try:
            "✓✗·".encode(getattr(stream, "encoding", None) or "ascii")
            self.plain = 0
        except (UnicodeEncodeError, LookupError):
            self.plain = 1

    def paint(self, kind: str, text: str) -> str:
        return f"\x1b[{self.COLOURS[kind]}m{text}\x1b[0m" if self.colour else text

    def mark(self, kind: str) -> str:
        return self.paint(kind, self.MARKS[kind][self.plain])


def text(r: dict[str, Any], style: Style) -> str:
    """The report for people."""
    build = "" if r["torch_build"] == "no GPU" else f" ({r['torch_build']})"
    lines = [style.paint("bold", f"portattn {r['portattn']}") + f"   Python {r['python']}   torch {r['torch']}{build}   "
             f"triton {r['triton'] or 'not installed'}   {r['os']}"]

    def section(title: str) -> None:
        lines.extend(("", style.paint("bold", title)))

    section("Devices")
    for d in r["devices"]:
        facts = [
            d["arch"],
            f"{r['threads']} threads" if d["kind"] == "cpu" else "",
            gib(d["memory"]) + (f" ({gib(d['free'])} free)" if d["free"] else "") if d["memory"] else "",
            "MIG slice" if d["mig"] else "",
            f"fp8 {', '.join(d['fp8'])}" if d["fp8"] else "",
            d["problem"],
        ]
        lines.append(
            f"  {style.mark('bad' if d['problem'] else 'good')} {d['device']:<8} {', '.join(filter(None, [d['name'], *facts]))}"
        )
    section("Backends")
    marks = {"ready": "good", "partial": "warn", "unavailable": "dim", "broken": "bad"}
    width = max((len(b["name"]) for b in r["backends"]), default=0)
    for b in r["backends"]:
        why = [f"{reason['code']}: need {reason['need']}, have {reason['have']}" for reason in b["reasons"]] or [b["title"]]
        lines.append(f"  {style.mark(marks[b['level']])} {b['name']:<{width}}  {b['level']}: {'; '.join(why)}")
        lines += [f"    {'':{width}}  fix: {fix}" for fix in dict.fromkeys(reason["fix"] for reason in b["reasons"]) if fix]
        lines += [f"    {'':{width}}  on {device} {said}; portattn conformance --backend {b['name']} --level full --record makes the record"
                  for device, said in b["untried"].items()]
    for device in dict.fromkeys(line["device"] for line in r["choices"]):
        section(f"Calls on {device}")
        lines += [f"  {row}" for row in _choice_rows([line for line in r["choices"] if line["device"] == device])]
    if r["checks"]:
        section("Tiny computations (largest error against float64, median time)")
        lines += [f"  {style.mark(kind)} {row}" for kind, row in _check_rows(r["checks"])]
    if r["variables"]:
        section("Variables in force")
        lines += [f"  {name}={value}" for name, value in r["variables"].items()]
    if r["findings"]:
        section("Findings")
    kinds = {"error": "bad", "warning": "warn", "note": "dim"}
    for f in r["findings"]:
        lines.append(f"  {style.mark(kinds[f['level']])} {f['text']}")
        if f["fix"]:
            lines.append(f"      fix: {f['fix']}")
    count = {level: sum(f["level"] == level for f in r["findings"]) for level in kinds}
    summary = ", ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in count.items() if n and level != "note")
    lines += [
        "",
        style.paint("bad" if count["error"] else "warn" if summary else "good", summary or "No trouble found.")
        + style.paint("dim", f"   {r['seconds']:.1f} s"),
    ]
    return "\n".join(lines)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _choice_rows(lines: list[dict]) -> Iterator[str]:
    """Calls with the same answer share a row; dtypes are named where the answer differs by them."""
    answers: dict[str, list[str]] = {}
    for call in CALLS:
        by: dict[str, list[str]] = {}
        for line in lines:
            if line["call"] == call:
                by.setdefault(line["backend"] or "none", []).append(line["dtype"])
        answer = next(iter(by)) if len(by) == 1 else "; ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in by.items())
        answers.setdefault(answer, []).append(call)
    for answer, calls in answers.items():
        yield f"{', '.join(calls)}: {answer}"


def _check_rows(checks: list[dict]) -> Iterator[tuple[str, str]]:
    """A row per backend, device and dtype where all is right; failures one by one are findings."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for c in checks:
        groups.setdefault((c["backend"], c["device"]), []).append(c)
    for (backend, device), group in groups.items():
        parts = []
        for dtype in dict.fromkeys(c["dtype"] for c in group):
            errors = [c["error"] for c in group if c["dtype"] == dtype and c["ok"]]
            failed = [c["call"] for c in group if c["dtype"] == dtype and not c["ok"]]
            parts.append(f"{dtype} {max(errors):.1e}" if not failed else f"{dtype} FAILED: {', '.join(failed)}")
        times = sorted(c["seconds"] for c in group if c["seconds"] is not None)
        took = f", {times[len(times) // 2] * 1e3:.2g} ms" if times else ""
        calls = ", ".join(dict.fromkeys(c["call"] for c in group))
        yield "good" if all(c["ok"] for c in group) else "bad", f"{backend} on {device} ({calls}): {', '.join(parts)}{took}"


def main(argv: list[str] | None = None) -> int:
    """`portattn doctor`; returns the exit code."""
    ap = argparse.ArgumentParser(
        prog="portattn doctor",
        description="What this machine can do, what stands in the way, and what mends it.",
        epilog="Exit code: 0 no errors (warnings and notes may be there), 1 at least one error.",
    )
    ap.add_argument("--json", action="store_true", help="the whole report as JSON")
    ap.add_argument("--no-checks", action="store_true", help="leave out the tiny computations")
    args = ap.parse_args(argv)
    found = report(checks=not args.no_checks)
    print(json.dumps(found, indent=2) if args.json else text(found, Style(sys.stdout)))
    return 0 if found["ok"] else 1


if __name__ == "__main__":  # the child of _in_children: a JSON line for each job
    for _job in json.loads(sys.argv[1]):
        print(json.dumps(compute(_job)), flush=True)
