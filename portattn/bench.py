"""`portattn bench`: what portattn costs and gains on this machine, as medians and ratios of one run.

    import    seconds of `import portattn` after `import torch`, in child processes, and what it must not do
    overhead  Python's cost of one call: tiny CPU call minus the fewest torch calls that compute the same
    dense, varlen, decode, mixed
              against plain torch: what torch offers (`sdpa`), and the same tiled or gathered by hand at its best
    memory    peak extra memory of 8192 tokens x 40 heads in float32 with every feature, in a child process

Every result is compared with its peers first: a wrong one is reported, not timed. The contenders of a workload take
turns, round after round in rotating order, so that a disturbance meets all of them; ratios are medians of the ratios
within a round, with their quartiles. Absolute times are this machine's at this moment; use the ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import api
from .survey import child_environment

SUITES = ("import", "overhead", "dense", "varlen", "decode", "mixed", "memory")
SAMPLE_S = 5e-3  # a timed sample repeats a call up to this length
FAR_BEHIND = 6.0  # a peer this many times slower than the best sits out after three rounds
TILE = 64  # query rows a tile of the hand-tiled peer: the best of 64, 128 and 256 on x86
LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # largest relative difference (2-norm) of two right results
HEADS, HEADS_KV, DIM, PAGE = 32, 8, 128, 16
RAGGED = (40, 64, 96, 100, 128, 150, 200, 220, 256, 300, 333, 400, 450, 512, 700, 1024)

Contenders = dict[str, Callable[[], Tensor]]


class Line(NamedTuple):
    """One measurement. value: in `unit`; ratio: best peer's time over ours (above 1: we are faster), with quartiles."""

    suite: str
    what: str
    value: float
    unit: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    against: str = ""
    note: str = ""


# ------------------------------------------------------------------ timing
def seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def race(calls: Contenders, budget_s: float, patience: float = FAR_BEHIND) -> dict[str, list[float | None]]:
    """Seconds a call of each contender, round by round; None where one `patience` times slower than the best sat out."""
    rough = {name: min(seconds(fn) for _ in range(2)) for name, fn in calls.items()}
    repeats = {name: max(1, min(200, math.ceil(SAMPLE_S / t))) for name, t in rough.items()}
    behind = {name for name, t in rough.items() if t > patience * min(rough.values())}
    times: dict[str, list[float | None]] = {name: [] for name in calls}
    names, rounds, start = list(calls), 0, time.perf_counter()
    while rounds < 5 or (time.perf_counter() - start < budget_s and rounds < 60):
        turn = rounds % len(names)
        for name in names[turn:] + names[:turn]:
            if name in behind and rounds >= 3:
                times[name].append(None)
                continue
            fn, n = calls[name], repeats[name]
            times[name].append(seconds(lambda: [fn() for _ in range(n)]) / n)
        rounds += 1
    return times


def stalled() -> bool:
    """Whether other jobs preempt this one's threads: small parallel operations then wait for each other's time slices."""
    x, waited, total = torch.zeros(1 << 18), 0.0, 0.0
    while total < 0.1:
        took = seconds(lambda: x.add_(1))  # some 50 us with the cores free
        total += took
        waited += took if took > 1e-3 else 0.0
    return torch.get_num_threads() > 1 and waited > 0.2 * total


def median(values: list[float | None]) -> float:
    return statistics.median(v for v in values if v is not None)


def compare(theirs: list[float | None], ours: list[float | None]) -> tuple[float, float, float]:
    """Median and quartiles of theirs / ours over the rounds that both ran."""
    low, mid, high = statistics.quantiles([a / b for a, b in zip(theirs, ours) if a is not None and b is not None], n=4)
    return mid, low, high


def difference(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def contest(suite: str, what: str, calls: Contenders, budget_s: float, dtype: torch.dtype) -> list[Line]:
    """Times `calls`, the first of which is ours; a peer that computes something else is named and left out."""
    ours = next(iter(calls))
    want, lines = calls[ours](), []
    for name in list(calls)[1:]:
        if (off := difference(want, calls[name]())) > LIMIT[dtype]:
            lines.append(Line(suite, what, math.nan, "", note=f"{ours} and {name} differ by {off:.2g}"))
            del calls[name]
    times = race(calls, budget_s)
    medians = {name: median(t) for name, t in times.items()}
    for name in sorted((n for n in calls if n != ours), key=medians.get):
        mid, low, high = compare(times[name], times[ours])
        lines.append(Line(suite, what, medians[ours] * 1e3, "ms", mid, low, high, name))
    return lines


# ------------------------------------------------------------------ plain torch at its best
def hidden(len_q: int, len_k: int) -> Tensor | None:
    """Mask (True attends) of causal attention aligned bottom-right; None where every key is visible."""
    return None if len_q == 1 else torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, square: bool) -> Tensor:
    """One sequence (Lq, Hq, D) over (Lk, Hkv, D) by torch's own operator."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if square else mask, is_causal=square, enable_gqa=True)
    return out[0].transpose(0, 1)


def torch_tiled(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """One causal sequence as two batched matmuls a tile of query rows; a group's heads are rows of one matrix."""
    (len_q, heads, dim), (len_k, heads_kv, _) = q.shape, k.shape
    group = heads // heads_kv
    keys, values = k.permute(1, 2, 0).contiguous(), v.transpose(0, 1).contiguous()
    by_group = q.unflatten(1, (heads_kv, group))
    triangle = torch.ones(TILE, TILE, dtype=torch.bool).triu(1)
    for first in range(0, len_q, TILE):
        rows = min(TILE, len_q - first)
        seen = first + rows + len_k - len_q
        tile = by_group[first : first + rows].permute(1, 2, 0, 3).reshape(heads_kv, group * rows, dim)
        scores = (tile @ keys[:, :, :seen]).float().mul_(dim**-0.5).unflatten(1, (group, rows))
        scores[..., seen - rows :].masked_fill_(triangle[:rows, :rows], -math.inf)
        weights = scores.softmax(-1).to(q.dtype).flatten(1, 2)
        out[first : first + rows] = (weights @ values[:, :seen]).unflatten(1, (group, rows)).permute(2, 0, 1, 3).flatten(1, 2)


class Pages:
    """Random caches of a batch, pages in random order, and the gathers that plain torch needs."""

    def __init__(self, lens: tuple[int, ...], dtype: torch.dtype):
        counts = [-(-n // PAGE) for n in lens]
        self.k, self.v = (torch.randn(sum(counts), PAGE, HEADS_KV, DIM).to(dtype) for _ in range(2))
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        for b, ids in enumerate(torch.randperm(sum(counts)).to(torch.int32).split(counts)):
            self.table[b, : len(ids)] = ids

    def gather(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        ids = self.table[b, : -(-length // PAGE)]
        return tuple(c.index_select(0, ids).flatten(0, 1)[:length] for c in (self.k, self.v))  # type: ignore[return-value]

    def decode(self, q: Tensor, batch: int, length: int) -> Callable[[], Tensor]:
        """`batch` sequences of one length, one query each: pages gathered into kept buffers, the group folded into rows."""
        ids = self.table[:batch, : -(-length // PAGE)].flatten()
        kept = [c.new_empty(len(ids), *c.shape[1:]) for c in (self.k, self.v)]
        folded = q[:batch].view(batch, HEADS_KV, HEADS // HEADS_KV, DIM)

        def run() -> Tensor:
            k, v = (torch.index_select(c, 0, ids, out=buffer).view(batch, -1, HEADS_KV, DIM)[:, :length].transpose(1, 2)
                    for c, buffer in zip((self.k, self.v), kept))
            return F.scaled_dot_product_attention(folded, k, v).reshape(batch, HEADS, DIM)

        return run


# ------------------------------------------------------------------ the suites
def dense(quick: bool, budget_s: float) -> list[Line]:
    shapes = [(1, 1024, torch.bfloat16), (1, 512, torch.float32)]
    shapes += [] if quick else [(4, 256, torch.bfloat16), (1, 4096, torch.bfloat16), (1, 1024, torch.float32)]
    return [line for shape in shapes for line in _dense(*shape, budget_s)]


def _dense(batch: int, length: int, dtype: torch.dtype, budget_s: float) -> list[Line]:
    q = torch.randn(batch, length, HEADS, DIM).to(dtype)
    k, v = (torch.randn(batch, length, HEADS_KV, DIM).to(dtype) for _ in range(2))
    out, ours = torch.empty_like(q), torch.empty_like(q)
    q_t, k_t, v_t = (x.transpose(1, 2) for x in (q, k, v))

    def tiled() -> Tensor:
        for b in range(batch):
            torch_tiled(q[b], k[b], v[b], out[b])
        return out

    return contest("dense", f"{batch} x {length} causal {short(dtype)}", {
        "portattn": lambda: api.attention(q, k, v, causal=True, out=ours),
        "sdpa": lambda: F.scaled_dot_product_attention(q_t, k_t, v_t, is_causal=True, enable_gqa=True).transpose(1, 2),
        "tiled": tiled,
    }, budget_s, dtype)


def varlen(quick: bool, budget_s: float) -> list[Line]:
    lens, dtypes = (RAGGED[::2], [torch.bfloat16]) if quick else (RAGGED, [torch.bfloat16, torch.float32])
    return [line for dtype in dtypes for line in _varlen(lens, dtype, budget_s)]


def _varlen(lens: tuple[int, ...], dtype: torch.dtype, budget_s: float) -> list[Line]:
    starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(lens), HEADS, DIM).to(dtype)
    k, v = (torch.randn(sum(lens), HEADS_KV, DIM).to(dtype) for _ in range(2))
    out, ours = torch.empty_like(q), torch.empty_like(q)

    def loop(one: Callable) -> Callable[[], Tensor]:
        def run() -> Tensor:
            end = 0
            for length in lens:
                rows, end = slice(end, end + length), end + length
                one(q[rows], k[rows], v[rows], out[rows])
            return out

        return run

    return contest("varlen", f"{len(lens)} sequences, {sum(lens)} tokens {short(dtype)}", {
        "portattn": lambda: api.attention_varlen(q, k, v, starts, starts, max(lens), max(lens), causal=True, out=ours),
        "sdpa loop": loop(lambda q, k, v, out: out.copy_(torch_sdpa(q, k, v, None, True))),
        "tiled": loop(torch_tiled),
    }, budget_s, dtype)


def decode(quick: bool, budget_s: float) -> list[Line]:
    sizes = [(1, 1024), (8, 1024)] + ([] if quick else [(1, 8192), (8, 8192)])
    return [line for size in sizes for line in _decode(*size, torch.bfloat16, budget_s)]


def _decode(batch: int, length: int, dtype: torch.dtype, budget_s: float) -> list[Line]:
    pages = Pages((length,) * batch, dtype)
    q = torch.randn(batch, HEADS, DIM).to(dtype)
    ours = torch.empty(batch, 1, HEADS, DIM, dtype=dtype)
    ids = pages.table.flatten()

    def gathered() -> Tensor:
        k, v = (c.index_select(0, ids).view(batch, -1, HEADS_KV, DIM)[:, :length].transpose(1, 2) for c in (pages.k, pages.v))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return contest(
        "decode",
        f"{batch} x {length}, page {PAGE} {short(dtype)}",
        {
            "portattn": lambda: api.attention_paged(q[:, None], pages.k, pages.v, pages.table, pages.lens, causal=True, out=ours)[
                :, 0
            ],
            "gather + fold": pages.decode(q, batch, length),
            "gather + sdpa": gathered,
        },
        budget_s,
        dtype,
    )


def mixed(quick: bool, budget_s: float) -> list[Line]:
    """Decodes and chunked prefills in one batch. The peer runs the decodes at once and each chunk by itself."""
    dtype = torch.bfloat16
    decodes, chunks = (6, 1) if quick else (12, 2)
    q_lens, k_lens = (1,) * decodes + (256,) * chunks, (2048,) * decodes + (1024,) * chunks
    pages = Pages(k_lens, dtype)
    q = torch.randn(sum(q_lens), HEADS, DIM).to(dtype)
    out, ours = torch.empty_like(q), torch.empty_like(q)
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    mask, decoded = hidden(256, 1024), pages.decode(q, decodes, 2048)

    def apart(one: Callable) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out[:decodes] = decoded()
            for i in range(chunks):
                rows = slice(decodes + 256 * i, decodes + 256 * (i + 1))
                one(q[rows], *pages.gather(decodes + i, 1024), out[rows])
            return out

        return run

    return contest(
        "mixed",
        f"{decodes} decodes of 2048, {chunks} x 256 of 1024 {short(dtype)}",
        {
            "portattn": lambda: api.attention_paged(
                q, pages.k, pages.v, pages.table, pages.lens, cu_seqlens_q=starts, max_seqlen_q=256, causal=True, out=ours
            ),
            "gather + fold, sdpa": apart(lambda q, k, v, out: out.copy_(torch_sdpa(q, k, v, mask, False))),
            "gather + fold, tiled": apart(torch_tiled),
        },
        budget_s,
        dtype,
    )


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


# ------------------------------------------------------------------ overhead
def overhead(quick: bool, budget_s: float) -> list[Line]:
    """Microseconds that a call takes beyond the fewest torch calls that compute the same, on float32 of a few tokens.

    On one thread: work this small gains nothing from others, and waiting for them is not Python's cost.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_extra(what, ours, plain, budget_s) for what, (ours, plain) in _tiny_calls().items()]
    finally:
        torch.set_num_threads(threads)


def _extra(what: str, ours: Callable[[], Tensor], plain: Callable[[], Tensor], budget_s: float) -> Line:
    if (off := difference(ours(), plain())) > LIMIT[torch.float32]:
        return Line("overhead", what, math.nan, "us", note=f"differs from plain torch by {off:.2g}")
    times = race({"portattn": ours, "torch": plain}, budget_s, patience=math.inf)
    low, mid, high = (x * 1e6 for x in statistics.quantiles([a - b for a, b in zip(*times.values())], n=4))
    both = {name: median(t) * 1e6 for name, t in times.items()}
    return Line("overhead", what, mid, "us",
                note=f"{low:.1f} to {high:.1f}; the call takes {both['portattn']:.1f}, torch's {both['torch']:.1f}")


def _tiny_calls() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """(our call, the fewest torch calls that compute the same) by name."""
    heads, kv, dim, n = 4, 2, 32, 8
    q, k, v = torch.randn(1, n, heads, dim), torch.randn(1, n, kv, dim), torch.randn(1, n, kv, dim)
    ragged = [x[0] for x in (q, k, v)]
    starts = torch.tensor([0, n], dtype=torch.int32)
    pages = [torch.randn(2, PAGE, kv, dim) for _ in range(2)]
    one, table, lens = torch.randn(1, 1, heads, dim), torch.tensor([[1]], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    slopes, sinks, bias, cap = torch.rand(heads), torch.rand(heads), torch.randn(1, heads, n, n), 20.0
    position = torch.arange(n)
    distance = (position[:, None] - position).abs()
    mask = (position > position[:, None]) | (position < position[:, None] - 4)
    alibi_and_bias = (bias - slopes[:, None, None] * distance).masked_fill(mask, -math.inf)
    scale = dim**-0.5

    def plain_dense() -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    def plain_varlen() -> Tensor:
        return torch_sdpa(*ragged, None, True)

    def plain_paged() -> Tensor:
        # One sequence on one page: a gather of its page, the group folded into rows.
        gathered = (c.index_select(0, table[0])[:, :n].transpose(1, 2) for c in pages)
        return F.scaled_dot_product_attention(one.view(1, kv, heads // kv, dim), *gathered).view(1, 1, heads, dim)

    def plain_everything() -> Tensor:
        folded = q.transpose(1, 2).unflatten(1, (kv, heads // kv))
        scores = (
            (folded @ k.permute(0, 2, 3, 1)[:, :, None]).flatten(1, 2).mul_(scale / cap).tanh_().mul_(cap).add_(alibi_and_bias)
        )
        lse = torch.logaddexp(scores.logsumexp(-1), sinks[:, None])
        weights = scores.sub_(lse[..., None]).exp_()
        return (weights.unflatten(1, (kv, heads // kv)) @ v.transpose(1, 2)[:, :, None]).flatten(1, 2).transpose(1, 2)

    everything: dict[str, Any] = dict(
        causal=True,
        window_size=(4, 0),
        softmax_scale=scale,
        softcap=cap,
        bias=bias,
        alibi_slopes=slopes,
        sinks=sinks,
        return_lse=True,
    )
    return {
        "dense": (lambda: api.attention(q, k, v, causal=True), plain_dense),
        "varlen": (lambda: api.attention_varlen(*ragged, starts, starts, n, n, causal=True), plain_varlen),
        "paged": (lambda: api.attention_paged(one, *pages, table, lens, causal=True), plain_paged),
        "every feature named": (lambda: api.attention(q, k, v, **everything)[0], plain_everything),
    }


# ------------------------------------------------------------------ child processes
_IMPORT = """
import sys, threading, time
import torch
threads, start = threading.active_count(), time.perf_counter()
import portattn
took = time.perf_counter() - start
print(took, torch.cuda.is_initialized(), "triton" in sys.modules, threading.active_count() > threads)
"""

_MEMORY = """
import torch
from portattn.bench import peak_of_everything
print(peak_of_everything(int({tokens}), int({heads})))
"""


def child(code: str) -> str:
    """What a fresh Python prints that finds this portattn, wherever it lies."""
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.strip()


def import_cost(quick: bool, budget_s: float) -> list[Line]:
    child(_IMPORT)  # compiles the .pyc files
    runs = [child(_IMPORT).split() for _ in range(3 if quick else 7)]
    took = sorted(float(run[0]) * 1e3 for run in runs)
    done = [what for i, what in enumerate(("a CUDA context", "an import of triton", "a thread"), 1) if runs[0][i] == "True"]
    note = f"{took[0]:.0f} to {took[-1]:.0f}; " + (
        "makes " + ", ".join(done) if done else "no CUDA context, no triton, no thread"
    )
    return [Line("import", "import portattn after import torch", statistics.median(took), "ms", note=note)]


def resident() -> tuple[int, int]:
    """(bytes of memory in use now, the most so far). Raises ImportError where the system does not tell (Windows)."""
    try:
        with open("/proc/self/status", encoding="ascii") as f:
            fields = dict(line.split(":", 1) for line in f)
        # Not ru_maxrss: a child starts with its parent's there.
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return most, most


def peak_of_everything(tokens: int, heads: int, dim: int = 64) -> int:
    """Bytes beyond inputs and output that one float32 call with every feature of a dense call needs at its peak."""
    q, k, v, out = (torch.randn(1, tokens, h, dim) for h in (heads, heads // 5, heads // 5, heads))
    kw: dict[str, Any] = dict(causal=True, window_size=(tokens, 0), softcap=20.0, alibi_slopes=torch.rand(heads),
                              sinks=torch.rand(heads), return_lse=True)
    few = min(64, tokens)
    api.attention(q[:, :few], k[:, :few], v[:, :few], bias=torch.randn(1, heads, 1, few), **kw)  # threads and libraries start
    bias = torch.randn(1, heads, 1, tokens)
    before = resident()[0]
    api.attention(q, k, v, bias=bias, out=out, **kw)
    return max(0, resident()[1] - before)


def memory(quick: bool, budget_s: float) -> list[Line]:
    tokens, heads = (2048 if quick else 8192), 40
    what = f"{tokens} tokens x {heads} heads fp32, every feature"
    try:
        resident()
    except ImportError:
        return [Line("memory", what, math.nan, "MB", note="not measured: this system does not tell a process its peak memory")]
    extra = int(child(_MEMORY.format(tokens=tokens, heads=heads))) / 1e6
    return [
        Line(
            "memory",
            what,
            extra,
            "MB",
            note=f"peak beyond inputs and output; all scores at once would be {tokens**2 * heads * 4 / 1e6:.0f} MB",
        )
    ]


RUN: dict[str, Callable[[bool, float], list[Line]]] = {
    "import": import_cost,
    "overhead": overhead,
    "dense": dense,
    "varlen": varlen,
    "decode": decode,
    "mixed": mixed,
    "memory": memory,
}


# ------------------------------------------------------------------ report
def rows(lines: list[Line]) -> list[str]:
    """The lines as text; a workload's name and our time stand before the first of its peers only."""
    found, last = [], None
    for line in lines:
        text = f"  {'' if line.what == last else line.what:<46} "
        text += f"{line.value:8.3g} {line.unit:<3}" if math.isfinite(line.value) and line.what != last else f"{'':12}"
        if line.ratio is not None:
            text += f" {line.ratio:6.2f} x {line.against} ({line.low:.2f} to {line.high:.2f})"
        found.append(f"{text} {line.note}".rstrip())
        last = line.what if math.isfinite(line.value) else None
    return found


def main(argv: list[str] | None = None) -> int:
    """`portattn bench`. Exit code 0; 1 if something could not be measured or a result was wrong."""
    ap = argparse.ArgumentParser(
        prog="portattn bench",
        description="What portattn costs and gains on this machine's CPU: medians, and how many times faster than plain torch.",
        epilog="Exit code: 0 all measured, 1 a suite failed or a result was wrong.",
    )
    ap.add_argument("--suites", default=",".join(SUITES), help=f"comma-separated, of {', '.join(SUITES)}")
    ap.add_argument("--quick", action="store_true", help="fewer and smaller workloads, half a minute")
    ap.add_argument("--seconds", type=float, help="timing budget of a workload (default 3, with --quick 0.5)")
    ap.add_argument("--threads", type=int, help="default: torch's, or 1 where other jobs preempt them")
    ap.add_argument("--json", metavar="FILE", help="also write the measurements to a file (-: only print them, as JSON)")
    args = ap.parse_args(argv)
    suites = [name.strip() for name in args.suites.split(",") if name.strip()]
    for name in suites:
        if name not in RUN:
            ap.error(f"--suites: unknown {name!r}; known: {', '.join(SUITES)}")
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        ap.error(f"--seconds: wanted more than 0, got {args.seconds:g}")
    if args.threads is not None and args.threads < 1:
        ap.error(f"--threads: wanted at least 1, got {args.threads}")
    if args.json not in (None, "-"):
        try:
            open(args.json, "a").close()  # said now, not after minutes of measuring
        except OSError as exc:
            ap.error(f"--json: {exc}")
    threads = torch.get_num_threads()
    busy = not args.threads and stalled()
    torch.set_num_threads(args.threads or (1 if busy else threads))
    try:
        return _report(suites, args, busy)
    finally:
        torch.set_num_threads(threads)


def _report(suites: list[str], args: argparse.Namespace, busy: bool) -> int:
    from .version import __version__

    machine = {"portattn": __version__, "torch": torch.__version__, "threads": torch.get_num_threads(), "busy": busy,
               "cpu": torch.backends.cpu.get_cpu_capability()}
    progress, show = sys.stderr.isatty(), args.json != "-"
    if show:
        print("portattn {portattn}, torch {torch}, {cpu}, threads: {threads}".format(**machine)
              + (" (other jobs preempt more; --threads insists)" if busy else ""))
    torch.manual_seed(0)
    lines, failed = [], False
    with torch.inference_mode():
        for i, name in enumerate(suites):
            if progress:
                print(f"\r\x1b[K[{i + 1}/{len(suites)}] {name} …", end="", file=sys.stderr, flush=True)
            try:
                got = RUN[name](args.quick, args.seconds or (0.5 if args.quick else 3.0))
            except Exception as exc:
                got = [Line(name, "failed", math.nan, "", note=f"{type(exc).__name__}: {' '.join(str(exc).split())}")]
                failed = True
            failed |= any("differ" in line.note for line in got)
            lines += got
            if progress:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            if show:
                print(name, *rows(got), sep="\n", flush=True)
    if args.json:
        data = [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in line._asdict().items()} for line in lines]
        text = json.dumps({"machine": machine, "lines": data}, indent=2) + "\n"
        if args.json == "-":
            print(text, end="")
        else:
            with open(args.json, "w", encoding="utf-8") as f:
                f.write(text)
    return int(failed)
