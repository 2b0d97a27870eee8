"""C-ALIGN, C-WINDOW, C-EMPTY: who sees whom, and rows that see nobody."""

import torch

from .cases import Case
from .target import Target, bitwise_equal, rule
from .tolerance import Mismatch

INF = float("inf")


def one_hot_probe(target: Target, len_q: int, len_k: int, call: str, **kwargs) -> torch.Tensor:
    """(Lq, Lk) bool: which keys a row gives weight to, read off with equal scores and V = identity, on any layout."""
    draw = target.draw(0)
    q, k = draw.normal(len_q, 2, 8, gain=0.0), draw.normal(len_k, 1, 8, gain=0.0)
    v = torch.eye(len_k, device=target.device)[:, None, :].contiguous()
    if call == "dense":
        out = target.attention(q[None], k[None], v[None], **kwargs)[0]
    elif call == "varlen":  # behind another sequence, whose keys must not count
        cu_q = torch.tensor([0, 3, 3 + len_q], dtype=torch.int32, device=target.device)
        cu_k = torch.tensor([0, 2, 2 + len_k], dtype=torch.int32, device=target.device)
        pad = lambda x, n: torch.cat([x[:1].expand(n, -1, -1), x])
        out = target.attention_varlen(pad(q, 3), pad(k, 2), pad(v, 2), cu_q, cu_k, max(3, len_q), max(2, len_k), **kwargs)[3:]
    else:
        pages = -(-len_k // 4)
        fill = pages * 4 - len_k
        k_cache, v_cache = (torch.cat([x, x[:1].expand(fill, -1, -1)]).view(pages, 4, 1, -1).flip(0) for x in (k, v))
        table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=target.device)[None]
        lens = torch.tensor([len_k], dtype=torch.int32, device=target.device)
        out = target.attention_paged(q[None], k_cache.contiguous(), v_cache.contiguous(), table, lens, **kwargs)[0]
    if tuple(out.shape) != (len_q, 2, len_k):
        raise Mismatch(f"out: wanted {(len_q, 2, len_k)} without the leading axis, got {tuple(out.shape)}")
    if not bitwise_equal(out[:, 0], out[:, 1]):
        raise Mismatch("two query heads of one kv head see different keys")
    return out[:, 0].cpu() > 0


def wanted_mask(len_q: int, len_k: int, causal: bool, left: int, right: int) -> torch.Tensor:
    """By hand, key by key."""
    seen = torch.zeros(len_q, len_k, dtype=torch.bool)
    for i in range(len_q):
        position = i + len_k - len_q
        for j in range(len_k):
            seen[i, j] = not (causal and j > position or left >= 0 and j < position - left or right >= 0 and j > position + right)
    return seen


def hold_mask(target: Target, len_q: int, len_k: int, causal: bool = False, window=(-1, -1)) -> None:
    wanted = wanted_mask(len_q, len_k, causal, *window)
    kwargs = {"causal": True} if causal else {}
    if window != (-1, -1):
        kwargs["window_size"] = window
    calls = [c for c in ("dense", "varlen", "paged") if any(c in x.layouts for x in target.capabilities)]
    for call in calls:
        seen = one_hot_probe(target, len_q, len_k, call, **kwargs)
        if not torch.equal(seen, wanted):
            i = int((seen != wanted).any(1).nonzero()[0])
            raise Mismatch(f"{call}: Lq {len_q}, Lk {len_k}, causal {causal}, window {window}: row {i} sees keys "
                           f"{seen[i].nonzero().flatten().tolist()}, wanted {wanted[i].nonzero().flatten().tolist()}")


# ------------------------------------------------------------------ C-ALIGN
ALIGN = """
dense-f32-h2x2-d16-q2k6-causal
dense-f32-h2x2-d16-q6k2-causal
dense-f16-h4x4-d64-q64k64-causal
dense-bf16-h4x2-d64-q17k33*2-causal
dense-bf16-h4x2-d64-q65k130-causal
varlen-f32-h4x2-d32-q2k6+q6k2+q5k5+q1k17-causal
varlen-bf16-h4x2-d64-q33k64+q64k33+q1k1-causal
paged-f32-h4x2-d32-p4-q2k6+q6k2+q5k5+q1k17-causal
paged-bf16-h4x2-d64-p16-q7k40*3-causal
"""
ALIGN_FULL = """
dense-bf16-h4x2-d128-q257k513-causal
dense-f16-h4x2-d128-q513k257-causal
varlen-f16-h8x2-d64-q129k129+q127k255+q1k240+q63k65-causal
paged-f16-h8x2-d64-p16-q129k129+q127k255+q1k240+q63k65-causal
dense-f16-h4x4-d64-q2048k1024-causal
"""


@rule("C-ALIGN", ALIGN, ALIGN_FULL)
def test_causal_is_bottom_right(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-ALIGN")
def test_causal_row_sees_exactly_the_keys_up_to_its_position(target: Target) -> None:
    for len_q, len_k in ((2, 6), (6, 2), (5, 5), (1, 9), (9, 1), (16, 17), (33, 65)):
        hold_mask(target, len_q, len_k, causal=True)


@rule("C-ALIGN")
def test_without_causal_every_key_counts(target: Target) -> None:
    for len_q, len_k in ((1, 1), (3, 8), (8, 3), (17, 33)):
        hold_mask(target, len_q, len_k)


@rule("C-ALIGN", "dense-f16-h4x4-d64-q64k64-causal\ndense-bf16-h4x2-d64-q35k67-causal\nvarlen-bf16-h4x4-d64-q64k64+q9k30-causal")
def test_future_keys_do_not_change_a_row(target: Target, case: Case) -> None:
    """The last rows' own keys become huge; rows before them stay as they were."""
    call = target.build(case)
    before = target.run(call)
    q, k, v, *rest = call.args
    k, v = k.clone(), v.clone()
    last = (slice(None), slice(-1, None)) if case.layout == "dense" else (slice(-1, None),)
    k[last], v[last] = 1e4, 1e4
    after = target.run(call._replace(args=(q, k, v, *rest)))
    rows = (slice(None), slice(0, -1)) if case.layout == "dense" else (slice(0, -1),)
    if not torch.allclose(before[rows].float(), after[rows].float(), rtol=0, atol=1e-2):
        raise Mismatch("rows changed with the value of a key in their future")


@rule("C-ALIGN", "dense-f32-h4x2-d16-q6k2-causal\nvarlen-f32-h4x2-d16-q6k2+q9k4-causal\npaged-f32-h4x2-d16-p4-q6k2+q9k4-causal")
def test_rows_before_the_first_key_are_empty(target: Target, case: Case) -> None:
    out, lse = target.check(case)
    starts = [0] if case.layout == "dense" else [0, 6]
    out, lse = (x[0] if case.layout == "dense" and x is not None else x for x in (out, lse))
    for start, (len_q, len_k) in zip(starts, case.lens):
        hold_empty(out[start : start + len_q - len_k], None if lse is None else lse[start : start + len_q - len_k])


def hold_empty(out: torch.Tensor, lse: torch.Tensor | None, wanted_lse=-INF) -> None:
    """Exactly 0 and -inf (or the sink): not small, not NaN."""
    if not bool((out == 0).all()):
        raise Mismatch(f"a row that sees no key: wanted exactly 0, got {out.flatten()[:4].tolist()}")
    if lse is not None:
        wanted = torch.as_tensor(wanted_lse, dtype=torch.float32).to(lse.device).expand(lse.shape)
        if not torch.equal(lse, wanted):
            raise Mismatch(f"lse of a row that sees no key: wanted {wanted.flatten()[:4].tolist()}, got {lse.flatten()[:4].tolist()}")


# ------------------------------------------------------------------ C-WINDOW
@rule("C-WINDOW")
def test_window_is_inclusive_on_both_sides(target: Target) -> None:
    for window in ((0, 0), (3, 0), (0, 3), (2, 1), (1, 2), (16, 15)):
        for len_q, len_k in ((8, 8), (3, 12), (12, 5), (1, 20)):
            hold_mask(target, len_q, len_k, window=window)


@rule("C-WINDOW")
def test_window_of_one_open_side(target: Target) -> None:
    for window in ((-1, 0), (-1, 2), (2, -1), (0, -1)):
        for len_q, len_k in ((8, 8), (3, 12), (12, 5)):
            hold_mask(target, len_q, len_k, window=window)


@rule("C-WINDOW")
def test_window_intersects_with_causal(target: Target) -> None:
    for window in ((3, 0), (3, 5), (0, 0), (-1, 4), (2, -1)):
        for len_q, len_k in ((8, 8), (3, 12), (12, 5), (33, 40)):
            hold_mask(target, len_q, len_k, causal=True, window=window)


WINDOW = """
dense-f32-h4x2-d32-q33k33-w7.0
dense-f32-h4x2-d32-q33k70-causal-w15.0
dense-f16-h2x1-d64-q129k16-w32.64
dense-f16-h2x1-d64-q129k129-w32.64
dense-f16-h2x1-d64-q129k300-w32.64
dense-bf16-h4x2-d64-q65k65-causal-w16.0-sinks
dense-f32-h4x2-d32-q20k31-w4.3-sinks-cap3-alibi
varlen-bf16-h4x2-d64-q1k65+q31k31+q17k90-causal-w15.0
varlen-f32-h4x2-d32-q9k65+q31k31+q17k3-w5.2-sinks
paged-bf16-h8x2-d64-p16-q1k400+q1k129+q1k128+q1k5-causal-w127.0
paged-f32-h4x2-d32-p5-q1k65+q3k31+q17k30-causal-w9.0-sinks
paged-bf16-h4x2-d64-p16-q1k257-w31.0
"""
WINDOW_FULL = """
dense-bf16-h6x6-d64-q513k513-w15.0
dense-bf16-h8x2-d128-q257k600-causal-w128.0-sinks
varlen-f16-h8x2-d128-q240k241+q1k513+q300k300-causal-w63.0-cap5
paged-f16-h16x2-d128-p32-q1k1025*4+q1k3+q130k1000-causal-w255.0-sinks
paged-f16-h4x4-d64-p16-q5k250*3-causal-w0.0
"""


@rule("C-WINDOW", WINDOW, WINDOW_FULL)
def test_window_values(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-WINDOW", "dense-f16-h4x4-d64-q129k129\nvarlen-f16-h4x4-d64-q129k129+q40k77", "dense-f16-h8x8-d128-q513k513")
def test_windows_that_say_causal_equal_causal(target: Target, case: Case) -> None:
    """(-1, 0), (S, 0), (S - 1, 0), and causal with anything to the right, are causal."""
    call = target.build(case)
    for kwargs in ({"causal": True}, {"window_size": (-1, 0)}, {"window_size": (case.klen, 0)},
                   {"window_size": (case.klen - 1, 0)},
                   {"causal": True, "window_size": (-1, 9)}, {"causal": True, "window_size": (case.klen, -1)}):
        out, lse = target.with_lse(call, **kwargs)
        target.compare(call.replace(causal=True), out, lse)


@rule("C-WINDOW", "dense-f32-h4x2-d16-q5k9*2", )
def test_window_none_is_no_window(target: Target, case: Case) -> None:
    import portattn

    call = target.build(case)
    out = portattn.attention(*call.args, window_size=None, backend=target.backend)
    target.compare(call, out, None)


@rule("C-WINDOW", "dense-f32-h4x2-d16-q12k12-w2.0-sinks\npaged-f32-h4x2-d16-p4-q1k30*2-causal-w2.0-sinks")
def test_no_window_touches_a_sink(target: Target, case: Case) -> None:
    """A huge sink takes nearly all weight, however small the window."""
    call = target.build(case)
    call.kwargs["sinks"].fill_(12.0)
    out, _ = target.check(call)
    if float(out.abs().max()) > 0.05:
        raise Mismatch("a sink of 12 left the window's keys more than a trace of the weight")


@rule("C-WINDOW", "paged-bf16-h8x2-d64-p16-q1k400-w127.0\npaged-f32-h4x2-d32-p16-q3k200*2-causal-w20.0\n"
      "varlen-f32-h4x2-d32-q3k200+q1k90-causal-w20.0")
def test_values_left_of_the_window_do_not_matter(target: Target, case: Case) -> None:
    """Keys that no row sees become huge (finite: inside the length they are the caller's data)."""
    call = target.build(case)
    args = list(call.args)
    before, _ = target.with_lse(call)
    at = 0
    for b, (len_q, len_k) in enumerate(case.lens):
        unseen = max(len_k - len_q - case.window[0], 0)
        if case.layout == "paged":
            for j in range(unseen):
                slot = int(args[3][b, j // case.page]), j % case.page
                args[1][slot], args[2][slot] = 3e4, 3e4
        else:
            args[1][at : at + unseen], args[2][at : at + unseen] = 3e4, 3e4
        at += len_k
    after, _ = target.with_lse(call)
    if not torch.allclose(before.float(), after.float(), rtol=0, atol=2e-2 if case.dtype == "bf16" else 1e-5):
        raise Mismatch("out changed with the value of keys left of the window")


# ------------------------------------------------------------------ C-EMPTY
EMPTY = """
dense-f32-h4x2-d16-q3k0*2
dense-f32-h4x2-d16-q0k3*2
dense-f32-h4x2-d16-q0k0
dense-f16-h10x10-d64-empty
dense-bf16-h4x2-d64-q3k0-sinks
dense-f32-h4x2-d16-q7k3*2-causal-sinks
dense-f32-h4x2-d16-q3k0-bias
varlen-bf16-h9x3-d64-q0k0+q1k3+q0k0+q1k5-causal
varlen-f16-h4x4-d32-q96k96+q0k0*2+q12k12+q64k64+q0k0+q32k32
varlen-f32-h4x2-d16-q0k5+q3k0+q2k2+q0k0
varlen-f32-h4x2-d16-q0k0*3
varlen-f32-h4x2-d16-q5k0+q3k0-sinks
varlen-f32-h4x2-d16-empty
varlen-bf16-h2x2-d128-q8k0+q128k128-causal
varlen-bf16-h2x2-d192-q8k0+q8k16
varlen-f16-h8x8-d16-q1k1
paged-f16-h8x2-d64-p16-q1k0+q1k5
paged-f32-h4x2-d16-p4-q3k0*2-sinks
paged-f32-h4x2-d16-p4-q0k5+q3k0+q2k2+q0k0
paged-f32-h4x2-d16-p4-empty
paged-f32-h4x2-d16-p4-q0k7*2
paged-bf16-h8x2-d64-p16-q1k0*3-poison
"""


@rule("C-EMPTY", EMPTY)
def test_empty_batches_sequences_and_rows(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-EMPTY", "dense-f32-h4x2-d16-q3k0*2\nvarlen-bf16-h4x2-d16-q3k0+q2k0\npaged-f32-h4x2-d16-p4-q3k0*2\n"
      "dense-f16-h4x2-d16-q3k0*2-sinks\nvarlen-f32-h4x2-d16-q3k0+q2k0-sinks\npaged-f16-h4x2-d16-p4-q3k0*2-sinks\n"
      "paged-f32-h4x2-d16-p4-q3k0*2-sinks-splits4\npaged-f32-h4x2-d16-p4-q1k0*2-splits3")
def test_a_row_without_keys_is_zero_and_its_lse_the_sink(target: Target, case: Case) -> None:
    call = target.build(case)
    out, lse = target.with_lse(call)
    hold_empty(out, lse, call.kwargs.get("sinks", -INF))


@rule("C-EMPTY", "paged-f32-h4x2-d16-p4-q1k1*3", )
def test_negative_lengths_count_as_zero(target: Target, case: Case) -> None:
    call = target.build(case)
    call.args[4].copy_(torch.tensor([-1, 1, -7]))
    out, lse = target.check(call)
    hold_empty(out[0::2], None if lse is None else lse[0::2])


@rule("C-EMPTY", "dense-f32-h1x1-d4-q2k2\ndense-f16-h4x2-d64-q5k70*2\ndense-bf16-h1x1-d8-q2k2\ndense-bf16-h4x2-d64-q20k64*2")
def test_rows_masked_by_bias_are_empty(target: Target, case: Case) -> None:
    """Bool and -inf bias; the rows between them are not touched."""
    call = target.build(case)
    for bias in (torch.ones(case.qlen, case.klen, dtype=torch.bool), torch.zeros(case.qlen, case.klen)):
        bias[0] = False if bias.dtype == torch.bool else -INF
        out, lse = target.check(call.replace(bias=bias.to(target.device)))
        hold_empty(out[:, 0], None if lse is None else lse[:, 0])


@rule("C-EMPTY", "dense-f32-h4x4-d8-q16k16*2\nvarlen-f32-h4x2-d16-q5k9+q3k3\npaged-f32-h4x2-d16-p4-q1k9*2")
def test_a_nan_query_stays_nan(target: Target, case: Case) -> None:
    """A row is empty because it sees no key, not because its sum is not above 0."""
    call = target.build(case)
    call.args[0].flatten(0, -3)[0].fill_(float("nan"))
    target.check(call)
