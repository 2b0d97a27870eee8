"""hiprtc as the fallback where no AMD code objects are prebuilt, against a library built from C that checks its arguments."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from portattn import codeobjects, instances, rtc
from portattn.capability import Reason
from portattn.errors import KernelError

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")

INSTANCE = instances.decode_shape("float16", "float16", 128, instances.limits_of("gfx942")).instance


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("hiprtc") / "libhiprtc.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, str(Path(__file__).parent / "fake_hiprtc.c")], check=True)
    return path


@pytest.fixture
def compiler(library, monkeypatch, tmp_path):
    monkeypatch.delenv("FAKE_HIPRTC", raising=False)
    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(codeobjects, "prebuilt_index", lambda vendor: {})
    monkeypatch.setattr(rtc, "hiprtc_candidates", lambda: ["/nowhere/libhiprtc.so", library])
    rtc.hiprtc.cache_clear()
    yield rtc.hiprtc()
    rtc.hiprtc.cache_clear()


def test_an_instance_is_compiled_for_the_bare_architecture_and_cached(compiler):
    assert (compiler.title, compiler.version) == ("hiprtc", "9.0")
    found = codeobjects.code_object("hip", "gfx942", INSTANCE)
    options = " ".join(f"-D{n}={v}" for n, v in INSTANCE.options)
    assert found == (f"ELF --offload-arch=gfx942 -std=c++17 -O3 {options}".encode(), "compiled")
    assert codeobjects.code_object("hip", "gfx942", INSTANCE) == (found.image, "cache")
    assert codeobjects.code_object("hip", "gfx1100", INSTANCE).origin == "compiled"
    assert ctypes.CDLL(compiler.path).fake_alive() == 0, "programs are destroyed"


@pytest.mark.parametrize("step, said", [("create", "hiprtcCreateProgram: HIPRTC_ERROR_INVALID_INPUT"), ("size", "hiprtcGetCodeSize"), ("code", "hiprtcGetCode"),
                                        ("compile", r"(?s)cannot compile decode\.hip with --offload-arch=gfx942.*decode\.hip:1: error: as asked")])
def test_each_failure_is_told(compiler, monkeypatch, step, said):
    monkeypatch.setenv("FAKE_HIPRTC", step)
    with pytest.raises(KernelError, match=said):
        codeobjects.code_object("hip", "gfx942", INSTANCE)
    assert ctypes.CDLL(compiler.path).fake_alive() == 0


def test_without_compiler_and_prebuilt_objects_the_reason_says_both(monkeypatch):
    monkeypatch.setattr(codeobjects, "prebuilt_index", lambda vendor: {})
    monkeypatch.setattr(rtc, "hiprtc_candidates", lambda: ["/nowhere/libhiprtc.so"])
    rtc.hiprtc.cache_clear()
    (no,) = codeobjects.available("hip", "gfx942")
    assert isinstance(no, Reason) and no.code == "compiler" and "/nowhere/libhiprtc.so" in no.have
    rtc.hiprtc.cache_clear()


@pytest.mark.parametrize("release, first", [("7.1.25424", "libhiprtc.so.7"), ("6.4.43482", "libhiprtc.so.6"), (None, "libhiprtc.so.7")])
def test_the_release_that_torch_was_built_for_comes_first(monkeypatch, release, first):
    monkeypatch.setattr(torch.version, "hip", release, raising=False)
    names = [c for c in rtc.hiprtc_candidates() if "/" not in c]
    assert names[0] == first and names[-1] == "libhiprtc.so"


def test_windows_names_carry_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.25424", raising=False)
    monkeypatch.setattr(rtc.os, "name", "nt")
    assert rtc.hiprtc_candidates()[-1] == "hiprtc0701.dll"
