"""Own kernels for AMD GPUs: CDNA 2 and newer (waves of 64, MFMA), RDNA 3 and 4 (waves of 32, WMMA).

The kernels are include/portattn/*.h over csrc_hip; portattn/native.py packs and launches them. Code objects are prebuilt,
or compiled by ROCm's hiprtc at first use. What has been seen to work stands in backend.yaml: compiled and emulated; the
first run on a device records itself (`portattn conformance --backend hip --level full --record`).
"""

from __future__ import annotations

import functools

import torch

from portattn import codeobjects, native
from portattn.capability import Reason
from portattn.device import facts
from portattn.driver import driver
from portattn.errors import KernelError
from portattn.instances import GFX, limits_of
from portattn.native_backend import NativeBackend


def probe(device: torch.device) -> tuple[Reason, ...]:
    arch = facts(device).arch  # gcnArchName without feature suffixes; torch's (major, minor) mean nothing here
    if arch not in GFX:
        return (Reason("arch", "|".join(GFX), arch),)
    try:
        driver("hip")
    except KernelError as exc:
        return (Reason("driver", "ROCm's runtime library", str(exc)),)
    return codeobjects.available("hip", arch)


@functools.lru_cache(maxsize=None)
def _device(index: int) -> native.Device:
    device = torch.device("cuda", index)  # as torch calls it
    arch = facts(device).arch
    return native.Device(driver("hip"), device, arch, limits_of(arch, torch.cuda.get_device_properties(index).multi_processor_count))


DIALECT = True  # the kernels read lengths, and write lse, as the caller says
_kernels = NativeBackend("hip", _device)
attention, cache_append, merge_states = _kernels.attention, _kernels.cache_append, _kernels.merge_states
notes, identity, selftest = _kernels.notes, _kernels.identity, _kernels.selftest
