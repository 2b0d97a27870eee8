"""What include/portattn/selftest.h must find: the contract of warp.h, written as shared-memory code in Python.

`expected(words, wave)` gives every row by name; `faults` compares them with what a device wrote. Integers and shuffles
must agree exactly; sums of floats to a butterfly's rounding, which is computed in the butterfly's order.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .native import Device

THREADS = 128


def words(seed: int = 0) -> np.ndarray:
    """A word a thread: floats of moderate size, some NaN and infinities, every bit pattern of the low half."""
    g = np.random.default_rng(seed)
    x = (g.standard_normal(THREADS) * 10.0 ** g.integers(-3, 4, THREADS)).astype(np.float32)
    x[[5, 40, 77]] = np.nan
    x[[9, 70]] = [np.inf, -np.inf]
    return x.view(np.uint32)


def expected(x: np.ndarray, wave: int) -> list[tuple[str, np.ndarray]]:
    """(name, 32-bit words) of every row, in the kernel's order."""
    f, t = x.view(np.float32), np.arange(THREADS)
    lane = t % 32
    rows: list[tuple[str, np.ndarray]] = [("lane", lane), ("wave_lane", t % wave), ("wave_index", t // wave)]

    def butterfly(values, w, combine):
        m = w // 2
        while m:
            values = combine(values, values[t ^ m])
            m //= 2
        return values

    with np.errstate(invalid="ignore", over="ignore"):
        for w in (2, 4, 8, 16, 32):
            g = t // w * w
            m = 1
            while m < w:
                rows.append((f"shfl_xor<{w}>({m})", x[t ^ m]))
                m *= 2
            rows += [
                (f"shfl_xor<{w}>({w - 1})", x[t ^ (w - 1)]), (f"shfl_idx<{w}>(0)", x[g]), (f"shfl_idx<{w}>(x)", x[g + (x & 63) % w]),
                (f"shfl_down<{w}>(1)", x[np.where(t % w + 1 < w, t + 1, t)]), (f"shfl_down<{w}>({w // 2})", x[np.where(t % w + w // 2 < w, t + w // 2, t)]),
                (f"shfl_up<{w}>(1)", x[np.where(t % w >= 1, t - 1, t)]), (f"shfl_up<{w}>({w // 2})", x[np.where(t % w >= w // 2, t - w // 2, t)]),
                (f"reduce_sum<{w}>", butterfly(f, w, np.add)), (f"reduce_sum<{w}> of ints", butterfly((x & 0xFFFF).astype(np.int64), w, np.add)),
                (f"reduce_max<{w}>", butterfly(f, w, np.fmax)),
            ]
        groups = t.reshape(-1, 32)
        bits = lambda b: np.repeat((b.reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1), 32)
        odd = (x & 1).astype(bool)
        one = ((x & 7) == 7) & (t // 32 == 1)
        rows += [("ballot", bits(odd)), ("any", np.repeat(odd.reshape(-1, 32).any(1), 32)), ("all", np.repeat(odd.reshape(-1, 32).all(1), 32)),
                 ("any in one warp", np.repeat(one.reshape(-1, 32).any(1), 32)), ("wave_any", np.repeat(one.reshape(-1, wave).any(1), wave))]
        sums = np.repeat((x & 255).reshape(-1, 32).sum(1), 32)
        alone = x[groups[:, ::-1].ravel()].astype(np.uint64) + bits((x & 2).astype(bool)) + sums
        rows += [("one warp of a wave alone", np.where(t // 32 % 2 == 0, alone, 0) & 0xFFFFFFFF), ("sync", x[t ^ 1]),
                 ("wave_sync", (t ^ (wave - 1)).astype(np.float32))]
        half = lambda v: v.astype(np.float16).view(np.uint16).astype(np.uint32)
        rows += [("pack2<f16>", half(f) | half(-f) << 16), ("pack2<bf16>", _bf16(f) | _bf16(-f) << 16),
                 ("to_float(f16)", (x & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)), ("to_float(bf16)", (x << 16).astype(np.uint32).view(np.float32))]
    return [(name, v.view(np.uint32) if v.dtype == np.float32 else (v.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)) for name, v in rows]


def _bf16(f: np.ndarray) -> np.ndarray:
    x = f.view(np.uint32)
    rounded = ((x.astype(np.uint64) + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint32)
    return np.where(np.isnan(f), x >> 16 | 0x40, rounded).astype(np.uint32)


def faults(got: np.ndarray, x: np.ndarray, wave: int) -> list[str]:
    """What a device's rows (words, (rows, 128)) do not agree with; [] where all is well. NaN agrees with NaN."""
    found = []
    for (name, want), have in zip(expected(x, wave), got, strict=True):
        wrong = have != want
        if name.startswith(("reduce_sum<", "reduce_max", "to_float", "sync")) and not name.endswith("ints"):
            wrong &= ~(np.isnan(have.view(np.float32)) & np.isnan(want.view(np.float32)))
        if name.startswith("pack2"):
            nan = 0x7C00 if "f16>" in name and "bf16" not in name else 0x7F80
            both = [((v & 0x7FFF) > nan) for v in (have, want)]
            wrong &= ~(both[0] & both[1])
        if wrong.any():
            i = int(wrong.argmax())
            found.append(f"{name}: thread {i} has {have[i]:#010x}, wants {want[i]:#010x}; {int(wrong.sum())} threads differ")
    return found


def on_device(device: Device) -> list[str]:
    """Runs the kernel on a GPU, on torch's current stream; what it found wrong, [] where all is well.

    Raises KernelError where the kernel cannot be had or launched.
    """
    import ctypes

    import torch

    from .instances import Instance

    x = words()
    with torch.cuda.device(device.index):
        given = torch.from_numpy(x.view(np.int32)).to(device.device)
        out = torch.zeros(len(expected(x, device.limits.wave)), THREADS, dtype=torch.int32, device=device.device)
        packed = bytearray(struct.pack("<QQ", given.data_ptr(), out.data_ptr()))
        stream = torch.cuda.current_stream().cuda_stream
        device.function(Instance("selftest", ()), 0).launch((1, 1), THREADS, stream, (ctypes.c_char * len(packed)).from_buffer(packed), "self-test of warp.h")
        got = out.cpu().numpy().view(np.uint32)
    return faults(got, x, device.limits.wave)


__all__ = ["THREADS", "expected", "faults", "on_device", "words"]
