"""warp.h of each vendor against its contract: the same kernel as on a device, by way of the host device."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from portattn import selftest

from . import host

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")

TARGETS = {"cuda": (32, 0), "gfx9": (64, 9), "gfx11": (32, 11), "gfx12": (32, 12)}


def run(target: str, x: np.ndarray, order: int = host.FORWARD) -> np.ndarray:
    wave, gfx = TARGETS[target]
    rows = len(selftest.expected(x, wave))
    out = np.full((rows, selftest.THREADS), 0xDEADBEEF, dtype=np.uint32)
    library = host.build("selftest", wave, gfx)
    host.run(library, "portattn_simt_selftest", struct.pack("<QQ", x.ctypes.data, out.ctypes.data), (1, 1), order, seed=3)
    return out


@pytest.mark.parametrize("order", [host.FORWARD, host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("target", TARGETS)
def test_every_primitive_keeps_its_contract(target, order):
    x = selftest.words()
    assert selftest.faults(run(target, x, order), x, TARGETS[target][0]) == []


def test_a_wrong_lane_is_found():
    x = selftest.words()
    rows = run("cuda", x)
    names = [name for name, _ in selftest.expected(x, 32)]
    row = names.index("shfl_xor<16>(8)")
    rows[row, 3], rows[row, 4] = rows[row, 4], rows[row, 3]
    assert [f.split(":")[0] for f in selftest.faults(rows, x, 32)] == ["shfl_xor<16>(8)"]
    assert ctypes.sizeof(ctypes.c_void_p) == 8


def test_waves_of_64_and_32_differ_where_they_should():
    x = selftest.words()
    differ = {a for (a, v), (_, w) in zip(selftest.expected(x, 32), selftest.expected(x, 64)) if (v != w).any()}
    assert differ == {"wave_lane", "wave_index", "wave_any", "wave_sync"}
