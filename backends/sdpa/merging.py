"""Exact merge of partial results over disjoint keys."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """outs (n, ..., Hq, Dv), lses (n, ..., Hq) float32, sinks (Hq,): out in outs' dtype, lse float32.

    A state with lse -inf changes nothing, even if its out holds NaN; all empty is (0, -inf), or (0, sink).
    """
    top = lses.detach().amax(0)  # moves weights and total alike: no part of a gradient
    if sinks is not None:
        sinks = sinks.float()
        top = torch.maximum(top, sinks.detach())
    empty = top == -INF
    base = top.masked_fill(empty, 0.0)
    weights = (lses - base).exp()
    total = weights.sum(0)
    if sinks is not None:
        total = total + (sinks - base).exp()
    total = total.masked_fill(empty, 1.0)  # a quotient and a logarithm with gradients
    parts = outs.float().masked_fill((lses == -INF).unsqueeze(-1), 0.0)
    out = (parts * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)
    return out.to(outs.dtype), (base + total.log()).masked_fill(empty, -INF)


__all__ = ["merge_states"]
