"""What is asked: `Problem`, what a choice of backend may depend on, and `Call`, what a backend receives.

A Problem holds no value that changes from step to step (lengths, window size, scale), so that an engine
meets few of them and each is decided once. A Call holds the tensors and numbers of one call, already
validated and normalised; api.py builds both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FEATURES = ("causal", "window", "softcap", "sinks", "alibi", "bias", "rotary", "append", "kv_scale", "lse", "grad", "batch_invariant")


class Problem(NamedTuple):
    """A hashable description of one kind of call. Flags are named as in a manifest's `features`."""

    layout: str  # "dense" | "varlen" | "paged"; "cache_append" and "merge_states" for those calls
    device: str  # "cpu" | "cuda" | "hip" | "mps" | "xpu" | ...: torch calls ROCm devices "cuda", this does not
    arch: str  # "sm_90" | "gfx942" | "x86_64" | ""
    dtype: str  # of q: "float32" | "float16" | "bfloat16"
    kv_dtype: str  # of k and v or the caches: dtype, or an 8-bit one such as "float8_e4m3fn"
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int = 0
    q_len: str = "prefill"  # "decode": one query token; "extend": several over a longer history; "prefill": as many as keys
    out_dtype: str = ""
    causal: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    bias: bool = False
    rotary: bool = False
    append: bool = False
    kv_scale: bool = False
    lse: bool = False
    grad: bool = False
    batch_invariant: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the flags that are set."""
        return tuple(name for name in FEATURES if getattr(self, name))

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        kind = f"{self.layout} {self.q_len}" if self.layout in ("dense", "varlen", "paged") else self.layout
        text = f"{kind} {self.dtype} {self.device} {self.arch}".rstrip()
        text += f", heads {self.num_heads_q}/{self.num_heads_kv}, head_dim {dims}"
        if self.kv_dtype != self.dtype:
            text += f", cache {self.kv_dtype}"
        if self.page_size:
            text += f", page_size {self.page_size}"
        return text + (f", features: {', '.join(self.features)}" if self.features else "")


class Call(NamedTuple):
    """One validated attention call. Every layout uses the same fields; those that it lacks are None.

    Layouts are normalised: dense tensors are (B, S, H, D) views whatever `layout=` said, caches are
    (N, P, Hkv, D) views whatever `kv_layout=` said. The last stride of q, k, v and caches is 1.
    """

    q: Tensor  # dense (B, Sq, Hq, D); varlen (Tq, Hq, D); paged either, ragged iff cu_seqlens_q is not None
    k: Tensor  # dense (B, Sk, Hkv, D); varlen (Tk, Hkv, D); paged: the cache (N, P, Hkv, D)
    v: Tensor  # likewise with Dv
    softmax_scale: float
    causal: bool = False
    window_left: int = -1  # inclusive, -1: unbounded; with causal, window_right is already 0
    window_right: int = -1
    softcap: float = 0.0
    bias: Tensor | None = None  # dense only: float or bool, 4-D, broadcastable to (B, Hq, Sq, Sk)
    alibi_slopes: Tensor | None = None  # float32 (Hq,) or (B, Hq)
    sinks: Tensor | None = None  # (Hq,)
    cu_seqlens_q: Tensor | None = None  # int32 or int64 (B+1,)
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # varlen: (B,) lengths in use
    max_seqlen_q: int = 0  # dense: Sq; paged 4-D: Sq; ragged: the caller's bound
    max_seqlen_k: int = 0  # dense: Sk; paged: table width x page size
    block_table: Tensor | None = None  # paged: int32 or int64 (B, M)
    kv_lens: Tensor | None = None  # paged: int32 or int64 (B,), after the append; see `counting`
    k_new: Tensor | None = None  # paged append: shaped like q with Hkv heads
    v_new: Tensor | None = None
    rotary_cos: Tensor | None = None  # (max position, rotary_dim / 2)
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = False
    k_scale: Tensor | float | None = None  # float, or float32 tensor (), (Hkv,), (B, Hkv)
    v_scale: Tensor | float | None = None
    out: Tensor | None = None  # to be filled and returned; None: the backend allocates contiguous (…, Hq, Dv) of q's dtype
    return_lse: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    # For adapters with DIALECT only (dialect.py):
    counting: int = 0  # what kv_lens count
    lse_form: int = 0
    within: tuple[int, int, int] | None = None  # q, k and v are the tensors that hold them, from so many bytes on; strides as bound


def dtype_name(dtype: torch.dtype) -> str:
    """"bfloat16" for torch.bfloat16."""
    return str(dtype)[6:]


def q_len_class(max_seqlen_q: int, max_seqlen_k: int | None) -> str:
    """"decode" for one query token, "prefill" for as many queries as keys, else "extend"."""
    if max_seqlen_q <= 1:
        return "decode"
    return "prefill" if max_seqlen_q == max_seqlen_k else "extend"


__all__ = ["Call", "FEATURES", "Problem", "dtype_name", "q_len_class"]
