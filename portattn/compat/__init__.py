"""Other packages' spellings of attention on portattn: translators, no kernels.

    import portattn.compat; portattn.compat.install()      # from here on `import flash_attn` finds portattn.compat.flash_attn
    python -m portattn.compat.run engine.py arguments…     # the same for a program that is not to be changed

Modules: flash_attn (FlashAttention 2), flash_attn_interface (FlashAttention 3), vllm_flash_attn, flashinfer. Each keeps the
peer's parameters, returns and conventions, and says at its top what is translated and what raises. README.md has a section an
engine.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
from types import ModuleType
from typing import Any, Iterator

from ..errors import ArgumentError, PortattnError

__all__ = ["NAMES", "install", "installed", "uninstall"]

NAMES = ("flash_attn", "flash_attn_interface", "vllm_flash_attn", "flashinfer")  # what can be installed
_DEFAULT = NAMES[:2]
_SUBMODULES = {"flash_attn": ("flash_attn_interface", "bert_padding")}
_DISTRIBUTIONS = {"flash_attn_interface": "flash_attn_3"}  # what the peer installs the module as, where that is not its name


def install(*names: str, shadow: bool = False) -> tuple[str, ...]:
    """Makes `import flash_attn` (and the other names) find portattn's modules in this process, until `uninstall()`.

    `importlib.util.find_spec` and `importlib.metadata.version` answer for them too. Nothing is written to disk, and child
    processes are not affected unless they call it. Modules that imported the real package before keep what they have.

    Args:
        names: of `NAMES`; default flash_attn and flash_attn_interface. flashinfer stands for a small part of that package only,
            so it is not among the defaults: an engine that finds it would look for the rest.
        shadow: install over a package of that name that is really there.

    Returns:
        the names that are installed now.

    Raises:
        ArgumentError: an unknown name.
        PortattnError: a package of that name is really installed, and shadow is False; nothing is installed then.

    Example:
        >>> install("flash_attn")
        ('flash_attn',)
        >>> from flash_attn import flash_attn_varlen_func
    """
    names = names or _DEFAULT
    if unknown := [name for name in names if name not in NAMES]:
        raise ArgumentError(f"install: wanted names of {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}")
    fresh = [name for name in names if name not in _finder.saved]
    if not shadow:
        for name in fresh:
            if where := _really_there(name):
                raise PortattnError(f"install: {name} is installed already ({where}); install({name!r}, shadow=True) puts "
                                    "portattn's in its place")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in fresh:
        of_name = [m for m in sys.modules if m == name or m.startswith(name + ".")]
        _finder.saved[name] = {m: sys.modules.pop(m) for m in of_name}
    importlib.invalidate_caches()
    for name in fresh:
        for module in (name, *(f"{name}.{part}" for part in _SUBMODULES.get(name, ()))):
            importlib.import_module(module)
    return installed()


def uninstall(*names: str) -> tuple[str, ...]:
    """Takes back `install`: of these names, or of all. What was shadowed is there again. Returns the names still installed."""
    for name in names or installed():
        if name not in _finder.saved:
            continue
        for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[module]
        sys.modules.update(_finder.saved.pop(name))
    if not _finder.saved and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    importlib.invalidate_caches()
    return installed()


def installed() -> tuple[str, ...]:
    """The names that `install` stands in for now."""
    return tuple(_finder.saved)


def _really_there(name: str) -> str:
    """Where a package of that name is, or "": among the imported modules, on the path, or as a distribution."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None) or "imported"
    spec = importlib.machinery.PathFinder.find_spec(name)
    # A folder of that name without __init__.py (a namespace) counts only if something was installed as it.
    if spec is not None and spec.origin is not None:
        return spec.origin
    context = importlib.metadata.DistributionFinder.Context(name=_DISTRIBUTIONS.get(name, name))
    for found in importlib.metadata.MetadataPathFinder.find_distributions(context):
        return f"distribution {found.metadata['Name']} {found.version}"
    return ""


class _Distribution(importlib.metadata.Distribution):
    """The metadata of an installed name."""

    def __init__(self, name: str):
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            name, version = _DISTRIBUTIONS.get(self._name, self._name), _version(self._name)
            return (f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
                    "Summary: portattn's stand-in, installed in this process only\n")
        return f"{self._name}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{self._name} is portattn's stand-in and has no files")


def _version(name: str) -> str:
    module = importlib.import_module(f"{__name__}.{name}")
    return getattr(module, "__version__", None) or f"0+portattn.{importlib.import_module('portattn.version').__version__}"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the installed names, as modules that hold what portattn's hold, and their metadata."""

    def __init__(self) -> None:
        self.saved: dict[str, dict[str, ModuleType]] = {}  # installed name: the modules that were there before

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        name, _, part = fullname.partition(".")
        if name not in self.saved or (part and part not in _SUBMODULES.get(name, ())):
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=f"{__name__}.{fullname}",
                                              is_package=not part and name in _SUBMODULES)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(f"{__name__}.{module.__name__}")
        own = {"__name__", "__loader__", "__spec__", "__package__", "__path__", "__builtins__", "__cached__", "__file__"}
        module.__dict__.update({k: v for k, v in vars(source).items() if k not in own and not isinstance(v, ModuleType)})
        module.__dict__.setdefault("__version__", _version(module.__name__.partition(".")[0]))

    def find_distributions(self, context: Any = None) -> Iterator[_Distribution]:
        plain = lambda name: re.sub(r"[-_.]+", "_", name).lower()
        wanted = None if context is None or context.name is None else plain(context.name)
        return iter([_Distribution(name) for name in self.saved if wanted in (None, plain(_DISTRIBUTIONS.get(name, name)))])


_finder = _Finder()
