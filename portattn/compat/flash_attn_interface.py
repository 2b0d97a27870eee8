"""The module flash_attn_interface (FlashAttention 3) on portattn: same parameters in the same order, same returns.

Hints, accepted and without effect on results: num_splits, pack_gqa, sm_margin, scheduler_metadata, deterministic. qv raises.
attention_chunk cuts sequences into chunks (_chunks.py). Descales multiply q, k and v as FlashAttention 3's do for 8-bit inputs,
whatever the dtype; 8-bit caches are read by a q of 16 or 32 bits. lse is (B, H, S) or (H, T), -inf where a row sees no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import _attention, attention, attention_varlen, merge_states
from ..dialect import HEADS_FIRST, lengths, lse_as
from . import _chunks, _kvcache, _packed
from ._translate import ANY, ForwardOnly, no_backward, nothing, refuse, sequence_of, wants_gradients, window

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "get_scheduler_metadata"]

__version__ = "3.0.0.post0+portattn"  # the release whose signatures these are

_NO_QV = "wanted None: a second query against v (absorbed MLA) is one head_dim in portattn: concatenate q with qv, and k with v"


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=ANY, attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                    sm_margin=0, return_attn_probs=False):
    """q (B, Sq, Hq, D), k, v (B, Sk, Hkv, D) -> out, or (out, lse (B, Hq, Sq)). Descales are (B, Hkv)."""
    if qv is not None:
        refuse("flash_attn_func", "qv", qv, _NO_QV)
    if q_descale is not None or k_descale is not None:
        q = _scaled(q, q_descale, k_descale)
    causal, softcap = bool(causal), softcap if softcap > 0 else 0.0
    if window_size is not ANY:
        window_size = window(window_size)
    if attention_chunk:
        got = _chunks.dense(q, k, v, _chunks.check("flash_attn_func", attention_chunk), softmax_scale=softmax_scale,
                            causal=causal, window_size=window_size, softcap=softcap, return_lse=return_attn_probs,
                            num_splits=num_splits)
        got = (got[0], lse_as(HEADS_FIRST, got[1])) if return_attn_probs else got
    else:
        got = attention(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                        return_lse=return_attn_probs, num_splits=num_splits, _lse=HEADS_FIRST)
    return got if v_descale is None else _descaled(got, return_attn_probs, v_descale)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=ANY, attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0,
                              return_attn_probs=False):
    """`flash_attn_func` of qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 Hkv, D)."""
    if qkv.dim() == 5:
        split = 2
    elif num_heads_q is None:
        refuse("flash_attn_qkvpacked_func", "num_heads_q", num_heads_q,
               "wanted the number of query heads of a 4-dimensional qkv")
    else:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        split = num_heads_q, heads_kv, heads_kv
    if q_descale is None and k_descale is None and v_descale is None and not attention_chunk:
        return _packed.attend(HEADS_FIRST, attention, _attention, split, None, qkv, (), (), softmax_scale, causal, window_size,
                              softcap, None, return_attn_probs, num_splits=1)
    return flash_attn_func(*_packed.views_of(qkv, split), softmax_scale, causal, None, q_descale, k_descale, v_descale,
                           window_size, attention_chunk, softcap, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=ANY, attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                           sm_margin=0, return_attn_probs=False):
    """q (Tq, Hq, D), k, v (Tk, Hkv, D) -> out, or (out, lse (Hq, Tq)). seqused_q, seqused_k (B,): rows in use of each sequence;
    the out and lse of rows of q that are not in use are 0 and -inf."""
    if qv is not None:
        refuse("flash_attn_varlen_func", "qv", qv, _NO_QV)
    if q_descale is not None or k_descale is not None:
        q = _scaled(q, q_descale, k_descale, cu_seqlens_q)
    causal, softcap = bool(causal), softcap if softcap > 0 else 0.0
    if window_size is not ANY:
        window_size = window(window_size)
    if seqused_q is not None or attention_chunk:
        got = _of_rows_in_use(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), seqused_q,
                              _chunks.check("flash_attn_varlen_func", attention_chunk), seqused_k=seqused_k,
                              softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                              return_lse=return_attn_probs, num_splits=num_splits)
    else:
        got = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), seqused_k=seqused_k,
                               softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                               return_lse=return_attn_probs, num_splits=num_splits, _lse=HEADS_FIRST)
    return got if v_descale is None else _descaled(got, return_attn_probs, v_descale, cu_seqlens_q)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
                            cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
                            cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
                            max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
                            q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                            softmax_scale=None, causal=False, window_size=ANY, attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False):
    """q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q, over caches (B, Smax, Hkv, D), or pages (N, P, Hkv, D) with page_table.

    Returns out, or (out, lse (B, Hq, Sq) or (Hq, Tq), and two empty tensors: FlashAttention 3's partial results). As
    FlashAttention 2's function of this name (portattn.compat.flash_attn); k, v may be ragged by cu_seqlens_k_new, rotary_seqlens
    replaces cache_seqlens as the rotary position.
    """
    if qv is not None:
        refuse("flash_attn_with_kvcache", "qv", qv, _NO_QV)
    if q_descale is not None:
        q = _scaled(q, q_descale, None, cu_seqlens_q)
    if page_table is not None and cache_batch_idx is not None:  # rows of the table; FlashAttention 2 refuses the two together
        page_table, cache_batch_idx = page_table[cache_batch_idx], None
    if attention_chunk:
        chunk, causal, window_size = _chunks.check("flash_attn_with_kvcache", attention_chunk), bool(causal), window(window_size)

        def in_chunks(q, k_cache, v_cache, k, v):
            q, k_cache, v_cache, table, lens, *_ = _kvcache.translated(
                q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
                rotary_interleaved, causal, window_size, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, k_descale, v_descale,
                append_first=True)
            return _chunks.paged(q, k_cache, v_cache, table, lens, chunk, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                                 softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                                 softcap=softcap if softcap > 0 else 0.0, num_splits=num_splits, k_scale=k_descale,
                                 v_scale=v_descale, return_lse=return_softmax_lse)

        tensors = q, k_cache, v_cache, k, v
        got = ForwardOnly.apply(_kvcache.CALL, in_chunks, *tensors) if wants_gradients(*tensors) else in_chunks(*tensors)
        got = (got[0], lse_as(HEADS_FIRST, got[1])) if return_softmax_lse else got
    else:
        got = _kvcache.attend(HEADS_FIRST, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
                              cache_leftpad, page_table, softmax_scale, causal, window_size, softcap, rotary_interleaved,
                              num_splits, return_softmax_lse, None, k_descale, v_descale, cu_seqlens_q, max_seqlen_q,
                              cu_seqlens_k_new, rotary_seqlens)
    if not return_softmax_lse:
        return got
    empty = nothing(q)
    return (*got, empty, empty)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens: Tensor,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
                           page_size: int | None = None, max_seqlen_k_new=0, causal=False, window_size=ANY, attention_chunk=0,
                           has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """An empty int32 tensor: the schedule is each backend's own affair, and scheduler_metadata is a hint that changes nothing."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges n partial results: out_partial (n, B, S, H, D), lse_partial (n, B, S, H) -> (out (B, S, H, D), lse (B, S, H)).

    out has out_dtype, or out_partial's, or is the tensor given.
    """
    merged, lse = merge_states(out_partial, lse_partial)
    if out is not None:
        return out.copy_(merged), lse
    return merged if out_dtype is None else merged.to(out_dtype), lse


# ------------------------------------------------------------------ descales and rows in use
def _per_row(factor: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A factor (B, Hkv) as it multiplies x (B, S, Hq, D), or (T, Hq, D) with cu_seqlens."""
    factor = factor.repeat_interleave(x.shape[-2] // factor.shape[-1], -1)
    return factor[:, None, :, None] if cu_seqlens is None else factor[sequence_of(x.shape[0], cu_seqlens)[0]][..., None]


def _scaled(q: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """q times both descales: (q a) . (k b) is (q a b) . k. Rounded to q's dtype; a factor of 1 changes nothing."""
    factor = q_descale if k_descale is None else k_descale if q_descale is None else q_descale * k_descale
    return (q.float() * _per_row(factor, q, cu_seqlens)).to(q.dtype)


def _descaled(got, with_lse: bool, v_descale: Tensor, cu_seqlens: Tensor | None = None):
    out, lse = got if with_lse else (got, None)
    out = (out.float() * _per_row(v_descale, out, cu_seqlens)).to(out.dtype)
    return (out, lse) if with_lse else out


def _of_rows_in_use(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                    max_seqlen_k: int, used: Tensor | None, chunk: int, return_lse: bool, **options):
    """attention_varlen of q's rows in use, `used` (B,) of each sequence, all of them if None; in chunks, unless chunk is 0."""
    if used is not None:
        q, cu_seqlens_q, back, used = _moved_together(q, cu_seqlens_q, used)
    call, more = (_chunks.varlen, (chunk,)) if chunk else (attention_varlen, ())
    got = call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *more, return_lse=return_lse, **options)
    out, lse = got if return_lse else (got, None)
    if used is not None:
        out = out[back].masked_fill(~used[:, None, None], 0.0)
        lse = lse if lse is None else lse[back].masked_fill(~used[:, None], float("-inf"))
    return out if lse is None else (out, lse_as(HEADS_FIRST, lse))


def _moved_together(q: Tensor, cu_seqlens: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q's rows in use: (rows (Tq, Hq, D), their cu_seqlens, each given row's place there, whether it is in use)."""
    lens = torch.minimum(used.to(cu_seqlens.dtype), lengths(cu_seqlens))
    cu_used = torch.nn.functional.pad(lens.cumsum(0, dtype=cu_seqlens.dtype), (1, 0))
    last = max(q.shape[0] - 1, 0)
    sequence, place = sequence_of(q.shape[0], cu_used)
    source = (cu_seqlens[sequence] + place).clamp(0, last)
    sequence, place = sequence_of(q.shape[0], cu_seqlens)
    back = (cu_used[sequence] + place).clamp(0, last)
    return q[source], cu_used, back, place < lengths(cu_used)[sequence]


# ------------------------------------------------------------------ private names that ring-attention code imports
def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
                        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1,
                        window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
                        num_splits=1, pack_gqa=None, sm_margin=0):
    """(out, lse (B, Hq, Sq) or (Hq, Tq), an empty tensor, an empty tensor): with cu_seqlens_k ragged, with seqused_k or what only a
    cache has as `flash_attn_with_kvcache`, else dense. out is out_, if given."""
    call = "_flash_attn_forward"
    tail = dict(softmax_scale=softmax_scale, causal=causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
                window_size=(window_size_left, window_size_right), attention_chunk=attention_chunk, softcap=softcap,
                num_splits=num_splits, qv=qv)
    of_caches = dict(k_new=k_new, v_new=v_new, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table, kv_batch_idx=kv_batch_idx,
                     leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary)
    asked = [name for name, value in of_caches.items() if value is not None]
    if cu_seqlens_k is not None:
        for name in asked:
            refuse(call, name, of_caches[name], "wanted None together with cu_seqlens_k")
        out, lse = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
                                          return_attn_probs=True, **tail)
    elif seqused_q is not None:
        refuse(call, "seqused_q", seqused_q, "wanted None without cu_seqlens_k")
    elif asked or seqused_k is not None or cu_seqlens_q is not None:
        out, lse, *_ = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=seqused_k,
            cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved, return_softmax_lse=True, **tail)
    else:
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **tail)
    empty = nothing(q)
    return out if out_ is None else out_.copy_(out), lse, empty, empty


_flash_attn_backward = no_backward
