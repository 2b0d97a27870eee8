"""`make demo` and `make test` set up .venv by themselves; whatever is missing ends in one sentence (tools/dev.py)."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev():
    spec = importlib.util.spec_from_file_location("portattn_dev", ROOT / "tools" / "dev.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path):
    """What the set-up reads of a checkout, without .venv."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("portattn", "backends", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run_setup(clone, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHONPATH"))}
    env |= {"PIP_CONFIG_FILE": os.devnull} | variables
    return subprocess.run(
        [sys.executable, clone / "tools" / "dev.py", "setup"], cwd=clone, env=env, capture_output=True, text=True
    )


RETRY = "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError'\n"
NONE = "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
OTHERS = "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.2.0, 2.2.1)\n"


def test_an_existing_torch_is_found_without_a_home(dev, monkeypatch):
    monkeypatch.setenv("HOME", "/no/such/folder")
    assert dev.existing_torch()[0] == importlib.metadata.version("torch")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (RETRY + NONE, "reached no package index"),
        (NONE + "ERROR: No matching distribution found for torch==2.13.0\n", "reached no package index"),
        (OTHERS + "ERROR: No matching distribution found for torch==2.13.0\n", r"has no torch==2.13.0 for Python 3\.\d+"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "filled up"),
        ("WARNING: something\nERROR: the wheel is broken\n", "pip failed: ERROR: the wheel is broken"),
        ("ERROR: Cannot install a and b\nERROR: ResolutionImpossible: for help visit a page\n", "no versions that fit"),
        ("", "no reason given"),
    ],
)
def test_what_stopped_pip_becomes_one_sentence(dev, words, sentence):
    assert re.search(sentence, dev.diagnose(words)) and "\n" not in dev.diagnose(words)


def test_an_old_python_is_named_with_what_to_do(dev, monkeypatch):
    monkeypatch.setattr(dev.sys, "version_info", (3, 8, 10, "final", 0))
    with pytest.raises(dev.Unmet, match=r"Python 3.10 or newer is needed and .* is 3\.8\.10; .*PYTHON="):
        dev.check_python()


def test_a_python_without_venv_is_named_with_what_to_install(dev, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(dev.Unmet, match="no venv module; install it .*python3-venv"):
        dev.check_python()


def test_a_full_disk_is_found_before_anything_is_installed(dev, monkeypatch):
    monkeypatch.setattr(dev.shutil, "disk_usage", lambda path: type("usage", (), {"free": 1.2e9}))
    with pytest.raises(dev.Unmet, match=r"needs 3 GB of disk and .* has 1\.2 GB free"):
        dev.check_disk("")
    dev.check_disk("existing")


def test_a_folder_that_is_no_environment_is_left_alone(dev, monkeypatch, tmp_path):
    (tmp_path / "precious").write_text("mine")
    monkeypatch.setattr(dev, "VENV", str(tmp_path))
    monkeypatch.setattr(dev, "STAMP", str(tmp_path / "portattn-setup"))
    with pytest.raises(dev.Unmet, match="is in the way"):
        dev.create_venv()
    assert (tmp_path / "precious").read_text() == "mine"


def test_folders_of_any_name_are_shown_to_an_environment_whatever_the_locale(dev, monkeypatch, tmp_path):
    own, other = tmp_path / "own é", tmp_path / "site-packages ü"
    own.mkdir()
    other.mkdir()
    monkeypatch.setattr(dev.subprocess, "call", lambda *_, **__: 0)
    monkeypatch.setattr(dev.subprocess, "check_output", lambda *_, **__: f"{own}\n".encode())
    dev.show_packages_of([str(other)])
    line = (own / "existing-torch.pth").read_bytes().decode("ascii")
    monkeypatch.setattr(sys, "path", [])
    exec(line)
    assert sys.path == [str(other)]


@pytest.mark.parametrize("no, backends", [("", ["cpu", "sdpa"]), ("compiler: need one, have none", ["sdpa"])])
def test_conformance_is_tested_for_the_backends_that_the_machine_has(dev, monkeypatch, capsys, no, backends):
    ran = []
    monkeypatch.setattr(dev, "run", lambda *arguments, **variables: ran.append(arguments) or 0)
    monkeypatch.setattr(dev, "left_out", lambda backend: no)
    assert dev.test([]) == 0
    assert [arguments[4] for arguments in ran if "conformance" in arguments] == backends
    assert ("cpu: left out, compiler: need one, have none" in capsys.readouterr().out) == bool(no)


@pytest.mark.skipif(os.name == "nt", reason="the kernels of cpu are for Linux and macOS")
def test_without_a_compiler_cpu_is_left_out_and_nothing_else(dev, monkeypatch, tmp_path):
    monkeypatch.setattr(dev, "PYTHON", sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert re.match(r"compiler: need a C\+\+ compiler .* fix: install one", dev.left_out("cpu"))
    assert dev.left_out("sdpa") == ""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no make")
def test_make_without_the_named_python_says_so():
    done = subprocess.run(["make", "demo", "PYTHON=/nowhere/python3"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "there is no /nowhere/python3 here" in done.stderr


def test_the_tests_extra_asks_for_no_triton():
    """Builds of torch for CUDA pin the one that fits, those for ROCm bring it under another name in the same folder."""
    extra = re.search(r"^test = \[.*?\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert extra and "triton" not in extra[0]


WHERE = '; sys_platform == "linux" and platform_machine == "x86_64"'


@pytest.mark.parametrize("torch, brings, pin, triton", [
    ("", True, "torch==2.13.0", None),
    ("", False, "torch==2.13.0", "triton==3.9.0" + WHERE),
    ("2.6.0", True, "torch==2.6.0", None),
    ("2.6.0", False, "torch==2.6.0", "triton" + WHERE),
    ("2.13.0+rocm7.2", True, "torch==2.13.0+rocm7.2", None),
])
def test_the_set_up_asks_for_the_chosen_torch_and_for_a_triton_where_that_brings_none(dev, monkeypatch, tmp_path, torch, brings, pin, triton):
    asked = []
    for name, value in {"VENV": str(tmp_path), "STAMP": str(tmp_path / "stamp"), "check_python": lambda: None, "check_disk": lambda torch: None,
                        "create_venv": lambda: None, "pip": lambda *given: asked.append(given), "brings_triton": lambda: brings}.items():
        monkeypatch.setattr(dev, name, value)
    monkeypatch.setenv("TORCH", torch)
    dev.setup()
    assert [line for line in (tmp_path / "constraints.txt").read_text().splitlines() if line.startswith("torch")] == [pin]
    assert sum("-e" in given for given in asked) == 1 and not any("index-url" in x for given in asked for x in given), "indexes are pip's own setting"
    assert [given for given in asked if given[0].startswith("triton")] == ([(triton,)] if triton else [])


def test_a_build_that_the_index_lacks_is_said_to_have_an_index_of_its_own(dev, monkeypatch):
    words = "ERROR: Could not find a version that satisfies the requirement torch (from versions: 2.12.0, 2.13.0)\nERROR: No matching distribution found for torch"
    assert "PIP_EXTRA_INDEX_URL" not in dev.diagnose(words)
    monkeypatch.setenv("TORCH", "2.13.0+rocm7.2")
    assert "rocm7.2" in dev.diagnose(words) and "PIP_EXTRA_INDEX_URL" in dev.diagnose(words)


@pytest.mark.build
def test_without_an_index_the_setup_ends_in_one_sentence(clone):
    done = run_setup(clone, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")  # nothing listens there
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "pip reached no package index" in done.stderr


@pytest.mark.build
def test_an_existing_torch_is_used_and_the_second_run_starts_at_once(clone):
    pytest.importorskip("scikit_build_core", reason="the set-up installs portattn with scikit-build-core, here without a network")
    pytest.importorskip("accelerate", reason="the set-up installs the extra test, here without a network")
    done = run_setup(clone, TORCH="existing", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert "1/3" in done.stdout and "ready after" in done.stdout
    python = clone / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    code = "import torch, portattn; print(torch.__file__); print(portattn.__file__)"
    torch_file, portattn_file = subprocess.check_output([python, "-c", code], cwd=clone.parent, text=True).split()
    import torch

    assert Path(torch_file) == Path(torch.__file__) and Path(portattn_file) == clone / "portattn" / "__init__.py"
    again = run_setup(clone, TORCH="existing", PIP_NO_INDEX="1")
    assert again.returncode == 0 and again.stdout == ""
