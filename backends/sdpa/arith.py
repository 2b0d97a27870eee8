"""Products: the dtype in which matmuls run on a device, and float32 that stays float32 whatever the global flags say.

Facts behind the choices (torch 2.13): fp16 GEMMs on CPU run at 1 to 3 GFLOP/s everywhere, bf16 ones as well where the
processor lacks bf16 instructions, so both are computed in float32 there. Only CUDA and HIP give a float32 result for
16-bit operands (`bmm` with out_dtype, torch 2.8), which fp16 scores need: they overflow at 65504.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from portattn.processor import cpu_arch

from . import holes


def _said(owner: object, name: str) -> bool:
    ask = getattr(owner, name, None)
    try:
        return bool(ask and ask())
    except RuntimeError:
        return False


@functools.lru_cache(maxsize=None)
def cpu_has_amx() -> bool:
    """Whether this processor has AMX's tile multiplication."""
    return cpu_arch() == "x86_64" and _said(torch.cpu, "_is_amx_tile_supported")


@functools.lru_cache(maxsize=None)
def cpu_has_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices faster than float32 ones: AVX512-BF16, AMX, or Arm's BF16 extension."""
    if cpu_arch() == "x86_64":
        return _said(torch.cpu, "_is_avx512_bf16_supported") or cpu_has_amx()
    return _said(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")


def score_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype that q and k are multiplied in: their own only where products are not rounded to it, which large scores do not bear."""
    return torch.float32 if holes.kind(device) == "cpu" else work_dtype(device, dtype)


def work_dtype(device: torch.device, dtype: torch.dtype, lse: bool = False) -> torch.dtype:
    """The dtype that probabilities and values are multiplied in; with an `lse` wanted, by which parts are merged, as exact as it is."""
    kind = holes.kind(device)
    if kind == "cpu":  # where products of bf16 are rounded to it
        return dtype if dtype == torch.bfloat16 and cpu_has_bf16() and not lse else torch.float32
    return dtype if kind in ("cuda", "hip") and holes.release() >= (2, 8) else torch.float32


_precision = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.9: the older getters raise where both APIs were used


@functools.lru_cache(maxsize=None)
def tf32_forced() -> bool:
    """Whether cuBLAS is told from outside to use TF32 whatever torch asks for; it reads the variable once, too."""
    return os.environ.get("NVIDIA_TF32_OVERRIDE", "").strip() == "1"


def reduced(kind: str) -> bool:
    """Whether torch's global flags, or NVIDIA's variable, let float32 matmuls on this kind of device use TF32 or bf16."""
    if kind == "cuda" and tf32_forced():
        return True
    try:
        if _precision is not None:
            return _precision("mkldnn" if kind in ("cpu", "xpu") else "cuda", "matmul") not in ("ieee", "none")
        return torch.get_float32_matmul_precision() != "highest" or (
            kind in ("cuda", "hip") and torch.backends.cuda.matmul.allow_tf32
        )
    except RuntimeError:
        return True


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of (U, M, K) and (U, K, N) with a float32 result, exact to float32's own rounding for float32 operands.

    Where a flag allows TF32, float32 operands are split in two parts of 11 significant bits and three products added up:
    their error is about 2**-21. The flag itself is left alone, since other threads read it too.
    """
    kind = holes.kind(a.device)
    if a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32) if kind in ("cuda", "hip") else torch.bmm(a, b).float()
    if kind == "mps" or not reduced(kind):
        return torch.bmm(a, b)
    if kind == "cpu":
        return torch.bmm(a.double(), b.double()).float()
    return split_product(a, b)


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as one product of three times the inner length, on operands that TF32 holds (but for the last 2 bits)."""
    a_high, b_high = _top_bits(a), _top_bits(b)
    return torch.bmm(torch.cat([a_high, a_high, a - a_high], -1), torch.cat([b_high, b - b_high, b_high], -2))


def _top_bits(x: Tensor) -> Tensor:
    """x with 11 significant bits, what TF32 keeps, by truncation. (The rest of an infinity is NaN: its scores are NaN.)"""
    return x.contiguous().view(torch.int32).bitwise_and(-8192).view(torch.float32)
