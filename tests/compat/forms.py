"""Translated calls of every form, each with the native call that computes the same: tiny shapes, so that the host's time shows."""

from __future__ import annotations

from functools import partial
from typing import Callable

import torch

from portattn import attention, attention_paged, attention_varlen
from portattn.compat import flash_attn as fa2
from portattn.compat import flash_attn_interface as fa3
from portattn.compat import vllm_flash_attn as vllm

BATCH = 2


def forms(device: str = "cpu", dtype: torch.dtype = torch.float32, dim: int = 16, page: int = 4) -> dict[str, tuple[Callable, Callable]]:
    """{name: (the translated call, the native call)} on tensors of their own."""
    randn = lambda *shape: torch.randn(*shape).to(device, dtype)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
    q, k, v = randn(BATCH, 1, 2, dim), randn(BATCH, 8, 1, dim), randn(BATCH, 8, 1, dim)
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    qkv, kv = randn(BATCH, 8, 3, 2, dim), randn(BATCH, 8, 2, 1, dim)
    new = dict(k=randn(BATCH, 1, 1, dim), v=randn(BATCH, 1, 1, dim))
    turned = new | dict(rotary_cos=randn(8, dim // 2), rotary_sin=randn(8, dim // 2))
    pages, v_pages = randn(4, page, 1, dim), randn(4, page, 1, dim)
    table, own_rows = ints([0, 1], [2, 3]), ints([0], [1])
    lens, lens_after, fives, sixes = ints(5, 3), ints(6, 4), ints(5, 5), ints(6, 6)
    cu_q, cu_k, cu_pages = ints(0, 1, 2), ints(0, 8, 16), ints(0, 5, 8)
    out, indices = torch.empty_like(rows), ints(0, 1)
    (packed_q, packed_k, packed_v), (half_k, half_v), packed_rows = qkv.unbind(2), kv.unbind(2), qkv.flatten(0, 1)
    rows_q, rows_k, rows_v = packed_rows.unbind(1)

    found = {
        "dense": (lambda: fa2.flash_attn_func(q, k, v, causal=True), lambda: attention(q, k, v, causal=True)),
        "dense, FlashAttention 3": (lambda: fa3.flash_attn_func(q, k, v, causal=True), lambda: attention(q, k, v, causal=True)),
        "dense, with lse": (lambda: fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
                            lambda: attention(q, k, v, causal=True, return_lse=True)),
        "dense, with lse, FlashAttention 3": (lambda: fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
                                              lambda: attention(q, k, v, causal=True, return_lse=True)),
        "dense, qkv in one tensor": (lambda: fa2.flash_attn_qkvpacked_func(qkv, causal=True),
                                     lambda: attention(packed_q, packed_k, packed_v, causal=True)),
        "dense, k and v in one tensor": (lambda: fa2.flash_attn_kvpacked_func(q, kv, causal=True),
                                         lambda: attention(q, half_k, half_v, causal=True)),
        "varlen": (lambda: fa2.flash_attn_varlen_func(rows, keys, values, cu_q, cu_k, 1, 8, causal=True),
                   lambda: attention_varlen(rows, keys, values, cu_q, cu_k, 1, 8, causal=True)),
        "varlen, FlashAttention 3": (lambda: fa3.flash_attn_varlen_func(rows, keys, values, cu_q, cu_k, 1, 8, causal=True),
                                     lambda: attention_varlen(rows, keys, values, cu_q, cu_k, 1, 8, causal=True)),
        "varlen, with lse": (
            lambda: fa2.flash_attn_varlen_func(rows, keys, values, cu_q, cu_k, 1, 8, causal=True, return_attn_probs=True),
            lambda: attention_varlen(rows, keys, values, cu_q, cu_k, 1, 8, causal=True, return_lse=True)),
        "varlen, qkv in one tensor": (lambda: fa2.flash_attn_varlen_qkvpacked_func(packed_rows, cu_k, 8, causal=True),
                                      lambda: attention_varlen(rows_q, rows_k, rows_v, cu_k, cu_k, 8, 8, causal=True)),
        "varlen with a block table": (
            lambda: fa2.flash_attn_varlen_func(rows, pages, v_pages, cu_q, cu_pages, 1, 8, causal=True, block_table=table),
            lambda: attention_paged(rows, pages, v_pages, table, lens, cu_seqlens_q=cu_q, max_seqlen_q=1, causal=True)),
        "vLLM's varlen": (lambda: vllm.flash_attn_varlen_func(rows, keys, values, 1, cu_q, 8, cu_k, causal=True),
                          lambda: attention_varlen(rows, keys, values, cu_q, cu_k, 1, 8, causal=True)),
        "vLLM's varlen over pages": (
            lambda: vllm.flash_attn_varlen_func(q=rows, k=pages, v=v_pages, out=out, cu_seqlens_q=cu_q, max_seqlen_q=1,
                                                seqused_k=lens, max_seqlen_k=8, softmax_scale=0.25, causal=True, block_table=table,
                                                fa_version=2),
            lambda: attention_paged(rows, pages, v_pages, table, lens, cu_seqlens_q=cu_q, max_seqlen_q=1, out=out, causal=True,
                                    softmax_scale=0.25)),
        "kvcache of ragged queries over pages, FlashAttention 3": (
            lambda: fa3.flash_attn_with_kvcache(rows, pages, v_pages, cache_seqlens=lens, page_table=table, cu_seqlens_q=cu_q,
                                                max_seqlen_q=1, causal=True),
            lambda: attention_paged(rows, pages, v_pages, table, lens, cu_seqlens_q=cu_q, max_seqlen_q=1, causal=True)),
        "kvcache with cache_batch_idx": (
            lambda: fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_batch_idx=indices, causal=True),
            lambda: attention_paged(q, k, v, own_rows, lens, causal=True)),
        "kvcache over pages with lse": (
            lambda: fa2.flash_attn_with_kvcache(q, pages, v_pages, cache_seqlens=lens, block_table=table, causal=True,
                                                return_softmax_lse=True),
            lambda: attention_paged(q, pages, v_pages, table, lens, causal=True, return_lse=True)),
    }
    found["kvcache over pages with lse, FlashAttention 3"] = (
        lambda: fa3.flash_attn_with_kvcache(q, pages, v_pages, cache_seqlens=lens, page_table=table, causal=True, return_softmax_lse=True),
        lambda: attention_paged(q, pages, v_pages, table, lens, causal=True, return_lse=True))
    for fa, at in ((fa2, "block_table"), (fa3, "page_table")):
        of = "kvcache" if fa is fa2 else "FlashAttention 3's kvcache"
        for cache, pair, its_table, given in (("pages", (pages, v_pages), table, {at: table}),
                                              ("a contiguous cache", (k, v), own_rows, {})):
            for alike, length, before, after in (("", lens, lens, lens_after), (", one length for all", 5, fives, sixes)):
                for what, now, options in (("", before, {}), (" with an append", after, new),
                                           (" with a turned append", after, turned)):
                    pairing = dict(rotary_interleaved=True) if "rotary_cos" in options else {}
                    found[f"{of} over {cache}{what}{alike}"] = (
                        partial(fa.flash_attn_with_kvcache, q, *pair, cache_seqlens=length, causal=True, **options, **given),
                        partial(attention_paged, q, *pair, its_table, now, causal=True, **options, **pairing))
    return found
