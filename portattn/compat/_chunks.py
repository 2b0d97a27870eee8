"""FlashAttention 3's attention_chunk: a query sees the keys of its own chunk only. Chunks are the keys 0 .. c - 1, c .. 2c - 1, …

Each sequence is cut at the chunks' bounds into sequences of its own. Within a piece the last query still stands at the last key,
so causal masks and windows stay what they are, and no mask is built. How many pieces have queries depends on lengths on the
device; their number here is the most that max_seqlen_q rows can touch, and the rest are empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention_paged, attention_varlen
from ..dialect import lengths
from ._translate import refuse, single_token_pages


def check(call: str, chunk: int) -> int:
    """The chunk's length; 0 is off."""
    if chunk < 0:
        refuse(call, "attention_chunk", chunk, "wanted the tokens of a chunk, or 0 for none")
    return int(chunk)


def _cut(cu_seqlens_q: Tensor, lens_k: Tensor, max_seqlen_q: int, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(first query row, first key, keys) of each piece, each (B, pieces). A chunk before the first key has none."""
    lens_q, lens_k = lengths(cu_seqlens_q), lens_k.clamp(min=0)
    first = lens_k - lens_q  # the position of query 0
    pieces = max((max_seqlen_q + chunk - 2) // chunk + 1, 1)
    piece = torch.arange(pieces, dtype=first.dtype, device=first.device)
    start = chunk * (torch.div(first, chunk, rounding_mode="floor")[:, None] + piece)
    row = cu_seqlens_q[:-1, None] + (start - first[:, None]).clamp(min=0).minimum(lens_q[:, None])
    keys = (lens_k[:, None] - start).clamp(0, chunk).masked_fill(start < 0, 0)
    return row, start.clamp(min=0), keys


def dense(q: Tensor, k: Tensor, v: Tensor, chunk: int, **options: Any) -> Any:
    """attention in chunks."""
    batch, len_q, len_k = *q.shape[:2], k.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    got = varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts * len_q, starts * len_k, len_q, len_k, chunk,
                 **options)
    back = lambda x: x.unflatten(0, (batch, len_q))
    return (back(got[0]), back(got[1])) if isinstance(got, tuple) else back(got)


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
           chunk: int, seqused_k: Tensor | None = None, **options: Any) -> Any:
    """attention_varlen in chunks."""
    spans = lengths(cu_seqlens_k)
    row, start, keys = _cut(cu_seqlens_q, spans if seqused_k is None else seqused_k.to(spans.dtype), max_seqlen_q, chunk)
    # Keys before the first piece are a sequence without queries; those after its last key are in no seqused_k.
    before = lambda ours, of: torch.cat((of[:, None].to(ours.dtype), ours), 1).flatten()
    cu_q = torch.cat((before(row, cu_seqlens_q[:-1]), cu_seqlens_q[-1:]))
    cu_k = torch.cat((before(cu_seqlens_k[:-1, None] + start.minimum(spans[:, None]), cu_seqlens_k[:-1]), cu_seqlens_k[-1:]))
    return attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, seqused_k=before(keys, torch.zeros_like(spans)),
                            **options)


def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, chunk: int,
          cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, k_scale: Tensor | None = None,
          v_scale: Tensor | None = None, **options: Any) -> Any:
    """attention_paged in chunks, the appended keys already in the cache. Chunks that do not fill pages read single tokens."""
    shape, batch = q.shape[:-2], block_table.shape[0]
    if cu_seqlens_q is None:
        max_seqlen_q, q = q.shape[1], q.flatten(0, 1)
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * max_seqlen_q
    if chunk % k_cache.shape[1]:
        k_cache, v_cache, block_table = single_token_pages(k_cache, v_cache, block_table)
    row, start, keys = _cut(cu_seqlens_q, kv_lens.to(cu_seqlens_q.dtype), q.shape[0] if max_seqlen_q is None else max_seqlen_q,
                            chunk)
    page_size, width = k_cache.shape[1], block_table.shape[1]
    columns = start[..., None] // page_size + torch.arange(min(chunk // page_size, width), device=start.device)
    table = block_table.gather(1, columns.clamp(max=max(width - 1, 0)).long().flatten(1)).view(row.numel(), -1)
    of_pieces = lambda scale: scale if scale is None or scale.dim() < 2 else scale.repeat_interleave(row.shape[1], 0)
    got = attention_paged(q, k_cache, v_cache, table, keys.flatten(), cu_seqlens_q=torch.cat((row.flatten(), cu_seqlens_q[-1:])),
                          max_seqlen_q=max_seqlen_q, k_scale=of_pieces(k_scale), v_scale=of_pieces(v_scale), **options)
    back = lambda x: x.view(*shape, *x.shape[1:])
    return (back(got[0]), back(got[1])) if isinstance(got, tuple) else back(got)
