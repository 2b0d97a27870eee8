"""C-LEN, C-PAGE, C-ROWS, C-ROPE: what is read of a cache, what is written to it, and at which position."""

import torch

from portattn import reference

from .cases import INT32_MAX, Call, Case
from .target import Target, bitwise_equal, rule
from .tolerance import Mismatch

NAN = float("nan")

# ------------------------------------------------------------------ C-LEN
POISON = """
paged-f16-h1x1-d64-p3-q1k1+q1k3-poison
paged-bf16-h8x2-d64-p16-q1k5+q1k33-poison
paged-f32-h4x2-d32-p4-q5k9+q1k17+q9k9-poison
paged-f32-h4x2-d32-p4-q5k9+q1k17-causal-poison-i64
paged-bf16-h8x2-d64-p16-q1k5+q1k33-causal-w7.0-poison
paged-bf16-h8x2-d64-p16-q1k5+q1k33-cap3-sinks-alibi-poison
paged-bf16-h8x2-d64-p16-q33k33+q7k70+q1k5-causal-poison
paged-bf16-h8x2-d64-p16-q1k5+q1k33-hnd-poison
paged-f16-h4x2-d64-p16-q1k300+q1k5-splits4-poison
paged-bf16-h8x2-d64-p16-q1k5+q1k33-e4m3-scaleh-poison
paged-bf16-h8x2-d64-p16-q3k5+q3k33-append-poison
paged-f32-h4x2-d32-p5-q3k5+q1k33+q4k4-append-causal-rope16-poison
paged-f32-h4x2-d32-p5-q3k5+q3k33-append-causal-rope16-pairs-hnd-poison
paged-bf16-h8x2-d64-p16-q1k0+q1k16-poison
varlen-bf16-h4x2-d64-q5k9+q1k33-used-poison
varlen-f32-h4x2-d32-q5k9+q1k33+q9k5-used-causal-poison
varlen-f32-h4x2-d32-q5k9+q3k0+q9k5-used-cap3-sinks-w4.2-poison
"""
POISON_FULL = """
paged-f16-h16x2-d128-p32-q1k1000+q1k31+q130k255-causal-w200.0-cap9-sinks-poison
paged-bf16-h16x1-d128-p16-q1k1000*3+q4k4-append-rope64-causal-poison
paged-f16-h8x2-d256-p128-q1k129+q1k127-poison
paged-bf16-h8x2-d80-p256-q1k300+q1k5-poison
varlen-f16-h8x2-d128-q65k129+q1k240+q127k31-used-causal-poison
"""


@rule("C-LEN", POISON, POISON_FULL)
def test_nothing_past_a_length_matters(target: Target, case: Case) -> None:
    """NaN and Inf in every slot, page and row past the lengths; ids that are none in the unused table entries."""
    target.check(case)


@rule("C-LEN", "paged-f16-h2x1-d64-p4-q1k1+q1k3\npaged-bf16-h4x2-d64-p16-q1k37+q1k16\npaged-f32-h4x2-d32-p4-q5k9+q1k17\n"
      "varlen-f32-h4x2-d32-q5k9+q1k33-used")
def test_poison_in_k_alone_and_in_v_alone(target: Target, case: Case) -> None:
    """A kernel that cleans one of them, or one kind of number, still leaks the other."""
    for name in (1, 2):
        clean = target.build(case)
        dirty = target.build(case._replace(poison=True)).args[name]
        marks = dirty.isnan() | dirty.isinf()
        if case.layout == "varlen":
            marks = marks[: clean.args[name].shape[0]]
        for value in (NAN, float("inf"), float("-inf")):
            call = target.build(case)
            call.args[name].masked_fill_(marks, value)
            target.check(call)


@rule("C-LEN", "paged-bf16-h8x2-d64-p16-q1k5+q1k33\npaged-f32-h4x2-d32-p4-q5k9+q3k17\npaged-f32-h4x2-d32-p4-q3k9*2-append\n"
      "paged-bf16-h8x2-d64-p16-q1k0*2")
def test_table_entries_past_the_length_are_not_looked_at(target: Target, case: Case) -> None:
    for tail in (-1, INT32_MAX, -(2**31), 10**6):
        call = target.build(case)
        table = call.args[3]
        for b, (_, n) in enumerate(case.lens):
            table[b, -(-n // case.page) :] = tail
        target.check(call)


EDGES = [*range(15, 18), *range(31, 34), *range(63, 66), *range(127, 130), *range(240, 258)]


@rule("C-LEN", [Case("paged", dtype, heads=h, heads_kv=1, dim=d, page=p, kv=kv, lens=tuple((1, n) for n in EDGES), poison=True)
                for dtype, h, d, p, kv in (("bf16", 16, 128, 16, ""), ("bf16", 16, 128, 16, "e4m3"), ("f32", 4, 32, 7, ""),
                                           ("f16", 3, 64, 64, ""))]
      + [Case("paged", "bf16", heads=4, dim=64, page=16, lens=tuple((3, n) for n in EDGES), causal=True, poison=True)]
      + [Case("varlen", "bf16", heads=4, dim=64, lens=tuple((n, n) for n in EDGES[:9]), causal=True, poison=True)],
      [Case("paged", "f16", heads=8, heads_kv=2, dim=128, page=16, lens=tuple((1, n) for n in range(s, s + 32)),
            poison=True) for s in range(1, 290, 32)])
def test_lengths_around_tile_edges(target: Target, case: Case) -> None:
    target.check(case)


APPEND = """
paged-f32-h4x2-d32-p4-q1k1+q1k4+q1k5+q1k8-append
paged-f32-h4x2-d32-p4-q3k3+q3k4+q3k5+q3k11-append-causal
paged-bf16-h4x2-d64-p16-q5k5+q1k33+q17k40-append-causal
paged-f16-h4x2-d64-p16-q22k22-append-causal
paged-bf16-h4x2-d64-p16-q1k16+q1k17-append-hnd
paged-f32-h4x2-d32-p1-q3k7*2-append-i64
paged-f32-h4x2-d32v16-p4-q3k7*2-append-causal
paged-bf16-h8x2-d64-p16-q2k40*2-append-e4m3-scaleh
paged-bf16-h8x2-d64-p16-q2k40*2-append-e5m2-scale
paged-f16-h8x2-d64-p16-q2k40*2-append-e4m3fnuz-scaleb
paged-f32-h4x2-d32-p4-q2k9*2-append-scaleb
paged-f32-h4x2-d32-p4-q2k9*2-append-ragged
"""


@rule("C-LEN", APPEND)
def test_an_append_lands_before_the_length_and_is_attended_to(target: Target, case: Case) -> None:
    """out, lse, the appended slots, and every other byte of both caches."""
    target.check(case)


@rule("C-LEN", "paged-f32-h4x2-d32-p4-q3k0+q3k9\npaged-bf16-h4x2-d64-p16-q1k0+q1k5+q1k0\npaged-f32-h4x2-d32-p4-q3k1+q3k2+q3k9\n"
      "paged-f32-h4x2-d32-p4-q1k0*2")
def test_tokens_at_negative_positions_are_not_written(target: Target, case: Case) -> None:
    """A padded row of an engine has kv_lens 0, or less, and table entries that point nowhere: it writes nothing and gives 0."""
    for causal in (False, True):
        call = target.build(case._replace(poison=True))
        if causal:
            call.args[4][call.args[4] == 0] = -2
        draw, rows = target.draw(7), call.args[0].shape[:-2]
        dtype = call.args[0].dtype
        target.check(call.replace(k=draw.normal(*rows, case.heads_kv, case.dim, dtype=dtype),
                                  v=draw.normal(*rows, case.heads_kv, case.dim, dtype=dtype),
                                  causal=causal or None))


@rule("C-LEN", "paged-f32-h4x2-d32-p4-q2k8*2-append\npaged-bf16-h4x2-d64-p16-q1k32*2-append")
def test_an_append_that_fills_the_cache_stays_inside_it(target: Target, case: Case) -> None:
    """The caches are slices of larger buffers: what lies around them keeps its bytes."""
    call = target.build(case)
    q, k_cache, v_cache, table, lens = call.args
    buffers = [torch.full((x.shape[0] + 2, *x.shape[1:]), 7.0, dtype=x.dtype, device=x.device) for x in (k_cache, v_cache)]
    for buffer, x in zip(buffers, (k_cache, v_cache)):
        buffer[1:-1] = x
    table = table[:, : -(-case.klen // case.page)].contiguous()
    target.check(call._replace(args=(q, buffers[0][1:-1], buffers[1][1:-1], table, lens)))
    for buffer in buffers:
        if not bool((buffer[0] == 7).all() and (buffer[-1] == 7).all()):
            raise Mismatch("bytes beside the cache were written")


@rule("C-LEN", "paged-f32-h4x2-d32-p4-q5k9+q1k17-causal\nvarlen-bf16-h4x2-d64-q5k9+q1k33-causal\n"
      "paged-f32-h4x2-d32-p4-q5k9+q1k17-append")
def test_looser_bounds_change_nothing(target: Target, case: Case) -> None:
    """max_seqlen_* are upper bounds; a paged call may leave its own out; a table may be wider than needed."""
    call = target.build(case)
    if case.layout == "varlen":
        q, k, v, cu_q, cu_k, _, _ = call.args
        target.check(call._replace(args=(q, k, v, cu_q, cu_k, 64, 1000)))
    else:
        for bound in (None, call.args[0].shape[0], 200):
            target.check(target.build(case).replace(max_seqlen_q=bound))
        q, k_cache, v_cache, table, lens = target.build(case).args
        wide = torch.cat([table, table.new_full((len(table), 70), -1)], 1)
        target.check(call._replace(args=(q, k_cache, v_cache, wide, lens)))


@rule("C-LEN", "varlen-f32-h4x2-d32-q5k9+q1k33+q3k8-causal")
def test_seqused_k_shortens_and_shifts_the_alignment(target: Target, case: Case) -> None:
    call = target.build(case)
    for used in ([9, 20, 0], [4, 1, 8], [0, 0, 0]):
        for dtype in (torch.int32, torch.int64):
            target.check(call, seqused_k=torch.tensor(used, dtype=dtype, device=target.device))


# ------------------------------------------------------------------ C-PAGE
SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 48, 64, 128, 256)


@rule("C-PAGE", [Case("paged", "bf16", heads=8, dim=64, page=p, lens=((1, 5), (1, 130)), poison=True) for p in SIZES]
      + [Case("paged", "f32", page=p, lens=((5, 70), (1, 3), (33, 33)), causal=True, poison=True) for p in SIZES]
      + [Case("paged", "bf16", heads=8, heads_kv=1, dim=64, page=1056, lens=((1, 1000), (1, 1057)))]
      + [Case("paged", "bf16", heads=8, heads_kv=1, dim=256, page=p, lens=((1, 700),)) for p in (64, 1056)],
      [Case("paged", "f16", heads=8, dim=128, page=p, lens=((1, 300), (5, 5), (65, 130)), causal=True, poison=True, hnd=h)
       for p in (1, 3, 16, 24, 100, 256, 400, 512) for h in (False, True)])
def test_page_sizes(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-PAGE", "paged-f32-h4x2-d32-p4-q1k12*3\npaged-bf16-h4x2-d64-p16-q5k40*3-causal\npaged-bf16-h4x2-d64-p16-q1k40*3-hnd")
def test_pages_may_be_shared_and_repeated(target: Target, case: Case) -> None:
    """All sequences on the first one's pages; then one page, again and again."""
    for shared in (lambda t: t[:1].expand_as(t), lambda t: t[:, :1].expand_as(t), lambda t: t.flip(0)[[0, 1, 0]]):
        call = target.build(case)
        q, k_cache, v_cache, table, lens = call.args
        target.check(call._replace(args=(q, k_cache, v_cache, shared(table).contiguous(), lens)))


@rule("C-PAGE", "dense-f32-h4x2-d32-q1k20*3\ndense-bf16-h4x2-d64-q5k20*3-causal")
def test_a_contiguous_cache_is_one_page_a_row(target: Target, case: Case) -> None:
    """P = Smax, block_table[b] = [row]: equal to dense attention; rows permuted."""
    q, k, v = target.build(case).args
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=target.device)[:, None]
    lens = torch.tensor([20, 7, 13], dtype=torch.int32, device=target.device)
    target.check(Call("attention_paged", (q, k, v, rows, lens), {"causal": True} if case.causal else {}))


@rule("C-PAGE", "paged-bf16-h8x1-d64-p2-q1k3*3\npaged-f16-h4x1-d16-p1-q3k3*3-append")
def test_page_ids_beyond_16_bits(target: Target, case: Case) -> None:
    """Ids 65535, 65536, 65537 and a page 0 that differs from all of them."""
    call = target.build(case)
    q, k_cache, v_cache, table, lens = call.args
    n = 65536 + k_cache.shape[0]
    big = [torch.full((n, *x.shape[1:]), 50.0, dtype=x.dtype, device=x.device) for x in (k_cache, v_cache)]
    for buffer, x in zip(big, (k_cache, v_cache)):
        buffer[-x.shape[0] - 1 : -1] = x
    target.check(call._replace(args=(q, *big, table + (65536 - 1), lens)))


@rule("C-PAGE", "paged-f32-h4x2-d32-p4-q1k9*2\npaged-bf16-h4x2-d64-p16-q1k20*2", )
def test_two_appends_to_one_slot_leave_one_of_the_values(target: Target, case: Case) -> None:
    call = target.build(case)
    q, k_cache, v_cache, table, lens = call.args
    draw = target.draw(9)
    new = [draw.normal(2, 1, case.heads_kv, case.dim, dtype=q.dtype) for _ in range(2)]
    table = table[:1].expand_as(table).contiguous()
    before = k_cache.clone()
    target.run(call._replace(args=(q, k_cache, v_cache, table, lens)), k=new[0], v=new[1])
    at = case.klen - 1
    slot = int(table[0, at // case.page]), at % case.page
    if not any(bool((k_cache[slot] == x[0]).all()) for x in new[0]):
        raise Mismatch("the slot that two sequences appended to holds neither's key")
    before[slot] = k_cache[slot]
    if not bitwise_equal(before, k_cache):
        raise Mismatch("another slot has changed")


def append_call(target: Target, dtype: str, page: int, slots: list[int], kv: str = "", hnd: bool = False, pages: int = 5,
                dim_v: int = 8, **kwargs) -> Call:
    from .cases import cast, torch_dtype

    draw = target.draw(11)
    t, kind, store = len(slots), torch_dtype(dtype), torch_dtype(kv or dtype)
    k, v = draw.normal(t, 2, 8, dtype=kind, gain=3.0), draw.normal(t, 2, dim_v, dtype=kind, gain=3.0)
    shape = (lambda d: (pages, 2, page, d)) if hnd else (lambda d: (pages, page, 2, d))
    caches = [cast(draw.normal(*shape(d)), store) for d in (8, dim_v)]
    if hnd:
        kwargs["kv_layout"] = "HND"
    return Call("cache_append", (k, v, *caches, torch.tensor(slots, dtype=torch.int64, device=target.device)), kwargs)


def hold_append(target: Target, call: Call) -> None:
    before = call.map(lambda x: x.clone())
    if target.run(call) is not None:
        raise Mismatch("cache_append: wanted None back")
    target.compare_caches(before, call.args[2], call.args[3])


@rule("C-PAGE")
def test_cache_append_writes_its_slots_and_no_other(target: Target) -> None:
    """slot = page * P + offset in any order, both layouts, types, Dv; all other bytes stay."""
    for dtype in ("f32", "f16", "bf16"):
        for page in (16, 1, 5):
            hold_append(target, append_call(target, dtype, page, [3 % (5 * page), 5 * page - 1, 0 if page > 1 else 1]))
            hold_append(target, append_call(target, dtype, page, [2, 5 * page - 1, 4], hnd=True, dim_v=24)
                        if page > 1 else append_call(target, dtype, page, [2, 4], hnd=True))
    hold_append(target, append_call(target, "f32", 4, []))
    call = append_call(target, "bf16", 16, [17, 3])
    hold_append(target, call._replace(args=(*call.args[:4], call.args[4].int())))


@rule("C-PAGE")
def test_negative_slots_are_skipped(target: Target) -> None:
    """-1 is not Python's last slot: no byte changes for it."""
    for dtype in ("f16", "f32"):
        for hnd in (False, True):
            hold_append(target, append_call(target, dtype, 16, [3, -1, -1, -7, 18], hnd=hnd))
            hold_append(target, append_call(target, dtype, 16, [-1, -1], hnd=hnd))


@rule("C-PAGE")
def test_cache_append_scales_rounds_and_saturates(target: Target) -> None:
    """x / scale to nearest even, saturated, NaN kept; each kv head its own scale."""
    kinds = [kv for kv in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
             if any({"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(kv,
                 "float8_" + kv) in c.kv_dtypes for c in target.capabilities)]
    for kv in [*kinds, ""]:
        for scale in (0.25, torch.tensor(2.0, device=target.device), torch.tensor([0.5, 4.0], device=target.device)):
            call = append_call(target, "bf16", 16, [3, 20, -1, 40], kv=kv, k_scale=scale, v_scale=scale)
            k = call.args[0]
            k.view(-1)[:3] = torch.tensor([1e6, -1e6, NAN], dtype=k.dtype, device=k.device)  # past e5m2's 57344 too, whatever the scale
            hold_append(target, call)
    for kv in kinds:  # ties, exactly: between neighbours the even code wins
        call = append_call(target, "f32", 16, [0, 1, 2, 3], kv=kv)
        grid = torch.arange(1, 100, dtype=torch.uint8).view(call.args[2].dtype).float()
        ties = ((grid[1:] + grid[:-1]) / 2)[-64:]
        call.args[0].view(-1)[:64] = ties.to(target.device)
        before = call.map(lambda x: x.clone())
        target.run(call)
        wanted = reference.cache_append(*before.args)[0]
        if not bitwise_equal(call.args[2].cpu().float(), wanted.float()):
            raise Mismatch(f"{kv}: halves are not rounded to even")


@rule("C-STRIDE")
def test_cache_append_beyond_32_bits(target: Target) -> None:
    from .memory import spread

    for which in (2, 3):
        call = append_call(target, "f16", 4, [4 * 16, 3, 4 * 9 + 1, 4 * 16 + 3], pages=17)
        args = list(call.args)
        args[which] = spread(args[which], 0, 1 << 28)
        hold_append(target, call._replace(args=tuple(args)))


# ------------------------------------------------------------------ C-ROWS
ROWS = """
varlen-bf16-h2x2-d64-q5k5+q4k4-poison
varlen-bf16-h4x2-d64-q5k5+q4k4-causal-poison
varlen-f32-h4x2-d32-q33k33+q1k17-cap3-alibi-sinks-poison
varlen-f16-h4x2-d128-q65k64+q0k5-causal-w9.0-poison
paged-bf16-h4x2-d64-p16-q5k20+q4k4-causal-poison
paged-f32-h4x2-d32-p4-q5k20+q4k4-append-causal-poison
paged-bf16-h4x2-d64-p16-q1k20*2-ragged-append-poison
paged-bf16-h4x2-d64-p16-q34k50+q30k40-causal-poison
varlen-bf16-h4x2-d64-q36k36+q29k29-causal-poison
"""  # in the last two as many rows as if both sequences were of the longest's length


@rule("C-ROWS", ROWS)
def test_rows_past_the_last_sequence_do_not_matter(target: Target, case: Case) -> None:
    """An engine pads a batch: the rows after cu_seqlens[-1] hold NaN and Inf, and an append does not write them."""
    target.check(case)


@rule("C-ROWS", "dense-f32-h4x2-d32-q5k9*3\ndense-bf16-h4x2-d64-q1k33*3\nvarlen-f32-h4x2-d32-q5k9+q1k33+q7k7-causal\n"
      "varlen-bf16-h4x2-d64-q33k65+q1k33+q7k7\n"
      "paged-f32-h4x2-d32-p4-q5k9+q1k33+q7k7-causal\npaged-bf16-h4x2-d64-p16-q1k9+q1k65+q1k3\n"
      "paged-bf16-h4x2-d64-p16-q1k9+q1k300+q1k3-splits4-sinks")
def test_nan_of_one_sequence_reaches_no_other(target: Target, case: Case) -> None:
    """Each sequence in turn is all NaN (q, k and v); the others equal the reference."""
    for sick in range(len(case.lens)):
        call = target.build(case)
        q, k, v = call.args[:3]
        counted = torch.ones(q.shape[:-2], dtype=torch.bool)
        if case.layout == "dense":
            q[sick], k[sick], v[sick], counted[sick] = NAN, NAN, NAN, False
        else:
            at = sum(n for n, _ in case.lens[:sick])
            rows = slice(at, at + case.lens[sick][0])
            if q.dim() == 4:
                q[sick], counted[sick] = NAN, False
            else:
                q[rows], counted[rows] = NAN, False
            if case.layout == "varlen":
                at = sum(n for _, n in case.lens[:sick])
                keys = slice(at, at + case.lens[sick][1])
                k[keys], v[keys] = NAN, NAN
            else:
                pages = call.args[3][sick, : -(-case.lens[sick][1] // case.page)].long()
                k[pages], v[pages] = NAN, NAN
        target.check(call._replace(rows=counted))


@rule("C-ROWS", "varlen-f32-h4x2-d32-q5k9+q1k33+q7k7-causal\npaged-f32-h4x2-d32-p4-q5k9+q1k33+q7k7-causal\n"
      "dense-f32-h4x2-d32-q5k9*3-alibib\n"
      "paged-bf16-h4x2-d64-p16-q1k9+q1k65*2-alibib-scaleb\npaged-bf16-h4x2-d64-p16-q2k9+q2k65*2-alibib-scaleb-append")
def test_each_sequence_has_its_own_slopes_scales_and_lengths(target: Target, case: Case) -> None:
    target.check(case)


# ------------------------------------------------------------------ C-ROPE
ROPE = """
paged-f32-h4x2-d32-p4-q5k9+q1k17-causal-rope32
paged-f32-h4x2-d32-p4-q5k9+q1k17-causal-rope32-pairs
paged-f32-h4x2-d32-p4-q5k9+q1k17-rope16
paged-f32-h4x2-d32-p4-q5k9+q1k17-rope16-pairs
paged-f32-h4x2-d32-p4-q5k9+q1k17-causal-rope32-append
paged-f32-h4x2-d32-p4-q5k9+q1k17-causal-rope32-pairs-append
paged-f32-h4x2-d32-p4-q5k9+q2k17-rope16-append
paged-f32-h4x2-d32-p4-q5k9+q2k17-rope2-pairs-append
paged-bf16-h8x2-d128-p16-q22k22-causal-rope128-append
paged-bf16-h8x2-d128-p16-q22k22-causal-rope128-pairs-append
paged-f16-h16x16-d16-p8-q1k9+q2k40-rope16-append
paged-f16-h16x16-d16-p8-q1k9+q2k40-rope8-pairs-append-hnd
paged-bf16-h8x2-d64-p16-q1k40+q1k17-rope64-append-e4m3-scaleh
paged-bf16-h8x2-d64-p16-q3k40*2-rope64-append-poison
paged-f32-h4x2-d40v24-p4-q3k9*2-rope30-append-causal-w4.0
paged-f32-h4x2-d32-p4-q5k3+q2k9-causal-rope32-append
"""


@rule("C-ROPE", ROPE)
def test_positions_pairings_and_what_is_stored(target: Target, case: Case) -> None:
    """out and lse; the cache holds turned keys (and values as they came)."""
    target.check(case)


@rule("C-ROPE", "paged-f32-h4x2-d32-p4-q1k9*2-rope32\npaged-bf16-h4x2-d64-p16-q3k40*2-rope64-causal")
def test_angles_of_either_type(target: Target, case: Case) -> None:
    call = target.build(case)
    for dtype in (torch.float32, call.args[0].dtype):
        target.check(call.replace(rotary_cos=call.kwargs["rotary_cos"].to(dtype), rotary_sin=call.kwargs["rotary_sin"].to(dtype)))


@rule("C-ROPE", "paged-f32-h4x2-d32-p4-q1k9*2-rope32\npaged-f32-h4x2-d32-p4-q3k9*2-rope16-causal-append")
def test_angles_with_rows_apart(target: Target, case: Case) -> None:
    """Halves of one table of both, as engines keep them; and rows further apart in the one than in the other."""
    call = target.build(case)
    cos, sin = call.kwargs["rotary_cos"], call.kwargs["rotary_sin"]
    half = cos.shape[1]
    both = torch.cat([cos, sin], 1)
    target.check(call.map(torch.clone).replace(rotary_cos=both[:, :half], rotary_sin=both[:, half:]))
    target.check(call.map(torch.clone).replace(rotary_cos=cos, rotary_sin=both[:, half:]))


@rule("C-ROPE", "paged-f32-h4x2-d32-p4-q3k9*2-rope32-append-causal\npaged-f32-h4x2-d32-p4-q1k9*2-rope16-pairs-append")
def test_one_append_of_many_equals_many_of_one(target: Target, case: Case) -> None:
    """The last token's out, appended together with those before it or after them, is the same."""
    call = target.build(case)
    whole = target.run(call.map(lambda x: x.clone()))
    single = target.build(case)
    q, k_cache, v_cache, table, lens = single.args
    for i in range(case.qlen):
        kwargs = {n: x[:, i : i + 1] if n in ("k", "v") else x for n, x in single.kwargs.items()}
        out = target.attention_paged(q[:, i : i + 1], k_cache, v_cache, table, lens - case.qlen + i + 1, **kwargs)
    if not torch.allclose(out[:, 0], whole[:, -1], rtol=0, atol=1e-4):
        raise Mismatch("appending token by token gives another result than appending at once")
