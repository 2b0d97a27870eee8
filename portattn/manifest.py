"""Manifests: strict YAML to dataclasses. An unknown or missing key names the file, the path and the nearest key.

One manifest has four readers (registry, doctor, support table, CI matrix), so nobody restates support.

    schema: 1
    name: cuda                      # the folder's name, and the name that users give
    title: CUDA kernels
    priority: 300                   # higher is tried first
    native: [cuda]                  # devices whose native choice this is: serving them otherwise warns once
    requires:                       # static facts, checked without touching a device
      torch_build: [cuda]           # cuda | hip | xpu | mps: one of them; every build has cpu
      packages: {triton: ">=3.4"}
      platforms: [linux, windows]   # linux | darwin | windows
    capabilities:                   # the first one that covers a problem serves it
      - id: decode
        layouts: [dense, varlen, paged, cache_append, merge_states]
        devices: [cuda]             # cuda | hip | cpu | mps | xpu | ...; left out: any
        arch: {family: sm, min: 80} # or a list of names
        dtypes: [float16, bfloat16]
        kv_dtypes: [float8_e4m3fn]  # 8-bit caches
        head_dims: {min: 1, max: 256, multiple: 1}   # or a list
        head_dims_v: [512]          # left out: as head_dims
        equal_head_dims: false
        groups: {max: 16}
        page_sizes: {min: 1}
        q_len: [decode, extend, prefill]
        features: [causal, window, softcap, sinks, alibi, bias, rotary, append, kv_scale, lse, grad, batch_invariant]
        memory: linear              # quadratic: refused above a threshold
        graph: full                 # none | full
        priority: 190               # left out: the backend's
    ci:
      - {lane: gpu, runner: [self-hosted, nvidia], level: full}
    verified:                       # written by `portattn conformance --record`
      - {device: NVIDIA H200, arch: sm_90, torch: 2.11.0, date: 2026-11-29, level: full, passed: 1, declined: 0, failed: 0}
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Any, Callable, NamedTuple

from .capability import Arch, Capability, Range
from .errors import PortattnError
from .problem import FEATURES

LAYOUTS = ("dense", "varlen", "paged", "cache_append", "merge_states")
DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


class ManifestError(PortattnError, ValueError):
    """A manifest is malformed: the text names file, path and the nearest key or value."""


class Requires(NamedTuple):
    torch_build: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    platforms: tuple[str, ...] = ()


class Manifest(NamedTuple):
    name: str
    title: str
    priority: int
    capabilities: tuple[Capability, ...]
    native: tuple[str, ...] = ()
    requires: Requires = Requires()
    ci: tuple[dict[str, Any], ...] = ()
    verified: tuple[dict[str, Any], ...] = ()
    file: str = ""


class _Reader:
    """Reads values out of parsed YAML and knows where it is, for the error text."""

    def __init__(self, file: str):
        self.file = file

    def fail(self, path: str, text: str) -> ManifestError:
        return ManifestError(f"{self.file}: {path or 'top level'}: {text}")

    def mapping(self, value: Any, path: str, known: dict[str, bool]) -> dict[str, Any]:
        """A mapping whose keys are all known; `known` says which must be there."""
        if not isinstance(value, dict):
            raise self.fail(path, f"wanted a mapping, got {type(value).__name__}")
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise self.fail(path, f"unknown key {key!r}; {hint}")
        missing = [key for key, needed in known.items() if needed and key not in value]
        if missing:
            raise self.fail(path, f"missing key {missing[0]!r}")
        return value

    def typed(self, value: Any, path: str, kind: type) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(path, f"wanted {kind.__name__}, got {value!r}")
        return value

    def names(self, value: Any, path: str, allowed: tuple[str, ...] = ()) -> tuple[str, ...]:
        for i, item in enumerate(self.typed(value, path, list)):
            self.typed(item, f"{path}[{i}]", str)
            if allowed and item not in allowed:
                near = difflib.get_close_matches(item, allowed, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(allowed)}"
                raise self.fail(f"{path}[{i}]", f"unknown value {item!r}; {hint}")
        return tuple(value)

    def one_of(self, value: Any, path: str, allowed: tuple[str, ...]) -> str:
        return self.names([value], path, allowed)[0]

    def range(self, value: Any, path: str) -> Range:
        if isinstance(value, list):
            return Range(values=tuple(self.typed(v, f"{path}[{i}]", int) for i, v in enumerate(value)))
        found = self.mapping(value, path, {"min": False, "max": False, "multiple": False})
        if self.typed(found.get("multiple", 1), f"{path}.multiple", int) < 1:
            raise self.fail(f"{path}.multiple", f"wanted at least 1, got {found['multiple']}")
        return Range(**{k: self.typed(v, f"{path}.{k}", int) for k, v in found.items()})

    def versions(self, value: Any, path: str) -> str:
        """Clauses as registry.version_matches takes them; "" is any version."""
        for clause in filter(None, (c.strip() for c in self.typed(value, path, str).split(","))):
            if not re.fullmatch(r"(>=|<=|==|!=|>|<)\s*\d\S*", clause):
                raise self.fail(path, f"wanted clauses of >=, >, <=, <, ==, != with a version, got {clause!r}")
        return value

    def arch(self, value: Any, path: str) -> Arch:
        if isinstance(value, list):
            return Arch(names=self.names(value, path))
        found = self.mapping(value, path, {"family": True, "min": False, "max": False})
        kinds = {"family": str, "min": int, "max": int}
        return Arch(**{k: self.typed(v, f"{path}.{k}", kinds[k]) for k, v in found.items()})

    def dicts(self, value: Any, path: str) -> tuple[dict[str, Any], ...]:
        return tuple(self.typed(v, f"{path}[{i}]", dict) for i, v in enumerate(self.typed(value, path, list)))


def _fields(r: _Reader) -> dict[str, Callable[[Any, str], Any]]:
    return {
        "id": lambda v, p: r.typed(v, p, str),
        "layouts": lambda v, p: r.names(v, p, LAYOUTS),
        "dtypes": lambda v, p: r.names(v, p, DTYPES),
        "devices": r.names,
        "arch": r.arch,
        "kv_dtypes": lambda v, p: r.names(v, p, KV_DTYPES),
        "head_dims": r.range,
        "head_dims_v": r.range,
        "equal_head_dims": lambda v, p: r.typed(v, p, bool),
        "groups": r.range,
        "page_sizes": r.range,
        "q_len": lambda v, p: r.names(v, p, ("decode", "extend", "prefill")),
        "features": lambda v, p: r.names(v, p, FEATURES),
        "memory": lambda v, p: r.one_of(v, p, ("linear", "quadratic")),
        "graph": lambda v, p: r.one_of(v, p, ("none", "full")),
        "priority": lambda v, p: r.typed(v, p, int),
    }


def parse(data: Any, file: str = "manifest") -> Manifest:
    """A Manifest from parsed YAML; raises ManifestError."""
    r = _Reader(file)
    top = {key: True for key in ("schema", "name", "title", "priority", "capabilities")}
    top |= {key: False for key in ("native", "requires", "ci", "verified")}
    data = r.mapping(data, "", top)
    if data["schema"] != 1:
        raise r.fail("schema", f"wanted 1, got {data['schema']!r}")
    readers = _fields(r)
    needed = {key: key in ("id", "layouts", "dtypes") for key in readers}
    capabilities = []
    for i, item in enumerate(r.typed(data["capabilities"], "capabilities", list)):
        path = f"capabilities[{i}]"
        found = r.mapping(item, path, needed)
        capabilities.append(Capability(**{k: readers[k](v, f"{path}.{k}") for k, v in found.items()}))
    requires = r.mapping(data.get("requires", {}), "requires", {k: False for k in Requires._fields})
    packages = r.typed(requires.get("packages", {}), "requires.packages", dict)
    return Manifest(
        name=r.typed(data["name"], "name", str),
        title=r.typed(data["title"], "title", str),
        priority=r.typed(data["priority"], "priority", int),
        capabilities=tuple(capabilities),
        native=r.names(data.get("native", []), "native"),
        requires=Requires(
            r.names(requires.get("torch_build", []), "requires.torch_build", ("cuda", "hip", "xpu", "mps")),
            {r.typed(k, "requires.packages", str): r.versions(v, f"requires.packages.{k}") for k, v in packages.items()},
            r.names(requires.get("platforms", []), "requires.platforms", ("linux", "darwin", "windows")),
        ),
        ci=r.dicts(data.get("ci", []), "ci"),
        verified=r.dicts(data.get("verified", []), "verified"),
        file=file,
    )


def load(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest `backend.yaml` of a backend's folder; raises ManifestError."""
    import yaml  # here, since it costs more than the rest of `import portattn`

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
    file = os.path.join(folder, "backend.yaml")
    try:
        with open(file, encoding="utf-8") as f:
            data = yaml.load(f, Loader=loader)
    except OSError as exc:
        raise ManifestError(f"{file}: cannot be read: {exc.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # ValueError: not UTF-8, or a date that the calendar lacks
        raise ManifestError(f"{file}: not YAML: {' '.join(str(exc).split())}") from None
    manifest = parse(data, file)
    if manifest.name != os.path.basename(os.path.normpath(folder)):
        raise ManifestError(f"{file}: name: wanted {os.path.basename(os.path.normpath(folder))!r} as the folder, got {manifest.name!r}")
    return manifest
