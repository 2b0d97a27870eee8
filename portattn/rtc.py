"""Run-time compilers: NVRTC, which comes with torch's CUDA wheels, and ROCm's hiprtc. Neither needs a GPU or a toolkit.

The two libraries have the same calls under two prefixes. The library that belongs to the running torch comes first.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import re
import sys
from typing import ClassVar

from .capability import Reason
from .errors import KernelError
from .instances import Instance, source_folders, sources, target

ROCM = (7, 6, 5)  # major releases whose library names are tried


class Compiler:
    """The compiler behind one library; raises KernelError where it cannot be loaded."""

    title: ClassVar[str]
    prefix: ClassVar[str]  # of the library's functions
    vendor: ClassVar[str]  # whose sources it compiles, files that end in:
    suffix: ClassVar[str]

    def __init__(self, path: str):
        self.path, self.version = path, ""
        try:
            self.load_requirements()
            self.lib = ctypes.CDLL(path)
        except OSError as exc:
            raise KernelError(f"{self.title} cannot be loaded: {exc}") from None
        self._function("GetErrorString").restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def load_requirements(self) -> None:
        """Loads what the library needs and would not find."""

    def options(self, arch: str, instance: Instance) -> list[str]:
        """The compiler's options for an instance and an architecture, but for its definitions."""
        raise NotImplementedError

    def code_kind(self, options: list[str]) -> str:
        """What the library calls the code that comes of these options: it has a getter of that name, and one of its size."""
        raise NotImplementedError

    def _function(self, name: str):
        return getattr(self.lib, self.prefix + name)

    def _call(self, name: str, *arguments) -> None:
        if code := self._function(name)(*arguments):
            said = self._function("GetErrorString")(code).decode()
            raise KernelError(f"{' '.join(filter(None, (self.title, self.version)))}: {self.prefix}{name}: {said}")

    def compile(self, name: str, text: str, headers: dict[str, str], options: list[str]) -> bytes:
        """The code of a source; raises KernelError with the compiler's log."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        strings = lambda items: (ctypes.c_char_p * len(items))(*(s.encode() for s in items))
        self._call("CreateProgram", ctypes.byref(program), text.encode(), name.encode(), ctypes.c_int(len(headers)), strings(list(headers.values())),
                   strings(list(headers)))
        try:
            if self._function("CompileProgram")(program, ctypes.c_int(len(options)), strings(options)):
                self._function("GetProgramLogSize")(program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value + 1)
                self._function("GetProgramLog")(program, log)
                raise KernelError(f"{self.title} {self.version} cannot compile {name} with {' '.join(options)}:\n{log.value.decode(errors='replace')[:4000]}")
            kind = self.code_kind(options)
            self._call(f"Get{kind}Size", program, ctypes.byref(size))
            image = ctypes.create_string_buffer(size.value)
            self._call(f"Get{kind}", program, image)
            return image.raw
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def build(self, arch: str, instance: Instance) -> bytes:
        """The code of an instance for an architecture such as "sm_90" or "gfx942"."""
        every = sources(self.vendor)
        name = instance.kernel + self.suffix
        if name not in every:
            raise KernelError(f"no source {name} in {source_folders(self.vendor)[1]}")
        headers = {n: text for n, text in every.items() if n.endswith(".h")}
        return self.compile(name, every[name], headers, [*self.options(arch, instance), *(f"-D{n}={v}" for n, v in instance.options)])


class Nvrtc(Compiler):
    title, prefix, vendor, suffix = "NVRTC", "nvrtc", "cuda", ".cu"

    def load_requirements(self) -> None:
        """NVRTC looks for its builtins by name, and only torch's import makes that work: here by full path first."""
        folder = os.path.dirname(self.path)
        for builtins in sorted(glob.glob(os.path.join(glob.escape(folder), "libnvrtc-builtins.so.*"))) if folder else ():
            if ".alt" not in builtins:
                ctypes.CDLL(builtins)

    def archs(self) -> tuple[int, ...]:
        """Architectures it compiles for, as numbers: 80, 90, 120."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return tuple(found)

    def target(self, arch: str) -> str:
        """The option's value for a device: its own architecture, or the newest below it (same major: code runs; else PTX)."""
        want = int(re.sub(r"\D", "", arch))
        able = self.archs()
        if want in able:
            return f"sm_{want}"
        near = [a for a in able if a < want]
        if not near:
            raise KernelError(f"NVRTC {self.version} compiles for sm_{able[0]} and newer, not for {arch}; install a torch built for an older CUDA")
        return f"sm_{near[-1]}" if near[-1] // 10 == want // 10 else f"compute_{near[-1]}"

    def options(self, arch: str, instance: Instance) -> list[str]:
        return [f"--gpu-architecture={target(self.target(arch), instance)}", "--std=c++17"]

    def code_kind(self, options: list[str]) -> str:
        return "PTX" if any("compute_" in o for o in options) else "CUBIN"


class Hiprtc(Compiler):
    title, prefix, vendor, suffix = "hiprtc", "hiprtc", "hip", ".hip"

    def options(self, arch: str, instance: Instance) -> list[str]:
        """Without feature suffixes the code runs with any of them."""
        return [f"--offload-arch={arch}", "-std=c++17", "-O3"]

    def code_kind(self, options: list[str]) -> str:
        return "Code"


def mapped(name: str) -> list[str]:
    """Paths of the libraries with this in their name that the process has loaded, where the system tells (Linux)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as f:
            return sorted({line.split(None, 5)[5].strip() for line in f if name in line})
    except (OSError, IndexError):
        return []


def nvrtc_candidates() -> list[str]:
    """Libraries to try, the one that belongs to the running torch first."""
    import torch

    major = (getattr(torch.version, "cuda", None) or "").split(".")[0]
    if os.name == "nt":
        names = [f"nvrtc64_{major}0_0.dll"] if major else []
        return [os.path.join(os.path.dirname(torch.__file__), "lib", n) for n in names] + names
    wheels = [p for root in sys.path for p in sorted(glob.glob(os.path.join(glob.escape(root) or ".", "nvidia", "*", "lib", "libnvrtc.so.*")))
              if ".alt" not in p and (not major or re.search(rf"\.so\.{major}(\.|$)", p))]
    bare = [f"libnvrtc.so.{major}"] if major else []
    bundled = glob.glob(os.path.join(glob.escape(os.path.dirname(torch.__file__)), "lib", "libnvrtc-*.so*"))
    return wheels + bare + [p for p in bundled if "builtins" not in p] + ["libnvrtc.so"]


def hiprtc_candidates() -> list[str]:
    """A second HIP runtime in a process misbehaves, so the copy that torch has mapped comes first, then the names that one release
    of ROCm has; TheRock's wheels carry only versioned names, outside the loader's path."""
    import torch

    release = (getattr(torch.version, "hip", None) or "").split(".")
    beside = os.path.join(os.path.dirname(torch.__file__), "lib")
    if os.name == "nt":
        names = [f"hiprtc{int(release[0]):02}{int(release[1]):02}.dll"] if len(release) > 1 and release[1].isdigit() else []
        return [os.path.join(beside, n) for n in names] + names
    majors = [int(release[0])] if release[0].isdigit() else list(ROCM)
    bundled = [os.path.join(beside, "libhiprtc.so")] + [
        p for root in sys.path for m in majors for p in sorted(glob.glob(os.path.join(glob.escape(root) or ".", "_rocm_sdk_core", "lib", f"libhiprtc.so.{m}")))]
    return mapped("libhiprtc.so") + [p for p in bundled if os.path.exists(p)] + [f"libhiprtc.so.{m}" for m in majors] + ["libhiprtc.so"]


def _first(kind: type[Compiler], candidates: list[str], fix: str) -> Compiler | Reason:
    tried = []
    for path in candidates:
        try:
            return kind(path)
        except (KernelError, AttributeError) as exc:
            tried.append(f"{path}: {exc}")
    return Reason("compiler", f"a prebuilt code object, or {kind.title}", f"neither ({tried[0] if tried else 'no library of that name'})", fix)


@functools.lru_cache(maxsize=None)
def nvrtc() -> Compiler | Reason:
    """The compiler, or why there is none."""
    return _first(Nvrtc, nvrtc_candidates(), "install torch's CUDA wheel with its dependencies (nvidia-cuda-nvrtc)")


@functools.lru_cache(maxsize=None)
def hiprtc() -> Compiler | Reason:
    """The compiler, or why there is none."""
    return _first(Hiprtc, hiprtc_candidates(), "build the objects: cmake -S cmake --preset hip, or install ROCm's hiprtc")


__all__ = ["Compiler", "Hiprtc", "Nvrtc", "hiprtc", "hiprtc_candidates", "mapped", "nvrtc", "nvrtc_candidates"]
