"""C-TOL: how far a result may be from the float64 reference.

The largest error is at most twice that of plain torch in the same dtype, plus a floor: 1e-5 of the largest value for float32,
one unit in the last place of it for 16-bit types, whose NMSE is at most 5e-4 too. lse: twice plain torch's lse error plus
1e-5 (float32) or 2e-3 (16-bit).
NaN where the reference has a number, or a number where it has NaN or an infinity, is an error whichever side it is on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NMSE_LIMIT = 5e-4


class Mismatch(AssertionError):
    """A result is further from the reference than C-TOL allows."""


def ulp(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of `value` in `dtype`."""
    info = torch.finfo(dtype)
    return math.ldexp(info.eps, math.frexp(max(value, info.tiny))[1] - 1)


def close_out(out: Tensor, expected: Tensor, plain: Tensor, dtype: torch.dtype, what: str = "out") -> None:
    """Raises Mismatch unless `out` is within C-TOL of `expected`; `plain` is plain torch's result in q's `dtype`."""
    got = _comparable(out, expected, what)
    finite = torch.isfinite(expected)
    if not finite.any():
        return
    error = (got - expected)[finite].abs()
    largest = float(expected[finite].abs().max())
    floor = 1e-5 * largest if dtype == torch.float32 else ulp(largest, dtype)
    limit = 2 * float((plain - expected)[finite].abs().nan_to_num().max()) + floor
    if float(error.max()) > limit:
        raise Mismatch(f"{what}: error {float(error.max()):.3g} over the limit {limit:.3g}, {_where(got, expected, finite, limit)}")
    power = float((expected[finite] ** 2).sum())
    if dtype != torch.float32 and power > 0:
        nmse = float((error**2).sum()) / power
        if nmse > NMSE_LIMIT:
            raise Mismatch(f"{what}: NMSE {nmse:.3g} over the limit {NMSE_LIMIT:g}")


def close_lse(lse: Tensor, expected: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """Raises Mismatch unless `lse` is float32, of `expected`'s shape, -inf where it is, and within C-TOL of it."""
    if lse.dtype != torch.float32:
        raise Mismatch(f"lse: wanted float32, got {lse.dtype}")
    got = _comparable(lse, expected, "lse")
    finite = torch.isfinite(expected)
    if not finite.any():
        return
    error = float((got - expected)[finite].abs().max())
    limit = 2 * float((plain - expected)[finite].abs().nan_to_num().max()) + (1e-5 if dtype == torch.float32 else 2e-3)
    if error > limit:
        raise Mismatch(f"lse: error {error:.3g} over the limit {limit:.3g}, {_where(got, expected, finite, limit)}")


def _comparable(got: Tensor, expected: Tensor, what: str) -> Tensor:
    if tuple(got.shape) != tuple(expected.shape):
        raise Mismatch(f"{what}: wanted shape {tuple(expected.shape)}, got {tuple(got.shape)}")
    got = got.detach().cpu().double()
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        odd = test(got) != test(expected)
        if odd.any():
            at = tuple(odd.nonzero()[0].tolist())
            raise Mismatch(f"{what}: {kind} differs at {int(odd.sum())} of {odd.numel()} places, first {list(at)}: "
                           f"wanted {float(expected[at]):g}, got {float(got[at]):g}")
    return got


def _where(got: Tensor, expected: Tensor, finite: Tensor, limit: float) -> str:
    far = ((got - expected).abs() > limit) & finite
    at = tuple(far.nonzero()[0].tolist())
    return (f"at {int(far.sum())} of {far.numel()} places, first {list(at)}: wanted {float(expected[at]):.6g}, got {float(got[at]):.6g}")
