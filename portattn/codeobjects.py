"""Kernel instances to code objects: prebuilt in the wheel, else from the user's cache folder, else compiled by NVRTC or hiprtc.

Each instance is one small object, compiled when it is first wanted (rtc.py). The cache is keyed by the sources, the
options, the architecture and the compiler; a file is used only if its folder and itself are the user's own, nobody else
can write to them, and its hash is right. Trouble with the disk costs a compilation, never a call: `notes()` says what it
was. The index of prebuilt files, the cache and the notes serve the CPU kernels too (backends/cpu/library.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import tempfile
from typing import NamedTuple

from . import config, forks
from .capability import Reason
from .errors import KernelError
from .instances import Instance, source_hash, sources
from .rtc import Compiler, hiprtc, nvrtc

_HERE = os.path.dirname(os.path.abspath(__file__))
_MAGIC = b"portattn code object 1\n"
_lock = forks.lock(globals())
_notes: dict[str, tuple[str, str]] = {}
_ELSEWHERE = "PORTATTN_CACHE names another folder; portattn compiles what it cannot keep, once a process"
_AGAIN = "install portattn again"


class Found(NamedTuple):
    image: bytes
    origin: str  # "prebuilt" | "cache" | "compiled"


def notes() -> tuple[str, ...]:
    """What went wrong with folders and files so far; each one once."""
    return tuple(text for text, _ in _notes.values())


def notes_and_fixes() -> list[tuple[str, str]]:
    """The notes, each with what mends it ("": nothing is to be done, or the text says it)."""
    return list(_notes.values())


def note(key: str, text: str, fix: str = "") -> None:
    """Adds to the notes; the first text of a key stays."""
    _notes.setdefault(key, (text, fix))


# ------------------------------------------------------------------ prebuilt
def read_index(folder: str, kind: str, source: str | None) -> dict:
    """The objects that FOLDER/index.json names; {} where there are none, or where they are not of these sources (None: not asked)."""
    path = os.path.join(folder, "index.json")
    try:
        with open(path, encoding="utf-8") as f:
            index = json.load(f)
    except OSError:
        return {}
    except ValueError as exc:
        note(path, f"{path} is not JSON: {exc}", _AGAIN)
        return {}
    if source is not None and index.get("source") != source:
        note(path, f"the prebuilt {kind} kernels are of other sources than those beside them and are not used", _AGAIN)
        return {}
    return index.get("objects", {})


def read_prebuilt(folder: str, entry: dict | None) -> bytes | None:
    """The file of an index's entry, {"file", "sha256"}; None where there is none, or it is not what the index says."""
    if entry is None:
        return None
    path = os.path.join(folder, entry["file"])
    try:
        with open(path, "rb") as f:
            image = f.read()
    except OSError as exc:
        note(path, f"{path}: {exc.strerror}", _AGAIN)
        return None
    if hashlib.sha256(image).hexdigest() != entry["sha256"]:
        note(path, f"{path}: its hash is not the index's; it is not used", _AGAIN)
        return None
    return image


def prebuilt_folder(vendor: str) -> str:
    return os.path.join(_HERE, "kernels", vendor)


@functools.lru_cache(maxsize=None)
def prebuilt_index(vendor: str) -> dict:
    """kernels/VENDOR/index.json of the wheel: {"sm_90": {instance: {"file", "sha256"}}}."""
    return read_index(prebuilt_folder(vendor), vendor, source_hash(vendor) if sources(vendor) else None)


# ------------------------------------------------------------------ cache on disk
def private(status: os.stat_result) -> bool:
    """Whether only this user could have written it."""
    if not hasattr(os, "getuid"):
        return True  # Windows: the profile's folder is the user's by its access list
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_folder(create: bool) -> str | None:
    """Where compiled kernels are kept; None where there is no folder, or others can write to it."""
    folder = os.path.join(config.cache_dir(), "kernels")
    try:
        if create:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as exc:
        if create or not isinstance(exc, FileNotFoundError):
            note(folder, f"{folder}: cannot be made: {exc.strerror}; kernels are compiled in each process", _ELSEWHERE)
        return None
    if not stat.S_ISDIR(status.st_mode) or not private(status):
        note(folder, f"{folder}: not a folder that only this user can write to; it is not used (chmod 700 mends its mode)", _ELSEWHERE)
        return None
    return folder


def cached(name: str) -> bytes | None:
    """What was kept under a name; None where nothing is, or it is damaged or not safe to use."""
    folder = cache_folder(create=False)
    if folder is None:
        return None
    path = os.path.join(folder, name)
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as f:
            if not private(os.fstat(f.fileno())):
                note(path, f"{path}: others can write to it; it is not used", f"chmod 600 {path}")
                return None
            data = f.read()
    except FileNotFoundError:
        return None
    except OSError as exc:
        note(path, f"{path}: {exc.strerror}", _ELSEWHERE)
        return None
    head = len(_MAGIC) + 65
    image = data[head:]
    if data[:head] != _MAGIC + hashlib.sha256(image).hexdigest().encode() + b"\n":
        note(path, f"{path}: damaged; it is compiled again")
        return None
    return image


def keep(name: str, image: bytes) -> None:
    """Keeps bytes under a name for later processes, whole or not at all."""
    folder = cache_folder(create=True)
    if folder is None:
        return
    try:
        write_whole(os.path.join(folder, name), _MAGIC + hashlib.sha256(image).hexdigest().encode() + b"\n" + image)
    except OSError as exc:
        note(folder, f"{folder}: cannot be written: {exc.strerror}; kernels are compiled in each process", _ELSEWHERE)


def write_whole(path: str, data: bytes, like: os.stat_result | None = None) -> None:
    """Writes a file that only this user can read, or one with the mode of another, whole or not at all, whoever else writes it;
    raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")  # mode 600
    try:
        with open(handle, "wb") as f:
            f.write(data)
        if like is not None:
            with contextlib.suppress(OSError, AttributeError):  # root of a container in a user's checkout; Windows has no chown
                os.chown(temporary, like.st_uid, like.st_gid)
            os.chmod(temporary, stat.S_IMODE(like.st_mode))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def rewrite(path: str, text: str) -> None:
    """Replaces the text of a file that is there, whole or not at all; it stays what it is: its mode, and the link to it. Raises OSError."""
    path = os.path.realpath(path)
    with open(path, "r+b") as f:  # a file that may not be written stays
        like = os.fstat(f.fileno())
    write_whole(path, text.encode(), like)


# ------------------------------------------------------------------ the order
def _compiler(vendor: str) -> Compiler | Reason:
    return nvrtc() if vendor == "cuda" else hiprtc()


def available(vendor: str, arch: str) -> tuple[Reason, ...]:
    """() if instances for an architecture can be had at all; compiles nothing."""
    if prebuilt_index(vendor).get(arch):
        return ()
    found = _compiler(vendor)
    return (found,) if isinstance(found, Reason) else ()


def code_object(vendor: str, arch: str, instance: Instance) -> Found:
    """The code of an instance for an architecture; raises KernelError that says what is missing."""
    image = read_prebuilt(prebuilt_folder(vendor), prebuilt_index(vendor).get(arch, {}).get(str(instance)))
    if image is not None:
        return Found(image, "prebuilt")
    if no := available(vendor, arch):
        raise KernelError(f"no code for {instance} on {arch}: {no[0]}")
    compiler = _compiler(vendor)
    key = hashlib.sha256("\0".join([source_hash(vendor), arch, compiler.version, str(instance)]).encode()).hexdigest()[:32]
    name = f"{instance}.{arch}.{key}"
    with _lock:
        image = cached(name)
        if image is not None:
            return Found(image, "cache")
        image = compiler.build(arch, instance)
        keep(name, image)
    return Found(image, "compiled")
