"""flash_attn.bert_padding: between padded batches (B, S, …) and ragged rows (T, …). Differentiable; as in flash-attn, unpadding
waits for the device once, because the number of rows is data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
           "unpad_input_for_concatenated_sequences"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input (N, …) at indices (T,) -> (T, …)."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis` and the input itself, for a residual connection."""
    return input.index_select(0, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, …) with values (T, …) at indices (T,), of any integer type."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor,
                unused_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows of (B, S, …) where attention_mask (B, S) is not 0, or unused_mask is: allocated, yet not in use.

    Returns (rows (T, …), indices (T,) into B * S, cu_seqlens (B + 1,) int32, the longest length, lengths in use (B,) int32).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens, longest = _prefix_sums(kept.sum(-1, dtype=torch.int32))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(hidden_states: Tensor,
                                           attention_mask_in_length: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """As `unpad_input`, where row b of attention_mask_in_length (B, S) lists the lengths of the sequences that share row b.

    [2, 3, 0, 0, 0, 0]: tokens 0 and 1 are one sequence, 2 to 4 the next, 5 is padding.
    """
    total = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[-1], device=total.device) < total
    indices = kept.flatten().nonzero().flatten()
    parts = attention_mask_in_length.flatten()
    cu_seqlens, longest = _prefix_sums(parts[parts != 0])
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(T, …) at indices of `unpad_input` -> (B, S, …), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _prefix_sums(lens: Tensor) -> tuple[Tensor, int]:
    return F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)), int(lens.max()) if lens.numel() else 0
