"""How the kernels arrive: compiled once, kept, and a Reason where they cannot be had."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import types

import pytest
import torch

import portattn
from portattn import codeobjects, reference, registry

library = importlib.import_module("portattn.backends.cpu.library")
REAL_OPEN = library._open
REAL_INDEX = library._prebuilt_index.__wrapped__


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing loaded, an empty cache folder, and a list of compilations (which give some bytes)."""
    commands = []

    def compile_(isa, compiler):
        commands.append((isa, compiler))
        return b"library"

    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_compile", compile_)
    monkeypatch.setattr(library, "_open", lambda image: image)
    monkeypatch.delenv("PORTATTN_CPU_ISA", raising=False)
    if library._compiler() is None:
        monkeypatch.setenv("CXX", sys.executable)  # it is not run
    monkeypatch.setattr(library, "_prebuilt_index", dict)
    monkeypatch.setattr(library, "_refused", set())
    library._prebuilt.cache_clear()
    library._load.cache_clear()
    registry.forget()
    yield commands
    library._load.cache_clear()
    registry.forget()


def test_compiled_once_then_read_from_the_cache(fresh):
    assert library.library() == b"library"
    library._load.cache_clear()
    assert library.library() == b"library" and len(fresh) == 1


def test_another_compiler_or_another_source_compiles_again(fresh, monkeypatch):
    library.library()
    library._load.cache_clear()
    monkeypatch.setattr(library.sets, "source_hash", lambda: "another")
    library.library()
    library._load.cache_clear()
    found = library._compiler()
    monkeypatch.setattr(library, "_compiler", lambda: [*found, "-DOTHER"])
    library.library()
    assert len(fresh) == 3


def test_without_a_compiler_there_is_a_reason_and_another_backend_serves(fresh, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert [r.code for r in registry.probe("cpu", "cpu")] == ["compiler"]
    x = torch.randn(1, 3, 2, 8)
    with pytest.warns(RuntimeWarning, match="cpu would, but compiler"):
        registry._warned.clear()
        assert portattn.attention(x, x, x).shape == x.shape
    assert portattn.explain(portattn.attention, x, x, x).backend != "cpu"


def test_a_variable_that_is_no_command_names_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    usual = library._compiler()
    for value in ('g++ "', "", " ", "no-such-compiler -O2"):
        monkeypatch.setenv("CXX", value)
        assert library._compiler() == usual


def test_a_compiler_that_fails_is_a_reason_with_its_words(monkeypatch):
    monkeypatch.setattr(library.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "error: no such thing"))
    with pytest.raises(library.KernelError, match="no such thing"):
        library._compile("portable", ["c++"])


def test_a_compiler_that_fails_without_a_word_is_a_reason_with_its_exit_status(monkeypatch):
    monkeypatch.setattr(library.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3, "", ""))
    with pytest.raises(library.KernelError, match="for portable:\nit exits with 3"):
        library._compile("portable", ["c++"])


def test_a_machine_without_a_temporary_folder_is_a_reason(monkeypatch):
    def none(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(library.tempfile, "TemporaryDirectory", none)
    with pytest.raises(library._NotLoaded, match="cannot compile the CPU kernels: .*No usable temporary directory"):
        library._compile("portable", ["c++"])


def test_where_the_cache_is_only_to_be_read_the_library_is_opened_elsewhere(monkeypatch, tmp_path):
    opened = []

    def load(path):
        opened.append(path)
        if len(opened) == 1:
            raise OSError(f"{path}: failed to map segment from shared object")  # a folder in which nothing may be run
        return types.SimpleNamespace(pa_attention=types.SimpleNamespace(), pa_cache_append=types.SimpleNamespace(), pa_merge=types.SimpleNamespace())

    monkeypatch.setattr(library.ctypes, "CDLL", load)
    monkeypatch.setattr(library.codeobjects, "cache_folder", lambda create: str(tmp_path))
    assert library._open(b"library") and os.path.dirname(os.path.dirname(opened[0])) == str(tmp_path) != os.path.dirname(os.path.dirname(opened[1]))
    assert not list(tmp_path.iterdir())
    opened.clear()
    monkeypatch.setattr(library.codeobjects, "cache_folder", lambda create: str(tmp_path / "none, as one that is only to be read"))
    with pytest.raises(library.KernelError, match="only to be read: No such file or directory; from the temporary folder: failed to map"):
        library._open(b"library")


def test_a_library_that_no_folder_lets_run_is_not_tried_for_every_instruction_set(fresh, monkeypatch):
    monkeypatch.setattr(library, "_open", REAL_OPEN)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: (_ for _ in ()).throw(OSError(f"{path}: failed to map segment from shared object")))
    texts = set()
    for _ in range(2):
        with pytest.raises(library.KernelError, match="cannot be loaded from .*cache/kernels: failed to map") as told:
            library.library()
        texts.add(str(told.value))
    assert len(texts) == 1 and len(fresh) == 1


def test_where_the_compiler_is_older_than_the_cpu_the_next_best_set_serves(fresh, monkeypatch):
    def old(isa, compiler):
        if isa == "amx":
            raise library.KernelError("unrecognized option -mamx-tile")
        return isa.encode()

    monkeypatch.setattr(library, "_compile", old)
    monkeypatch.setattr(library, "able", lambda: ("portable", "avx512", "amx"))
    assert library.chosen() == "amx" and library.library() == b"avx512" and library.chosen() == "avx512"
    assert any("-mamx-tile" in note for note in codeobjects.notes())
    monkeypatch.setenv("PORTATTN_CPU_ISA", "amx")
    with pytest.raises(library.KernelError, match="mamx"):
        library.library()


@pytest.mark.parametrize("words, best", [
    ({"GenuineIntel", "avx512_bf16"}, "avx512"), ({"AuthenticAMD", "avx512_bf16"}, "avx512_bf16"), ({"AuthenticAMD"}, "avx512"),
    ({"GenuineIntel", "avx512_bf16", "amx_tile", "amx_bf16"}, "amx")])
def test_the_best_set_of_a_cpu(fresh, monkeypatch, words, best):
    monkeypatch.setattr(library, "cpu_arch", lambda: "x86_64")
    monkeypatch.setattr(library.torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(library, "_flags", lambda: words)
    monkeypatch.setattr(library, "_tiles_granted", lambda: True)
    monkeypatch.setattr(library, "able", library.able.__wrapped__)
    assert library.chosen() == best


@pytest.mark.parametrize("name", ["avx1024", "sse"])
def test_an_unknown_instruction_set_is_a_reason_that_lists_those_that_exist(fresh, monkeypatch, name):
    monkeypatch.setenv("PORTATTN_CPU_ISA", name)
    found = library.missing()
    assert found.code == "isa" and found.need == "|".join(library.sets.SETS) and found.have == name


def test_an_instruction_set_that_the_machine_lacks_is_never_loaded(fresh, monkeypatch):
    monkeypatch.setattr(library, "able", lambda: ("portable",))
    monkeypatch.setenv("PORTATTN_CPU_ISA", "avx2")
    assert [r.code for r in registry.probe("cpu", "cpu")] == ["isa"] and not fresh
    with pytest.raises(library.KernelError, match="isa: need avx2"):
        library.library()


def test_a_folder_that_others_can_write_to_is_not_used(fresh, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert library.library() == b"library" and not list(folder.iterdir())
    assert any(str(folder) in note for note in codeobjects.notes())


def test_a_probe_compiles_nothing(fresh):
    assert registry.probe("cpu", "cpu") == () and not fresh


@pytest.fixture
def prebuilt(fresh, monkeypatch, tmp_path):
    """A folder as cmake/cpu.py leaves it, with one library of these sources."""
    isa = library.chosen()
    (tmp_path / "kernel.so").write_bytes(b"prebuilt")
    entry = {"file": "kernel.so", "sha256": hashlib.sha256(b"prebuilt").hexdigest()}
    index = {"source": library.sets.source_hash(), "objects": {library.sets.system(library.cpu_arch()): {isa: entry}}}
    monkeypatch.setattr(library, "_PREBUILT", str(tmp_path))
    monkeypatch.setattr(library, "_prebuilt_index", functools.lru_cache(maxsize=None)(REAL_INDEX))
    (tmp_path / "index.json").write_text(json.dumps(index))
    yield tmp_path
    library._prebuilt.cache_clear()


def test_a_prebuilt_library_needs_no_compiler(fresh, prebuilt, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert library.missing() is None and library.library() == b"prebuilt" and not fresh
    assert "prebuilt" in library.identity()


def test_a_prebuilt_library_of_other_sources_is_not_used(fresh, prebuilt):
    index = json.loads((prebuilt / "index.json").read_text())
    (prebuilt / "index.json").write_text(json.dumps(index | {"source": "another"}))
    assert library.library() == b"library" and len(fresh) == 1
    assert any("other sources" in note for note in codeobjects.notes())


def test_a_prebuilt_library_that_was_changed_is_never_loaded(fresh, prebuilt):
    (prebuilt / "kernel.so").write_bytes(b"changed!")
    assert library.library() == b"library" and len(fresh) == 1
    assert any("its hash is not the index's" in note for note in codeobjects.notes())


def test_what_cmake_builds_is_found_and_serves_without_a_compiler(monkeypatch, tmp_path):
    if library._compiler() is None:
        pytest.skip("tool: no C++ compiler")
    isa, script = library.able()[0], os.path.join(os.path.dirname(__file__), "..", "..", "cmake", "cpu.py")
    for arguments in (("build", isa, tmp_path / f"{isa}.so", library._compiler()[0]), ("index", tmp_path, isa)):
        subprocess.run([sys.executable, script, *map(str, arguments)], check=True)
    monkeypatch.setattr(library, "_PREBUILT", str(tmp_path))
    monkeypatch.setattr(library, "_compiler", lambda: None)
    monkeypatch.setenv("PORTATTN_CPU_ISA", isa)
    for cached in (library._prebuilt_index, library._prebuilt, library._load):
        cached.cache_clear()
    registry.forget()
    try:
        q = torch.randn(1, 40, 4, 24)
        out = portattn.attention(q, q, q, causal=True, backend="cpu")
        torch.testing.assert_close(out.double(), reference.attention(q, q, q, causal=True)[0], atol=1e-5, rtol=0)
        assert "prebuilt" in library.identity()
    finally:
        for cached in (library._prebuilt_index, library._prebuilt, library._load):
            cached.cache_clear()
        registry.forget()


@pytest.mark.skipif(bool(registry.probe("cpu", "cpu")), reason="no CPU kernels here")
def test_calls_of_a_known_kind_do_not_look_for_the_library_again(monkeypatch):
    outs, lses = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    q, new, cache = torch.randn(1, 1, 4, 8), torch.randn(1, 2, 8), torch.zeros(2, 4, 2, 8)
    calls = (lambda: portattn.merge_states(outs, lses, backend="cpu"), lambda: portattn.attention(q, q, q, backend="cpu"),
             lambda: portattn.cache_append(new, new, cache, cache.clone(), torch.tensor([1]), backend="cpu"))
    for call in calls:
        call()
    monkeypatch.setattr(library, "library", lambda: pytest.fail("looked for"))
    for call in calls:
        call()
