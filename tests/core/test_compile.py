"""C-COMPILE beside the suite: the ops are clean, whole graphs compile, eager calls never go through them, gradients agree."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import portattn
from portattn import ops

TABLE, LENS = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)


def dense_args(**changed):
    gen = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 5, 4, 8, generator=gen), torch.randn(2, 9, 2, 8, generator=gen)
    given = dict(q=q, k=k, v=k.clone(), bias=None, alibi_slopes=None, sinks=None, layout="bshd", causal=True, window_left=-1, window_right=-1,
                 softmax_scale=None, softcap=0.0, return_lse=True, num_splits=0, batch_invariant=False, backend=None) | changed
    return [given[n] for n in ops._names(ops._DENSE)]


@pytest.mark.parametrize("changed", [
    {}, dict(return_lse=False), dict(layout="bhsd", q=torch.randn(2, 4, 5, 8), k=torch.randn(2, 2, 9, 8), v=torch.randn(2, 2, 9, 16)),
    dict(q=torch.randn(2, 5, 4, 8, requires_grad=True), bias=torch.randn(5, 9, requires_grad=True), sinks=torch.randn(4)),
    dict(q=torch.randn(2, 5, 4, 8).bfloat16(), k=torch.randn(2, 9, 2, 8).bfloat16(), v=torch.randn(2, 9, 2, 3).bfloat16()),
])
def test_the_dense_op_is_clean(changed):
    torch.library.opcheck(torch.ops.portattn.attention.default, dense_args(**changed))
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in changed.values()):
        args = dense_args(**changed)
        out = torch.empty_like(torch.ops.portattn.attention(*args)[0])
        torch.library.opcheck(torch.ops.portattn.attention_out.default, [*args, out])


def test_the_paged_and_cache_ops_are_clean():
    cache, new = torch.randn(4, 16, 2, 8), torch.randn(1, 1, 2, 8)
    given = dict(q=torch.randn(1, 1, 4, 8), k_cache=cache, v_cache=cache.clone(), block_table=TABLE, kv_lens=LENS, kv_layout="NHD", causal=True,
                 window_left=-1, window_right=-1, softcap=0.0, return_lse=True, num_splits=0, batch_invariant=False, rotary_interleaved=False)
    args = lambda **more: [(given | more).get(n) for n in ops._names(ops._PAGED.format("", ""))]
    torch.library.opcheck(torch.ops.portattn.attention_paged.default, args())
    torch.library.opcheck(torch.ops.portattn.attention_paged_append.default, args(k=new, v=new.clone()))
    torch.library.opcheck(torch.ops.portattn.cache_append.default,
                          [new[0], new[0].clone(), cache, cache.clone(), torch.tensor([3]), "NHD", None, None, None, None, None])
    torch.library.opcheck(torch.ops.portattn.merge_states.default, [torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), None, None])


def graph(q, cache, other, out):
    """Every call once, with an append, an out= and a merge."""
    cu = torch.tensor([0, 2, q.shape[1]])
    a, lse = portattn.attention(q, q, q, causal=True, window_size=(3, 0), return_lse=True)
    b, lse_b = portattn.attention_varlen(q[0], q[0], q[0], cu, cu, 5, 5, return_lse=True)
    merged, _ = portattn.merge_states([a[0], b], [lse[0], lse_b])
    portattn.cache_append(q[0, :1], q[0, 1:2], cache, other, torch.tensor([5]), k_scale=2.0)
    c = portattn.attention_paged(q[:, :1], cache, other, TABLE, LENS, k=q[:, :1], v=q[:, 1:2], softcap=3.0)
    portattn.attention_paged(q[:, :1], cache, other, TABLE, LENS, out=out)
    return merged.sum() + c.sum() + out.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_calls_compile_into_one_graph_and_agree_with_eager(dynamic):
    compiled = torch.compile(graph, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (5, 6):
        make = lambda: (torch.randn(1, length, 2, 8, generator=torch.Generator().manual_seed(length)), torch.zeros(4, 16, 2, 8),
                        torch.zeros(4, 16, 2, 8), torch.zeros(1, 1, 2, 8))
        eager, traced = make(), make()
        torch.testing.assert_close(compiled(*traced), graph(*eager))
        for a, b in zip(eager[1:], traced[1:]):
            torch.testing.assert_close(a, b)


def leaves(*shapes) -> list[torch.Tensor]:
    return [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]


def compiled_gradients_are_eager_ones(loss, inputs: list[torch.Tensor]) -> None:
    grads = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        fresh = [x.clone().requires_grad_() for x in inputs]
        fn(*fresh).backward()
        grads.append([x.grad for x in fresh])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_gradients_through_a_compiled_graph_equal_eager_ones():
    def loss(q, k, bias):
        out, lse = portattn.attention(q, k, k, causal=True, bias=bias, return_lse=True)
        return (out * out).sum() + lse.sum()

    compiled_gradients_are_eager_ones(loss, leaves((1, 4, 4, 8), (1, 6, 2, 8), (4, 6)))


def test_gradients_of_a_compiled_merge_equal_eager_ones():
    def loss(outs, lses, sinks):
        out, lse = portattn.merge_states(outs, lses, sinks=sinks)
        return (out * out).sum() + lse.sum()

    inputs = leaves((3, 5, 4, 8), (3, 5, 4), (4,))
    compiled_gradients_are_eager_ones(loss, inputs)
    torch.library.opcheck(torch.ops.portattn.merge_states.default, [*(x.requires_grad_() for x in inputs), None])


def test_fake_tensors_go_through_the_op():
    with FakeTensorMode():
        q = torch.empty(1, 4, 2, 8)
        out, lse = portattn.attention(q, q, q, return_lse=True)
    assert out.shape == (1, 4, 2, 8) and lse.shape == (1, 4, 2) and lse.dtype == torch.float32


def test_an_eager_call_does_not_pay_for_the_op(monkeypatch):
    monkeypatch.setattr(ops, "call", lambda *a, **k: pytest.fail("an eager call went through the custom op"))
    q = torch.nn.Parameter(torch.randn(1, 4, 2, 8))
    portattn.attention(q, q, q)


def test_a_context_entered_outside_reaches_the_compiled_call():
    compiled = torch.compile(lambda q: portattn.attention(q, q, q), fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 4, 2, 8)
    compiled(q)
    from toys import toy

    with toy() as calls, portattn.use("toy"):
        compiled(q)
        assert calls
