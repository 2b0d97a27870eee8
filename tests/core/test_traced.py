"""Kernels take pointers: whatever records, transforms or wraps tensors goes through the custom ops, or is told that it cannot."""

from __future__ import annotations

import fractions

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import portattn
from portattn import registry

CPU = torch.device("cpu")
BACKENDS = [name for name in ("sdpa", "cpu") if not registry.probe(name, CPU)]
Q, K, V = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)


class Plain(torch.Tensor):
    """A subclass that does nothing."""


def functionalized(f, x):
    return torch.func.functionalize(f)(x)


def traced_by_fx(f, x):
    return make_fx(f)(torch.zeros_like(x))(x)


def traced_by_jit(f, x):
    return torch.jit.trace(f, (torch.zeros_like(x),), check_trace=False)(x)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", [
    functionalized, traced_by_fx, traced_by_jit,
    lambda f, x: torch.func.vmap(f)(x[None])[0],
    lambda f, x: f(torch._neg_view(-x)),
    lambda f, x: f(x.as_subclass(Plain)).as_subclass(torch.Tensor),
    lambda f, x: f(TwoTensor(x, x)).a,
], ids=["functionalize", "make_fx", "jit", "vmap", "negated", "subclass", "wrapper"])
@pytest.mark.parametrize("call", [
    lambda x, backend: portattn.attention(x, K, V, backend=backend),
    lambda x, backend: portattn.attention(Q, x[:, :, :2], V[:, :5], backend=backend),
    lambda x, backend: portattn.merge_states([Q, x], [Q[..., 0], Q[..., 1]], backend=backend)[0],
], ids=["q", "k", "merge"])
def test_results_are_those_of_plain_tensors(call, way, backend):
    run = lambda x: call(x, backend)
    expected = [run(Q + 1) for _ in range(4)][-1]  # such calls are known by sight now
    torch.testing.assert_close(way(run, Q + 1), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_memory_of_their_own_are_read(backend):
    zeros, shown = torch._efficientzerotensor(Q.shape), torch._to_functional_tensor(Q)
    for _ in range(3):  # a kind of call that is known by sight, too
        want = portattn.attention(torch.zeros_like(Q), K, V, backend=backend), portattn.attention(Q, K, V, backend=backend)
    torch.testing.assert_close(portattn.attention(zeros, K, V, backend=backend), want[0])
    got = portattn.attention(shown, K, V, backend=backend)
    torch.testing.assert_close(torch._from_functional_tensor(got) if torch._is_functional_tensor(got) else got, want[1])


@pytest.mark.parametrize("hide", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)], ids=["negated", "zero"])
def test_what_is_written_has_to_be_what_its_memory_holds(hide):
    table, lens, new = torch.tensor([[0], [1]]), torch.tensor([7, 6]), K[:, :5]
    with pytest.raises(portattn.ArgumentError, match="out: wanted a tensor that is what its memory holds"):
        portattn.attention(Q, K, V, out=hide(torch.zeros_like(Q)))
    with pytest.raises(portattn.ArgumentError, match="v_cache: wanted a tensor that is what its memory holds"):
        portattn.attention_paged(Q, K.clone(), hide(V.clone()), table, lens, k=new, v=new)
    with pytest.raises(portattn.ArgumentError, match="k_cache: wanted a tensor that is what its memory holds"):
        portattn.cache_append(new[0], new[0], hide(K.clone()), V.clone(), torch.arange(5))
    portattn.attention_paged(Q, hide(K.clone()), V, table, lens)


STARTS_Q, STARTS_K = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
LOSSES = {
    "dense": (lambda q, k: portattn.attention(q, k, V, causal=True).square().sum(), Q, K),
    "lse": (lambda q, k: portattn.attention(q, k, V, return_lse=True)[1].square().sum(), Q, K),
    "bias": (lambda q, bias: portattn.attention(q, K, V, bias=bias, softcap=2.0).square().sum(), Q, torch.randn(5, 7)),
    "varlen": (lambda q, sinks: portattn.attention_varlen(q, K[0], V[0], STARTS_Q, STARTS_K, 3, 4, sinks=sinks).square().sum(), Q[0], torch.randn(4)),
    "merge": (lambda outs, lses: sum(x.square().sum() for x in portattn.merge_states(outs, lses)), torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4)),
}


def gradients(loss, *args):
    leaves = [x.clone().requires_grad_() for x in args]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("loss, a, b", LOSSES.values(), ids=LOSSES)
def test_functional_gradients_are_those_of_backward(loss, a, b):
    grad, vmap = torch.func.grad(loss, argnums=(0, 1)), torch.func.vmap
    want = gradients(loss, a, b)
    for got in (grad(a, b), torch.func.vjp(loss, a, b)[1](torch.tensor(1.0)), torch.func.jacrev(loss, argnums=(0, 1))(a, b),
                [x[1] for x in vmap(grad)(torch.stack([a + 1, a]), torch.stack([b, b]))],
                [x / 2 for x in torch.func.grad(lambda a, b: vmap(loss)(torch.stack([a, a]), torch.stack([b, b])).sum(), argnums=(0, 1))(a, b)]):
        torch.testing.assert_close(tuple(got), want)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("loss, a, b", [LOSSES["dense"], LOSSES["varlen"], LOSSES["merge"]], ids=["dense", "varlen", "merge"])
def test_functional_gradients_inside_torch_compile_are_taken_uncompiled_or_named(loss, a, b):
    compiled = lambda **options: torch.compile(torch.func.grad(loss, argnums=(0, 1)), backend="aot_eager", **options)
    torch.testing.assert_close(compiled()(a, b), gradients(loss, a, b))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.func's gradients of a custom op"):
        compiled(fullgraph=True)(a, b)


def test_functional_gradients_that_there_are_not_are_refused():
    loss = LOSSES["dense"][0]
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, K).sum())(Q)
    with pytest.raises(portattn.ArgumentError, match="forward-mode"):
        torch.func.hessian(loss)(Q, K)
    table, lens = torch.tensor([[0], [1]]), torch.tensor([7, 6])
    paged = lambda q: portattn.attention_paged(q, K, V, table, lens).sum()
    with pytest.raises(portattn.NoBackendError, match="gradients"):
        torch.func.grad(paged)(Q)
    torch.testing.assert_close(torch.func.grad(lambda x: x.sum() * paged(Q))(torch.ones(2)), paged(Q).expand(2))
    with pytest.raises(portattn.NoBackendError, match="gradients"):
        torch.func.grad(lambda k: portattn.cache_append(k, V[0], K.clone(), V.clone(), torch.arange(7)) or k.sum())(K[0])


TABLE, LENS = torch.tensor([[0], [1]]), torch.tensor([7, 6])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name, value", [
    ("window_size", 3), ("window_size", (1.5, 0)), ("softmax_scale", torch.tensor(1.0)), ("softcap", "1"), ("causal", 1), ("causal", "x"),
    ("num_splits", 1.0), ("return_lse", None), ("batch_invariant", 1), ("backend", 3), ("layout", None), ("max_seqlen_q", 5.0), ("max_seqlen_k", "7"),
    ("k_scale", "a"), ("rotary_interleaved", 1), ("kv_layout", 3),
], ids=lambda x: str(x)[:12])
def test_errors_are_those_of_plain_tensors(name, value):
    """The dispatcher would convert some of these, a tensor to a number by waiting for it, and has other errors for the rest."""
    starts = dict(cu_seqlens_q=STARTS_Q, cu_seqlens_k=STARTS_K, max_seqlen_q=3, max_seqlen_k=4)
    call = (lambda x: portattn.attention_varlen(x[0], K[0], K[0], **starts | {name: value})) if name.startswith("max") else (
        lambda x: portattn.attention_paged(x, K, V, TABLE, LENS, **{name: value})) if name in ("k_scale", "rotary_interleaved", "kv_layout") else (
        lambda x: portattn.attention(x, K, V, **{name: value}))
    with pytest.raises(portattn.ArgumentTypeError, match=name) as plain:
        call(Q)
    with pytest.raises(portattn.ArgumentTypeError) as traced:
        torch.func.vmap(call)(Q[None])
    assert str(traced.value) == str(plain.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_of_any_size_are_taken():
    call = lambda x: portattn.attention(x, K, V, window_size=(10**30, 0), num_splits=10**30, softmax_scale=fractions.Fraction(1, 2))
    torch.testing.assert_close(torch.func.vmap(call)(Q[None])[0], call(Q))


def test_what_is_written_is_written_under_vmap():
    vmap, queries, new = torch.func.vmap, torch.randn(3, *Q.shape), torch.randn(3, 2, 5, 2, 16)
    caches = [torch.randn(3, 2, 7, 2, 16) for _ in range(2)]
    own = [x.clone() for x in caches]
    append = lambda q, n, c, d: portattn.attention_paged(q, c, d, TABLE, LENS, k=n, v=n, causal=True)
    got = vmap(append)(queries, new, *caches)
    for i in range(3):
        torch.testing.assert_close(got[i], append(queries[i], new[i], own[0][i], own[1][i]))
    slots = torch.tensor([[1, -1], [13, 0], [2, 3]])
    vmap(lambda n, c, d, s: portattn.cache_append(n, n, c, d, s) or c)(new[:, 0, :2], *caches, slots)
    for i in range(3):
        portattn.cache_append(new[i, 0, :2], new[i, 0, :2], own[0][i], own[1][i], slots[i])
    assert all(torch.equal(a, b) for a, b in zip(caches, own))
    out = torch.zeros(3, *Q.shape)
    vmap(lambda q, o: portattn.attention(q, K, V, out=o))(queries, out)
    torch.testing.assert_close(out, torch.stack([portattn.attention(q, K, V) for q in queries]))
    with pytest.raises(portattn.ArgumentError, match="k_cache: wanted a tensor of vmap's batch"):
        vmap(lambda q, n: append(q, n, K.clone(), V.clone()))(queries, new)


def test_a_batch_of_nothing_under_vmap():
    vmap, none = torch.func.vmap, torch.empty(0, *Q.shape)
    out, lse = vmap(lambda q: portattn.attention(q, K, V, return_lse=True))(none)
    assert out.shape == none.shape and lse.shape == (0, 2, 5, 4) and out.dtype == torch.float32
    assert vmap(torch.func.grad(lambda q: portattn.attention(q, K, V).sum()))(none).shape == none.shape
    assert vmap(lambda q: portattn.attention_paged(q, K, V, TABLE, LENS))(none).shape == none.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_is_refused_not_dropped(backend):
    with forward_ad.dual_level():
        for tensors in ((forward_ad.make_dual(Q, Q), K, V), (Q, K, forward_ad.make_dual(V, V))):
            with pytest.raises(portattn.ArgumentError, match="tangent"):
                portattn.attention(*tensors, backend=backend)
        portattn.attention(Q, K, V, backend=backend)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    portattn.attention(Q, K, V)
    with pytest.raises(portattn.ArgumentError, match="q: wanted a plain tensor"):
        portattn.attention(torch.nested.nested_tensor([torch.randn(4, 2, 16)], layout=layout), K, V)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "out"])
def test_nested_tensors_are_refused_where_calls_of_the_kind_are_known(name):
    given = dict(q=Q, k=K, v=V, bias=torch.zeros(2, 4, 5, 7), sinks=torch.zeros(4), out=torch.empty_like(Q))
    for _ in range(4):
        portattn.attention(**given)
    with pytest.raises(portattn.ArgumentError, match=f"{name}: wanted a plain tensor"):
        portattn.attention(**given | {name: torch.nested.nested_tensor(list(given[name]))})


def test_meta_tensors_have_results_of_the_right_kind():
    q, k = Q.to("meta"), K.to("meta")
    cu, table, lens = (torch.tensor(x, device="meta") for x in ([0, 5], [[0]], [7]))
    assert portattn.attention(q, k, k, causal=True).shape == Q.shape
    out, lse = portattn.attention_varlen(q[0], k[0, :5], k[0, :5], cu, cu, 5, 5, return_lse=True)
    assert out.shape == Q.shape[1:] and lse.shape == Q.shape[1:3] and out.is_meta and lse.dtype == torch.float32
    assert portattn.attention_paged(q[:1], k, k, table, lens, k=k[:1, :5], v=k[:1, :5]).is_meta
    assert portattn.merge_states([q, q], [q[..., 0], q[..., 0]])[0].is_meta
    portattn.cache_append(k[0], k[0], k, k, torch.arange(7, device="meta"))
