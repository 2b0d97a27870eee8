"""Ids of no page and slots of no cache, which only a caller's fault puts where they are looked at: no other page is written."""

from __future__ import annotations

import contextlib

import pytest
import torch
from conftest import randn

import portattn


@pytest.mark.parametrize("kind", ["cpu", "mps"])
@pytest.mark.parametrize("page", [-1, -2, 6, 99, 2**40])
@pytest.mark.parametrize("rows", [1, 3])
def test_an_append_to_no_page_writes_none(pretend, kind, page, rows):
    pretend(kind)
    cache, new = torch.zeros(6, 4, 2, 16), torch.ones(2, rows, 2, 16)
    table, lens = torch.tensor([[0, 1, page], [3, 4, -1]]), torch.tensor([9, 5])
    with pytest.raises(portattn.ArgumentError, match=r"block_table\[0, 2\]") if kind == "cpu" else contextlib.nullcontext():
        portattn.attention_paged(randn(2, rows, 4, 16), cache, cache.clone(), table, lens, k=new, v=new, backend="sdpa")
    written = cache.sum((2, 3)).nonzero().tolist()
    assert written == ([[1, 2], [1, 3], [3, 2], [3, 3], [4, 0]] if rows == 3 else [[4, 0]])


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_slots_past_the_cache_are_skipped(pretend, kind):
    pretend(kind)
    cache, new = torch.zeros(3, 4, 2, 16), torch.ones(6, 2, 16)
    portattn.cache_append(new, new, cache, cache.clone(), torch.tensor([5, -1, 12, 13, 10**12, -(2**62)]), backend="sdpa")
    assert cache.sum((2, 3)).nonzero().tolist() == [[1, 1]]


def test_a_decode_over_no_page_is_an_argument_error():
    cache = randn(6, 4, 2, 16)
    with pytest.raises(portattn.ArgumentError, match=r"block_table\[1, 1\]"):
        portattn.attention_paged(randn(2, 1, 4, 16), cache, cache, torch.tensor([[0, 1], [2, 7]]), torch.tensor([6, 6]), backend="sdpa")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name, ends, text", [
    ("cu_seqlens_q", [0, 3, 9], r"cu_seqlens_q\[2\]: wanted at most 7 rows, got 9"),
    ("cu_seqlens_q", [0, 5, 3], r"cu_seqlens_q\[2\]: wanted at least 5"),
    ("cu_seqlens_q", [-2, 3, 7], r"cu_seqlens_q\[0\]: wanted 0, got -2"),
    ("cu_seqlens_k", [0, 3, 2**40], r"cu_seqlens_k\[2\]: wanted at most 7 rows"),
    ("cu_seqlens_k", [0, 6, 4], r"cu_seqlens_k\[2\]: wanted at least 6"),
])
def test_prefix_sums_that_there_cannot_be_are_named(name, ends, text, grad):
    q, k = randn(7, 4, 16).requires_grad_(grad), randn(7, 2, 16)
    sums = {"cu_seqlens_q": torch.tensor([0, 3, 7]), "cu_seqlens_k": torch.tensor([0, 3, 7])} | {name: torch.tensor(ends)}
    with pytest.raises(portattn.ArgumentError, match=text):
        portattn.attention_varlen(q, k, k, **sums, max_seqlen_q=7, max_seqlen_k=7, backend="sdpa")
    if name == "cu_seqlens_q" and not grad:
        cache, table = randn(6, 4, 2, 16), torch.arange(6).view(2, 3)
        with pytest.raises(portattn.ArgumentError, match=text):
            portattn.attention_paged(q, cache, cache, table, torch.tensor([9, 12]), cu_seqlens_q=sums[name], max_seqlen_q=7, backend="sdpa")


@pytest.mark.parametrize("kind", ["cpu", "mps"])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("window", [(37, 0), (37, -1)], ids=str)
def test_pages_left_of_every_window_may_be_anyones(pretend, kind, rows, window):
    pretend(kind)
    unseen = 150 - rows - 37
    cache, table = randn(10, 16, 2, 16), torch.arange(10)[None].clone()
    q, call = randn(1, rows, 4, 16), dict(window_size=window, return_lse=True, backend="sdpa")
    want = portattn.attention_paged(q, cache, cache, table, torch.tensor([150]), **call)
    cache.view(160, 2, 16)[:unseen] = float("nan")
    for got, expected in zip(portattn.attention_paged(q, cache, cache, table, torch.tensor([150]), **call), want):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_angles_of_no_position_turn_nothing(pretend, kind):
    """A batch of padding alone: no row has a position, and a table of angles may have no row either."""
    pretend(kind)
    cache, new, angles = randn(2, 4, 2, 16), randn(1, 3, 2, 16), torch.ones(0, 8)
    before = cache.clone()
    out, lse = portattn.attention_paged(randn(1, 3, 4, 16), cache, cache.clone(), torch.tensor([[1]]), torch.tensor([0]), k=new, v=new,
                                        rotary_cos=angles, rotary_sin=angles, return_lse=True, backend="sdpa")
    assert not out.any() and (lse == -float("inf")).all() and torch.equal(cache, before)
