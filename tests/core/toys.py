"""Backends for the tests of the registry: the reference behind an adapter, with a manifest to order."""

from __future__ import annotations

import contextlib
import types
from typing import Any, Callable, Iterator

from portattn import manifest, reference, registry

ALL = ["causal", "window", "softcap", "sinks", "alibi", "bias", "rotary", "append", "kv_scale", "lse", "batch_invariant"]


def attention(call, bound):
    """The oracle, in q's dtype."""
    kw = dict(causal=call.causal, window_size=(call.window_left, call.window_right), softmax_scale=call.softmax_scale, softcap=call.softcap,
              alibi_slopes=call.alibi_slopes, sinks=call.sinks)
    if call.block_table is not None:
        out, lse = reference.attention_paged(call.q, call.k, call.v, call.block_table, call.kv_lens, cu_seqlens_q=call.cu_seqlens_q,
                                             max_seqlen_q=call.max_seqlen_q, **kw)
    elif call.cu_seqlens_q is not None:
        out, lse = reference.attention_varlen(call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q,
                                              call.max_seqlen_k, seqused_k=call.seqused_k, **kw)
    else:
        out, lse = reference.attention(call.q, call.k, call.v, bias=call.bias, **kw)
    out = out.to(call.q.dtype) if call.out is None else call.out.copy_(out)
    return (out, lse.float()) if call.return_lse else out


def toy_manifest(name: str, priority: int = 900, capability: dict[str, Any] | None = None, **top: Any) -> manifest.Manifest:
    found = dict(id="any", layouts=["dense", "varlen", "paged"], dtypes=["float32", "float16", "bfloat16"], features=ALL)
    found |= capability or {}
    return manifest.parse(dict(schema=1, name=name, title=name, priority=priority, capabilities=[found], **top), f"{name}/backend.yaml")


@contextlib.contextmanager
def toy(name: str = "toy", run: Callable = attention, probe: Callable | None = None, **kw: Any) -> Iterator[list]:
    """Registers a toy for the length of a with block; gives the list of Calls that reached it, known answers included."""
    calls: list = []

    def counted(call, bound):
        calls.append(call)
        return run(call, bound)

    module = types.SimpleNamespace(attention=counted)
    if probe is not None:
        module.probe = probe
    registry.register(toy_manifest(name, **kw), module)
    try:
        yield calls
    finally:
        registry.unregister(name)
        registry.forget()
