"""Compiles csrc_hip for one architecture, with no ROCm installed: clang 19 or newer with lld, or zig's clang. Needs Python alone.

    hip.py ARCH SOURCE OUT [--headers=FOLDER] [-DNAME=VALUE ...]
                                                  one code object; SOURCE is a file of csrc_hip; with HIP's own headers (hip/hip_runtime.h
                                                  in FOLDER, Debian's libamdhip64-dev) in front: the same instructions come out
    hip.py which ARCH                             the compiler that would be used

Order: $PORTATTN_HIP_CLANG, clang-22 .. clang-19 and ROCm's own clang (any that knows the architecture), then the pip
package ziglang (0.17), whose clang 22 knows gfx950.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCES = os.path.join(ROOT, "csrc_hip")
FLAGS = ["-O3", "-std=c++17", "-nogpuinc", "-nogpulib", "-fuse-cuid=none", "-I.", "-I../portattn/include", "-Wall", "-Werror"]
CLANGS = ("clang-22", "clang-21", "clang-20", "clang-19", "/opt/rocm/llvm/bin/clang", "amdclang", "clang")
NEW = {"gfx950": 20}  # the first clang that knows it, where that is not 19


def _version(clang: str) -> int:
    named = re.fullmatch(r"clang-(\d+)", os.path.basename(clang))
    if named:  # it is asked for every object
        return int(named[1])
    said = subprocess.run([clang, "--version"], capture_output=True, text=True).stdout
    number = said.partition("clang version ")[2].split(".")[0]
    return int(number) if number.isdigit() else 0


def compiler(arch: str) -> list[str] | None:
    """The command of a compiler that knows the architecture, or None."""
    given = os.environ.get("PORTATTN_HIP_CLANG")
    for name in (given,) if given else CLANGS:
        path = shutil.which(name)
        if path and _version(path) >= NEW.get(arch, 19) and (given or shutil.which("ld.lld") or any(
                shutil.which(f"ld.lld-{n}") for n in range(19, 30)) or os.path.exists(os.path.join(os.path.dirname(os.path.realpath(path)), "ld.lld"))):
            return [path]
    package = importlib.util.find_spec("ziglang")
    if package is not None:
        zig = os.path.join(os.path.dirname(package.origin), "zig.exe" if os.name == "nt" else "zig")
        return [zig] if os.path.exists(zig) else [sys.executable, "-m", "ziglang"]
    return [shutil.which("zig")] if shutil.which("zig") else None  # type: ignore[list-item]


def with_headers(command: list[str], folder: str) -> list[str]:
    """Flags that put HIP's own headers in front of a source, as hipcc does."""
    resources = subprocess.run([*command, "-print-resource-dir"], capture_output=True, text=True, check=True).stdout.strip()
    return ["-D__HIP_PLATFORM_AMD__", "-isystem", os.path.join(resources, "include", "cuda_wrappers"), "-idirafter", folder,
            "-include", "__clang_hip_runtime_wrapper.h", "-include", "hip/hip_runtime.h"]


def compile(arch: str, source: str, out: str, options: list[str]) -> None:
    """Makes one code object; raises RuntimeError with the compiler's words. Paths inside are relative: the same bytes anywhere."""
    command = compiler(arch)
    if command is None:
        raise RuntimeError(f"no compiler knows {arch}: install clang-{NEW.get(arch, 19)} and lld, or pip install ziglang")
    out = os.path.abspath(out)
    headers = [o.partition("=")[2] for o in options if o.startswith("--headers=")]
    options = [o for o in options if not o.startswith("--headers=")]
    if headers:
        if _is_zig(command):
            raise RuntimeError("zig's clang brings no wrappers for HIP's headers: use clang")
        options += with_headers(command, headers[0])
    if not _is_zig(command):
        _run([*command, "-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "--no-gpu-bundle-output", *FLAGS, *options, source, "-o", out])
        return
    import tempfile  # here: it would be a part of every other compiler's time

    with tempfile.TemporaryDirectory() as folder:
        bitcode, relocatable = os.path.join(folder, "k.bc"), os.path.join(folder, "k.o")
        _run([*command, "clang", "-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "--no-gpu-bundle-output", "-fno-gpu-rdc", *FLAGS, *options,
              "-Xclang", "-disable-llvm-passes", "-c", "-emit-llvm", source, "-o", bitcode])  # optimized once, in the next step
        _run([*command, "clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib", "-O3", "-c", "-x", "ir", bitcode, "-o", relocatable])
        _run([*command, "ld.lld", "-shared", "--no-undefined", relocatable, "-o", out])


def _is_zig(command: list[str]) -> bool:
    return "zig" in os.path.basename(command[-1])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    if sys.argv[1] == "which":
        print(" ".join(compiler(sys.argv[2]) or ["none"]))
        return
    arch, source, out, *options = sys.argv[1:]
    try:
        compile(arch, source, out, options)
    except RuntimeError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
