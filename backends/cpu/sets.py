"""Instruction sets of the CPU kernels and how they are compiled; needs Python alone, so that cmake/cpu.py can use it too."""

from __future__ import annotations

import functools
import hashlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-math-errno", "-fno-trapping-math",
         "-ffp-contract=fast")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2, "-mprefer-vector-width=512")
# Name: flags that choose it in vec.h, pairs.h and amx.h.
SETS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "neon": (),
    "neon_bf16": ("-march=armv8.2-a+bf16+dotprod+fp16",),
}
OF_ARCH = {"x86_64": ("portable", "avx2", "avx512", "avx512_bf16", "amx"), "aarch64": ("neon", "neon_bf16")}


def system(arch: str) -> str:
    """Where a library runs, of an architecture as portattn/processor.py names it: "linux-x86_64", "darwin-aarch64"."""
    return f"{sys.platform}-{arch}"


def sources() -> dict[str, bytes]:
    """Every source file of the kernels."""
    found = {}
    for name in sorted(os.listdir(HERE)):
        if name.endswith((".h", ".cpp")):
            with open(os.path.join(HERE, name), "rb") as f:
                found[name] = f.read()
    return found


@functools.lru_cache(maxsize=None)
def source_hash() -> str:
    """A hash of sources and flags: a prebuilt library is used only where it is of these."""
    digest = hashlib.sha256(repr((FLAGS, SETS)).encode())
    for name, text in sources().items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


def command(compiler: list[str], isa: str, target: str) -> list[str]:
    """What compiles the kernels for an instruction set into the shared library `target`."""
    return [*compiler, *FLAGS, *SETS[isa], "-o", target, os.path.join(HERE, "attention.cpp")]
