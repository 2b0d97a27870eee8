"""Facts about a torch device: vendor and architecture, asked of torch once per device.

Torch calls ROCm devices "cuda"; the vendor is decided first, by torch.version.hip, and the compute
capability numbers are never read on HIP (gfx90a says (9, 0) there). No NVML, no driver call of our own:
CUDA's device order, MIG slices and visibility are then always those that torch uses.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
from typing import Callable, ContextManager, NamedTuple, Sequence

import torch
from torch import Tensor

from .processor import cpu_arch

try:
    from torch._C._dynamo.guards import _empty_strided_cuda as _empty_strided  # what torch.compile's code makes its tensors with
except ImportError:
    _empty_strided = None


class Facts(NamedTuple):
    """device: "cpu" | "cuda" | "hip" | "mps" | "xpu" | torch's type; arch: "sm_90", "gfx942", "x86_64", "x86_64_avx512", "x86_64_amx" or ""."""

    device: str
    arch: str
    name: str


def vendor(device_type: str) -> str:
    """The device name used by manifests: torch's type, but "hip" for a ROCm build's "cuda"."""
    if device_type == "cuda" and getattr(torch.version, "hip", None):
        return "hip"
    return device_type


def accelerator() -> torch.device | None:
    """The accelerator that torch finds on this machine, if any."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that makes an uninitialised contiguous tensor; on a GPU, which has to be the current one, a microsecond sooner than
    torch.empty, which parses its arguments, where this torch lets one."""
    if device.type == "cuda" and _empty_strided is not None:
        strides = [math.prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape))]
        return functools.partial(_empty_strided, tuple(shape), tuple(strides), dtype)
    return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)


@functools.lru_cache(maxsize=None)
def _facts(device_type: str, index: int) -> Facts:
    kind = vendor(device_type)
    if kind in ("cuda", "hip"):
        props = torch.cuda.get_device_properties(index)
        if kind == "hip":
            return Facts(kind, (getattr(props, "gcnArchName", None) or "").split(":")[0], props.name)
        return Facts(kind, f"sm_{props.major}{props.minor}", props.name)
    if kind == "cpu":
        wide = ""
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            wide = "_amx" if getattr(torch.cpu, "_is_amx_tile_supported", bool)() else "_avx512"
        return Facts(kind, cpu_arch() + wide, platform.processor() or cpu_arch())
    if kind == "xpu" and hasattr(torch, "xpu"):
        return Facts(kind, "", torch.xpu.get_device_name(index))
    return Facts(kind, "", kind)


def facts(device: torch.device) -> Facts:
    """Facts of a device; touches the device the first time (creates a CUDA context)."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return _facts(device.type, index)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA or HIP device is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def without_autocast(device_type: str) -> ContextManager[None]:
    """Autocast switched off for a type of device: it would turn float32 products into 16-bit ones. Some types have none."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
