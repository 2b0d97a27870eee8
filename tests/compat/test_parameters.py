"""Every parameter of every translated function: its place and default are the peer's, and it is honoured, a hint, or refused.

honoured: another value changes the result (which result is right is test_flash_attn.py's matter);
hint:     another value changes no bit of it (bounds on lengths are hints too, as long as they hold);
refused:  another value raises ArgumentError and names the parameter.
"""

import inspect

import pytest
import torch

from portattn import ArgumentError
from portattn.compat import flash_attn_interface as fa3
from portattn.compat import flashinfer, vllm_flash_attn
from portattn.compat.flash_attn import flash_attn_interface as fa2

torch.manual_seed(3)
INT = torch.int32


def rand(*shape):
    return torch.randn(*shape)


# q and keys of the dense, ragged, paged and cached forms
Q, K, V = rand(2, 3, 4, 16), rand(2, 8, 2, 16), rand(2, 8, 2, 16)
TQ, TK, TV = Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1)
CU_Q, CU_K = torch.tensor([0, 3, 6], dtype=INT), torch.tensor([0, 8, 16], dtype=INT)
PAGES_K, PAGES_V, TABLE = rand(6, 4, 2, 16), rand(6, 4, 2, 16), torch.tensor([[0, 1], [2, 3]], dtype=INT)
LENS = torch.tensor([5, 3], dtype=INT)
NEW_K, NEW_V = rand(2, 3, 2, 16), rand(2, 3, 2, 16)
COS, SIN = torch.linspace(0, 3, 32 * 8).view(32, 8).cos(), torch.linspace(0, 3, 32 * 8).view(32, 8).sin()
DESCALE = torch.tensor([[0.5, 2.0], [3.0, 0.25]])
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])

TAIL = dict(  # of FlashAttention 2's functions
    dropout_p=("refused", 0.1), softmax_scale=("honoured", 0.5), causal=("honoured", True), window_size=("honoured", (2, 0)),
    softcap=("honoured", 1.0), alibi_slopes=("honoured", SLOPES), deterministic=("hint", True), return_attn_probs=("honoured", True))
DESCALES = dict(q_descale=("honoured", DESCALE), k_descale=("honoured", DESCALE), v_descale=("honoured", DESCALE))
TENSORS = dict(q=("honoured", Q + 1), k=("honoured", K[:, :, :] * 2), v=("honoured", V + 1))
RAGGED = dict(q=("honoured", TQ + 1), k=("honoured", TK * 2), v=("honoured", TV + 1))
CU = dict(cu_seqlens_q=("honoured", torch.tensor([0, 1, 6], dtype=INT)), cu_seqlens_k=("honoured", torch.tensor([0, 5, 16], dtype=INT)))
CACHED = dict(q=("honoured", Q + 1), k_cache=("honoured", K * 2), v_cache=("honoured", V + 1))

FA3_HINTS = dict(pack_gqa=("hint", True), deterministic=("hint", True), sm_margin=("hint", 8))

DENSE = dict(q=Q, k=K, v=V)
VARLEN = dict(q=TQ, k=TK, v=TV, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=6, max_seqlen_k=16)
CACHE = dict(q=Q, k_cache=K, v_cache=V, cache_seqlens=LENS)
APPEND = CACHE | dict(k=NEW_K, v=NEW_V)
ROTARY = APPEND | dict(rotary_cos=COS, rotary_sin=SIN)
PRIVATE = DENSE | dict(k_new=NEW_K, v_new=NEW_V, seqused_k=LENS)
BOUNDS = dict(max_seqlen_q=("hint", 100), max_seqlen_k=("hint", 100))

# function: (base arguments, {parameter: (kind, another value[, base arguments to change it in])}, the peer's signature after its names)
FUNCTIONS = {
    fa2.flash_attn_func: (DENSE, TENSORS | TAIL),
    fa2.flash_attn_qkvpacked_func: (dict(qkv=rand(2, 5, 3, 4, 16)), dict(qkv=("honoured", rand(2, 5, 3, 4, 16))) | TAIL),
    fa2.flash_attn_kvpacked_func: (dict(q=Q, kv=torch.stack([K, V], 2)), dict(q=("honoured", Q + 1), kv=("honoured", rand(2, 8, 2, 2, 16))) | TAIL),
    fa2.flash_attn_varlen_func: (VARLEN, RAGGED | CU | BOUNDS | TAIL | dict(block_table=("honoured", TABLE, VARLEN | dict(k=PAGES_K, v=PAGES_V)))),
    fa2.flash_attn_varlen_qkvpacked_func: (
        dict(qkv=rand(6, 3, 4, 16), cu_seqlens=CU_Q, max_seqlen=6),
        dict(qkv=("honoured", rand(6, 3, 4, 16)), cu_seqlens=("honoured", torch.tensor([0, 1, 6], dtype=INT)), max_seqlen=("hint", 100)) | TAIL),
    fa2.flash_attn_varlen_kvpacked_func: (
        dict(q=TQ, kv=torch.stack([TK, TV], 1), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=6, max_seqlen_k=16),
        dict(q=("honoured", TQ + 1), kv=("honoured", rand(16, 2, 2, 16))) | CU | BOUNDS | TAIL),
    fa2.flash_attn_with_kvcache: (CACHE, CACHED | dict(
        k=("honoured", NEW_K * 2, APPEND), v=("honoured", NEW_V + 1, APPEND), rotary_cos=("honoured", COS.flip(0), ROTARY),
        rotary_sin=("honoured", SIN.flip(0), ROTARY), cache_seqlens=("honoured", LENS + 1), cache_batch_idx=("honoured", torch.tensor([1, 0], dtype=INT)),
        cache_leftpad=("honoured", torch.tensor([1, 2], dtype=INT)),
        block_table=("honoured", TABLE.flip(1), CACHE | dict(k_cache=PAGES_K, v_cache=PAGES_V, block_table=TABLE)),
        softmax_scale=("honoured", 0.5), causal=("honoured", True), window_size=("honoured", (2, 0)), softcap=("honoured", 1.0),
        rotary_interleaved=("honoured", False, ROTARY), alibi_slopes=("honoured", SLOPES), num_splits=("hint", 1),
        return_softmax_lse=("honoured", True))),
    fa2._flash_attn_forward: (
        DENSE | dict(dropout_p=0.0, softmax_scale=0.25, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                     return_softmax=False),
        TENSORS | dict(dropout_p=("refused", 0.1), softmax_scale=("honoured", 0.5), causal=("honoured", True), window_size_left=("honoured", 1),
                       window_size_right=("honoured", 0), softcap=("honoured", 1.0), alibi_slopes=("honoured", SLOPES),
                       return_softmax=("hint", True))),
    fa2._flash_attn_varlen_forward: (
        VARLEN | dict(dropout_p=0.0, softmax_scale=0.25, causal=False),
        RAGGED | CU | BOUNDS | dict(
            dropout_p=("refused", 0.1), softmax_scale=("honoured", 0.5), causal=("honoured", True), window_size_left=("honoured", 1),
            window_size_right=("honoured", 0), softcap=("honoured", 1.0), alibi_slopes=("honoured", SLOPES), return_softmax=("hint", True),
            block_table=("honoured", TABLE, VARLEN | dict(k=PAGES_K, v=PAGES_V, dropout_p=0.0, softmax_scale=0.25, causal=False)),
            leftpad_k=("refused", LENS), seqused_k=("honoured", LENS), zero_tensors=("hint", True), num_splits=("hint", 1))),
    fa3.flash_attn_func: (DENSE, TENSORS | dict(softmax_scale=("honoured", 0.5), causal=("honoured", True), qv=("refused", Q)) | DESCALES | dict(
        window_size=("honoured", (2, 0)), attention_chunk=("honoured", 2), softcap=("honoured", 1.0), num_splits=("hint", 3)) | FA3_HINTS | dict(
        return_attn_probs=("honoured", True))),
    fa3.flash_attn_qkvpacked_func: (
        dict(qkv=rand(2, 5, 3, 2, 16)),
        dict(qkv=("honoured", rand(2, 5, 3, 2, 16)), softmax_scale=("honoured", 0.5), causal=("honoured", True)) | DESCALES | dict(
            window_size=("honoured", (2, 0)), attention_chunk=("honoured", 2), softcap=("honoured", 1.0), deterministic=("hint", True),
            num_heads_q=("honoured", 4, dict(qkv=rand(2, 5, 8, 16), num_heads_q=6)), sm_margin=("hint", 8), return_attn_probs=("honoured", True))),
    fa3.flash_attn_varlen_func: (VARLEN, RAGGED | CU | BOUNDS | dict(
        seqused_q=("honoured", torch.tensor([2, 3], dtype=INT)), seqused_k=("honoured", LENS), softmax_scale=("honoured", 0.5),
        causal=("honoured", True), qv=("refused", TQ)) | DESCALES | dict(
        window_size=("honoured", (2, 0)), attention_chunk=("honoured", 2), softcap=("honoured", 1.0), num_splits=("hint", 3)) | FA3_HINTS | dict(
        return_attn_probs=("honoured", True))),
    fa3.flash_attn_with_kvcache: (CACHE, CACHED | dict(
        k=("honoured", NEW_K * 2, APPEND), v=("honoured", NEW_V + 1, APPEND), qv=("refused", Q), rotary_cos=("honoured", COS.flip(0), ROTARY),
        rotary_sin=("honoured", SIN.flip(0), ROTARY), cache_seqlens=("honoured", LENS + 1), cache_batch_idx=("honoured", torch.tensor([1, 0], dtype=INT)),
        cache_leftpad=("honoured", torch.tensor([1, 2], dtype=INT)),
        page_table=("honoured", TABLE.flip(1), CACHE | dict(k_cache=PAGES_K, v_cache=PAGES_V, page_table=TABLE)),
        cu_seqlens_q=("honoured", torch.tensor([0, 2, 6], dtype=INT), CACHE | dict(q=TQ, cu_seqlens_q=CU_Q)),
        cu_seqlens_k_new=("honoured", torch.tensor([0, 1, 6], dtype=INT), CACHE | dict(
            q=TQ, cu_seqlens_q=CU_Q, k=NEW_K.flatten(0, 1), v=NEW_V.flatten(0, 1), cu_seqlens_k_new=CU_Q)),
        max_seqlen_q=("hint", 100, CACHE | dict(q=TQ, cu_seqlens_q=CU_Q)), rotary_seqlens=("honoured", LENS + 4, ROTARY)) | DESCALES | dict(
        softmax_scale=("honoured", 0.5), causal=("honoured", True), window_size=("honoured", (2, 0)), attention_chunk=("honoured", 2),
        softcap=("honoured", 1.0), rotary_interleaved=("honoured", False, ROTARY), scheduler_metadata=("hint", torch.zeros(4, dtype=INT)),
        num_splits=("hint", 1), pack_gqa=("hint", True), sm_margin=("hint", 8), return_softmax_lse=("honoured", True))),
    fa3._flash_attn_forward: (DENSE, TENSORS | dict(
        k_new=("honoured", NEW_K * 2, PRIVATE), v_new=("honoured", NEW_V + 1, PRIVATE), qv=("refused", Q), out_=("honoured", Q.double()),
        cu_seqlens_q=("honoured", torch.tensor([0, 2, 6], dtype=INT), VARLEN), cu_seqlens_k=("honoured", torch.tensor([0, 5, 16], dtype=INT), VARLEN),
        cu_seqlens_k_new=("honoured", torch.tensor([0, 1, 6], dtype=INT), DENSE | dict(
            q=TQ, cu_seqlens_q=CU_Q, seqused_k=LENS, k_new=NEW_K.flatten(0, 1), v_new=NEW_V.flatten(0, 1), cu_seqlens_k_new=CU_Q)),
        seqused_q=("honoured", torch.tensor([2, 3], dtype=INT), VARLEN), seqused_k=("honoured", LENS), max_seqlen_q=("hint", 100, VARLEN),
        max_seqlen_k=("hint", 100, VARLEN),
        page_table=("honoured", TABLE.flip(1), DENSE | dict(k=PAGES_K, v=PAGES_V, seqused_k=LENS, page_table=TABLE)),
        kv_batch_idx=("honoured", torch.tensor([1, 0], dtype=INT)), leftpad_k=("honoured", torch.tensor([1, 2], dtype=INT)),
        rotary_cos=("honoured", COS.flip(0), PRIVATE | dict(rotary_cos=COS, rotary_sin=SIN)),
        rotary_sin=("honoured", SIN.flip(0), PRIVATE | dict(rotary_cos=COS, rotary_sin=SIN)),
        seqlens_rotary=("honoured", LENS + 4, PRIVATE | dict(rotary_cos=COS, rotary_sin=SIN))) | DESCALES | dict(
        softmax_scale=("honoured", 0.5), causal=("honoured", True), window_size_left=("honoured", 1), window_size_right=("honoured", 0),
        attention_chunk=("honoured", 2), softcap=("honoured", 1.0),
        rotary_interleaved=("honoured", False, PRIVATE | dict(rotary_cos=COS, rotary_sin=SIN)),
        scheduler_metadata=("hint", torch.zeros(4, dtype=INT)), num_splits=("hint", 3), pack_gqa=("hint", True), sm_margin=("hint", 8))),
    fa3.flash_attn_combine: (
        dict(out_partial=rand(3, 2, 5, 4, 8), lse_partial=rand(3, 2, 5, 4)),
        dict(out_partial=("honoured", rand(3, 2, 5, 4, 8)), lse_partial=("honoured", rand(3, 2, 5, 4)),
             out=("honoured", torch.empty(2, 5, 4, 8, dtype=torch.bfloat16)), out_dtype=("honoured", torch.bfloat16))),
    vllm_flash_attn.flash_attn_varlen_func: (
        VARLEN,
        RAGGED | CU | BOUNDS | dict(
            seqused_k=("honoured", LENS + 1, {k: v for k, v in VARLEN.items() if k != "cu_seqlens_k"} | dict(
                k=PAGES_K, v=PAGES_V, block_table=TABLE, seqused_k=LENS)),
            q_v=("refused", TQ), dropout_p=("refused", 0.1), softmax_scale=("honoured", 0.5), causal=("honoured", True),
            window_size=("honoured", [2, 0]), softcap=("honoured", 1.0), alibi_slopes=("honoured", SLOPES), deterministic=("hint", True),
            return_attn_probs=("refused", True),
            block_table=("honoured", TABLE.flip(1), {k: v for k, v in VARLEN.items() if k != "cu_seqlens_k"} | dict(
                k=PAGES_K, v=PAGES_V, block_table=TABLE, seqused_k=LENS)),
            return_softmax_lse=("honoured", True), out=("honoured", torch.empty(6, 4, 16), VARLEN | dict(q=TQ.bfloat16(), k=TK.bfloat16(), v=TV.bfloat16())),
            scheduler_metadata=("hint", torch.zeros(4, dtype=INT))) | DESCALES | dict(
            num_splits=("hint", 3), output_scale=("refused", torch.ones(1)), fa_version=("hint", 3), s_aux=("honoured", torch.ones(4)),
            cp_world_size=("refused", 2), cp_rank=("refused", 1), cp_tot_seqused_k=("refused", LENS), mask_mod=("refused", max),
            block_sparse_tensors=("refused", LENS), aux_tensors=("refused", [LENS]), aux_tensor_leading_dims=("refused", [1]),
            dynamic_causal=("refused", torch.ones(1)), gather_kv_indices=("refused", LENS), gather_kv_valid_length=("refused", LENS))),
    flashinfer.merge_state: (
        dict(v_a=rand(5, 4, 8), s_a=rand(5, 4), v_b=rand(5, 4, 8), s_b=rand(5, 4)),
        {n: ("honoured", rand(5, 4, 8) if n[0] == "v" else rand(5, 4)) for n in ("v_a", "s_a", "v_b", "s_b")}),
    flashinfer.merge_states: (dict(v=rand(5, 3, 4, 8), s=rand(5, 3, 4)), dict(v=("honoured", rand(5, 3, 4, 8)), s=("honoured", rand(5, 3, 4)))),
    flashinfer.merge_state_in_place: (
        dict(v=rand(5, 4, 8), s=rand(5, 4), v_other=rand(5, 4, 8), s_other=rand(5, 4)),
        {n: ("honoured", rand(5, 4, 8) if n[0] == "v" else rand(5, 4)) for n in ("v", "s", "v_other", "s_other")} | dict(
            mask=("honoured", torch.tensor([1, 0, 1, 0, 1])))),
    flashinfer.single_prefill_with_kv_cache: (
        dict(q=TQ, k=TK, v=TV),
        RAGGED | {n: ("refused", torch.ones(4)) for n in ("scale_q", "scale_k", "scale_v")} | dict(
            o_dtype=("honoured", torch.bfloat16), custom_mask=("honoured", torch.arange(96).view(6, 16) % 3 == 0),
            packed_custom_mask=("refused", torch.zeros(12, dtype=torch.uint8)), causal=("honoured", True),
            kv_layout=("honoured", "HND", dict(q=TQ, k=rand(2, 2, 16), v=rand(2, 2, 16))), pos_encoding_mode=("refused", "ROPE_LLAMA"),
            use_fp16_qk_reduction=("hint", True), sm_scale=("honoured", 0.5), window_left=("honoured", 3), logits_soft_cap=("honoured", 1.0),
            rope_scale=("refused", 1.0), rope_theta=("refused", 1e4), backend=("hint", "fa2"), return_lse=("honoured", True),
            kv_cache_sf=("refused", (torch.ones(4), torch.ones(4))), k_scale=("honoured", 2.0), v_scale=("honoured", 2.0))),
    flashinfer.single_decode_with_kv_cache: (
        dict(q=TQ[0], k=TK, v=TV),
        dict(q=("honoured", TQ[1]), k=("honoured", TK * 2), v=("honoured", TV + 1), kv_layout=("honoured", "HND", dict(
            q=TQ[0], k=rand(2, 2, 16), v=rand(2, 2, 16))), pos_encoding_mode=("refused", "ALIBI"), use_tensor_cores=("hint", True),
            q_scale=("honoured", 2.0), k_scale=("honoured", 2.0), v_scale=("honoured", 2.0), window_left=("honoured", 3),
            logits_soft_cap=("honoured", 1.0), sm_scale=("honoured", 0.5), rope_scale=("refused", 1.0), rope_theta=("refused", 1e4),
            return_lse=("honoured", True))),
}

# The peers' own parameter lists. Functions of hints alone, which compute nothing, are listed here and not above.
SIGNATURES = {
    fa2.flash_attn_func: "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_qkvpacked_func: "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_kvpacked_func: "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None",
    fa2.flash_attn_varlen_qkvpacked_func: "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_varlen_kvpacked_func: "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    fa2._flash_attn_forward: "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax",
    fa2._flash_attn_varlen_forward: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False block_table=None leftpad_k=None seqused_k=None zero_tensors=False num_splits=0",
    fa3.flash_attn_func: "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    fa3.flash_attn_qkvpacked_func: "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    fa3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    fa3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
    fa3._flash_attn_forward: "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0",
    fa3.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None",
    fa3.get_scheduler_metadata: "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0",
    vllm_flash_attn.get_scheduler_metadata: "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) has_softcap=False num_splits=0 pack_gqa=None sm_margin=0",
    vllm_flash_attn.flash_attn_varlen_func: "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None seqused_k=None q_v=None dropout_p=0.0 softmax_scale=None causal=False window_size=None softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None return_softmax_lse=False out=None scheduler_metadata=None q_descale=None k_descale=None v_descale=None num_splits=0 output_scale=None fa_version=2 s_aux=None cp_world_size=1 cp_rank=0 cp_tot_seqused_k=None mask_mod=None block_sparse_tensors=None aux_tensors=None aux_tensor_leading_dims=None dynamic_causal=None gather_kv_indices=None gather_kv_valid_length=None",
    vllm_flash_attn.is_fa_version_supported: "fa_version device=None",
    vllm_flash_attn.fa_version_unsupported_reason: "fa_version device=None",
    flashinfer.merge_state: "v_a s_a v_b s_b",
    flashinfer.merge_states: "v s",
    flashinfer.merge_state_in_place: "v s v_other s_other mask=None",
    flashinfer.single_prefill_with_kv_cache: "q k v scale_q=None scale_k=None scale_v=None o_dtype=None custom_mask=None packed_custom_mask=None causal=False kv_layout='NHD' pos_encoding_mode='NONE' use_fp16_qk_reduction=False sm_scale=None window_left=-1 logits_soft_cap=None rope_scale=None rope_theta=None backend='auto' return_lse=False kv_cache_sf=None k_scale=None v_scale=None",
    flashinfer.single_decode_with_kv_cache: "q k v kv_layout='NHD' pos_encoding_mode='NONE' use_tensor_cores=False q_scale=None k_scale=None v_scale=None window_left=-1 logits_soft_cap=None sm_scale=None rope_scale=None rope_theta=None return_lse=False",
}


def name(function):
    return f"{function.__module__.removeprefix('portattn.compat.')}.{function.__name__}"


def run(function, arguments):
    """Every tensor that a call returns or writes; caches and states are copies."""
    arguments = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    # One object given twice stays one object: flash-attn's callers say "the same lengths" that way.
    got = function(**arguments)
    written = [arguments[n] for n in ("k_cache", "v_cache") if n in arguments]
    if function is flashinfer.merge_state_in_place:
        written = [arguments["v"], arguments["s"]]
    return [*(got if isinstance(got, tuple) else () if got is None else (got,)), *written]


def differ(a, b):
    return len(a) != len(b) or any(x.shape != y.shape or x.dtype != y.dtype or not torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("function", SIGNATURES, ids=name)
def test_parameters_are_the_peers_in_its_order(function):
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    got = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    assert got == SIGNATURES[function].split()


@pytest.mark.parametrize("function", FUNCTIONS, ids=name)
def test_every_parameter_is_in_the_table(function):
    _, parameters = FUNCTIONS[function]
    assert set(parameters) == set(inspect.signature(function).parameters)


def test_every_public_function_is_walked():
    walked = set(SIGNATURES)
    for module in (fa2, fa3, vllm_flash_attn, flashinfer):
        assert {getattr(module, n) for n in module.__all__} <= walked
    computing = {f for f in walked if "metadata" not in f.__name__ and "version" not in f.__name__}
    assert computing == set(FUNCTIONS)


@pytest.mark.parametrize("function, parameter", [(f, p) for f, (_, table) in FUNCTIONS.items() for p in table],
                         ids=lambda x: x if isinstance(x, str) else name(x))
def test_parameter_is_honoured_a_hint_or_refused(function, parameter):
    base, table = FUNCTIONS[function]
    kind, other, *instead = table[parameter]
    base = instead[0] if instead else base
    if kind == "refused":
        with pytest.raises(ArgumentError, match=rf"{parameter}: wanted"):
            function(**base | {parameter: other})
        return
    if instead and parameter not in base and parameter == "block_table":
        changed = run(function, base | {parameter: other}), run(function, base | {parameter: other.flip(1)})
    else:
        changed = run(function, base), run(function, base | {parameter: other})
    assert differ(*changed) == (kind == "honoured")


def test_hints_of_functions_that_compute_nothing():
    for module in (fa3, vllm_flash_attn):
        assert module.get_scheduler_metadata(2, 1, 8, 4, 2, 64, LENS).shape == (0,)
    assert vllm_flash_attn.is_fa_version_supported(3) and not vllm_flash_attn.is_fa_version_supported(7)
    assert vllm_flash_attn.fa_version_unsupported_reason(2) is None and "7" in vllm_flash_attn.fa_version_unsupported_reason(7)
