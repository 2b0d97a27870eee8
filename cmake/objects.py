"""Helper of CMakeLists.txt: which objects to build, and the index that portattn reads. Needs Python alone.

    objects.py list ARCH              one line an object: file, target, source, options (separated by |)
    objects.py index FOLDER ARCH...   writes FOLDER/index.json over the objects that lie there
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys

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
    """What kernels/VENDOR/index.json says: the sources' hash, and each object's file and hash."""
    found: dict = {}
    for arch in archs:
        found[arch] = {}
        for name, file, *_ in objects(arch):
            with open(os.path.join(folder, file), "rb") as f:
                found[arch][name] = {"file": file, "sha256": hashlib.sha256(f.read()).hexdigest()}
    return {"source": _instances().source_hash("hip" if archs[0].startswith("gfx") else "cuda"), "objects": found}


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "list":
        for _, *parts, options in objects(rest[0]):
            print("|".join([*parts, *options]))
    elif command == "index":
        with open(os.path.join(rest[0], "index.json"), "w", encoding="utf-8", newline="\n") as f:
            json.dump(index(rest[0], rest[1:]), f, indent=1, sort_keys=True)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
