"""8-bit caches are widened exactly: every code of every format, by the instructions of the devices that have them and by bit patterns
elsewhere, against the formats' definitions (OCP's specification of 8-bit floats; AMD's fnuz: no infinity, no negative zero, one NaN)."""

from __future__ import annotations

import functools
import struct

import numpy as np
import pytest

from portattn.instances import GFX
from tests.hip import objects

from . import program

FORMATS = {"e4m3fn": (3, 7), "e5m2": (2, 15), "e4m3fnuz": (3, 8), "e5m2fnuz": (2, 16)}  # bits of the mantissa, bias
NATIVE = {"gfx942": ("e4m3fnuz", "e5m2fnuz"), **dict.fromkeys(("gfx950", "gfx1200", "gfx1201"), ("e4m3fn", "e5m2"))}


def meaning(name: str, code: int) -> float:
    mantissa_bits, bias = FORMATS[name]
    sign, rest = -1.0 if code >> 7 else 1.0, code & 0x7F
    exponent, mantissa = rest >> mantissa_bits, rest & (1 << mantissa_bits) - 1
    if name.endswith("fnuz"):
        if code == 0x80:
            return float("nan")
    elif name == "e4m3fn":
        if rest == 0x7F:
            return float("nan")
    elif exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("widen")

    @functools.lru_cache(maxsize=None)
    def make(arch: str, name: str) -> program.Program:
        if reason := program.missing(arch):
            pytest.skip(reason)
        file = folder / f"{name}.{arch}.hsaco"
        objects.build.compile(arch, str(program.HERE / "widen.hip"), str(file), [f"-DPA_C={name}"])
        return program.Program(arch, file)

    return make


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", GFX)
def test_every_code_becomes_what_its_format_says(made, arch, name):
    out = np.full((64, 4), 0xDEADBEEF, dtype=np.uint32)
    made(arch, name).run(struct.pack("<Q", out.ctypes.data), (1, 1), [(out.ctypes.data, out.nbytes)])
    want = np.array([meaning(name, code) for code in range(256)], dtype=np.float32)
    halves = np.ascontiguousarray(out[:, :2]).view(np.float16).ravel().astype(np.float32)
    brains = (np.ascontiguousarray(out[:, 2:]).view(np.uint16).ravel().astype(np.uint32) << 16).view(np.float32)
    for got in (halves, brains):
        same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
        assert same.all(), [(hex(code), got[code], want[code]) for code in np.flatnonzero(~same)]


def test_the_formats_reach_what_is_known_of_them():
    largest = {name: max(x for x in (meaning(name, c) for c in range(256)) if x == x and x != float("inf")) for name in FORMATS}
    assert largest == {"e4m3fn": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "e5m2fnuz": 57344.0}
    assert [np.isnan([meaning(name, c) for c in range(256)]).sum() for name in FORMATS] == [2, 6, 1, 1]
    assert np.signbit(meaning("e4m3fn", 0x80)) and meaning("e5m2", 0xFC) == -float("inf") and meaning("e4m3fnuz", 1) == 2.0**-10


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arch", GFX)
def test_devices_that_have_the_conversion_use_it(made, arch, name):
    short = "fp8" if name.startswith("e4m3") else "bf8"
    used = [t.name for t in made(arch, name).texts if t.name.startswith("v_cvt_pk_f32_")]
    assert bool(used) == (name in NATIVE.get(arch, ())) and all(u.startswith(f"v_cvt_pk_f32_{short}") for u in used)
