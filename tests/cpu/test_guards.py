"""Lengths that do not fit their tensors are the caller's fault: results are wrong, but nothing beside the tensors is read or written."""

from __future__ import annotations

import pytest
import torch

import portattn
from portattn import registry

pytestmark = pytest.mark.skipif(bool(registry.probe("cpu", "cpu")), reason="no CPU kernels here")


def inside(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor between NaN, the whole buffer)."""
    room = torch.full((shape[0] + 200, *shape[1:]), float("nan"))
    room[100:-100] = torch.randn(shape)
    return room[100:-100], room


@pytest.mark.parametrize("ends", [[0, 3, 9], [-2, 1, 4], [0, 50, 4], [0, 2**40, 2**62], [-(2**62), 2**62, 3], [7, 9, 11]], ids=str)
@pytest.mark.parametrize("of", ["q", "k", "both"])
def test_prefix_sums_past_the_rows(ends, of):
    (q, _), (k, _), (v, _), (out, around) = inside(4, 4, 16), inside(6, 2, 16), inside(6, 2, 16), inside(4, 4, 16)
    bad, cu_q, cu_k = torch.tensor(ends), torch.tensor([0, 1, 4]), torch.tensor([0, 3, 6])
    got = portattn.attention_varlen(q, k, v, bad if of != "k" else cu_q, bad if of != "q" else cu_k, 60, 60, out=out, backend="cpu")
    assert got.isfinite().all() and around[:100].isnan().all() and around[-100:].isnan().all()
    cache = torch.randn(2, 4, 2, 16)
    table, lens = torch.tensor([[0], [1]]), torch.tensor([4, 3])
    kw = dict(cu_seqlens_q=bad, max_seqlen_q=60, out=out, backend="cpu")
    assert portattn.attention_paged(q, cache, cache, table, lens, **kw).isfinite().all()
    new, _ = inside(4, 2, 16)
    assert portattn.attention_paged(q, cache, cache.clone(), table, lens, k=new, v=new, **kw).isfinite().all()
    assert around[:100].isnan().all() and around[-100:].isnan().all() and cache.isfinite().all()


def test_used_keys_past_a_sequence_are_not_the_next_ones():
    q, k, cu = torch.randn(4, 4, 16), torch.randn(6, 2, 16), torch.tensor([0, 3, 6])
    call = lambda used: portattn.attention_varlen(q, k, k, torch.tensor([0, 2, 4]), cu, 2, 3, seqused_k=torch.tensor(used), backend="cpu")
    assert torch.equal(call([5, 99]), call([3, 3]))


def test_rotary_tables_that_end_before_the_keys():
    (cos, _), (sin, _) = inside(3, 8), inside(3, 8)
    q, cache = torch.randn(1, 2, 4, 16), torch.randn(2, 4, 2, 16)
    out = portattn.attention_paged(q, cache, cache, torch.tensor([[0, 1]]), torch.tensor([7]), k=q[:, :, :2], v=q[:, :, :2], rotary_cos=cos,
                                   rotary_sin=sin, backend="cpu")
    assert out.isfinite().all() and cache.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, rows", [((4, 2), 1), ((16, 8), 1), ((4, 2), 20), ((4, 2), 60)])
@pytest.mark.parametrize("left", [36, 37])  # bfloat16 values are taken in pairs
def test_pages_left_of_every_window_may_be_anyones(heads, rows, dtype, left):
    unseen = 250 - rows - left
    cache, table = torch.randn(16, 16, heads[1], 64).to(dtype), torch.arange(16)[None].clone()
    q, call = torch.randn(1, rows, heads[0], 64).to(dtype), dict(window_size=(left, 0), return_lse=True, backend="cpu")
    want = portattn.attention_paged(q, cache, cache, table, torch.tensor([250]), **call)
    cache.view(256, heads[1], 64)[:unseen] = float("nan")
    table[0, : unseen // 16] = -1
    for got, expected in zip(portattn.attention_paged(q, cache, cache, table, torch.tensor([250]), **call), want):
        assert torch.equal(got, expected)
