"""Kernel instances to code objects: prebuilt in the wheel, else from the user's cache folder, else compiled by NVRTC or hiprtc.

NVRTC comes with torch's CUDA wheels, so no toolkit is needed, and it needs no GPU. Each instance is one small
object, compiled when it is first wanted. The cache is keyed by the sources, the options, the architecture and the
compiler; a file is used only if its folder and itself are the user's own, nobody else can write to them, and its
hash is right. Trouble with the disk costs a compilation, never a call: `notes()` says what it was.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import threading
from typing import NamedTuple

from . import config, hiprtc
from .capability import Reason
from .errors import KernelError
from .instances import Instance, source_folders, source_hash, sources, target

_HERE = os.path.dirname(os.path.abspath(__file__))
_MAGIC = b"portattn code object 1\n"
_lock = threading.Lock()
_notes: dict[str, str] = {}


class Found(NamedTuple):
    image: bytes
    origin: str  # "prebuilt" | "cache" | "compiled"


def notes() -> tuple[str, ...]:
    """What went wrong with folders and files so far; each one once."""
    return tuple(_notes.values())


def _note(key: str, text: str) -> None:
    _notes.setdefault(key, text)


# ------------------------------------------------------------------ prebuilt
@functools.lru_cache(maxsize=None)
def prebuilt_index(vendor: str) -> dict:
    """kernels/index.json of the wheel: {"source": hash, "objects": {"sm_90": {instance: {"file", "sha256"}}}}."""
    try:
        with open(os.path.join(_HERE, "kernels", vendor, "index.json"), encoding="utf-8") as f:
            index = json.load(f)
    except OSError:
        return {}
    except ValueError as exc:
        _note("prebuilt", f"kernels/{vendor}/index.json is not JSON: {exc}")
        return {}
    if sources(vendor) and index.get("source") != source_hash(vendor):
        _note("prebuilt", f"the prebuilt {vendor} kernels are of other sources than those beside them and are not used")
        return {}
    return index.get("objects", {})


def _prebuilt(vendor: str, arch: str, instance: Instance) -> bytes | None:
    entry = prebuilt_index(vendor).get(arch, {}).get(str(instance))
    if entry is None:
        return None
    path = os.path.join(_HERE, "kernels", vendor, entry["file"])
    try:
        with open(path, "rb") as f:
            image = f.read()
    except OSError as exc:
        _note(path, f"{path}: {exc.strerror}")
        return None
    if hashlib.sha256(image).hexdigest() != entry["sha256"]:
        _note(path, f"{path}: its hash is not the index's; it is not used")
        return None
    return image


# ------------------------------------------------------------------ cache on disk
def _private(status: os.stat_result) -> bool:
    """Whether only this user could have written it."""
    if not hasattr(os, "getuid"):
        return True  # Windows: the profile's folder is the user's by its access list
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _cache_folder(create: bool) -> str | None:
    folder = os.path.join(config.cache_dir(), "kernels")
    try:
        if create:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except FileNotFoundError:
        return None
    except OSError as exc:
        _note(folder, f"{folder}: cannot be made: {exc.strerror}; kernels are compiled in each process")
        return None
    if not stat.S_ISDIR(status.st_mode) or not _private(status):
        _note(folder, f"{folder}: not a folder that only this user can write to; it is not used (chmod 700 mends its mode)")
        return None
    return folder


def _cached(name: str) -> bytes | None:
    folder = _cache_folder(create=False)
    if folder is None:
        return None
    path = os.path.join(folder, name)
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as f:
            if not _private(os.fstat(f.fileno())):
                _note(path, f"{path}: others can write to it; it is not used")
                return None
            data = f.read()
    except FileNotFoundError:
        return None
    except OSError as exc:
        _note(path, f"{path}: {exc.strerror}")
        return None
    head = len(_MAGIC) + 65
    image = data[head:]
    if data[:head] != _MAGIC + hashlib.sha256(image).hexdigest().encode() + b"\n":
        _note(path, f"{path}: damaged; it is compiled again")
        return None
    return image


def _keep(name: str, image: bytes) -> None:
    folder = _cache_folder(create=True)
    if folder is None:
        return
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")  # mode 600
        with open(handle, "wb") as f:
            f.write(_MAGIC + hashlib.sha256(image).hexdigest().encode() + b"\n" + image)
        os.replace(temporary, os.path.join(folder, name))  # whole or not at all, whoever else writes it
        temporary = None
    except OSError as exc:
        _note(folder, f"{folder}: cannot be written: {exc.strerror}; kernels are compiled in each process")
    finally:
        if temporary is not None:
            try:
                os.unlink(temporary)
            except OSError:
                pass


# ------------------------------------------------------------------ NVRTC
class Nvrtc:
    """The run-time compiler that torch's CUDA wheels bring along."""

    def __init__(self, path: str):
        self.path = path
        try:
            for builtins in sorted(glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*"))) if os.path.dirname(path) else ():
                if ".alt" not in builtins:  # by full path first: NVRTC looks for them by name, and only torch's import makes that work
                    ctypes.CDLL(builtins)
            self.lib = ctypes.CDLL(path)
        except OSError as exc:
            raise KernelError(f"NVRTC cannot be loaded: {exc}") from None
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = f"{major.value}.{minor.value}"

    def _check(self, code: int, what: str) -> None:
        if code:
            raise KernelError(f"NVRTC {getattr(self, 'version', '')}: {what}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def archs(self) -> tuple[int, ...]:
        """Architectures it compiles for, as numbers: 80, 90, 120."""
        count = ctypes.c_int()
        self._check(self.lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        found = (ctypes.c_int * count.value)()
        self._check(self.lib.nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
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

    def compile(self, name: str, text: str, headers: dict[str, str], options: list[str]) -> bytes:
        """A cubin (or PTX where the target is compute_NN); raises KernelError with the compiler's log."""
        lib, program = self.lib, ctypes.c_void_p()
        strings = lambda items: (ctypes.c_char_p * len(items))(*(s.encode() for s in items))
        self._check(lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(headers), strings(list(headers.values())),
                                           strings(list(headers))), "nvrtcCreateProgram")
        try:
            code = lib.nvrtcCompileProgram(program, len(options), strings(options))
            if code:
                size = ctypes.c_size_t()
                lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value + 1)
                lib.nvrtcGetProgramLog(program, log)
                raise KernelError(f"NVRTC {self.version} cannot compile {name} with {' '.join(options)}:\n{log.value.decode(errors='replace')[:4000]}")
            kind = "PTX" if any("compute_" in o for o in options) else "CUBIN"
            size = ctypes.c_size_t()
            self._check(getattr(lib, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), f"nvrtcGet{kind}Size")
            image = ctypes.create_string_buffer(size.value)
            self._check(getattr(lib, f"nvrtcGet{kind}")(program, image), f"nvrtcGet{kind}")
            return image.raw
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_candidates() -> list[str]:
    import torch

    major = (getattr(torch.version, "cuda", None) or "").split(".")[0]
    if os.name == "nt":
        names = [f"nvrtc64_{major}0_0.dll"] if major else []
        return [os.path.join(os.path.dirname(torch.__file__), "lib", n) for n in names] + names
    wheels = [p for root in sys.path for p in sorted(glob.glob(os.path.join(root or ".", "nvidia", "*", "lib", "libnvrtc.so.*")))
              if ".alt" not in p and (not major or re.search(rf"\.so\.{major}(\.|$)", p))]
    bare = [f"libnvrtc.so.{major}"] if major else []
    bundled = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libnvrtc-*.so*"))
    return wheels + bare + [p for p in bundled if "builtins" not in p] + ["libnvrtc.so"]


@functools.lru_cache(maxsize=None)
def nvrtc() -> Nvrtc | Reason:
    """The compiler, or why there is none."""
    tried = []
    for path in _nvrtc_candidates():
        try:
            return Nvrtc(path)
        except (KernelError, AttributeError) as exc:
            tried.append(f"{path}: {exc}")
    return Reason("compiler", "a prebuilt code object, or NVRTC", f"neither ({tried[0] if tried else 'no library of that name'})",
                  "install torch's CUDA wheel with its dependencies (nvidia-cuda-nvrtc)")


def compile_cuda(arch: str, instance: Instance, compiler: Nvrtc) -> bytes:
    """One instance compiled by NVRTC for an architecture such as "sm_90"."""
    every = sources("cuda")
    name = f"{instance.kernel}.cu"
    if name not in every:
        raise KernelError(f"no source {name} in {source_folders('cuda')[1]}")
    headers = {n: text for n, text in every.items() if n.endswith(".h")}
    options = [f"--gpu-architecture={target(compiler.target(arch), instance)}", "--std=c++17", *(f"-D{n}={v}" for n, v in instance.options)]
    return compiler.compile(name, every[name], headers, options)


# ------------------------------------------------------------------ the order
def _compiler(vendor: str) -> Nvrtc | hiprtc.Hiprtc | Reason:
    return nvrtc() if vendor == "cuda" else hiprtc.hiprtc()


def available(vendor: str, arch: str) -> tuple[Reason, ...]:
    """() if instances for an architecture can be had at all; compiles nothing."""
    if prebuilt_index(vendor).get(arch):
        return ()
    found = _compiler(vendor)
    return (found,) if isinstance(found, Reason) else ()


def code_object(vendor: str, arch: str, instance: Instance) -> Found:
    """The code of an instance for an architecture; raises KernelError that says what is missing."""
    image = _prebuilt(vendor, arch, instance)
    if image is not None:
        return Found(image, "prebuilt")
    if no := available(vendor, arch):
        raise KernelError(f"no code for {instance} on {arch}: {no[0]}")
    compiler = _compiler(vendor)
    key = hashlib.sha256("\0".join([source_hash(vendor), arch, compiler.version, str(instance)]).encode()).hexdigest()[:32]
    name = f"{instance}.{arch}.{key}"
    with _lock:
        image = _cached(name)
        if image is not None:
            return Found(image, "cache")
        image = (compile_cuda if vendor == "cuda" else hiprtc.compile_hip)(arch, instance, compiler)
        _keep(name, image)
    return Found(image, "compiled")


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
