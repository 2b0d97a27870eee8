"""Attention over q, k and v, or k and v, that lie in one tensor, as flash-attn's packed functions take them.

Views of it would cost more than all the rest of the translation. A backend that speaks the dialect is told where they lie instead
(`within`), once such a call is known and what serves it is bound to the views.
"""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor

from ..recent import Recent
from ._translate import ANY, window

_recent = Recent()


def views_of(packed: Tensor, split: int | tuple[int, ...]) -> tuple[Tensor, ...]:
    """What lies in one tensor: `split` is the axis that counts them, or their numbers of heads on axis 2."""
    return packed.unbind(split) if isinstance(split, int) else packed.split_with_sizes(split, 2)


def attend(lse: int, forward: Callable, run: Callable, split: int | tuple[int, ...], q: Tensor | None, packed: Tensor,
           lengths: tuple[Tensor, ...], bounds: tuple[int, ...], softmax_scale: float | None, causal: bool, window_size: Any,
           softcap: float, alibi_slopes: Tensor | None, return_lse: bool, num_splits: int = 0) -> Any:
    """What `forward`, attention or attention_varlen, gives for q and packed k and v; for all three packed, if q is None.

    run: api.py's runner of such a call. split: as in `views_of`. lengths, bounds: what follows q, k and v.
    """
    if window_size is not ANY:
        window_size = window(window_size)
    softcap = softcap if softcap > 0 else 0.0
    wholes = (packed, packed, packed) if q is None else (q, packed, packed)
    each = lengths[:1] if lengths and lengths[0] is lengths[1] else lengths
    options = (lse, forward, split, q is None, len(each), bounds, softmax_scale, not causal, window_size, softcap, not return_lse,
               num_splits, softmax_scale.__class__, softcap.__class__, num_splits.__class__, *[x.__class__ for x in bounds])
    tensors = wholes[:1] + each if q is None else wholes[:2] + each
    known = _recent.find(options, tensors) if alibi_slopes is None else None
    if known is not None:
        bound, within = known
        return run(bound, *wholes, *lengths, within=within)
    q, k, v = views_of(packed, split) if q is None else (q, *views_of(packed, split))
    found: list = []
    got = forward(q, k, v, *lengths, *bounds, softmax_scale=softmax_scale, causal=bool(causal), window_size=window_size,
                  softcap=softcap, alibi_slopes=alibi_slopes, return_lse=bool(return_lse), num_splits=num_splits, _lse=lse,
                  _found=found)
    if found and alibi_slopes is None and found[0].extra is None and getattr(found[0].adapter, "DIALECT", False):
        within = tuple(view.data_ptr() - whole.data_ptr() for view, whole in zip((q, k, v), wholes))
        _recent.keep(options, tensors, (found[0], within), found[0])
    return got
