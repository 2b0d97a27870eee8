"""The kernels as a library: compiled at first use by the system's C++ compiler for one instruction set, then from the cache.

The cache is that of portattn.codeobjects, with its checks: a private folder, hashes, whole files or none. The file
is keyed by sources, flags and compiler. Nothing here runs at import.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading

import torch

from portattn import codeobjects, config
from portattn.capability import Reason
from portattn.device import cpu_arch
from portattn.errors import KernelError

_HERE = os.path.dirname(os.path.abspath(__file__))
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-math-errno", "-fno-trapping-math",
          "-ffp-contract=fast")
# Instruction sets and the flags that choose them in vec.h. avx512 was compiled, but never run: only PORTATTN_CPU_ISA selects it.
_SETS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
}
_lock = threading.Lock()


def able() -> tuple[str, ...]:
    """Instruction sets that this machine has, the best last."""
    found = torch.backends.cpu.get_cpu_capability() if cpu_arch() == "x86_64" else ""
    return ("portable", *(("avx2",) if found in ("AVX2", "AVX512") else ()), *(("avx512",) if found == "AVX512" else ()))


def chosen() -> str:
    """PORTATTN_CPU_ISA, or the best set of this machine that has been run; not checked."""
    return config.get("PORTATTN_CPU_ISA").strip().lower() or ("avx2" if "avx2" in able() else "portable")


def _compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, c++, g++ or clang++."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        command = shlex.split(name)
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return None


def _sources() -> dict[str, bytes]:
    return {name: _read(os.path.join(_HERE, name)) for name in sorted(os.listdir(_HERE)) if name.endswith((".h", ".cpp"))}


def _read(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def _key(isa: str, compiler: tuple[str, ...]) -> str:
    """A name in the cache. The compiler counts by its file, so that no process has to start it only to ask its version."""
    digest = hashlib.sha256()
    for name, text in _sources().items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    file = os.path.realpath(compiler[0])
    status = os.stat(file)
    digest.update(repr((*_FLAGS, *_SETS[isa], *compiler, file, status.st_size, status.st_mtime_ns)).encode())
    return f"cpu-{isa}.{digest.hexdigest()[:32]}"


def _compile(isa: str, compiler: tuple[str, ...]) -> bytes:
    """The library's bytes; raises KernelError with the compiler's words."""
    told = sys.stderr is not None and sys.stderr.isatty()
    if told:
        print(f"portattn: compiling the CPU kernels for {isa}, once (a few seconds) …", end="", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = os.path.join(folder, "attention.so")
            command = [*compiler, *_FLAGS, *_SETS[isa], "-o", target, os.path.join(_HERE, "attention.cpp")]
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=600)
            except (OSError, subprocess.TimeoutExpired) as exc:
                raise KernelError(f"{compiler[0]} cannot compile the CPU kernels: {exc}") from None
            if done.returncode or not os.path.exists(target):
                raise KernelError(f"{compiler[0]} cannot compile the CPU kernels for {isa}:\n{done.stderr.strip()[:2000]}")
            return _read(target)
    finally:
        if told:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _open(image: bytes) -> ctypes.CDLL:
    """A library from bytes that were checked: in a file of our own that is gone once it is mapped, so nobody can swap it."""
    with tempfile.TemporaryDirectory(dir=codeobjects._cache_folder(create=False)) as folder:
        path = os.path.join(folder, "attention.so")
        with open(path, "wb") as f:
            f.write(image)
        lib = ctypes.CDLL(path)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.pa_attention.argtypes = lib.pa_cache_append.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    lib.pa_merge.argtypes = [number] * 5 + [pointer] * 5 + [number]
    return lib


@functools.lru_cache(maxsize=None)
def _load(isa: str, compiler: tuple[str, ...]) -> ctypes.CDLL:
    name = _key(isa, compiler)
    image = codeobjects._cached(name)
    if image is None:
        image = _compile(isa, compiler)
        codeobjects._keep(name, image)
    return _open(image)


def missing() -> Reason | None:
    """Why there can be no library; None where there is one, or a compiler to make it. Compiles nothing."""
    isa = chosen()
    if isa not in _SETS:
        return Reason("isa", "|".join(_SETS), isa, "unset PORTATTN_CPU_ISA")
    if isa not in able():
        return Reason("isa", isa, f"a CPU with {'|'.join(able())}", "unset PORTATTN_CPU_ISA")
    if _compiler() is None:
        return Reason("compiler", "a C++ compiler ($CXX, c++, g++ or clang++)", "none", "install one: apt install g++, xcode-select --install")
    return None


def library() -> ctypes.CDLL:
    """The library for the chosen instruction set, compiled if that has not been done; raises KernelError."""
    if no := missing():
        raise KernelError(f"no CPU kernels: {no}")
    with _lock:
        return _load(chosen(), tuple(_compiler()))


def identity() -> str:
    """What kernels there are or would be: instruction set, sources, flags and compiler."""
    return chosen() if missing() else _key(chosen(), tuple(_compiler()))


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
