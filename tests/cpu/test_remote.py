"""Random problems over kernels in another process: Arm's by an emulator of its CPU, and every set of this CPU under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import torch

import portattn

from . import remote, test_fuzz
from .conftest import library

PROBLEMS = max(20, test_fuzz.PROBLEMS // 3)
SANITIZERS = {
    "address": ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-g", "-O1", "-fsanitize=thread"),
}


def _sanitizes(compiler: str, flags: tuple[str, ...], folder) -> bool:
    source = folder / "empty.cpp"
    source.write_text("int main() {}")
    return subprocess.run([compiler, *flags, str(source), "-o", str(folder / "empty")], capture_output=True).returncode == 0


def _run(command, monkeypatch, tmp_path) -> int:
    worker = remote.Remote(command, monkeypatch, str(tmp_path / "errors"))
    try:
        test_fuzz.check(PROBLEMS)
    finally:
        worker.close()
    return worker.calls


@pytest.mark.parametrize("isa", ["neon", "neon_bf16"])
def test_arm_kernels_match_the_reference_on_an_emulated_cpu(isa, monkeypatch, tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        pytest.skip("tool: aarch64-linux-gnu-g++ and qemu-user are not installed")
    driver = remote.compile_driver(compiler, str(tmp_path), (*remote.flags_of(isa), "-static"))
    assert _run([emulator, "-cpu", "max", driver], monkeypatch, tmp_path) >= PROBLEMS


@pytest.mark.parametrize("isa, sanitizer", [("best", "address"), ("best", "thread"), ("portable", "address"), ("emulated_amx", "address")])
def test_kernels_are_clean_under_sanitizers(isa, sanitizer, monkeypatch, tmp_path):
    compiler = shutil.which("g++")
    if not compiler or not _sanitizes(compiler, SANITIZERS[sanitizer], tmp_path):
        pytest.skip("tool: no g++ with sanitizers")
    isa = library.able()[-1] if isa == "best" else isa
    driver = remote.compile_driver(compiler, str(tmp_path), (*remote.flags_of(isa), *SANITIZERS[sanitizer], "-w"))
    monkeypatch.setenv("UBSAN_OPTIONS", "print_stacktrace=1")
    torch.set_num_threads(2)
    assert _run([driver], monkeypatch, tmp_path) >= PROBLEMS


def test_a_sanitizer_would_notice(monkeypatch, tmp_path):
    """A table that is one entry short, on purpose: the run must end with a report."""
    compiler = shutil.which("g++")
    if not compiler or not _sanitizes(compiler, SANITIZERS["address"], tmp_path):
        pytest.skip("tool: no g++ with sanitizers")
    driver = remote.compile_driver(compiler, str(tmp_path), (*SANITIZERS["address"], "-w"))
    worker = remote.Remote([driver], monkeypatch, str(tmp_path / "errors"))
    q, cache = torch.randn(1, 1, 1, 8), torch.randn(4, 4, 1, 8)
    table = torch.zeros(1, 4, dtype=torch.int32)
    call = lambda: portattn.attention_paged(q, cache, cache, table, torch.tensor([16], dtype=torch.int32), backend="cpu")
    call()
    table.untyped_storage().resize_(12)
    with pytest.raises(AssertionError, match="AddressSanitizer"):
        call()
    with pytest.raises(AssertionError):
        worker.close()


def test_no_emulator_is_taken_for_a_cpu():
    """What runs emulated here is not chosen by itself."""
    assert os.environ.get("PORTATTN_CPU_ISA") or library.chosen() not in library._NOT_RUN
