"""Writes into a paged cache: slots, scales, the rounding to 8 bits, and the rotary turn before it.

`host` says that values may be looked at (CPU, where that is free). On an accelerator nothing is read back: a token that
is to be skipped is redirected to write what another token writes anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 x in a cache's dtype, rounded to nearest even. Torch's 8-bit casts do not all saturate: clamped first."""
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)  # NaN stays
    return x.to(dtype)


def per_head(scale: Tensor | float | None, b: Tensor | None) -> Tensor | float | None:
    """A scale as it multiplies (T, Hkv, D); b (T,) is each token's sequence, for scales (B, Hkv)."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    return scale[:, None] if scale.dim() == 1 else scale.index_select(0, b).unsqueeze(-1)


def rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) turned by the angles of `position` (...), in float32; the first 2 * cos.shape[-1] dims turn."""
    half = cos.shape[-1]
    if cos.shape[0] == 0:  # no row has an angle
        return x.float()
    at = position.clamp(0, cos.shape[0] - 1).flatten()  # rows at negative positions have no angle: any will do
    c, s = (t.index_select(0, at).float().view(*position.shape, 1, half) for t in (cos, sin))
    x = x.float()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([turned, x[..., 2 * half :]], -1) if x.shape[-1] > 2 * half else turned


def store(new: Tensor, cache: Tensor, page: Tensor, place: Tensor, write: Tensor, host: bool) -> None:
    """cache[page[t], place[t]] = new[t] (T, Hkv, D) where write[t]; int64 indices. `new` has the cache's dtype."""
    if new.numel() == 0 or cache.numel() == 0:
        return
    if cache.element_size() == 1:  # few 8-bit operators exist: bytes are moved
        new, cache = new.view(torch.uint8), cache.view(torch.uint8)
    if host:
        if not bool(write.all()):
            kept = write.nonzero().squeeze(-1)
            new, page, place = (t.index_select(0, kept) for t in (new, page, place))
        cache.index_put_((page, place), new)
        return
    # Skipped tokens repeat some written one; if there is none, all write slot 0's own value back.
    some = write.to(torch.int32).argmax().view(1)
    any_ = write.index_select(0, some)
    source = torch.where(write, torch.arange(write.shape[0], device=write.device), some)
    page, place = (t.index_select(0, source).masked_fill(any_.logical_not(), 0) for t in (page, place))
    old = cache[:1, 0]
    new = torch.where(any_.view(-1, 1, 1), new.index_select(0, source), old)
    cache.index_put_((page, place), new)


def cache_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    host: bool,
) -> None:
    """Token t goes to slot page * P + offset of both caches (N, P, Hkv, D); slots that there are not are skipped."""
    size = k_cache.shape[1]
    write = (slots >= 0) & (slots < k_cache.shape[0] * size)
    slots = slots.to(torch.int64).masked_fill(write.logical_not(), 0)
    page, place = slots // size, slots % size
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        store(scaled(new, scale, cache.dtype, None), cache, page, place, write, host)


def scaled(new: Tensor, scale: Tensor | float | None, dtype: torch.dtype, b: Tensor | None) -> Tensor:
    """new / scale in the cache's dtype."""
    if scale is None:
        return new if new.dtype == dtype else quantize(new.float(), dtype)
    return quantize(new.float() / per_head(scale, b), dtype)


__all__ = ["cache_append", "quantize", "rotate", "scaled", "store"]
