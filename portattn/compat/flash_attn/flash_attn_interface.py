"""FlashAttention 2's functions on portattn: same parameters in the same order, same returns.

What differs from portattn and is translated: lse is (B, H, S) or (H, T), and +inf where a row sees no key; cache_seqlens counts
before an append; q's rotary position; softcap <= 0 and negative windows are off. What FlashAttention 2 leaves open or gets wrong
(page sizes that are not multiples of 256, table entries past a length, NaN in unused slots, softcap on AMD) follows portattn's
contract. `deterministic` and `num_splits` are hints: every backend repeats itself bit for bit. Dropout raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...api import _attention, _attention_varlen, attention, attention_paged, attention_varlen
from ...dialect import AFTER, FLASH_ATTN_2, PREFIX_SUMS
from .. import _kvcache, _packed
from .._translate import ANY, ForwardOnly, no_backward, nothing, refuse, refuse_dropout, window

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=ANY, softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False):
    """q (B, Sq, Hq, D), k, v (B, Sk, Hkv, D) -> out, or (out, lse (B, Hq, Sq), an empty tensor: the dropout mask)."""
    if dropout_p:
        refuse_dropout("flash_attn_func", dropout_p)
    got = attention(q, k, v, softmax_scale=softmax_scale, causal=bool(causal),
                    window_size=window_size if window_size is ANY else window(window_size),
                    softcap=softcap if softcap > 0 else 0.0, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
                    _lse=FLASH_ATTN_2)
    return _with_probs(got) if return_attn_probs else got


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=ANY, softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """`flash_attn_func` of qkv (B, S, 3, H, D)."""
    if dropout_p:
        refuse_dropout("flash_attn_qkvpacked_func", dropout_p)
    got = _packed.attend(FLASH_ATTN_2, attention, _attention, 2, None, qkv, (), (), softmax_scale, causal, window_size, softcap,
                         alibi_slopes, return_attn_probs)
    return _with_probs(got) if return_attn_probs else got


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=ANY, softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """`flash_attn_func` of q and kv (B, Sk, 2, Hkv, D)."""
    if dropout_p:
        refuse_dropout("flash_attn_kvpacked_func", dropout_p)
    got = _packed.attend(FLASH_ATTN_2, attention, _attention, 2, q, kv, (), (), softmax_scale, causal, window_size, softcap,
                         alibi_slopes, return_attn_probs)
    return _with_probs(got) if return_attn_probs else got


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=ANY, softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    """q (Tq, Hq, D), k, v (Tk, Hkv, D) -> out, or (out, lse (Hq, Tq), an empty tensor). With block_table (B, M), k and v are
    pages (N, P, Hkv, D) of any page size and cu_seqlens_k gives their lengths only."""
    if dropout_p:
        refuse_dropout("flash_attn_varlen_func", dropout_p)
    window_size = window_size if window_size is ANY else window(window_size)
    if block_table is None:
        got = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k),
                               softmax_scale=softmax_scale, causal=bool(causal), window_size=window_size,
                               softcap=softcap if softcap > 0 else 0.0, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
                               _lse=FLASH_ATTN_2)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        options = dict(causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=True)
        got = ForwardOnly.apply("flash_attn_varlen_func", lambda *pages: flash_attn_varlen_func(
            *pages, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, block_table=block_table,
            **options)[:2], q, k, v)
        return _with_probs(got) if return_attn_probs else got[0]
    else:
        got = attention_paged(q, k, v, block_table, cu_seqlens_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=int(max_seqlen_q),
                              softmax_scale=softmax_scale, causal=bool(causal), window_size=window_size,
                              softcap=softcap if softcap > 0 else 0.0, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
                              _counting=PREFIX_SUMS, _lse=FLASH_ATTN_2)
    return _with_probs(got) if return_attn_probs else got


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=ANY, softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """`flash_attn_varlen_func` of qkv (T, 3, H, D)."""
    if dropout_p:
        refuse_dropout("flash_attn_varlen_qkvpacked_func", dropout_p)
    longest = int(max_seqlen)
    got = _packed.attend(FLASH_ATTN_2, attention_varlen, _attention_varlen, 1, None, qkv, (cu_seqlens, cu_seqlens),
                         (longest, longest), softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _with_probs(got) if return_attn_probs else got


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=ANY, softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):
    """`flash_attn_varlen_func` of q and kv (Tk, 2, Hkv, D)."""
    if dropout_p:
        refuse_dropout("flash_attn_varlen_kvpacked_func", dropout_p)
    got = _packed.attend(FLASH_ATTN_2, attention_varlen, _attention_varlen, 1, q, kv, (cu_seqlens_q, cu_seqlens_k),
                         (int(max_seqlen_q), int(max_seqlen_k)), softmax_scale, causal, window_size, softcap, alibi_slopes,
                         return_attn_probs)
    return _with_probs(got) if return_attn_probs else got


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
                            cache_leftpad: Tensor | None = None, block_table: Tensor | None = None, softmax_scale=None,
                            causal=False, window_size=ANY, softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False):
    """q (B, Sq, Hq, D) over caches (B, Smax, Hkv, D), or pages (N, P, Hkv, D) with block_table -> out, or (out, lse (B, Hq, Sq)).

    k, v (B, Snew, Hkv, D) are written at cache_seqlens, cache_seqlens + 1, … first. q turns at the same positions if causal or
    windowed, else all of it at cache_seqlens. Keys before cache_leftpad are not seen; cache_batch_idx names each sequence's row.
    """
    return _kvcache.attend(FLASH_ATTN_2, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
                           cache_leftpad, block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved,
                           num_splits, return_softmax_lse, alibi_slopes)


def _with_probs(got: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """flash-attn's third result exists with dropout only; without, it is empty."""
    out, lse = got
    return out, lse, nothing(out)


# ------------------------------------------------------------------ private names that ring-attention code imports
flash_attn_gpu = None  # flash-attn's extension: xformers reads it before it looks at the version, and then does without flash-attn


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                        return_softmax):
    """(out, lse (B, Hq, Sq), an empty tensor, an empty tensor): the two are the dropout mask and its random state."""
    out, lse, probs = flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
                                      alibi_slopes, return_attn_probs=True)
    return out, lse, probs, nothing(q, torch.int64)


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                               window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
                               block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0):
    """(out, lse (Hq, Tq), an empty tensor, an empty tensor); seqused_k (B,) are the keys in use. A left pad raises."""
    call = "_flash_attn_varlen_forward"
    if dropout_p:
        refuse_dropout(call, dropout_p)
    if leftpad_k is not None:
        refuse(call, "leftpad_k", leftpad_k, "wanted None: shift cu_seqlens_k, or use flash_attn_with_kvcache's cache_leftpad")
    options = dict(softmax_scale=softmax_scale, causal=bool(causal), window_size=window((window_size_left, window_size_right)),
                   softcap=max(softcap, 0.0), alibi_slopes=alibi_slopes, return_lse=True, num_splits=num_splits,
                   _lse=FLASH_ATTN_2)
    if block_table is None:
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k),
                                    seqused_k=seqused_k, **options)
    else:
        lens, counting = (cu_seqlens_k, PREFIX_SUMS) if seqused_k is None else (seqused_k, AFTER)
        out, lse = attention_paged(q, k, v, block_table, lens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=int(max_seqlen_q),
                                   _counting=counting, **options)
    return out, lse, nothing(q), nothing(q, torch.int64)


# Engines that only compute import these with the forwards (diffusers).
_flash_attn_backward = _flash_attn_varlen_backward = no_backward
_wrapped_flash_attn_backward = _wrapped_flash_attn_varlen_backward = no_backward
_wrapped_flash_attn_forward, _wrapped_flash_attn_varlen_forward = _flash_attn_forward, _flash_attn_varlen_forward
