"""What may be wrong with a machine: `World`, the facts that matter, and one small detector per known trouble.

A detector is a function from a World to Findings. It asks nothing of the machine itself, so that a test can put it
before any machine: an AMD box, a MIG slice, a broken wheel. Only `look` touches torch, files and other packages; each
of its questions is guarded, and other packages are imported in a child process only, because some of them raise,
hang, print, or create a CUDA context at import.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from typing import Callable, Iterable, Iterator, Mapping, NamedTuple

from . import config

OLDEST_TORCH = (2, 6)
LEVELS = ("error", "warning", "note")
IMPORT_LIMIT_S = 10.0  # the longest that a foreign package may take to import


class Finding(NamedTuple):
    """One thing to know. level: error (something cannot work) | warning (probably not meant) | note; fix: what mends it."""

    level: str
    code: str
    text: str
    fix: str = ""


class Device(NamedTuple):
    """A torch device. kind: cpu | cuda | hip | mps | xpu; memory in bytes, 0 where torch does not say."""

    device: str
    kind: str
    arch: str = ""
    name: str = ""
    memory: int = 0
    free: int = 0
    uuid: str = ""
    problem: str = ""  # what torch raised when asked

    @property
    def mig(self) -> bool:
        return bool(re.search(r"\bMIG \d+g\.\d+gb", self.name)) or self.uuid.startswith("MIG-")


class Package(NamedTuple):
    """An installed distribution. error: what its import raised, None where it was not tried."""

    version: str
    tags: tuple[str, ...] = ()
    error: str | None = None


class World(NamedTuple):
    """Everything that a detector may look at."""

    env: Mapping[str, str] = {}
    start_env: Mapping[str, str] | None = None  # when the process started; None where the system does not tell
    system: str = "linux"  # linux | darwin | windows
    torch: str = ""
    cuda: str | None = None  # torch.version.cuda
    hip: str | None = None  # torch.version.hip
    cxx11_abi: bool = True
    triton_pin: str = ""  # the version of Triton that this torch asks for
    arch_list: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    initialized: bool = False  # a CUDA or HIP context existed before the doctor came
    cuda_error: str = ""  # what torch says when it finds no GPU
    nvidia_driver: bool = False  # the kernel's or Windows' own driver is there
    nvidia_device: bool = False  # a device file is there (always True on Windows with a driver)
    amd_device: bool = False
    threads: int = 1
    start_method: str = "spawn"
    packages: Mapping[str, Package] = {}

    @property
    def gpus(self) -> list[Device]:
        return [d for d in self.devices if d.kind in ("cuda", "hip")]


Found = Iterator[Finding]
Detector = Callable[[World], Iterable[Finding]]
DETECTORS: list[Detector] = []


def detector(fn: Detector) -> Detector:
    DETECTORS.append(fn)
    return fn


def examine(world: World) -> list[Finding]:
    """Findings of every detector, the worst first. A detector that raises is itself a finding."""
    found: list[Finding] = []
    for fn in DETECTORS:
        try:
            found += fn(world)
        except Exception as exc:
            found.append(Finding("note", "doctor", f"the check {fn.__name__} itself failed: {type(exc).__name__}: {exc}"))
    return worst_first(found)


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[+a-z-]", version)[0]))


# ------------------------------------------------------------------ torch and its devices
@detector
def torch_version(w: World) -> Found:
    if w.torch and numbers(w.torch)[:2] < OLDEST_TORCH:
        yield Finding("error", "torch-old", f"torch {w.torch} is older than {'.'.join(map(str, OLDEST_TORCH))}", "pip install -U torch")


@detector
def torch_without_the_gpu(w: World) -> Found:
    """A build of torch for another vendor, or for none, beside a GPU."""
    build = f"CUDA {w.cuda}" if w.cuda else f"ROCm {w.hip}" if w.hip else "CPU"
    if w.nvidia_driver and not w.cuda:
        yield Finding("warning", "torch-build", f"an NVIDIA driver is here, but torch {w.torch} is a {build} build: the GPU is not used",
                      "install the CUDA build of torch" + (": pip install --force-reinstall torch" if w.system == "linux" else ""))
    if w.amd_device and not w.hip:
        yield Finding("warning", "torch-build", f"an AMD GPU is here, but torch {w.torch} is a {build} build: the GPU is not used",
                      "install the ROCm build of torch")


@detector
def gpu_out_of_reach(w: World) -> Found:
    """The right build, but torch sees no GPU."""
    if w.gpus or not (w.cuda or w.hip):
        return
    hidden = next((n for n in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if w.env.get(n, "0").strip() in ("", "-1")), "")
    if hidden:
        yield Finding("note", "hidden", f"{hidden}={w.env[hidden]!r} hides every GPU", f"unset {hidden}")
    elif w.cuda and w.nvidia_driver and not w.nvidia_device:
        yield Finding("warning", "gpu-unreachable", "the NVIDIA driver is loaded, but this system has no GPU device file (a container without its GPUs?)",
                      "start the container with its GPUs (docker run --gpus all)")
    elif w.cuda and w.nvidia_driver:
        yield Finding("warning", "gpu-unreachable", f"torch finds no GPU though a driver is here: {w.cuda_error or 'no reason given'}",
                      "nvidia-smi; a driver older than torch's CUDA needs an update, or an older CUDA build of torch")
    elif w.hip and w.amd_device:
        yield Finding("warning", "gpu-unreachable", f"torch finds no GPU though /dev/kfd is here: {w.cuda_error or 'no reason given'}",
                      "rocminfo; the user must be in the groups render and video")


@detector
def device_trouble(w: World) -> Found:
    for d in w.devices:
        if d.problem:
            yield Finding("error", "device", f"{d.device}: torch cannot describe it: {d.problem}")


@detector
def arch_without_code(w: World) -> Found:
    """torch's own kernels must exist for the GPU; portattn cannot run where torch.empty does not."""
    for d in w.gpus:
        if d.arch and w.arch_list and not has_code(d.arch, w.arch_list) and "HSA_OVERRIDE_GFX_VERSION" not in w.env:
            yield Finding("error", "arch", f"torch {w.torch} has no code for {d.device} ({d.name}, {d.arch}); it has {', '.join(w.arch_list)}",
                          f"install a build of torch that lists {d.arch}" + (" (a CUDA 12 build)" if d.kind == "cuda" and numbers_of(d.arch) < 75 else ""))


def numbers_of(arch: str) -> int:
    found = re.search(r"\d+", arch)
    return int(found[0]) if found else 0


def has_code(arch: str, arch_list: Iterable[str]) -> bool:
    """Whether a list such as torch.cuda.get_arch_list() serves an architecture.

    sm_86 runs code of sm_80 (same major, not newer) and PTX (compute_NN) of anything not newer; sm_90a is only for
    itself. A gfx name serves itself; gfx11-generic serves all of gfx11.
    """
    if not arch.startswith("sm_"):
        return any(arch == name or (name.endswith("-generic") and arch.startswith(name.removesuffix("-generic"))) for name in arch_list)
    mine = numbers_of(arch)
    for name in arch_list:
        kind, _, number = name.partition("_")
        theirs = numbers_of(number)
        if kind == "compute" and theirs <= mine:
            return True
        if kind == "sm" and (number.rstrip("af") == number and theirs // 10 == mine // 10 and theirs <= mine or theirs == mine):
            return True
    return False


def fp8_formats(kind: str, arch: str) -> tuple[str, ...]:
    """The 8-bit float formats that an architecture computes with; others are storage, converted by software."""
    if kind == "cuda":
        sm = numbers_of(arch)
        return ("e4m3fn", "e5m2") if sm >= 89 else ("e5m2",) if sm >= 80 else ()
    if kind == "hip":
        if arch in ("gfx940", "gfx941", "gfx942"):
            return ("e4m3fnuz", "e5m2fnuz")
        return ("e4m3fn", "e5m2") if arch == "gfx950" or arch.startswith("gfx12") else ()
    return ()


@detector
def mixed_box(w: World) -> Found:
    archs = {d.arch for d in w.gpus}
    if len(archs) > 1:
        listed = ", ".join(f"{d.device} {d.arch}" for d in w.gpus)
        yield Finding("note", "mixed", f"GPUs of different kinds: {listed}. Each call chooses by the device of its tensors; nvidia-smi may count in another order",
                      "CUDA_DEVICE_ORDER=PCI_BUS_ID gives both the same order" if w.cuda and w.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" else "")


@detector
def mig(w: World) -> Found:
    for d in w.gpus:
        if d.mig:
            yield Finding("note", "mig", f"{d.device} is a MIG slice ({d.name}): a process sees one slice; memory and cores are the slice's")


@detector
def visible_devices_not_in_force(w: World) -> Found:
    """CUDA reads the variable once, at its first use; later changes do nothing until the process ends."""
    name = "HIP_VISIBLE_DEVICES" if w.hip and "HIP_VISIBLE_DEVICES" in w.env else "CUDA_VISIBLE_DEVICES"
    now = w.env.get(name)
    if not w.initialized or now is None:
        return
    wanted = [] if now.strip() in ("", "-1") else [item.strip() for item in now.split(",")]
    uuids = {u for d in w.gpus for u in (d.uuid, f"GPU-{d.uuid}", f"MIG-{d.uuid}") if d.uuid}
    named = [item for item in wanted if not item.isdigit()]
    if len(wanted) != len(w.gpus) or (uuids and any(not any(u.startswith(item) for u in uuids) for item in named if item.startswith(("GPU-", "MIG-")))):
        yield Finding("warning", "not-in-force", f"{name}={now} is not in force: torch had started before it was set, and sees {len(w.gpus)} GPUs",
                      "set it before the process starts")
    elif w.start_env is not None and w.start_env.get(name) != now:
        yield Finding("note", "maybe-not-in-force", f"{name} was {w.start_env.get(name)!r} when the process started and is {now!r} now: "
                      "in force only if it was set before torch's first use of a GPU", "set it before the process starts")


@detector
def visible_devices_conflict(w: World) -> Found:
    if not w.hip:
        return
    given = {n: w.env[n] for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if n in w.env}
    if len(set(given.values())) > 1:
        yield Finding("warning", "visible-conflict", "two variables disagree on ROCm: " + ", ".join(f"{n}={v}" for n, v in given.items()),
                      "set HIP_VISIBLE_DEVICES only")


@detector
def overrides(w: World) -> Found:
    """Variables of others that change which kernels run."""
    notes = {
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": (bool(w.hip), "torch's SDPA uses kernels that have crashed on small causal shapes on RDNA"),
        "HSA_OVERRIDE_GFX_VERSION": (bool(w.hip), "the GPU calls itself by another architecture's name; kernels for that one may be wrong on it"),
        "PYTORCH_ENABLE_MPS_FALLBACK": (any(d.kind == "mps" for d in w.devices), "operators that MPS lacks run on the CPU, slowly and without a word"),
        "TRITON_INTERPRET": (True, "Triton kernels are interpreted: slow, and wrong for bfloat16"),
    }
    for name, (concerns, text) in notes.items():
        if concerns and w.env.get(name, "0") not in ("", "0"):
            yield Finding("note", "override", f"{name}={w.env[name]}: {text}", f"unset {name}")


@detector
def fork_hazard(w: World) -> Found:
    if w.start_method == "fork" and w.threads > 1:
        yield Finding("note", "fork", f"torch uses {w.threads} threads and multiprocessing forks here: after a parallel call a forked child hangs in its first one",
                      "multiprocessing.set_start_method('spawn'), or torch.set_num_threads(1) in the child")


@detector
def variables(w: World) -> Found:
    for name in sorted(w.env):
        if name.startswith("PORTATTN_") and name not in config.VARIABLES:
            near = difflib.get_close_matches(name, config.VARIABLES, n=1)
            yield Finding("warning", "variable", f"{name} is no variable of portattn" + (f"; did you mean {near[0]}?" if near else ""), f"unset {name}")


# ------------------------------------------------------------------ other packages
@detector
def triton(w: World) -> Found:
    p = w.packages.get("triton")
    if not p:
        return
    if p.error:
        text = f"triton {p.version} is broken beside torch {w.torch}: {p.error}"
        yield Finding("warning", "triton-broken", text, f"pip install 'triton=={w.triton_pin}'" if w.triton_pin else "pip install --force-reinstall triton")
    elif w.triton_pin and numbers(p.version) != numbers(w.triton_pin):
        way = "newer" if numbers(p.version) > numbers(w.triton_pin) else "older"
        yield Finding("note", "triton-version", f"triton {p.version} is {way} than the {w.triton_pin} that torch {w.torch} was made with",
                      f"pip install 'triton=={w.triton_pin}'")


@detector
def flash_attn(w: World) -> Found:
    p = w.packages.get("flash_attn")
    rdna = [d for d in w.gpus if re.match(r"gfx1[0-2]", d.arch)]
    if not p:
        if four := w.packages.get("flash_attn_4"):
            yield Finding("note", "flash-attn-4", f"flash-attn-4 {four.version} alone is installed: it has flash_attn.cute, and no flash_attn_func of version 2 that engines import",
                          "pip install flash-attn")
        return
    if numbers(p.version) < (2,):
        yield Finding("warning", "flash-attn-old", f"flash-attn {p.version} is too old: engines need the names of version 2", "pip install -U flash-attn")
    elif p.error and "undefined symbol" in p.error:
        abi = "C++11" if w.cxx11_abi else "old C++"
        yield Finding("warning", "flash-attn-abi", f"flash-attn {p.version} has an ABI mismatch: its wheel ({', '.join(p.tags) or 'no tags'}) was built for another torch than "
                      f"{w.torch} ({abi} ABI, CUDA {w.cuda or 'none'}): {p.error}", "pip install --force-reinstall --no-build-isolation flash-attn")
    elif rdna and w.env.get("FLASH_ATTENTION_TRITON_AMD_ENABLE", "").upper() != "TRUE":
        yield Finding("warning", "flash-attn-flavour", f"flash-attn {p.version} uses its CK kernels, which {rdna[0].arch} cannot run; this GPU needs the Triton flavour",
                      "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE, at its installation too")
    elif p.error:
        yield Finding("warning", "flash-attn-broken", f"flash-attn {p.version} does not import: {p.error}", "pip install --force-reinstall --no-build-isolation flash-attn")


@detector
def broken_packages(w: World) -> Found:
    for name in ("aiter", "flashinfer", "xformers"):
        if (p := w.packages.get(name)) and p.error:
            kind = "has an ABI mismatch" if "undefined symbol" in p.error else "does not import"
            yield Finding("note", f"{name}-broken", f"{name} {p.version} {kind} here: {p.error}. portattn does not need it; an engine that imports it fails")


PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {  # distribution names, and the statement that shows that it works
    "triton": (("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"), "import triton.language, triton.compiler, triton.backends.compiler"),
    "flash_attn": (("flash-attn",), "import torch; from flash_attn import flash_attn_func, flash_attn_varlen_func"),
    "flash_attn_4": (("flash-attn-4",), ""),
    "flashinfer": (("flashinfer-python", "flashinfer"), "import flashinfer"),
    "xformers": (("xformers",), "import xformers.ops"),
    "aiter": (("amd-aiter", "aiter"), "import aiter"),
    "vllm": (("vllm",), ""),
}


# ------------------------------------------------------------------ looking
def guarded(ask: Callable[[], object], default):
    """The answer, or the default if the question raises anything."""
    try:
        return ask()
    except Exception:
        return default


class Imports:
    """Installed packages of `PACKAGES`, and child processes that try to import them, all started at once."""

    def __init__(self, packages: Mapping[str, tuple[tuple[str, ...], str]] = PACKAGES):
        self.found: dict[str, Package] = {}
        self.running: dict[str, subprocess.Popen] = {}
        for name, (distributions, statement) in packages.items():
            dist = next((d for d in (guarded(lambda n=n: importlib.metadata.distribution(n), None) for n in distributions) if d), None)
            if dist is None:
                continue
            wheel = guarded(lambda: dist.read_text("WHEEL"), "") or ""
            self.found[name] = Package(str(dist.version), tuple(re.findall(r"^Tag: (.*)$", wheel, re.MULTILINE)))
            if statement:
                child = guarded(lambda s=statement: subprocess.Popen([sys.executable, "-c", s], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                                     stderr=subprocess.PIPE, text=True, errors="replace"), None)
                if child:
                    self.running[name] = child

    def wait(self, limit_s: float = IMPORT_LIMIT_S) -> dict[str, Package]:
        """The packages with the outcome of their import; a child that takes longer is ended."""
        for name, child in self.running.items():
            try:
                _, err = child.communicate(timeout=limit_s)
                last = (err.strip().splitlines() or [""])[-1]
                error = "" if child.returncode == 0 else last or f"ended with code {child.returncode}"
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                error = f"still importing after {limit_s:.0f} s"
            self.found[name] = self.found[name]._replace(error=error)
        self.running = {}
        return self.found


def look_devices() -> tuple[Device, ...]:
    """Every device that torch offers, CPU first. Creates a context on GPUs, to ask for their free memory."""
    import torch

    from .device import facts, vendor

    found = []

    def add(device: str, kind: str, more: Callable[[], dict]) -> None:
        try:
            f = facts(torch.device(device))
            base = Device(device, kind, f.arch, f.name)
        except Exception as exc:
            found.append(Device(device, kind, problem=f"{type(exc).__name__}: {exc}"))
            return
        found.append(base._replace(**guarded(more, {})))

    def cuda(i: int) -> dict:
        props = torch.cuda.get_device_properties(i)
        free = guarded(lambda: torch.cuda.mem_get_info(i)[0], 0)
        return dict(memory=props.total_memory, free=free, uuid=str(getattr(props, "uuid", "")))

    add("cpu", "cpu", lambda: dict(memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), name=cpu_name()))
    if guarded(torch.cuda.is_available, False):
        for i in range(torch.cuda.device_count()):
            add(f"cuda:{i}", vendor("cuda"), lambda i=i: cuda(i))
    if guarded(torch.backends.mps.is_available, False):
        add("mps", "mps", lambda: dict(memory=torch.mps.recommended_max_memory()))
    if hasattr(torch, "xpu") and guarded(torch.xpu.is_available, False):
        for i in range(torch.xpu.device_count()):
            add(f"xpu:{i}", "xpu", lambda i=i: dict(memory=torch.xpu.get_device_properties(i).total_memory))
    return tuple(found)


def cpu_name() -> str:
    """What the processor calls itself, or its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def start_environment() -> dict[str, str] | None:
    """The environment that the process was started with, where the system keeps it (Linux)."""
    try:
        with open("/proc/self/environ", "rb") as f:
            return dict(os.fsdecode(item).partition("=")[::2] for item in f.read().split(b"\0") if item)
    except OSError:
        return None


def drivers(system: str, exists: Callable[[str], bool] = os.path.exists) -> dict[str, bool]:
    """Which GPU drivers the system itself shows, without loading one."""
    if system == "windows":
        folder = os.path.join(os.environ.get("SystemRoot", r"C:\Windows"), "System32")
        nvidia = exists(os.path.join(folder, "nvcuda.dll"))
        amd = any(exists(os.path.join(folder, f"amdhip64{v}.dll")) for v in ("", "_6", "_7"))
        return dict(nvidia_driver=nvidia, nvidia_device=nvidia, amd_device=amd)
    wsl = exists("/dev/dxg") and exists("/usr/lib/wsl/lib/libcuda.so.1")
    device = wsl or exists("/dev/nvidiactl") or exists("/dev/nvidia0") or exists("/dev/nvhost-gpu")
    return dict(nvidia_driver=device or exists("/proc/driver/nvidia/version"), nvidia_device=device, amd_device=exists("/dev/kfd"))


def look(imports: Imports | None = None) -> World:
    """The machine's facts. Never raises: what cannot be learnt keeps its default."""
    import multiprocessing

    import torch

    imports = imports or Imports()
    initialized = guarded(torch.cuda.is_initialized, False)
    system = {"darwin": "darwin", "win32": "windows"}.get(sys.platform, "linux")
    devices = guarded(look_devices, (Device("cpu", "cpu"),))
    cuda, hip = getattr(torch.version, "cuda", None), getattr(torch.version, "hip", None)
    error = ""
    if (cuda or hip) and not any(d.kind in ("cuda", "hip") for d in devices):
        try:
            torch.cuda.init()
        except Exception as exc:
            error = str(exc).splitlines()[0]
    pins = guarded(lambda: importlib.metadata.requires("torch"), None) or ()
    pin = next((m[1] for r in pins if (m := re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*\(?==\s*([\d.]+)", r))), "")
    return World(
        env=dict(os.environ), start_env=start_environment(), system=system, torch=torch.__version__, cuda=cuda, hip=hip,
        cxx11_abi=guarded(torch.compiled_with_cxx11_abi, True), triton_pin=pin,
        arch_list=tuple(guarded(torch.cuda.get_arch_list, ())), devices=devices, initialized=initialized, cuda_error=error,
        threads=torch.get_num_threads(), start_method=multiprocessing.get_start_method(allow_none=True) or _default_start_method(system),
        packages=imports.wait(), **guarded(lambda: drivers(system), {}),
    )


def _default_start_method(system: str) -> str:
    return "fork" if system == "linux" and sys.version_info < (3, 14) else "spawn"
