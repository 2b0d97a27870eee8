"""Helper of CMakeLists.txt: which objects to build, and the index that portattn reads. Needs Python alone.

    objects.py list ARCH              one line an object: file, target, source, options (separated by |)
    objects.py index FOLDER ARCH...   writes FOLDER/index.json over the objects that lie there
"""

from __future__ import annotations

import importlib.util
import os
import sys

from prebuilt import index_of, write_index

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _instances():
    spec = importlib.util.spec_from_file_location("instances", os.path.join(ROOT, "portattn", "instances.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["instances"] = module
    spec.loader.exec_module(module)
    return module


def objects(arch: str) -> list[tuple[str, str, str, str, list[str]]]:
    """(instance, file, what to compile for, source, options) of every object for an architecture."""
    m = _instances()
    kind, source = ("hsaco", "hip") if arch.startswith("gfx") else ("cubin", "cu")
    return [(str(i), f"{i}.{arch}.{kind}", m.target(arch, i), f"{i.kernel}.{source}", [f"-D{name}={value}" for name, value in i.options])
            for i in m.every_instance(m.limits_of(arch))]


def index(folder: str, archs: list[str]) -> dict:
    """What kernels/VENDOR/index.json says."""
    source = _instances().source_hash("hip" if archs[0].startswith("gfx") else "cuda")
    return index_of(folder, source, {arch: {name: file for name, file, *_ in objects(arch)} for arch in archs})


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "list":
        for _, *parts, options in objects(rest[0]):
            print("|".join([*parts, *options]))
    elif command == "index":
        write_index(rest[0], index(rest[0], rest[1:]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
