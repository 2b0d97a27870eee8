"""Arguments to a bound Problem: every fault of a call named at once, before anything runs or is written.

Each function takes the arguments of the public call of its name, and returns a Bound whose `normal` holds the
normalised numbers and whose `extra`, if set, maps the caller's tensors to those that a backend receives
(views of one layout; copies where a last stride is not 1). Runs once per shape and options: clarity over speed.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from . import appended, config, freed, overlaps, registry
from .device import capturing, facts
from .dialect import AFTER, OURS, PREFIX_SUMS
from .errors import ArgumentError, ArgumentTypeError, faults
from .manifest import DTYPES, KV_DTYPES
from .problem import Call, Problem, dtype_name, q_len_class
from .registry import Bound

_FLOATS = tuple(getattr(torch, name) for name in DTYPES)
_KV_FLOATS = tuple(getattr(torch, name) for name in KV_DTYPES if hasattr(torch, name))
_INTS = (torch.int32, torch.int64)
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny  # kernels take numbers as float32
_WIDEST = (1 << 31) - 1  # a window, or splits, beyond any length


class Normal(NamedTuple):
    """The numbers of a call, normalised: see Call."""

    scale: float = 0.0
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    max_q: int = 0
    max_k: int = 0
    lse: bool = False
    num_splits: int = 0
    invariant: bool = False
    swap: bool = False
    interleaved: bool = False
    check: bool = False
    notes: tuple[str, ...] = ()
    scores: int = 0  # B x Hq x Sq x Sk, an upper bound: what a quadratic kernel would hold
    counting: int = 0  # for the backend: see Call
    lse_form: int = 0
    convert: int = 0  # what is done for a backend that takes neither: `dialect.after` to kv_lens, `dialect.lse_as` to lse
    lse_after: int = 0


class Faults:
    """Collects what is wrong with a call and raises it all at once."""

    def __init__(self, call: str):
        self.call, self.lines, self.values = call, [], 0

    def value(self, name: str, wanted: Any, got: Any) -> None:
        self.lines.append(f"{name}: wanted {wanted}, got {got}")
        self.values += 1

    def type(self, name: str, wanted: str, got: Any) -> None:
        shown = "" if isinstance(got, Tensor) else f" {got!r}"[:60]
        self.lines.append(f"{name}: wanted {wanted}, got {type(got).__name__}{shown}")

    def raise_any(self) -> None:
        if self.lines:
            kind = ArgumentError if self.values else ArgumentTypeError
            raise kind(faults(self.call, self.lines))

    # ---- single arguments; each returns whether later checks may use it
    def tensor(self, name: str, x: Any, ndim: int | tuple[int, ...], dtypes: tuple[torch.dtype, ...],
               like: Tensor | None = None) -> bool:
        if not isinstance(x, Tensor):
            self.type(name, "a tensor", x)
            return False
        if x.is_nested:
            self.value(name, "a plain tensor (attention_varlen takes the values and offsets of a nested one)", "a nested one")
            return False
        if x.layout is not torch.strided:
            self.value(name, "a strided tensor", x.layout)
            return False
        if short := freed.shortage(x):
            self.value(name, *freed.wanted(short))
        ok = True
        ranks = (ndim,) if isinstance(ndim, int) else ndim
        if x.dim() not in ranks:
            self.value(name, f"{' or '.join(map(str, ranks))} dimensions", f"shape {tuple(x.shape)}")
            ok = False
        if x.dtype not in dtypes:
            self.value(name, "|".join(map(dtype_name, dtypes)), dtype_name(x.dtype))
        if like is not None and x.device != like.device:
            self.value(name, f"device {like.device} as the first tensor's", x.device)
        return ok

    def shape(self, name: str, x: Tensor, wanted: tuple[int | None, ...], why: str = "") -> None:
        if x.dim() != len(wanted) or any(w is not None and w != s for w, s in zip(wanted, x.shape)):
            text = "(" + ", ".join("any" if w is None else str(w) for w in wanted) + ("," if len(wanted) == 1 else "") + ")"
            self.value(name, f"shape {text}{why and ' ' + why}", tuple(x.shape))

    def number(self, name: str, x: Any, least: float | None = None) -> float:
        if isinstance(x, Tensor) or not isinstance(x, numbers.Real) or isinstance(x, bool):
            self.type(name, "a Python number (a tensor would have to be waited for)" if isinstance(x, Tensor) else "a number", x)
            return 0.0
        if not -_LARGEST <= x <= _LARGEST or (least is not None and x < least):
            self.value(name, "a number that is finite in float32" + ("" if least is None else f", at least {least:g}"), x)
            return 0.0
        return float(x)

    def integer(self, name: str, x: Any, least: int = 0) -> int:
        if isinstance(x, bool) or not isinstance(x, numbers.Integral):
            self.type(name, "a host int", x)
            return least
        if x < least:
            self.value(name, f"an int of at least {least}", x)
        return int(x)

    def boolean(self, name: str, x: Any) -> bool:
        if not isinstance(x, bool):
            self.type(name, "True or False", x)
        return x is True

    def choice(self, name: str, x: Any, allowed: tuple[str, ...]) -> str:
        if not isinstance(x, str):
            self.type(name, "a string", x)
        elif x not in allowed:
            self.value(name, "|".join(allowed), repr(x))
        return x if isinstance(x, str) and x in allowed else allowed[0]

    def window(self, x: Any) -> tuple[int, int]:
        if x is None:
            return -1, -1
        if not isinstance(x, (tuple, list)) or any(isinstance(w, bool) or not isinstance(w, numbers.Integral) for w in x):
            self.type("window_size", "(left, right) of two ints, or None", x)
        elif len(x) != 2 or min(x) < -1:
            self.value("window_size", "two ints of at least -1 (-1: unbounded)", tuple(x))
        else:
            return min(int(x[0]), _WIDEST), min(int(x[1]), _WIDEST)
        return -1, -1

    def softcap(self, x: Any, scale: float) -> float:
        cap = self.number("softcap", x, 0.0)
        if 0 < cap < _SMALLEST or (cap and abs(scale / cap) > _LARGEST):
            self.value("softcap", "0.0, or a number for which softmax_scale / softcap is finite in float32", x)
        return cap

    def options(self, causal: Any, window_size: Any, softmax_scale: Any, softcap: Any, return_lse: Any, num_splits: Any,
                invariant: Any, backend: Any, head_dim: int | None) -> Normal:
        """The options that every attention call has."""
        causal = self.boolean("causal", causal)
        left, right = self.window(window_size)
        scale = 1 / math.sqrt(head_dim or 1) if softmax_scale is None else self.number("softmax_scale", softmax_scale)
        self.backend(backend)
        return Normal(scale, causal, left, 0 if causal else right, self.softcap(softcap, scale),
                      lse=self.boolean("return_lse", return_lse), num_splits=min(self.integer("num_splits", num_splits), _WIDEST),
                      invariant=self.boolean("batch_invariant", invariant), check=config.flag("PORTATTN_CHECK"))

    def backend(self, name: Any) -> None:
        if name is None:
            return
        if not isinstance(name, str):
            self.type("backend", "a backend's name or None", name)
        elif name not in registry.manifests():
            self.value("backend", "|".join(registry.manifests()), repr(name))

    # ---- arguments that several calls share
    def queries_and_keys(self, q: Any, k: Any, v: Any, ndim: int) -> bool:
        """q, k, v alike in rank, dtype and device. Their axes are the callers'."""
        ok = self.tensor("q", q, ndim, _FLOATS)
        like = q if isinstance(q, Tensor) else None
        for name, x in (("k", k), ("v", v)):
            ok &= self.tensor(name, x, ndim, _FLOATS, like)
            if ok and x.dtype != q.dtype and x.dtype in _FLOATS:
                self.value(name, f"{dtype_name(q.dtype)} as q's", dtype_name(x.dtype))
        return ok

    def heads(self, q: Tensor, k: Tensor, v: Tensor, head_axis: int, names: tuple[str, str] = ("k", "v"),
              kv_axis: int | None = None) -> None:
        kv_axis = head_axis if kv_axis is None else kv_axis
        (hq, d), (hk, dk) = (q.shape[head_axis], q.shape[-1]), (k.shape[kv_axis], k.shape[-1])
        if d < 1 or v.shape[-1] < 1:
            self.value("q" if d < 1 else names[1], "a head_dim of at least 1", d if d < 1 else v.shape[-1])
        if dk != d:
            self.value(names[0], f"head_dim {d} as q's", dk)
        if v.shape[kv_axis] != hk:
            self.value(names[1], f"{hk} heads as {names[0]}'s", v.shape[kv_axis])
        if hq < 1:
            self.value("q", "at least one head", hq)
        elif hk < 1 or hq % hk:
            self.value(names[0], f"a number of heads that divides q's {hq}", hk)

    def alibi(self, x: Any, batch: int, heads: int, q: Tensor) -> None:
        if x is not None and self.tensor("alibi_slopes", x, (1, 2), (torch.float32,), q):
            self.shape("alibi_slopes", x, (heads,) if x.dim() == 1 else (batch, heads))

    def sinks(self, x: Any, heads: int, q: Tensor) -> None:
        if x is not None and self.tensor("sinks", x, 1, tuple(dict.fromkeys((torch.float32, q.dtype))), q):
            self.shape("sinks", x, (heads,), "of q's heads")

    def out(self, x: Any, shape: tuple[int, ...], q: Tensor, inputs: tuple[Any, ...]) -> None:
        if x is None:
            return
        if not self.tensor("out", x, len(shape), tuple(dict.fromkeys((q.dtype, torch.float32))), q):
            return
        self.shape("out", x, shape)
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            self.value("out", "a last stride of 1", x.stride())
        if _overlaps_itself(x):
            self.value("out", "a tensor whose elements lie apart", f"strides {x.stride()} of shape {tuple(x.shape)}")
        if (pointer := x.data_ptr()) and any(isinstance(t, Tensor) and t.data_ptr() == pointer for t in inputs):
            self.value("out", "memory of its own", "the memory of an input")
        if torch.is_grad_enabled() and (x.requires_grad or any(isinstance(t, Tensor) and t.requires_grad for t in inputs)):
            self.value("out", "no input that requires grad together with out= in grad mode", "one that does; use torch.no_grad()")

    def appended(self, name: str, x: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """New tokens are read as caches are written; those that are copied first may be anywhere."""
        for cache_name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if x.device == cache.device and not _loose(x) and overlaps.share(x, cache):
                self.value(name, *appended.wanted(cache_name))

    def lengths(self, name: str, x: Any, q: Any, length: int | None = None, why: str = "") -> bool:
        ok = self.tensor(name, x, 1, _INTS, q if isinstance(q, Tensor) else None)
        if ok and length is not None:
            self.shape(name, x, (length,), why)
        return ok

    def scale(self, name: str, x: Any, kv_heads: int, batch: int | None, q: Tensor) -> None:
        if x is None:
            return
        if not isinstance(x, Tensor):
            self.number(name, x)
        elif self.tensor(name, x, (0, 1, 2) if batch is not None else (0, 1), (torch.float32,), q) and x.dim():
            self.shape(name, x, (kv_heads,) if x.dim() == 1 else (batch, kv_heads))


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two elements share memory, told from sizes and strides (a sufficient test for views of one buffer)."""
    reach = 0
    for stride, size in sorted((st, sz) for st, sz in zip(x.stride(), x.shape) if sz > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _loose(x: Tensor | None) -> bool:
    """Whether the last stride is not 1, so that a copy is needed."""
    return x is not None and x.dim() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1


def _copies(named: dict[str, Tensor | None], whole: tuple[str, ...] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the name of each that is to be copied, else "", what explain() says); of those in `whole`, kernels read rows without gaps."""
    flags, notes = [], []
    for name, x in named.items():
        gaps = name in whole and x is not None and not x.is_contiguous()
        flags.append(name if gaps or _loose(x) else "")
        if flags[-1]:
            notes.append(f"{name} copied: " + ("its rows have gaps" if gaps else "its last stride is not 1"))
    return tuple(flags), tuple(notes)


def _tight(call: str, flags: tuple[str, ...], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(_copied(call, flag, x) if flag and x is not None else x for flag, x in zip(flags, tensors))


def _tokens_first(call: str, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Caches whose heads come first as kernels read them."""
    try:
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    except RuntimeError:  # torch makes no view of what was freed
        freed.refuse(call, k_cache=k_cache, v_cache=v_cache)
        raise


def _copied(call: str, name: str, x: Tensor) -> Tensor:
    if x.data_ptr() < freed.LOW:  # torch itself would read there
        freed.refuse(call, **{name: x})
    return x.contiguous()


def _problem(layout: str, q: Tensor, kv: Tensor, heads: tuple[int, int], dims: tuple[int, int], n: Normal,
             **flags: Any) -> Problem:
    where = facts(q.device)
    return Problem(layout, where.device, where.arch, dtype_name(q.dtype), dtype_name(kv.dtype), *heads, *dims, causal=n.causal,
                   window=n.left >= 0 or (n.right >= 0 and not n.causal), softcap=n.softcap > 0, lse=n.lse,
                   batch_invariant=n.invariant, **flags)


def _needs_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _bind(problem: Problem, n: Normal, device: torch.device, backend: str | None, check: bool, extra: Callable | None,
          counting: int = AFTER, lse: int = OURS) -> Bound:
    bound = registry.bind(problem, registry._indexed(device), backend, n.scores, check)
    if counting or lse:
        speaks, lse = getattr(bound.adapter, "DIALECT", False), lse if n.lse else OURS
        counts = speaks and not n.check
        n = n._replace(counting=counting if counts else AFTER, convert=AFTER if counts else counting,
                       lse_form=lse if speaks else OURS, lse_after=OURS if speaks else lse)
    bound.normal, bound.extra = n, extra
    return bound


# ------------------------------------------------------------------ dense
def dense(q, k, v, causal, window_size, softmax_scale, softcap, bias, alibi_slopes, sinks, layout, out, return_lse, num_splits,
          batch_invariant, backend, _lse=OURS, known_answer=True) -> Bound:
    f = Faults("attention")
    swap = f.choice("layout", layout, ("bshd", "bhsd")) == "bhsd"
    ok = f.queries_and_keys(q, k, v, 4)
    n = f.options(causal, window_size, softmax_scale, softcap, return_lse, num_splits, batch_invariant, backend,
                  q.shape[-1] if ok else None)
    if not ok:
        f.raise_any()
    seq, head = (2, 1) if swap else (1, 2)
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            f.value(name, f"batch {q.shape[0]} as q's", x.shape[0])
    if v.shape[seq] != k.shape[seq]:
        f.value("v", f"seqlen {k.shape[seq]} as k's", v.shape[seq])
    f.heads(q, k, v, head)
    batch, sq, hq, sk = q.shape[0], q.shape[seq], q.shape[head], k.shape[seq]
    f.alibi(alibi_slopes, batch, hq, q)
    f.sinks(sinks, hq, q)
    dtypes = tuple(dict.fromkeys((torch.float32, q.dtype, torch.bool)))
    if bias is not None and f.tensor("bias", bias, (0, 1, 2, 3, 4), dtypes, q):
        full = (batch, hq, sq, sk)
        if any(s not in (1, w) for s, w in zip(reversed(bias.shape), reversed(full))):
            f.value("bias", f"a shape broadcastable to (B, Hq, Sq, Sk) = {full}", tuple(bias.shape))
    shape = (batch, hq, sq, v.shape[-1]) if swap else (batch, sq, hq, v.shape[-1])
    f.out(out, shape, q, (q, k, v, bias, alibi_slopes, sinks))
    f.raise_any()

    flags, notes = _copies({"q": q, "k": k, "v": v})
    n = n._replace(max_q=sq, max_k=sk, swap=swap, notes=notes, scores=batch * hq * sq * sk)
    full = (batch, hq, sq, sk)
    extra = None
    if swap or any(flags) or bias is not None or _loose(sinks) or _loose(alibi_slopes):

        def extra(q, k, v, bias, alibi_slopes, sinks, out):
            try:
                q, k, v = _tight(f.call, flags, q, k, v)
                if swap:
                    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                    out = out if out is None else out.transpose(1, 2)
                bias = bias if bias is None else bias.expand(full)
                return q, k, v, bias, *_tight(f.call, ("alibi_slopes", "sinks"), alibi_slopes, sinks), out
            except RuntimeError:  # torch makes no view of what was freed
                freed.refuse(f.call, q=q, k=k, v=v, bias=bias, out=out)
                raise

    problem = _problem("dense", q, k, (hq, k.shape[head]), (q.shape[-1], v.shape[-1]), n, q_len=q_len_class(sq, sk),
                       bias=bias is not None, sinks=sinks is not None, alibi=alibi_slopes is not None,
                       grad=_needs_grad(q, k, v, bias, alibi_slopes, sinks),
                       out_dtype=dtype_name((q if out is None else out).dtype))
    return _bind(problem, n, q.device, backend, known_answer, extra, lse=_lse)


# ------------------------------------------------------------------ varlen
def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, causal, window_size, softmax_scale,
           softcap, alibi_slopes, sinks, out, return_lse, num_splits, batch_invariant, backend, _lse=OURS,
           known_answer=True) -> Bound:
    f = Faults("attention_varlen")
    ok = f.queries_and_keys(q, k, v, 3)
    n = f.options(causal, window_size, softmax_scale, softcap, return_lse, num_splits, batch_invariant, backend,
                  q.shape[-1] if ok else None)
    max_q, max_k = f.integer("max_seqlen_q", max_seqlen_q), f.integer("max_seqlen_k", max_seqlen_k)
    batch = 0
    if f.lengths("cu_seqlens_q", cu_seqlens_q, q):
        batch = len(cu_seqlens_q) - 1
        if batch < 0:
            f.value("cu_seqlens_q", "at least one entry", "none")
    f.lengths("cu_seqlens_k", cu_seqlens_k, q, batch + 1, "as cu_seqlens_q")
    if seqused_k is not None:
        f.lengths("seqused_k", seqused_k, q, batch, "of the batch")
    if not ok:
        f.raise_any()
    if v.shape[0] != k.shape[0]:
        f.value("v", f"{k.shape[0]} rows as k's", v.shape[0])
    f.heads(q, k, v, 1)
    f.alibi(alibi_slopes, batch, q.shape[1], q)
    f.sinks(sinks, q.shape[1], q)
    f.out(out, (*q.shape[:2], v.shape[-1]), q, (q, k, v, alibi_slopes, sinks))
    f.raise_any()

    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
               "alibi_slopes": alibi_slopes, "sinks": sinks}
    flags, notes = _copies(tensors)
    max_q, max_k = min(max_q, q.shape[0]), min(max_k, k.shape[0])
    n = n._replace(max_q=max_q, max_k=max_k, notes=notes, scores=batch * q.shape[1] * max_q * max_k)
    extra = (lambda *t: _tight(f.call, flags, *t)) if any(flags) else None
    problem = _problem("varlen", q, k, (q.shape[1], k.shape[1]), (q.shape[-1], v.shape[-1]), n, q_len=q_len_class(max_q, max_k),
                       sinks=sinks is not None, alibi=alibi_slopes is not None, grad=_needs_grad(q, k, v, alibi_slopes, sinks),
                       out_dtype=dtype_name((q if out is None else out).dtype))
    return _bind(problem, n, q.device, backend, known_answer, extra, lse=_lse)


# ------------------------------------------------------------------ paged
def paged(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q, max_seqlen_q, k, v, rotary_cos, rotary_sin, rotary_interleaved,
          kv_layout, k_scale, v_scale, causal, window_size, softmax_scale, softcap, alibi_slopes, sinks, out, return_lse,
          num_splits, batch_invariant, backend, _counting=AFTER, _lse=OURS, known_answer=True) -> Bound:
    f = Faults("attention_paged")
    hnd = f.choice("kv_layout", kv_layout, ("NHD", "HND")) == "HND"
    ragged = cu_seqlens_q is not None
    ok = f.tensor("q", q, 3 if ragged else 4, _FLOATS)
    if not ok and isinstance(q, Tensor) and q.dim() == 3:
        f.value("cu_seqlens_q", "the prefix sums of a ragged q (Tq, Hq, D)", None)
    caches = _caches(f, q, k_cache, v_cache)
    n = f.options(causal, window_size, softmax_scale, softcap, return_lse, num_splits, batch_invariant, backend,
                  q.shape[-1] if ok else None)
    n = n._replace(interleaved=f.boolean("rotary_interleaved", rotary_interleaved))
    batch = None
    if ragged:
        if f.lengths("cu_seqlens_q", cu_seqlens_q, q):
            batch = len(cu_seqlens_q) - 1
            if batch < 0:
                f.value("cu_seqlens_q", "at least one entry", "none")
    elif ok:
        batch = q.shape[0]
    if f.tensor("block_table", block_table, 2, _INTS, q if ok else None) and batch is not None:
        f.shape("block_table", block_table, (batch, None), "of the batch")
    more = _counting == PREFIX_SUMS
    f.lengths("kv_lens", kv_lens, q, batch if batch is None else batch + more, "of the batch")
    bound = None if max_seqlen_q is None else f.integer("max_seqlen_q", max_seqlen_q)
    if not (ok and caches) or batch is None:
        f.raise_any()
    kv_axis = 1 if hnd else 2
    f.heads(q, k_cache, v_cache, q.dim() - 2, ("k_cache", "v_cache"), kv_axis)
    hq, hkv, d, dv = q.shape[-2], k_cache.shape[kv_axis], q.shape[-1], v_cache.shape[-1]
    page = _page_size(f, k_cache, v_cache, hnd)
    max_q = q.shape[0] if ragged else q.shape[1]
    if ragged and bound is not None:
        max_q = min(bound, max_q)  # no sequence is longer than all of q
    elif bound is not None and bound < max_q and isinstance(max_seqlen_q, numbers.Integral) and not isinstance(max_seqlen_q, bool):
        f.value("max_seqlen_q", f"at least q's length {max_q}", max_seqlen_q)
    _new_tokens(f, q, k, v, hkv, dv, k_cache, v_cache)
    _rotary(f, q, rotary_cos, rotary_sin)
    f.alibi(alibi_slopes, batch, hq, q)
    f.sinks(sinks, hq, q)
    f.scale("k_scale", k_scale, hkv, batch, q)
    f.scale("v_scale", v_scale, hkv, batch, q)
    f.out(out, (*q.shape[:-1], dv), q, (q, k_cache, v_cache, k, v, alibi_slopes, sinks, rotary_cos, rotary_sin, k_scale, v_scale))
    f.raise_any()

    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "kv_lens": kv_lens,
               "cu_seqlens_q": cu_seqlens_q,
               "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "alibi_slopes": alibi_slopes, "sinks": sinks}
    flags, notes = _copies(tensors, ("rotary_cos", "rotary_sin"))
    if k is not None and (flags[1] or flags[2]):
        f.value("k_cache" if flags[1] else "v_cache", "a last stride of 1, to append to",
                (k_cache if flags[1] else v_cache).stride())
        f.raise_any()
    max_k = block_table.shape[1] * page
    n = n._replace(max_q=max_q, max_k=max_k, notes=notes, scores=batch * hq * max_q * max_k)
    extra = None
    if hnd or any(flags):

        def extra(*tensors):
            tensors = _tight(f.call, flags, *tensors)
            return (tensors[0], *_tokens_first(f.call, tensors[1], tensors[2]), *tensors[3:]) if hnd else tensors

    problem = _problem("paged", q, k_cache, (hq, hkv), (d, dv), n, page_size=page, q_len=q_len_class(max_q, None),
                       sinks=sinks is not None, alibi=alibi_slopes is not None, rotary=rotary_cos is not None,
                       append=k is not None, kv_scale=k_scale is not None or v_scale is not None,
                       grad=_needs_grad(q, k_cache, v_cache, k, v, alibi_slopes, sinks, k_scale, v_scale, rotary_cos, rotary_sin),
                       out_dtype=dtype_name((q if out is None else out).dtype))
    return _bind(problem, n, q.device, backend, known_answer, extra, _counting, _lse)


def _caches(f: Faults, like: Any, k_cache: Any, v_cache: Any) -> bool:
    first = like if isinstance(like, Tensor) else None
    ok = True
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        ok &= f.tensor(name, x, 4, _FLOATS + _KV_FLOATS, first)
    if not ok:
        return False
    if v_cache.dtype != k_cache.dtype:
        f.value("v_cache", f"{dtype_name(k_cache.dtype)} as k_cache's", dtype_name(v_cache.dtype))
    if first is not None and k_cache.dtype in _FLOATS and k_cache.dtype != first.dtype:
        f.value("k_cache", f"{dtype_name(first.dtype)} or an 8-bit float", dtype_name(k_cache.dtype))
    return True


def _page_size(f: Faults, k_cache: Tensor, v_cache: Tensor, hnd: bool) -> int:
    axis = 2 if hnd else 1
    if v_cache.shape[0] != k_cache.shape[0] or v_cache.shape[axis] != k_cache.shape[axis]:
        f.value("v_cache", f"{k_cache.shape[0]} pages of {k_cache.shape[axis]} tokens as k_cache", tuple(v_cache.shape))
    if k_cache.shape[axis] < 1:
        f.value("k_cache", "a page size of at least 1", k_cache.shape[axis])
    return k_cache.shape[axis]


def _new_tokens(f: Faults, q: Tensor, k: Any, v: Any, hkv: int, dv: int, k_cache: Tensor, v_cache: Tensor) -> None:
    if (k is None) != (v is None):
        f.value("v" if v is None else "k", "k and v together", "one of them")
        return
    if k is None:
        return
    for name, x, dim in (("k", k, q.shape[-1]), ("v", v, dv)):
        if f.tensor(name, x, q.dim(), (q.dtype,), q):
            f.shape(name, x, (*q.shape[:-2], hkv, dim), "(as q, with the cache's heads)")
            f.appended(name, x, k_cache, v_cache)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if _overlaps_itself(x):
            f.value(name, "slots that lie apart, to append to", f"strides {x.stride()}")


def _rotary(f: Faults, q: Tensor, cos: Any, sin: Any) -> None:
    if (cos is None) != (sin is None):
        f.value("rotary_sin" if sin is None else "rotary_cos", "cos and sin together", "one of them")
        return
    if cos is None:
        return
    dtypes = tuple(dict.fromkeys((torch.float32, q.dtype)))
    ok = f.tensor("rotary_cos", cos, 2, dtypes, q) & f.tensor("rotary_sin", sin, 2, dtypes, q)
    if not ok:
        return
    if sin.shape != cos.shape:
        f.value("rotary_sin", f"shape {tuple(cos.shape)} as rotary_cos", tuple(sin.shape))
    if sin.dtype != cos.dtype:
        f.value("rotary_sin", f"{dtype_name(cos.dtype)} as rotary_cos", dtype_name(sin.dtype))
    if 2 * cos.shape[1] > q.shape[-1]:
        f.value("rotary_cos", f"(max position, rotary_dim / 2) with rotary_dim at most head_dim {q.shape[-1]}", tuple(cos.shape))


# ------------------------------------------------------------------ cache and merge
def cache_append(k, v, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale, backend, known_answer=True) -> Bound:
    f = Faults("cache_append")
    hnd = f.choice("kv_layout", kv_layout, ("NHD", "HND")) == "HND"
    ok = f.tensor("k", k, 3, _FLOATS)
    ok &= f.tensor("v", v, 3, (k.dtype,) if ok else _FLOATS, k if ok else None)
    caches = _caches(f, k, k_cache, v_cache)
    f.backend(backend)
    f.lengths("slot_mapping", slot_mapping, k, k.shape[0] if ok else None, "of k's tokens")
    if not (ok and caches):
        f.raise_any()
    hkv = k_cache.shape[1 if hnd else 2]
    page = _page_size(f, k_cache, v_cache, hnd)
    f.shape("k", k, (None, hkv, k_cache.shape[-1]), "(tokens, and the cache's heads and head_dim)")
    f.shape("v", v, (k.shape[0], hkv, v_cache.shape[-1]), "(as k, with v_cache's head_dim)")
    if v_cache.shape[1 if hnd else 2] != hkv:
        f.value("v_cache", f"{hkv} heads as k_cache's", v_cache.shape[1 if hnd else 2])
    f.scale("k_scale", k_scale, hkv, None, k)
    f.scale("v_scale", v_scale, hkv, None, k)
    f.appended("k", k, k_cache, v_cache)
    f.appended("v", v, k_cache, v_cache)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if _loose(x):
            f.value(name, "a last stride of 1", x.stride())
        if _overlaps_itself(x):
            f.value(name, "slots that lie apart", f"strides {x.stride()}")
    f.raise_any()
    flags, notes = _copies({"k": k, "v": v, "k_cache": None, "v_cache": None, "slot_mapping": slot_mapping})
    extra = None
    if hnd or any(flags):

        def extra(*tensors):
            k, v, k_cache, v_cache, slots = _tight(f.call, flags, *tensors)
            return (k, v, *_tokens_first(f.call, k_cache, v_cache), slots) if hnd else (k, v, k_cache, v_cache, slots)

    n = Normal(check=config.flag("PORTATTN_CHECK"), notes=notes)
    problem = _problem("cache_append", k, k_cache, (hkv, hkv), (k.shape[-1], v.shape[-1]), n, page_size=page,
                       kv_scale=k_scale is not None or v_scale is not None,
                       grad=_needs_grad(k, v, k_cache, v_cache, k_scale, v_scale))
    return _bind(problem, n, k.device, backend, known_answer, extra)


def merge_states(outs, lses, sinks, backend, memo, remember, known_answer=True) -> tuple[Bound, Tensor, Tensor, Tensor | None]:
    """(binding, outs and lses stacked, sinks without gaps)."""
    f = Faults("merge_states")
    f.backend(backend)
    stacked = []
    for name, x in (("outs", outs), ("lses", lses)):
        if isinstance(x, Tensor):
            if x.dim() < 1 or len(x) == 0:
                f.value(name, "at least one state", f"shape {tuple(x.shape)}")
            stacked.append(x)
            continue
        items = list(x) if isinstance(x, (list, tuple)) else None
        if items is None or not all(isinstance(t, Tensor) for t in items):
            f.type(name, "a sequence of tensors, or one tensor with a leading axis", x)
        elif short := next(filter(None, map(freed.shortage, items)), None):  # torch itself would read there
            f.value(name, *freed.wanted(short))
        elif not items:
            f.value(name, "at least one state", "none")
        elif any((t.shape, t.dtype, t.device) != (items[0].shape, items[0].dtype, items[0].device) for t in items):
            f.value(name, "tensors of one shape, dtype and device",
                    [f"{tuple(t.shape)} {dtype_name(t.dtype)} {t.device}" for t in items])
        else:
            stacked.append(torch.stack(items))
    f.raise_any()
    outs, lses = stacked
    key = ("merge", outs.shape, outs.stride(), outs.dtype, outs.device, lses.shape, lses.stride(), lses.dtype, lses.device,
           None if sinks is None else (getattr(sinks, "shape", None), getattr(sinks, "dtype", None),
                                       getattr(sinks, "device", None)),
           _needs_grad(outs, lses, sinks), backend, registry.current_order(), config.call_state())
    bound = memo.get(key)
    if bound is None or outs.data_ptr() < freed.LOW or lses.data_ptr() < freed.LOW or (sinks is not None and sinks.data_ptr() < freed.LOW):
        freed.refuse("merge_states", outs=outs, lses=lses, sinks=sinks)
    if bound is None:
        if outs.dim() < 3:
            f.value("outs", "(states, ..., heads, head_dim_v)", f"shape {tuple(outs.shape)}")
        f.tensor("outs", outs, outs.dim(), _FLOATS)
        if f.tensor("lses", lses, lses.dim(), (torch.float32,), outs) and lses.shape != outs.shape[:-1]:
            f.value("lses", f"shape {tuple(outs.shape[:-1])}: outs' without the last axis", tuple(lses.shape))
        if outs.dim() >= 3:
            f.sinks(sinks, outs.shape[-2], outs)
        f.raise_any()
        n = Normal()
        problem = _problem("merge_states", outs, outs, (outs.shape[-2],) * 2, (outs.shape[-1],) * 2, n, sinks=sinks is not None,
                           grad=_needs_grad(outs, lses, sinks))
        bound = _bind(problem, n, outs.device, backend, known_answer, None)
        remember(key, bound, outs.device)
    return bound, outs, lses, sinks if sinks is None else sinks.contiguous()


# ------------------------------------------------------------------ before a dispatcher converts arguments in its own way
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def numbers_of(call: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call that goes through a custom op: those that are no tensors checked, and as the op takes them.

    The dispatcher would wait for a tensor that is given as a number, and raise errors of its own. Symbolic numbers pass.
    """
    f, checked = Faults(call), dict(given)
    checks: dict[str, Callable[[Any], Any]] = {
        "window_size": f.window,
        "softmax_scale": lambda x: f.number("softmax_scale", x), "softcap": lambda x: f.number("softcap", x, 0.0),
        "num_splits": lambda x: min(f.integer("num_splits", x), _WIDEST), "max_seqlen_q": lambda x: f.integer("max_seqlen_q", x),
        "max_seqlen_k": lambda x: f.integer("max_seqlen_k", x),
        "layout": lambda x: f.choice("layout", x, ("bshd", "bhsd")), "kv_layout": lambda x: f.choice("kv_layout", x, ("NHD", "HND")),
        "backend": lambda x: f.backend(x) or x,
    }
    optional = {"softmax_scale", "max_seqlen_q", "backend"}
    for name, x in given.items():
        if any(isinstance(y, _SYMBOLIC) for y in (x if isinstance(x, (tuple, list)) else (x,))):
            continue
        if name in checks and not (x is None and name in optional):
            checked[name] = checks[name](x)
        elif name in ("causal", "return_lse", "batch_invariant", "rotary_interleaved"):
            f.boolean(name, x)
        elif name in ("k_scale", "v_scale") and x is not None and not isinstance(x, Tensor):
            checked[name] = f.number(name, x)
    f.raise_any()
    return checked


# ------------------------------------------------------------------ values on the device: PORTATTN_CHECK=1
def values(call: Call) -> None:
    """Checks lengths, tables and positions on the device; waits for it. Names the sequence and the entry.

    Nothing while a graph is captured, which a wait would break: a replay's values are not those of the capture anyway.
    """
    if capturing(call.q.device):
        return
    f = Faults(freed.refuse_of(call))
    q_lens = _prefix_sums(f, "cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0], "max_seqlen_q", call.max_seqlen_q)
    if call.block_table is None:
        k_lens = _prefix_sums(f, "cu_seqlens_k", call.cu_seqlens_k, call.k.shape[0], "max_seqlen_k", call.max_seqlen_k)
        for b, used in enumerate(call.seqused_k.tolist() if call.seqused_k is not None else ()):
            if not 0 <= used <= k_lens[b]:
                f.value(f"seqused_k[{b}]", f"0..{k_lens[b]}, the sequence's span", used)
        f.raise_any()
        return
    if call.cu_seqlens_q is None:
        q_lens = [call.q.shape[1]] * call.q.shape[0]
    pages, page = call.k.shape[:2]
    table, lens = call.block_table.tolist(), call.kv_lens.tolist()
    for b, length in enumerate(lens):
        if length > call.max_seqlen_k:
            f.value(f"kv_lens[{b}]", f"at most {call.max_seqlen_k}, the table's {len(table[b])} pages of {page}", length)
        for j, entry in enumerate(table[b][: -(-max(length, 0) // page)]):
            if not 0 <= entry < pages:
                f.value(f"block_table[{b}, {j}]", f"a page of 0..{pages - 1} (sequence {b} has {length} keys)", entry)
        if call.rotary_cos is not None and q_lens[b]:
            length = max(length, 0)
            if length < q_lens[b]:
                f.value(f"kv_lens[{b}]", f"at least the {q_lens[b]} query tokens, which turn by their positions", length)
            if length > call.rotary_cos.shape[0]:
                f.value(f"kv_lens[{b}]", f"at most the {call.rotary_cos.shape[0]} positions of rotary_cos", length)
    f.raise_any()


def _prefix_sums(f: Faults, name: str, cu: Tensor | None, rows: int, bound_name: str, bound: int) -> list[int]:
    if cu is None:
        return []
    ends = cu.tolist()
    if ends[0] != 0:
        f.value(f"{name}[0]", "0", ends[0])
    lens = [b - a for a, b in zip(ends, ends[1:])]
    for b, n in enumerate(lens):
        if n < 0:
            f.value(f"{name}[{b + 1}]", f"at least {ends[b]}, the entry before it (sequence {b})", ends[b + 1])
        elif n > bound:
            f.value(bound_name, f"at least {n}, the length of sequence {b}", bound)
    if ends[-1] > rows:
        f.value(f"{name}[{len(lens)}]", f"at most {rows} rows", ends[-1])
    return lens


def slots(slot_mapping: Tensor, k_cache: Tensor) -> None:
    """Checks that every slot lies in the cache; waits for the device, but not while a graph is captured."""
    if capturing(slot_mapping.device):
        return
    f = Faults("cache_append")
    total = k_cache.shape[0] * k_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= total:
            f.value(f"slot_mapping[{t}]", f"a slot below {total}", slot)
    f.raise_any()


# ------------------------------------------------------------------ explain
def example_call(bound: Bound, arguments: dict[str, Any]) -> Call:
    """The Call that a backend would receive for these arguments."""
    n, a = bound.normal, arguments
    common = dict(softmax_scale=n.scale, causal=n.causal, window_left=n.left, window_right=n.right, softcap=n.softcap,
                  max_seqlen_q=n.max_q, max_seqlen_k=n.max_k, out=a["out"], return_lse=n.lse, num_splits=n.num_splits,
                  batch_invariant=n.invariant)
    layout = bound.problem.layout
    if layout == "dense":
        names = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "out")
        given = [a[name] for name in names]
        return Call(**dict(common, **dict(zip(names, bound.extra(*given) if bound.extra else given))))
    if layout == "varlen":
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sinks")
        given = [a[name] for name in names]
        return Call(**common, **dict(zip(names, bound.extra(*given) if bound.extra else given)))
    names = ("q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_seqlens_q", "k", "v", "rotary_cos", "rotary_sin",
             "alibi_slopes", "sinks")
    fields = ("q", "k", "v", "block_table", "kv_lens", "cu_seqlens_q", "k_new", "v_new", "rotary_cos", "rotary_sin",
              "alibi_slopes", "sinks")
    given = [a[name] for name in names]
    return Call(**common, rotary_interleaved=n.interleaved, k_scale=a["k_scale"], v_scale=a["v_scale"],
                **dict(zip(fields, bound.extra(*given) if bound.extra else given)))
