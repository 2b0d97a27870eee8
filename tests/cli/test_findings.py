"""Every known trouble of a machine, put before its detector as facts: no GPU, no broken wheel is needed here."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from portattn import device as device_module
from portattn import findings
from portattn.findings import Device, Package, World, examine

SM = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = Device("cuda:0", "cuda", "sm_90", "NVIDIA H200", 141 << 30, uuid="11aa")
CUDA = dict(torch="2.13.0+cu130", cuda="13.0", arch_list=SM, nvidia_driver=True, nvidia_device=True, devices=(Device("cpu", "cpu"), H200))
MI300 = Device("cuda:0", "hip", "gfx942", "AMD Instinct MI300X")
ROCM = dict(torch="2.13.0+rocm7.2", hip="7.2", arch_list=("gfx90a", "gfx942", "gfx1100"), amd_device=True, devices=(Device("cpu", "cpu"), MI300))
CPU = dict(torch="2.13.0+cpu", devices=(Device("cpu", "cpu"),))
ABI = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"


def gpu(base: dict, arch: str, **more) -> dict:
    card = base["devices"][1]._replace(arch=arch, **more)
    return {**base, "devices": (base["devices"][0], card)}


TROUBLES = {  # name: (facts, code, words of the text, words of the fix)
    "old torch": ({**CPU, "torch": "2.5.1"}, "torch-old", "older than 2.6", "pip install -U torch"),
    "CPU torch, NVIDIA driver": ({**CPU, "nvidia_driver": True, "nvidia_device": True}, "torch-build", "CPU build", "CUDA build of torch"),
    "CPU torch, AMD GPU": ({**CPU, "amd_device": True}, "torch-build", "AMD GPU", "ROCm build"),
    "ROCm torch, NVIDIA driver": ({**ROCM, "nvidia_driver": True}, "torch-build", "ROCm 7.2 build", "CUDA build"),
    "container without its GPUs": ({**CUDA, "devices": CPU["devices"], "nvidia_device": False}, "gpu-unreachable", "device file", "--gpus all"),
    "driver too old": ({**CUDA, "devices": CPU["devices"], "cuda_error": "The NVIDIA driver on your system is too old"}, "gpu-unreachable", "too old", "nvidia-smi"),
    "no right to /dev/kfd": ({**ROCM, "devices": CPU["devices"]}, "gpu-unreachable", "/dev/kfd", "render"),
    "all GPUs hidden": ({**CUDA, "devices": CPU["devices"], "env": {"CUDA_VISIBLE_DEVICES": ""}}, "hidden", "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    "a GPU that cannot be described": ({**CUDA, "devices": (Device("cuda:0", "cuda", problem="RuntimeError: sick"),)}, "device", "sick", ""),
    "wheel without sm_70": (gpu(CUDA, "sm_70", name="Tesla V100"), "arch", "no code for cuda:0 (Tesla V100, sm_70)", "CUDA 12 build"),
    "wheel without gfx1151": (gpu(ROCM, "gfx1151"), "arch", "gfx1151", "lists gfx1151"),
    "mixed box": ({**CUDA, "devices": (H200, H200._replace(device="cuda:1", arch="sm_120"))}, "mixed", "cuda:0 sm_90, cuda:1 sm_120", "PCI_BUS_ID"),
    "MIG by name": (gpu(CUDA, "sm_90", name="NVIDIA H200 MIG 1g.18gb"), "mig", "MIG slice", ""),
    "MIG by uuid": (gpu(CUDA, "sm_90", uuid="MIG-fe59bfcd-3946-5d58-a00e-183ee397373b"), "mig", "one slice", ""),
    "visible devices changed too late": ({**CUDA, "initialized": True, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "not-in-force", "sees 1 GPUs", "before the process starts"),
    "visible devices name another GPU": ({**CUDA, "initialized": True, "env": {"CUDA_VISIBLE_DEVICES": "GPU-99"}}, "not-in-force", "not in force", ""),
    "visible devices perhaps too late": ({**CUDA, "initialized": True, "start_env": {}, "env": {"CUDA_VISIBLE_DEVICES": "1"}}, "maybe-not-in-force", "is '1' now", ""),
    "HIP and CUDA variables disagree": ({**ROCM, "env": {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}}, "visible-conflict", "HIP_VISIBLE_DEVICES=1", "only"),
    "experimental AOTriton": ({**ROCM, "env": {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}}, "override", "small causal", "unset"),
    "gfx override": ({**ROCM, "env": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}, "override", "another architecture", "unset"),
    "MPS fallback": ({**CPU, "devices": (Device("mps", "mps"),), "env": {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}}, "override", "run on the CPU", "unset"),
    "Triton interpreted": ({**CPU, "env": {"TRITON_INTERPRET": "1"}}, "override", "bfloat16", "unset"),
    "fork after threads": ({**CPU, "threads": 2, "start_method": "fork"}, "fork", "hangs", "spawn"),
    "misspelt variable": ({**CPU, "env": {"PORTATTN_BACKENDS": "sdpa"}}, "variable", "did you mean PORTATTN_BACKEND?", "unset"),
    "broken triton": ({**CUDA, "triton_pin": "3.7.1", "packages": {"triton": Package("3.2.0", error="ImportError: cannot import name 'AttrsDescriptor'")}},
                      "triton-broken", "AttrsDescriptor", "triton==3.7.1"),
    "triton of another torch": ({**CUDA, "triton_pin": "3.7.1", "packages": {"triton": Package("3.9.0", error="")}}, "triton-version", "newer than the 3.7.1", "3.7.1"),
    "flash-attn 1": ({**CUDA, "packages": {"flash_attn": Package("1.0.9", error="ImportError: flash_attn_varlen_func")}}, "flash-attn-old", "too old", "-U"),
    "flash-attn of another torch": ({**CUDA, "packages": {"flash_attn": Package("2.8.3", ("cp311-cp311-linux_x86_64",), ABI)}},
                                    "flash-attn-abi", "cp311-cp311-linux_x86_64", "--no-build-isolation"),
    "only flash_attn.cute": ({**CUDA, "packages": {"flash_attn_4": Package("4.0.0")}}, "flash-attn-4", "flash_attn.cute", "pip install flash-attn"),
    "CK flash-attn on RDNA": ({**gpu(ROCM, "gfx1100"), "packages": {"flash_attn": Package("2.8.3", error="")}}, "flash-attn-flavour", "gfx1100", "=TRUE"),
    "flash-attn that raises": ({**CUDA, "packages": {"flash_attn": Package("2.8.3", error="RuntimeError: no")}}, "flash-attn-broken", "RuntimeError: no", ""),
    "aiter on an unknown gfx": ({**ROCM, "packages": {"aiter": Package("0.1.5", error="KeyError: 'Unknown GPU architecture: gfx1151'")}}, "aiter-broken", "gfx1151", ""),
    "xformers of another torch": ({**CUDA, "packages": {"xformers": Package("0.0.30", error="ImportError: undefined symbol: x")}}, "xformers-broken", "ABI mismatch", ""),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_is_found_and_nothing_else(name):
    facts, code, words, fix = TROUBLES[name]
    found = examine(World(**facts))
    assert [f.code for f in found] == [code]
    assert words in found[0].text
    assert fix in found[0].fix


HEALTHY = {
    "CPU": CPU,
    "H200": {**CUDA, "initialized": True, "start_env": {}, "triton_pin": "3.7.1",
             "packages": {"triton": Package("3.7.1", error=""), "flash_attn": Package("2.8.3", error=""), "vllm": Package("0.32.0")}},
    "MI300X": {**ROCM, "env": {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}},
    "RDNA with the Triton flavour": {**gpu(ROCM, "gfx1100"), "env": {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}, "packages": {"flash_attn": Package("2.8.3", error="")}},
    "visible devices as at the start": {**CUDA, "initialized": True, "env": {"CUDA_VISIBLE_DEVICES": "GPU-11aa"}, "start_env": {"CUDA_VISIBLE_DEVICES": "GPU-11aa"}},
    "visible devices set before torch's start": {**CUDA, "initialized": False, "env": {"CUDA_VISIBLE_DEVICES": "3"}, "start_env": {}},
    "variables of portattn": {**CPU, "env": {"PORTATTN_CHECK": "1", "PORTATTN_BACKEND": "sdpa"}},
    "another vendor's variables": {**CPU, "env": {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1", "PYTORCH_ENABLE_MPS_FALLBACK": "1"}},
    "threads and spawn": {**CPU, "threads": 8, "start_method": "spawn"},
    "nothing known": {},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_gives_no_finding(name):
    assert examine(World(**HEALTHY[name])) == []


def test_every_detector_has_a_trouble_of_its_own():
    raised = {fn.__name__ for facts, *_ in TROUBLES.values() for fn in findings.DETECTORS if list(fn(World(**facts)))}
    assert raised == {fn.__name__ for fn in findings.DETECTORS}


def test_the_worst_comes_first():
    found = examine(World(**{**gpu(CUDA, "sm_70"), "env": {"PORTATTN_X": "1", "TRITON_INTERPRET": "1"}}))
    assert [f.level for f in found] == ["error", "warning", "note"]


def test_a_detector_that_raises_is_a_note(monkeypatch):
    def trips(world):
        raise KeyError("gfx9999")

    monkeypatch.setattr(findings, "DETECTORS", [trips, *findings.DETECTORS])
    found = examine(World(**{**CPU, "torch": "2.5.0"}))
    assert [f.level for f in found] == ["error", "note"]
    assert "trips" in found[1].text and "gfx9999" in found[1].text


@pytest.mark.parametrize("arch, listed, served", [
    ("sm_90", ("sm_80", "sm_90"), True),
    ("sm_89", ("sm_86",), True),  # same major, older minor
    ("sm_86", ("sm_89",), False),  # newer minor
    ("sm_90", ("sm_80",), False),  # another major
    ("sm_121", ("sm_120",), True),
    ("sm_120", ("sm_100",), False),
    ("sm_90", ("compute_80",), True),  # PTX is compiled by the driver
    ("sm_75", ("compute_80",), False),
    ("sm_90", ("sm_90a",), True),
    ("sm_103", ("sm_100a",), False),  # arch-specific code serves that one only
    ("gfx942", ("gfx90a", "gfx942"), True),
    ("gfx1151", ("gfx1100",), False),
    ("gfx1151", ("gfx11-generic",), True),
])
def test_an_architecture_list_serves(arch, listed, served):
    assert findings.has_code(arch, listed) is served


@pytest.mark.parametrize("kind, arch, formats", [
    ("cuda", "sm_80", ("e5m2",)), ("cuda", "sm_75", ()), ("cuda", "sm_89", ("e4m3fn", "e5m2")), ("cuda", "sm_120", ("e4m3fn", "e5m2")),
    ("hip", "gfx90a", ()), ("hip", "gfx942", ("e4m3fnuz", "e5m2fnuz")), ("hip", "gfx950", ("e4m3fn", "e5m2")), ("hip", "gfx1201", ("e4m3fn", "e5m2")),
    ("hip", "gfx1100", ()), ("mps", "", ()), ("cpu", "x86_64", ()),
])
def test_fp8_formats_by_architecture(kind, arch, formats):
    assert findings.fp8_formats(kind, arch) == formats


# ------------------------------------------------------------------ looking
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
    cpu, first, second = findings.look_devices()
    assert cpu.kind == "cpu"
    assert (first.device, first.kind, first.arch, first.memory, first.free, first.mig) == ("cuda:0", "cuda", "sm_90", 16 << 30, 1 << 30, True)
    assert (second.device, second.arch, second.mig) == ("cuda:1", "sm_120", False)


def test_a_rocm_device_is_named_by_its_gfx_and_never_by_its_numbers(fake_gpus):
    fake_gpus(props(gcnArchName="gfx90a:sramecc+:xnack-"), hip="7.2")  # gfx90a says (9, 0), as sm_90 does
    assert findings.look_devices()[1][:3] == ("cuda:0", "hip", "gfx90a")


def test_memory_that_cannot_be_asked_for_is_left_out(fake_gpus):
    fake_gpus(props())  # mem_get_info raises
    assert findings.look_devices()[1].free == 0


def test_a_device_that_raises_is_described_as_a_problem(fake_gpus, monkeypatch):
    fake_gpus(props())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: (_ for _ in ()).throw(RuntimeError("ECC error")))
    assert findings.look_devices()[1].problem == "RuntimeError: ECC error"


@pytest.mark.parametrize("system, files, expected", [
    ("linux", [], (False, False, False)),
    ("linux", ["/dev/nvidiactl", "/proc/driver/nvidia/version"], (True, True, False)),
    ("linux", ["/proc/driver/nvidia/version"], (True, False, False)),  # a container without --gpus
    ("linux", ["/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1"], (True, True, False)),
    ("linux", ["/dev/dxg"], (False, False, False)),  # WSL without an NVIDIA driver
    ("linux", ["/dev/kfd"], (False, False, True)),
])
def test_drivers_by_their_files(system, files, expected):
    found = findings.drivers(system, lambda path: path in files)
    assert (found["nvidia_driver"], found["nvidia_device"], found["amd_device"]) == expected


def test_drivers_on_windows_by_their_libraries():
    found = findings.drivers("windows", lambda path: path.endswith(("nvcuda.dll", "amdhip64_7.dll")))
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
    packages = {"broken": (("breaks_at_import",), "import breaks_at_import"), "well": (("works",), "import works"), "absent": (("no-such-package",), "import x")}
    found = findings.Imports(packages).wait()
    assert found["broken"] == Package("0.1.5", ("cp311-cp311-linux_x86_64",), "KeyError: 'Unknown GPU architecture: gfx1151'")
    assert found["well"].error == ""
    assert "absent" not in found
    assert "breaks_at_import" not in sys.modules and "works" not in sys.modules


def test_a_package_that_hangs_or_crashes_at_import_is_only_a_line(tmp_path, monkeypatch):
    install(tmp_path, "hangs", "import time; time.sleep(60)")
    install(tmp_path, "crashes", "import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = findings.Imports({name: ((name,), f"import {name}") for name in ("hangs", "crashes")}).wait(limit_s=1.0)
    assert found["hangs"].error == "still importing after 1 s"
    assert found["crashes"].error.startswith(("ended with code", "Fatal Python error"))


def test_looking_survives_every_question_that_raises(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no")

    for name in ("is_available", "is_initialized", "get_arch_list", "device_count"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(findings.importlib.metadata, "requires", refuse)
    world = findings.look()
    assert world.torch == torch.__version__
    assert [d.kind for d in world.devices] == ["cpu"]
