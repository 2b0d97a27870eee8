"""Helper of CMakeLists.txt: the CPU kernels as libraries, and the index that portattn reads. Needs Python and a C++ compiler.

    cpu.py build ISA FILE COMPILER      compiles for one instruction set (names: backends/cpu/sets.py)
    cpu.py index FOLDER ISA...          writes FOLDER/index.json over the libraries that lie there

The C++ runtime is linked in: a library needs only the C library of a system at least as new as the one that built it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from prebuilt import index_of, write_index

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _module(*path: str):
    spec = importlib.util.spec_from_file_location(path[-1], os.path.join(ROOT, *path[:-1], f"{path[-1]}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sets, processor = _module("backends", "cpu", "sets"), _module("portattn", "processor")


def build(isa: str, file: str, compiler: str) -> int:
    linked_in = [] if sys.platform == "darwin" else ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,-s"]
    return subprocess.run([*sets.command([compiler], isa, file), *linked_in]).returncode


def index(folder: str, names: list[str]) -> dict:
    """What kernels/cpu/index.json says."""
    return index_of(folder, sets.source_hash(), {sets.system(processor.cpu_arch()): {isa: f"{isa}.so" for isa in names}})


def main() -> None:
    command, *rest = sys.argv[1:] or [""]
    if command == "build":
        sys.exit(build(*rest))
    elif command == "index":
        write_index(rest[0], index(rest[0], rest[1:]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
