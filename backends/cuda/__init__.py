"""Own CUDA kernels, sm_80 and newer: one code object an instance, prebuilt or compiled by torch's NVRTC at first use.

The kernels are include/portattn/*.h over csrc_cuda; portattn/native.py packs and launches them.
"""

from __future__ import annotations

import functools

import torch

from portattn import codeobjects, native
from portattn.capability import Reason
from portattn.device import facts
from portattn.driver import driver
from portattn.errors import KernelError
from portattn.instances import limits_of
from portattn.native_backend import NativeBackend


def probe(device: torch.device) -> tuple[Reason, ...]:
    found = facts(device)
    number = int(found.arch[3:])
    if number < 80:
        return (Reason("arch", "sm_80 or newer", found.arch),)
    try:
        driver("cuda")
    except KernelError as exc:
        return (Reason("driver", "NVIDIA's driver library", str(exc)),)
    return codeobjects.available("cuda", found.arch)


def builds_hopper(arch: str) -> bool:
    """Whether Hopper's kernels can be had: prebuilt, or from CUDA 12.1's NVRTC or a newer one."""
    if any(name.startswith("prefill_sm90") for name in codeobjects.prebuilt_index("cuda").get(arch, {})):
        return True
    compiler = codeobjects.nvrtc()
    return not isinstance(compiler, Reason) and tuple(map(int, compiler.version.split(".")[:2])) >= (12, 1)


@functools.lru_cache(maxsize=None)
def _device(index: int) -> native.Device:
    device = torch.device("cuda", index)
    props = torch.cuda.get_device_properties(index)
    arch = facts(device).arch
    known = limits_of(arch)  # where torch does not say (before 2.7)
    newest, loaded = builds_hopper(arch), driver("cuda")
    limits = native.Limits(getattr(props, "shared_memory_per_block_optin", known.shared_block),
                           getattr(props, "shared_memory_per_multiprocessor", known.shared_sm), props.multi_processor_count,
                           wgmma=known.wgmma and newest, clusters=known.clusters and newest,
                           overlap=int(arch[3:]) >= 90 and loaded.launch_ex is not None and loaded.version() >= 12030)
    return native.Device(loaded, device, arch, limits)


DIALECT = True  # the kernels read lengths, and write lse, as the caller says
_kernels = NativeBackend("cuda", _device)
attention, cache_append, merge_states = _kernels.attention, _kernels.cache_append, _kernels.merge_states
notes, identity, selftest = _kernels.notes, _kernels.identity, _kernels.selftest
