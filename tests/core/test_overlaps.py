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


# ------------------------------------------------------------------ new tokens over a cache
BACKENDS = [n for n in portattn.registry.manifests() if not portattn.registry.probe(n, "cpu")]


def caches(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a buffer, two caches of 4 pages of 4 slots in it): slots of the buffer hold k, v and something else."""
    buffer = torch.randn(4, 4, 3, 2, 8).to(dtype)
    return buffer, buffer[:, :, 0], buffer[:, :, 1]


def append(call: str, backend: str, place, known: bool, compiled: bool = False) -> None:
    """Appends tokens (3, 2, 8) for k and v that place(buffer) gives, to slots 4 to 6; as the first call of its kind, or like the last ones."""
    portattn.registry.forget()
    for last in (False, False, False, True) if known else (True,):
        buffer, k_cache, v_cache = caches()
        own = [torch.randn(3, 2, 8) if x.is_contiguous() else torch.randn(9, 2, 8)[::3] for x in place(buffer)]
        k, v = place(buffer) if last else own
        assert [x.stride() for x in own] == [x.stride() for x in place(buffer)]
        before = buffer.clone()
        try:
            if call == "cache_append":
                run = lambda: portattn.cache_append(k, v, k_cache, v_cache, torch.tensor([4, 5, 6]), backend=backend)
            else:
                run = lambda: portattn.attention_paged(torch.randn(1, 3, 2, 8), k_cache, v_cache, torch.tensor([[1, 2]]), torch.tensor([3]), k=k[None],
                                                       v=v[None], backend=backend)
            (torch.compile(run, backend="eager") if compiled else run)()
        except portattn.ArgumentError:
            assert torch.equal(buffer, before)
            raise


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("call", ["cache_append", "attention_paged"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_new_tokens_over_a_cache_are_refused(backend, call, known):
    slots, own = (lambda b: b.view(16, 3, 2, 8)), torch.randn(3, 2, 8)
    for place, text in ((lambda b: (slots(b)[3:6, 0], own), "k: .*memory of k_cache"), (lambda b: (own, slots(b)[6:9, 1]), "v: .*memory of v_cache"),
                        (lambda b: (slots(b)[3:6, 1], own), "k: .*memory of v_cache"), (lambda b: (b.flatten()[40:88].view(3, 2, 8), own), "k: .*k_cache")):
        with pytest.raises(portattn.ArgumentError, match=f"(?s){call}: .*{text}"):
            append(call, backend, place, known)
    append(call, backend, lambda b: (slots(b)[3:6, 2], slots(b)[4:7, 2]), known)  # between the slots of the caches


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_tokens_that_are_copied_first_may_lie_in_a_cache(backend):
    for _ in range(4):
        cache = torch.randn(4, 4, 2, 8)
        k = cache.view(-1)[:96].view(3, 2, 8, 2)[..., 0]
        want = k.clone()
        portattn.cache_append(k, k, cache, cache.clone(), torch.tensor([4, 5, 6]), backend=backend)
        assert torch.equal(cache.view(16, 2, 8)[4:7], want)


def test_a_latent_whose_values_are_its_keys_beginning_is_appended():
    for _ in range(4):
        latent, cache = torch.randn(3, 1, 576), torch.zeros(2, 4, 1, 576)
        portattn.cache_append(latent, latent[..., :512], cache, cache[..., :512], torch.tensor([4, 5, 6]))
        assert torch.equal(cache[1, :3, 0], latent[:, 0])


@pytest.mark.parametrize("call", ["cache_append", "attention_paged"])
def test_new_tokens_over_a_cache_are_refused_inside_an_op(call):
    with pytest.raises(portattn.ArgumentError, match="k: .*memory of k_cache"):
        append(call, "cpu", lambda b: (b.view(16, 3, 2, 8)[3:6, 0], torch.randn(3, 2, 8)), False, compiled=True)
