"""Known faults of torch and its devices: which versions they touch, and the guard that keeps us clear of each.

Data first; `active` says which rows hold for a device and a torch version, and the functions below it are the guards
that decide by them. Guards that are simply the way the code is written say so. Sources: reports to torch and to its
users, and the operators found in its wheels. Nothing of the MPS rows was run on a Mac by us.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from portattn.device import vendor

Version = tuple[int, int]
ALWAYS: Version = (99, 0)


class Hole(NamedTuple):
    """One fault: `since` is the first torch version that has it, `until` the first that has not."""

    id: str
    device: str
    since: Version
    until: Version
    what: str
    guard: str


NO_FUSED_MPS = "SDPA is not used on MPS: the tiled path computes scores itself, in float32"
HOLES = (
    # --- Apple
    Hole(
        "mps-causal-leak",
        "mps",
        (2, 4),
        ALWAYS,
        "16-bit is_causal lets three of four queries see future keys, silently (seen in 2.10)",
        NO_FUSED_MPS,
    ),
    Hole(
        "mps-decode-q-stride",
        "mps",
        (2, 8),
        (2, 9),
        "decode kernels take q for contiguous: wrong for transposed views",
        NO_FUSED_MPS,
    ),
    Hole(
        "mps-decode-batch-stride",
        "mps",
        (2, 8),
        (2, 12),
        "decode kernels ignore the batch stride of permuted views",
        NO_FUSED_MPS,
    ),
    Hole(
        "mps-decode-gqa",
        "mps",
        (2, 8),
        (2, 11),
        "the two-pass decode kernel reads out of bounds with grouped heads and 1024 keys",
        NO_FUSED_MPS,
    ),
    Hole("mps-bool-mask", "mps", (2, 8), (2, 12), "bool mask strides are bound in the wrong order", NO_FUSED_MPS),
    Hole(
        "mps-mask-batch",
        "mps",
        (2, 8),
        (2, 13),
        "a mask that differs by batch and is broadcast over heads is read wrong",
        NO_FUSED_MPS,
    ),
    Hole("mps-value-dim", "mps", (2, 5), (2, 12), "Dv != D gives an output of q's width, or garbage", NO_FUSED_MPS),
    Hole("mps-broadcast-heads", "mps", (2, 5), ALWAYS, "k and v broadcast over heads or batch give wrong values", NO_FUSED_MPS),
    Hole("mps-causal-and-mask", "mps", (2, 5), (2, 13), "is_causal with a mask aborts the process", NO_FUSED_MPS),
    Hole("mps-masked-rows-nan", "mps", (2, 5), (2, 10), "rows with every key masked are NaN", NO_FUSED_MPS),
    Hole("mps-16bit-softmax", "mps", (2, 5), ALWAYS, "softmax over 16-bit scores loses 2 % at 14,000 keys", NO_FUSED_MPS),
    Hole("mps-prefill-macos26", "mps", (2, 13), ALWAYS, "prefill kernels scrambled P V on macOS 26", NO_FUSED_MPS),
    Hole(
        "mps-big-scores",
        "mps",
        (2, 4),
        ALWAYS,
        "matmul results over 2**32 elements or buffers over 2**32 bytes are wrong or abort",
        "tiles of at most 2**29 scores",
    ),
    Hole(
        "mps-graph-cache",
        "mps",
        (2, 8),
        ALWAYS,
        "one cached graph a shape: memory grows with the number of lengths met",
        "lengths on the device: tile shapes depend on the caller's bounds, not on the lengths",
    ),
    Hole("mps-index-copy", "mps", (2, 4), (2, 8), "index_copy has no kernel", "index_put_ in its place"),
    Hole("mps-isneginf", "mps", (2, 4), (2, 6), "isneginf has no kernel", "comparison with -inf in its place"),
    Hole("mps-rsub", "mps", (2, 4), (2, 8), "rsub.Tensor has no kernel", "sub in its place"),
    Hole(
        "mps-float8",
        "mps",
        (2, 4),
        ALWAYS,
        "no 8-bit float dtype, not even as storage",
        "the manifest declares 8-bit caches for other devices only",
    ),
    Hole("mps-float64", "mps", (2, 4), ALWAYS, "no float64", "float32 everywhere"),
    Hole("mps-bf16-macos13", "mps", (2, 4), (2, 9), "bfloat16 needs macOS 14", "probe declines MPS on older systems"),
    # --- Intel
    Hole(
        "xpu-big-scores",
        "xpu",
        (2, 6),
        ALWAYS,
        "float32 score tensors over 2**30 elements hang the GPU",
        "tiles of at most 2**30 scores",
    ),
    Hole(
        "xpu-fused",
        "xpu",
        (2, 6),
        ALWAYS,
        "SDPA goes to oneDNN or to the O(N**2) MATH kernel by rules that differ by version",
        "SDPA is not used on XPU",
    ),
    # --- CPU
    Hole(
        "cpu-empty-crash",
        "cpu",
        (2, 4),
        ALWAYS,
        "the flash operator dies of SIGFPE at Sq = 0 or Sk = 0",
        "empty lengths never reach it",
    ),
    Hole(
        "cpu-empty-lse",
        "cpu",
        (2, 4),
        ALWAYS,
        "the flash operator gives lse 0, not -inf, for rows without keys",
        "no masked row reaches it",
    ),
    Hole(
        "cpu-masked-nan",
        "cpu",
        (2, 4),
        ALWAYS,
        "a mask does not hide NaN: NaN in a masked value makes the row NaN",
        "only visible keys are passed",
    ),
    Hole(
        "cpu-top-left",
        "cpu",
        (2, 4),
        ALWAYS,
        "is_causal is top-left: wrong wherever Sq != Sk, Sq = 1 included",
        "is_causal only if Sq == Sk",
    ),
    Hole(
        "cpu-fp16",
        "cpu",
        (2, 4),
        ALWAYS,
        "fp16 products run at 1 to 3 GFLOP/s, SDPA's included",
        "fp16 is computed in float32, never by SDPA",
    ),
    Hole(
        "cpu-value-dim",
        "cpu",
        (2, 4),
        ALWAYS,
        "Dv != D falls to the MATH kernel with its O(N**2) scores",
        "SDPA only for Dv == D",
    ),
    Hole(
        "cpu-nan-query",
        "cpu",
        (2, 4),
        (2, 7),
        "a NaN query gives zeros (fixed in a version that the report does not name)",
        "no SDPA on CPU below 2.7",
    ),
    Hole(
        "cpu-nan-few-keys",
        "cpu",
        (2, 4),
        ALWAYS,
        "with fewer keys than a vector holds floats, rows whose scores are NaN give zeros (seen in 2.13)",
        "SDPA only for at least `least_keys()` keys",
    ),
    Hole(
        "cpu-amx-nan-rows",
        "cpu",
        (2, 4),
        ALWAYS,
        "bf16 products on AMX: a NaN row of the left operand turns the row before it NaN, for some inner lengths (seen in 2.13)",
        "rows without keys and NaN rows are cleared before the product, and the latter NaN again after it",
    ),
    # --- NVIDIA and AMD
    Hole(
        "cudnn-gqa-sm100",
        "cuda",
        (2, 4),
        ALWAYS,
        "cuDNN's SDPA is wrong on sm_100 with fewer than 8 key heads (2.11, 2.13)",
        "the flash operator is called by name, never cuDNN",
    ),
    Hole(
        "cuda-math",
        "cuda",
        (2, 4),
        ALWAYS,
        "what no fused kernel takes goes to MATH, with O(N**2) scores",
        "the flash operator is called by name, and only for what it takes",
    ),
    Hole(
        "cuda-int32-mask",
        "cuda",
        (2, 4),
        ALWAYS,
        "masks with more than 2**31 elements are read at wrong offsets",
        "no mask is passed to SDPA",
    ),
    Hole("cuda-top-left", "cuda", (2, 4), ALWAYS, "SDPA's is_causal is top-left", "is_causal only if Sq == Sk"),
    Hole(
        "cuda-empty-lse", "cuda", (2, 4), ALWAYS, "flash gives lse +inf for rows without keys", "no row without keys reaches it"
    ),
    Hole(
        "cuda-negative-scale",
        "cuda",
        (2, 4),
        ALWAYS,
        "flash takes the maximum before it scales: NaN for a negative scale (seen in 2.11 on sm_90)",
        "flash only for a positive scale",
    ),
    Hole(
        "cuda-misaligned",
        "cuda",
        (2, 4),
        ALWAYS,
        "flash reads 16 bytes at a time: other strides or addresses are a misaligned access (seen in 2.11)",
        "flash only for addresses and strides of whole 16 bytes, looked at in each call",
    ),
    Hole(
        "hip-experimental",
        "hip",
        (2, 4),
        ALWAYS,
        "flash on RDNA is experimental: small causal shapes crash",
        "flash only on gfx90a, gfx942, gfx950",
    ),
)


def kind(device: torch.device) -> str:
    """The device's name here; every decision of this backend asks for it, so that a test can pretend another device."""
    return vendor(device.type)


@functools.lru_cache(maxsize=None)
def release(text: str = torch.__version__) -> Version:
    """(major, minor) of a torch version string."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(ch for ch in minor if ch.isdigit()))


def active(device: str, version: Version | None = None) -> dict[str, Hole]:
    """The holes of a kind of device in a version of torch, by id."""
    version = version or release()
    return {hole.id: hole for hole in HOLES if hole.device == device and hole.since <= version < hole.until}


def score_limit(device: str, version: Version | None = None) -> int:
    """The largest number of scores that one tensor may hold."""
    found = active(device, version)
    if "mps-big-scores" in found:
        return 1 << 29
    return 1 << 30 if "xpu-big-scores" in found else 1 << 31


@functools.lru_cache(maxsize=None)
def least_keys(capability: str = "") -> int:
    """How many keys SDPA must be given on CPU for NaN to stay NaN: the floats of a vector, or 16 where that is unknown."""
    capability = capability or torch.backends.cpu.get_cpu_capability()
    return 8 if capability == "AVX2" else 16


# What kills SDPA for everything on a device, while it is active.
_NO_SDPA = frozenset(h.id for h in HOLES if h.guard in (NO_FUSED_MPS, "SDPA is not used on XPU", "no SDPA on CPU below 2.7"))


def no_sdpa(device: str, arch: str = "", version: Version | None = None) -> str:
    """Why SDPA must not be used at all on a device, or ""."""
    found = active(device, version)
    for hole in found.values():
        if hole.id in _NO_SDPA:
            return f"{hole.id}: {hole.what}"
    if "hip-experimental" in found and arch not in ("gfx90a", "gfx942", "gfx950"):
        return f"hip-experimental: {found['hip-experimental'].what}"
    return "" if device in ("cpu", "cuda", "hip") else "SDPA's kernels on this device are unknown"


__all__ = ["HOLES", "Hole", "active", "kind", "least_keys", "no_sdpa", "release", "score_limit"]
