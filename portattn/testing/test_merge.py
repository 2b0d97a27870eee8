"""C-MERGE and C-SPLIT: partial results, and what may change a bit."""

import torch

import portattn
from portattn import ArgumentError, reference

from .cases import Case, cases
from .target import Declined, Dishonest, Target, bitwise_equal, rule
from .tolerance import Mismatch, close_lse, close_out

INF = float("inf")


def states(target: Target, n: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, dim: int = 16) -> tuple[list,
                                                                                                                       list]:
    draw = target.draw(f"{n}{shape}{dtype}")
    return [draw.normal(*shape, dim, dtype=dtype) for _ in range(n)], [draw.normal(*shape, gain=3.0) for _ in range(n)]


def hold_merge(target: Target, outs, lses, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = target.merge_states(outs, lses, **kwargs)
    expected, expected_lse = reference.merge_states(outs, lses, **kwargs)
    plain, plain_lse = reference.plain(reference.merge_states, outs, lses, **kwargs)
    if out.dtype != outs[0].dtype:
        raise Mismatch(f"out: wanted {outs[0].dtype} as outs, got {out.dtype}")
    close_out(out, expected, plain, outs[0].dtype)
    close_lse(lse, expected_lse, plain_lse, torch.float32)
    return out, lse


@rule("C-MERGE")
def test_merge_of_any_number_and_type(target: Target) -> None:
    """One to five states; lists and stacked tensors; dense (B, S, H) and ragged (T, H)."""
    for n in (1, 2, 3, 5):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shape in ((2, 5, 4), (7, 3)):
                outs, lses = states(target, n, shape, dtype)
                hold_merge(target, outs, lses)
                hold_merge(target, torch.stack(outs), torch.stack(lses))


@rule("C-MERGE")
def test_the_empty_state_is_the_identity_even_if_its_out_is_nan(target: Target) -> None:
    (a, b), (la, _) = states(target, 2, (2, 5, 4))
    empty = torch.full_like(la, -INF)
    for junk in (b, torch.full_like(b, float("nan")), torch.full_like(b, INF)):
        for outs, lses in (([a, junk], [la, empty]), ([junk, a], [empty, la]), ([junk, a, junk], [empty, la, empty])):
            out, lse = hold_merge(target, outs, lses)
            if not torch.allclose(out, a, rtol=0, atol=1e-6) or not torch.allclose(lse, la, rtol=0, atol=1e-5):
                raise Mismatch("merging an empty state changed the other one")
    some = la.clone()
    some[0, ::2] = -INF
    a = a.clone()
    a[0, ::2] = float("nan")
    hold_merge(target, [a, b], [some, la])


@rule("C-MERGE")
def test_all_empty_stays_zero_and_minus_infinity(target: Target) -> None:
    (a, b), (la, _) = states(target, 2, (2, 5, 4))
    empty = torch.full_like(la, -INF)
    out, lse = target.merge_states([a, b * float("nan")], [empty, empty])
    if not bool((out == 0).all()) or not bool((lse == -INF).all()):
        raise Mismatch("all states empty: wanted (0, -inf)")
    sinks = torch.linspace(-1.0, 2.0, 4, device=a.device)
    out, lse = target.merge_states([a, b], [empty, empty], sinks=sinks)
    if not bool((out == 0).all()) or not torch.allclose(lse, sinks.expand_as(lse), rtol=0, atol=1e-6):
        raise Mismatch("all states empty, with a sink: wanted (0, sink)")


@rule("C-MERGE")
def test_merge_is_associative_and_commutative(target: Target) -> None:
    (a, b, c), (la, lb, lc) = states(target, 3, (2, 5, 4))
    whole = target.merge_states([a, b, c], [la, lb, lc])
    ab = target.merge_states([a, b], [la, lb])
    bc = target.merge_states([b, c], [lb, lc])
    for other in (target.merge_states([ab[0], c], [ab[1], lc]), target.merge_states([a, bc[0]], [la, bc[1]]),
                  target.merge_states([c, a, b], [lc, la, lb])):
        for x, y in zip(whole, other):
            if not torch.allclose(x, y, rtol=0, atol=1e-5):
                raise Mismatch("the order of merging changed the result")


@rule("C-MERGE")
def test_merge_with_sinks_and_extreme_lses(target: Target) -> None:
    """Sinks of either type count once; lses of +-1000 and far apart neither overflow nor vanish."""
    for dtype in (torch.float32, torch.bfloat16):
        outs, lses = states(target, 3, (2, 5, 4), dtype)
        sinks = torch.tensor([3.0, -INF, 0.5, 8.0], device=target.device)
        hold_merge(target, outs, lses, sinks=sinks)
        hold_merge(target, outs, lses, sinks=sinks.to(dtype))
        hold_merge(target, outs, lses, sinks=sinks.repeat_interleave(3)[1::3])  # a column of something
        hold_merge(target, outs, lses, sinks=sinks[:1].expand(4))
    outs, lses = states(target, 2, (2, 5, 4))
    for shift in (1000.0, -1000.0):
        hold_merge(target, outs, [x + shift for x in lses])
    hold_merge(target, outs, [lses[0] + 500, lses[1] - 500])


@rule("C-MERGE")
def test_merge_of_empty_tensors_and_of_nothing(target: Target) -> None:
    outs, lses = states(target, 2, (0, 4))
    out, lse = target.merge_states(outs, lses)
    if out.shape != (0, 4, 16) or lse.shape != (0, 4):
        raise Mismatch(f"no tokens: wanted shapes (0, 4, 16) and (0, 4), got {tuple(out.shape)} and {tuple(lse.shape)}")
    try:
        portattn.merge_states([], [], backend=target.backend)
    except ArgumentError:
        return
    raise Mismatch("an empty list: wanted an ArgumentError")


@rule("C-MERGE")
def test_merge_of_strided_states(target: Target) -> None:
    outs, lses = states(target, 2, (5, 2, 4))
    hold_merge(target, [x.transpose(0, 1) for x in outs], [x.transpose(0, 1) for x in lses])
    hold_merge(target, torch.stack(outs, 1).transpose(0, 1), torch.stack(lses, 1).transpose(0, 1))


@rule("C-MERGE", "dense-f32-h4x2-d32-q5k90\ndense-bf16-h4x2-d64-q1k300\npaged-bf16-h8x2-d64-p16-q1k300*2\n"
      "varlen-f32-h4x2-d32-q5k40+q9k20")
def test_parts_over_disjoint_keys_merge_to_one_pass(target: Target, case: Case) -> None:
    """Prefix and suffix, the sink only in the merge."""
    call = target.build(case)
    sinks = torch.linspace(0.0, 3.0, case.heads, device=target.device)
    if case.layout == "dense":
        q, k, v = call.args
        cuts = ((0, 1), (1, 70 % case.klen), (70 % case.klen, case.klen))
        parts = [target.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in cuts]
    elif case.layout == "varlen":
        q, k, v, cu_q, cu_k, max_q, max_k = call.args
        half = torch.tensor([[0, 15], [40, 48]])
        pick = lambda spans: torch.cat([torch.arange(a, b) for a, b in spans]).to(k.device)
        first, second = pick(half.tolist()), pick([[15, 40], [48, 60]])
        sums = lambda *n: torch.tensor(n, dtype=torch.int32, device=k.device)
        parts = [target.attention_varlen(q, k[first], v[first], cu_q, sums(0, 15, 23), max_q, max_k, return_lse=True),
                 target.attention_varlen(q, k[second], v[second], cu_q, sums(0, 25, 37), max_q, max_k, return_lse=True)]
    else:
        q, k, v, table, lens = call.args
        parts = [target.attention_paged(q, k, v, table, lens * 0 + 160, return_lse=True),
                 target.attention_paged(q, k, v, table[:, 10:], lens - 160, return_lse=True)]
    out, lse = target.merge_states([p[0] for p in parts], [p[1] for p in parts], sinks=sinks)
    target.compare(call.replace(sinks=sinks), out, lse)


# ------------------------------------------------------------------ C-SPLIT
@rule("C-SPLIT", "dense-f32-h4x2-d32-q5k300\ndense-bf16-h4x2-d64-q1k300*2-sinks\nvarlen-f32-h4x2-d32-q5k300+q1k7-causal\n"
      "paged-bf16-h8x2-d64-p16-q1k300+q1k1-causal\npaged-f32-h4x2-d32-p4-q3k70+q1k0+q5k5-causal-cap3-sinks\n"
      "paged-f16-h8x2-d64-p16-q1k300+q1k20-w99.0",
      "paged-bf16-h16x2-d128-p16-q1k2000+q1k3+q1k129\ndense-f16-h16x2-d128-q1k4000")
def test_num_splits_changes_only_rounding(target: Target, case: Case) -> None:
    """Splits that hold no key, and more splits than keys, too."""
    for splits in (0, 1, 2, 3, 8, 33):
        target.check(target.build(case), num_splits=splits)


@rule("C-SPLIT", "dense-f32-h4x2-d32-q33k70*2-causal\ndense-bf16-h4x2-d64-q1k300*3\n"
      "varlen-bf16-h4x2-d64-q33k70+q1k300+q5k5-causal\n"
      "paged-bf16-h8x2-d64-p16-q1k300*4-splits5\npaged-f32-h4x2-d32-p4-q3k70+q1k9\npaged-bf16-h8x2-d64-p16-q1k40*4-append")
def test_the_same_call_gives_the_same_bits(target: Target, case: Case) -> None:
    first = [x.clone() for x in target.with_lse(target.build(case)) if x is not None]
    for _ in range(4):
        again = [x for x in target.with_lse(target.build(case)) if x is not None]
        if not all(bitwise_equal(a, b) for a, b in zip(first, again)):
            raise Mismatch("the same call gave other bits")


@rule("C-SPLIT")
def test_threads_do_not_disturb_each_other(target: Target) -> None:
    """Eight threads, cold shapes, each with its own calls: all right."""
    import threading

    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n in (64, 128, 257):
                Target(target.backend, target.device).check(Case("dense", "f32", heads=2, heads_kv=1, dim=16 + i,
                                                                 lens=((3, n + i),)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@rule("C-SPLIT")
def test_torch_flags_of_another_thread_do_not_matter(target: Target) -> None:
    """A thread inside torch's process-wide sdpa_kernel() context changes no result here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for kind in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kind):
            target.check("dense-f32-h4x2-d32-q5k9*2-causal")
            target.check("dense-bf16-h4x2-d64-q17k17")


INVARIANT = cases("""
paged-bf16-h8x2-d64-p16-q1k1000-invariant
paged-f32-h4x2-d32-p4-q1k70-invariant
paged-bf16-h8x2-d64-p16-q5k300-causal-sinks-invariant
paged-bf16-h8x2-d64-p16-q40k300-causal-invariant
varlen-bf16-h4x2-d64-q33k300-causal-invariant
varlen-f32-h4x2-d32-q1k70-cap3-invariant
dense-bf16-h4x2-d64-q1k300-invariant
dense-f32-h4x2-d32-q33k70-causal-invariant
varlen-f32-h2x2-d13-q1k70-invariant
paged-f32-h3x3-d13-p3-q1k70-invariant
dense-f32-h3x3-d13-q1k69-invariant
""")


@rule("C-SPLIT", INVARIANT)
def test_batch_invariant_rows_have_the_same_bits_alone_and_in_any_batch(target: Target, case: Case) -> None:
    """Among short and long mates, first, in the middle and last, on other pages, under other bounds; at head_dim 13 at addresses that
    are aligned in other ways."""
    call = target.build(case)
    alone = target.with_lse(call)
    (len_q, len_k) = case.lens[0]
    for mates, place in (([(1, 10)] * 6, 0), ([(1, 10)] * 6, 3), ([(1, 1700)] * 3, 3), ([(1, 5), (70, 90), (1, 600)], 1)):
        if case.layout == "dense":
            mates = [(len_q, len_k)] * len(mates)
        lens = tuple(mates[:place] + [(len_q, len_k)] + mates[place:])
        batch = target.build(case._replace(lens=lens))
        args = list(batch.args)
        if case.layout == "dense":
            for x, y in zip(args, call.args):
                x[place] = y[0]
            rows = place
        else:
            at = sum(q for q, _ in lens[:place])
            rows = slice(at, at + len_q) if args[0].dim() == 3 else place
            args[0][rows] = call.args[0] if args[0].dim() == call.args[0].dim() else call.args[0][0]
            if case.layout == "varlen":
                keys = sum(k for _, k in lens[:place])
                for i in (1, 2):
                    args[i][keys : keys + len_k] = call.args[i]
            else:
                n = -(-len_k // case.page)
                for i in (1, 2):
                    args[i][args[3][place, :n].long()] = call.args[i][call.args[3][0, :n].long()]
        batch = batch.replace(sinks=call.kwargs.get("sinks"))
        for bound in (None, 128) if "max_seqlen_q" in batch.kwargs else (None,):
            kwargs = {} if bound is None else {"max_seqlen_q": bound}
            for name, one, many in zip(("out", "lse"), alone, target.with_lse(batch._replace(args=tuple(args)), **kwargs)):
                if one is not None and not bitwise_equal(one[0] if one.dim() > many[rows].dim() else one, many[rows]):
                    raise Mismatch(f"{name} of a sequence in a batch of {len(lens)}, at place {place}, bound {bound}, has other bits than alone")


@rule("C-SPLIT")
def test_an_undeclared_batch_invariance_is_declined(target: Target) -> None:
    if target.declares("batch_invariant"):
        raise Declined("batch_invariant", "a backend without it", "declared")
    try:
        target.check("dense-f32-h4x2-d32-q5k9-invariant")
    except portattn.NoBackendError as error:
        if "batch_invariant" not in {r.code for r in target.judge(error)}:
            raise
        return
    raise Dishonest("batch_invariant=True ran although it is not declared")
