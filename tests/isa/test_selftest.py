"""warp.h's self-test kernel as the compilers made it, executed for every architecture: shuffles, reductions, ballots, conversions."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from portattn import selftest
from portattn.instances import GFX, Instance

from . import program


@pytest.mark.parametrize("order", [program.FORWARD, program.RANDOM])
@pytest.mark.parametrize("arch", GFX)
def test_every_primitive_keeps_its_contract_in_the_finished_object(arch, order):
    if reason := program.missing(arch):
        pytest.skip(reason)
    made, x = program.program(arch, Instance("selftest", ())), selftest.words()
    out = np.full((len(selftest.expected(x, made.wave)), selftest.THREADS), 0xDEADBEEF, dtype=np.uint32)
    made.run(struct.pack("<QQ", x.ctypes.data, out.ctypes.data), (1, 1), [(x.ctypes.data, x.nbytes), (out.ctypes.data, out.nbytes)], order, 5)
    assert selftest.faults(out, x, made.wave) == []
