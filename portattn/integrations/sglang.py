"""SGLang on portattn: the attention backend "portattn", as a plugin.

    from portattn.integrations import sglang as portattn_sglang
    portattn_sglang.register()          # then: --attention-backend portattn --disable-cuda-graph

Decode and extend over SGLang's own token pool: its pages are portattn's pages, the block table is read off req_to_token, keys are written
by the pool. Sliding windows, logit caps, sinks, 8-bit pools with scales and encoder-only layers are honoured. Speculative decoding, cross
attention, MLA, pools that keep windowed layers apart and what layers have beside these raise; CUDA graphs are not implemented.

Not run against SGLang itself: written from the interface of the versions `MADE_FOR` and tested against a stand-in for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention_paged
from ..errors import ArgumentError
from . import check_version

__all__ = ["MADE_FOR", "NAME", "make_backend", "register"]

NAME = "portattn"
MADE_FOR = ">=0.5,<0.6"


def register() -> str:
    """Registers the backend and its name among the choices of --attention-backend; returns the name.

    Raises PackageNotFoundError where sglang is not installed; another version than `MADE_FOR` gives one warning.
    """
    check_version("sglang", MADE_FOR)
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    register_attention_backend(NAME)(make_backend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    return NAME


def _refuse(name: str, wanted: str, got: Any) -> None:
    raise ArgumentError(f"portattn backend: {name}: wanted {wanted}, got {got}")


class Metadata(NamedTuple):
    """One batch, for all layers: tables and lengths as attention_paged takes them."""

    block_table: Tensor
    kv_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int


def metadata(batch: Any, req_to_token: Tensor, page_size: int) -> Metadata:
    """The Metadata of a ForwardBatch. Row r of req_to_token (requests, tokens) names the pool's slot of each token of request r."""
    for name, what in (("spec_info", "speculative decoding"), ("encoder_lens", "attention to an encoder")):
        if getattr(batch, name, None) is not None:
            _refuse(name, f"None ({what} is not covered)", type(getattr(batch, name)).__name__)
    known = getattr(batch, "seq_lens_cpu", None)
    width = int(max(known)) if known is not None and len(known) else req_to_token.shape[1]
    table = req_to_token[batch.req_pool_indices, : max(width, 1) : page_size]
    table = torch.div(table, page_size, rounding_mode="floor") if page_size > 1 else table
    lens = batch.seq_lens
    if batch.forward_mode.is_decode_or_idle():
        return Metadata(table, lens, None, 1)
    cu_seqlens = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return Metadata(table, lens, cu_seqlens, int(max(batch.extend_seq_lens_cpu, default=0)))


def attend(q: Tensor, layer: Any, pool: Any, m: Metadata, page_size: int, causal: bool, sinks: Tensor | None = None) -> Tensor:
    """One layer: q (T, Hq * D) or (T, Hq, D) -> (T, Hq * Dv)."""
    q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    # Slots (S, Hkv, D) as pages; a last part of a page belongs to no request.
    k_cache, v_cache = (x[: x.shape[0] // page_size * page_size].unflatten(0, (-1, page_size)) for x in (
        pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)))
    left = getattr(layer, "sliding_window_size", None)  # the keys before the own position
    window = (-1, -1) if left is None or left < 0 else (left, 0 if causal else left)
    scales = {}
    if k_cache.dtype.itemsize == 1:
        scales = {name: scale for name in ("k_scale", "v_scale") if (scale := getattr(layer, f"{name}_float", None)) is not None}
    if m.cu_seqlens_q is None:
        q = q[:, None]
    out = attention_paged(q, k_cache, v_cache, m.block_table, m.kv_lens, cu_seqlens_q=m.cu_seqlens_q,
                          max_seqlen_q=None if m.cu_seqlens_q is None else m.max_seqlen_q, softmax_scale=float(layer.scaling), causal=causal,
                          window_size=window, softcap=float(getattr(layer, "logit_cap", 0.0) or 0.0), sinks=sinks, **scales)
    return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def examine(layer: Any) -> None:
    """Raises for a layer that asks for what `attend` does not compute. Older versions lack some of the attributes."""
    kind = _kind(layer)
    if kind not in ("decoder", "encoder_only"):
        _refuse("attn_type", "decoder or encoder_only", kind)
    for name, off in (("is_cross_attention", False), ("pos_encoding_mode", "NONE"), ("logit_capping_method", "tanh"), ("use_irope", False)):
        if (given := getattr(layer, name, off)) != off:
            _refuse(name, repr(off), repr(given))
    if (getattr(layer, "xai_temperature_len", None) or 0) > 0:
        _refuse("xai_temperature_len", "-1", layer.xai_temperature_len)


def _kind(layer: Any) -> str:
    kind = getattr(layer, "attn_type", "decoder")
    return getattr(kind, "value", kind)


def make_backend(runner: Any) -> Any:
    """The backend of a ModelRunner: an object of SGLang's class AttentionBackend."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    pool = runner.token_to_kv_pool
    if hasattr(pool, "translate_loc_from_full_to_swa"):
        _refuse("token_to_kv_pool", "one for all layers (--disable-hybrid-swa-memory)", f"{type(pool).__name__}, which keeps windowed layers apart")
    if getattr(runner, "use_mla_backend", False):
        _refuse("use_mla_backend", "False: latent attention (MLA) is not covered", True)

    class PortattnBackend(AttentionBackend):
        def __init__(self) -> None:
            super().__init__()
            self.page_size = int(getattr(runner, "page_size", None) or getattr(runner.server_args, "page_size", None) or 1)
            self.req_to_token = runner.req_to_token_pool.req_to_token
            self.metadata: Metadata | None = None
            self.examined: set[int] = set()

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            _refuse("cuda graph", "none: start SGLang with --disable-cuda-graph", f"one of {max_bs} requests")

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.metadata = metadata(forward_batch, self.req_to_token, self.page_size)

        def _forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool, causal: bool, **given: Any) -> Tensor:
            if unknown := {name for name, value in given.items() if value is not None and value is not False} - {"sinks"}:
                raise ArgumentError(f"portattn backend: {', '.join(sorted(unknown))}: not covered")
            if id(layer) not in self.examined:
                examine(layer)
                self.examined.add(id(layer))
            if save_kv_cache and k is not None:
                scales = () if getattr(layer, "k_scale", None) is None else (layer.k_scale, layer.v_scale)
                pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *scales)
            return attend(q, layer, pool, self.metadata, self.page_size, causal, given.get("sinks"))

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
            return self._forward(q, k, v, layer, forward_batch, save_kv_cache, True, **given)

        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
            return self._forward(q, k, v, layer, forward_batch, save_kv_cache, _kind(layer) != "encoder_only", **given)

        def support_triton(self) -> bool:
            return False

    return PortattnBackend()
