"""The registry: which backends there are, which of them serves a problem, and why not the others.

Backends are discovered once, at the first use, from manifests alone; adapters are imported, and devices touched,
at the first call that may need them. A choice is made once per kind of call and remembered by api.py.
Order: `backend=`, then `use()`, then PORTATTN_BACKEND, then priority. The first two kinds never fall through.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import warnings
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Callable, NamedTuple

import torch

from . import config, forks, verdicts
from . import manifest as manifests_module
from .capability import Capability, Reason, unmet
from .device import _facts, capturing, vendor
from .errors import ArgumentError, ArgumentTypeError, NoBackendError
from .manifest import Manifest, ManifestError
from .problem import Problem

QUADRATIC_LIMIT = 1 << 28  # scores that a memory: quadratic kernel may hold unasked: 1 GiB in float32


class Status(NamedTuple):
    """ready | partial (some devices or all problems of a kind declined) | unavailable | broken, and why."""

    level: str
    reasons: tuple[Reason, ...] = ()


class Choice(NamedTuple):
    """What would run a problem, how, and why not the backends that come before or after it."""

    problem: Problem
    backend: str
    capability: Capability
    notes: tuple[str, ...]
    rejected: dict[str, tuple[Reason, ...]]

    def __str__(self) -> str:
        lines = [str(self.problem), f"  {self.backend}: serves it, capability {self.capability.id}"]
        lines += [f"    {note}" for note in self.notes]
        return "\n".join(lines + table(self.rejected))


DIRECT = ("cu_seqlens_q", "alibi_slopes", "sinks", "k_scale", "v_scale")  # of Bound.direct, by their names in a Call


class Bound:
    """A problem bound to the backend that serves it, for calls of exactly the same shapes and options."""

    __slots__ = ("problem", "backend", "capability", "adapter", "run", "state", "rejected", "normal", "extra", "reaches",
                 "direct")

    def __init__(self, problem: Problem, backend: str, capability: Capability, adapter: Any, rejected: dict):
        self.problem, self.backend, self.capability, self.adapter = problem, backend, capability, adapter
        self.run: Callable = getattr(adapter, "attention", None)
        self.state: dict[Any, Any] = {}
        self.rejected = rejected
        self.normal = None  # api.py: the call's normalised numbers
        self.extra = None  # api.py: what must be viewed or copied before the backend sees it
        self.reaches = None  # api.py: how far the inputs and out reach, once an out was given
        # Of the adapter, once it has run, for a paged call: takes q, the caches, block_table, kv_lens, DIRECT's tensors and out (None: those that
        # the call has not), and answers as the call does; None, and nothing done, where a Call has to be looked at: another device is
        # current, pointers are aligned in another way, `out` may meet an input.
        self.direct: Callable | None = None

    @property
    def verbatim(self) -> bool:
        """Whether the backend gets the call's tensors as they were given, and what it returns is what the call returns."""
        n = self.normal
        return n is not None and self.extra is None and not (n.convert or n.check or n.lse_after or n.swap)


class _Entry:
    """One backend: its manifest, and what became known of it."""

    def __init__(self, manifest: Manifest, module: str | ModuleType | Any, error: Reason | None = None):
        self.manifest, self.module, self.error = manifest, module, error
        self.adapter: Any = None if isinstance(module, str) else module
        self.probed: dict[tuple[str, int | None], tuple[Reason, ...]] = {}
        self._static: tuple[Reason, ...] | None = None

    @property
    def static(self) -> tuple[Reason, ...]:
        """Reasons that need no device: build of torch, packages, platform."""
        if self._static is None:  # no cached_property: before Python 3.12 it holds a lock, which a forked child may find held
            self._static = self._ask_static()
        return self._static

    def _ask_static(self) -> tuple[Reason, ...]:
        if self.error:
            return (self.error,)
        need, no = self.manifest.requires, []
        if need.torch_build and not set(need.torch_build) & torch_builds():
            no.append(Reason("torch_build", "|".join(need.torch_build), "|".join(sorted(torch_builds())),
                             f"install a build of torch for {need.torch_build[0]}"))
        system = {"linux": "linux", "darwin": "darwin", "win32": "windows"}.get(sys.platform, sys.platform)
        if need.platforms and system not in need.platforms:
            no.append(Reason("platform", "|".join(need.platforms), system))
        for name, spec in need.packages.items():
            fix = f"pip install '{name}{spec}'"
            have = _installed_version(name)
            if have is _ABSENT:
                no.append(Reason("not_installed", f"{name} {spec}".strip(), "not installed", fix))
            elif not isinstance(have, str) or not version_matches(have, spec):  # None: what an uninstallation left has no version
                no.append(Reason("version", f"{name} {spec}", str(have), fix))
        return tuple(no)

    def load(self) -> Reason | None:
        """Imports the adapter; a module that raises anything is a Reason, not an error of portattn."""
        if self.adapter is None:
            try:
                self.adapter = importlib.import_module(self.module)
            except (Exception, SystemExit) as exc:
                if config.flag("PORTATTN_DEBUG"):
                    raise
                self.error = Reason("import", f"an importable {self.module}", f"{type(exc).__name__}: {exc}",
                                    f"python -c 'import {self.module}'")
                return self.error
        return None

    def probe(self, device: torch.device) -> tuple[Reason, ...]:
        """() if the backend works on the device; asked once per device."""
        key = (device.type, device.index)
        found = self.probed.get(key)
        if found is None:
            found = self._probe(device)
            self.probed[key] = found
        return found

    def _probe(self, device: torch.device) -> tuple[Reason, ...]:
        kind = vendor(device.type)
        devices = {d for c in self.manifest.capabilities for d in c.devices}
        if devices and kind not in devices and all(c.devices for c in self.manifest.capabilities):
            return (Reason("device", "|".join(sorted(devices)), kind),)
        if self.static:
            return self.static
        if error := self.load():
            return (error,)
        try:
            reasons = tuple(self.adapter.probe(device)) if hasattr(self.adapter, "probe") else ()
            if not all(isinstance(r, Reason) for r in reasons):
                raise TypeError(f"wanted Reasons, got {reasons!r}")
            return reasons
        except (Exception, SystemExit) as exc:
            if config.flag("PORTATTN_DEBUG"):
                raise
            return (Reason("broken", "a probe that answers", f"{type(exc).__name__}: {exc}", "portattn doctor"),)


# ------------------------------------------------------------------ static facts
@functools.lru_cache(maxsize=None)
def torch_builds() -> frozenset[str]:
    """What this build of torch was made for; needs no device and creates no context."""
    builds = {"cpu"} | {name for name in ("cuda", "hip", "xpu") if getattr(torch.version, name, None)}
    if torch.backends.mps.is_built():
        builds.add("mps")
    return frozenset(builds)


_ABSENT = object()


def _installed_version(package: str) -> Any:
    """The version of the distribution that has a package; torch's wheels for ROCm bring Triton under another name than its own."""
    from .survey import PACKAGES

    for name in PACKAGES.get(package, ((package,),))[0]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as exc:  # metadata that cannot be read
            return f"{type(exc).__name__}: {exc}"
    return _ABSENT


def version_numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0, 0) of "2.13.0+cpu", "2.13rc1" and "2.13": as many, so that they compare."""
    found = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z-]", version.strip())[0])]
    return (*found, *[0] * (4 - len(found)))


def version_matches(have: str, spec: str) -> bool:
    """Whether a version fits a comma-separated list of >=, >, <=, <, ==, != clauses on its numbers."""
    for clause in filter(None, (c.strip() for c in spec.split(","))):
        op, want = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*(.+)", clause).groups()
        a, b = version_numbers(have), version_numbers(want)
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b}[op]:
            return False
    return True


# ------------------------------------------------------------------ discovery
_found: dict[str, _Entry] = {}
_discovered = False
_lock = forks.lock(globals())
_listeners: list[Callable[[], None]] = []  # api.py's memo, cleared when what would be chosen may have changed
_order: ContextVar[tuple[str, ...] | None] = ContextVar("portattn_order", default=None)
_outer: ContextVar[tuple | None] = ContextVar("portattn_outer", default=None)  # (order, what is outside of it) of `use`
_warned: set[tuple] = set()
_chosen: dict[tuple, tuple] = {}  # what was bound before: a new shape of a known problem walks no table


def _broken(name: str, reason: Reason) -> _Entry:
    return _Entry(Manifest(name, name, 0, ()), "", reason)


def _known() -> dict[str, _Entry]:
    """Every backend by name; the first use finds them, so that importing portattn reads no manifest and no metadata."""
    global _discovered
    if not _discovered:
        with _lock:
            if not _discovered:
                _discover()
                _discovered = True
    return _found


def _discover() -> None:
    from . import backends

    _found.clear()  # what an interrupted discovery found, or that of another thread of a forked child's parent
    for root in backends.__path__:
        for name in sorted(os.listdir(root)) if os.path.isdir(root) else ():
            folder = os.path.join(root, name)
            if os.path.isfile(os.path.join(folder, "backend.yaml")):
                _add(name, folder, f"{__package__}.backends.{name}")
    for point in _entry_points("portattn.backends"):
        try:
            spec = importlib.util.find_spec(point.value)
            if spec is None:
                raise ModuleNotFoundError(f"no module named {point.value!r}")
            folder = list(spec.submodule_search_locations or [os.path.dirname(spec.origin or "")])[0]
        except (Exception, SystemExit) as exc:  # a parent package may raise anything at import
            _found[point.name] = _broken(point.name, Reason(
                "import", f"an importable {point.value}", f"{type(exc).__name__}: {exc}", f"python -c 'import {point.value}'"))
            continue
        if point.name in _found:
            _found[f"{point.name} (plugin)"] = _broken(point.name, Reason(
                "name", "a name that no other backend has", f"{point.name!r} from {folder}", "rename the entry point and its manifest"))
        else:
            _add(point.name, folder, point.value)


def _entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    """The entry points of a group; a package whose own cannot be read has none, whatever it is for."""
    try:
        return list(importlib.metadata.entry_points(group=group))
    except Exception:
        found: dict[str, list] = {}
        for package in importlib.metadata.distributions():
            with contextlib.suppress(Exception):
                found.setdefault(package.metadata["Name"], list(package.entry_points))  # the first on the path counts
        return [point for points in found.values() for point in points if point.group == group]


def _add(name: str, folder: str, module: str | ModuleType) -> None:
    try:
        found = manifests_module.load(folder)
        if found.name != name:  # verdicts and records go by the manifest's
            reason = Reason("name", f"an entry point named {found.name!r}, as its manifest", repr(name), "rename the entry point")
            _found[name] = _broken(name, reason)
        else:
            _found[name] = _Entry(found, module)
    except ManifestError as exc:
        _found[name] = _broken(name, Reason("manifest", "a valid backend.yaml", str(exc), "mend the file"))


def _changed() -> None:
    _chosen.clear()
    for listener in _listeners:
        listener()


def register(source: str | os.PathLike[str] | Manifest, module: ModuleType | Any = None) -> str:
    """Adds a backend of this process: a folder with backend.yaml and __init__.py, or a Manifest and an adapter.

    Returns its name. Raises ManifestError for a malformed manifest and ArgumentError for a name that is taken.
    """
    if isinstance(source, Manifest):
        found = source
    else:
        found = manifests_module.load(source)
        if module is None:
            file = os.path.join(source, "__init__.py")
            spec = importlib.util.spec_from_file_location(f"portattn_backend_{found.name}", file, submodule_search_locations=[str(source)])
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    if module is None:
        raise ArgumentTypeError("register: a Manifest needs its adapter as module=")
    with _lock:
        if found.name in _known():
            raise ArgumentError(f"register: backend {found.name!r} exists already")
        _known()[found.name] = _Entry(found, module)
        _changed()
    return found.name


def unregister(name: str) -> None:
    """Removes a backend from this process; an unknown name is an ArgumentError."""
    with _lock:
        check_names((name,), "unregister")
        del _known()[name]
        _changed()


def manifests() -> dict[str, Manifest]:
    """Every backend's manifest, in the order of priority."""
    return {name: _known()[name].manifest for name in _by_priority()}


def backends() -> dict[str, Status]:
    """Every backend's Status from static facts and what calls have found out so far; touches no device."""
    return {name: _status(_known()[name]) for name in _by_priority()}


class CallablePackage(ModuleType):
    """The package `portattn.backends`, which holds the backends' folders and is also the call `portattn.backends()`."""

    def __call__(self) -> dict[str, Status]:
        """Every backend's Status from static facts and what calls have found out so far; touches no device."""
        return backends()


_NOT_FOR = ("device", "arch")  # a probe's reasons that say whom a backend is not for, not that something is wrong


def _status(entry: _Entry) -> Status:
    if entry.static:
        broken = {"manifest", "import", "name", "broken"} & {r.code for r in entry.static}
        return Status("broken" if broken else "unavailable", entry.static)
    if entry.error:
        return Status("broken", (entry.error,))
    found = [r for reasons in entry.probed.values() for r in reasons]
    ready = not all(entry.probed.values())  # on some device that was asked
    bad = tuple(r for r in found if r.code not in _NOT_FOR) + tuple(verdicts.quarantined(entry.manifest.name))
    if bad:
        return Status("partial" if ready else "broken", bad)
    older = tuple(r for r in found if r.code == "arch")  # a GPU of the right vendor
    if ready:
        return Status("partial", older) if older else Status("ready")
    if entry.probed:
        return Status("unavailable", older or next(iter(entry.probed.values())))
    served, present = _served_devices(entry), _present_devices()
    if not served & present:
        return Status("unavailable", (Reason("device", "|".join(sorted(served)), "|".join(sorted(present))),))
    return Status("ready")


def _served_devices(entry: _Entry) -> set[str]:
    """Devices that a backend is for; where it is native to some, the others are no reason to call it ready."""
    caps = entry.manifest.capabilities
    return set(entry.manifest.native) or {d for c in caps for d in c.devices} | ({"cpu"} if any(not c.devices for c in caps) else set())


def _present_devices() -> set[str]:
    """Devices that torch counts without creating a context; a driver that raises when it is asked has none."""
    counts = {vendor("cuda"): torch.cuda.device_count, "mps": torch.backends.mps.is_available,
              "xpu": lambda: hasattr(torch, "xpu") and torch.xpu.device_count()}
    present = {"cpu"}
    for name, count in counts.items():
        with contextlib.suppress(Exception):
            if count():
                present.add(name)
    return present


# ------------------------------------------------------------------ order
def _by_priority() -> list[str]:
    return sorted(_known(), key=lambda name: (-_known()[name].manifest.priority, name))


def check_names(names: tuple[str, ...], where: str) -> None:
    """Raises ArgumentError or ArgumentTypeError unless every name is a backend's."""
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"{where}: wanted a backend's name, got {type(name).__name__}")
        if name not in _known():
            raise ArgumentError(f"{where}: unknown backend {name!r}; known: {', '.join(_by_priority())}")


class use(contextlib.ContextDecorator):
    """`with portattn.use("triton", "sdpa"):` sets the backends to try, in order; also a decorator, of coroutine functions too.

    Context-local: other threads and asyncio tasks are not affected, and may enter the same object. A problem that none of
    them takes raises NoBackendError. An unknown name is an ArgumentError at once. `backend=` of a call comes before it.
    """

    def __init__(self, *names: str):
        if not names:
            raise ArgumentError("use: wanted at least one backend's name")
        check_names(names, "use")
        self.names = names

    def __call__(self, func: Callable) -> Callable:
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):  # it would be left before the body runs
            raise ArgumentTypeError("use: wanted a function or coroutine function to decorate, got a generator function; enter "
                                    "`with portattn.use(...)` where it calls")
        if not inspect.iscoroutinefunction(func):
            return super().__call__(func)

        @functools.wraps(func)
        async def inner(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await func(*args, **kwargs)

        return inner

    def __enter__(self) -> "use":
        _outer.set((_order.get(), _outer.get()))
        _order.set(self.names)
        return self

    def __exit__(self, *exc: object) -> None:
        order, outer = _outer.get() or (None, None)  # nothing where a generator is closed in another context than it was entered
        _order.set(order)
        _outer.set(outer)


current_order = _order.get


def order_of(backend: str | None) -> tuple[tuple[str, ...], str]:
    """The names to try and who said so: "backend", "use", "PORTATTN_BACKEND", or "" for priorities."""
    if backend is not None:
        check_names((backend,), "backend")
        return (backend,), "backend"
    if names := _order.get():
        check_names(names, "use")  # again: one may have been unregistered
        return names, "use"
    if names := tuple(n.strip() for n in config.get("PORTATTN_BACKEND").split(",") if n.strip()):
        check_names(names, "PORTATTN_BACKEND")
        return names, "PORTATTN_BACKEND"
    return tuple(_by_priority()), ""


# ------------------------------------------------------------------ choice
def probe(name: str, device: torch.device | str) -> tuple[Reason, ...]:
    """() if a backend works on a device, else why not; asked once per device."""
    check_names((name,), "probe")
    with _lock:
        return _known()[name].probe(_indexed(torch.device(device)))


def _indexed(device: torch.device) -> torch.device:
    if device.index is None and device.type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def covering(name: str, problem: Problem, scores: int = 0) -> tuple[Capability | None, tuple[Reason, ...]]:
    """The first capability of a backend that covers a problem, or the reasons of the one that comes closest."""
    nearest: tuple[Reason, ...] = (Reason("layout", "a capability", "none"),)
    rank = (True, 1 << 30)
    for capability in _known()[name].manifest.capabilities:
        reasons = unmet(capability, problem)
        if not reasons and capability.memory == "quadratic" and scores > QUADRATIC_LIMIT and not config.flag("PORTATTN_ALLOW_QUADRATIC"):
            reasons = (Reason("memory", f"at most {QUADRATIC_LIMIT} scores", str(scores), "set PORTATTN_ALLOW_QUADRATIC=1"),)
        if not reasons:
            return capability, ()
        this = (any(r.code in ("layout", "device") for r in reasons), len(reasons))
        if this < rank:
            nearest, rank = reasons, this
    return None, nearest


def _by_capability(names: tuple[str, ...], problem: Problem, scores: int) -> tuple[str, ...]:
    """Names in the order of what serves the problem: a capability may have a place of its own, below another backend."""

    def priority(name: str) -> int:
        capability, own = covering(name, problem, scores)[0], _known()[name].manifest.priority
        return own if capability is None or capability.priority is None else capability.priority

    return tuple(sorted(names, key=lambda name: -priority(name)))


def bind(problem: Problem, device: torch.device, backend: str | None = None, scores: int = 0, check: bool = True) -> Bound:
    """The first backend in order that takes the problem and has shown that it computes it rightly.

    Raises NoBackendError with every backend's reasons if there is none.
    """
    names, said = order_of(backend)
    key = (problem, device, names, scores > QUADRATIC_LIMIT and config.flag("PORTATTN_ALLOW_QUADRATIC"), scores > QUADRATIC_LIMIT,
           config.flag("PORTATTN_VERIFY", True))
    if (found := _chosen.get(key)) is not None:
        return Bound(problem, *found)
    rejected: dict[str, tuple[Reason, ...]] = {}
    measuring = check and not capturing(device)
    with _lock:
        if not said:
            names = _by_capability(names, problem, scores)
        for name in names:
            entry = _known()[name]
            reasons = entry.probe(device)
            if not reasons:
                capability, reasons = covering(name, problem, scores)
                if capability is not None:
                    bound = Bound(problem, name, capability, entry.adapter, rejected)
                    bad = verdicts.first_use(bound, device, measuring=measuring)
                    if not bad:
                        if not said:
                            _warn_below_native(problem, name, rejected)
                        if measuring:
                            _chosen[key] = (name, capability, entry.adapter, rejected)
                        return bound
                    reasons = (bad,)
            rejected[name] = reasons
        if said:
            others = {n: _reasons(n, problem, device, scores) for n in _by_priority() if n not in rejected}
            able = [n for n, reasons in others.items() if not reasons]
        else:
            others, able = {}, []
    raise NoBackendError(_no_backend_text(problem, said, names, rejected, able), problem, rejected)


def _reasons(name: str, problem: Problem, device: torch.device, scores: int) -> tuple[Reason, ...]:
    return _known()[name].probe(device) or covering(name, problem, scores)[1]


def choose(problem: Problem, device: torch.device | str | None = None, backend: str | None = None, scores: int = 0) -> Choice:
    """What would serve a problem and why not each other backend; runs no known-answer check.

    `device` defaults to the problem's; raises NoBackendError as a call would.
    """
    device = _indexed(torch.device({"hip": "cuda"}.get(problem.device, problem.device) if device is None else device))
    bound = bind(problem, device, backend, scores, check=False)
    return explain_bound(bound, device, (), scores)


def explain_bound(bound: Bound, device: torch.device, notes: tuple[str, ...], scores: int = 0) -> Choice:
    """The Choice that a Bound stands for, with the reasons of all other backends."""
    rejected = dict(bound.rejected)
    for name in _by_priority():
        if name != bound.backend and name not in rejected:
            reasons = _reasons(name, bound.problem, device, scores)
            rejected[name] = reasons or (Reason("order", "an earlier place", f"after {bound.backend}", f"backend={name!r}"),)
    return Choice(bound.problem, bound.backend, bound.capability, notes, rejected)


def table(rejected: dict[str, tuple[Reason, ...]]) -> list[str]:
    """One line a reason, the backends' names aligned."""
    width = max((len(name) for name in rejected), default=0)
    return [f"  {name if i == 0 else '':{width}}  {reason}" for name, reasons in rejected.items() for i, reason in enumerate(reasons)]


def _no_backend_text(problem: Problem, said: str, names: tuple[str, ...], rejected: dict, able: list[str]) -> str:
    what = f"backend {names[0]!r} cannot run" if len(names) == 1 and said else "no backend can run"
    lines = [f"{what} {problem.layout} {'attention' if problem.layout in ('dense', 'varlen', 'paged') else ''}".rstrip()]
    if said and said != "backend":
        lines[0] += f" (order {', '.join(names)} set by {said})"
    lines += [f"  {problem}", *table(rejected)]
    if able:
        lines.append(f"  able: {', '.join(able)}    fix: leave the choice to the registry, or name one of these")
    if not _known():
        lines.append("  no backend was found beside portattn    fix: install it in a folder; from inside a zip file its backends cannot be read")
    return "\n".join(lines)


def _warn_below_native(problem: Problem, chosen: str, rejected: dict[str, tuple[Reason, ...]]) -> None:
    away = {"device", "torch_build", "platform", "grad"}  # kernels for inference are no choice for training
    for name, reasons in rejected.items():
        if problem.device not in _known()[name].manifest.native or away & {r.code for r in reasons}:
            continue
        key = (problem.device, name, chosen, tuple(r.code for r in reasons))
        if key not in _warned:
            _warned.add(key)
            text = "; ".join(map(str, reasons))
            warnings.warn(f"portattn: {chosen} serves {problem}; {name} would, but {text}. `portattn doctor` says more.",
                          RuntimeWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The stacklevel at which the function that asks warns of the line outside of portattn that called it."""
    level, frame = 0, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level + 1


def forget() -> None:
    """Drops what was found out about devices in this process: probes, choices and verdicts (not those on disk)."""
    with _lock:
        for entry in _known().values():
            entry.probed.clear()
        verdicts.forget()
        _facts.cache_clear()
        _changed()


def known_answers() -> list[verdicts.Verdict]:
    """The known-answer verdicts of this process."""
    return verdicts.all_verdicts()
