"""What may be wrong with a machine: one small detector per known trouble.

A detector is a function from a `World` (portattn/survey.py) to Findings. It asks nothing of the machine itself, so that a
test can put it before any: an AMD box, a MIG slice, a broken wheel.
"""

from __future__ import annotations

import difflib
import re
from typing import Callable, Iterable, Iterator, NamedTuple

from . import config
from .registry import version_numbers
from .survey import World

OLDEST_TORCH = (2, 6)
LEVELS = ("error", "warning", "note")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Finding(NamedTuple):
    """One thing to know. level: error (something cannot work) | warning (probably not meant) | note; fix: what mends it."""

    level: str
    code: str
    text: str
    fix: str = ""


Found = Iterator[Finding]
Detector = Callable[[World], Iterable[Finding]]
DETECTORS: list[Detector] = []


def detector(fn: Detector) -> Detector:
    DETECTORS.append(fn)
    return fn


def examine(world: World) -> list[Finding]:
    """Findings of every detector, the worst first. A detector that raises is itself a finding."""
    found: list[Finding] = []
    for fn in DETECTORS:
        try:
            found += fn(world)
        except Exception as exc:
            found.append(Finding("note", "doctor", f"the check {fn.__name__} itself failed: {type(exc).__name__}: {exc}"))
    return worst_first(found)


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: LEVELS.index(f.level))


# ------------------------------------------------------------------ torch and its devices
@detector
def torch_version(w: World) -> Found:
    if w.torch and version_numbers(w.torch)[:2] < OLDEST_TORCH:
        yield Finding("error", "torch-old",
                      f"torch {w.torch} is older than {'.'.join(map(str, OLDEST_TORCH))}",
                      "pip install -U torch")


@detector
def torch_without_the_gpu(w: World) -> Found:
    """A build of torch for another vendor, or for none, beside a GPU. /dev/kfd may be there for a processor's own graphics only:
    beside an NVIDIA driver, a CUDA build is no mistake."""
    build = f"CUDA {w.cuda}" if w.cuda else f"ROCm {w.hip}" if w.hip else "CPU"
    if w.nvidia_driver and not w.cuda:
        yield Finding("warning", "torch-build",
                      f"an NVIDIA driver is here, but torch {w.torch} is a {build} build: the GPU is not used",
                      f"install the CUDA build of torch{': pip install --force-reinstall torch' if w.system == 'linux' else ''}")
    if w.amd_device and not w.hip and not (w.cuda and w.nvidia_driver):
        yield Finding("warning", "torch-build",
                      f"an AMD GPU is here, but torch {w.torch} is a {build} build: the GPU is not used",
                      "install the ROCm build of torch")


@detector
def gpu_out_of_reach(w: World) -> Found:
    """The right build, but torch sees no GPU."""
    if w.gpus or not (w.cuda or w.hip):
        return
    heeded = VISIBLE if w.hip else VISIBLE[:1]
    hidden = next((name for name in heeded if w.env.get(name, "0").strip() in ("", "-1")), "")
    named = next((name for name in heeded if name in w.env), "")
    if hidden:
        yield Finding("note", "hidden", f"{hidden}={w.env[hidden]!r} hides every GPU", f"unset {hidden}")
    elif w.cuda and w.nvidia_driver and not w.nvidia_device:
        yield Finding("warning", "gpu-unreachable",
                      "the NVIDIA driver is loaded, but this system has no GPU device file (a container without its GPUs?)",
                      "start the container with its GPUs (docker run --gpus all)")
    elif named and (w.nvidia_driver if w.cuda else w.amd_device) and not w.cuda_error:
        yield Finding("warning", "gpu-unreachable", f"torch finds no GPU: {named}={w.env[named]!r} may name none that is here",
                      f"unset {named}")
    elif w.cuda and w.nvidia_driver:
        yield Finding("warning", "gpu-unreachable",
                      f"torch finds no GPU though a driver is here: {w.cuda_error or 'no reason given'}",
                      "nvidia-smi; a driver older than torch's CUDA needs an update, or an older CUDA build of torch")
    elif w.hip and w.amd_device:
        yield Finding("warning", "gpu-unreachable",
                      f"torch finds no GPU though /dev/kfd is here: {w.cuda_error or 'no reason given'}",
                      "rocminfo; the user must be in the groups render and video")


@detector
def device_trouble(w: World) -> Found:
    for d in w.devices:
        if d.problem:
            yield Finding("error", "device", f"{d.device}: torch cannot describe it: {d.problem}")


@detector
def arch_without_code(w: World) -> Found:
    """torch's own kernels must exist for the GPU; portattn cannot run where torch.empty does not."""
    for d in w.gpus:
        if d.arch and w.arch_list and not has_code(d.arch, w.arch_list) and "HSA_OVERRIDE_GFX_VERSION" not in w.env:
            old = d.kind == "cuda" and digits(d.arch) < 75
            yield Finding("error", "arch",
                          f"torch {w.torch} has no code for {d.device} ({d.name}, {d.arch}); it has {', '.join(w.arch_list)}",
                          f"install a build of torch that lists {d.arch}{' (a CUDA 12 build)' if old else ''}")


def digits(arch: str) -> int:
    found = re.search(r"\d+", arch)
    return int(found[0]) if found else 0


TEGRA = {53, 62, 72, 87, 101}  # systems on a chip: code for the other GPUs of their major number does not load on them, nor theirs on those
GENERIC = {  # what an AMD target for several architectures serves
    "gfx9-generic": r"gfx90[02469c]", "gfx9-4-generic": r"gfx94\d|gfx950", "gfx10-1-generic": r"gfx101\d",
    "gfx10-3-generic": r"gfx103\d", "gfx11-generic": r"gfx11\d\d", "gfx12-generic": r"gfx12\d\d",
}


def has_code(arch: str, arch_list: Iterable[str]) -> bool:
    """Whether a list such as torch.cuda.get_arch_list() serves an architecture.

    sm_86 runs code of sm_80 (same major, not newer), as sm_103 does of sm_100f, and PTX (compute_NN) of anything not newer;
    sm_90a and compute_90a are only for themselves, as is Tegra's code, which has its own and no other's. A gfx name serves
    itself, a generic one its family.
    """
    if not arch.startswith("sm_"):
        return any(arch == name or re.fullmatch(GENERIC.get(name, "$"), arch) for name in arch_list)
    mine = digits(arch)
    for name in arch_list:
        kind, _, number = name.partition("_")
        theirs = digits(number)
        alike = theirs == mine or theirs // 10 == mine // 10 and not TEGRA & {theirs, mine}
        if number.endswith("a"):
            served = theirs == mine
        else:
            served = theirs <= mine and (alike or kind == "compute" and not number.endswith("f"))
        if kind in ("sm", "compute") and served:
            return True
    return False


def fp8_formats(kind: str, arch: str) -> tuple[str, ...]:
    """The 8-bit float formats that an architecture computes with; others are storage, converted by software."""
    if kind == "cuda":
        sm = digits(arch)
        return ("e4m3fn", "e5m2") if sm >= 89 else ("e5m2",) if sm >= 80 else ()
    if kind == "hip":
        if arch in ("gfx940", "gfx941", "gfx942"):
            return ("e4m3fnuz", "e5m2fnuz")
        return ("e4m3fn", "e5m2") if arch == "gfx950" or arch.startswith("gfx12") else ()
    return ()


@detector
def mixed_box(w: World) -> Found:
    archs = {d.arch for d in w.gpus}
    if len(archs) > 1:
        listed = ", ".join(f"{d.device} {d.arch}" for d in w.gpus)
        by_speed = w.cuda and w.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        yield Finding("note", "mixed",
                      f"GPUs of different kinds: {listed}. Each call chooses by the device of its tensors; nvidia-smi may "
                      "count in another order",
                      "CUDA_DEVICE_ORDER=PCI_BUS_ID gives both the same order" if by_speed else "")


@detector
def mig(w: World) -> Found:
    for d in w.gpus:
        if d.mig:
            yield Finding("note", "mig",
                          f"{d.device} is a MIG slice ({d.name}): a process sees one slice; memory and cores are the slice's")


@detector
def visible_devices_not_in_force(w: World) -> Found:
    """CUDA reads the variable once, at its first use; later changes do nothing until the process ends."""
    name = "HIP_VISIBLE_DEVICES" if w.hip and "HIP_VISIBLE_DEVICES" in w.env else "CUDA_VISIBLE_DEVICES"
    now = w.env.get(name)
    if not w.initialized:
        return
    for heeded in VISIBLE if w.hip else VISIBLE[:1]:
        if w.start_env is not None and heeded in w.start_env and heeded not in w.env:
            yield Finding("note", "maybe-not-in-force",
                          f"{heeded} was {w.start_env[heeded]!r} when the process started and is unset now: "
                          "in force only if it was unset before torch's first use of a GPU",
                          "unset it before the process starts")
    if now is None:
        return
    if w.start_env is not None and w.start_env.get(name) == now:
        return
    wanted = [] if now.strip() in ("", "-1") else [item.strip() for item in now.split(",")]
    uuids = [u for d in w.gpus if d.uuid for u in (d.uuid, f"GPU-{d.uuid}", f"MIG-{d.uuid}")]
    named = [item for item in wanted if item.startswith(("GPU-", "MIG-"))] if uuids else []
    if len(wanted) != len(w.gpus) or not all(any(u.startswith(item) for u in uuids) for item in named):
        yield Finding("warning", "not-in-force",
                      f"{name}={now} is not in force: torch had started before it was set, and sees {len(w.gpus)} GPUs",
                      "set it before the process starts")
    elif w.start_env is not None:
        yield Finding("note", "maybe-not-in-force",
                      f"{name} was {w.start_env.get(name)!r} when the process started and is {now!r} now: "
                      "in force only if it was set before torch's first use of a GPU",
                      "set it before the process starts")


@detector
def visible_devices_conflict(w: World) -> Found:
    if not w.hip:
        return
    given = {n: w.env[n] for n in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if n in w.env}
    if given and w.env.get("ROCR_VISIBLE_DEVICES", ""):
        yield Finding("warning", "visible-twice",
                      f"two variables choose GPUs one after the other: {', '.join(f'{n}={v}' for n, v in given.items())} counts among those "
                      f"that ROCR_VISIBLE_DEVICES={w.env['ROCR_VISIBLE_DEVICES']} leaves",
                      "set HIP_VISIBLE_DEVICES only")
    if len({v.replace(" ", "") for v in given.values()}) > 1:
        yield Finding("warning", "visible-conflict",
                      "two variables disagree on ROCm: " + ", ".join(f"{n}={v}" for n, v in given.items()),
                      "set HIP_VISIBLE_DEVICES only")


OVERRIDES = {  # variable: the kind of machine that it concerns, and what it does
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": ("hip", "torch's SDPA uses kernels that crashed on small causal shapes on RDNA"),
    "HSA_OVERRIDE_GFX_VERSION": ("hip", "the GPU calls itself by another architecture's name, whose kernels may be wrong on it"),
    "NVIDIA_TF32_OVERRIDE": ("cuda", "cuBLAS multiplies float32 in TF32, with 10 bits, whatever torch's own flags say"),
    "PYTORCH_ENABLE_MPS_FALLBACK": ("mps", "operators that MPS lacks run on the CPU, slowly and without a word"),
    "TRITON_INTERPRET": ("any", "Triton kernels are interpreted: slow, and those that are not portattn's are wrong for bfloat16"),
}


@detector
def overrides(w: World) -> Found:
    """Variables of others that change which kernels run."""
    kinds = {"cuda": bool(w.cuda), "hip": bool(w.hip), "mps": any(d.kind == "mps" for d in w.devices), "any": True}
    for name, (kind, text) in OVERRIDES.items():
        if kinds[kind] and w.env.get(name, "0").lower() not in ("", "0", "false", "off", "no"):
            yield Finding("note", "override", f"{name}={w.env[name]}: {text}", f"unset {name}")


@detector
def fork_hazard(w: World) -> Found:
    if w.start_method == "fork" and w.threads > 1:
        yield Finding("note", "fork",
                      f"torch uses {w.threads} threads and multiprocessing forks here: after a parallel call a forked child "
                      "hangs in its first one",
                      "multiprocessing.set_start_method('spawn'), or torch.set_num_threads(1) in the child")


@detector
def variables(w: World) -> Found:
    for name in sorted(w.env):
        known = name in config.VARIABLES or name in config.DEVELOPMENT or name.startswith("PORTATTN_TEST_")
        if name.startswith("PORTATTN_") and not known:
            near = difflib.get_close_matches(name, config.VARIABLES, n=1, cutoff=0.8)  # they all begin alike
            yield Finding("warning", "variable",
                          f"{name} is no variable of portattn" + (f"; did you mean {near[0]}?" if near else ""),
                          f"unset {name}")


# ------------------------------------------------------------------ other packages
@detector
def triton(w: World) -> Found:
    p = w.packages.get("triton")
    if not p:
        return
    if p.error:
        text = f"triton {p.version} is broken beside torch {w.torch}: {p.error}"
        yield Finding("warning", "triton-broken",
                      text,
                      f"pip install 'triton=={w.triton_pin}'" if w.triton_pin else "pip install --force-reinstall triton")
    elif w.triton_pin and version_numbers(p.version) != version_numbers(w.triton_pin):
        way = "newer" if version_numbers(p.version) > version_numbers(w.triton_pin) else "older"
        yield Finding("note", "triton-version",
                      f"triton {p.version} is {way} than the {w.triton_pin} that torch {w.torch} was made with",
                      f"pip install 'triton=={w.triton_pin}'")


@detector
def flash_attn(w: World) -> Found:
    p = w.packages.get("flash_attn")
    rdna = [d for d in w.gpus if re.match(r"gfx1[0-2]", d.arch)]
    if not p:
        if four := w.packages.get("flash_attn_4"):
            yield Finding("note", "flash-attn-4",
                          f"flash-attn-4 {four.version} alone is installed: it has flash_attn.cute, and no flash_attn_func of "
                          "version 2 that engines import",
                          "pip install flash-attn")
        return
    if version_numbers(p.version) < (2,):
        yield Finding("warning", "flash-attn-old",
                      f"flash-attn {p.version} is too old: engines need the names of version 2",
                      "pip install -U flash-attn")
    elif p.error and "undefined symbol" in p.error:
        abi = "C++11" if w.cxx11_abi else "old C++"
        yield Finding("warning", "flash-attn-abi",
                      f"flash-attn {p.version} has an ABI mismatch: its wheel ({', '.join(p.tags) or 'no tags'}) was built "
                      "for another torch than "
                      f"{w.torch} ({abi} ABI, CUDA {w.cuda or 'none'}): {p.error}",
                      "pip install --force-reinstall --no-build-isolation flash-attn")
    elif rdna and w.env.get("FLASH_ATTENTION_TRITON_AMD_ENABLE") != "TRUE":  # the very word
        yield Finding("warning", "flash-attn-flavour",
                      f"flash-attn {p.version} uses its CK kernels, which {rdna[0].arch} cannot run; this GPU needs the "
                      "Triton flavour",
                      "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE, at its installation too")
    elif p.error:
        yield Finding("warning", "flash-attn-broken",
                      f"flash-attn {p.version} does not import: {p.error}",
                      "pip install --force-reinstall --no-build-isolation flash-attn")


@detector
def broken_packages(w: World) -> Found:
    for name in ("aiter", "flashinfer", "xformers"):
        if (p := w.packages.get(name)) and p.error:
            kind = "has an ABI mismatch" if "undefined symbol" in p.error else "does not import"
            yield Finding("note", f"{name}-broken",
                          f"{name} {p.version} {kind} here: {p.error}. portattn does not need it; an engine that imports it "
                          "fails")
