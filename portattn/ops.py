"""torch.compile: every call as a custom op, so that dynamo sees one opaque node instead of validation and choice.

The ops exist for tracing (and for tensor subclasses, which dispatch through them); an eager call on plain
tensors never comes here. Inside an op the eager call runs on real tensors and chooses as always.
An op's outputs may not alias its inputs, so `out=` and an append have ops of their own that declare what they write.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from . import api
from .errors import ONLY_ONCE, ArgumentError, NoBackendError

_TAIL = "bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, float softcap"
_END = "bool return_lse, SymInt num_splits, bool batch_invariant, str? backend"
_DENSE = f"Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, str layout, {_TAIL}, {_END}"
_VARLEN = (f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
           f"Tensor? seqused_k, Tensor? alibi_slopes, Tensor? sinks, {_TAIL}, {_END}")
_PAGED = ("Tensor q, Tensor{0} k_cache, Tensor{1} v_cache, Tensor block_table, Tensor kv_lens, Tensor? cu_seqlens_q, "
          "SymInt? max_seqlen_q, Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, "
          "str kv_layout, Tensor? k_scale, Tensor? v_scale, float? k_factor, float? v_factor, Tensor? alibi_slopes, "
          f"Tensor? sinks, {_TAIL}, {_END}")


def _names(schema: str) -> list[str]:
    return [part.split()[-1] for part in schema.split(", ")]


def _eager(call: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs the public call on an op's arguments; always (out, lse), lse empty where it was not asked for."""
    given = dict(given)
    given["window_size"] = (given.pop("window_left"), given.pop("window_right"))
    for name in ("k", "v"):
        if (factor := given.pop(f"{name}_factor", None)) is not None:
            given[f"{name}_scale"] = factor
    if (tokens := given.get("max_seqlen_q")) is not None:
        given["max_seqlen_q"] = int(tokens)
    got = call(**given)
    out, lse = got if given["return_lse"] else (got, given["q"].new_empty(0, dtype=torch.float32))
    # A backend may return other strides than the fake ones; compiled code relies on those.
    swap = given.get("layout") == "bhsd"
    out = out if given.get("out") is not None else out.transpose(1, 2).contiguous().transpose(1, 2) if swap else out.contiguous()
    return out, lse.contiguous()


def _fake(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse as the eager call makes them: shapes, strides, dtypes."""
    q, v = given["q"], given.get("v_cache", given["v"])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lead = q.shape[:-1]
    if given.get("layout") == "bhsd":
        b, h, s, _ = q.shape
        out, lead = q.new_empty((b, s, h, v.shape[-1])).transpose(1, 2), (b, s, h)
    return out, q.new_empty(lead if given["return_lse"] else (0,), dtype=torch.float32)


def _one_by_one(op: Any, names: list[str] | None = None, writes: tuple[str, ...] = ()) -> None:
    """Gives an op its rule under vmap: a call for each entry of the batch. What is written has to be batched itself."""
    def batched(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        for name, dim in zip(names or (), in_dims):
            if name in writes and dim is None:
                raise ArgumentError(f"{name}: wanted a tensor of vmap's batch, as each entry writes to it, got one for all entries")
        pick = lambda i: [x if dim is None or not isinstance(x, Tensor) else x.select(dim, i) for x, dim in zip(args, in_dims)]
        if info.batch_size:
            got = [op(*pick(i)) for i in range(info.batch_size)]
            join = torch.stack
        else:  # one entry of zeros has results of the right kind
            zeros = [x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :]) if isinstance(x, Tensor) and dim is not None else x for x, dim in zip(args, in_dims)]
            got = [op(*zeros)]
            join = lambda parts: parts[0].new_empty((0, *parts[0].shape))
        if got[0] is None:
            return None, None
        if isinstance(got[0], Tensor):
            return join(got), 0
        return type(got[0])(join(parts) for parts in zip(*got)), type(got[0])(0 for _ in got[0])

    op.register_vmap(batched)


def _define(name: str, call: Any, schema: str, writes: tuple[str, ...] = ()) -> None:
    """An op NAME -> (out, lse) and an op NAME_out -> lse that fills `out`."""
    names = _names(schema)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        return _eager(call, dict(zip(names, args)))

    def run_out(*args: Any) -> Tensor:
        return _eager(call, dict(zip([*names, "out"], args)))[1]

    op = torch.library.custom_op(f"portattn::{name}", run, mutates_args=writes, schema=f"({schema}) -> (Tensor, Tensor)")
    op.register_fake(lambda *args: _fake(dict(zip(names, args))))
    _one_by_one(op, names, writes)
    op_out = torch.library.custom_op(f"portattn::{name}_out", run_out, mutates_args=(*writes, "out"),
                                     schema=f"({schema}, Tensor(z!) out) -> Tensor")
    op_out.register_fake(lambda *args: _fake(dict(zip(names, args)))[1])
    _one_by_one(op_out, [*names, "out"], (*writes, "out"))
    if call in _DIFFERENTIABLE:
        _differentiate(op, name, lambda given: _eager(call, given), _DIFFERENTIABLE[call], names, schema)


# ------------------------------------------------------------------ gradients
_DIFFERENTIABLE = {api.attention: ("q", "k", "v", "bias", "alibi_slopes", "sinks"),
                   api.attention_varlen: ("q", "k", "v", "alibi_slopes", "sinks")}
_transformed: dict[str, type] = {}  # for each op, what torch.func can differentiate: it cannot look into a custom op


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside an op: the dispatcher calls an op's body below autograd, with its keys excluded."""
    c = torch._C
    autograd = c.DispatchKeySet(c.DispatchKey.AutogradFunctionality) | c.DispatchKeySet(c.DispatchKey.ADInplaceOrView)
    included, excluded = c._dispatch_tls_local_include_set(), c._dispatch_tls_local_exclude_set()
    with c._ForceDispatchKeyGuard(included, excluded - autograd), torch.enable_grad():
        yield


def _differentiate(op: Any, name: str, run: Callable, wanted: tuple[str, ...], names: list[str], schema: str) -> None:
    """Backward recomputes the forward by a backend that has gradients: the forward may have run on one that has not."""

    def backward(grad_out: Tensor, grad_lse: Tensor, needed: list[bool], *args: Any) -> list[Tensor]:
        given = dict(zip(names, args), backend=None)
        leaves = []
        for n, need in zip(wanted, needed):
            if need:
                given[n] = given[n].detach().requires_grad_()
                leaves.append(given[n])
        with _autograd():
            outputs = [(x, grad) for x, grad in zip(run(given), (grad_out, grad_lse)) if x.requires_grad]
            grads = torch.autograd.grad([x for x, _ in outputs], leaves, [grad for _, grad in outputs], allow_unused=True)
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) if g is None else g.contiguous()
                for x, g in zip(leaves, grads)]

    def fake(grad_out: Tensor, grad_lse: Tensor, needed: list[bool], *args: Any) -> list[Tensor]:
        given = dict(zip(names, args))
        return [torch.empty_like(given[n], memory_format=torch.contiguous_format) for n, need in zip(wanted, needed) if need]

    grad_op = torch.library.custom_op(f"portattn::{name}_backward", backward, mutates_args=(),
                                      schema=f"(Tensor grad_out, Tensor grad_lse, bool[] needed, {schema}) -> Tensor[]")
    grad_op.register_fake(fake)
    _one_by_one(grad_op)

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))

    def gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple:
        args = list(ctx.rest)
        for i, x in zip(ctx.tensors, ctx.saved_tensors):
            args[i] = x
        where = [names.index(n) for n in wanted]
        needed = [bool(ctx.needs_input_grad[i]) for i in where]
        again = _transformed[f"{name}_backward"].apply if _is_differentiated() else grad_op
        got = iter(again(grad_out, grad_lse, needed, *args))
        result: list[Any] = [None] * len(args)
        for i, need in zip(where, needed):
            if need:
                result[i] = next(got)
        return tuple(result)

    op.register_autograd(gradients, setup_context=setup)
    _transformed[name] = _function(op, setup, gradients)
    _transformed[f"{name}_backward"] = _function(grad_op, lambda *_: None, _only_once)


def _function(op: Any, setup: Callable, gradients: Callable) -> type:
    """An op as what torch.func can differentiate."""
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(op(*args))

    return type("Differentiable", (torch.autograd.Function,), {
        "forward": staticmethod(forward), "setup_context": staticmethod(setup), "backward": staticmethod(gradients),
        "jvp": staticmethod(api.refuse_tangents),
        "generate_vmap_rule": True})


def _only_once(*_: Any) -> None:
    raise RuntimeError(ONLY_ONCE)


def _is_differentiated() -> bool:
    """Whether torch.func is taking gradients of this call."""
    return torch._C._are_functorch_transforms_active() and any(
        x.key() == TransformType.Grad for x in retrieve_all_functorch_interpreters())


_is_differentiated._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, without the second that dynamo's import takes


# ------------------------------------------------------------------ definitions
_define("attention", api.attention, _DENSE)
_define("attention_varlen", api.attention_varlen, _VARLEN)
_define("attention_paged", api.attention_paged, _PAGED.format("", ""))
_define("attention_paged_append", api.attention_paged, _PAGED.format("(a!)", "(b!)"), ("k_cache", "v_cache"))

_APPEND = ("Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, str kv_layout, Tensor? k_scale, "
           "Tensor? v_scale, float? k_factor, float? v_factor, str? backend")


def _run_append(k, v, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale, k_factor, v_factor, backend) -> None:
    api.cache_append(k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale if k_factor is None else k_factor,
                     v_scale=v_scale if v_factor is None else v_factor, backend=backend)


_append = torch.library.custom_op("portattn::cache_append", _run_append, mutates_args=("k_cache", "v_cache"), schema=f"({_APPEND}) -> ()")
_append.register_fake(lambda *args: None)
_one_by_one(_append, [part.split()[-1] for part in _APPEND.split(", ")], ("k_cache", "v_cache"))
_MERGE = "Tensor outs, Tensor lses, Tensor? sinks, str? backend"
_merge = torch.library.custom_op(
    "portattn::merge_states", lambda outs, lses, sinks, backend: api.merge_states(outs, lses, sinks=sinks, backend=backend),
    mutates_args=(), schema=f"({_MERGE}) -> (Tensor, Tensor)")
_merge.register_fake(lambda outs, lses, sinks, backend: (outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])))
_one_by_one(_merge)
_differentiate(_merge, "merge_states", lambda given: api.merge_states(**given), ("outs", "lses", "sinks"), _names(_MERGE), _MERGE)


# ------------------------------------------------------------------ from the public calls
def _split(scale: Any) -> tuple[Any, Any]:
    """A scale as (tensor or None, number or None)."""
    return (scale, None) if scale is None or isinstance(scale, Tensor) else (None, scale)


def _refuse_gradients(name: str, *args: Any) -> None:
    """torch.func's own error of an op without gradients speaks of another mistake."""
    if _is_differentiated() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        raise NoBackendError(f"{name}: no backend has gradients of it, and torch.func takes them of an argument", None, {})


def _invoke(name: str, schema: str, given: dict[str, Any]) -> Any:
    window = given.pop("window_size")
    given["window_left"], given["window_right"] = (-1, -1) if window is None else window
    out = given.pop("out")
    args = [given[n] for n in _names(schema)]
    if out is not None or name not in _transformed:
        _refuse_gradients(name, *args)
    if out is None and name in _transformed and _is_differentiated():
        out, lse = _transformed[name].apply(*args)
    elif out is None:
        out, lse = getattr(torch.ops.portattn, name)(*args)
    else:
        lse = getattr(torch.ops.portattn, f"{name}_out")(*args, out)
    return (out, lse) if given["return_lse"] else out


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """The public call of this name, through its op (no `dict | dict` here: dynamo of torch 2.6 does not trace it)."""
    if torch.compiler.is_compiling() and _is_differentiated():
        torch._dynamo.graph_break()  # torch.func's gradients of a custom op: torch cannot trace them
    if name == "attention":
        return _invoke(name, _DENSE, {**dict(zip(("q", "k", "v"), args)), **kwargs})
    if name == "attention_varlen":
        leading = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return _invoke(name, _VARLEN, {**dict(zip(leading, args)), **kwargs})
    if name == "attention_paged":
        given = {**dict(zip(("q", "k_cache", "v_cache", "block_table", "kv_lens"), args)), **kwargs}
        given["k_scale"], given["k_factor"] = _split(given["k_scale"])
        given["v_scale"], given["v_factor"] = _split(given["v_scale"])
        return _invoke(name if given["k"] is None and given["v"] is None else f"{name}_append", _PAGED.format("", ""), given)
    if name == "cache_append":
        (k_scale, k_factor), (v_scale, v_factor) = _split(kwargs["k_scale"]), _split(kwargs["v_scale"])
        _refuse_gradients(name, *args, k_scale, v_scale)
        return torch.ops.portattn.cache_append(*args, kwargs["kv_layout"], k_scale, v_scale, k_factor, v_factor,
                                               kwargs["backend"])
    outs, lses = (x if isinstance(x, Tensor) else torch.stack(tuple(x)) for x in args)
    op = _transformed["merge_states"].apply if _is_differentiated() else torch.ops.portattn.merge_states
    return op(outs, lses, kwargs["sinks"], kwargs["backend"])
