"""Own CPU kernels: attention.cpp over its headers, compiled at first use (library.py), called through a C ABI.

A call is two structs of 8-byte fields (params.h): the first is packed once for calls of the same shapes, strides and
types, the second each time.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from portattn import appended, freed, overlaps
from portattn.capability import Reason
from portattn.errors import KernelError
from portattn.problem import Call

from . import library

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.bool: 4}  # params.h; every other is 8-bit: 3
_DENSE, _VARLEN, _PAGED, _PAGED_RAGGED = range(4)
DIALECT = True  # lengths are read, and lse is written, as the caller says
_ARGS = struct.Struct("20Q4q4d")
_MEMORY = struct.Struct("q2Q4q")  # the last fields of Shape
_LOOK_CLOSER = 2  # attention.cpp
_NO_MEMORY = "the CPU kernels found no memory for their work space"
_threads = torch.get_num_threads


def probe(device: torch.device) -> tuple[Reason, ...]:
    """() where the kernels are there or can be compiled; the first call compiles them."""
    no = library.missing()
    return (no,) if no else ()


def identity() -> str:
    return library.identity()


def _type(x: Tensor) -> int:
    return _TYPES.get(x.dtype, 3)


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _is_64(x: Tensor | None) -> bool:
    return x is not None and x.dtype == torch.int64


@functools.lru_cache(maxsize=None)
def _values(dtype: torch.dtype) -> Tensor:
    """What each code of an 8-bit type stands for: 256 float32, then the same in bfloat16, which has them all; as bytes."""
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
    return torch.cat([values.view(torch.uint8), values.bfloat16().view(torch.uint8)])


def _codes(cache: Tensor) -> tuple[Tensor | None, int]:
    """(table, its address) of an 8-bit cache; who keeps the address keeps the table, of which two threads may have made one each."""
    table = _values(cache.dtype) if cache.element_size() == 1 else None
    return table, _at(table)


def _scale_strides(scale: Tensor | float | None) -> tuple[int, int]:
    """(sequence, head) strides of a scale; a float has none."""
    return (0, 0, *scale.stride())[-2:] if isinstance(scale, Tensor) else (0, 0)


def _scale(scale: Tensor | float | None) -> tuple[int, float]:
    """(address, value): one of the two counts."""
    if isinstance(scale, Tensor):
        return scale.data_ptr(), 1.0
    return 0, 1.0 if scale is None else scale


def _rows(x: Tensor | None) -> tuple[int, int, int]:
    """(sequence, token, head) strides; a ragged tensor has no sequence axis."""
    return (0, 0, 0) if x is None else (0, *x.stride())[-4:-1]


def _shape(kind: int, batch: int, len_q: int, len_k: int, q: Tensor, heads_q: int, k: Tensor, v: Tensor, out: Tensor | None, *,
           k_new: Tensor | None = None, v_new: Tensor | None = None, table: Tensor | None = None, lengths=(None, None, None, None),
           bias: Tensor | None = None, alibi: Tensor | None = None, k_scale=None, v_scale=None, cos: Tensor | None = None,
           sin: Tensor | None = None, interleaved: bool = False, invariant: bool = False, counting: int = 0,
           lse: Tensor | None = None, lse_form: int = 0) -> bytes:
    """struct Shape of params.h."""
    fields = (
        kind, batch, heads_q, k.shape[-2], k.shape[-1], v.shape[-1], _type(q), _type(k), _type(q if out is None else out), len_q, len_k,
        k.shape[1] if k.dim() == 4 else 0, k.shape[0], 0 if table is None or table.dim() < 2 else table.shape[1], *_rows(q), *_rows(out), *((0, 0, 0) if lse is None else (0, *lse.stride())[-3:]), *_rows(k), *_rows(v), *_rows(k_new), *_rows(v_new),
        *((0, 0) if table is None else (0, *table.stride())[-2:]), *((-1, 0, 0, 0, 0) if bias is None else (_type(bias), *bias.stride())),
        *((0, 0) if alibi is None else (0, *alibi.stride())[-2:]), *_scale_strides(k_scale), *_scale_strides(v_scale), _is_64(table),
        *map(_is_64, lengths), counting, lse_form,
        *((0, 0, 0, 0, 0, 0) if cos is None else (cos.shape[-1], interleaved, _type(cos), cos.shape[0], cos.stride(0), sin.stride(0))),
        invariant)
    return struct.pack(f"{len(fields)}q", *fields)


_low = (0, 0)  # from where to where memory was found below freed.LOW


def _memory(*tensors: Tensor | None) -> bytes:
    """The rest of struct Shape; tensors in the order of Args."""
    given = [isinstance(x, Tensor) and x.numel() > 0 for x in tensors]
    reaches = [0 if tensors[13] is None else overlaps.reach(tensors[i]) for i in (1, 2, 13, 14)]
    return _MEMORY.pack(sum(on << i for i, on in enumerate(given)), *_low, *reaches)


def _checked(code: int) -> None:
    if code:
        raise KernelError(_NO_MEMORY)


def _look_closer(code: int, state: dict, args: bytes, name: str, tensors: dict) -> None:
    """After the kernels said `code`: where a tensor may have been freed, or lie in another's memory, that is an error, or the call runs, and such
    low addresses are known."""
    global _low
    if code == _LOOK_CLOSER:
        freed.refuse(name, **tensors)
        if {"k", "k_cache"} <= tensors.keys():
            appended.refuse(name, *(tensors[n] for n in ("k", "v", "k_cache", "v_cache")))
        shape, (given, _, _, *reaches) = state["shape"][:-_MEMORY.size], _MEMORY.unpack(state["shape"][-_MEMORY.size:])
        found = [at for i, at in enumerate(_ARGS.unpack(args)[:20]) if given >> i & 1 and at < freed.LOW]
        if found:
            _low = (min(_low[0] or freed.LOW, min(found) >> 16 << 16), max(_low[1], (max(found) >> 24) + 1 << 24))
        state["shape"] = shape + _MEMORY.pack(given, *_low, *reaches)
        code = state["run"](shape + bytes(_MEMORY.size), args)
    _checked(code)


def _tidy(call: Call) -> Call:
    """Small tensors as the kernels read them: lengths and sinks without gaps, sinks float32, cos and sin of one type."""
    loose = [name for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "kv_lens") if (x := getattr(call, name)) is not None and not x.is_contiguous()]
    if (sinks := call.sinks) is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        loose.append("sinks")
    if (cos := call.rotary_cos) is not None and (cos.dtype != call.rotary_sin.dtype or cos.stride(-1) != 1 or call.rotary_sin.stride(-1) != 1):
        loose += ["rotary_cos", "rotary_sin"]
    if not loose:
        return call
    given = {name: getattr(call, name) for name in loose}
    if any([x.data_ptr() < freed.LOW for x in given.values()]):
        freed.refuse(freed.named(call)[0], **given)
    return call._replace(**{name: x.float().contiguous() if x.is_floating_point() else x.contiguous() for name, x in given.items()})


def _bind(call: Call, bound, out: Tensor) -> None:
    """What all calls of this bound share."""
    lib = library.library()
    lse = call.q.new_empty(call.q.shape[:-1], dtype=torch.float32)
    lse = lse.mT.contiguous() if call.lse_form else lse
    ragged, paged = call.cu_seqlens_q is not None, call.block_table is not None
    if paged:
        batch = call.block_table.shape[0]
    else:
        batch = call.cu_seqlens_q.shape[0] - 1 if ragged else call.q.shape[0]
    kind = (_PAGED_RAGGED if ragged else _PAGED) if paged else _VARLEN if ragged else _DENSE
    state, tidy = bound.state, _tidy(call)
    state["untidy"] = tidy is not call
    state["shape"] = _shape(
        kind, batch, call.q.shape[0 if ragged else 1], 0 if paged else call.k.shape[0 if ragged else 1], call.q, call.q.shape[-2], call.k, call.v, out,
        k_new=call.k_new, v_new=call.v_new, table=call.block_table,
        lengths=(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.kv_lens), bias=call.bias, alibi=call.alibi_slopes,
        k_scale=call.k_scale, v_scale=call.v_scale, cos=tidy.rotary_cos, sin=tidy.rotary_sin, interleaved=call.rotary_interleaved,
        invariant=call.batch_invariant, counting=call.counting, lse=lse.mT if call.lse_form else lse, lse_form=call.lse_form) + _memory(
            call.q, call.k, call.v, out, None, call.block_table, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.kv_lens, call.bias,
            call.alibi_slopes, call.sinks, call.k_new, call.v_new, call.rotary_cos, call.rotary_sin, call.k_scale, call.v_scale)
    state["out"], state["lse"] = tuple(out.shape), tuple(lse.shape)  # a torch.Size takes longer to read
    state["table"], state["values"] = _codes(call.k)
    state["run"] = lib.pa_attention


def attention(call: Call, bound) -> Tensor | tuple[Tensor, Tensor]:
    """out, or (out, lse) if the call asks for it."""
    state = bound.state
    run = state.get("run")
    if run is None:
        out = call.q.new_empty((*call.q.shape[:-1], call.v.shape[-1])) if call.out is None else call.out
        _bind(call, bound, out)
        return attention(call._replace(out=out), bound)
    if state["untidy"]:
        call = _tidy(call)
    # One unpacking and no helper for each tensor: a microsecond of a tiny call's eight.
    (q, k, v, scale, causal, left, right, softcap, bias, alibi, sinks, cu_q, cu_k, used, _, _, table, lens, k_new, v_new, cos, sin, _, k_scale, v_scale,
     out, with_lse, splits, _, _, _, within) = call
    if out is None:
        out = q.new_empty(state["out"])
    lse = q.new_empty(state["lse"], dtype=torch.float32) if with_lse else None
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if within is not None:
        q_at, k_at, v_at = q_at + within[0], k_at + within[1], v_at + within[2]
    k_scales, k_scale = (0, 1.0) if k_scale is None else _scale(k_scale)
    v_scales, v_scale = (0, 1.0) if v_scale is None else _scale(v_scale)
    args = _ARGS.pack(
        q_at, k_at, v_at, out.data_ptr(), 0 if lse is None else lse.data_ptr(), 0 if table is None else table.data_ptr(),
        0 if cu_q is None else cu_q.data_ptr(), 0 if cu_k is None else cu_k.data_ptr(), 0 if used is None else used.data_ptr(),
        0 if lens is None else lens.data_ptr(), 0 if bias is None else bias.data_ptr(), 0 if alibi is None else alibi.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), 0 if k_new is None else k_new.data_ptr(), 0 if v_new is None else v_new.data_ptr(),
        0 if cos is None else cos.data_ptr(), 0 if sin is None else sin.data_ptr(), k_scales, v_scales, state["values"],
        left, 0 if causal else right, splits, _threads(), scale, softcap, k_scale, v_scale)
    if code := run(state["shape"], args):
        _look_closer(code, state, args, *freed.named(call._replace(out=out)))
    return out if lse is None else (out, lse)


def cache_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale, v_scale, bound) -> None:
    """Writes T tokens into both caches; negative slots are skipped."""
    state = bound.state
    if "run" not in state:
        state["shape"] = _shape(_PAGED, 1, k.shape[0], 0, k, k.shape[1], k_cache, v_cache, None, k_new=k, v_new=v, table=slot_mapping,
                                k_scale=k_scale, v_scale=v_scale) + _memory(None, k_cache, v_cache, None, None, slot_mapping, *[None] * 7, k, v,
                                                                           None, None, k_scale, v_scale)
        state["table"], state["values"] = _codes(k_cache)
        state["run"] = library.library().pa_cache_append
    k_scales, k_value = _scale(k_scale)
    v_scales, v_value = _scale(v_scale)
    args = _ARGS.pack(0, k_cache.data_ptr(), v_cache.data_ptr(), 0, 0, slot_mapping.data_ptr(), 0, 0, 0, 0, 0, 0, 0, k.data_ptr(), v.data_ptr(), 0, 0,
                      k_scales, v_scales, state["values"], -1, -1, 0, _threads(), 1.0, 0.0, k_value, v_value)
    if code := state["run"](state["shape"], args):
        _look_closer(code, state, args, "cache_append", dict(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping, k_scale=k_scale,
                                                             v_scale=v_scale))


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None, bound) -> tuple[Tensor, Tensor]:
    """outs (n, ..., Hq, Dv), lses (n, ..., Hq) float32: the state over the union of their keys."""
    run = bound.state.get("run")
    if run is None:  # to look for the library costs ten times as much as a small merge
        run = bound.state["run"] = library.library().pa_merge
    outs, lses = outs.contiguous(), lses.contiguous()
    sinks = sinks if sinks is None else sinks.float().contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    _checked(run(outs.shape[0], lse.numel(), lses.shape[-1], outs.shape[-1], _type(outs), outs.data_ptr(), lses.data_ptr(), _at(sinks), out.data_ptr(),
                 lse.data_ptr(), _threads()))
    return out, lse


def notes(call: Call, bound) -> tuple[str, ...]:
    """What explain() says of the route."""
    return (f"{library.chosen()} kernels, at most {_threads()} threads",)
