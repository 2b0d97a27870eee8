"""Launches finished objects on CPU tensors, packed by the same code as on a GPU."""

from __future__ import annotations

from portattn import instances, native
from portattn.instances import limits_of
from portattn.problem import Call
from tests.simt import host

from . import program


def memory(tensors) -> list[tuple[int, int]]:
    """(address, bytes) of the tensors' storages: all that a launch may touch."""
    return [(s.data_ptr(), s.nbytes()) for s in (x.untyped_storage() for x in tensors)]


def attention(arch: str, call: Call, *, grid: int, tiles: bool = False, order: int = program.FORWARD, seed: int = 0, lines: int | None = None):
    """(out, lse, what was counted in the last launch) of the shipped decode instance as `grid` workers; `tiles`: and of the prefill instance."""
    dim = native.head_dim_of(call.q.shape[-1], call.v.shape[-1])
    chosen = {s.instance.kernel: s.instance for s in (choose(str(call.q.dtype)[6:], str(call.k.dtype)[6:], dim, limits_of(arch))
                                                      for choose in (instances.decode_shape, instances.staged_prefill_shape))}
    options = {name: int(value) for i in chosen.values() for name, value in i.options if value.isdigit()}
    p = host.prepare(call, grid=grid, lines=lines, tile=(options["PA_M"], options["PA_N"]) if tiles else None, waves=options["PA_WAVES"], stages=1)
    for kernel, _, where in p.launches:
        stats = program.program(arch, chosen[kernel]).run(p.packed, where, memory(p.tensors), order, seed)
    return *p.results(), stats
