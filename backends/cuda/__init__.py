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


@functools.lru_cache(maxsize=None)
def _device(index: int) -> native.Device:
    device = torch.device("cuda", index)
    props = torch.cuda.get_device_properties(index)
    arch = facts(device).arch
    known = limits_of(arch)  # where torch does not say (before 2.7)
    limits = native.Limits(getattr(props, "shared_memory_per_block_optin", known.shared_block),
                           getattr(props, "shared_memory_per_multiprocessor", known.shared_sm), props.multi_processor_count)
    return native.Device(driver("cuda"), device, arch, limits)


def attention(call, bound):
    run = bound.state.get("run")
    if run is None:
        run = bound.state["run"] = native.Attention(_device(call.q.device.index), call, bound.problem)
    return run(call)


def cache_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound) -> None:
    run = bound.state.get("run")
    if run is None:
        values = native.append_values(k, v, k_cache, v_cache, k_scale, v_scale, slots=slot_mapping)
        problem = bound.problem
        run = bound.state["run"] = native.Append(_device(k.device.index), values, problem.dtype, problem.kv_dtype, str(problem))
    run(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def merge_states(outs, lses, sinks, bound):
    run = bound.state.get("run")
    if run is None:
        run = bound.state["run"] = native.Merge(_device(outs.device.index), outs, lses, sinks, str(bound.problem))
    return run(outs, lses, sinks)


def notes(call, bound) -> tuple[str, ...]:
    problem = bound.problem
    dim = native.head_dim_of(problem.head_dim, problem.head_dim_v)
    shape = native.attention_shape(call, problem, dim, _device(call.q.device.index).limits)
    said = [f"kernel {shape.instance}, {shape.threads} threads, {shape.shared} bytes of shared memory"]
    if (problem.head_dim, problem.head_dim_v) != (dim, dim):
        said.append(f"computes at head_dim {dim}: the rest is zeros, in shared memory only")
    return tuple(said)


def identity() -> str:
    """What a verdict depends on: the kernels' sources and the driver."""
    return f"{codeobjects.source_hash('cuda')} driver {driver('cuda').version()}"
