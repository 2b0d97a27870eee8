"""Exact merge of partial results over disjoint keys."""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """outs (n, ..., Hq, Dv), lses (n, ..., Hq) float32, sinks (Hq,): out in outs' dtype, lse float32.

    A state with lse -inf changes nothing, even if its out holds NaN; all empty is (0, -inf), or (0, sink).
    """
    top = lses.amax(0)
    if sinks is not None:
        sinks = sinks.float()
        top = torch.maximum(top, sinks)
    base = top.masked_fill(top == -INF, 0.0)
    weights = (lses - base).exp()
    total = weights.sum(0)
    if sinks is not None:
        total = total + (sinks - base).exp()
    parts = outs.float().masked_fill((lses == -INF).unsqueeze(-1), 0.0)
    out = (parts * weights.unsqueeze(-1)).sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out.to(outs.dtype), base + total.log()


__all__ = ["merge_states"]
