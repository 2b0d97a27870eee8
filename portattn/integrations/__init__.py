"""Engines that portattn plugs into by their own interfaces, one module each: transformers, vllm, sglang.

Importing a module imports no engine; its register() does. Each says at its top which versions it is made for; another version
gives one warning that names them. portattn/compat/README.md has a section an engine, and what was run where.
"""

from __future__ import annotations

import importlib.metadata
import warnings

from ..registry import version_matches

_warned: set[str] = set()


def check_version(package: str, wanted: str, version: str | None = None) -> str:
    """The installed version of an engine; warns once a process if it is not one that the adapter is made for (">=5.24,<5.25")."""
    version = version or importlib.metadata.version(package)
    if not version_matches(version, wanted) and package not in _warned:
        _warned.add(package)
        warnings.warn(f"portattn.integrations: {package} {version} is installed, and the adapter is made for versions {wanted}; it may work, "
                      "and if it does not, install one of those", RuntimeWarning, stacklevel=3)
    return version
