"""Reads finished AMD code objects: their metadata, what occupancy it allows, and their instructions."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

from portattn.instances import GFX, Instance, limits_of, source_hash

from . import listing
from .listing import tool

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("portattn_cmake_hip", ROOT / "cmake" / "hip.py")  # what builds the shipped objects
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


def missing(arch: str) -> str:
    """Why objects of an architecture cannot be made and read here; "" where they can."""
    if build.compiler(arch) is None:
        return f"tool: no compiler for {arch} (clang-{build.NEW.get(arch, 19)} with lld, or the package ziglang)"
    return next((f"tool: {name} 19 or newer is not installed" for name in ("llvm-readelf", "llvm-objdump") if tool(name) is None), "")


@functools.lru_cache(maxsize=None)
def made(arch: str, instance: Instance) -> Path:
    """The code object of an instance, built once per source state into the temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"portattn-hip-{os.getuid() if hasattr(os, 'getuid') else 0}" / source_hash("hip")[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{instance}.{arch}.hsaco"
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        build.compile(arch, f"{instance.kernel}.hip", str(part), [f"-D{n}={v}" for n, v in instance.options])
        os.replace(part, file)
    return file


def metadata(file: Path) -> dict:
    """The object's only kernel as its notes describe it, and the target."""
    text = subprocess.run([tool("llvm-readelf"), "--notes", str(file)], capture_output=True, text=True, check=True).stdout
    notes = yaml.safe_load(text[text.index("---") + 3 : text.index("\n...")])
    (kernel,) = notes["amdhsa.kernels"]
    return kernel | {"target": notes["amdhsa.target"].rpartition("-")[2]}


class Resources(NamedTuple):
    """What a kernel takes, and how many waves a SIMD can then hold."""

    vgpr: int
    lds: int
    waves: float


def resources(arch: str, kernel: dict) -> Resources:
    """Waves by registers and by LDS (AMD's ISA documents: 512 registers a lane and SIMD on CDNA 2 and 3, 1536 on these RDNA)."""
    wave, lds_kib = GFX[arch]
    vgpr, lds = kernel[".vgpr_count"], kernel[".group_segment_fixed_size"]
    registers, granule, most = (512, 8, 8) if wave == 64 else (1536, 24, 16)
    by_registers = min(most, registers // (-(-vgpr // granule) * granule))
    block_waves = kernel[".max_flat_workgroup_size"] // wave
    by_lds = (lds_kib << 10) // lds * block_waves / 4 if lds else most  # four SIMDs share it
    return Resources(vgpr, lds, min(by_registers, by_lds))


def instructions(arch: str, file: Path) -> list[str]:
    """The kernel's instructions as the assembler writes them."""
    return [f"{t.name} {t.rest}".strip() for t in listing.texts(arch, file)]


def mnemonics(arch: str, file: Path) -> Counter:
    return Counter(re.sub(r"_e(32|64)(_dpp)?$", "", t.name) for t in listing.texts(arch, file))


__all__ = ["GFX", "build", "instructions", "limits_of", "made", "metadata", "missing", "mnemonics", "resources", "tool"]
