"""Cases: one kind of call as a small NamedTuple whose text is an id, and the tensors that it stands for.

`str(case)` can be pasted back (`Case.parse`, `portattn conformance --case`, `portattn explain`); a case's numbers are drawn from
a seed that is the CRC of its id, so a failure is the same everywhere. `build` makes the call; the inputs are such that a
wrong answer is loud: peaked scores, large sinks, pages in random order. With `poison`, everything that must not be read (rows
outside of q, k and v, unused slots, unused pages) holds NaN and Inf, and unused table entries are -1, 2^31 - 1 or the id of
a poisoned page.

    paged-bf16-h8x2-d64-p16-q1k37*2+q5k5-causal-w16.0-sinks-poison
    layout dtype heads  dim page lengths (two of Lq 1, Lk 37; one of 5, 5), then flags
"""

from __future__ import annotations

import re
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("dense", "varlen", "paged")
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
KV_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz"}
INT32_MAX = 2**31 - 1


class Case(NamedTuple):
    """What a call looks like. `lens` holds (Lq, Lk) of each sequence, Lk after an append; flags as in the id."""

    layout: str = "dense"
    dtype: str = "f32"
    heads: int = 4
    heads_kv: int = 2
    dim: int = 32
    dim_v: int = 0  # 0: as dim
    page: int = 0  # paged: tokens a page
    lens: tuple[tuple[int, int], ...] = ((5, 9), (5, 9))
    kv: str = ""  # e4m3 | e5m2 | e4m3fnuz | e5m2fnuz: type of the cache
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    cap: float = 0.0
    sinks: bool = False
    alibi: str = ""  # "alibi": (Hq,); "alibib": (B, Hq)
    bias: str = ""  # "bias": float (B, Hq, Sq, Sk), "biask": float (Sk,), "biasb": bool (B, 1, Sq, Sk)
    rope: int = 0  # rotary_dim
    pairs: bool = False  # rotary_interleaved
    append: bool = False
    scale: str = ""  # "scale": a float, "scale0": 0-d, "scaleh": (Hkv,), "scaleb": (B, Hkv)
    hnd: bool = False
    bhsd: bool = False
    ragged: bool = False  # paged: q (Tq, Hq, D) with cu_seqlens_q; implied by unequal Lq
    used: bool = False  # varlen: seqused_k shorter than the span
    i64: bool = False
    poison: bool = False
    splits: int = 0
    invariant: bool = False

    def __str__(self) -> str:
        dims = f"d{self.dim}" + (f"v{self.dim_v}" if self.dim_v not in (0, self.dim) else "")
        parts = [self.layout, self.dtype, f"h{self.heads}x{self.heads_kv}", dims, f"p{self.page}" if self.page else ""]
        runs: list[list] = []
        for pair in self.lens:
            if runs and runs[-1][0] == pair:
                runs[-1][1] += 1
            else:
                runs.append([pair, 1])
        parts.append("+".join(f"q{q}k{k}" + (f"*{n}" if n > 1 else "") for (q, k), n in runs) or "empty")
        left, right = ("x" if w < 0 else str(w) for w in self.window)
        parts += [self.kv, "causal" * self.causal, f"w{left}.{right}" if self.window != (-1, -1) else "",
                  f"cap{self.cap:g}" if self.cap else "", "sinks" * self.sinks, self.alibi, self.bias,
                  f"rope{self.rope}" if self.rope else "", *(name * getattr(self, name) for name in ("pairs", "append")),
                  self.scale, *(name * getattr(self, name) for name in ("hnd", "bhsd", "ragged", "used", "i64", "poison")),
                  f"splits{self.splits}" if self.splits else "", "invariant" * self.invariant]
        return "-".join(p for p in parts if p)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of an id; ValueError names the token that is none."""
        found: dict[str, Any] = {"lens": ()}
        flags = {"causal", "sinks", "pairs", "append", "hnd", "bhsd", "ragged", "used", "i64", "poison", "invariant"}
        for token in text.strip().split("-"):
            if token in LAYOUTS:
                found["layout"] = token
            elif token in DTYPES:
                found["dtype"] = token
            elif token in KV_DTYPES:
                found["kv"] = token
            elif token in flags:
                found[token] = True
            elif token in ("alibi", "alibib"):
                found["alibi"] = token
            elif token in ("bias", "biask", "biasb"):
                found["bias"] = token
            elif token in ("scale", "scale0", "scaleh", "scaleb"):
                found["scale"] = token
            elif m := re.fullmatch(r"h(\d+)x(\d+)", token):
                found["heads"], found["heads_kv"] = int(m[1]), int(m[2])
            elif m := re.fullmatch(r"d(\d+)(?:v(\d+))?", token):
                found["dim"], found["dim_v"] = int(m[1]), int(m[2] or 0)
            elif m := re.fullmatch(r"p(\d+)", token):
                found["page"] = int(m[1])
            elif m := re.fullmatch(r"w(\d+|x)\.(\d+|x)", token):
                found["window"] = tuple(-1 if w == "x" else int(w) for w in m.groups())
            elif m := re.fullmatch(r"cap(\d+(?:\.\d+)?)", token):
                found["cap"] = float(m[1])
            elif m := re.fullmatch(r"rope(\d+)", token):
                found["rope"] = int(m[1])
            elif m := re.fullmatch(r"splits(\d+)", token):
                found["splits"] = int(m[1])
            elif re.fullmatch(r"q\d+k\d+(\*\d+)?(\+q\d+k\d+(\*\d+)?)*", token):
                lens: list[tuple[int, int]] = []
                for q, k, n in re.findall(r"q(\d+)k(\d+)(?:\*(\d+))?", token):
                    lens += [(int(q), int(k))] * int(n or 1)
                found["lens"] = tuple(lens)
            elif token != "empty":
                raise ValueError(f"case {text!r}: {token!r} is not a part of a case id")
        return cls(**found)

    @property
    def qlen(self) -> int:
        return max((q for q, _ in self.lens), default=0)

    @property
    def klen(self) -> int:
        return max((k for _, k in self.lens), default=0)


class Call(NamedTuple):
    """One call: the function's name, its arguments, and which of its rows count (None: all)."""

    function: str
    args: tuple
    kwargs: dict[str, Any]
    rows: Tensor | None = None

    def replace(self, **kwargs: Any) -> Call:
        """The call with other keyword arguments; None takes one out."""
        merged = {**self.kwargs, **kwargs}
        return self._replace(kwargs={k: v for k, v in merged.items() if v is not None})

    def map(self, change) -> Call:
        """The call with `change` applied to every tensor."""
        def one(x):
            return change(x) if isinstance(x, Tensor) else x
        return self._replace(args=tuple(map(one, self.args)), kwargs={k: one(v) for k, v in self.kwargs.items()})


def torch_dtype(short: str) -> torch.dtype:
    return getattr(torch, DTYPES.get(short) or KV_DTYPES[short])


class Draw:
    """Seeded numbers, drawn on the CPU and moved, so that every device sees the same."""

    def __init__(self, seed: str | int, device: str = "cpu"):
        self.seed = zlib.crc32(seed.encode()) if isinstance(seed, str) else seed
        self.generator = torch.Generator().manual_seed(self.seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * gain).to(dtype).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).to(self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def poison(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """NaN, Inf and -Inf, one of them a row."""
        pick = torch.randint(3, (*shape[:-1], 1), generator=self.generator)
        value = torch.tensor([float("nan"), float("inf"), float("-inf")])[pick].expand(shape).clone()
        return cast(value, dtype).to(self.device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; in 8-bit types values saturate, but Inf becomes NaN, which all of them have."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    from ..reference import quantize

    return quantize(x.masked_fill(x.isinf(), float("nan")), dtype)


def build(case: Case, device: str = "cpu") -> Call:
    """The call of a case, its tensors on `device`."""
    return {"dense": _dense, "varlen": _varlen, "paged": _paged}[case.layout](case, Draw(str(case), device))


def _options(case: Case, draw: Draw) -> dict[str, Any]:
    batch, kwargs = len(case.lens), {}
    if case.causal:
        kwargs["causal"] = True
    if case.window != (-1, -1):
        kwargs["window_size"] = case.window
    if case.cap:
        kwargs["softcap"] = case.cap
    if case.sinks:
        kwargs["sinks"] = draw.uniform(case.heads, low=1.0, high=4.0)
    if case.alibi:
        kwargs["alibi_slopes"] = draw.uniform(*((batch, case.heads) if case.alibi == "alibib" else (case.heads,)), low=0.05,
                                              high=0.6)
    if case.splits:
        kwargs["num_splits"] = case.splits
    if case.invariant:
        kwargs["batch_invariant"] = True
    return kwargs


def _inner(draw: Draw, case: Case, *shape: int, gain: float = 1.0, guard: int = 3) -> Tensor:
    """(B, S, H, D): with poison a view into a larger buffer, poisoned around along S."""
    dtype = torch_dtype(case.dtype)
    values = draw.normal(*shape, dtype=dtype, gain=gain)
    if not case.poison:
        return values
    batch, rows, *rest = shape
    buffer = draw.poison(batch, rows + 2 * guard, *rest, dtype=dtype)
    buffer[:, guard : guard + rows] = values
    return buffer[:, guard : guard + rows]


def _dense(case: Case, draw: Draw) -> Call:
    batch, (len_q, len_k) = len(case.lens), (case.lens[0] if case.lens else (3, 5))
    if any(pair != (len_q, len_k) for pair in case.lens):
        raise ValueError(f"case {case}: dense sequences are equally long")
    q = _inner(draw, case, batch, len_q, case.heads, case.dim, gain=2.0)
    k = _inner(draw, case, batch, len_k, case.heads_kv, case.dim)
    v = _inner(draw, case, batch, len_k, case.heads_kv, case.dim_v or case.dim)
    kwargs = _options(case, draw)
    if case.bias == "biasb":
        kwargs["bias"] = draw.uniform(batch, 1, len_q, len_k) > 0.3
    elif case.bias:
        bias = draw.normal(*((len_k,) if case.bias == "biask" else (batch, case.heads, len_q, len_k)), gain=2.0)
        kwargs["bias"] = bias.masked_fill(draw.uniform(*bias.shape) < 0.15, float("-inf"))
    if case.bhsd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        kwargs["layout"] = "bhsd"
    return Call("attention", (q, k, v), kwargs)


def _sums(lens, device: str, i64: bool) -> Tensor:
    sums = [0]
    for n in lens:
        sums.append(sums[-1] + n)
    return torch.tensor(sums, dtype=torch.int64 if i64 else torch.int32, device=device)


def _varlen(case: Case, draw: Draw) -> Call:
    dtype, dim_v = torch_dtype(case.dtype), case.dim_v or case.dim
    spare = 7 if case.poison else 0  # rows that belong to no sequence
    span = [k + (3 + b % 4 if case.used else 0) for b, (_, k) in enumerate(case.lens)]
    total_q, total_k = sum(q for q, _ in case.lens), sum(span)
    q = draw.normal(total_q + spare, case.heads, case.dim, dtype=dtype, gain=2.0)
    k = draw.normal(total_k + spare, case.heads_kv, case.dim, dtype=dtype)
    v = draw.normal(total_k + spare, case.heads_kv, dim_v, dtype=dtype)
    cu_q, cu_k = _sums((n for n, _ in case.lens), draw.device, case.i64), _sums(span, draw.device, case.i64)
    kwargs = _options(case, draw)
    if case.used:
        kwargs["seqused_k"] = torch.tensor([k for _, k in case.lens], dtype=torch.int32, device=draw.device)
    if case.poison:
        unread = torch.ones(total_k + spare, dtype=torch.bool)
        for start, (_, n) in zip(cu_k.tolist(), case.lens):
            unread[start : start + n] = False
        unread = unread.to(draw.device)
        q[total_q:] = draw.poison(spare, case.heads, case.dim, dtype=dtype)
        k[unread] = draw.poison(int(unread.sum()), case.heads_kv, case.dim, dtype=dtype)
        v[unread] = draw.poison(int(unread.sum()), case.heads_kv, dim_v, dtype=dtype)
    rows = torch.arange(total_q + spare) < total_q
    return Call("attention_varlen", (q, k, v, cu_q, cu_k, case.qlen, max(span, default=0)), kwargs, rows)


def _paged(case: Case, draw: Draw) -> Call:
    dtype, dim_v, page, batch = torch_dtype(case.dtype), case.dim_v or case.dim, case.page or 16, len(case.lens)
    cache_dtype = torch_dtype(case.kv or case.dtype)
    device = draw.device
    needed = [-(-k // page) for _, k in case.lens]
    width = max(needed, default=0) + 2
    spare = 3  # pages that belong to no sequence
    ids = draw.permutation(sum(needed) + spare).tolist()
    unused, ids = ids[:spare], ids[spare:]
    junk = [-1, INT32_MAX, *unused] if case.poison else unused
    table = torch.tensor([junk[i % len(junk)] for i in range(batch * width)], dtype=torch.int64 if case.i64 else torch.int32)
    table = table.view(batch, width)
    caches = []
    for dim in (case.dim, dim_v):
        shape = (sum(needed) + spare, page, case.heads_kv, dim)
        values = cast(draw.normal(*shape), cache_dtype)
        caches.append((values, draw.poison(*shape, dtype=cache_dtype) if case.poison else cast(draw.normal(*shape), cache_dtype)))
    written = torch.zeros(sum(needed) + spare, page, dtype=torch.bool)
    at = 0
    for b, (n_q, n_k) in enumerate(case.lens):
        pages = torch.tensor(ids[at : at + needed[b]], dtype=torch.long)
        at += needed[b]
        table[b, : needed[b]] = pages
        held = torch.arange(max(n_k - n_q, 0) if case.append else n_k)
        written[pages[held // page], held % page] = True
    k_cache, v_cache = (torch.where(written.to(device)[..., None, None], _bits(a), _bits(b)).view(a.dtype) for a, b in caches)
    if case.hnd:
        k_cache, v_cache = (_bits(c).transpose(1, 2).contiguous().view(c.dtype) for c in (k_cache, v_cache))
    kwargs = _options(case, draw)
    lens = torch.tensor([k for _, k in case.lens], dtype=torch.int64 if case.i64 else torch.int32, device=device)

    lens_q = [n for n, _ in case.lens]
    ragged = case.ragged or len(set(lens_q)) > 1
    spare_rows = 4 if ragged and case.poison else 0
    total = sum(lens_q) + spare_rows

    def rows(heads: int, dim: int, gain: float = 1.0) -> Tensor:
        x = draw.normal(total, heads, dim, dtype=dtype, gain=gain)
        if spare_rows:
            x[-spare_rows:] = draw.poison(spare_rows, heads, dim, dtype=dtype)
        return x if ragged else x.view(batch, case.qlen, heads, dim)

    q = rows(case.heads, case.dim, 2.0)
    if case.append:
        kwargs["k"], kwargs["v"] = rows(case.heads_kv, case.dim), rows(case.heads_kv, dim_v)
    if case.rope:
        angle = draw.uniform(max(case.klen, 1) + 3, case.rope // 2, low=-3.0, high=3.0)
        kwargs["rotary_cos"], kwargs["rotary_sin"] = angle.cos(), angle.sin()
        if case.pairs:
            kwargs["rotary_interleaved"] = True
    if case.hnd:
        kwargs["kv_layout"] = "HND"
    if case.scale:
        shape = {"scale": (), "scale0": (), "scaleh": (case.heads_kv,), "scaleb": (batch, case.heads_kv)}[case.scale]
        for name in ("k_scale", "v_scale"):
            factor = torch.exp2(draw.uniform(*shape, low=-1.5, high=1.5))
            kwargs[name] = float(factor) if case.scale == "scale" else factor
    if ragged:
        kwargs["cu_seqlens_q"], kwargs["max_seqlen_q"] = _sums(lens_q, device, case.i64), case.qlen
    counted = torch.arange(total) < total - spare_rows
    if case.rope:  # a row at a negative position has no angle
        positions = [i + n_k - n_q >= 0 for n_q, n_k in case.lens for i in range(n_q)]
        counted[: len(positions)] &= torch.tensor(positions, dtype=torch.bool)
    return Call("attention_paged", (q, k_cache, v_cache, table.to(device), lens), kwargs,
                counted if ragged else counted.view(batch, case.qlen))


def _bits(x: Tensor) -> Tensor:
    """8-bit floats as bytes, for operators that torch lacks on them."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def cases(text: str) -> list[Case]:
    """Cases of ids, one a line; text after # is left out."""
    return [Case.parse(line) for line in (raw.split("#")[0].strip() for raw in text.splitlines()) if line]
