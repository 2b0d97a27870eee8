"""The float64 oracle: what every call must return, in plain torch on the CPU. The definition of right.

Each function has the signature of the public call of its name, takes tensors of any device and returns float64
CPU tensors `(out, lse)`, always both. Sequences are computed one by one, with the full score matrix: it is slow, and
meant to be. Nothing here is shared with a backend. `plain` computes the same in a kernel's own precision: by its
error a kernel's error is judged. Gradients flow, so float64 inputs that require grad give the gradients to compare with.

No caller's tensor is ever written: `caches_after` and `cache_append` return the caches as a call must leave them.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

__all__ = ["attention", "attention_paged", "attention_varlen", "cache_append", "caches_after", "merge_states", "plain",
           "quantize"]


class _Math(NamedTuple):
    """The precision to compute in, and what stored intermediate values are rounded to (None: not at all)."""

    work: torch.dtype
    rounded: torch.dtype | None

    def lift(self, x: Tensor) -> Tensor:
        return x.cpu().to(self.work)

    def round(self, x: Tensor) -> Tensor:
        return x if self.rounded is None else x.to(self.rounded).to(self.work)


def _math(q: Tensor, plain: bool) -> _Math:
    return _Math(torch.float32, q.dtype) if plain else _Math(torch.float64, None)


class _Options(NamedTuple):
    """What one sequence's attention depends on besides its tensors."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float


def _options(q: Tensor, causal: bool, window_size: Sequence[int] | None, softmax_scale: float | None, softcap: float) -> _Options:
    left, right = (-1, -1) if window_size is None else window_size
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Options(scale, causal, (left, right), softcap)


def _visible(len_q: int, len_k: int, o: _Options) -> Tensor:
    """(Lq, Lk) bool. Query i stands at i + Lk - Lq; for Lq = 2, Lk = 4, causal: 1110 / 1111; with window (1, 0): 0110 / 0011."""
    position = torch.arange(len_q)[:, None] + len_k - len_q
    key = torch.arange(len_k)[None, :]
    seen = torch.ones(len_q, len_k, dtype=torch.bool)
    if o.causal:
        seen &= key <= position
    if o.window[0] >= 0:
        seen &= key >= position - o.window[0]
    if o.window[1] >= 0:
        seen &= key <= position + o.window[1]
    return seen


def _sequence(q: Tensor, k: Tensor, v: Tensor, o: _Options, m: _Math, slopes: Tensor | None = None, sinks: Tensor | None = None,
              bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One sequence: q (Lq, Hq, D), k (Lk, Hkv, D), v (Lk, Hkv, Dv), already lifted -> out (Lq, Hq, Dv), lse (Lq, Hq)."""
    (len_q, heads, _), len_k = q.shape, k.shape[0]
    group = heads // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    s = o.scale * torch.einsum("ihd,jhd->hij", q, k)
    if o.softcap:
        s = o.softcap * torch.tanh(s / o.softcap)
    if slopes is not None:
        distance = (torch.arange(len_q)[:, None] + len_k - len_q - torch.arange(len_k)[None, :]).abs()
        s = s - m.lift(slopes)[:, None, None] * distance
    seen = _visible(len_q, len_k, o).expand(heads, len_q, len_k)
    if bias is not None:
        bias = bias.cpu().expand(heads, len_q, len_k)
        if bias.dtype == torch.bool:
            seen = seen & bias
        else:
            s = s + m.lift(bias)
    s = s.masked_fill(~seen, float("-inf"))

    sink = torch.full((heads,), float("-inf"), dtype=m.work) if sinks is None else m.lift(sinks)
    logits = torch.cat([s, sink[:, None, None].expand(heads, len_q, 1)], -1)  # the sink: a key without a value
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)  # a row that sees nothing: exp(-inf - 0) = 0
    e = torch.exp(logits - top)
    total = e.sum(-1, keepdim=True)
    p = m.round(e / total.masked_fill(total == 0, 1.0))
    out = m.round(torch.einsum("hij,jhe->ihe", p[..., :-1], v))
    lse = (top + torch.log(total)).squeeze(-1).transpose(0, 1)
    return out, lse


def _per_sequence(x: Tensor | None, b: int) -> Tensor | None:
    """ALiBi slopes or scales of sequence b: (H,), or (B, H)."""
    return x[b] if x is not None and x.dim() == 2 else x


def _concat(parts: list[tuple[Tensor, Tensor]], rows: int, heads: int, dim: int, m: _Math) -> tuple[Tensor, Tensor]:
    """Sequences one after the other, then zeros for rows that belong to none."""
    done = sum(len(out) for out, _ in parts)
    parts = [*parts, (torch.zeros(rows - done, heads, dim, dtype=m.work), torch.zeros(rows - done, heads, dtype=m.work))]
    out, lse = (torch.cat(pieces) for pieces in zip(*parts))
    return out.double(), lse.double()


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: Sequence[int] | None = (-1, -1),
              softmax_scale: float | None = None, softcap: float = 0.0, bias: Tensor | None = None,
              alibi_slopes: Tensor | None = None,
              sinks: Tensor | None = None, layout: str = "bshd", out: Tensor | None = None, return_lse: bool = True,
              num_splits: int = 0,
              batch_invariant: bool = False, backend: str | None = None, _plain: bool = False) -> tuple[Tensor, Tensor]:
    """Dense attention: out in q's layout, lse (B, Sq, Hq)."""
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    m, o = _math(q, _plain), _options(q, causal, window_size, softmax_scale, softcap)
    batch, len_q, heads, _ = q.shape
    if bias is not None:
        bias = bias.expand(batch, heads, len_q, k.shape[1])
    parts = [_sequence(m.lift(q[b]), m.lift(k[b]), m.lift(v[b]), o, m, _per_sequence(alibi_slopes, b), sinks,
                       None if bias is None else bias[b]) for b in range(batch)]
    result, lse = _concat(parts, batch * len_q, heads, v.shape[-1], m)
    result = result.view(batch, len_q, heads, v.shape[-1])
    return result.transpose(1, 2) if layout == "bhsd" else result, lse.view(batch, len_q, heads)


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0,
                     max_seqlen_k: int = 0, *, seqused_k: Tensor | None = None, causal: bool = False,
                     window_size: Sequence[int] | None = (-1, -1), softmax_scale: float | None = None, softcap: float = 0.0,
                     alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, out: Tensor | None = None,
                     return_lse: bool = True,
                     num_splits: int = 0, batch_invariant: bool = False, backend: str | None = None,
                     _plain: bool = False) -> tuple[Tensor, Tensor]:
    """Ragged attention: out (Tq, Hq, Dv), lse (Tq, Hq); rows at or past cu_seqlens_q[-1] are zeros here, unspecified elsewhere."""
    m, o = _math(q, _plain), _options(q, causal, window_size, softmax_scale, softcap)
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for b in range(len(cu_q) - 1):
        len_k = cu_k[b + 1] - cu_k[b] if seqused_k is None else max(int(seqused_k[b]), 0)
        keys = slice(cu_k[b], cu_k[b] + len_k)
        parts.append(_sequence(m.lift(q[cu_q[b] : cu_q[b + 1]]), m.lift(k[keys]), m.lift(v[keys]), o, m,
                               _per_sequence(alibi_slopes, b), sinks))
    return _concat(parts, q.shape[0], q.shape[1], v.shape[-1], m)


def attention_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, *,
                    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, k: Tensor | None = None,
                    v: Tensor | None = None,
                    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, rotary_interleaved: bool = False,
                    kv_layout: str = "NHD", k_scale: Tensor | float | None = None, v_scale: Tensor | float | None = None,
                    causal: bool = False, window_size: Sequence[int] | None = (-1, -1), softmax_scale: float | None = None,
                    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
                    out: Tensor | None = None,
                    return_lse: bool = True, num_splits: int = 0, batch_invariant: bool = False, backend: str | None = None,
                    _plain: bool = False) -> tuple[Tensor, Tensor]:
    """Attention over a paged cache: out and lse with q's leading axes.

    With k and v, the call attends to `caches_after` of the same arguments. Rows at a negative position that are
    turned (rotary) hold some value: theirs is unspecified.
    """
    m, o = _math(q, _plain), _options(q, causal, window_size, softmax_scale, softcap)
    if k is not None:
        k_cache, v_cache = caches_after(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=cu_seqlens_q, k=k, v=v,
                                        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
                                        kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale, _plain=_plain)
    k_pages, v_pages = _pages(k_cache, kv_layout), _pages(v_cache, kv_layout)
    heads, dim_v = q.shape[-2], v_cache.shape[-1]
    rows, starts = _ragged(q, cu_seqlens_q)
    parts = []
    for b in range(len(starts) - 1):
        q_b = m.lift(rows[starts[b] : starts[b + 1]])
        len_k = max(int(kv_lens[b]), 0)
        if rotary_cos is not None:
            q_b = m.round(_rotate(q_b, torch.arange(len(q_b)) + len_k - len(q_b), rotary_cos, rotary_sin, rotary_interleaved, m))
        position = torch.arange(len_k)
        k_b = m.round(m.lift(_gather(k_pages, block_table[b], position)) * _scale(k_scale, b, m))
        v_b = m.round(m.lift(_gather(v_pages, block_table[b], position)) * _scale(v_scale, b, m))
        parts.append(_sequence(q_b, k_b, v_b, o, m, _per_sequence(alibi_slopes, b), sinks))
    result, lse = _concat(parts, rows.shape[0], heads, dim_v, m)
    return result.view(*q.shape[:-1], dim_v), lse.view(q.shape[:-1])


def caches_after(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, kv_lens: Tensor, *,
                 cu_seqlens_q: Tensor | None = None,
                 k: Tensor | None = None, v: Tensor | None = None, rotary_cos: Tensor | None = None,
                 rotary_sin: Tensor | None = None,
                 rotary_interleaved: bool = False, kv_layout: str = "NHD", k_scale: Tensor | float | None = None,
                 v_scale: Tensor | float | None = None, _plain: bool = False, **unused: Any) -> tuple[Tensor, Tensor]:
    """CPU copies of both caches, in their dtype and layout, as `attention_paged` of the same arguments must leave them."""
    k_cache, v_cache = _copy(k_cache), _copy(v_cache)
    if k is None or v is None:
        return k_cache, v_cache
    m = _math(q, _plain)
    k_pages, v_pages = _pages(k_cache, kv_layout), _pages(v_cache, kv_layout)
    page_size = k_pages.shape[1]
    (k_rows, starts), (v_rows, _) = _ragged(k, cu_seqlens_q), _ragged(v, cu_seqlens_q)
    for b in range(len(starts) - 1):
        rows = slice(starts[b], starts[b + 1])
        position = torch.arange(rows.stop - rows.start) + max(int(kv_lens[b]), 0) - (rows.stop - rows.start)
        k_b, v_b = m.lift(k_rows[rows]), m.lift(v_rows[rows])
        if rotary_cos is not None:
            k_b = _rotate(k_b, position, rotary_cos, rotary_sin, rotary_interleaved, m)
        table = block_table[b].cpu().long()
        for i, at in enumerate(position.tolist()):
            if at >= 0:
                slot = int(table[at // page_size]), at % page_size
                k_pages[slot] = quantize(k_b[i] / _scale(k_scale, b, m), k_cache.dtype)
                v_pages[slot] = quantize(v_b[i] / _scale(v_scale, b, m), v_cache.dtype)
    return k_cache, v_cache


def cache_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, kv_layout: str = "NHD",
                 k_scale: Tensor | float | None = None, v_scale: Tensor | float | None = None,
                 backend: str | None = None) -> tuple[Tensor, Tensor]:
    """CPU copies of both caches, in their dtype and layout, as the call must leave them. Negative slots are skipped."""
    m = _math(k, False)
    k_cache, v_cache = _copy(k_cache), _copy(v_cache)
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        pages = _pages(cache, kv_layout)
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                pages[slot // pages.shape[1], slot % pages.shape[1]] = quantize(m.lift(new[i]) / _scale(scale, 0, m), cache.dtype)
    return k_cache, v_cache


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, sinks: Tensor | None = None,
                 backend: str | None = None, _plain: bool = False) -> tuple[Tensor, Tensor]:
    """The state over the union of disjoint keys: out = sum exp(lse_i - lse) out_i, lse = log(sum exp lse_i + exp sink)."""
    m = _math(outs[0], _plain)
    parts = torch.stack([m.lift(x) for x in outs])
    logits = torch.stack([m.lift(x) for x in lses])
    sink = torch.full(logits.shape[-1:], float("-inf"), dtype=m.work) if sinks is None else m.lift(sinks)
    every = torch.cat([logits, sink.expand(1, *logits.shape[1:])])
    top = every.amax(0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    total = torch.exp(every - top).sum(0)
    weight = torch.exp(logits - top) / total.masked_fill(total == 0, 1.0)
    out = (weight[..., None] * parts.masked_fill((logits == float("-inf"))[..., None], 0.0)).sum(0)
    return m.round(out).double(), (top + torch.log(total)).double()


def plain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`call(*args, **kwargs)` in the arithmetic of plain torch in q's dtype, as float64 (out, lse).

    Inputs, turned q, scaled k and v, probabilities and out are rounded to q's dtype; products accumulate in float32 and
    softmax is float32. `call` is a function of this module, or the public one of the same name.
    """
    return globals()[call.__name__](*args, _plain=True, **kwargs)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`: nearest, ties to even; for 8-bit types saturated at the largest finite value, NaN stays NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    codes = torch.arange(128, dtype=torch.uint8,
                         device=x.device).view(dtype).double()  # the values without sign bit rise with the code
    grid = codes[torch.isfinite(codes)]
    size = x.detach().double().abs().clamp(max=float(grid[-1])).nan_to_num()
    above = torch.searchsorted(grid, size).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = grid[above] - size, size - grid[below]
    code = torch.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    value = torch.where(torch.signbit(x), -grid[code], grid[code])
    value = torch.where(torch.isnan(x), torch.nan, value)
    return value.float().to(dtype)


def _rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, m: _Math) -> Tensor:
    """x (L, H, D) turned by the angles of `position` (L,): pairs (0, 1), (2, 3), … or (0, R), (1, R + 1), … of the first 2R."""
    half = cos.shape[-1]
    row = position.clamp(min=0)
    c, s = m.lift(cos)[row][:, None, :], m.lift(sin)[row][:, None, :]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, b * c + a * s
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)


def _ragged(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, list[int]]:
    """x as rows (T, H, D), and where each sequence starts (B + 1 entries)."""
    if cu_seqlens is not None:
        return x, cu_seqlens.tolist()
    return x.flatten(0, 1), [b * x.shape[1] for b in range(x.shape[0] + 1)]


def _pages(cache: Tensor, kv_layout: str) -> Tensor:
    """The cache as (N, P, Hkv, D), a view."""
    return cache.transpose(1, 2) if kv_layout == "HND" else cache


def _gather(pages: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """Rows (L, Hkv, D) at the given positions; only the entries that they need are looked at."""
    page_size = pages.shape[1]
    needed = table[: -(-len(position) // page_size)].cpu().long()
    page = needed[position // page_size] if len(position) else needed[:0]
    if pages.element_size() == 1:  # torch indexes few 8-bit float tensors
        return pages.view(torch.uint8)[page.to(pages.device), (position % page_size).to(pages.device)].view(pages.dtype)
    return pages[page.to(pages.device), (position % page_size).to(pages.device)]


def _scale(scale: Tensor | float | None, b: int, m: _Math) -> Tensor | float:
    """A factor that broadcasts over (L, Hkv, D) or (Hkv, D)."""
    if not isinstance(scale, Tensor):
        return 1.0 if scale is None else scale
    scale = m.lift(_per_sequence(scale, b))
    return scale if scale.dim() == 0 else scale[:, None]


def _copy(cache: Tensor) -> Tensor:
    return cache.detach().cpu().clone()
