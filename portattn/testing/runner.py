"""Runs the suite on a backend and says what came out: `portattn conformance`, and `run` for programs.

Outcomes: passed; declined (the backend said no, with the reasons that its manifest implies); failed; xfailed (failed, and
listed in --xfails). Listed tests that pass, and entries that match no test of the level, are stale and reported as such.

Exit codes: 0 green; 1 a test failed or an xfails entry is stale; 2 wrong usage; 3 nothing passed: the backend does not work
on the device, or declines everything.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pkgutil
import re
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch

from portattn import registry
from portattn.codeobjects import rewrite
from portattn.device import facts
from portattn.errors import NoBackendError, PortattnError

from .cases import Case
from .target import RULES, Check, Declined, Target, default_device

GREEN, RED, USAGE, NOTHING = 0, 1, 2, 3


class Result(NamedTuple):
    id: str  # "test_name[case]", the text that --filter and --xfails take
    rule: str
    outcome: str  # passed | declined | failed | xfailed
    detail: str = ""
    codes: tuple[str, ...] = ()  # of a no
    features: tuple[str, ...] = ()
    seconds: float = 0.0
    trace: str = ""


class Report(NamedTuple):
    backend: str
    device: str
    level: str
    results: tuple[Result, ...]
    stale: tuple[str, ...] = ()  # xfails entries
    unusable: str = ""  # why the backend does not work on the device at all
    seconds: float = 0.0
    whole: bool = True  # no filter was set
    lost: str = ""  # the test after which the device answered no more; later ones were not run

    def count(self, outcome: str) -> int:
        return sum(r.outcome == outcome for r in self.results)

    @property
    def exit_code(self) -> int:
        if self.unusable or not self.count("passed") and not self.count("failed"):
            return NOTHING
        return RED if self.count("failed") or self.stale or self.lost else GREEN


def checks() -> list[Check]:
    """All tests, in the order of the files and within them."""
    found = []
    package = importlib.import_module(__package__)
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("test_")):
        loaded = importlib.import_module(f"{__package__}.{module}")
        found += [f.portattn_check for f in vars(loaded).values() if getattr(f, "portattn_check",
                                                                             None) and f.__module__ == loaded.__name__]
    return found


def test_id(check: Check, case: Case | None) -> str:
    return f"{check.name}[{case}]" if case is not None else check.name


def plan(target: Target, level: str, text: str = "", case: str = "") -> list[tuple[str, Check, Case | None]]:
    """What would be run: tests whose "rule id" contains every word of `text`; with `case`, test_case on that case."""
    found = []
    for check in checks():
        if case:
            wanted = [Case.parse(case)] if check.name == "test_case" else []
        else:
            wanted = check.cases(target, level)
        for item in wanted:
            name = test_id(check, item)
            if all(word in f"{check.rule} {name}" for word in text.split()):
                found.append((name, check, item))
    return found


def execute(target: Target, check: Check, case: Case | None) -> Result:
    """Runs one test."""
    name, start = test_id(check, case), time.perf_counter()
    target.seen.clear()

    def result(outcome: str, detail: str = "", codes: Sequence[str] = (), trace: str = "") -> Result:
        return Result(name, check.rule, outcome, detail, tuple(codes), tuple(sorted(target.seen)), time.perf_counter() - start,
                      trace)

    try:
        try:
            check.function(target, *(() if case is None else (case,)))
        except NoBackendError as error:
            reasons = target.judge(error)
            return result("declined", "; ".join(map(str, reasons)), [r.code for r in reasons])
        except Declined as error:
            return result("declined", str(error), [error.reason.code])
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, AssertionError) and text[0] else f"{type(error).__name__}: "
        return result("failed", kind + text[0], trace=traceback.format_exc())
    return result("passed")


@contextlib.contextmanager
def quiet_environment() -> Iterator[None]:
    """The suite judges by itself: no known-answer check before it, no checked mode, no order from outside."""
    names = {"PORTATTN_VERIFY": "0", "PORTATTN_CHECK": None, "PORTATTN_BACKEND": None}
    saved = {name: os.environ.get(name) for name in names}
    _set(names)
    try:
        yield
    finally:
        _set(saved)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def run(backend: str, device: str = "cpu", level: str = "quick", *, xfails: Sequence[str] = (), text: str = "", case: str = "",
        progress: Callable[[int, int, Result | None, str], None] | None = None) -> Report:
    """Runs the suite on a backend and returns the Report.

    Args:
        backend: a registered name; an unknown one is an ArgumentError.
        device: a torch device.
        level: "quick" or "full".
        xfails: ids that are expected to fail; * stands for anything.
        text: only tests whose "RULE id" contains every word of it.
        case: a case's id, listed or not: test_case on this case alone.
        progress: called as (done, total, last result, next id).
    """
    if level not in ("quick", "full"):
        raise ValueError(f"level: wanted quick or full, got {level!r}")
    start = time.perf_counter()
    registry.check_names((backend,), "conformance")
    target = Target(backend, device, level)
    whole = not text and not case
    with quiet_environment():
        if reasons := registry.probe(backend, device):
            return Report(backend, str(device), level, (), (), "; ".join(map(str, reasons)), whole=whole)
        todo = plan(target, level, text, case)
        patterns = {x: re.compile(".*".join(map(re.escape, x.split("*")))) for x in xfails}
        used: dict[str, set[str]] = {x: set() for x in xfails}
        results: list[Result] = []
        lost = ""
        for i, (name, check, item) in enumerate(todo):
            if progress:
                progress(i, len(todo), results[-1] if results else None, name)
            result = execute(target, check, item)
            hits = [x for x, pattern in patterns.items() if pattern.fullmatch(name)]
            for x in hits:
                used[x].add(result.outcome)
            if hits and result.outcome == "failed":
                result = result._replace(outcome="xfailed")
            results.append(result)
            if result.outcome in ("failed", "xfailed") and not _alive(target.device):
                lost = f"{name}; {len(todo) - i - 1} later tests were not run"
                break
        if progress:
            progress(len(todo), len(todo), results[-1] if results else None, "")
    stale = tuple(x for x, outcomes in used.items() if "failed" not in outcomes and (outcomes or whole and level == "full"))
    return Report(backend, str(device), level, tuple(results), stale, "", time.perf_counter() - start, whole and not lost, lost)


def _alive(device: str) -> bool:
    """Whether the device still answers: an illegal access leaves a CUDA context that fails every later call."""
    if torch.device(device).type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        return True
    except RuntimeError:
        return False


# ------------------------------------------------------------------ what is printed
def summary(report: Report, target: Target | None = None, verbose: bool = False) -> str:
    """The report for people: failures, coverage of rules and features, and the verdict."""
    lines: list[str] = []
    if report.unusable:
        return f"{report.backend} does not work on {report.device}: {report.unusable}"
    for r in report.results:
        if r.outcome == "failed" or verbose and r.outcome in ("xfailed", "declined"):
            lines.append(f"{r.outcome:8} {r.rule:10} {r.id}\n         {r.detail}")
            if verbose and r.trace:
                lines.append("         " + r.trace.rstrip().replace("\n", "\n         "))
    if lines:
        lines.append("")
    lines.append(f"{'rule':10} {'passed':>6} {'declined':>8} {'failed':>6} {'xfailed':>7}")
    for name, about in RULES.items():
        mine = [r for r in report.results if r.rule == name]
        if mine or report.whole:
            n = {o: sum(r.outcome == o for r in mine) for o in ("passed", "declined", "failed", "xfailed")}
            note = "" if n["passed"] else "   nothing passed" if mine else "   not on this device"
            lines.append(f"{name:10} {n['passed']:6} {n['declined']:8} {n['failed']:6} {n['xfailed']:7}   {about}{note}")
    covered: dict[str, int] = {}
    for r in report.results:
        if r.outcome == "passed":
            for feature in r.features:
                covered[feature] = covered.get(feature, 0) + 1
    lines.append("features of passed tests: " + (", ".join(f"{f} {n}" for f, n in sorted(covered.items())) or "none"))
    if target is not None and report.whole:
        declared = {f for c in target.capabilities for f in (*c.features, *c.layouts, *c.dtypes, *c.kv_dtypes)}
        if missing := declared - covered.keys():
            lines.append("declared, but in no passed test: " + ", ".join(sorted(missing)))
    codes: dict[str, int] = {}
    for r in report.results:
        for code in set(r.codes):
            codes[code] = codes.get(code, 0) + 1
    if codes:
        lines.append("declined for: " + ", ".join(f"{c} {n}" for c, n in sorted(codes.items())))
    lines += [f"stale xfail: {x}" for x in report.stale]
    if report.lost:
        lines.append(f"device lost in {report.lost}")
    verdict = {GREEN: "green", RED: "not green", NOTHING: "not green: nothing passed"}[report.exit_code]
    lines.append(f"{report.backend} on {report.device}, level {report.level}: {report.count('passed')} passed, {report.count('declined')} "
                 f"declined, {report.count('failed')} failed, {report.count('xfailed')} xfailed in {report.seconds:.0f} s: {verdict}")
    if failed := next((r for r in report.results if r.outcome == "failed"), None):
        lines.append(f"again: portattn conformance --backend {report.backend} --device {report.device} --level {report.level} "
                     f"--verbose --filter '{failed.id}'")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    where = facts(torch.device(report.device))
    return {
        "schema": 1, "backend": report.backend, "device": report.device, "arch": where.arch, "device_name": where.name,
        "torch": str(torch.__version__), "level": report.level, "exit_code": report.exit_code, "unusable": report.unusable,
        "seconds": round(report.seconds, 3), "stale": list(report.stale), "lost": report.lost,
        "counts": {o: report.count(o) for o in ("passed", "declined", "failed", "xfailed")},
        "rules": {name: {o: sum(r.rule == name and r.outcome == o for r in report.results)
                         for o in ("passed", "declined", "failed", "xfailed")} for name in RULES},
        "results": [r._asdict() for r in report.results],
    }


def record(report: Report, file: str) -> str:
    """Writes the run into a manifest's `verified:`, in place of an earlier one of the same device and level; returns the line.

    Only a whole run can be recorded; ValueError otherwise.
    """
    if not report.whole or report.unusable:
        raise ValueError("only a whole run on a device where the backend works can be recorded")
    import yaml

    where = facts(torch.device(report.device))
    entry = {"device": where.name, "arch": where.arch, "torch": str(torch.__version__), "date": datetime.date.today().isoformat(),
             "level": report.level, **{o: report.count(o) for o in ("passed", "declined", "failed")}}
    with open(file, encoding="utf-8") as f:
        text = f.read()
    earlier = yaml.safe_load(text).get("verified") or []
    same = ("device", "arch", "level")
    kept = [e for e in earlier if any(e.get(k) != entry[k] for k in same)] + [entry]
    body = re.sub(r"(?ms)^verified:.*?(?=^\S|\Z)", "", text).rstrip("\n")

    def flow(e: dict[str, Any]) -> str:
        return "  - " + yaml.safe_dump(e, default_flow_style=True, sort_keys=False, width=10**6).strip()

    rewrite(file, body + "\nverified:\n" + "\n".join(map(flow, kept)) + "\n")
    return flow(entry).strip()


def read_xfails(file: str) -> list[str]:
    """Ids, one a line; what follows " #" is the reason."""
    with open(file, encoding="utf-8") as f:
        return [line for line in (re.split(r"(?:^|\s)#", raw)[0].strip() for raw in f) if line]


class _Progress:
    """One line on a terminal, rewritten at most ten times a second; in a pipe, a line every half minute, so that a log of a run that was cut
    off says how far it came and what it was at."""

    def __init__(self, stream: Any, every: float = 30.0):
        self.stream, self.terminal, self.bad = stream, stream.isatty(), 0
        self.every, self.begun = 0.1 if self.terminal else every, time.monotonic()
        self.last = 0.0 if self.terminal else self.begun

    def __call__(self, done: int, total: int, result: Result | None, coming: str) -> None:
        if result is not None and result.outcome == "failed":
            self.bad += 1
        now = time.monotonic()
        if now - self.last <= self.every and not (self.terminal and done == total):
            return
        self.last = now
        failed = f", {self.bad} failed" if self.bad else ""
        if self.terminal:
            width = 20 * done // max(total, 1)
            text = f"[{'#' * width:20}] {done}/{total}{failed}  {coming}"
            columns = os.get_terminal_size(self.stream.fileno()).columns if hasattr(self.stream, "fileno") else 100
            self.stream.write("\r\x1b[K" + (text[: columns - 1] if done < total else ""))
        else:
            self.stream.write(f"{done}/{total}{failed} in {now - self.begun:.0f} s  {coming}\n")
        self.stream.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """`portattn conformance`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="portattn conformance", description="Test a backend against the contract.",
                                     epilog="Exit codes: 0 green; 1 a test failed or an xfails entry is stale; 2 wrong usage; 3 nothing passed.")
    parser.add_argument("--backend", help="name of the backend under test")
    parser.add_argument("--device", help="torch device (default: the accelerator that torch finds, if it is native to the backend, or cpu)")
    parser.add_argument("--level", choices=("quick", "full"), default="quick", help="quick: under a minute on two cores")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only tests whose 'RULE id' contains every word of TEXT")
    parser.add_argument("--case", default="", metavar="ID", help="run one case, given by its id, whether listed or not")
    parser.add_argument("--xfails", metavar="FILE",
                        help="ids that are expected to fail, one a line, * for anything, # for the reason")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - is standard output")
    parser.add_argument("--record", action="store_true", help="write the counts into the manifest's verified list")
    parser.add_argument("--list", action="store_true", help="print the ids, run nothing")
    parser.add_argument("--verbose", "-v", action="store_true", help="print tracebacks and every no")
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)

    def usage(text: str) -> int:
        print(f"portattn conformance: {text}", file=sys.stderr)
        return USAGE

    names = list(registry.manifests())
    if args.backend not in names:
        return usage(f"--backend: wanted one of {', '.join(names)}, got {args.backend or 'none'}")
    if args.record and (args.filter or args.case):
        return usage("--record needs a whole run, without --filter and --case")
    try:
        device = str(torch.device(args.device or default_device(args.backend)))
        if args.case:
            Case.parse(args.case)
        xfails = read_xfails(args.xfails) if args.xfails else []
        if args.json not in (None, "-"):
            open(args.json, "a").close()  # said now, not after the run
        if args.record:
            file = registry.manifests()[args.backend].file
            open(file, "a").close()
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(file))).close()
        torch.empty(0, device=device)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        return usage(str(error).splitlines()[0])
    target = Target(args.backend, device, args.level)
    if args.list:
        for name, check, _ in plan(target, args.level, args.filter, args.case):
            print(f"{check.rule:10} {name}")
        return GREEN
    try:
        report = run(args.backend, device, args.level, xfails=xfails, text=args.filter, case=args.case,
                     progress=_Progress(sys.stderr))
    except PortattnError as error:
        return usage(str(error))
    if (args.filter or args.case) and not report.results and not report.unusable:
        return usage(f"no test matches {args.filter or args.case!r}; --list prints them")
    print(summary(report, target, args.verbose), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(json.dumps(as_json(report)))
    elif args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(as_json(report), f, indent=1)
    if args.record and not report.unusable:
        print("recorded: " + record(report, target.manifest.file))
    return report.exit_code
