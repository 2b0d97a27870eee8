"""FlashInfer's merging and single-request functions on portattn. lse is base 2 there and natural here: s = lse / ln 2.

use_fp16_qk_reduction, use_tensor_cores and backend are hints (scores are always summed in float32, and portattn chooses its own
backend). Rotary and ALiBi modes raise: turn q and k before the call.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .. import api
from ._translate import refuse, wants_gradients

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "single_decode_with_kv_cache", "single_prefill_with_kv_cache"]

_LN2 = math.log(2.0)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """States over disjoint keys: v (T, H, D), s (T, H) base 2 -> (v, s) over their union."""
    out, lse = api.merge_states([v_a, v_b], [s_a.float() * _LN2, s_b.float() * _LN2])
    return out, lse / _LN2


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """v (T, n, H, D), s (T, n, H) base 2 -> (v (T, H, D), s (T, H))."""
    out, lse = api.merge_states(v.transpose(0, 1), s.float().transpose(0, 1) * _LN2)
    return out, lse / _LN2


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """`merge_state` into v and s; rows where mask (T,) is 0 stay as they are."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        keep = mask.bool()
        out, lse = torch.where(keep[:, None, None], out, v), torch.where(keep[:, None], lse, s)
    v.copy_(out)
    s.copy_(lse)


def single_prefill_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None,
                                 scale_v: Tensor | None = None, o_dtype: torch.dtype | None = None,
                                 custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
                                 causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
                                 use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
                                 logits_soft_cap: float | None = None, rope_scale: float | None = None,
                                 rope_theta: float | None = None, backend: str = "auto", return_lse: bool = False,
                                 kv_cache_sf: tuple[Tensor, Tensor] | None = None, k_scale: float | None = None,
                                 v_scale: float | None = None):
    """q (Sq, Hq, D) over k, v (Sk, Hkv, D), or (Hkv, Sk, D) for kv_layout "HND" -> out, or (out, s (Sq, Hq) base 2).

    custom_mask, Sq * Sk elements of which True attends, replaces causal, as in FlashInfer. k_scale and v_scale multiply k and v.
    """
    call = "single_prefill_with_kv_cache"
    for name, value in (("scale_q", scale_q), ("scale_k", scale_k), ("scale_v", scale_v)):
        if value is not None:
            refuse(call, name, value,
                   "wanted None: 8-bit q is not computed; dequantise q, and use attention_paged for 8-bit caches")
    if kv_cache_sf is not None:
        refuse(call, "kv_cache_sf", kv_cache_sf, "wanted None: 4-bit caches are not read; dequantise k and v")
    if packed_custom_mask is not None:
        refuse(call, "packed_custom_mask", packed_custom_mask, "wanted None: pass the mask unpacked, as custom_mask")
    _refuse_positions(call, pos_encoding_mode, rope_scale, rope_theta)
    out, lse = _single(call, q, k, v, kv_layout, causal and custom_mask is None, window_left, logits_soft_cap, sm_scale,
                       (k_scale,), v_scale, custom_mask, o_dtype, return_lse)
    return (out, lse) if return_lse else out


# FlashInfer's other name of it.
single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def single_decode_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
                                use_tensor_cores: bool = False, q_scale: float | None = None, k_scale: float | None = None,
                                v_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
                                sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
                                return_lse: bool = False):
    """q (Hq, D), the last token, over k, v as in `single_prefill_with_kv_cache` -> out (Hq, D), or (out, s (Hq,) base 2)."""
    call = "single_decode_with_kv_cache"
    _refuse_positions(call, pos_encoding_mode, rope_scale, rope_theta)
    out, lse = _single(call, q[None], k, v, kv_layout, True, window_left, logits_soft_cap, sm_scale, (q_scale, k_scale), v_scale,
                       None, None, return_lse)
    return (out[0], lse[0]) if return_lse else out[0]


def _refuse_positions(call: str, mode: str, rope_scale: float | None, rope_theta: float | None) -> None:
    if mode != "NONE":
        refuse(call, "pos_encoding_mode", mode,
               'wanted "NONE": turn q and k before the call, or pass slopes to portattn.attention')
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None:
            refuse(call, name, value, "wanted None, as pos_encoding_mode is NONE")


def _single(call: str, q: Tensor, k: Tensor, v: Tensor, kv_layout: str, causal: bool, left: int, cap: float | None,
            scale: float | None, factors: tuple[float | None, ...], v_scale: float | None, mask: Tensor | None,
            dtype: torch.dtype | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    if kv_layout not in ("NHD", "HND"):
        refuse(call, "kv_layout", kv_layout, 'wanted "NHD" or "HND"')
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if mask is not None:
        if mask.numel() != q.shape[0] * k.shape[0]:
            refuse(call, "custom_mask", mask, f"wanted {q.shape[0]} * {k.shape[0]} elements, a row for each query")
        mask = mask.reshape(q.shape[0], k.shape[0]).bool()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for factor in factors:
        scale = scale if factor is None else scale * factor
    exact = None  # what is multiplied or converted afterwards is not rounded to q's dtype before
    if (v_scale is not None or dtype not in (None, q.dtype)) and not wants_gradients(q, k, v):
        exact = torch.empty(1, *q.shape[:2], v.shape[-1], dtype=torch.float32, device=q.device)
    got = api.attention(q[None], k[None], v[None], causal=causal, window_size=(left if left >= 0 else -1, -1),
                        softmax_scale=scale, softcap=cap if cap and cap > 0 else 0.0, bias=mask, out=exact, return_lse=return_lse)
    out, lse = (got[0][0], got[1][0] / _LN2) if return_lse else (got[0], None)
    out = out if v_scale is None else out.float() * v_scale
    return out.to(dtype or q.dtype), lse
