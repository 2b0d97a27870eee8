"""The classes that vLLM loads for `portattn.integrations.vllm`: backend, metadata, its builder, and the layer's implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType

from ..api import attention_paged, attention_varlen, cache_append
from ..errors import ArgumentError
from .vllm import cache_dtype, served, where

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def _refuse(name: str, value: Any, wanted: str) -> None:
    raise ArgumentError(f"portattn backend: {name}: wanted {wanted}, got {value!r}")


class PortattnBackend(AttentionBackend):
    """What vLLM asks before it chooses; every answer comes from the manifests."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]  # narrowed by supports_dtype

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PortattnImpl]:
        return PortattnImpl

    @staticmethod
    def get_builder_cls() -> type[PortattnMetadataBuilder]:
        return PortattnMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return not served(dtype).reasons

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return not served(head_size=head_size).reasons

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return not served(kv_cache_dtype=kv_cache_dtype).reasons

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return not served(block_size=block_size).reasons

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return not served(at=where(capability)).reasons

    @classmethod
    def supports_sink(cls) -> bool:
        return not served(sinks=True).reasons

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return not served(window=True).reasons

    @classmethod
    def supports_non_causal(cls) -> bool:
        return not served(causal=False).reasons

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return not served(batch_invariant=True).reasons

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:  # type: ignore[override]
        """vLLM's own reasons, and those of the manifests for all that is asked together."""
        get, encoder = asked.get, asked.get("attn_type") in _ENCODERS
        found = served(asked["dtype"], asked["kv_cache_dtype"], asked["head_size"], asked["block_size"], encoder,
                       not encoder and not get("use_non_causal"), where(get("device_capability")), sinks=bool(get("has_sink")),
                       window=bool(get("has_sliding_window")), batch_invariant=bool(get("use_batch_invariant")))
        return super().validate_configuration(**asked) + list(found.reasons)

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
        """The cache of a layer for versions that ask the backend; since 0.32 vLLM lays caches out itself. `pages` knows both."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)


@dataclass
class PortattnMetadata:
    """One batch, for the layers of one group. Names that vLLM reads too are vLLM's."""

    num_actual_tokens: int  # with the padding of a CUDA graph
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class PortattnMetadataBuilder(AttentionMetadataBuilder[PortattnMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Batches of one query length each can be captured where every capability that would serve them says so."""
        cache = vllm_config.cache_config
        found = served(vllm_config.model_config.dtype, cache.cache_dtype, kv_cache_spec.head_size, kv_cache_spec.block_size)
        full = not found.reasons and all(c.graph == "full" for c in found.capabilities)
        return AttentionCGSupport.UNIFORM_BATCH if full else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PortattnMetadata:
        m = common_attn_metadata
        if isinstance(m.causal, Tensor):
            _refuse("causal", "a tensor", "one mask for the whole batch")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"):
            if getattr(m, name, None) is not None:
                _refuse(name, "a batch that has them", "None: masks are causal, windows and lengths, on one rank")
        return PortattnMetadata(m.num_actual_tokens, m.max_query_len, m.query_start_loc, m.seq_lens, m.block_table_tensor, m.slot_mapping,
                                bool(m.causal))


def pages(kv_cache: Tensor, head_size: int, stored: torch.dtype) -> tuple[Tensor, Tensor, str]:
    """(keys, values, kv_layout): views of one layer's cache, whatever its strides.

    (blocks, kv heads, block size, D + Dv) since vLLM 0.32, each token's key before its value; (2, blocks, block size, kv heads, D) earlier.
    vLLM keeps 8-bit floats as bytes; `stored` is what they are.
    """
    if kv_cache.dtype != stored:
        kv_cache = kv_cache.view(stored)
    if kv_cache.dim() == 4:
        k, v = kv_cache.split((head_size, kv_cache.shape[-1] - head_size), -1)
        return k, v, "HND"
    k, v = kv_cache.unbind(0)
    return k, v, "NHD"


class PortattnImpl(AttentionImpl[PortattnMetadata]):
    """One layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
                 sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **more: Any):
        for name, value in more.items():
            if value is not None:
                _refuse(name, value, "None: an argument that this backend does not know")
        if not PortattnBackend.supports_attn_type(attn_type):
            _refuse("attn_type", attn_type, "decoder, encoder or encoder_only")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type, self.kv_sharing_target_layer_name = kv_cache_dtype, attn_type, kv_sharing_target_layer_name
        self.encoder = attn_type in _ENCODERS
        # A window of W tokens counts the query's own; an encoder's reaches as far to the right.
        left = -1 if sliding_window is None else sliding_window - 1
        self.window = (left, left if self.encoder else -1 if left < 0 else 0)
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device=current_platform.device_type)
        self.sinks = sinks
        self.batch_invariant = bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))
        self.stored: torch.dtype | None = None  # the cache's dtype, known with the first tensor

    def _pages(self, kv_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, str]:
        if self.stored is None:
            self.stored = getattr(torch, cache_dtype(self.kv_cache_dtype, str(dtype)[6:], *where()))
        return pages(kv_cache, self.head_size, self.stored)

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        """The layer's scales, for 8-bit caches only: others hold the values themselves."""
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if self.stored.itemsize == 1 else {}

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes a batch's keys and values; slots of -1 and rows past slot_mapping are padding."""
        if self.encoder:
            return
        k_cache, v_cache, kv_layout = self._pages(kv_cache, key.dtype)
        n = slot_mapping.shape[0]
        if key.shape[0] != n:
            key, value = key[:n], value[:n]
        cache_append(key, value, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, **self._scales(layer))

    def forward(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: PortattnMetadata | None,
                output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None) -> Tensor:
        """query (T, Hq, D) -> output (T, Hq, Dv), filled and returned; the batch's keys are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            _refuse("output_scale", "a scale", "None: out is not quantised")
        m = attn_metadata
        if m is None:  # vLLM measures its memory
            return output.zero_()
        n = m.num_actual_tokens
        q, out = (query, output) if query.shape[0] == n else (query[:n], output[:n])
        options = dict(softmax_scale=self.scale, window_size=self.window, softcap=self.softcap, alibi_slopes=self.alibi_slopes, sinks=self.sinks,
                       out=out, batch_invariant=self.batch_invariant)
        if self.encoder:
            attention_varlen(q, key[:n], value[:n], m.query_start_loc, m.query_start_loc, m.max_query_len, m.max_query_len, causal=False, **options)
            return output
        k_cache, v_cache, kv_layout = self._pages(kv_cache, q.dtype)
        attention_paged(q, k_cache, v_cache, m.block_table, m.seq_lens, cu_seqlens_q=m.query_start_loc, max_seqlen_q=m.max_query_len,
                        kv_layout=kv_layout, causal=m.causal, **options, **self._scales(layer))
        return output
