"""Gradients of the tiled paths against autograd through the float64 reference, lengths on the host and on a device."""

from __future__ import annotations

import pytest
import torch
from conftest import randn, sdpa

import portattn
from portattn import reference

INF = float("inf")


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def compare(name: str, tensors: dict, rest: tuple = (), rows: int | None = None, **kw) -> None:
    """Gradients of a random linear function of out and of the finite lse, in every float tensor."""
    ours = {n: leaf(x) if x.is_floating_point() else x for n, x in tensors.items()}
    want = {n: leaf(x.double()) if x.is_floating_point() else x for n, x in tensors.items()}
    results = []
    for function, given in ((getattr(portattn, name), ours), (getattr(reference, name), want)):
        more = {"backend": "sdpa", "return_lse": True} if given is ours else {}
        named = {n: x for n, x in given.items() if n not in "qkv"}
        out, lse = function(given["q"], given["k"], given["v"], *rest, **named, **kw, **more)
        results.append((out[:rows], lse[:rows]))
    (out, lse), (out_, lse_) = results
    d_out, d_lse = torch.randn(out.shape), torch.randn(lse.shape)
    finite = lse_ > -INF
    (out * d_out.transpose(0, 1).contiguous().transpose(0, 1)).sum().add((lse[finite] * d_lse[finite]).sum()).backward()
    ((out_ * d_out).sum() + (lse_[finite] * d_lse[finite]).sum()).backward()
    for n, x in ours.items():
        if x.is_floating_point():
            reach = want[n].grad.abs().max().item() if x.numel() else 0.0
            assert (x.grad - want[n].grad).abs().max().item() <= 2e-5 * max(1.0, reach) if x.numel() else True, n


CASES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(5, 2)),
    "softcap": dict(causal=True, softcap=2.0),
    "everything": dict(causal=True, window_size=(30, 0), softcap=3.0),
}


@pytest.mark.parametrize("sq, sk", [(1, 7), (70, 70), (9, 3), (20, 90)])
@pytest.mark.parametrize("case", CASES)
def test_dense(case, sq, sk):
    tensors = dict(q=randn(2, sq, 6, 8), k=randn(2, sk, 2, 8), v=randn(2, sk, 2, 5))
    if case == "everything":
        tensors |= dict(bias=randn(2, 1, sq, sk), alibi_slopes=torch.rand(2, 6), sinks=randn(6))
    compare("attention", tensors, **CASES[case])


@pytest.mark.parametrize("shape", [(1, 1, 1, 30), (2, 4, 1, 1), (1, 4, 20, 30), (2, 1, 20, 1)])
def test_bias_gradients_sum_where_it_is_broadcast(shape):
    compare("attention", dict(q=randn(2, 20, 4, 8), k=randn(2, 30, 2, 8), v=randn(2, 30, 2, 8), bias=randn(*shape)))


@pytest.mark.parametrize("kind", ["cpu", "mps"])
@pytest.mark.parametrize("case", CASES)
def test_varlen(pretend, kind, case):
    pretend(kind)
    cu_q, cu_k = torch.tensor([0, 20, 20, 21, 40]), torch.tensor([0, 30, 35, 35, 50])
    tensors = dict(q=randn(43, 6, 8), k=randn(51, 2, 8), v=randn(51, 2, 5))
    if case == "everything":
        tensors |= dict(alibi_slopes=torch.rand(6), sinks=randn(6))
    compare("attention_varlen", tensors, (cu_q, cu_k, 25, 30), 40, **CASES[case])


def test_rows_that_a_bias_hides_give_zero():
    q, k, v, bias = (leaf(x) for x in (randn(1, 4, 2, 8), randn(1, 5, 2, 8), randn(1, 5, 2, 8), torch.zeros(1, 1, 4, 5)))
    with torch.no_grad():
        bias[0, 0, 1] = -INF
    portattn.attention(q, k, v, bias=bias, backend="sdpa").sum().backward()
    assert not q.grad[0, 1].any() and q.grad[0, 0].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v, bias))


@pytest.mark.parametrize("scores", [8, 200])
def test_small_tiles_give_the_same_gradients(scores):
    x = [leaf(randn(2, n, h, 8)) for n, h in ((21, 4), (30, 2), (30, 2))]
    y = [leaf(t) for t in x]
    rules = sdpa.tiled.Rules(0.3, 9, 0, 2.0)
    for inputs, limit in ((x, None), (y, sdpa.tiled.Limits(16, scores, 1 << 10))):
        out, lse = sdpa.grad.attention(*inputs, rules, None, limit)
        (out.square().sum() + lse.sum()).backward()
    for a, b in zip(x, y):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_an_expanded_output_gradient_is_taken():
    q, k = leaf(randn(1, 6, 2, 8)), leaf(randn(1, 6, 2, 8))
    portattn.attention(q, k, k, backend="sdpa").sum().backward()  # sum() gives a gradient of stride 0
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("loss", [lambda out: out.square().sum(), lambda out: out.sum()], ids=["square", "linear"])
def test_second_derivatives_are_refused(loss):
    """Where the loss is linear in out, no gradient that comes in has a graph; the one of a penalty would be dropped."""
    q = leaf(randn(1, 4, 2, 8))
    out = portattn.attention(q, q, q, backend="sdpa")
    (first,) = torch.autograd.grad(loss(out), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        (loss(out) + first.square().sum()).backward()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_batch_of_gradients_is_named_and_torch_func_has_it():
    q = leaf(randn(1, 3, 2, 4))
    run = lambda q: portattn.attention(q, q, q, causal=True, return_lse=True, backend="sdpa")
    for i in range(2):
        out = run(q)[i]
        each = torch.eye(out.numel()).view(-1, *out.shape)
        with pytest.raises(portattn.ArgumentError, match="torch.func.jacrev"):
            torch.autograd.grad(out, q, each, is_grads_batched=True)
        want = torch.stack([torch.autograd.grad(run(q)[i], q, x)[0] for x in each])
        torch.testing.assert_close(torch.func.jacrev(lambda q: run(q)[i])(q.detach()).view(want.shape), want)


def test_paged_declines_gradients():
    cache = randn(2, 4, 2, 8)
    with pytest.raises(portattn.NoBackendError, match="grad"):
        portattn.attention_paged(leaf(randn(1, 1, 2, 8)), cache, cache, torch.tensor([[0]]), torch.tensor([3]), backend="sdpa")


@pytest.mark.parametrize("kind", ["cpu", "mps"])
@pytest.mark.parametrize("rows, starts_q, starts_k", [(0, [0], [0]), (4, [0], [0]), (4, [0, 0], [0, 6]), (0, [0, 0], [0, 6]), (4, [0, 0, 0], [0, 0, 0])])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "alibi_slopes"])
def test_a_batch_without_queries_has_gradients_of_zero(pretend, kind, rows, starts_q, starts_k, name):
    """A step of training whose batch is empty still calls backward."""
    pretend(kind)
    given = dict(q=randn(rows, 4, 8), k=randn(6, 2, 8), v=randn(6, 2, 8), sinks=randn(4), alibi_slopes=torch.rand(4))
    given[name].requires_grad_()
    out, lse = portattn.attention_varlen(given["q"], given["k"], given["v"], torch.tensor(starts_q), torch.tensor(starts_k), 0, 6, sinks=given["sinks"],
                                         alibi_slopes=given["alibi_slopes"], return_lse=True, backend="sdpa")
    (out.sum() + lse[lse > -INF].sum()).backward()
    assert out.shape == (rows, 4, 8) and given[name].grad.shape == given[name].shape and not given[name].grad.any()
