"""Trust, but verify: a tiny known-answer problem at the first use of a kernel family, and what it said.

A family is (backend, device, capability, layout, q_len, dtypes). A wrong answer or an error quarantines it in
this process, with a Reason that doctor shows, and the next backend serves. Verdicts are kept on disk, keyed by
everything that they depend on, so that later processes skip the check. A native kernel may also end the
process: it is announced on disk before it runs, so that the next process finds the announcement of a dead one.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import platform
import socket
import time
from typing import Any, NamedTuple

import torch

from . import config
from .capability import Reason
from .device import facts, without_autocast
from .problem import Call, Problem

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HERE = os.path.dirname(os.path.abspath(__file__))
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}  # of values of order 1: far above rounding, far below a fault


class Verdict(NamedTuple):
    """What the known-answer check of one family said; error is the largest deviation, NaN if it raised."""

    backend: str
    device: str
    family: str
    dtype: str
    ok: bool
    error: float
    detail: str
    stored: bool  # read from disk, not measured in this process


_verdicts: dict[tuple, Verdict] = {}


def all_verdicts() -> list[Verdict]:
    return list(_verdicts.values())


def forget() -> None:
    _verdicts.clear()
    _identities.clear()


def quarantined(backend: str) -> list[Reason]:
    return [_reason(v) for v in _verdicts.values() if v.backend == backend and not v.ok]


def _reason(v: Verdict) -> Reason:
    return Reason("quarantined", "a right known answer", f"{v.detail} ({v.family}, {v.device})",
                  f"report it; PORTATTN_VERIFY=0 skips the check, deleting {os.path.join(config.cache_dir(), 'verdicts')} repeats it")


def first_use(bound: Any, device: torch.device, measuring: bool = True) -> Reason | None:
    """Checks a family the first time; None if it may be used. Without `measuring`, tells only what is known."""
    if not config.flag("PORTATTN_VERIFY", True) or device.type == "meta":  # whose tensors hold no values
        return None
    p: Problem = bound.problem
    where = facts(device)
    family = "-".join(filter(None, (bound.capability.id, p.layout, p.q_len if p.layout in ("dense", "varlen", "paged") else "")))
    dtypes = p.dtype if p.kv_dtype == p.dtype else f"{p.dtype}/{p.kv_dtype}"
    key = (bound.backend, where.device, where.arch, device.index, family, dtypes)
    verdict = _verdicts.get(key)
    if verdict is None and not measuring:
        return None
    if verdict is None:
        verdict = _verdicts[key] = _judge(bound, device, f"{where.device} {where.arch}".strip(), family, dtypes)
    return None if verdict.ok else _reason(verdict)


def _judge(bound: Any, device: torch.device, where: str, family: str, dtypes: str) -> Verdict:
    file = _File(bound, where, family, dtypes)
    made = lambda ok, error, detail, stored=False: Verdict(bound.backend, where, family, dtypes, ok, error, detail, stored)
    if (found := file.read()) is not None:
        return made(*found, True)
    limit = TOLERANCE[bound.problem.dtype] * (4 if bound.problem.kv_dtype != bound.problem.dtype else 1)
    file.announce()
    try:
        error = measure(bound, device)[0]
    except (Exception, SystemExit) as exc:  # a library's exit is its failure, not the caller's
        text = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
        # Not stored: out of memory or a driver's passing trouble would stick.
        file.remove()
        return made(False, math.nan, f"raised {text}")
    except BaseException:
        file.remove()
        raise
    ok = error <= limit
    detail = "" if ok else f"error {error:.3g}, at most {limit:.3g} is right"
    file.write(ok, error, detail)
    return made(ok, error, detail)


class _File:
    """The verdict's file in the cache folder; every trouble with the disk only means that nothing is kept."""

    def __init__(self, bound: Any, where: str, family: str, dtypes: str):
        parts = [bound.backend, where, family, dtypes, torch.__version__, str(torch.version.cuda), str(getattr(torch.version, "hip", None)),
                 platform.platform(), _identity(bound)]
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        self.path = os.path.join(config.cache_dir(), "verdicts", f"{bound.backend}-{name}.json")
        self.key = parts[:8]
        self._held: Any = None  # the announcement, locked: a process of another container can ask the kernel, but not see our pid

    def read(self) -> tuple[bool, float, str] | None:
        from .codeobjects import private  # here: importing portattn needs no compilers

        try:
            with open(self.path, encoding="utf-8") as f:
                if not private(os.fstat(f.fileno())):
                    return None
                data = json.load(f)
                if "running" not in data:
                    return bool(data["ok"]), float(data["error"]), str(data["detail"])
                pid = int(data["running"])
                # One process asks once: what carries our own number died before us, as the first process of a container does again and again.
                if data["host"] != _host() or _locked(f) or pid != os.getpid() and _alive(pid):
                    return None
                if not os.path.samestat(os.fstat(f.fileno()), os.stat(self.path)):  # it came to its end since we opened the file
                    return None
            return False, math.nan, f"an earlier process ended while it ran; delete {self.path} to try again"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _put(self, data: dict) -> None:
        from .codeobjects import write_whole

        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            write_whole(self.path, json.dumps(data).encode())

    def announce(self) -> None:
        self._put({"running": os.getpid(), "host": _host(), "key": self.key})
        if fcntl is not None:
            with contextlib.suppress(OSError):
                self._held = open(self.path, "r+b")
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, ok: bool, error: float, detail: str) -> None:
        self._put({"ok": ok, "error": error, "detail": detail, "key": self.key, "date": time.strftime("%Y-%m-%d")})
        self._release()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.remove(self.path)
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _host() -> str:
    try:
        return socket.gethostname()
    except OSError:
        return ""


def _locked(file: Any) -> bool:
    """Whether a process that lives holds the lock of an announcement; no where the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _alive(pid: int) -> bool:
    """Whether a process of this machine still runs; yes where that cannot be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


_identities: dict[str, str] = {}


@functools.lru_cache(maxsize=None)
def _modules(folder: str) -> bytes:
    """A hash of portattn's own modules: native.py packs and launches what a backend's folder does not hold."""
    digest = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.py"))):
        with open(path, "rb") as f:
            digest.update(f.read())
    return digest.digest()


def _identity(bound: Any) -> str:
    """A hash of portattn's modules and the backend's own files, and what else its adapter says that a verdict depends on."""
    known = _identities.get(bound.backend)
    if known is None:
        digest = hashlib.sha256(_modules(_HERE))
        for folder in getattr(bound.adapter, "__path__", ()):
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                if name.endswith((".py", ".yaml", ".cpp", ".cu", ".h")) and os.path.isfile(path):
                    with open(path, "rb") as f:
                        digest.update(f.read())
        if hasattr(bound.adapter, "identity"):
            try:
                digest.update(str(bound.adapter.identity()).encode())
            except (Exception, SystemExit) as exc:  # the check will tell whether it computes all the same
                digest.update(f"{type(exc).__name__}: {exc}".encode())
        known = _identities[bound.backend] = digest.hexdigest()
    return known


# ------------------------------------------------------------------ the tiny problems
def measure(bound: Any, device: torch.device) -> tuple[float, float]:
    """(largest error against the float64 reference, seconds of a second run) of a tiny problem of the bound kind."""
    from torch.utils._python_dispatch import _disable_current_modes

    bound = type(bound)(bound.problem, bound.backend, bound.capability, bound.adapter, {})  # the caller's state is for the caller's shapes
    # torch.device: engines set another default device while they load a model. Autocast, as the first call may come from inside one.
    with torch.no_grad(), _disable_current_modes(), torch.device("cpu"), without_autocast("cpu"), without_autocast(device.type):
        layout = bound.problem.layout
        build = {"cache_append": _append, "merge_states": _merge}.get(layout, _attention)
        run, expected = build(bound, device)
        got = run()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        return max(_deviation(a, b) for a, b in zip(got, expected)), seconds


def _deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinity for other shapes, NaN, or an infinity in another place."""
    got, want = got.detach().to("cpu").to(torch.float64), want.to(torch.float64)
    if got.shape != want.shape:
        return math.inf
    same = got == want
    diff = torch.where(same, 0.0, (got - want).abs())
    return float(torch.nan_to_num(diff, nan=math.inf).max()) if diff.numel() else 0.0


def _random(generator: torch.Generator, dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(getattr(torch, dtype))


def _attention(bound: Any, device: torch.device):
    from . import reference

    p: Problem = bound.problem
    can = bound.capability.features
    group = p.num_heads_q // p.num_heads_kv if p.num_heads_kv else 1
    heads, kv_heads = (group * 2, 2) if group <= 8 else (group, 1)
    gen = torch.Generator("cpu").manual_seed(20)
    normal = lambda *shape: _random(gen, p.dtype, *shape)
    page = min(p.page_size or 1, 64)
    page = p.page_size if p.page_size not in (0, page) and page not in bound.capability.page_sizes else page
    # Two sequences: odd lengths, the second with more keys than queries, and for one token with so many that kernels share and merge them.
    q_lens = (1, 1) if p.q_len == "decode" else ((19, 19) if p.q_len == "prefill" else (19, 7))
    k_lens = q_lens if p.q_len == "prefill" else (37, 300) if p.q_len == "decode" else (37, 70)
    causal, lse = "causal" in can, "lse" in can
    kw: dict[str, Any] = dict(softmax_scale=p.head_dim**-0.5, causal=causal)
    common = dict(kw, window_right=0 if causal else -1, return_lse=lse)
    to = lambda t: t.to(device)
    if p.layout == "dense":
        sq, sk = q_lens[0], k_lens[0]
        q, k, v = normal(2, sq, heads, p.head_dim), normal(2, sk, kv_heads, p.head_dim), normal(2, sk, kv_heads, p.head_dim_v)
        call = Call(to(q), to(k), to(v), max_seqlen_q=sq, max_seqlen_k=sk, **common)
        want = reference.attention(q, k, v, **kw)
    else:
        starts = lambda lens: torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32)
        ragged = p.layout == "varlen" or q_lens[0] != q_lens[1]
        q = normal(sum(q_lens), heads, p.head_dim)
        if p.layout == "varlen":
            k, v = normal(sum(k_lens), kv_heads, p.head_dim), normal(sum(k_lens), kv_heads, p.head_dim_v)
            cu_q, cu_k = starts(q_lens), starts(k_lens)
            call = Call(to(q), to(k), to(v), cu_seqlens_q=to(cu_q), cu_seqlens_k=to(cu_k), max_seqlen_q=max(q_lens),
                        max_seqlen_k=max(k_lens), **common)
            want = reference.attention_varlen(q, k, v, cu_q, cu_k, max(q_lens), max(k_lens), **kw)
        else:
            width = -(-max(k_lens) // page) + 1
            pages = 2 * width + 1
            caches = [_random(gen, "float32", pages, page, kv_heads, d).clamp_(-4, 4) for d in (p.head_dim, p.head_dim_v)]
            table = torch.randperm(pages, generator=gen, device="cpu")[: 2 * width].to(torch.int32).view(2, width)
            for cache in caches:  # slots that belong to no sequence hold NaN
                used = {int(table[b, i // page]) * page + i % page for b in range(2) for i in range(k_lens[b])}
                flat = cache.flatten(0, 1)
                flat[[i for i in range(len(flat)) if i not in used]] = torch.nan
            caches = [cache.to(getattr(torch, p.kv_dtype)) for cache in caches]
            lens = torch.tensor(k_lens, dtype=torch.int32)
            if not ragged:
                q = q.view(2, q_lens[0], heads, p.head_dim)
            cu_q = starts(q_lens) if ragged else None
            call = Call(to(q), *map(to, caches), cu_seqlens_q=to(cu_q) if ragged else None, max_seqlen_q=max(q_lens),
                        max_seqlen_k=width * page, block_table=to(table), kv_lens=to(lens), **common)
            want = reference.attention_paged(q, *caches, table, lens, cu_seqlens_q=cu_q, max_seqlen_q=max(q_lens), **kw)
    fresh = type(bound)(p._replace(num_heads_q=heads, num_heads_kv=kv_heads, page_size=page if p.page_size else 0, causal=causal, lse=lse,
                                   window=False, softcap=False, sinks=False, alibi=False, bias=False, rotary=False, append=False,
                                   kv_scale=False, grad=False, batch_invariant=False),
                        bound.backend, bound.capability, bound.adapter, {})

    def run():
        got = bound.adapter.attention(call, fresh)
        return got if lse else (got,)

    return run, want[: 2 if lse else 1]


def _append(bound: Any, device: torch.device):
    p: Problem = bound.problem
    gen = torch.Generator("cpu").manual_seed(21)
    page = min(p.page_size or 16, 64)
    page = page if page in bound.capability.page_sizes else p.page_size
    k, v = _random(gen, p.dtype, 5, 2, p.head_dim), _random(gen, p.dtype, 5, 2, p.head_dim_v)
    start = [torch.zeros(3, page, 2, d).to(getattr(torch, p.kv_dtype)) for d in (p.head_dim, p.head_dim_v)]
    slots = [2 * page + page - 1, 0, -1, 1, 2 * page]
    want = [cache.to(torch.float64) for cache in start]
    for cache, new in zip(want, (k, v)):
        for i, slot in enumerate(slots):
            if slot >= 0:
                cache[slot // page, slot % page] = new[i].to(getattr(torch, p.kv_dtype)).to(torch.float64)
    caches = [cache.to(device) for cache in start]

    def run():
        bound.adapter.cache_append(k.to(device), v.to(device), *caches, torch.tensor(slots, device=device), None, None, bound)
        return caches

    return run, want


def _merge(bound: Any, device: torch.device):
    p: Problem = bound.problem
    gen = torch.Generator("cpu").manual_seed(22)
    outs, lses = _random(gen, p.dtype, 3, 4, 2, p.head_dim_v), _random(gen, "float32", 3, 4, 2)
    lses[1, 0], outs[1, 0] = -math.inf, math.nan
    weight = torch.softmax(lses.to(torch.float64), 0)[..., None]
    want = torch.where(weight > 0, outs.to(torch.float64) * weight, 0.0).sum(0), lses.to(torch.float64).logsumexp(0)
    run = lambda: bound.adapter.merge_states(outs.to(device), lses.to(device), None, bound)
    return run, want


__all__ = ["Verdict", "all_verdicts", "first_use", "forget", "measure", "quarantined"]
