"""portattn: one attention API over CUDA, ROCm/HIP, Triton and torch, with one contract and one test suite.

    out = portattn.attention(q, k, v, causal=True)                                   # dense
    out = portattn.attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)  # ragged
    out = portattn.attention_paged(q, k_cache, v_cache, block_table, kv_lens)        # paged cache

Importing it creates no device context, imports no triton and starts no thread.
"""

from . import backends, registry
from .api import Plan, attention, attention_paged, attention_varlen, cache_append, explain, merge_states, plan
from .capability import Reason
from .errors import ArgumentError, ArgumentTypeError, KernelError, NoBackendError, PortattnError
from .registry import Choice, Status, use
from .version import __version__

backends.__class__ = registry.CallablePackage  # the package of the backends' folders, and the call that lists them

__all__ = [
    "ArgumentError", "ArgumentTypeError", "Choice", "KernelError", "NoBackendError", "Plan", "PortattnError", "Reason", "Status", "__version__",
    "attention", "attention_paged", "attention_varlen", "backends", "cache_append", "explain", "merge_states", "plan", "use",
]
