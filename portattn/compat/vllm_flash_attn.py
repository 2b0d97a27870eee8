"""vLLM's variant of flash-attn (vllm.vllm_flash_attn, once the package vllm_flash_attn) on portattn, in its order of parameters.

fa_version, scheduler_metadata, num_splits and deterministic are hints; versions 2, 3 and 4 give the same results here, s_aux
(sinks), alibi_slopes, descales and softcap included. lse is (Hq, Tq), -inf where a row sees no key: vLLM's merging takes it for
all versions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import attention_paged, attention_varlen
from ..dialect import HEADS_FIRST
from ..errors import ArgumentError
from ._translate import refuse, refuse_dropout, window
from .flash_attn_interface import _NO_QV, _descaled, _scaled

__all__ = ["fa_version_unsupported_reason", "flash_attn_varlen_func", "get_scheduler_metadata", "is_fa_version_supported"]

DEFAULT_FA_VERSION = 2
FA2_AVAILABLE, FA2_UNAVAILABLE_REASON = True, None
FA3_AVAILABLE, FA3_UNAVAILABLE_REASON = True, None
FA4_AVAILABLE, FA4_UNAVAILABLE_REASON = True, None


def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size: list[int] | None = None, softcap=0.0,
                           alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
                           return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None, k_descale=None,
                           v_descale=None, num_splits: int = 0, output_scale=None, fa_version: int = DEFAULT_FA_VERSION,
                           s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None,
                           block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None,
                           dynamic_causal: Tensor | None = None, gather_kv_indices: Tensor | None = None,
                           gather_kv_valid_length: Tensor | None = None):
    """q (Tq, Hq, D) over k, v (Tk, Hkv, D) with cu_seqlens_k, or over pages (N, P, Hkv, D) with block_table and seqused_k.

    seqused_k together with cu_seqlens_k, which vLLM allows for version 4 only, are the keys in use of each sequence.
    Returns out (the tensor `out`, if given), or (out, lse (Hq, Tq)). Descales are (B, Hkv).
    """
    if (dropout_p or q_v is not None or return_attn_probs or output_scale is not None or cp_world_size != 1 or cp_rank
            or mask_mod is not None or block_sparse_tensors is not None or aux_tensors is not None or dynamic_causal is not None
            or cp_tot_seqused_k is not None or aux_tensor_leading_dims is not None or gather_kv_indices is not None
            or gather_kv_valid_length is not None):
        _refuse_any(dropout_p, q_v, return_attn_probs, output_scale, cp_world_size, cp_rank, cp_tot_seqused_k, mask_mod,
                    block_sparse_tensors, aux_tensors, aux_tensor_leading_dims, dynamic_causal, gather_kv_indices,
                    gather_kv_valid_length)
    if q_descale is not None:
        q = _scaled(q, q_descale, None, cu_seqlens_q)
    window_size = window(window_size)
    softcap = softcap if softcap > 0 else 0.0
    if block_table is not None:
        if seqused_k is None:
            raise ArgumentError("flash_attn_varlen_func: seqused_k: wanted the lengths of the pages' sequences together with "
                                "block_table, got None")
        if cu_seqlens_k is not None:
            refuse("flash_attn_varlen_func", "cu_seqlens_k", cu_seqlens_k, "wanted None together with block_table: seqused_k "
                   "are the lengths")
        return attention_paged(q, k, v, block_table, seqused_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=int(max_seqlen_q),
                               softmax_scale=softmax_scale, causal=bool(causal), window_size=window_size, softcap=softcap,
                               alibi_slopes=alibi_slopes, sinks=s_aux, k_scale=k_descale, v_scale=v_descale, out=out,
                               return_lse=return_softmax_lse, num_splits=num_splits, _lse=HEADS_FIRST)
    if cu_seqlens_k is None:
        raise ArgumentError("flash_attn_varlen_func: cu_seqlens_k: wanted where each sequence's keys start, as there is no "
                            "block_table, got None")
    if k_descale is not None:
        q = _scaled(q, None, k_descale, cu_seqlens_q)
    got = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), seqused_k=seqused_k,
                           softmax_scale=softmax_scale, causal=bool(causal), window_size=window_size, softcap=softcap,
                           alibi_slopes=alibi_slopes, sinks=s_aux, out=out if v_descale is None else None,
                           return_lse=return_softmax_lse, num_splits=num_splits, _lse=HEADS_FIRST)
    if v_descale is None:
        return got
    got = _descaled(got, return_softmax_lse, v_descale, cu_seqlens_q)
    if out is not None:
        out.copy_(got[0] if return_softmax_lse else got)
        return (out, got[1]) if return_softmax_lse else out
    return got


def _refuse_any(dropout_p, q_v, return_attn_probs, output_scale, cp_world_size, cp_rank, cp_tot_seqused_k, mask_mod,
                block_sparse_tensors, aux_tensors, aux_tensor_leading_dims, dynamic_causal, gather_kv_indices,
                gather_kv_valid_length):
    call = "flash_attn_varlen_func"
    if dropout_p:
        refuse_dropout(call, dropout_p)
    if q_v is not None:
        refuse(call, "q_v", q_v, _NO_QV)
    if return_attn_probs:
        refuse(call, "return_attn_probs", return_attn_probs,
               "wanted False: there are no probabilities to return; return_softmax_lse gives the lse")
    if output_scale is not None:
        refuse(call, "output_scale", output_scale, "wanted None: out is not quantised; scale it after the call")
    for name, value, off in (("cp_world_size", cp_world_size, 1), ("cp_rank", cp_rank, 0),
                             ("cp_tot_seqused_k", cp_tot_seqused_k, None)):
        if value is not off and value != off:
            refuse(call, name, value,
                   f"wanted {off}: keys spread over ranks are attended to rank by rank and merged by merge_states")
    for name, value in (("mask_mod", mask_mod), ("block_sparse_tensors", block_sparse_tensors), ("aux_tensors", aux_tensors),
                        ("aux_tensor_leading_dims", aux_tensor_leading_dims), ("dynamic_causal", dynamic_causal),
                        ("gather_kv_indices", gather_kv_indices), ("gather_kv_valid_length", gather_kv_valid_length)):
        if value is not None:
            refuse(call, name, value, "wanted None: masks are causal, windows and lengths")


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens: Tensor,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
                           page_size: int | None = None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """An empty int32 tensor, as flash_attn_interface's: a hint that changes nothing."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def is_fa_version_supported(fa_version: int, device=None) -> bool:
    """True for 2, 3 and 4: the number is a hint here, and devices are the backends' affair (portattn.explain)."""
    return fa_version in (2, 3, 4)


def fa_version_unsupported_reason(fa_version: int, device=None) -> str | None:
    """None, or why the number is unknown."""
    return None if fa_version in (2, 3, 4) else f"versions are 2, 3 and 4, got {fa_version}"
