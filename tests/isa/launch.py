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


def attention(arch: str, call: Call, *, grid: int, mixed: bool = False, order: int = program.FORWARD, seed: int = 0, lines: int | None = None):
    """(out, lse, what was counted) of the shipped decode or mixed instance, as `grid` workers."""
    dim = native.head_dim_of(call.q.shape[-1], call.v.shape[-1])
    choose = instances.mixed_shape if mixed else instances.decode_shape
    instance = choose(str(call.q.dtype)[6:], str(call.k.dtype)[6:], dim, limits_of(arch)).instance
    options = {name: int(value) for name, value in instance.options if value.isdigit()}
    tile = (options["PA_M"], options["PA_N"]) if mixed else None
    p = host.prepare(call, grid=grid, lines=lines, tile=tile, waves=options["PA_WAVES"], stages=options["PA_STAGES"])
    stats = program.program(arch, instance).run(p.packed, p.grid, memory(p.tensors), order, seed)
    return *p.results(), stats
