"""A wheel, an editable install, an sdist and a bare checkout hold the same package, and nothing else reaches the top level."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import pathlib, sys
import portattn, portattn.backends
from portattn import manifest
folder = pathlib.Path(list(portattn.backends.__path__)[0])
assert "sdpa" in {f.parent.name for f in folder.glob("*/backend.yaml")}, folder
assert manifest.load(folder / "sdpa").name == "sdpa"
import torch
q = torch.ones(1, 2, 1, 4)
assert torch.equal(portattn.attention(q, q, q, causal=True), q)
print(pathlib.Path(portattn.__file__).parent, folder, sep="\\n")
"""


def python(*arguments, cwd, path=None):
    """Runs this Python away from the checkout; with path, these folders come before its packages and no .pth file is
    followed, so that an editable install in the environment that runs the tests cannot stand in for what is tested."""
    env = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    if path is not None:
        arguments = ("-S", *arguments)
        env["PYTHONPATH"] = os.pathsep.join([*map(str, path), *(p for p in sys.path if p.endswith("-packages"))])
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(*arguments, cwd):
    pytest.importorskip("scikit_build_core", reason="builds need scikit-build-core: pip install scikit-build-core")
    return python("-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, cwd=cwd)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A copy of the tracked files, so that a build sees what a clone has and the checkout stays clean."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: its tracked files cannot be listed")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def unpacked(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_bare_checkout_imports_and_computes(tmp_path):
    package, backends = python("-c", PROBE, cwd=tmp_path, path=[ROOT]).split()
    assert Path(package) == ROOT / "portattn" and Path(backends) == ROOT / "backends"


def test_importing_backends_by_itself_says_what_to_import(tmp_path):
    code = "try:\n import backends\nexcept ImportError as e:\n print(e)"
    assert "import portattn.backends" in python("-c", code, cwd=tmp_path, path=[ROOT])


def test_version_is_stated_once():
    import portattn

    stated = re.search(r'__version__ = "(.+)"', (ROOT / "portattn" / "version.py").read_text(encoding="utf-8"))[1]
    assert portattn.__version__ == stated


@pytest.mark.build
def test_wheel_is_pure_and_holds_one_top_level_package(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"portattn"}
    assert "portattn/backends/__init__.py" in names and "portattn/backends/sdpa/backend.yaml" in names
    assert "portattn/backends.py" not in names, "the checkout's stand-in would shadow the package"


@pytest.mark.build
def test_wheel_holds_every_file_of_the_package(source, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"portattn/{f.relative_to(source / 'portattn').as_posix()}" for f in (source / "portattn").rglob("*") if f.is_file()
    }
    wanted |= {
        f"portattn/backends/{f.relative_to(source / 'backends').as_posix()}"
        for f in (source / "backends").rglob("*")
        if f.is_file()
    }
    wanted |= {f"portattn/{vendor}/{f.name}" for vendor in ("csrc_cuda", "csrc_hip") for f in (source / vendor).iterdir()}
    assert wanted - names == {"portattn/backends.py"}


@pytest.mark.build
def test_wheel_imports_and_computes(wheel, tmp_path):
    site = unpacked(wheel, tmp_path / "site")
    package, backends = python("-c", PROBE, cwd=tmp_path, path=[site]).split()
    assert Path(package) == site / "portattn" and Path(backends) == site / "portattn" / "backends"


@pytest.mark.build
def test_wheel_brings_the_command(wheel, tmp_path):
    site = unpacked(wheel, tmp_path / "site")
    (entry,) = site.glob("*.dist-info/entry_points.txt")
    assert "portattn = portattn.cli:main" in entry.read_text(encoding="utf-8")
    assert "demo" in python("-m", "portattn", "--help", cwd=tmp_path, path=[site])


@pytest.mark.build
def test_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    pytest.importorskip("scikit_build_core", reason="builds need scikit-build-core: pip install scikit-build-core")
    build = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
    sdist = tmp_path / python("-c", build, tmp_path, cwd=source).split()[-1]
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path, sdist, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    contents = [
        {n: zipfile.ZipFile(w).read(n) for n in zipfile.ZipFile(w).namelist() if not n.endswith("RECORD")} for w in (wheel, again)
    ]
    assert contents[0] == contents[1]


@pytest.mark.build
def test_editable_install_finds_backends_added_later(source, tmp_path):
    site = tmp_path / "site"
    pip("install", "--no-build-isolation", "--no-deps", "--no-index", "--target", site, "-e", source, cwd=tmp_path)
    late = source / "backends" / "late"
    late.mkdir()
    (late / "__init__.py").write_text("found = True\n")
    code = f"import site; site.addsitedir({str(site)!r})\n" + PROBE + "import portattn.backends.late as late; assert late.found"
    try:
        package, backends = python("-c", code, cwd=tmp_path, path=[site]).split()
    finally:
        (late / "__init__.py").unlink()
        late.rmdir()
    assert Path(package) == source / "portattn" and Path(backends) == source / "backends"
