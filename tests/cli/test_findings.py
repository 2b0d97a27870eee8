"""Every known trouble of a machine, put before its detector as facts: no GPU, no broken wheel is needed here."""

import pathlib
import re

import pytest

from portattn import config, findings
from portattn.findings import examine
from portattn.survey import Device, Package, World

SM = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = Device("cuda:0", "cuda", "sm_90", "NVIDIA H200", 141 << 30, uuid="11aa")
CUDA = dict(
    torch="2.13.0+cu130", cuda="13.0", arch_list=SM, nvidia_driver=True, nvidia_device=True, devices=(Device("cpu", "cpu"), H200)
)
MI300 = Device("cuda:0", "hip", "gfx942", "AMD Instinct MI300X")
ROCM = dict(
    torch="2.13.0+rocm7.2",
    hip="7.2",
    arch_list=("gfx90a", "gfx942", "gfx1100"),
    amd_device=True,
    devices=(Device("cpu", "cpu"), MI300),
)
CPU = dict(torch="2.13.0+cpu", devices=(Device("cpu", "cpu"),))
ABI = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"


def gpu(base: dict, arch: str, **more) -> dict:
    card = base["devices"][1]._replace(arch=arch, **more)
    return {**base, "devices": (base["devices"][0], card)}


TROUBLES = {  # name: (facts, code, words of the text, words of the fix)
    "old torch": ({**CPU, "torch": "2.5.1"}, "torch-old", "older than 2.6", "pip install -U torch"),
    "CPU torch, NVIDIA driver": ({**CPU, "nvidia_driver": True, "nvidia_device": True},
        "torch-build", "CPU build", "CUDA build of torch"),
    "CPU torch, AMD GPU": ({**CPU, "amd_device": True}, "torch-build", "AMD GPU", "ROCm build"),
    "ROCm torch, NVIDIA driver": ({**ROCM, "nvidia_driver": True}, "torch-build", "ROCm 7.2 build", "CUDA build"),
    "container without its GPUs": ({**CUDA, "devices": CPU["devices"], "nvidia_device": False},
        "gpu-unreachable", "device file", "--gpus all"),
    "driver too old": ({**CUDA, "devices": CPU["devices"], "cuda_error": "The NVIDIA driver on your system is too old"},
        "gpu-unreachable", "too old", "nvidia-smi"),
    "no right to /dev/kfd": ({**ROCM, "devices": CPU["devices"]}, "gpu-unreachable", "/dev/kfd", "render"),
    "all GPUs hidden": ({**CUDA, "devices": CPU["devices"], "env": {"CUDA_VISIBLE_DEVICES": ""}},
        "hidden", "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    "a variable that names no GPU of this machine": ({**CUDA, "devices": CPU["devices"], "env": {"CUDA_VISIBLE_DEVICES": "7"}},
        "gpu-unreachable", "CUDA_VISIBLE_DEVICES='7' may name none", "unset CUDA_VISIBLE_DEVICES"),
    "AMD's variable beside an unreachable NVIDIA GPU": ({**CUDA, "devices": CPU["devices"], "env": {"HIP_VISIBLE_DEVICES": ""}},
        "gpu-unreachable", "no reason given", "nvidia-smi"),
    "all AMD GPUs hidden": ({**ROCM, "devices": CPU["devices"], "env": {"ROCR_VISIBLE_DEVICES": "-1"}},
        "hidden", "ROCR_VISIBLE_DEVICES='-1' hides every GPU", "unset ROCR_VISIBLE_DEVICES"),
    "TF32 forced from outside": ({**CUDA, "env": {"NVIDIA_TF32_OVERRIDE": "1"}}, "override", "TF32", "unset NVIDIA_TF32_OVERRIDE"),
    "a GPU that cannot be described": ({**CUDA, "devices": (Device("cuda:0", "cuda", problem="RuntimeError: sick"),)},
        "device", "sick", ""),
    "wheel without sm_70": (gpu(CUDA, "sm_70", name="Tesla V100"),
        "arch", "no code for cuda:0 (Tesla V100, sm_70)", "CUDA 12 build"),
    "wheel without gfx1151": (gpu(ROCM, "gfx1151"), "arch", "gfx1151", "lists gfx1151"),
    "mixed box": ({**CUDA, "devices": (H200, H200._replace(device="cuda:1", arch="sm_120"))},
        "mixed", "cuda:0 sm_90, cuda:1 sm_120", "PCI_BUS_ID"),
    "MIG by name": (gpu(CUDA, "sm_90", name="NVIDIA H200 MIG 1g.18gb"), "mig", "MIG slice", ""),
    "MIG by uuid": (gpu(CUDA, "sm_90", uuid="MIG-fe59bfcd-3946-5d58-a00e-183ee397373b"), "mig", "one slice", ""),
    "visible devices changed too late": ({**CUDA, "initialized": True, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}},
        "not-in-force", "sees 1 GPUs", "before the process starts"),
    "visible devices name another GPU": ({**CUDA, "initialized": True, "env": {"CUDA_VISIBLE_DEVICES": "GPU-99"}},
        "not-in-force", "not in force", ""),
    "visible devices perhaps too late": ({**CUDA, "initialized": True, "start_env": {}, "env": {"CUDA_VISIBLE_DEVICES": "1"}},
        "maybe-not-in-force", "is '1' now", ""),
    "HIP and CUDA variables disagree": ({**ROCM, "env": {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}},
        "visible-conflict", "HIP_VISIBLE_DEVICES=1", "only"),
    "GPUs chosen twice": ({**ROCM, "env": {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}},
        "visible-twice", "HIP_VISIBLE_DEVICES=1 counts among those that ROCR_VISIBLE_DEVICES=1 leaves", "HIP_VISIBLE_DEVICES only"),
    "visible devices unset too late": ({**CUDA, "initialized": True, "start_env": {"CUDA_VISIBLE_DEVICES": "0"}, "env": {}},
        "maybe-not-in-force", "was '0' when the process started and is unset now", "before the process starts"),
    "ROCm's variable unset too late": ({**ROCM, "initialized": True, "start_env": {"ROCR_VISIBLE_DEVICES": "0"}, "env": {}},
        "maybe-not-in-force", "ROCR_VISIBLE_DEVICES was '0'", "before the process starts"),
    "wheel for servers on a Jetson": (gpu(CUDA, "sm_87", name="Orin"), "arch", "no code for cuda:0 (Orin, sm_87)", "lists sm_87"),
    "experimental AOTriton": ({**ROCM, "env": {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}},
        "override", "small causal", "unset"),
    "gfx override": ({**ROCM, "env": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}, "override", "another architecture", "unset"),
    "MPS fallback": ({**CPU, "devices": (Device("mps", "mps"),), "env": {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}},
        "override", "run on the CPU", "unset"),
    "Triton interpreted": ({**CPU, "env": {"TRITON_INTERPRET": "1"}}, "override", "bfloat16", "unset"),
    "fork after threads": ({**CPU, "threads": 2, "start_method": "fork"}, "fork", "hangs", "spawn"),
    "misspelt variable": ({**CPU, "env": {"PORTATTN_BACKENDS": "sdpa"}}, "variable", "did you mean PORTATTN_BACKEND?", "unset"),
    "broken triton": ({**CUDA, "triton_pin": "3.7.1", "packages": {"triton": Package("3.2.0", error="no AttrsDescriptor")}},
                      "triton-broken", "AttrsDescriptor", "triton==3.7.1"),
    "triton of another torch": ({**CUDA, "triton_pin": "3.7.1", "packages": {"triton": Package("3.9.0", error="")}},
        "triton-version", "newer than the 3.7.1", "3.7.1"),
    "flash-attn 1": ({**CUDA, "packages": {"flash_attn": Package("1.0.9", error="ImportError: flash_attn_varlen_func")}},
        "flash-attn-old", "too old", "-U"),
    "flash-attn of another torch": ({**CUDA, "packages": {"flash_attn": Package("2.8.3", ("cp311-cp311-linux_x86_64",), ABI)}},
                                    "flash-attn-abi", "cp311-cp311-linux_x86_64", "--no-build-isolation"),
    "only flash_attn.cute": ({**CUDA, "packages": {"flash_attn_4": Package("4.0.0")}},
        "flash-attn-4", "flash_attn.cute", "pip install flash-attn"),
    "CK flash-attn on RDNA": ({**gpu(ROCM, "gfx1100"), "packages": {"flash_attn": Package("2.8.3", error="")}},
        "flash-attn-flavour", "gfx1100", "=TRUE"),
    "CK flash-attn on RDNA, told in small letters": (
        {**gpu(ROCM, "gfx1100"), "packages": {"flash_attn": Package("2.8.3", error="")}, "env": {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "true"}},
        "flash-attn-flavour", "gfx1100", "=TRUE"),
    "flash-attn that raises": ({**CUDA, "packages": {"flash_attn": Package("2.8.3", error="RuntimeError: no")}},
        "flash-attn-broken", "RuntimeError: no", ""),
    "aiter on an unknown gfx": ({**ROCM, "packages": {"aiter": Package("0.1.5", error="KeyError: 'Unknown GPU: gfx1151'")}},
        "aiter-broken", "gfx1151", ""),
    "xformers of another torch": ({**CUDA, "packages": {"xformers": Package("0.0.30", error="ImportError: undefined symbol: x")}},
        "xformers-broken", "ABI mismatch", ""),
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
    "H200": {
        **CUDA,
        "initialized": True,
        "start_env": {},
        "triton_pin": "3.7.1",
        "packages": {"triton": Package("3.7.1", error=""), "flash_attn": Package("2.8.3", error=""), "vllm": Package("0.32.0")},
    },
    "H200 beside a processor with AMD graphics": {**CUDA, "amd_device": True},
    "MI300X": {**ROCM, "env": {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}},
    "RDNA with the Triton flavour": {
        **gpu(ROCM, "gfx1100"),
        "env": {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"},
        "packages": {"flash_attn": Package("2.8.3", error="")},
    },
    "visible devices as at the start": {
        **CUDA,
        "initialized": True,
        "env": {"CUDA_VISIBLE_DEVICES": "GPU-11aa"},
        "start_env": {"CUDA_VISIBLE_DEVICES": "GPU-11aa"},
    },
    "a MIG slice named at the start": {
        **CUDA,
        "initialized": True,
        "env": {"CUDA_VISIBLE_DEVICES": "MIG-GPU-22bb/1/0"},
        "start_env": {"CUDA_VISIBLE_DEVICES": "MIG-GPU-22bb/1/0"},
    },
    "more devices named at the start than there are": {
        **CUDA,
        "initialized": True,
        "env": {"CUDA_VISIBLE_DEVICES": "0,9"},
        "start_env": {"CUDA_VISIBLE_DEVICES": "0,9"},
    },
    "visible devices set before torch's start": {
        **CUDA,
        "initialized": False,
        "env": {"CUDA_VISIBLE_DEVICES": "3"},
        "start_env": {},
    },
    "HIP and CUDA variables that agree but for a space": {**ROCM, "env": {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0, 1"}},
    "another vendor's variable, unset": {**CUDA, "initialized": True, "start_env": {"HIP_VISIBLE_DEVICES": "0"}, "env": {}},
    "variables of portattn": {**CPU, "env": {"PORTATTN_CHECK": "1", "PORTATTN_BACKEND": "sdpa", "PORTATTN_TEST_BACKEND": "cpu"}},
    "another vendor's variables": {
        **CPU,
        "env": {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1", "PYTORCH_ENABLE_MPS_FALLBACK": "1"},
    },
    "variables that say no": {**CPU, "env": {"TRITON_INTERPRET": "off"}},
    "the Triton of this torch, in other words": {**CUDA, "triton_pin": "3.8", "packages": {"triton": Package("3.8.0", error="")}},
    "threads and spawn": {**CPU, "threads": 8, "start_method": "spawn"},
    "nothing known": {},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_gives_no_finding(name):
    assert examine(World(**HEALTHY[name])) == []


def test_a_variable_unlike_every_other_gets_no_guess():
    assert [f.text for f in examine(World(**{**CPU, "env": {"PORTATTN_FOO": "1"}}))] == ["PORTATTN_FOO is no variable of portattn"]


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
    ("sm_87", ("sm_80", "sm_86"), False),  # a Jetson
    ("sm_89", ("sm_87",), False),
    ("sm_87", ("compute_80",), True),
    ("sm_101", ("sm_100", "sm_100f"), False),
    ("gfx942", ("gfx90a", "gfx942"), True),
    ("gfx1151", ("gfx1100",), False),
    ("gfx1151", ("gfx11-generic",), True),
    ("sm_103", ("sm_100f",), True),  # its family's code
    ("sm_110", ("sm_100f", "compute_100f"), False),
    ("sm_100", ("compute_90a",), False),  # PTX of one architecture
    ("gfx942", ("gfx9-generic",), False),
    ("gfx950", ("gfx9-4-generic",), True),
    ("gfx1030", ("gfx10-3-generic", "gfx10-1-generic"), True),
])
def test_an_architecture_list_serves(arch, listed, served):
    assert findings.has_code(arch, listed) is served


@pytest.mark.parametrize("kind, arch, formats", [
    ("cuda", "sm_75", ()), ("cuda", "sm_80", ("e5m2",)), ("cuda", "sm_89", ("e4m3fn", "e5m2")), ("cuda", "sm_120", ("e4m3fn", "e5m2")),
    ("hip", "gfx90a", ()), ("hip", "gfx942", ("e4m3fnuz", "e5m2fnuz")), ("hip", "gfx950", ("e4m3fn", "e5m2")),
    ("hip", "gfx1201", ("e4m3fn", "e5m2")), ("hip", "gfx1100", ()), ("mps", "", ()), ("cpu", "x86_64", ()),
])
def test_fp8_formats_by_architecture(kind, arch, formats):
    assert findings.fp8_formats(kind, arch) == formats


def test_variables_of_the_repository_are_known_and_those_known_are_in_use():
    root = pathlib.Path(__file__).resolve().parents[2]
    sources = [path for folder in ("tests", "cmake", "tools") for path in (root / folder).rglob("*.py")]
    read = r'environ(?:\.get\(|\[)"(PORTATTN_(?!TEST_)\w+)"'
    used = {name for path in sources for name in re.findall(read, path.read_text(encoding="utf-8"))} - config.VARIABLES.keys()
    assert used == config.DEVELOPMENT.keys()
    assert examine(World(**{**CPU, "env": dict.fromkeys(used, "1")})) == []
