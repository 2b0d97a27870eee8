"""The index beside prebuilt kernels, kernels/VENDOR/index.json, which portattn/codeobjects.py reads. Needs Python alone."""

from __future__ import annotations

import hashlib
import json
import os


def index_of(folder: str, source: str, files: dict[str, dict[str, str]]) -> dict:
    """The sources' hash, and each file and its hash, by architecture (or system) and name."""
    found: dict = {}
    for group, names in files.items():
        found[group] = {}
        for name, file in names.items():
            with open(os.path.join(folder, file), "rb") as f:
                found[group][name] = {"file": file, "sha256": hashlib.sha256(f.read()).hexdigest()}
    return {"source": source, "objects": found}


def write_index(folder: str, index: dict) -> None:
    with open(os.path.join(folder, "index.json"), "w", encoding="utf-8", newline="\n") as f:
        json.dump(index, f, indent=1, sort_keys=True)
