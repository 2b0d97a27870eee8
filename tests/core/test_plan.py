"""plan(): bound once, run on tensors alike; explain() on every call."""

import pytest
import torch

import portattn


def test_a_plan_runs_the_call_it_was_made_of_with_tensors_replaced(qkv, usual):
    q, k, v = qkv
    plan = portattn.plan(portattn.attention, q, k, v, causal=True, return_lse=True)
    for a, b in zip(plan(), portattn.attention(q, k, v, causal=True, return_lse=True)):
        assert torch.equal(a, b)
    other = torch.randn_like(q)
    assert torch.equal(plan(q=other)[0], portattn.attention(other, k, v, causal=True, return_lse=True)[0])
    assert plan.choice.backend == usual and usual in repr(plan)


def test_a_plan_of_every_call():
    cache, new = torch.zeros(2, 4, 1, 8), torch.randn(1, 1, 1, 8)
    table, lens = torch.tensor([[1, 0]]), torch.tensor([5])
    out = torch.empty(1, 1, 2, 8)
    plan = portattn.plan(portattn.attention_paged, torch.randn(1, 1, 2, 8), cache, cache.clone(), table, lens, k=new, v=new, out=out)
    assert plan() is out and torch.equal(cache[0, 0], new[0, 0])
    portattn.plan(portattn.cache_append, new[0], new[0], cache, cache.clone(), torch.tensor([2]))()
    assert torch.equal(cache[0, 2], new[0, 0])
    states = [torch.randn(3, 2, 8) for _ in range(2)], [torch.randn(3, 2) for _ in range(2)]
    for a, b in zip(portattn.plan(portattn.merge_states, *states)(), portattn.merge_states(*states)):
        assert torch.equal(a, b)


def test_a_plan_of_states_in_a_list_takes_other_lists():
    outs, lses = list(torch.randn(2, 3, 2, 8)), list(torch.randn(2, 3, 2))
    plan = portattn.plan(portattn.merge_states, outs, lses)
    for a, b in zip(plan(outs=outs[::-1]), portattn.merge_states(outs[::-1], lses)):
        assert torch.equal(a, b)
    for changed in ([outs[0], outs[1][:2]], outs[:1], [outs[0], torch._neg_view(outs[1])]):
        with pytest.raises(portattn.ArgumentError, match="plan: "):
            plan(outs=changed)


@pytest.mark.parametrize("changed", [dict(q=torch.randn(2, 6, 4, 16)), dict(q=torch.randn(2, 5, 4, 16).half()), dict(causal=False),
                                     dict(q=torch.randn(2, 4, 5, 16).transpose(1, 2)), dict(softcap=2.0)])
def test_a_plan_refuses_what_it_was_not_made_for(qkv, changed):
    plan = portattn.plan(portattn.attention, *qkv, causal=True)
    with pytest.raises(portattn.ArgumentError, match=next(iter(changed))):
        plan(**changed)
    with pytest.raises(portattn.ArgumentTypeError, match="unknown argument 'queries'; known: q, k, v, .*, backend$"):
        plan(queries=qkv[0])


def test_a_plan_detaches_nothing_and_reads_no_negated_view_as_it_lies(qkv):
    q, k, v = qkv
    x = q.clone().requires_grad_()
    with torch.no_grad():
        plan = portattn.plan(portattn.attention, x, k, v)
        assert not plan().requires_grad
    with pytest.raises(portattn.ArgumentError, match="no_grad"):
        plan()
    with pytest.raises(portattn.ArgumentError, match="memory"):
        portattn.plan(portattn.attention, q, k, v)(q=torch._neg_view(q))
    with pytest.raises(portattn.ArgumentError, match="memory"):
        portattn.plan(portattn.attention, torch._neg_view(q), k, v)


def test_explain_says_what_is_copied(qkv):
    q, k, v = qkv
    loose = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert any("q copied" in note for note in portattn.explain(portattn.attention, loose, k, v).notes)
    torch.testing.assert_close(portattn.attention(loose, k, v), portattn.attention(q, k, v))


def test_explain_takes_every_call_and_nothing_else(qkv):
    cache = torch.zeros(2, 4, 2, 16)
    table, lens = torch.tensor([[1, 0]] * 2), torch.tensor([5, 3])
    assert portattn.explain(portattn.attention_paged, qkv[0], cache, cache, table, lens).problem.layout == "paged"
    assert portattn.explain(portattn.cache_append, qkv[1][0], qkv[2][0], cache, cache.clone(), torch.arange(9) % 8).problem.layout == "cache_append"
    with pytest.raises(portattn.ArgumentTypeError):
        portattn.explain(torch.matmul, *qkv)
