"""hiprtc: ROCm's run-time compiler, for installations without prebuilt AMD code objects. It needs no GPU.

A second HIP runtime in a process misbehaves, so the copy that torch has mapped comes first, then the names that one
release of ROCm has; TheRock's wheels carry only versioned names, outside the loader's path.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import sys

from .capability import Reason
from .errors import KernelError
from .instances import Instance, source_folders, sources

ROCM = (7, 6, 5)  # major releases whose library names are tried


class Hiprtc:
    """The compiler behind one library; raises KernelError where it cannot be loaded."""

    def __init__(self, path: str):
        self.path = path
        try:
            self.lib = ctypes.CDLL(path)
        except OSError as exc:
            raise KernelError(f"hiprtc cannot be loaded: {exc}") from None
        self.lib.hiprtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.lib.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor)), "hiprtcVersion")
        self.version = f"hiprtc {major.value}.{minor.value}"

    def _check(self, code: int, what: str) -> None:
        if code:
            raise KernelError(f"{getattr(self, 'version', 'hiprtc')}: {what}: {self.lib.hiprtcGetErrorString(code).decode()}")

    def compile(self, name: str, text: str, headers: dict[str, str], options: list[str]) -> bytes:
        """A code object; raises KernelError with the compiler's log."""
        lib, program = self.lib, ctypes.c_void_p()
        strings = lambda items: (ctypes.c_char_p * len(items))(*(s.encode() for s in items))
        self._check(lib.hiprtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), ctypes.c_int(len(headers)),
                                            strings(list(headers.values())), strings(list(headers))), "hiprtcCreateProgram")
        try:
            code = lib.hiprtcCompileProgram(program, ctypes.c_int(len(options)), strings(options))
            size = ctypes.c_size_t()
            if code:
                lib.hiprtcGetProgramLogSize(program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value + 1)
                lib.hiprtcGetProgramLog(program, log)
                raise KernelError(f"{self.version} cannot compile {name} with {' '.join(options)}:\n{log.value.decode(errors='replace')[:4000]}")
            self._check(lib.hiprtcGetCodeSize(program, ctypes.byref(size)), "hiprtcGetCodeSize")
            image = ctypes.create_string_buffer(size.value)
            self._check(lib.hiprtcGetCode(program, image), "hiprtcGetCode")
            return image.raw
        finally:
            lib.hiprtcDestroyProgram(ctypes.byref(program))


def candidates() -> list[str]:
    """Libraries to try, the one that belongs to the running torch first."""
    import torch

    release = (getattr(torch.version, "hip", None) or "").split(".")
    beside = os.path.join(os.path.dirname(torch.__file__), "lib")
    if os.name == "nt":
        names = [f"hiprtc{int(release[0]):02}{int(release[1]):02}.dll"] if len(release) > 1 and release[1].isdigit() else []
        return [os.path.join(beside, n) for n in names] + names
    mapped: list[str] = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
            mapped = sorted({line.split(None, 5)[5].strip() for line in f if "libhiprtc.so" in line})
    except (OSError, IndexError):
        pass
    majors = [int(release[0])] if release[0].isdigit() else list(ROCM)
    bundled = [os.path.join(beside, "libhiprtc.so")] + [
        p for root in sys.path for m in majors for p in sorted(glob.glob(os.path.join(root or ".", "_rocm_sdk_core", "lib", f"libhiprtc.so.{m}")))]
    return mapped + [p for p in bundled if os.path.exists(p)] + [f"libhiprtc.so.{m}" for m in majors] + ["libhiprtc.so"]


@functools.lru_cache(maxsize=None)
def hiprtc() -> Hiprtc | Reason:
    """The compiler, or why there is none."""
    tried = []
    for path in candidates():
        try:
            return Hiprtc(path)
        except (KernelError, AttributeError) as exc:
            tried.append(f"{path}: {exc}")
    return Reason("compiler", "prebuilt code objects, or hiprtc", f"neither ({tried[0] if tried else 'no library of that name'})",
                  "build the objects: cmake -S cmake --preset hip, or install ROCm's hiprtc")


def compile_hip(arch: str, instance: Instance, compiler: Hiprtc) -> bytes:
    """One instance for an architecture such as "gfx942": without feature suffixes it runs with any of them."""
    every = sources("hip")
    name = f"{instance.kernel}.hip"
    if name not in every:
        raise KernelError(f"no source {name} in {source_folders('hip')[1]}")
    headers = {n: text for n, text in every.items() if n.endswith(".h")}
    return compiler.compile(name, every[name], headers, [f"--offload-arch={arch}", "-std=c++17", "-O3", *(f"-D{n}={v}" for n, v in instance.options)])


__all__ = ["Hiprtc", "candidates", "compile_hip", "hiprtc"]
