"""`World`: the facts about a machine on which a diagnosis may rest, and `look`, which gathers them.

Each question to torch, the file system or another package is guarded, so that a sick machine can be looked at too. Other
packages are imported in a child process only: some of them raise, hang, print, or create a CUDA context at import.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import site
import subprocess
import sys
from typing import Callable, Mapping, NamedTuple

IMPORT_LIMIT_S = 10.0  # the longest that a foreign package may take to import


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


PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {  # distribution names, and the statement that shows that it works
    "triton": (("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows"),
               "import triton.language, triton.compiler, triton.backends.compiler"),
    "flash_attn": (("flash-attn",), "import torch; from flash_attn import flash_attn_func, flash_attn_varlen_func"),
    "flash_attn_4": (("flash-attn-4",), ""),
    "flashinfer": (("flashinfer-python", "flashinfer"), "import flashinfer"),
    "xformers": (("xformers",), "import xformers.ops"),
    "aiter": (("amd-aiter", "aiter"), "import aiter"),
    "vllm": (("vllm",), ""),
}


def guarded(ask: Callable[[], object], default):
    """The answer, or the default if the question raises anything."""
    try:
        return ask()
    except Exception:
        return default


def child_environment() -> dict[str, str]:
    """The environment in which another Python finds this portattn, wherever it lies.

    Its folder is added where Python does not look by itself: PYTHONPATH comes before the standard library, some of whose modules
    site-packages may hold in other versions.
    """
    root = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    usual = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if root in map(os.path.realpath, usual):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def installed(distribution: str) -> Package:
    """The installed distribution of a name; raises PackageNotFoundError."""
    dist = importlib.metadata.distribution(distribution)
    return Package(str(dist.version), tuple(re.findall(r"^Tag: (.*)$", dist.read_text("WHEEL") or "", re.MULTILINE)))


class Imports:
    """Installed packages of `PACKAGES`, and child processes that try to import them, all started at once."""

    def __init__(self, packages: Mapping[str, tuple[tuple[str, ...], str]] = PACKAGES):
        self.found: dict[str, Package] = {}
        self.running: dict[str, subprocess.Popen] = {}
        for name, (distributions, statement) in packages.items():
            package = next(filter(None, (guarded(functools.partial(installed, d), None) for d in distributions)), None)
            if package:
                self.found[name] = package
            if package and statement:
                try:
                    self.running[name] = subprocess.Popen([sys.executable, "-c", statement], stdin=subprocess.DEVNULL, text=True,
                                                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace")
                except Exception:
                    pass  # no process to be had: the import stays untried

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
    driver = device or exists("/proc/driver/nvidia/version")
    return dict(nvidia_driver=driver, nvidia_device=device, amd_device=exists("/dev/kfd"))


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
            error = (str(exc).splitlines() or [type(exc).__name__])[0]
    pins = guarded(lambda: importlib.metadata.requires("torch"), None) or ()
    pin = next((m[1] for r in pins if (m := re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*\(?==\s*([\d.]+)", r))), "")
    return World(
        env=dict(os.environ), start_env=start_environment(), system=system, torch=torch.__version__, cuda=cuda, hip=hip,
        cxx11_abi=guarded(torch.compiled_with_cxx11_abi, True), triton_pin=pin,
        arch_list=tuple(guarded(torch.cuda.get_arch_list, ())), devices=devices, initialized=initialized, cuda_error=error,
        threads=torch.get_num_threads(),
        start_method=multiprocessing.get_start_method(allow_none=True) or _default_start_method(system),
        packages=imports.wait(), **guarded(lambda: drivers(system), {}),
    )


def _default_start_method(system: str) -> str:
    return "fork" if system == "linux" and sys.version_info < (3, 14) else "spawn"
