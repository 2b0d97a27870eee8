"""The floor: right on every torch device, in plain torch. Fused SDPA where it is right and fast, tiles elsewhere.

tiled.py    tiles of scores for lengths known on the host      lengths.py  for lengths on the device, never read back
fused.py    when torch's fused operators serve                 holes.py    known faults by device and version, and guards
paged.py    pages gathered; append.py writes them              arith.py    dtypes of products, no TF32
grad.py     gradients by recomputed tiles                      merging.py  partial results
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from portattn import validate
from portattn.appended import Appended
from portattn.capability import Reason
from portattn.device import facts
from portattn.problem import Call, dtype_name

from . import append, arith, fused, grad, holes, lengths, merging, paged, small, tiled
from .tiled import Rules


def probe(device: torch.device) -> tuple[Reason, ...]:
    """() on every device but MPS before macOS 14 with a torch that still runs there without bfloat16."""
    if device.type == "mps" and "mps-bf16-macos13" in holes.active("mps") and not torch.backends.mps.is_macos_or_newer(14, 0):
        return (Reason("os", "macOS 14", "an older macOS", "update macOS: bfloat16 needs it"),)
    return ()


def rules_of(call: Call) -> Rules:
    """The call's rules; a window that causal cuts, as right = 0."""
    right = 0 if call.causal else call.window_right
    return Rules(call.softmax_scale, call.window_left, right, call.softcap, call.bias, call.alibi_slopes, call.sinks)


def attention(call: Call, bound) -> Tensor | tuple[Tensor, Tensor]:
    """out, or (out, lse) if the call asks for it."""
    state = bound.state
    route = state.get("route")
    if route is None:
        route = _bind(call, bound)
    if call.k_new is not None:
        _look(state["appended"], "attention_paged", call.k_new, call.v_new, call.k, call.v)
    try:
        written = (call.out,) if call.k_new is None else (call.out, call.k, call.v)
        if _made_in_inference_mode(*written):
            with torch.inference_mode():
                got = route(call, bound, state["host"])
            return _made_anew(got, call)
        return route(call, bound, state["host"])
    except (IndexError, RuntimeError):
        if state["host"] and (call.cu_seqlens_q is not None or call.block_table is not None):
            validate.values(call)  # says which length, or which entry of the table, there cannot be
        raise


def _look(appended: Appended, name: str, *tensors: Tensor) -> None:
    places = tuple([x.data_ptr() for x in tensors])
    if places not in appended.apart:
        appended.look(name, places, *tensors)


def _made_in_inference_mode(*written: Tensor | None) -> bool:
    """Whether torch would refuse to write to one of these here, where kernels that take pointers do."""
    return not torch.is_inference_mode_enabled() and any(x is not None and x.is_inference() for x in written)


def _made_anew(got: Tensor | tuple[Tensor, Tensor], call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Results of inference mode as tensors like any other, but for the `out` that was given."""
    out, lse = got if call.return_lse else (got, None)
    return _result(out.clone() if call.out is None else call.out, lse if lse is None else lse.clone())


def _bind(call: Call, bound):
    bound.state["host"] = holes.kind(call.q.device) == "cpu"  # lengths on the host are free to read; a device's never are
    if call.k_new is not None:
        bound.state["appended"] = Appended(call.k_new, call.v_new, call.k, call.v)
    route = bound.state["route"] = _route(call, bound)
    return route


def _route(call: Call, bound):
    """The function for every call of this shape and these options."""
    state, paged_call = bound.state, call.block_table is not None
    ragged = not paged_call and call.cu_seqlens_q is not None
    if bound.problem.grad:
        return _varlen_grad if ragged else _dense_grad
    state["fused"] = not _declined(call)
    state["plain"] = (
        state["fused"]
        and call.window_left < 0
        and call.alibi_slopes is None
        and call.sinks is None
        and not call.batch_invariant
        and call.k.dtype == call.q.dtype
    )
    if paged_call:
        one = state["host"] and state["plain"] and call.cu_seqlens_q is None and call.q.shape[1] == 1 and call.q.is_contiguous()
        simple = call.k_new is None and call.rotary_cos is None and call.k_scale is None and call.v_scale is None
        right = call.causal or call.window_right <= 0
        return _paged_one if one and simple and right and call.k.shape[1] < paged.BIG_PAGE else _paged
    if ragged:
        return _varlen
    if _fused_dense(call, state["plain"]):
        return _dense_fused
    scores = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[1]
    return _dense_small if state["host"] and 0 < scores <= small.MOST_SCORES and not call.batch_invariant else _dense


def _declined(call: Call) -> str:
    device = call.q.device
    return fused.declined(
        holes.kind(device),
        facts(device).arch,
        call.q.dtype,
        call.q.shape[-1],
        call.v.shape[-1],
        call.softcap == 0 and call.bias is None,
    )


def _fused_dense(call: Call, plain: bool) -> bool:
    """Whether one fused call computes a dense problem, and does so faster than tiles."""
    (batch, sq, hq, _), sk = call.q.shape, call.k.shape[1]
    if not plain or 0 in (batch, sq, sk, hq) or not _square(call, sq, sk):
        return False
    if holes.kind(call.q.device) != "cpu":
        return call.softmax_scale > 0
    return not call.return_lse and sk >= holes.least_keys() and batch * hq * sq * sk <= fused.cpu_scores(call.q.dtype)


def _square(call: Call, sq: int, sk: int) -> bool:
    """Whether SDPA's top-left mask, or none, is right: its corner is ours only if Sq == Sk; one query at the end sees all."""
    right = 0 if call.causal else call.window_right
    return right < 0 or right == 0 and (sq == sk or sq == 1)


def _outputs(call: Call, *shape: int) -> tuple[Tensor, Tensor | None]:
    """out and lse to fill; out's last size is Dv."""
    out = call.out if call.out is not None else call.q.new_empty(shape)
    return out, torch.empty(shape[:-1], dtype=torch.float32, device=call.q.device) if call.return_lse else None


def _result(out: Tensor, lse: Tensor | None):
    return out if lse is None else (out, lse)


# ------------------------------------------------------------------ dense
def _dense(call: Call, bound, host: bool):
    out, lse = _outputs(call, *call.q.shape[:3], call.v.shape[-1])
    tiled.attend(call.q, call.k, call.v, rules_of(call), out, lse, None, call.batch_invariant, None, not host)
    return _result(out, lse)


def _dense_fused(call: Call, bound, host: bool):
    causal = call.q.shape[1] > 1 and (call.causal or call.window_right == 0)
    if host:
        out, lse = fused.small(call.q, call.k, call.v, call.softmax_scale, causal), None
    elif not all(map(fused.aligned, (call.q, call.k, call.v))):
        return _dense(call, bound, host)
    else:
        out, lse = fused.dense(call.q, call.k, call.v, call.softmax_scale, causal)
    out = call.out.copy_(out) if call.out is not None else out.contiguous()
    return (out, lse.contiguous()) if call.return_lse else out


def _dense_small(call: Call, bound, host: bool):
    out, lse = small.attend(call.q, call.k, call.v, rules_of(call), call.return_lse)
    return _result(call.out.copy_(out) if call.out is not None else out, lse)


def _dense_grad(call: Call, bound, host: bool):
    out, lse = grad.attention(call.q, call.k, call.v, rules_of(call), alone=call.batch_invariant)
    return (out, lse) if call.return_lse else out


# ------------------------------------------------------------------ varlen
def _spans(call: Call) -> tuple[list[int], list[int], list[int]]:
    starts_q = call.cu_seqlens_q.tolist()
    starts_k = starts_q if call.cu_seqlens_k is call.cu_seqlens_q else call.cu_seqlens_k.tolist()
    ends_k = starts_k[1:]
    if call.seqused_k is not None:
        ends_k = [lo + max(n, 0) for lo, n in zip(starts_k, call.seqused_k.tolist())]
    return starts_q, starts_k, ends_k


def _varlen(call: Call, bound, host: bool):
    q, k, v = call.q, call.k, call.v
    rules = rules_of(call)
    if host:
        return _varlen_host(call, bound, rules)
    out, lse = _outputs(call, *q.shape[:2], v.shape[-1])
    ragged, starts_k = _ragged(call)
    fetch_k, fetch_v = lengths.rows_of(k, starts_k), lengths.rows_of(v, starts_k)
    if k.shape[0] == 0:
        ragged = ragged._replace(max_k=0)
    lengths.attend(
        ragged,
        k.shape[1],
        v.shape[2],
        lambda b, at, there: (fetch_k(b, at, there), fetch_v(b, at, there)),
        rules,
        out,
        lse,
        tiled.limits(q.device),
        call.batch_invariant,
    )
    return _result(out, lse)


def _varlen_host(call: Call, bound, rules: Rules):
    """Each sequence by itself: one fused call, all scores at once, or tiles, by its size."""
    q, k, v, want_lse = call.q.unsqueeze(0), call.k.unsqueeze(0), call.v.unsqueeze(0), call.return_lse
    total, hq = call.q.shape[:2]
    starts_q, starts_k, ends_k = _spans(call)
    fuse, invariant = bound.state["plain"] and not want_lse, call.batch_invariant
    out, lse, least, most = None, None, holes.least_keys(), fused.cpu_scores(q.dtype)
    for b, (q0, k0, k1) in enumerate(zip(starts_q, starts_k, ends_k)):
        sq, sk = starts_q[b + 1] - q0, k1 - k0
        if sq == 0:
            continue
        scores = hq * sq * sk
        parts = (q, k, v) if sq == total and sk == k.shape[1] else (q.narrow(1, q0, sq), k.narrow(1, k0, sk), v.narrow(1, k0, sk))
        got_lse = None
        if fuse and sk >= least and scores <= most and _square(call, sq, sk):
            got = fused.small(*parts, rules.scale, rules.right == 0 and sq > 1)
        elif 0 < scores <= small.MOST_SCORES and not invariant:
            got, got_lse = small.attend(*parts, _of_sequence(rules, b), want_lse)
        else:
            got = None
        if got is not None and sq == total and call.out is None:  # the only sequence: nothing to copy
            return _result(got.squeeze(0), got_lse.squeeze(0) if want_lse else None)
        if out is None:
            out, lse = _outputs(call, total, hq, v.shape[-1])
            out4, lse3 = out[None], lse[None] if want_lse else None
        to, to_lse = out4.narrow(1, q0, sq), lse3.narrow(1, q0, sq) if want_lse else None
        if got is None:
            tiled.attend(*parts, _of_sequence(rules, b), to, to_lse, None, invariant)
        else:
            to.copy_(got)
            if want_lse:
                to_lse.copy_(got_lse)
    if out is None:
        out, lse = _outputs(call, total, hq, v.shape[-1])
    return _result(out, lse)


def _of_sequence(rules: Rules, b: int) -> Rules:
    return rules._replace(slopes=rules.slopes[b]) if rules.slopes is not None and rules.slopes.dim() == 2 else rules


def _ragged(call: Call) -> tuple[lengths.Ragged, Tensor]:
    cu_q, cu_k = call.cu_seqlens_q.to(torch.int64), call.cu_seqlens_k.to(torch.int64)
    q_lens, k_lens = cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]
    if call.seqused_k is not None:
        k_lens = call.seqused_k.to(torch.int64).clamp(min=0)
    square = (
        call.seqused_k is None
        and call.cu_seqlens_q.data_ptr() == call.cu_seqlens_k.data_ptr()
        and call.max_seqlen_q == call.max_seqlen_k
    )
    return lengths.Ragged(
        call.q,
        cu_q[:-1],
        q_lens,
        k_lens,
        min(call.max_seqlen_q, call.q.shape[0]),
        min(call.max_seqlen_k, call.k.shape[0]),
        square,
    ), cu_k[:-1]


def _varlen_grad(call: Call, bound, host: bool):
    rules = rules_of(call)
    if host:
        starts_q, starts_k, ends_k = _spans(call)
        out, lse = grad.varlen(call.q, call.k, call.v, rules, starts_q, starts_k, ends_k)
    else:
        ragged, starts_k = _ragged(call)
        out, lse = grad.varlen_lengths(ragged, call.k, call.v, starts_k, rules, call.batch_invariant)
    return (out, lse) if call.return_lse else out


# ------------------------------------------------------------------ paged
def _paged_one(call: Call, bound, host: bool):
    """Decode of equal, short lengths without features: one gather and one fused call."""
    lens = call.kv_lens.tolist()
    n = lens[0] if lens else 0
    if n <= 0 or n * len(lens) > paged.chunk_tokens() or lens.count(n) != len(lens):
        return _paged(call, bound, host)
    out, lse = paged.decode(call.q, call, n)
    shape = call.q.shape
    out = out.reshape(shape) if call.out is None else call.out.copy_(out.reshape(shape))
    return (out, lse.reshape(shape[:3])) if call.return_lse else out


def _paged(call: Call, bound, host: bool):
    q, lead = call.q, call.q.shape[:-1]
    heads, dim_v = call.k.shape[2], call.v.shape[3]
    out, lse = _outputs(call, *lead, dim_v)
    if out.numel() == 0:
        return _result(out, lse)
    ragged = call.cu_seqlens_q is not None
    turn = call.k_new is not None or call.rotary_cos is not None
    lens = call.kv_lens.tolist() if host else []
    if lens and max(lens) > call.max_seqlen_k:
        validate.values(call)  # says which sequence, before anything is written: on the host it costs nothing to know
    starts = None
    if turn or not host:
        starts = call.cu_seqlens_q.to(torch.int64) if ragged else torch.arange(0, lead[0] * lead[1] + 1, lead[1], device=q.device)
    q = paged.append_and_turn(call, starts, host) if turn else q if ragged else q.flatten(0, 1)
    flat_out, flat_lse = _flat(out, q.shape[0]), lse.view(-1, lead[-1]) if lse is not None else None
    if host:
        spans = call.cu_seqlens_q.tolist() if ragged else range(0, lead[0] * lead[1] + 1, lead[1])
        fast = (
            bound.state["fused"]
            and call.k.dtype == q.dtype
            and (q.dtype == torch.float32 or call.k_scale is None and call.v_scale is None)
        )
        paged.attend_host(q, spans, lens, call, rules_of(call), flat_out, flat_lse, fast, call.batch_invariant)
    else:
        k_lens = call.kv_lens.to(torch.int64).clamp(min=0)
        max_k = call.max_seqlen_k if call.k.shape[0] and call.block_table.shape[1] else 0
        lengths.attend(
            lengths.Ragged(q, starts[:-1], starts[1:] - starts[:-1], k_lens, min(call.max_seqlen_q, q.shape[0]), max_k),
            heads,
            dim_v,
            paged.fetch_pages(call, q.dtype),
            rules_of(call),
            flat_out,
            flat_lse,
            tiled.limits(q.device),
            call.batch_invariant,
        )
    if flat_out.data_ptr() != out.data_ptr():
        out.copy_(flat_out.view(out.shape))
    return _result(out, lse)


def _flat(out: Tensor, rows: int) -> Tensor:
    """out as (T, Hq, Dv): a view where its strides allow, else memory to be copied from."""
    if out.dim() == 3:
        return out
    if out.shape[0] == 1 or out.stride(0) == out.stride(1) * out.shape[1]:
        return out.flatten(0, 1)
    return torch.empty(rows, *out.shape[2:], dtype=out.dtype, device=out.device)


# ------------------------------------------------------------------ the small calls
def cache_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound) -> None:
    """Writes T tokens into both caches; negative slots are skipped."""
    appended = bound.state.get("appended")
    if appended is None:
        appended = bound.state["appended"] = Appended(k, v, k_cache, v_cache)
    _look(appended, "cache_append", k, v, k_cache, v_cache)
    with torch.inference_mode() if _made_in_inference_mode(k_cache, v_cache) else contextlib.nullcontext():
        append.cache_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, holes.kind(k.device) == "cpu")


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None, bound) -> tuple[Tensor, Tensor]:
    return merging.merge_states(outs, lses, sinks)


def notes(call: Call, bound) -> tuple[str, ...]:
    """What explain() says of the route."""
    route, device, host = _bind(call, bound), call.q.device, bound.state["host"]
    if route is _dense_fused:
        return ("fused SDPA",)
    if route is _dense_small:
        return ("all scores at once",)
    said = []
    if route in (_paged, _paged_one):
        said.append(
            "pages gathered, lengths read on the host" if host else "pages gathered tile by tile, lengths stay on the device"
        )
        if host and bound.state["fused"] and call.k.dtype == call.q.dtype:
            said.append("fused SDPA for single query tokens")
    elif route is not _dense and route is not _dense_grad:
        said.append("each sequence by itself" if host else "sequences padded tile by tile, lengths stay on the device")
    if bound.problem.grad:
        said.append("gradients by recomputed tiles")
    elif why := _declined(call):
        said.append(f"no fused SDPA: {why}")
    limit = tiled.limits(device)
    said.append(f"tiled: {limit.rows} query tokens a tile, at most {limit.scores} scores")
    work = arith.work_dtype(device, call.q.dtype)
    if work != call.q.dtype:
        said.append(f"{dtype_name(call.q.dtype)} computed in float32")
    return tuple(said)
