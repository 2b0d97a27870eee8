"""The kernels as a library for one instruction set: prebuilt (cmake/cpu.py), or compiled at first use by the system's C++ compiler.

What is compiled is kept in the cache of portattn.codeobjects, with its checks: a private folder, hashes, whole files or none.
The file is keyed by sources, flags and compiler. Nothing here runs at import.
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

import torch

from portattn import codeobjects, config, forks
from portattn.capability import Reason
from portattn.errors import KernelError
from portattn.processor import cpu_arch

from . import sets

_PREBUILT = codeobjects.prebuilt_folder("cpu")
_NOT_RUN = ("neon_bf16",)  # on no CPU that has it, only emulated: PORTATTN_CPU_ISA selects it
_refused: set[str] = set()  # by the compiler of this machine
_lock = forks.lock(globals())


@functools.lru_cache(maxsize=None)
def able() -> tuple[str, ...]:
    """Instruction sets that this machine has, the best last."""
    arch = cpu_arch()
    if arch == "aarch64":
        return ("neon", *(("neon_bf16",) if "bf16" in _flags() else ()))
    found = torch.backends.cpu.get_cpu_capability() if arch == "x86_64" else ""
    names = ["portable"]
    if found in ("AVX2", "AVX512"):
        names.append("avx2")
    if found == "AVX512":
        has_pairs = "avx512_bf16" in _flags()
        # Intel's products of pairs take longer than twice as many of floats (Sapphire Rapids: prefill at 0.65 of avx512); AMD's do not.
        slow_pairs = "AuthenticAMD" not in _flags()
        wide = ("avx512_bf16", "avx512") if slow_pairs else ("avx512", "avx512_bf16")
        names += [name for name in wide if has_pairs or name == "avx512"]
        if has_pairs and {"amx_tile", "amx_bf16"} <= _flags() and _tiles_granted():
            names.append("amx")
    return tuple(names)


@functools.lru_cache(maxsize=None)
def _flags() -> frozenset[str]:
    """Vendor and flags of the first CPU, as /proc/cpuinfo has them; on macOS what sysctl says of bfloat16."""
    if sys.platform == "darwin":
        value, size = ctypes.c_int(), ctypes.c_size_t(4)
        missing = ctypes.CDLL(None).sysctlbyname(b"hw.optional.arm.FEAT_BF16", ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
        return frozenset({"bf16"} if not missing and value.value else ())
    found: set[str] = set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                name, _, words = line.partition(":")
                if name.strip() in ("vendor_id", "flags", "Features"):
                    found.update(words.split())
                elif not line.strip():
                    break
    except OSError:
        pass
    return frozenset(found)


def _tiles_granted() -> bool:
    """Whether Linux lets this process use AMX's tiles: it has to be asked once, and its later threads and children may too."""
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def _forced() -> str:
    return config.get("PORTATTN_CPU_ISA").strip().lower()


def chosen() -> str:
    """PORTATTN_CPU_ISA, or the best set of this machine that has been run and that its compiler takes; not checked."""
    return _forced() or [name for name in able() if name not in _NOT_RUN and name not in _refused][-1]


def _compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, c++, g++ or clang++."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        try:
            command = shlex.split(name)
        except ValueError:  # quotes that do not close
            continue
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return None


@functools.lru_cache(maxsize=None)
def _prebuilt_index() -> dict:
    """kernels/cpu/index.json of the wheel, of this system: {isa: {"file", "sha256"}}."""
    return codeobjects.read_index(_PREBUILT, "CPU", sets.source_hash()).get(sets.system(cpu_arch()), {})


@functools.lru_cache(maxsize=None)
def _prebuilt(isa: str) -> bytes | None:
    return codeobjects.read_prebuilt(_PREBUILT, _prebuilt_index().get(isa))


def _key(isa: str, compiler: tuple[str, ...]) -> str:
    """A name in the cache. The compiler counts by its file, so that no process has to start it only to ask its version."""
    file = os.path.realpath(compiler[0])
    status = os.stat(file)
    text = repr((sets.source_hash(), sets.SETS[isa], *compiler, file, status.st_size, status.st_mtime_ns))
    return f"cpu-{isa}.{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class _NotLoaded(KernelError):
    """No folder lets a library be written and run there, or no compiler runs: one for another instruction set would fare no better."""


def _compile(isa: str, compiler: tuple[str, ...]) -> bytes:
    """The library's bytes; raises KernelError with the compiler's words."""
    told = sys.stderr is not None and sys.stderr.isatty()
    if told:
        print(f"portattn: compiling the CPU kernels for {isa}, once (a few seconds) …", end="", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = os.path.join(folder, "attention.so")
            done = subprocess.run(sets.command(list(compiler), isa, target), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  errors="replace", timeout=600)
            if done.returncode or not os.path.exists(target):
                words = done.stderr.strip()[:2000] or f"it exits with {done.returncode} and no word"
                raise KernelError(f"{compiler[0]} cannot compile the CPU kernels for {isa}:\n{words}")
            with open(target, "rb") as f:
                return f.read()
    except (OSError, subprocess.TimeoutExpired) as exc:  # no compiler any more, or no folder to write to
        raise _NotLoaded(f"{compiler[0]} cannot compile the CPU kernels: {exc}") from None
    finally:
        if told:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _open(image: bytes) -> ctypes.CDLL:
    """A library from bytes that were checked: in a file of our own that is gone once it is mapped, so nobody can swap it.

    In the cache, or where that is only to be read, or nothing may be run there, in the temporary folder."""
    troubles = []
    for place in (codeobjects.cache_folder(create=False), None):
        try:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                path = os.path.join(folder, "attention.so")
                with open(path, "wb") as f:
                    f.write(image)
                lib = ctypes.CDLL(path)
            break
        except OSError as exc:
            words = exc.strerror or str(exc).split(": ", 1)[-1]  # without a name that is another each time
            troubles.append(f"from {place or 'the temporary folder'}: {words}")
    else:
        raise _NotLoaded(f"the CPU kernels cannot be loaded {'; '.join(troubles)}; PORTATTN_CACHE or TMPDIR may name another folder")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.pa_attention.argtypes = lib.pa_cache_append.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    lib.pa_merge.argtypes = [number] * 5 + [pointer] * 5 + [number]
    return lib


@functools.lru_cache(maxsize=None)
def _load(isa: str, compiler: tuple[str, ...] | None) -> ctypes.CDLL:
    if compiler is None:
        return _open(_prebuilt(isa))
    name = _key(isa, compiler)
    image = codeobjects.cached(name)
    if image is None:
        image = _compile(isa, compiler)
        codeobjects.keep(name, image)
    return _open(image)


def _maker(isa: str) -> tuple[str, ...] | None:
    """The compiler's command, or None where a prebuilt library serves."""
    return None if _prebuilt(isa) is not None else tuple(_compiler() or ())


def missing() -> Reason | None:
    """Why there can be no library; None where there is one, or a compiler to make it. Compiles nothing."""
    isa = chosen()
    if isa not in sets.SETS:
        return Reason("isa", "|".join(sets.SETS), isa, "unset PORTATTN_CPU_ISA")
    if isa not in able():
        return Reason("isa", isa, f"a CPU with {'|'.join(able())}", "unset PORTATTN_CPU_ISA")
    if _prebuilt(isa) is None and _compiler() is None:
        return Reason("compiler", "a C++ compiler ($CXX, c++, g++ or clang++)", "none", "install one: apt install g++, xcode-select --install")
    return None


def library() -> ctypes.CDLL:
    """The library for the chosen instruction set, compiled if that has not been done; raises KernelError."""
    if no := missing():
        raise KernelError(f"no CPU kernels: {no}")
    with _lock:
        while True:
            isa = chosen()
            try:
                return _load(isa, _maker(isa))
            except KernelError as exc:
                if _forced() or isa == able()[0] or isinstance(exc, _NotLoaded):
                    raise
                _refused.add(isa)  # a compiler older than the CPU: the next best serves
                codeobjects.note(isa, f"{' '.join(str(exc).split())[:300]}; {chosen()} serves", "a newer C++ compiler, which CXX may name")


def identity() -> str:
    """What kernels there are or would be: instruction set, sources, flags and compiler."""
    if missing():
        return chosen()
    maker = _maker(chosen())
    return f"{chosen()} prebuilt {sets.source_hash()}" if maker is None else _key(chosen(), maker)
