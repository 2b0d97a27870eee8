"""Where code objects come from: the wheel, the cache folder with its faults, and NVRTC where it is installed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from portattn import codeobjects, native, rtc
from portattn.capability import Reason
from portattn.codeobjects import Instance
from portattn.errors import KernelError

INSTANCE = Instance("decode", (("PA_T", "bf16"), ("PA_D", "64")))
POSIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX modes")
ROOT = pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root may write everywhere")


class Compiler:
    """Counts compilations."""

    version = "13.0"

    def __init__(self):
        self.compiled = []

    def build(self, arch, instance):
        self.compiled.append((arch, instance))
        return b"code for " + arch.encode()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A stand-in for NVRTC, an empty cache folder, and no prebuilt objects."""
    made = Compiler()
    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(codeobjects, "nvrtc", lambda: made)
    monkeypatch.setattr(codeobjects, "prebuilt_index", lambda vendor: {})
    monkeypatch.setattr(codeobjects, "_notes", {})
    return made


def get(arch="sm_90"):
    return codeobjects.code_object("cuda", arch, INSTANCE)


def files(tmp_path):
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_compiled_once_then_read_from_the_cache(compiler, tmp_path):
    assert get() == (b"code for sm_90", "compiled") and get() == (b"code for sm_90", "cache")
    assert get("sm_80").origin == "compiled" and len(compiler.compiled) == 2
    assert all(f.stat().st_mode & 0o077 == 0 for f in files(tmp_path)) and (tmp_path / "cache" / "kernels").stat().st_mode & 0o077 == 0
    compiler.version = "13.1"
    assert get().origin == "compiled", "another compiler's code is another file"


@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: d[:40] + b"x" + d[41:], lambda d: d + b"x", lambda d: b"", lambda d: d[:-1] + b"X"])
def test_a_damaged_file_is_compiled_again(compiler, tmp_path, damage):
    get()
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert get() == (b"code for sm_90", "compiled")
    assert "damaged" in codeobjects.notes()[0] and get().origin == "cache"


@POSIX
def test_a_file_that_others_can_write_is_not_used(compiler, tmp_path):
    get()
    files(tmp_path)[0].chmod(0o666)
    assert get().origin == "compiled" and "others can write" in codeobjects.notes()[0]


@POSIX
def test_a_folder_that_others_can_write_is_not_used(compiler, tmp_path):
    get()
    (tmp_path / "cache" / "kernels").chmod(0o777)
    assert get().origin == "compiled" and get().origin == "compiled" and "only this user" in codeobjects.notes()[0]


@POSIX
def test_a_link_in_place_of_folder_or_file_is_not_followed(compiler, tmp_path):
    get()
    (file,) = files(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert get().origin == "compiled"
    folder = tmp_path / "cache" / "kernels"
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    assert get().origin == "compiled"


@POSIX
def test_another_users_folder_is_not_used(compiler, monkeypatch):
    get()
    monkeypatch.setattr(codeobjects.os, "getuid", lambda: 4242)
    assert get().origin == "compiled"


def test_a_disk_that_cannot_be_written_costs_only_the_cache(compiler, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codeobjects.os, "replace", full)
    assert get().origin == "compiled" and get().origin == "compiled"
    assert "No space left on device" in codeobjects.notes()[0]
    assert not os.listdir(os.path.join(os.environ["PORTATTN_CACHE"], "kernels")), "nothing half-written stays"


@ROOT
def test_a_read_only_cache_folder_costs_only_the_cache(compiler, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert get().origin == "compiled" and get().origin == "compiled"


def test_a_cache_folder_that_is_a_file_costs_only_the_cache(compiler, tmp_path):
    (tmp_path / "cache").write_text("")
    assert get().origin == "compiled" and codeobjects.notes()


def test_a_cache_folder_that_cannot_be_made_is_said(compiler, monkeypatch):
    def nowhere(*args, **kwargs):
        raise FileNotFoundError(2, "No such file or directory")  # below /proc, say

    monkeypatch.setattr(codeobjects.os, "makedirs", nowhere)
    assert get().origin == "compiled"
    assert "cannot be made" in codeobjects.notes()[0]


def test_threads_compile_once(compiler, monkeypatch):
    build = compiler.build
    monkeypatch.setattr(compiler, "build", lambda *a: (time.sleep(0.05), build(*a))[1])
    threads = [threading.Thread(target=get) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(compiler.compiled) == 1


def test_processes_that_write_at_once_leave_whole_files(tmp_path):
    script = ("from portattn import codeobjects as c\n"
              "for i in range(40):\n    c.keep('name', bytes([i]) * 50000)\n    got = c.cached('name')\n    assert got is not None and len(set(got)) == 1\n"
              "assert not c.notes(), c.notes()")
    env = os.environ | {"PORTATTN_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [subprocess.Popen([sys.executable, "-c", script], env=env) for _ in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]


def test_an_interrupted_compilation_leaves_nothing_and_the_next_call_compiles(compiler, monkeypatch, tmp_path):
    def stopped(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(compiler, "build", stopped)
        with pytest.raises(KeyboardInterrupt):
            get()
    with monkeypatch.context() as m:
        m.setattr(codeobjects.os, "replace", stopped)  # compiled, and stopped while it is written
        with pytest.raises(KeyboardInterrupt):
            get()
    assert not files(tmp_path) and get().origin == "compiled" and get().origin == "cache"


def test_prebuilt_objects_come_first_and_are_checked(compiler, monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "cuda"
    folder.mkdir(parents=True)
    (folder / "a.cubin").write_bytes(b"prebuilt")
    objects = {"sm_90": {str(INSTANCE): {"file": "a.cubin", "sha256": hashlib.sha256(b"prebuilt").hexdigest()}}}
    monkeypatch.setattr(codeobjects, "prebuilt_index", lambda vendor: objects)
    monkeypatch.setattr(codeobjects, "_HERE", str(tmp_path))
    assert get() == (b"prebuilt", "prebuilt")
    (folder / "a.cubin").write_bytes(b"other")
    assert get().origin == "compiled" and "hash" in codeobjects.notes()[0]


def test_prebuilt_objects_of_other_sources_are_not_used(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "cuda"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps({"source": "of yesterday", "objects": {"sm_90": {}}}))
    monkeypatch.setattr(codeobjects, "_HERE", str(tmp_path))
    monkeypatch.setattr(codeobjects, "sources", lambda vendor: {"decode.cu": ""})
    monkeypatch.setattr(codeobjects, "_notes", {})
    codeobjects.prebuilt_index.cache_clear()
    codeobjects.source_hash.cache_clear()
    assert codeobjects.prebuilt_index("cuda") == {} and "other sources" in codeobjects.notes()[0]
    codeobjects.prebuilt_index.cache_clear()
    codeobjects.source_hash.cache_clear()


def test_without_compiler_and_prebuilt_objects_the_error_says_both(compiler, monkeypatch):
    monkeypatch.setattr(codeobjects, "nvrtc", lambda: Reason("compiler", "a prebuilt code object, or NVRTC", "neither", "install it"))
    with pytest.raises(KernelError, match="no code for decode-bf16-d64 on sm_90: compiler: need a prebuilt code object, or NVRTC"):
        get()
    assert codeobjects.available("cuda", "sm_90")[0].code == "compiler"


def test_libraries_of_wheels_are_found_where_a_folders_name_looks_like_a_pattern(monkeypatch, tmp_path):
    site = tmp_path / "site [3.11]"
    wanted = [site / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13", site / "_rocm_sdk_core" / "lib" / "libhiprtc.so.7"]
    for file in wanted:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", "7.1", raising=False)
    assert [str(file) for file in wanted if str(file) in rtc.nvrtc_candidates() + rtc.hiprtc_candidates()] == list(map(str, wanted))


# ------------------------------------------------------------------ NVRTC itself: needs no GPU
@pytest.fixture(scope="module")
def nvrtc():
    codeobjects.nvrtc.cache_clear()
    found = codeobjects.nvrtc()
    if isinstance(found, Reason):
        pytest.skip(f"no NVRTC: {found.have}")
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("instance", [
    native.decode_shape("bfloat16", "bfloat16", 64, native.Limits(99 << 10, 100 << 10, 10)).instance,
    native.small_instance("append", "float16", "float8_e4m3fn"), native.small_instance("merge", "bfloat16")], ids=str)
def test_nvrtc_compiles_without_a_gpu_or_a_toolkit(nvrtc, arch, instance):
    assert nvrtc.build(arch, instance)[:4] == b"\x7fELF"


def test_nvrtc_errors_carry_the_log(nvrtc):
    with pytest.raises(KernelError, match=r"(?s)cannot compile x\.cu.*identifier \"nonsense\" is undefined"):
        nvrtc.compile("x.cu", "__global__ void f() { nonsense; }", {}, ["--gpu-architecture=sm_90"])


def test_an_architecture_newer_than_the_compiler_gets_the_nearest_code(nvrtc, monkeypatch):
    monkeypatch.setattr(nvrtc, "archs", lambda: (80, 86, 90, 120))
    assert [nvrtc.target(a) for a in ("sm_90", "sm_89", "sm_121", "sm_130")] == ["sm_90", "sm_86", "sm_120", "compute_120"]
    with pytest.raises(KernelError, match="sm_75"):
        nvrtc.target("sm_75")


@pytest.mark.skipif(os.name == "nt", reason="platform: POSIX modes and links")
def test_a_file_that_is_rewritten_keeps_its_mode_and_the_link_to_it_or_its_text(tmp_path, monkeypatch):
    file, link = tmp_path / "backend.yaml", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o664)
    link.symlink_to(file)
    codeobjects.rewrite(str(link), "new")
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o664 and link.is_symlink()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        codeobjects.rewrite(str(link), "newer")
    assert file.read_text() == "new" and sorted(path.name for path in tmp_path.iterdir()) == ["backend.yaml", "link"]
