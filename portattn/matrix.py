"""`portattn matrix` and `portattn support-table`: the CI matrix and the README's table, read from the manifests.

Nobody restates support by hand: a lane or a cell is here because a backend's manifest says so, and each row of
the table says what its claim rests on (run on a device, emulated, compiled, or nothing yet).

A manifest's `ci:` lane has the keys of `LANE`; os, python, torch and level may be lists, which makes one job each.
Lanes named `emulate` and `compile` are evidence of that kind for the table; an `arch` list narrows them.
A `verified:` record is evidence of a run, or of what its `how` says (run | emulated | compiles); of one device the fullest is told.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
import sys
from typing import Any, Iterable, Mapping

from .capability import Capability
from .manifest import DTYPES, LAYOUTS, Manifest, ManifestError
from .problem import FEATURES

BEGIN, END = "<!-- support-table:begin -->", "<!-- support-table:end -->"

LANE: dict[str, Any] = {  # key: what it is where a lane leaves it out
    "lane": None,
    "os": "ubuntu-latest",
    "runner": None,  # the labels of runs-on; left out: [os]
    "python": "3.12",
    "torch": "2.13.0",
    "level": "quick",
    "preset": "",  # of cmake/, for lanes that compile
    "tests": "",  # paths of the project's own tests, for lanes that run those and not the conformance suite
    "arch": [],  # architectures that the lane speaks for; left out: all of the backend
}
_ONE_JOB_EACH = ("os", "python", "torch", "level")


def jobs(manifests: Mapping[str, Manifest]) -> dict[str, list[dict[str, Any]]]:
    """`{"include": [...]}` as GitHub's `strategy.matrix` takes it: one entry per job, in order of name.

    Raises ManifestError for a lane with an unknown key or without a name.
    """
    include = []
    for name in sorted(manifests):
        for i, lane in enumerate(manifests[name].ci):
            lane = _checked(lane, f"{manifests[name].file}: ci[{i}]")
            for values in itertools.product(*(_listed(lane.get(key, LANE[key])) for key in _ONE_JOB_EACH)):
                job = {"backend": name, "lane": lane["lane"], **dict(zip(_ONE_JOB_EACH, map(str, values)))}
                job["runner"] = [str(label) for label in _listed(lane.get("runner", job["os"]))]
                if "os" not in lane and "runner" in lane:
                    job["os"] = job["runner"][0]
                job |= {key: str(lane[key]) for key in ("preset", "tests") if lane.get(key)}
                include.append(job)
    return {"include": include}


def _checked(lane: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for key in lane:
        if key not in LANE:
            near = difflib.get_close_matches(str(key), LANE, n=1)
            raise ManifestError(
                f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(LANE)}")
            )
    if not lane.get("lane"):
        raise ManifestError(f"{where}: missing key 'lane'")
    return lane


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


# ------------------------------------------------------------------ the table
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "cache_append": "append", "merge_states": "merge"}
_DEVICE_OF = (("sm_", "cuda"), ("gfx", "hip"), ("x86_64", "cpu"), ("aarch64", "cpu"))


def table(manifests: Mapping[str, Manifest]) -> str:
    """The support table as Markdown, a row per capability, backends in the order in which they are tried."""
    head = ("backend", "device", "dtypes (8-bit caches)", "layouts", "head_dim", "features", "rests on")
    rows = [head, ("---",) * len(head)]
    for name, m in sorted(manifests.items(), key=lambda item: (-item[1].priority, item[0])):
        for c in m.capabilities:
            label = f"`{name}`" if len(m.capabilities) == 1 else f"`{name}` {c.id}"
            rows.append(
                (label, _where(c), _dtypes(c), _names(c.layouts, LAYOUTS), _dims(c), _names(c.features, FEATURES), evidence(m, c))
            )
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _where(c: Capability) -> str:
    device = ", ".join(c.devices) or "any torch device"
    return device if not (c.arch.family or c.arch.names) else f"{device}: {str(c.arch).replace('|', ', ')}"


def _dtypes(c: Capability) -> str:
    text = ", ".join(_SHORT[d] for d in DTYPES if d in c.dtypes)
    caches = ", ".join(d.removeprefix("float8_") for d in c.kv_dtypes)
    return f"{text} ({caches})" if caches else text


def _names(have: Iterable[str], every: tuple[str, ...]) -> str:
    """Names in their usual order; where most are there, those that are not."""
    have = set(have)
    if not have:
        return "none"
    missing = [name for name in every if name not in have]
    if not missing:
        return "all"
    if len(missing) <= len(every) // 4:
        return "all but " + ", ".join(_SHORT.get(name, name) for name in missing)
    return ", ".join(_SHORT.get(name, name) for name in every if name in have)


def _dims(c: Capability) -> str:
    text = str(c.head_dims).replace("|", ", ")
    if c.head_dims_v:
        text += f" (v: {str(c.head_dims_v).replace('|', ', ')})"
    return text + (", k and v alike" if c.equal_head_dims else "")


def evidence(m: Manifest, c: Capability) -> str:
    """What the claim of a capability rests on: its records, else the CI lanes that speak for it, else "nothing yet"."""
    found: dict[str, list[str]] = {"run": [], "emulated": [], "compiles": []}
    told: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for record in m.verified:
        if _speaks_for(c, str(record.get("arch") or record.get("device", ""))):  # MPS and XPU have no arch
            key = tuple(str(record.get(name, "run")) for name in ("how", "device", "arch"))
            told[key] = max(told.get(key, record), record, key=_weight)
    for (how, *_), record in told.items():
        found.setdefault(how, []).append(_record(record))
    for kind, name in (("emulated", "emulate"), ("compiles", "compile")):
        lanes = [_listed(lane.get("arch", [])) for lane in m.ci if lane.get("lane") == name]
        archs = dict.fromkeys(str(arch) for lane in lanes for arch in lane if _speaks_for(c, str(arch)))
        if [] in lanes:
            found[kind].append("in CI")
        elif archs:
            found[kind].append(f"in CI for {', '.join(archs)}")
    parts = [f"{how}: {'; '.join(dict.fromkeys(texts))}" for how, texts in found.items() if texts]
    if parts and not found["run"]:
        parts.append(f"not run on {'AMD hardware' if c.devices == ('hip',) else 'a device'}")
    return "; ".join(parts) or "nothing yet"


def _weight(record: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Of records of one device the heaviest is told: one with failures, of the full level, of the last day."""
    return bool(record.get("failed")), record.get("level") == "full", str(record.get("date", ""))


def untried(m: Manifest, arch: str) -> str:
    """What stands for an AMD architecture where no record of a run does, such as "compiled, emulated; not run on AMD hardware"; else ""."""
    if not arch.startswith("gfx") or any(record.get("arch") == arch and record.get("how", "run") == "run" for record in m.verified):
        return ""
    kinds = [word for lane, word in (("compile", "compiled"), ("emulate", "emulated"))
             if any(x.get("lane") == lane and arch in map(str, _listed(x.get("arch", []))) for x in m.ci)]
    return f"{', '.join(kinds)}; not run on AMD hardware" if kinds else ""


def _speaks_for(c: Capability, arch: str) -> bool:
    device = next((kind for prefix, kind in _DEVICE_OF if arch.startswith(prefix)), arch)
    return (not c.devices or device in c.devices) and arch in c.arch


def _record(record: Mapping[str, Any]) -> str:
    device, arch = str(record.get("device", "")), str(record.get("arch", ""))
    where = device if arch in device else f"{device} ({arch})" if device else arch
    text = f"{where}, {record.get('date', 'no date')}, {record.get('passed', 0)} passed"
    text += f" at level {record['level']}" if record.get("level") else ""
    return text + (f", **{record['failed']} FAILED**" if record.get("failed") else "")


def replace_block(document: str, block: str) -> str:
    """The document with what stands between the two markers replaced by the block; ValueError without them."""
    pattern = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"no line {BEGIN} followed by {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{block}\n{END}", document, count=1)


# ------------------------------------------------------------------ commands
def main(argv: list[str] | None = None) -> int:
    """`portattn matrix`: prints the CI jobs. Exit code 0; 2 for a malformed lane."""
    ap = argparse.ArgumentParser(prog="portattn matrix", description="CI jobs that the manifests ask for.")
    ap.add_argument("--json", action="store_true", help="one line of JSON for GitHub's strategy.matrix")
    ap.add_argument("--backend", help="only the jobs of this backend")
    args = ap.parse_args(argv)
    from . import registry

    try:
        found = jobs(registry.manifests())
    except ManifestError as exc:
        print(f"portattn matrix: {exc}", file=sys.stderr)
        return 2
    if args.backend:
        if args.backend not in registry.manifests():
            ap.error(f"--backend: wanted one of {', '.join(registry.manifests())}, got {args.backend}")
        found["include"] = [job for job in found["include"] if job["backend"] == args.backend]
    if args.json:
        print(json.dumps(found))
        return 0
    for job in found["include"]:
        print(
            "{backend:<8} {lane:<10} {level:<6} python {python:<5} torch {torch:<7} on ".format(**job) + ", ".join(job["runner"])
        )
    return 0


def support_table(argv: list[str] | None = None) -> int:
    """`portattn support-table`: prints, writes or checks the table. Exit code 0; 1: --check finds it stale; 2: no markers."""
    ap = argparse.ArgumentParser(prog="portattn support-table", description="The support table, from the manifests.")
    where = ap.add_mutually_exclusive_group()
    where.add_argument("--write", metavar="FILE", help=f"replace the table between {BEGIN} and {END}")
    where.add_argument("--check", metavar="FILE", help="exit code 1 if the table in the file is not the present one")
    args = ap.parse_args(argv)
    from . import registry
    from .codeobjects import rewrite

    block = table(registry.manifests())
    file = args.write or args.check
    if not file:
        print(block)
        return 0
    try:
        with open(file, encoding="utf-8", newline="") as f:
            old = f.read()
        new = replace_block(old, block)
        if args.write and old != new:
            rewrite(file, new)
    except (OSError, ValueError) as exc:
        print(f"portattn support-table: {file}: {exc}", file=sys.stderr)
        return 2
    if args.check:
        if old != new:
            print(f"{file}: the support table is stale; run: portattn support-table --write {file}", file=sys.stderr)
        return int(old != new)
    return 0
