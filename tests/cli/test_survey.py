"""Looking at a machine: torch with made-up GPUs, drivers by their files, packages that break at import."""

import os
import site
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from portattn import device as device_module
from portattn import survey
from portattn.survey import Package


@pytest.fixture
def fake_gpus(monkeypatch):
    """Puts GPUs into torch: a list of properties, for which torch.cuda answers."""
    def install(*props, hip=None, free=None):
        monkeypatch.setattr(torch.version, "hip", hip, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(props))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: props[i])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free, 0) if free else 1 / 0)
        device_module._facts.cache_clear()

    yield install
    device_module._facts.cache_clear()


def props(**more):
    return SimpleNamespace(**{"name": "GPU", "major": 9, "minor": 0, "total_memory": 80 << 30, **more})


def test_devices_of_a_mixed_box_with_a_mig_slice(fake_gpus):
    fake_gpus(props(name="NVIDIA H200 MIG 1g.18gb", uuid="aa", total_memory=16 << 30), props(major=12), free=1 << 30)
    cpu, first, second = survey.look_devices()
    assert cpu.kind == "cpu"
    assert (first.device, first.kind, first.arch, first.memory, first.free, first.mig) == (
        "cuda:0",
        "cuda",
        "sm_90",
        16 << 30,
        1 << 30,
        True,
    )
    assert (second.device, second.arch, second.mig) == ("cuda:1", "sm_120", False)


def test_a_rocm_device_is_named_by_its_gfx_and_never_by_its_numbers(fake_gpus):
    fake_gpus(props(gcnArchName="gfx90a:sramecc+:xnack-"), hip="7.2")  # gfx90a says (9, 0), as sm_90 does
    assert survey.look_devices()[1][:3] == ("cuda:0", "hip", "gfx90a")


def test_memory_that_cannot_be_asked_for_is_left_out(fake_gpus):
    fake_gpus(props())  # mem_get_info raises
    assert survey.look_devices()[1].free == 0


def test_a_device_that_raises_is_described_as_a_problem(fake_gpus, monkeypatch):
    fake_gpus(props())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: (_ for _ in ()).throw(RuntimeError("ECC error")))
    assert survey.look_devices()[1].problem == "RuntimeError: ECC error"


@pytest.mark.parametrize("system, files, expected", [
    ("linux", [], (False, False, False)),
    ("linux", ["/dev/nvidiactl", "/proc/driver/nvidia/version"], (True, True, False)),
    ("linux", ["/proc/driver/nvidia/version"], (True, False, False)),  # a container without --gpus
    ("linux", ["/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1"], (True, True, False)),
    ("linux", ["/dev/dxg"], (False, False, False)),  # WSL without an NVIDIA driver
    ("linux", ["/dev/kfd"], (False, False, True)),
])
def test_drivers_by_their_files(system, files, expected):
    found = survey.drivers(system, lambda path: path in files)
    assert (found["nvidia_driver"], found["nvidia_device"], found["amd_device"]) == expected


def test_drivers_on_windows_by_their_libraries():
    found = survey.drivers("windows", lambda path: path.endswith(("nvcuda.dll", "amdhip64_7.dll")))
    assert found == dict(nvidia_driver=True, nvidia_device=True, amd_device=True)


def install(folder, name, body, version="1.0"):
    """A package with metadata, as pip would leave it."""
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n")


def test_a_package_is_imported_in_a_child_and_its_error_is_kept(tmp_path, monkeypatch):
    install(tmp_path, "breaks_at_import", "raise KeyError('Unknown GPU architecture: gfx1151')", "0.1.5")
    install(tmp_path, "works", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    packages = {
        "broken": (("breaks_at_import",), "import breaks_at_import"),
        "well": (("works",), "import works"),
        "absent": (("no-such-package",), "import x"),
    }
    found = survey.Imports(packages).wait()
    assert found["broken"] == Package("0.1.5", ("cp311-cp311-linux_x86_64",), "KeyError: 'Unknown GPU architecture: gfx1151'")
    assert found["well"].error == ""
    assert "absent" not in found
    assert "breaks_at_import" not in sys.modules and "works" not in sys.modules


def test_a_package_that_hangs_or_crashes_at_import_is_only_a_line(tmp_path, monkeypatch):
    install(tmp_path, "hangs", "import time; time.sleep(60)")
    install(tmp_path, "crashes", "import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = survey.Imports({name: ((name,), f"import {name}") for name in ("hangs", "crashes")}).wait(limit_s=1.0)
    assert found["hangs"].error == "still importing after 1 s"
    assert found["crashes"].error.startswith(("ended with code", "Fatal Python error"))


def test_looking_survives_every_question_that_raises(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no")

    for name in ("is_available", "is_initialized", "get_arch_list", "device_count"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(survey.importlib.metadata, "requires", refuse)
    world = survey.look()
    assert world.torch == torch.__version__
    assert [d.kind for d in world.devices] == ["cpu"]


def test_what_torch_says_without_a_gpu_is_kept_were_it_no_word(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for raised, said in ((AssertionError(), "AssertionError"), (RuntimeError("no driver\nmore"), "no driver")):
        monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(raised))
        assert survey.look(survey.Imports({})).cuda_error == said


@pytest.mark.parametrize("installed", [False, True])
def test_a_child_finds_this_portattn_and_the_standard_library_before_site_packages(monkeypatch, installed):
    root = os.path.dirname(os.path.dirname(os.path.realpath(survey.__file__)))
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setattr(site, "getsitepackages", lambda: [root] if installed else [])
    assert survey.child_environment() == {**os.environ, "PYTHONPATH": "mine" if installed else f"{root}{os.pathsep}mine"}
