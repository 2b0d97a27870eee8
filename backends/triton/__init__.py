"""The Triton backend: one kernel family for NVIDIA and AMD, and for CPU tensors under Triton's interpreter.

kernels.py computes, and hopper.py prefill on sm_90; schedule.py chooses blocks and grids, launch.py compiles and launches,
calls.py binds them to a call.
Importing this module does not import Triton; probe() does, and an absent or broken Triton is a Reason.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from portattn.capability import Reason
from portattn.problem import Call

DIALECT = True  # the kernels read lengths, and write lse, as the caller says
_INTERPRET_FIX = "TRITON_INTERPRET=1 runs the kernels on CPU tensors, slowly"


def probe(device: torch.device) -> tuple[Reason, ...]:
    """() if Triton imports and drives this device; touches it."""
    try:
        import triton.language  # noqa: F401
    except Exception as exc:  # a broken install raises anything
        return (Reason("not_installed", "triton >=3.4", f"{type(exc).__name__}: {exc}", "pip install 'triton>=3.4'"),)
    from .launch import interpreting

    if interpreting():
        from . import kernels

        if not type(kernels.attend).__name__.startswith("Interpreted"):
            return (Reason("device", "TRITON_INTERPRET=1 before the first import of the kernels", "set later",
                           "set it in the environment"),)
        return () if device.type == "cpu" else (Reason("device", "cpu", device.type, "unset TRITON_INTERPRET"),)
    if device.type != "cuda":
        return (Reason("device", "cuda|hip", device.type, _INTERPRET_FIX if device.type == "cpu" else ""),)
    if os.name != "nt" or torch.version.hip is None:
        from portattn.device import facts

        arch = facts(device).arch
        if arch.startswith("sm_") and int("".join(filter(str.isdigit, arch))) < 75:
            return (Reason("arch", "sm_75 or newer", arch),)
        if arch.startswith("gfx") and not arch.startswith(("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")):
            return (Reason("arch", "gfx90a|gfx94x|gfx950|gfx11xx|gfx12xx", arch),)
    from .calls import machine_of, workspace

    machine_of(device)  # raises where Triton's driver cannot serve the device
    workspace(torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)).prepare()
    return ()


def attention(call: Call, bound: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Dense, varlen and paged attention."""
    run = bound.state.get("triton")
    if run is None:
        from .calls import Attention

        run = bound.state["triton"] = Attention(call)
        if bound.verbatim and run.taken_directly:
            bound.direct = run.direct
    return run(call)


def cache_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Any, v_scale: Any,
                 bound: Any) -> None:
    """Writes k and v into the slots of a paged cache."""
    run = bound.state.get("triton")
    if run is None:
        from .calls import Append

        run = bound.state["triton"] = Append(None, (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale))
    more = [slot_mapping, *(s for s in (k_scale, v_scale) if isinstance(s, Tensor))]
    run.here((k, v, k_cache, v_cache), more, k_scale, v_scale)


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None, bound: Any) -> tuple[Tensor, Tensor]:
    """The exact merge of partial results over disjoint keys."""
    run = bound.state.get("triton")
    if run is None:
        from .calls import Merge

        run = bound.state["triton"] = Merge(outs, lses, sinks)
    return run(outs, lses, sinks)


def notes(call: Call, bound: Any) -> tuple[str, ...]:
    """Padding, and the blocks that were chosen once a call has run."""
    from .schedule import head_blocks, pow2

    found = []
    d, dv = call.q.shape[-1], call.v.shape[-1]
    first, second = head_blocks(d)
    if first + second != d:
        found.append(f"head_dim {d} is padded to {first + second} inside the kernel")
    if pow2(dv, 16) != dv:
        found.append(f"head_dim_v {dv} is padded to {pow2(dv, 16)} inside the kernel")
    if call.q.dtype == torch.float32:
        found.append("float32 arithmetic without matrix units")
    run = bound.state.get("triton")
    if run is not None and hasattr(run, "described"):
        mode, tile, split, grid = run.described
        blocks = tile if mode in ("tiles", "hopper") else split if mode == "splits" else (*tile, *split)
        found.append(f"{mode}: blocks {tuple(blocks)}, {grid.total} programs")
        from .calls import hopper_notes

        found += hopper_notes()
    return tuple(found)


def identity() -> str:
    """Triton's version: verdicts of known-answer checks depend on it."""
    import triton

    return f"triton {triton.__version__}"
