"""Engines that portattn plugs into by their own interfaces, one module each: transformers, vllm, sglang.

Importing a module imports no engine; its register() does. Each says at its top which versions it was tested with; another version
gives one warning that names them. portattn/compat/README.md has a section an engine, and what was run where.
"""

from __future__ import annotations

import importlib.metadata
import warnings

from ..registry import version_matches

_warned: set[str] = set()


def check_version(package: str, tested: str) -> str:
    """The installed version of an engine; warns once a process if it is not among the tested ones (such as ">=5.24,<5.25")."""
    version = importlib.metadata.version(package)
    if not version_matches(version, tested) and package not in _warned:
        _warned.add(package)
        warnings.warn(f"portattn.integrations: {package} {version} is installed; tested are versions {tested}. It may work; if it does "
                      "not, install one of those or tell us.", RuntimeWarning, stacklevel=3)
    return version
