"""What the spellings share: refusals, windows, small tensors that are kept, ragged rows, rotary turns.

The modules beside this one keep a peer's signatures and return shapes and call portattn's public functions. Where conventions
differ, the difference is translated on the device and without waiting for it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..device import capturing
from ..dialect import KEPT
from ..errors import ArgumentError, ArgumentTypeError, PortattnError

ANY = (-1, -1)
_is_compiling = torch.compiler.is_compiling


def refuse(call: str, name: str, value: Any, why: str) -> None:
    """Raises for an argument that asks for something portattn does not compute."""
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(f"{call}: {name}: {why}, got {shown}")


def refuse_dropout(call: str, dropout_p: float) -> None:
    refuse(call, "dropout_p", dropout_p,
           "wanted 0.0: portattn is for inference and drops no probabilities (in evaluation flash-attn wants 0.0 too)")


def window(given: Any) -> tuple[int, int]:
    """(left, right) as portattn takes it: None and any negative number are unbounded; lists and tensors become ints."""
    if given is None or (type(given) is tuple and given == ANY):
        return ANY
    try:
        left, right = map(operator.index, given)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"window_size: wanted (left, right) of two ints, or None, got {given!r}") from None
    return max(left, -1), max(right, -1)


# ------------------------------------------------------------------ pages and caches, which no backend differentiates
def wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class ForwardOnly(torch.autograd.Function):
    """run(*tensors) of tensors that require grad: flash-attn takes them and has no backward; here it raises, with a reason."""

    @staticmethod
    def forward(ctx, call, run, *tensors):
        ctx.call = call
        return run(*tensors)

    @staticmethod
    def backward(ctx, *_):
        raise PortattnError(f"{ctx.call}: no gradients over a cache or a block_table, which no backend computes (nor does "
                            "flash-attn): call it under torch.no_grad(), or without them")


def no_backward(*given: Any, **named: Any) -> None:
    """What flash-attn's private backward functions are here."""
    raise PortattnError("_flash_attn_backward: portattn has no backward of its own to call; gradients come through autograd: call "
                        "flash_attn_func or flash_attn_varlen_func, and backward() of what they return")


# ------------------------------------------------------------------ small tensors that are asked for again and again
# What is kept never changes, and nothing on a device that a graph or another stream may still read is let go.
_rows: dict[Any, Tensor] = {}  # keys leave the device out on CPU: hashing one costs as much as the rest of a lookup
_equal: dict[tuple[int, int], Tensor] = {}
_equal_on: dict[tuple[int, int], tuple[int, int, Tensor]] = {}  # (device, stream): length, batch, and what was made last
_nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def kept_rows(batch: int, like: Tensor) -> Tensor | None:
    """The `row_table` that is kept, if it is."""
    return _rows.get(batch if like.is_cpu else (batch, like.device))


def row_table(batch: int, like: Tensor) -> Tensor:
    """(B, 1) int32 of 0 .. B - 1: the table under which row b of a contiguous cache is page b. Kept, but for graph captures."""
    passing = _is_compiling() or type(like) is not Tensor  # a fake one takes no real one beside it
    table = None if passing else kept_rows(batch, like)
    if table is None:
        if len(_rows) >= KEPT or passing or capturing(like.device):  # in a capture, memory is the graph's
            return torch.arange(batch, dtype=torch.int32, device=like.device)[:, None]
        # A copy from the host waits until the values are there, so any stream may read them later.
        table = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None].to(like.device)
        if type(table) is Tensor:  # a fake one is of its mode only
            _rows[batch if like.is_cpu else (batch, like.device)] = table
    return table


def equal_lengths(length: int, batch: int, like: Tensor) -> Tensor:
    """(B,) int32, all `length`: the same for every layer of a step. On CPU, where no stream can still be reading them, many are kept;
    on a GPU the last of each stream, whose memory is used again behind what read it there."""
    if _is_compiling() or type(like) is not Tensor and isinstance(like, Tensor):
        return torch.full((batch,), length, dtype=torch.int32, device=like.device)
    if not like.is_cpu:
        return _on_stream(length, batch, like)
    lens = _equal.get((length, batch))
    if lens is None:
        lens = torch.full((batch,), length, dtype=torch.int32, device="cpu")
        if len(_equal) >= KEPT:
            _equal.clear()
        if type(lens) is Tensor:
            _equal[length, batch] = lens
    return lens


def _on_stream(length: int, batch: int, like: Tensor) -> Tensor:
    device = like.device
    stream = _stream_of(device.index) if like.is_cuda and _stream_of else None
    if stream is not None:
        last = _equal_on.get((device.index, stream))
        if last is not None and last[0] == length and last[1] == batch and not (stream and capturing(device)):
            return last[2]
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    if stream is not None and type(lens) is Tensor and not (stream and capturing(device)):  # a capture's memory is the graph's
        if len(_equal_on) >= KEPT:
            _equal_on.clear()
        _equal_on[device.index, stream] = (length, batch, lens)
    return lens


def nothing(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor, for what flash-attn returns with dropout or by parts only. Kept: it has no memory that anything could share."""
    if _is_compiling() or type(like) is not Tensor:
        return like.new_empty(0, dtype=dtype)
    key = (dtype or like.dtype, like.device)
    empty = _nothing.get(key)
    if empty is None or empty.numel() or empty.requires_grad:  # resize_(), or it is a result of somebody's autograd.Function
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=key[0], device=key[1])
        if type(empty) is Tensor:  # a fake one is of its mode only
            _nothing[key] = empty
    return empty


def sequence_of(rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `rows` ragged rows: its sequence, and its place in it. Rows past the last sequence count on in that one."""
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    return sequence, row - cu_seqlens[sequence]


def rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) turned at position (...), in float32, rounded to x's dtype. Positions outside the table are clamped to it."""
    position = position.clamp(0, max(cos.shape[0] - 1, 0)).long()
    c, s = cos[position].float().unsqueeze(-2), sin[position].float().unsqueeze(-2)
    dim = 2 * cos.shape[-1]
    turned = x[..., :dim].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), x[..., dim:]), -1)


def single_token_pages(k_cache: Tensor, v_cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as pages of one token, and the table of their slots. Pages that lie apart in memory are copied."""
    page_size = k_cache.shape[1]
    slots = table[..., None].long() * page_size + torch.arange(page_size, device=table.device)
    single = lambda cache: cache.reshape(-1, 1, *cache.shape[2:])
    return single(k_cache), single(v_cache), slots.flatten(1).int()
