"""torch's own fused SDPA: where it is right, and faster than tiles of ours.

Where scores are many, its operators are called by name: the public function may choose MATH, with O(N**2) scores, and
the switch that forbids that is global to the process. holes.py says where SDPA must not be used; the conditions below
are those of its kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import arith, holes

# torch's own binding costs 3 us less than torch.ops.
_cpu_flash = getattr(
    torch._C._VariableFunctions,
    "_scaled_dot_product_flash_attention_for_cpu",
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_cuda_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
# Above this many scores the tiles win on CPU (they copy K and V once, head-major, and mask only corners); below, one call wins.
CPU_SCORES = 1 << 16


def declined(device: str, arch: str, dtype: torch.dtype, dim: int, dim_v: int, plain: bool) -> str:
    """Why the flash operator of a device cannot serve even its plainest problem, or "". `plain`: no softcap, no bias."""
    if reason := holes.no_sdpa(device, arch):
        return reason
    if not plain:
        return "softcap or bias"
    if dim != dim_v:
        return "Dv != D"
    if device == "cpu":
        return "fp16 on CPU" if dtype == torch.float16 else ""
    if dtype == torch.float32:
        return "float32"
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return "flash needs sm_80"
    return "" if dim % 8 == 0 and dim <= 256 else "head_dim not a multiple of 8 up to 256"


def aligned(x: Tensor) -> bool:
    """Whether a GPU's flash kernel may read x: its address and the strides of its axes are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(n == 1 or s * x.element_size() % 16 == 0 for n, s in zip(x.shape[:-1], x.stride()))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, D) and lse (B, Sq, Hq) of (B, S, H, D) tensors on a GPU, neither length 0; `causal` only if Sq == Sk."""
    out, lse = _cuda_flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, False, scale=scale)[:2]
    return out.transpose(1, 2), lse.transpose(1, 2)


def cpu_scores(dtype: torch.dtype) -> int:
    """How many scores SDPA may compute on CPU: few; any number in bf16 with AMX, 1.2 to 1.5 x the tiles (torch 2.11)."""
    if dtype == torch.bfloat16 and arith.cpu_has_amx() and torch.backends.cuda.flash_sdp_enabled():  # that switch is for CPU too
        return 1 << 62
    return CPU_SCORES


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) and lse (B, H, Sq) of (B, H, S, D) tensors on CPU, all keys visible, no length 0."""
    return _cpu_flash(q, k, v, 0.0, False, scale=scale)


def small(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """out (B, Sq, Hq, D) of at most `cpu_scores` scores on CPU. The public function: it alone groups heads in every version."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        0.0,
        causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def decode(q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: Tensor | None, last: int) -> tuple[Tensor, Tensor]:
    """One query token on CPU, its heads folded into rows: q (nb, Hq, D), k and v (nb, n, Hkv, D), all visible.

    Returns out (nb, Hq, D) and lse (nb, Hq). `slopes` (Hq,); the query stands at key `last` of k.
    """
    (nb, hq, dim), heads = q.shape, k.shape[2]
    mask = None
    if slopes is not None:
        far = (torch.arange(k.shape[1], device="cpu") - last).abs_().neg_().float()
        mask = (slopes[:, None] * far).view(1, heads, hq // heads, -1)
    out, lse = _cpu_flash(
        q.view(nb, heads, hq // heads, dim), k.transpose(1, 2), v.transpose(1, 2), 0.0, False, attn_mask=mask, scale=scale
    )
    return out.reshape(nb, hq, dim), lse.reshape(nb, hq)


__all__ = ["CPU_SCORES", "aligned", "cpu_scores", "declined", "decode", "dense", "flash", "small"]
