"""vLLM on portattn: an attention backend from outside vLLM's tree.

    pip install .                                 # in a checkout of portattn, beside vLLM, whose processes find the plugin by themselves
    vllm serve MODEL --attention-backend CUSTOM   # or LLM(model, attention_backend="CUSTOM")

The plugin (entry point group vllm.general_plugins) only offers the backend: without that option vLLM runs as before. Decoder layers attend over
vLLM's own pages (attention_paged), keys and values are written by cache_append, encoder layers are attention_varlen. What vLLM may ask of the
backend (dtypes, head sizes, 8-bit caches, windows, sinks, batch invariance, CUDA graphs) is answered from the manifests of portattn's backends.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from .. import registry
from ..capability import Capability
from ..device import facts, vendor
from ..problem import Problem, dtype_name
from . import check_version

__all__ = ["MADE_FOR", "Served", "register", "served"]

MADE_FOR = ">=0.32,<0.34"
_NAME = f"{__name__}.Backend"
_NAME_ON_CPU = f"{__name__}.BackendOnCpu"


def register() -> None:
    """Offers the backend to this process's vLLM as CUSTOM; called by the plugin in each of vLLM's processes, any number of times.

    vLLM's choice for CPU is fixed (CPU_ATTN) and does not look at the option, so that name is pointed here too: it stays vLLM's own backend
    unless the option says CUSTOM. A name that another plugin has taken is left to it. A vLLM without this interface gives one warning.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for member, path in ((AttentionBackendEnum.CUSTOM, _NAME), (AttentionBackendEnum.CPU_ATTN, _NAME_ON_CPU)):
            if not member.is_overridden():
                register_backend(member, path)
    except (ImportError, AttributeError) as missing:
        warnings.warn(f"portattn.integrations: the attention backend is made for vLLM {MADE_FOR} and is not offered to this one "
                      f"({type(missing).__name__}: {missing})", RuntimeWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    """The two registered names: looking one up is choosing it, and imports vLLM."""
    if name == "BackendOnCpu":
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if get_current_vllm_config().attention_config.backend is not AttentionBackendEnum.CUSTOM:
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            return CPUAttentionBackend
    elif name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    check_version("vllm", MADE_FOR, vllm.__version__)
    from .vllm_backend import PortattnBackend

    return PortattnBackend


# ------------------------------------------------------------------ what the manifests say
class Served(NamedTuple):
    """Which capability serves each kind of call of a layer, or why none does."""

    capabilities: tuple[Capability, ...] = ()
    reasons: tuple[str, ...] = ()


_CACHES = {"auto": "", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "float16": "float16", "bfloat16": "bfloat16"}


def cache_dtype(name: str | None, dtype: str, device: str, arch: str) -> str | None:
    """portattn's name of vLLM's cache dtype for a model's dtype, or None for one that portattn has no form of."""
    found = _CACHES.get(name or "auto")
    if found == "float8_e4m3fn" and device == "hip" and arch == "gfx942":
        return "float8_e4m3fnuz"
    return dtype if found == "" else found


def where(capability: Any = None) -> tuple[str, str]:
    """(device, architecture) of this vLLM in the manifests' words. `capability`: CUDA's, as vLLM knows it without a CUDA context."""
    from vllm.platforms import current_platform

    device = vendor(current_platform.device_type)
    if device == "cuda":
        capability = capability or current_platform.get_device_capability()
        return device, f"sm_{capability.major}{capability.minor}" if capability else ""
    import torch

    return device, facts(torch.device(current_platform.device_type)).arch


def served(dtype: Any = "bfloat16", kv_cache_dtype: str | None = "auto", head_size: int = 64, block_size: int | None = 16, encoder: bool = False,
           causal: bool = True, at: tuple[str, str] | None = None, **features: bool) -> Served:
    """What the manifests answer for one kind of layer: its decode, extend and prefill calls and, but for an encoder, its cache writes.

    Only backends that static facts allow count, in the order that a call would try them; no device is touched.

    Args:
        dtype: the model's; a torch.dtype or its name.
        kv_cache_dtype: vLLM's name of the cache's.
        block_size: tokens a page; None where vLLM has not decided yet.
        encoder: no cache: the layer attends to its own tokens.
        at: (device, architecture); default this vLLM's.
        features: flags of Problem (window, softcap, sinks, alibi, batch_invariant).
    """
    device, arch = at or where()
    dtype = dtype if isinstance(dtype, str) else dtype_name(dtype)
    kv_dtype = cache_dtype(kv_cache_dtype, dtype, device, arch)
    if kv_dtype is None:
        return Served(reasons=(f"kv_cache_dtype {kv_cache_dtype}: caches are auto, {', '.join(sorted(_CACHES.keys() - {'auto'}))}",))
    problem = Problem("varlen" if encoder else "paged", device, arch, dtype, kv_dtype, 1, 1, head_size, head_size,
                      0 if encoder else block_size or 16, causal=causal, kv_scale=kv_dtype != dtype, **features)
    problems = [problem._replace(q_len=q_len) for q_len in (("prefill",) if encoder else ("decode", "extend", "prefill"))]
    if not encoder:
        problems.append(Problem("cache_append", device, arch, dtype, kv_dtype, 1, 1, head_size, head_size, problem.page_size,
                                kv_scale=problem.kv_scale))
    found, reasons = [], []
    for wanted in problems:
        capability, why = _first(wanted)
        found += [capability] if capability else []
        reasons += [] if capability else [f"{wanted}: {why}"]
    return Served(tuple(found), tuple(reasons))


def _first(problem: Problem) -> tuple[Capability | None, str]:
    """The first capability in order that covers the problem, or each backend's reasons."""
    names, said = registry.order_of(None)
    statuses = registry.backends()
    rows, able = [], []
    for name in names:
        if statuses[name].level in ("unavailable", "broken"):
            rows.append((name, statuses[name].reasons))
            continue
        capability, reasons = registry.covering(name, problem)
        if capability is None:
            rows.append((name, reasons))
        else:
            priority = registry.manifests()[name].priority if capability.priority is None else capability.priority
            able.append((0 if said else -priority, len(able), capability))
    if able:
        return min(able)[2], ""
    return None, "; ".join(f"{name}: {', '.join(map(str, reasons))}" for name, reasons in rows)
