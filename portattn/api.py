"""The calls: validate -> Problem and Call -> the backend that the registry bound -> its result.

A call like one of the last few is recognised by its tensors (recent.py, about 1 us). Any other makes a key of everything
that its validity and the choice of backend depend on: shapes, strides, dtypes, devices, options. A key met before costs
one dictionary lookup (3 to 4 us in all); a new one is validated (validate.py) and bound (registry.py). Values on the
device are looked at only under PORTATTN_CHECK=1.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import config, freed, overlaps, registry, validate
from .device import capturing, without_autocast
from .dialect import AFTER, OURS, after, lse_as
from .problem import Call
from .recent import Recent, guard, is_hidden
from .registry import Bound, Choice

_is_compiling = torch.compiler.is_compiling
_grad_mode = torch.is_grad_enabled
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: False)
_order = registry.current_order
_state = config.call_state
_make = tuple.__new__  # half the cost of Call(...), which goes through a Python function
_PLAIN = (Tensor, Parameter)

# What the dispatcher has on while torch.jit.trace, torch.func or a dispatch mode sees each operator; of modes, those that trace.
_key = lambda name: torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
_tls, _mode, _modes = torch._C._dispatch_tls_local_include_set, torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
_PYTHON = _key("Python")
_WATCHING = _PYTHON | _key("Tracer") | _key("FuncTorchDynamicLayerFrontMode")
_TRACING_MODES = (_modes.PROXY, _modes.FAKE, _modes.FUNCTIONAL)

_memo: dict[tuple, Bound] = {}
_MEMO_LIMIT = 4096  # keys; an engine meets some hundreds
registry._listeners.append(_memo.clear)

_recent_dense, _recent_varlen, _recent_paged = Recent(), Recent(), Recent()

# In options, 1, 1.0 and True are equal: what is neither True nor False where one is wanted is wrapped, and of numbers the classes are there too, so
# that none finds the entry that was validated for another.


def _meta(x: Any) -> Any:
    """What a key must know of an optional argument, or of several tensors in a list."""
    if isinstance(x, (list, tuple)):
        return tuple(map(_meta, x))
    return (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x


def _remember(key: tuple | None, bound: Bound, device: torch.device) -> None:
    """Keeps a binding; not one made during graph capture, where no known-answer check can run."""
    if key is None or capturing(device):
        return
    if len(_memo) >= _MEMO_LIMIT:
        _memo.clear()
    _memo[key] = bound


def _known_by_key(recent: Recent, options: tuple, tensors: tuple) -> tuple[tuple | None, Bound | None]:
    """(key, binding) of a call that `recent` does not recognise; no binding if none was remembered, no key if none can be."""
    try:
        key = (recent, options, _order(), _state(), _grad_mode() and tuple(x.requires_grad for x in tensors),
               *[(x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device) for x in tensors])
        bound = _memo.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or a list in the key: validation says what is wrong
        return None, None
    if bound is not None:
        recent.keep(options, tensors, bound, bound)
    return key, bound


def refuse_tangents(*_: Any) -> None:
    raise validate.ArgumentError("a tensor with a tangent: wanted gradients by backward() or torch.autograd.grad, "
                                 "got forward-mode differentiation, which no backend has")


def _is_traced(*tensors: Any) -> bool:
    """Whether a call goes through a custom op: where torch records or transforms operators, which kernels that take pointers are
    not, and for tensors that are not what their memory holds (fake, wrapper, batched, negated, zero without memory). A tangent is an
    ArgumentError."""
    if _is_compiling():
        return True
    has_tangent = lambda x: isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None
    if forward_ad._current_level >= 0 and any(map(has_tangent, tensors)):
        refuse_tangents()
    watching = _tls().raw_repr() & _WATCHING
    if watching & ~_PYTHON or (watching and any(map(_mode, _TRACING_MODES))):
        return True
    dispatches = lambda x: type(x) not in _PLAIN and torch._C._dispatch_keys(x).raw_repr() & _PYTHON
    hides = lambda x: x.is_neg() or x._is_zerotensor() or torch._is_functional_tensor(x)
    return any(isinstance(x, Tensor) and not x.is_nested and bool(hides(x) or dispatches(x)) for x in tensors)


_INPUTS = "q", "k", "v", "alibi_slopes", "sinks", "bias"
_PAGED_INPUTS = "q", "k_cache", "v_cache", "alibi_slopes", "sinks", "k", "v", "rotary_cos", "rotary_sin", "k_scale", "v_scale"


def _check_overlap(bound: Bound, out: Tensor, names: tuple[str, ...], *inputs: Tensor | None) -> None:
    """An `out` that shares memory with an input is refused; addresses are no part of a key. How far tensors reach is the binding's."""
    pointer = out.data_ptr()
    if not pointer:  # without elements
        return
    if bound.reaches is None:
        bound.reaches = overlaps.Reaches(out, enumerate(inputs))
    addresses = [0 if x is None else x.data_ptr() for x in inputs]
    for n in bound.reaches.near(pointer, addresses):
        at = addresses[n]
        if overlaps.meet(inputs[n], out, at - pointer):
            part = "" if at == pointer else "some of "
            raise validate.ArgumentError(f"out: wanted memory of its own, got {part}the memory of {names[n]}")


def _run_without_autocast(bound: Bound, call: Call) -> Any:
    """Autocast would turn a float32 product into a 16-bit one inside a backend."""
    with without_autocast(call.q.device.type):
        return bound.run(call, bound)


# ------------------------------------------------------------------ dense
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "bshd",
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    backend: str | None = None,
    _lse: int = OURS,  # for portattn.compat: dialect.py
    _found: list[Bound] | None = None,  # for portattn.compat: the binding is put there, to be kept
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over dense tensors: ``softmax(mask(softcap(scale * q k^T) + alibi + bias)) v``.

    Query i stands at position ``i + Sk - Sq``, so causal and windowed masks are aligned bottom-right. A row
    that sees no key gives 0 and an lse of -inf (with a sink: the sink). Any length may be 0.

    Args:
        q: (B, Sq, Hq, D) float32, float16 or bfloat16; strides free but for the last (others are copied).
        k: (B, Sk, Hkv, D) of q's dtype; query head h reads head ``h // (Hq / Hkv)``.
        v: (B, Sk, Hkv, Dv).
        causal: key j is visible iff ``j <= i + Sk - Sq``.
        window_size: (left, right) keys around the position, inclusive, -1 unbounded. A window of W tokens
            in all, causal, is (W - 1, 0).
        softmax_scale: a finite number; default ``1 / sqrt(D)``.
        softcap: c > 0 turns scores s into ``c * tanh(s / c)`` before alibi and bias; 0.0 is off.
        bias: float32 or q's dtype (added, -inf allowed), or bool (True attends); broadcastable to
            (B, Hq, Sq, Sk) in this order whatever the layout.
        alibi_slopes: float32 (Hq,) or (B, Hq); adds ``-slope * abs(position - j)``.
        sinks: (Hq,), float32 or q's dtype: a logit a head that joins the softmax's denominator only.
        layout: "bshd", or "bhsd" with axes 1 and 2 of q, k, v and out swapped.
        out: (B, Sq, Hq, Dv) of q's dtype or float32, last stride 1, not overlapping an input; returned itself.
        return_lse: also return the natural log of the softmax denominator, float32 (B, Sq, Hq).
        num_splits: a hint; 0 lets the backend decide.
        batch_invariant: a row's bits do not depend on the rest of the batch.
        backend: force one backend by name; it never falls through.

    Returns:
        out, contiguous in (B, Sq, Hq, Dv) order (a transposed view for "bhsd"), or (out, lse).

    Raises:
        ArgumentError, ArgumentTypeError: every fault of the arguments at once.
        NoBackendError: no backend takes the problem, with each one's reasons.

    Example:
        >>> q = torch.randn(2, 5, 8, 64); k = v = torch.randn(2, 9, 2, 64)
        >>> attention(q, k, v, causal=True).shape
        torch.Size([2, 5, 8, 64])

    The alignment and window follow FlashAttention 2; lse's base and the empty row are portattn's own.
    """
    window = (-1, -1) if window_size is None else window_size
    try:
        options = (causal is True or causal is not False and (causal,), window, softmax_scale, softcap, layout,
                   return_lse is True or return_lse is not False and (return_lse,), num_splits,
                   batch_invariant is True or batch_invariant is not False and (batch_invariant,), backend,
                   bias is None, alibi_slopes is None, sinks is None, out is None, _lse, softmax_scale.__class__, softcap.__class__,
                   num_splits.__class__, window[0].__class__, window[1].__class__)
    except (IndexError, KeyError, TypeError):  # no window: validation says so
        options = None
    tensors = (q, k, v)
    if bias is not None or alibi_slopes is not None or sinks is not None or out is not None:
        tensors += tuple(x for x in (bias, alibi_slopes, sinks, out) if x is not None)
    bound = _recent_dense.find(options, tensors)
    if bound is None:
        if _is_traced(*tensors):
            return _compiled(attention, q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
                             softcap=softcap, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, layout=layout, out=out,
                             return_lse=return_lse, num_splits=num_splits, batch_invariant=batch_invariant, backend=backend,
                             _lse=_lse)
        key, bound = _known_by_key(_recent_dense, options, tensors)
        if bound is None:
            bound = validate.dense(q, k, v, causal, window_size, softmax_scale, softcap, bias, alibi_slopes, sinks, layout, out,
                                   return_lse, num_splits, batch_invariant, backend, _lse)
            _remember(key, bound, q.device)
    if _found is not None:
        _found.append(bound)
    return _attention(bound, q, k, v, bias, alibi_slopes, sinks, out)


def _attention(bound: Bound, q, k, v, bias=None, alibi_slopes=None, sinks=None, out=None, within=None, **_):
    n, given = bound.normal, out
    if given is not None:
        _check_overlap(bound, given, _INPUTS, q, k, v, alibi_slopes, sinks, bias)
    if bound.extra is not None:
        q, k, v, bias, alibi_slopes, sinks, out = bound.extra(q, k, v, bias, alibi_slopes, sinks, out)
    call = _make(Call, (q, k, v, n.scale, n.causal, n.left, n.right, n.softcap, bias, alibi_slopes, sinks, None, None, None,
                        n.max_q, n.max_k, None, None, None, None, None, None, False, None, None, out, n.lse, n.num_splits,
                        n.invariant, AFTER, n.lse_form, within))
    got = _run_without_autocast(bound, call) if _any_autocast() else bound.run(call, bound)
    if n.lse_after:
        got = (got[0], lse_as(n.lse_after, got[1]))
    if given is not None:
        return (given, got[1]) if n.lse else given
    if n.swap:
        return (got[0].transpose(1, 2), got[1]) if n.lse else got.transpose(1, 2)
    return got


# ------------------------------------------------------------------ varlen
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    backend: str | None = None,
    _lse: int = OURS,  # for portattn.compat: dialect.py
    _found: list[Bound] | None = None,  # for portattn.compat: the binding is put there, to be kept
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over ragged batches: sequence b owns rows ``cu_seqlens[b] .. cu_seqlens[b+1]`` of q and of k, v.

    Rows at or past the last cu_seqlens entry belong to no sequence and may hold anything; their out is unspecified.

    Args:
        q: (Tq, Hq, D); k: (Tk, Hkv, D); v: (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B+1,) int32 or int64, exclusive prefix sums from 0.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, host ints; too small is undefined
            (PORTATTN_CHECK=1 raises).
        seqused_k: (B,) int32 or int64: keys of each sequence in use; later ones are not read.
        The others as in `attention`; positions are ``i + Lk - Lq`` within a sequence.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse float32 (Tq, Hq).

    Raises:
        As `attention`.

    Example:
        >>> q = torch.randn(7, 8, 64); cu = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> attention_varlen(q, q, q, cu, cu, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    window = (-1, -1) if window_size is None else window_size
    try:
        options = (max_seqlen_q, max_seqlen_k, causal is True or causal is not False and (causal,), window, softmax_scale,
                   softcap, return_lse is True or return_lse is not False and (return_lse,), num_splits,
                   batch_invariant is True or batch_invariant is not False and (batch_invariant,), backend,
                   cu_seqlens_k is cu_seqlens_q, seqused_k is None, alibi_slopes is None, sinks is None, out is None, _lse,
                   max_seqlen_q.__class__, max_seqlen_k.__class__, softmax_scale.__class__, softcap.__class__, num_splits.__class__,
                   window[0].__class__, window[1].__class__)
    except (IndexError, KeyError, TypeError):  # no window: validation says so
        options = None
    tensors = (q, k, v, cu_seqlens_q)
    if cu_seqlens_k is not cu_seqlens_q:
        tensors += (cu_seqlens_k,)
    if seqused_k is not None or alibi_slopes is not None or sinks is not None or out is not None:
        tensors += tuple(x for x in (seqused_k, alibi_slopes, sinks, out) if x is not None)
    bound = _recent_varlen.find(options, tensors)
    if bound is None:
        if _is_traced(*tensors):
            return _compiled(attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                             max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
                             softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, out=out, return_lse=return_lse,
                             num_splits=num_splits, batch_invariant=batch_invariant, backend=backend, _lse=_lse)
        key, bound = _known_by_key(_recent_varlen, options, tensors)
        if bound is None:
            bound = validate.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, causal,
                                    window_size, softmax_scale, softcap, alibi_slopes, sinks, out, return_lse, num_splits,
                                    batch_invariant, backend, _lse)
            _remember(key, bound, q.device)
    if _found is not None:
        _found.append(bound)
    return _attention_varlen(bound, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, out)


def _attention_varlen(bound: Bound, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k=None, alibi_slopes=None, sinks=None, out=None,
                      within=None, **_):
    n, given = bound.normal, out
    if given is not None:
        _check_overlap(bound, given, _INPUTS, q, k, v, alibi_slopes, sinks)
    if bound.extra is not None:
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks = bound.extra(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks)
    call = _make(Call, (q, k, v, n.scale, n.causal, n.left, n.right, n.softcap, None, alibi_slopes, sinks, cu_seqlens_q,
                        cu_seqlens_k, seqused_k, n.max_q, n.max_k, None, None, None, None, None, None, False, None, None, out,
                        n.lse, n.num_splits, n.invariant, AFTER, n.lse_form, within))
    if n.check:
        validate.values(call)
    got = _run_without_autocast(bound, call) if _any_autocast() else bound.run(call, bound)
    if n.lse_after:
        got = (got[0], lse_as(n.lse_after, got[1]))
    if given is not None:
        return (given, got[1]) if n.lse else given
    return got


# ------------------------------------------------------------------ paged
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    kv_layout: str = "NHD",
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    backend: str | None = None,
    _counting: int = AFTER,  # for portattn.compat: dialect.py
    _lse: int = OURS,
    _found: list[Bound] | None = None,  # for portattn.compat: the binding is put there, to be kept
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged cache: decode, extend and prefill, in any mixture, in one call.

    Key j of sequence b lies in slot ``j % P`` of page ``block_table[b, j // P]``. Nothing at or past kv_lens and
    no table entry past ``ceil(kv_lens / P)`` is read. A contiguous cache (B, Smax, Hkv, D) is the case P = Smax
    with a table of one column.

    Args:
        q: (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q (B+1,) for ragged queries.
        k_cache: (N, P, Hkv, D) for kv_layout "NHD", (N, Hkv, P, D) for "HND"; of q's dtype or an 8-bit float one.
        v_cache: likewise with Dv, of k_cache's dtype.
        block_table: (B, M) int32 or int64 page ids; pages may be shared and repeated.
        kv_lens: (B,) int32 or int64: keys attended to, this call's appended tokens included; negative is 0.
        max_seqlen_q: upper bound of the query lengths, a host int; default Tq (ragged) or Sq.
        k, v: new tokens, shaped like q with Hkv heads (and Dv), that share no memory with a cache. They are written
            at positions ``kv_lens - Lq .. kv_lens - 1`` before the call attends; negative positions are not written.
        rotary_cos, rotary_sin: (max position, rotary_dim / 2) float32 or q's dtype. q turns at its position
            ``i + Lk - Lq``, an appended key at the one where it lands; the cache stores turned keys.
        rotary_interleaved: pairs (0, 1), (2, 3), …; default pairs (i, i + rotary_dim / 2).
        k_scale, v_scale: a number, or float32 (), (Hkv,) or (B, Hkv): value = stored * scale; an append
            stores x / scale, rounded to nearest even and saturated.
        The others as in `attention`.

    Returns:
        out, q's shape with Dv; or (out, lse), lse float32 of out's shape without the last axis.

    Raises:
        As `attention`; caches and out are untouched then.

    Example:
        >>> cache = torch.randn(4, 16, 2, 64); table = torch.tensor([[2, 0]]); lens = torch.tensor([20])
        >>> attention_paged(torch.randn(1, 1, 8, 64), cache, cache.clone(), table, lens, causal=True).shape
        torch.Size([1, 1, 8, 64])
    """
    appends, turns = k is not None or v is not None, rotary_cos is not None or rotary_sin is not None
    window = (-1, -1) if window_size is None else window_size
    try:
        options = (cu_seqlens_q is None, out is None, appends, turns, max_seqlen_q,
                   rotary_interleaved is True or rotary_interleaved is not False and (rotary_interleaved,), kv_layout,
                   causal is True or causal is not False and (causal,), window, softmax_scale, softcap,
                   return_lse is True or return_lse is not False and (return_lse,), num_splits,
                   batch_invariant is True or batch_invariant is not False and (batch_invariant,), backend, _counting, _lse,
                   max_seqlen_q.__class__, softmax_scale.__class__, softcap.__class__, num_splits.__class__, window[0].__class__, window[1].__class__)
    except (IndexError, KeyError, TypeError):  # no window: validation says so
        options = None
    tensors = (q, k_cache, v_cache, block_table, kv_lens)
    if cu_seqlens_q is not None:
        tensors += (cu_seqlens_q,)
    if out is not None:
        tensors += (out,)
    if appends:
        tensors += (k, v)
    if turns:
        tensors += (rotary_cos, rotary_sin)
    if k_scale is not None or v_scale is not None or alibi_slopes is not None or sinks is not None:
        more = (k_scale, v_scale, alibi_slopes, sinks)
        if options is not None:
            options += tuple(x if x is None else Tensor if isinstance(x, Tensor) else (x, x.__class__) for x in more)
        tensors += tuple(x for x in more if isinstance(x, Tensor))
    bound = _recent_paged.find(options, tensors)
    if bound is None:
        if _is_traced(*tensors):
            kv_lens = after(kv_lens, _counting, q, cu_seqlens_q) if _counting else kv_lens
            return _compiled(attention_paged, q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=cu_seqlens_q,
                             max_seqlen_q=max_seqlen_q, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                             rotary_interleaved=rotary_interleaved, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale,
                             causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
                             alibi_slopes=alibi_slopes, sinks=sinks, out=out, return_lse=return_lse, num_splits=num_splits,
                             batch_invariant=batch_invariant, backend=backend, _lse=_lse)
        key, bound = _known_by_key(_recent_paged, options, tensors)
        if bound is None:
            bound = validate.paged(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q, max_seqlen_q, k, v, rotary_cos,
                                   rotary_sin, rotary_interleaved, kv_layout, k_scale, v_scale, causal, window_size,
                                   softmax_scale, softcap, alibi_slopes, sinks, out, return_lse, num_splits, batch_invariant,
                                   backend, _counting, _lse)
            _remember(key, bound, q.device)
    if _found is not None:
        _found.append(bound)
    return _attention_paged(bound, q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q, k, v, rotary_cos, rotary_sin, k_scale,
                            v_scale, alibi_slopes, sinks, out)


def _attention_paged(bound: Bound, q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q=None, k=None, v=None, rotary_cos=None,
                     rotary_sin=None, k_scale=None, v_scale=None, alibi_slopes=None, sinks=None, out=None, **_):
    if bound.direct is not None:  # without a Call: a third of what such a call costs in Python
        got = bound.direct(q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale, out)
        if got is not None:
            return got
    n, given = bound.normal, out
    if given is not None:
        scales = (x if isinstance(x, Tensor) else None for x in (k_scale, v_scale))
        _check_overlap(bound, given, _PAGED_INPUTS, q, k_cache, v_cache, alibi_slopes, sinks, k, v, rotary_cos, rotary_sin, *scales)
    if n.convert:
        kv_lens = after(kv_lens, n.convert, q, cu_seqlens_q)
    if bound.extra is not None:
        q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q, k, v, rotary_cos, rotary_sin, alibi_slopes, sinks = bound.extra(
            q, k_cache, v_cache, block_table, kv_lens, cu_seqlens_q, k, v, rotary_cos, rotary_sin, alibi_slopes, sinks)
    call = _make(Call, (q, k_cache, v_cache, n.scale, n.causal, n.left, n.right, n.softcap, None, alibi_slopes, sinks,
                        cu_seqlens_q, None, None, n.max_q, n.max_k, block_table, kv_lens, k, v, rotary_cos, rotary_sin,
                        n.interleaved, k_scale, v_scale, out, n.lse, n.num_splits, n.invariant, n.counting, n.lse_form, None))
    if n.check:
        validate.values(call)
    got = _run_without_autocast(bound, call) if _any_autocast() else bound.run(call, bound)
    if n.lse_after:
        got = (got[0], lse_as(n.lse_after, got[1]))
    if given is not None:
        return (given, got[1]) if n.lse else given
    return got


# ------------------------------------------------------------------ cache and merge
def cache_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    backend: str | None = None,
) -> None:
    """Writes tokens into a paged cache: token t goes to slot ``slot_mapping[t] = page * P + offset``; negative: skipped.

    Args:
        k: (T, Hkv, D) float32, float16 or bfloat16; v: (T, Hkv, Dv) of k's dtype. Neither shares memory with a cache.
        k_cache, v_cache: as in `attention_paged`, of k's dtype or an 8-bit one; written in place.
        slot_mapping: (T,) int32 or int64. If two tokens share a slot, one of them stays.
        k_scale, v_scale: a number, or float32 () or (Hkv,): stores x / scale, rounded to nearest even, saturated.

    Raises:
        As `attention`; the caches are untouched then.

    Example:
        >>> cache = torch.zeros(2, 16, 2, 64); new = torch.randn(3, 2, 64)
        >>> cache_append(new, new, cache, cache.clone(), torch.tensor([17, -1, 0]))
    """
    if _is_traced(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
        return _compiled(cache_append, k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale,
                         v_scale=v_scale, backend=backend)
    key = None
    try:
        key = (
            "append", k.shape, k.is_contiguous() or k.stride(), k.dtype, k.device, v.shape, v.is_contiguous() or v.stride(),
            v.dtype, v.device, k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device, v_cache.shape,
            v_cache.is_contiguous() or v_cache.stride(), v_cache.dtype, v_cache.device, slot_mapping.shape,
            slot_mapping.is_contiguous() or slot_mapping.stride(), slot_mapping.dtype, slot_mapping.device,
            _grad_mode() and (k.requires_grad, v.requires_grad, k_cache.requires_grad, v_cache.requires_grad), kv_layout,
            _meta(k_scale), _meta(v_scale), k_scale.__class__, v_scale.__class__, backend, _order(), _state(),
        )
        bound = _memo.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or a list in the key: validation says what is wrong
        bound = key = None
    if bound is None:
        bound = validate.cache_append(k, v, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale, backend)
        _remember(key, bound, k.device)
    return _cache_append(bound, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _cache_append(bound: Bound, k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None, **_) -> None:
    if bound.extra is not None:
        k, v, k_cache, v_cache, slot_mapping = bound.extra(k, v, k_cache, v_cache, slot_mapping)
    if bound.normal.check:
        validate.slots(slot_mapping, k_cache)
    bound.adapter.cache_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound)


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact merge of partial attention results over disjoint sets of keys: ``out = sum(exp(lse_i - lse) out_i)``.

    Associative and commutative up to rounding. A state with lse -inf is the identity, whatever its out holds;
    all empty gives (0, -inf).

    Args:
        outs: n tensors (..., Hq, Dv) of one dtype, or one tensor with a leading axis n. "bhsd" results must be
            transposed first.
        lses: n float32 tensors (..., Hq), or one with a leading axis n.
        sinks: (Hq,), float32 or outs' dtype, joined to the denominator once.

    Returns:
        (out of outs' dtype, lse float32).

    Raises:
        As `attention`; an empty list is an ArgumentError.

    Example:
        >>> outs, lses = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 8)
        >>> merge_states(outs, lses)[1].shape
        torch.Size([5, 8])

    The rule is that of FlashAttention's split-KV combine.
    """
    if _is_traced(sinks, *(y for x in (outs, lses) for y in (x if isinstance(x, (list, tuple)) else (x,)))):
        return _compiled(merge_states, outs, lses, sinks=sinks, backend=backend)
    bound, outs, lses, sinks = validate.merge_states(outs, lses, sinks, backend, _memo, _remember)
    return bound.adapter.merge_states(outs, lses, sinks, bound)


# ------------------------------------------------------------------ torch.compile
def _refuse_hidden(call: str, **written: Tensor | None) -> None:
    """Of a view that negates, or of zeros without memory, where an op writes, the dispatcher's own error asks for a bug report."""
    for name, x in written.items():
        if isinstance(x, Tensor) and (x.is_neg() or x._is_zerotensor()):
            got = "a negated view" if x.is_neg() else "zeros without memory"
            raise validate.ArgumentError(f"{call}: {name}: wanted a tensor that is what its memory holds, to write to, got {got}")


def _compiled(call, *args, _lse: int = OURS, **kwargs):
    from . import ops

    if not _is_compiling():  # dynamo says what it finds itself
        kwargs = validate.numbers_of(call.__name__, kwargs)
        caches = args[2:4] if call is cache_append else args[1:3] if call is attention_paged and kwargs["k"] is not None else ()
        _refuse_hidden(call.__name__, out=kwargs.get("out"), **dict(zip(("k_cache", "v_cache"), caches)))
    got = ops.call(call.__name__, *args, **kwargs)
    return (got[0], lse_as(_lse, got[1])) if _lse and kwargs["return_lse"] else got


# ------------------------------------------------------------------ plan and explain
class Plan:
    """One call bound to its backend: ``plan(**changed)`` runs it on tensors of the same shapes, strides and dtypes.

    Attributes:
        choice: what runs, as `explain` gives it.
    """

    __slots__ = ("choice", "_run", "_bound", "_arguments", "_metas", "_grad", "_names", "_check", "_order")

    def __init__(self, choice: Choice, run: Any, bound: Bound, arguments: dict[str, Any]):
        self.choice, self._run, self._bound, self._arguments = choice, run, bound, arguments
        self._metas = {name: _meta(value) for name, value in arguments.items()}
        self._grad = _grad_mode()
        self._plain(arguments)
        code = run.__code__  # by place: thirty names cost more than the rest of the call
        self._order = [name for name in code.co_varnames[1:code.co_argcount] if name in arguments]
        self._names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        tensors = {id(arguments[name]): arguments[name] for name in self._names}
        self._check = guard(tuple(tensors.values())) if 0 < len(tensors) == len(self._names) else None

    def _are_alike(self, arguments: dict[str, Any], changed: dict[str, Any]) -> bool:
        """Whether nothing but tensors changed, all like those that were planned, at a glance: if not, what is wrong is looked for."""
        if self._check is None or is_hidden() or _grad_mode() is not self._grad:
            return False
        if any([name not in self._names or getattr(x, "is_nested", True) for name, x in changed.items()]):
            return False
        return self._check(*[arguments[name] for name in self._names])

    def _plain(self, arguments: dict[str, Any]) -> None:
        if _is_traced(*(y for x in arguments.values() for y in (x if isinstance(x, (list, tuple)) else (x,)))):
            raise validate.ArgumentError("plan: wanted tensors that are what their memory holds, and nothing that traces; "
                                         "call the function itself")

    def __call__(self, **changed: Any) -> Any:
        """Runs the call with some arguments replaced; anything but tensors alike in kind is an ArgumentError."""
        arguments = self._arguments | changed if changed else self._arguments
        if not self._are_alike(arguments, changed):
            self._examine(arguments, changed)
        return self._run(self._bound, *[arguments[name] for name in self._order])

    def _examine(self, arguments: dict[str, Any], changed: dict[str, Any]) -> None:
        metas = self._metas
        for name, value in changed.items():
            if name not in metas:
                raise validate.ArgumentTypeError(f"plan: unknown argument {name!r}; known: {', '.join(n for n in metas if n[0] != '_')}")
            if _meta(value) != metas[name]:
                raise validate.ArgumentError(f"plan: {name}: wanted {metas[name]} as planned, got {_meta(value)}")
        self._plain(changed)
        if not self._grad and _grad_mode() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()):
            raise validate.ArgumentError("plan: made under no_grad, so it has no gradients; an input requires grad")

    def __repr__(self) -> str:
        return f"Plan({self.choice.problem}, backend={self.choice.backend!r})"


def _bind(call: Any, args: tuple, kwargs: dict, known_answer: bool) -> tuple[Any, Bound, dict[str, Any]]:
    """(runner, binding, all arguments by name) of a call that is not run."""
    import inspect

    runners = {attention: (_attention, validate.dense), attention_varlen: (_attention_varlen, validate.varlen),
               attention_paged: (_attention_paged, validate.paged), cache_append: (_cache_append, validate.cache_append),
               merge_states: (_merge_states, None)}
    if call not in runners:
        raise validate.ArgumentTypeError(f"call: wanted one of {', '.join(f.__name__ for f in runners)}, got {call!r}")
    run, validator = runners[call]
    given = inspect.signature(call).bind(*args, **kwargs)
    given.apply_defaults()
    arguments = {name: x for name, x in given.arguments.items() if name != "_found"}
    if validator is None:
        bound = validate.merge_states(arguments["outs"], arguments["lses"], arguments["sinks"], arguments["backend"], {},
                                      lambda *_: None, known_answer)[0]
    else:
        bound = validator(**arguments, known_answer=known_answer)
    return run, bound, arguments


def _merge_states(bound: Bound, outs, lses, sinks=None, **_):
    freed.refuse("merge_states", outs=outs, lses=lses, sinks=sinks)
    stack = lambda x: x if isinstance(x, Tensor) else torch.stack(tuple(x))
    return bound.adapter.merge_states(stack(outs), stack(lses), sinks if sinks is None else sinks.contiguous(), bound)


def plan(call: Any, *args: Any, **kwargs: Any) -> Plan:
    """Binds one call to its backend and parameters: ``plan(attention_paged, q, …)`` takes what the call takes.

    Optional: a call repeated with the same shapes is bound already. Raises as the call would; runs nothing.

    Example:
        >>> p = plan(attention, q, k, v, causal=True)
        >>> out = p(); out = p(q=other)
    """
    run, bound, arguments = _bind(call, args, kwargs, True)
    return Plan(_choice(bound, arguments), run, bound, arguments)


def explain(call: Any, *args: Any, **kwargs: Any) -> Choice:
    """What would run a call, and why not each other backend: ``print(explain(attention_paged, q, …))``. Runs nothing.

    Raises as the call would.
    """
    _, bound, arguments = _bind(call, args, kwargs, False)
    return _choice(bound, arguments)


def _choice(bound: Bound, arguments: dict[str, Any]) -> Choice:
    notes = tuple(getattr(bound.normal, "notes", ()))
    first = next(iter(arguments.values()))
    device = (first if isinstance(first, Tensor) else first[0]).device
    if hasattr(bound.adapter, "notes") and bound.problem.layout in ("dense", "varlen", "paged"):
        try:
            notes += tuple(bound.adapter.notes(validate.example_call(bound, arguments), bound))
        except Exception as exc:  # what runs is known all the same
            notes += (f"no notes: {type(exc).__name__}: {exc}",)
    return registry.explain_bound(bound, registry._indexed(device), notes, bound.normal.scores)


__all__ = ["Plan", "attention", "attention_paged", "attention_varlen", "cache_append", "explain", "merge_states", "plan"]
