"""Autocast changes nothing: not results, not gradients, and not the known answers of first uses that happen inside of it."""

from __future__ import annotations

import pytest
import torch

import portattn
from portattn import registry

CPU = torch.device("cpu")
BACKENDS = [name for name in ("sdpa", "cpu") if not registry.probe(name, CPU)]
AUTOCAST = dict(device_type="cpu", dtype=torch.bfloat16)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))



@pytest.mark.parametrize("backend", BACKENDS)
def test_a_first_use_inside_autocast_quarantines_nothing(backend):
    q, k, cache = randn(2, 5, 4, 64), randn(2, 9, 2, 64), randn(6, 4, 2, 64)
    cu_q, cu_k, table, lens = torch.tensor([0, 4, 5]), torch.tensor([0, 4, 9]), torch.arange(6).view(2, 3), torch.tensor([9, 12])
    with torch.autocast(**AUTOCAST):
        for rows in (1, 5, 9):
            portattn.attention(q[:, :rows] if rows < 9 else randn(2, 9, 4, 64), k, k, backend=backend)
        portattn.attention_varlen(q[0], k[0], k[0], cu_q, cu_k, 4, 5, backend=backend)
        portattn.attention_paged(q, cache, cache, table, lens, backend=backend)
        portattn.merge_states(torch.stack([q, q]), q[None, ..., 0].repeat(2, 1, 1, 1), backend=backend)
    assert registry.known_answers() and not [v for v in registry.known_answers() if not v.ok]


@pytest.mark.parametrize("forward, backward", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_gradients_inside_autocast_are_those_outside(layout, forward, backward):
    cu = torch.tensor([0, 7, 40])

    def gradients(forward, backward):
        q, k, v = (randn(40, 4, 16, seed=i).requires_grad_() for i in range(3))
        with torch.autocast(**AUTOCAST, enabled=forward):
            if layout == "dense":
                out = portattn.attention(q[None], k[None], v[None], causal=True)
            else:
                out = portattn.attention_varlen(q, k, v, cu, cu, 33, 33, causal=True)
        with torch.autocast(**AUTOCAST, enabled=backward):
            (out * 3).sum().backward()
        return q.grad, k.grad, v.grad

    for got, want in zip(gradients(forward, backward), gradients(False, False)):
        assert torch.equal(got, want)


def test_a_device_without_autocast_is_called_inside_another_devices():
    q = torch.empty(1, 3, 2, 8, device="meta")
    with torch.autocast(**AUTOCAST):
        assert portattn.attention(q, q, q).dtype == torch.float32
