"""transformers on portattn: the attention implementation "portattn".

    from portattn.integrations import transformers as portattn_transformers
    portattn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="portattn")

Masks stay what they mean. A plain causal, bidirectional or sliding one is not built at all: its structure goes to portattn (causal,
window_size), with padding removed before a prefill (varlen) and given as a row of keys in decoding. Every other mask (packed positions,
image blocks, chunks, static caches, a caller's own 4D mask) is built by transformers and added, exactly. Sinks (s_aux), softcap, scaling and
position biases are honoured; attention dropout above 0 and keys that a model chose (sparse attention) raise. Rows that see no key give 0.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..errors import ArgumentError
from . import check_version

__all__ = ["NAME", "TESTED", "attention_forward", "attention_mask", "register"]

NAME = "portattn"
TESTED = ">=5.24,<5.25"
_MARK = "_portattn_mask"  # attribute of a 2D mask that attention_mask made
_SPARSE = 'these keys only (for eager and sdpa the model makes a mask of them: register("sdpa") and attn_implementation="sdpa", or eager)'
_NOT_COVERED = {"indices": _SPARSE, "block_indices": _SPARSE,  # what models hand to an attention function
                "sinks": "a sink for each row of queries; use eager attention (sinks of heads come as s_aux)"}


def register(name: str = NAME) -> str:
    """Registers attention and mask functions under a name, and returns it. Calling it again is harmless.

    "sdpa" as name puts portattn in the place of transformers' default, for every model of the process and for continuous batching
    (generate_batch), which takes no names but its own. There, the ragged batches go to attention_varlen.

    Raises PackageNotFoundError where transformers is not installed; another version than `TESTED` gives one warning.
    """
    check_version("transformers", TESTED)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name


# ------------------------------------------------------------------ masks
class _Mask(NamedTuple):
    """What a 2D mask (B, Sk) stands for, so that a layer need not read it again."""

    causal: bool
    window: tuple[int, int]
    padded: bool
    rows: Tensor | None = None  # of a padded prefill: the keys in use, (T,) into B * S
    cu_seqlens: Tensor | None = None  # of these keys
    longest: int = 0
    cu_seqlens_q: Tensor | None = None  # of all queries; None: those of the same rows as the keys


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
                   mask_function: Callable | None = None, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True,
                   allow_is_bidirectional_skip: bool = False, use_vmap: bool = False, device: Any = "cpu", **kwargs: Any) -> Tensor | None:
    """transformers' mask interface: None (no mask but is_causal), a 2D mask that carries its structure, or sdpa's 4D bool mask.

    Models that have no interface but eager's get its mask, 4D and added: their layers' is_causal was never read.
    """
    from transformers import masking_utils

    if (config := kwargs.get("config")) is not None and _is_for_eager(type(config)):
        return masking_utils.eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function or masking_utils.causal_mask_function, attention_mask=attention_mask,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, use_vmap=use_vmap, device=device, **kwargs)
    mask_function = mask_function or masking_utils.causal_mask_function
    plain = None if use_vmap or torch.compiler.is_compiling() or isinstance(q_offset, Tensor) else _structure(mask_function)
    # Skipping is the caller's to allow; queries must be the last rows before the keys' end, as portattn aligns them.
    if plain is not None and (allow_is_causal_skip if plain[0] else allow_is_bidirectional_skip) and (
        q_offset + q_length == kv_offset + kv_length or plain == (False, (-1, -1))
    ):
        causal, window = plain
        if 0 <= kv_length - 1 <= window[0]:
            window = (-1, -1)  # no key lies outside
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
        found = _mark(padding, causal, window, q_length, kv_length, batch_size, device)
        if found is not False:
            return found
    return masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device, **kwargs)


_for_eager: dict[type, bool] = {}


def _is_for_eager(kind: type) -> bool:
    """Whether the models of a kind of config say of none of transformers' other attention functions that they support it."""
    if kind not in _for_eager:
        from transformers import PreTrainedModel

        module = sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))
        models = [x for x in vars(module or sys).values() if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.config_class is kind]
        _for_eager[kind] = bool(models) and not any(x._supports_sdpa or x._supports_flash_attn or x._supports_flex_attn for x in models)
    return _for_eager[kind]


def _structure(mask_function: Callable) -> tuple[bool, tuple[int, int]] | None:
    """(causal, window) of a mask function of transformers' own, or None: something else."""
    from transformers import masking_utils as m

    if mask_function is m.causal_mask_function:
        return True, (-1, -1)
    if mask_function is m.bidirectional_mask_function:
        return False, (-1, -1)
    parts = _closure(mask_function, m.and_masks).get("mask_functions", ())
    if len(parts) == 2:
        width = _closure(parts[0], m.sliding_window_overlay).get("sliding_window")
        if isinstance(width, int) and parts[1] is m.causal_mask_function:
            return True, (width - 1, 0)  # width counts the query's own position
        width = _closure(parts[0], m.sliding_window_bidirectional_overlay).get("sliding_window")
        if isinstance(width, int) and parts[1] is m.bidirectional_mask_function:
            return False, (width, width)  # a distance, inclusive
    return None


def _closure(function: Callable, maker: Callable) -> dict[str, Any]:
    """What a function made inside `maker` closes over; nothing if another made it."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker.__name__}.<locals>.") or function.__module__ != maker.__module__:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells}


def _mark(padding: Tensor | None, causal: bool, window: tuple[int, int], q_length: int, kv_length: int, batch: int, device: Any) -> Tensor | None | bool:
    """A 2D mask with its structure; None where is_causal says it all; False where padding has holes that change distances."""
    if padding is None or bool(padding.all()):
        if window == (-1, -1):
            return None
        mask = torch.ones(batch, kv_length, dtype=torch.bool, device=device) if padding is None else padding
        setattr(mask, _MARK, _Mask(causal, window, False))
        return mask
    # Without causal, queries as many as keys may still be a decoder's over its encoder: padding says nothing of them.
    if q_length != kv_length or not causal and window != (-1, -1):
        setattr(padding, _MARK, _Mask(causal, window, True))
        return padding
    if window != (-1, -1) and bool(((padding[:, 1:] != padding[:, :-1]).sum(-1) > 2 - padding[:, 0].int() - padding[:, -1].int()).any()):
        return False  # more than one run of tokens in a row: places among the tokens are no distances
    lens = padding.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = padding.flatten().nonzero().flatten()
    cu_seqlens_q = None if causal else torch.arange(batch + 1, dtype=torch.int32, device=rows.device) * q_length
    setattr(padding, _MARK, _Mask(causal, window, True, rows, cu_seqlens, int(lens.max()), cu_seqlens_q))
    return padding


# ------------------------------------------------------------------ attention
def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
                      scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
                      is_causal: bool | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
                      cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
                      max_length_k: int | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, H, Sq, D), key, value (B, Hkv, Sk, D) -> (out (B, Sq, H, Dv), None)."""
    if dropout:
        raise ArgumentError(f"portattn attention: dropout: wanted 0.0 (portattn is for inference; set attention_dropout=0 to train), got {dropout}")
    for name in _NOT_COVERED:
        if name in kwargs and kwargs[name] is not None:
            raise ArgumentError(f"portattn attention: {name}: wanted None: {_NOT_COVERED[name]}")
    if kwargs.get("output_attentions"):
        warnings.warn("portattn attention: output_attentions: there are no attention weights to return; use eager attention for them", RuntimeWarning,
                      stacklevel=2)
    if query.shape[0] != key.shape[0]:  # learned queries, one row for all
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (-1, -1) if not sliding_window else (sliding_window - 1, 0 if causal else sliding_window - 1)  # it counts the own position
    kind = query.device.type
    if not query.dtype == key.dtype == value.dtype and torch.is_autocast_enabled(kind):  # rotary gives float32, projections do not
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    if s_aux is not None and s_aux.dtype not in (torch.float32, query.dtype):
        s_aux = s_aux.float()
    options = dict(softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    mark = getattr(attention_mask, _MARK, None)
    batched = kwargs.get("write_index") is not None  # continuous batching: its mask says what the lengths and the layer say too
    structure = mark is not None and not mark.padded  # a mask that says no more than causal and window
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and position_bias is None and (attention_mask is None or batched or structure):
        if batched and attention_mask is not None:
            causal = getattr(module, "is_causal", True)  # is_causal=False comes with the mask
        elif structure:
            causal, window = mark.causal, mark.window
        rows, length = q.shape[0], q.shape[1]
        q, k, v = (x[0] if rows == 1 else x.flatten(0, 1) for x in (q, k, v))
        longest_q = q.shape[0] if max_length_q is None else int(max_length_q)
        longest_k = int(max_length_k) if max_length_k else k.shape[0] if max_length_q is None else longest_q
        out = attention_varlen(q, k, v, cu_seq_lens_q, cu_seq_lens_k, longest_q, longest_k, causal=bool(causal), window_size=window, **options)
        return out.unflatten(0, (rows, length)), None

    bias = None
    if mark is not None:
        causal, window = mark.causal, mark.window
        if mark.rows is not None and position_bias is None:
            return _padding_free(q, k, v, mark, options), None
        bias = attention_mask[:, None, None, :] if mark.padded else None
    elif attention_mask is not None and attention_mask.dim() == 2:  # made by another mask function: keys in use
        bias = attention_mask[:, None, None, -k.shape[1] :].bool()
    elif attention_mask is not None:  # it holds all that is masked
        bias, causal, window = attention_mask[..., : k.shape[1]], False, (-1, -1)
        if bias.dtype not in (torch.bool, torch.float32, q.dtype):
            bias = bias.float()
    if position_bias is not None:
        bias = position_bias if bias is None else torch.where(bias, position_bias, -torch.inf) if bias.dtype == torch.bool else position_bias + bias
    if causal and q.shape[1] == 1 and window == (-1, -1):
        causal = False  # the last row sees every key: the plainer problem has more kernels
    return attention(q, k, v, causal=bool(causal), window_size=window, bias=bias, **options), None


def _padding_free(q: Tensor, k: Tensor, v: Tensor, mark: _Mask, options: dict[str, Any]) -> Tensor:
    """A padded prefill without its padding; its rows of padding are 0 if causal."""
    batch, length, heads, _ = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    k, v = k.index_select(0, mark.rows), v.index_select(0, mark.rows)
    if mark.cu_seqlens_q is not None:
        return attention_varlen(q, k, v, mark.cu_seqlens_q, mark.cu_seqlens, length, mark.longest, **options).unflatten(0, (batch, length))
    q = q.index_select(0, mark.rows)
    out = attention_varlen(q, k, v, mark.cu_seqlens, mark.cu_seqlens, mark.longest, mark.longest, causal=True, window_size=mark.window, **options)
    return out.new_zeros(batch * length, heads, out.shape[-1]).index_copy(0, mark.rows, out).unflatten(0, (batch, length))
