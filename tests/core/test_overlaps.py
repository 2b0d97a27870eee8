"""Memory that out shares with an input is told from strides, exactly, and refused in every call; what only lies between is not."""

from __future__ import annotations

import random

import pytest
import torch

import portattn
from portattn import overlaps


def addresses(x: torch.Tensor) -> set[int]:
    """Every byte of a tensor."""
    found = {x.data_ptr()} if x.numel() else set()
    for n, stride in zip(x.shape, x.stride()):
        found = {a + i * stride * x.element_size() for a in found for i in range(n)}
    return {a + byte for a in found for byte in range(x.element_size())}


def any_view(draw: random.Random, buffer: torch.Tensor, overlapping: bool) -> torch.Tensor:
    """A random strided view of a buffer, with sizes of 0 and 1; `overlapping`: with strides of 0 and rows that share elements too."""
    while True:
        shape = [draw.choice((0, 1, 1, 2, 3, 4)) if draw.random() < 0.9 else 5 for _ in range(draw.randint(1, 4))]
        strides, step = [], 1
        for n in shape:
            strides.append(draw.choice((0, 1, 2, 3)) if overlapping and draw.random() < 0.3 else step * draw.choice((1, 1, 2, 3)))
            step = max(step, strides[-1] * max(n, 1))
        order = draw.sample(range(len(shape)), len(shape))
        span = sum((n - 1) * s for n, s in zip(shape, strides) if n) + 1
        if span <= buffer.numel():
            at = draw.randint(0, buffer.numel() - span)
            return buffer.as_strided([shape[i] for i in order], [strides[i] for i in order], at)


def test_sharing_is_what_the_sets_of_bytes_say():
    draw, buffer = random.Random(7), torch.zeros(90)
    halves, seen = buffer.view(torch.float16), []
    for _ in range(3000):
        x, out = any_view(draw, draw.choice((buffer, halves)), True), any_view(draw, draw.choice((buffer, halves)), False)
        want = bool(addresses(x) & addresses(out))
        got = bool(x.numel() and out.numel()) and overlaps.meet(x, out, x.data_ptr() - out.data_ptr())
        assert got == want, (x.shape, x.stride(), x.storage_offset(), out.shape, out.stride(), out.storage_offset())
        apart = x.data_ptr() >= out.data_ptr() + overlaps.reach(out) or out.data_ptr() >= x.data_ptr() + overlaps.reach(x)
        assert not (want and apart)
        seen.append((want, apart))
    assert min(seen.count(kind) for kind in ((True, False), (False, False), (False, True))) > 50


def test_of_too_many_pieces_it_is_not_told(monkeypatch):
    x = torch.zeros(20, 4)
    overlaps._meet.cache_clear()
    monkeypatch.setattr(overlaps, "MOST_RUNS", 10)
    assert not overlaps.meet(x[:, :2], x[:, 1:3], -4) and overlaps.meet(x[:, :2], x[:, :3], 0) and overlaps.meet(x[:2], x[1:], -16)
    overlaps._meet.cache_clear()


def run(call: str, buffer: torch.Tensor, known: bool, place) -> None:
    """A call whose `out` is place(q, k); as the first of its kind, or like the last ones."""
    for last in (False, False, False, True) if known else (True,):
        base = buffer.clone()
        q, k = base[:, :8, 0], base[:, 8:, 0, :2]
        out = place(base, q) if last else torch.empty(q.shape)
        if call == "attention":
            portattn.attention(q, k, k, causal=True, out=out)
        elif call == "attention_varlen":
            cu = torch.tensor([0, 8])
            portattn.attention_varlen(q[0], k[0], k[0], cu, cu, 8, 8, out=out[0])
        else:
            portattn.attention_paged(q, k, k, torch.tensor([[0]]), torch.tensor([5]), out=out)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_paged"])
def test_out_over_some_of_an_input_is_refused(call, known):
    buffer = torch.randn(1, 16, 3, 4, 8)  # a packed tensor: (B, S, q | spare | spare, H, D)
    for place, name in ((lambda b, q: b[:, 1:9, 0], "q"), (lambda b, q: b[:, 7:15, 0], "q"), (lambda b, q: b[:, 8:, 0], "k")):
        with pytest.raises(portattn.ArgumentError, match=f"out: .*memory of {name}"):
            run(call, buffer, known, place)
    run(call, buffer, known, lambda b, q: b[:, :8, 1])  # between the rows of q
    run(call, buffer, known, lambda b, q: b[:, 8:, 2])
