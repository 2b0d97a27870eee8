"""A GPU driver that has no GPU, built from fake_driver.c under CUDA's and HIP's names."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from portattn import driver
from portattn.codeobjects import Found
from portattn.driver import CUDA, HIP, Driver

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """{"cuda": path, "hip": path} of the fake driver libraries."""
    if shutil.which("gcc") is None:
        pytest.skip("tool: gcc is not installed")
    folder = tmp_path_factory.mktemp("driver")
    made = {}
    for vendor, flags in (("cuda", []), ("hip", ["-DHIP"])):
        made[vendor] = str(folder / f"fake_{vendor}.so")
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", made[vendor], str(HERE / "fake_driver.c")], check=True)
    return made


@pytest.fixture(params=["cuda", "hip"])
def fake(request, libraries, monkeypatch):
    """A Driver over the fake library, and that library."""
    monkeypatch.delenv("FAKE_FAIL", raising=False)
    monkeypatch.setattr(driver, "code_object", lambda vendor, arch, instance: Found(b"KERNEL " + arch.encode() + b"\0", "test"))
    library = ctypes.CDLL(libraries[request.param])
    library.fake_log.restype = ctypes.c_char_p
    library.fake_reset()
    return Driver(CUDA if request.param == "cuda" else HIP, libraries[request.param]), library
