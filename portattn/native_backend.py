"""What the adapters of the native kernels share: the entry points of a backend, over a function from device index to Device."""

from __future__ import annotations

from typing import Callable

import torch

from . import codeobjects, dialect, native
from .driver import driver


class NativeBackend:
    """The functions that an adapter exports: `attention`, `cache_append`, `merge_states`, `notes`, `identity`, `selftest`.

    Args:
        vendor: "cuda" or "hip". device: torch's device index -> native.Device, remembered by the caller.
    """

    def __init__(self, vendor: str, device: Callable[[int], native.Device]):
        self.vendor, self.device = vendor, device
        self._tested: dict[int, tuple[str, ...]] = {}

    def attention(self, call, bound):
        run = bound.state.get("run")
        if run is None:
            run = _nothing if _is_nothing(call) else native.Attention(self.device(call.q.device.index), call, bound.problem)
            bound.state["run"] = run
            if bound.verbatim and getattr(run, "taken_directly", False):
                bound.direct = run.direct
        return run(call)

    def cache_append(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound) -> None:
        run = bound.state.get("run")
        if run is None:
            values = native.append_values(k, v, k_cache, v_cache, k_scale, v_scale, slots=slot_mapping)
            problem = bound.problem
            run = bound.state["run"] = native.Append(self.device(k.device.index), (k, v, k_cache, v_cache), values, problem.dtype, problem.kv_dtype, str(problem))
        run(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)

    def merge_states(self, outs, lses, sinks, bound):
        run = bound.state.get("run")
        if run is None:
            run = bound.state["run"] = native.Merge(self.device(outs.device.index), outs, lses, sinks, str(bound.problem))
        return run(outs, lses, sinks)

    def notes(self, call, bound) -> tuple[str, ...]:
        problem = bound.problem
        dim = native.head_dim_of(problem.head_dim, problem.head_dim_v)
        shape = native.kernel_of(call, problem, self.device(call.q.device.index).limits)
        said = [f"kernel {shape.instance}, {shape.threads} threads, {shape.shared} bytes of shared memory"]
        if (problem.head_dim, problem.head_dim_v) != (dim, dim):
            said.append(f"computes at head_dim {dim}: the rest is zeros, in shared memory only")
        return tuple(said)

    def selftest(self, device) -> tuple[str, ...]:
        """What the self-test of warp.h's primitives finds wrong on a device; once a process. It needs NumPy, which calls do not."""
        try:
            from . import selftest
        except ImportError as exc:
            codeobjects.note("selftest", f"the self-test of warp.h was left out: {exc}", "pip install numpy")
            return ()
        if device.index not in self._tested:
            self._tested[device.index] = tuple(selftest.on_device(self.device(device.index)))
        return self._tested[device.index]

    def identity(self) -> str:
        """What a verdict depends on: the kernels' sources and the driver."""
        return f"{codeobjects.source_hash(self.vendor)} driver {driver(self.vendor).version()}"


def _is_nothing(call) -> bool:
    """Whether every row is one of no sequence, a graph's padding: there is nothing to compute, and nothing to append."""
    return call.cu_seqlens_q is not None and (call.cu_seqlens_q.shape[0] == 1 or call.max_seqlen_q == 0)


def _nothing(call):
    """Results whose rows are all unspecified."""
    out = call.q.new_empty((*call.q.shape[:-1], call.v.shape[-1])) if call.out is None else call.out
    return (out, torch.empty(dialect.lse_shape(call), dtype=torch.float32, device=out.device)) if call.return_lse else out


__all__ = ["NativeBackend"]
