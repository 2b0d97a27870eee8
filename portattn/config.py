"""The environment variables that portattn reads, all in one place, each documented here.

They are looked up at every call, so a change inside a running process is honoured; a lookup in the
undecoded mapping behind os.environ costs 0.04 us where os.environ.get costs 0.4.
"""

from __future__ import annotations

import os
import tempfile

VARIABLES = {
    "PORTATTN_BACKEND": "comma-separated order of backends to try, as portattn.use() takes them",
    "PORTATTN_CHECK": "1: check values on the device (lengths, page ids, cu_seqlens); costs a sync a call",
    "PORTATTN_VERIFY": "0: skip the known-answer check at the first use of a backend on a device",
    "PORTATTN_CACHE": "folder for verdicts and compiled kernels (default: the user's cache folder, or a temporary one where there can be none)",
    "PORTATTN_ALLOW_QUADRATIC": "1: allow kernels that hold an Sq x Sk matrix at any size",
    "PORTATTN_CPU_ISA": "instruction set of the CPU kernels, as avx2 or amx (default: the best of this machine that has been run)",
    "PORTATTN_DEBUG": "1: let errors inside a backend's probe and import through with their traceback",
}
# Of the repository's build and tests, which the package never reads; so are those that begin with PORTATTN_TEST_.
DEVELOPMENT = {
    "PORTATTN_HIP_CLANG": "the clang that compiles AMD code objects (cmake/hip.py)",
    "PORTATTN_HIP_HEADERS": "folder of hip/hip_runtime.h (tests/hip)",
    "PORTATTN_CUDA_FULL": "1: tests/cuda compiles every instance",
    "PORTATTN_HIP_FULL": "1: tests/hip and tests/isa take every instance",
    "PORTATTN_TRITON_FULL": "1: tests/triton compiles and interprets every variant",
    "PORTATTN_FUZZ": "how many random problems tests/cpu takes for an instruction set",
    "PORTATTN_FUZZ_SEED": "of these problems",
    "PORTATTN_OVERHEAD_ROUNDS": "how often tests/compat measures a call",
    "PORTATTN_SIMT_SANITIZE": "1: tests/simt compiles with sanitizers (tests/simt/test_sanitized.py sets it)",
}

try:
    _raw, _encode = os.environ._data, os.environ.encodekey  # type: ignore[attr-defined]
    _KEYS = {name: _encode(name) for name in VARIABLES}
    _CHECK, _BACKEND = _KEYS["PORTATTN_CHECK"], _KEYS["PORTATTN_BACKEND"]
except AttributeError:  # another Python implementation
    _raw, _KEYS = os.environ, {name: name for name in VARIABLES}
    _CHECK, _BACKEND = "PORTATTN_CHECK", "PORTATTN_BACKEND"


def get(name: str, default: str = "") -> str:
    """The value of a variable of `VARIABLES`."""
    assert name in VARIABLES, name
    return os.environ.get(name, default)


def flag(name: str, default: bool = False) -> bool:
    """Whether a variable is set to something other than 0, no, off, false or nothing."""
    value = get(name).strip().lower()
    return default if not value else value not in ("0", "no", "off", "false")


def call_state() -> tuple[object, object]:
    """Raw values of the two variables that change what a call does; compared, never parsed, on the fast path."""
    return _raw.get(_CHECK), _raw.get(_BACKEND)


def cache_dir() -> str:
    """The folder for verdicts and compiled kernels; not created here."""
    if chosen := get("PORTATTN_CACHE"):
        return os.path.expanduser(chosen)
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "portattn")
    if not base.startswith("~") and _can_be(folder):
        return folder
    # A user without a home, or with one that is not to be written to, as containers have them.
    return os.path.join(tempfile.gettempdir(), f"portattn-{os.getuid() if hasattr(os, 'getuid') else 'cache'}")


def _can_be(folder: str) -> bool:
    """Whether a folder is there, or may be made in what there is above it."""
    there = folder
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    return os.path.isdir(there) and (there == folder or os.access(there, os.W_OK | os.X_OK))
