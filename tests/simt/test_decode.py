"""The decode kernel on the host device, wave 32 and 64, against the float64 reference: same source as on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from portattn import reference
from portattn.problem import Call
from portattn.testing.tolerance import close_lse, close_out

from . import host

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}


def paged(lens, *, heads=(4, 2), dim=64, dim_v=None, page=16, dtype=torch.bfloat16, q_lens=None, cache=None, seed=0, offset=0, **options):
    """A paged Call whose unused slots are NaN and whose unused table entries are wild, and the reference's arguments."""
    g = torch.Generator().manual_seed(seed)
    rnd = lambda *shape: torch.randn(*shape, generator=g)
    (hq, hk), batch, dim_v = heads, len(lens), dim_v or dim
    width = max(1, max(-(-n // page) for n in lens)) + 1
    count = sum(-(-n // page) for n in lens) + 2
    k, v = torch.full((count, page, hk, dim), float("nan")), torch.full((count, page, hk, dim_v), float("nan"))
    order, table, at = torch.randperm(count, generator=g), torch.full((batch, width), 10**9, dtype=torch.int32), 0
    for b, n in enumerate(lens):
        pages = -(-n // page)
        table[b, :pages] = order[at : at + pages]
        at += pages
        j = torch.arange(n)
        k[table[b].long()[j // page], j % page], v[table[b].long()[j // page], j % page] = rnd(n, hk, dim), rnd(n, hk, dim_v)
    k, v = k.to(FP8[cache] if cache else dtype), v.to(FP8[cache] if cache else dtype)
    if offset:  # rows that do not start at a multiple of 16 bytes
        k, v = (torch.empty(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape).copy_(x) for x in (k, v))
    lengths = torch.tensor(lens, dtype=options.pop("index", torch.int32))
    kw = dict(causal=options.pop("causal", True), window_size=options.pop("window", (-1, -1)), softcap=options.pop("softcap", 0.0))
    for name in ("alibi_slopes", "sinks", "k_scale", "v_scale", "rotary_cos", "rotary_sin", "rotary_interleaved"):
        if name in options:
            kw[name] = options[name]
    if q_lens is None:
        q = rnd(batch, options.pop("len_q", 1), hq, dim).to(dtype)
        longest, cu = q.shape[1], None
    else:
        q, longest = rnd(sum(q_lens), hq, dim).to(dtype), max(q_lens)
        cu = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        kw |= dict(cu_seqlens_q=cu, max_seqlen_q=longest)
    given = {n: kw[n] for n in kw if n not in ("causal", "window_size", "max_seqlen_q")}
    call = Call(q, k, v, dim**-0.5, causal=kw["causal"], window_left=kw["window_size"][0], window_right=kw["window_size"][1],
                max_seqlen_q=longest, max_seqlen_k=width * page, block_table=table, kv_lens=lengths,
                batch_invariant=options.pop("batch_invariant", False), **given)
    return call, (q, k, v, table, lengths), kw


def poisoned_left(call):
    """The call after what lies in pages left of every window has gone: NaN in them, and wild table entries."""
    k, v, table, page = call.k.clone(), call.v.clone(), call.block_table.clone(), call.k.shape[1]
    q_lens = [call.q.shape[1]] * len(call.kv_lens) if call.cu_seqlens_q is None else call.cu_seqlens_q.diff().tolist()
    for b, (n, rows) in enumerate(zip(call.kv_lens.tolist(), q_lens)):
        gone = max(0, n - rows - call.window_left) // page
        k[table[b, :gone]] = v[table[b, :gone]] = float("nan")
        table[b, :gone] = 10**9
    assert not torch.equal(table, call.block_table)
    return call._replace(k=k, v=v, block_table=table)


def check(call, args, kw, **how):
    out, lse = host.decode(call, **how)
    want, want_lse = reference.attention_paged(*args, **kw)
    plain, plain_lse = reference.plain(reference.attention_paged, *args, **kw)
    close_out(out, want, plain, call.q.dtype)
    close_lse(lse, want_lse, plain_lse, call.q.dtype)
    return out, lse


@pytest.mark.parametrize("wave, waves", [(32, 4), (64, 2)])
@pytest.mark.parametrize("grid", [2, 14, 60])
def test_ragged_lengths_at_any_number_of_workers(wave, waves, grid):
    check(*paged([37, 300, 0, 5, 64, 129]), grid=grid, wave=wave, waves=waves)


@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("wave, waves", [(32, 4), (64, 2)])
def test_bits_do_not_depend_on_the_order_of_lanes_and_blocks(order, wave, waves):
    call, args, kw = paged([200, 70, 33], len_q=3)
    how = dict(grid=14, wave=wave, waves=waves)
    first = check(call, args, kw, **how)
    for seed in (1, 2):
        again = host.decode(call, order=order, seed=seed, **how)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("page", [1, 7, 32, 160])
def test_page_sizes(page):
    check(*paged([33, 150, 1], page=page, dtype=torch.float16), grid=6)


@pytest.mark.parametrize("dim, dim_v", [(80, 80), (128, 128), (36, 36), (33, 20), (20, 64)])
def test_head_dims_are_padded_with_zeros(dim, dim_v):
    check(*paged([40, 130], dim=dim, dim_v=dim_v), grid=4)


def test_head_dim_256_reads_q_from_shared_memory():
    check(*paged([40, 70], dim=256, heads=(2, 1)), grid=3, waves=2, stages=2)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_group_sizes(group):
    check(*paged([90, 20], heads=(2 * group, 2), len_q=2), grid=4)


def test_mixed_query_lengths_in_one_call():
    check(*paged([50, 200, 17, 3], q_lens=[1, 40, 0, 5], index=torch.int64), grid=10)


def test_more_queries_than_keys_leave_rows_empty():
    call, args, kw = paged([3, 40], len_q=9)
    out, lse = check(call, args, kw, grid=4)
    assert not out[0, :6].any() and (lse[0, :6] == float("-inf")).all()


@pytest.mark.parametrize("options", [
    dict(window=(10, 0)), dict(window=(5, 3), causal=False), dict(window=(-1, 2), causal=False, len_q=4), dict(softcap=2.0),
    dict(alibi_slopes=torch.tensor([[0.5, 0.1, 0.0, 2.0], [0.3, 0.2, 0.9, 1.0]])), dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])),
    dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0], dtype=torch.bfloat16), window=(0, 0)),
    dict(causal=False, len_q=5), dict(k_scale=torch.tensor([[0.5, 2.0], [1.5, 1.0]]), v_scale=torch.tensor([0.25, 3.0])),
    dict(k_scale=0.5, v_scale=1.5), dict(offset=1), dict(offset=3, page=7),
], ids=lambda o: "-".join(o))
def test_options(options):
    check(*paged([130, 45], **options), grid=6)


@pytest.mark.parametrize("wave, waves", [(32, 4), (64, 2)])
@pytest.mark.parametrize("cache", list(FP8))
def test_eight_bit_caches(cache, wave, waves):
    check(*paged([70, 33], cache=cache, k_scale=torch.tensor(0.7), v_scale=torch.tensor([1.1, 0.4])), grid=4, wave=wave, waves=waves)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_q_at_its_position(interleaved):
    angle = torch.arange(140)[:, None] * 0.3 ** torch.arange(16)
    check(*paged([130, 45], len_q=3, rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=interleaved), grid=6)


def test_out_may_be_float32_strided_and_unaligned():
    call, args, kw = paged([50, 20])
    room = torch.zeros(2, 1, 4, 67)
    out, _ = check(call._replace(out=room[..., 1:65]), args, kw, grid=4)
    assert out.dtype is torch.float32 and not room[..., 0].any() and not room[..., 65:].any()


@pytest.mark.parametrize("grid, lines", [(2, 2), (6, 2), (7, 1), (40, 2)])
def test_batch_invariant_rows_are_the_same_bits_alone_and_in_a_batch(grid, lines):
    lens = [600, 40, 1100]
    call, args, kw = paged(lens, batch_invariant=True)
    out, lse = check(call, args, kw, grid=grid, lines=lines)
    for b in range(3):
        alone = call._replace(q=call.q[b : b + 1], block_table=call.block_table[b : b + 1], kv_lens=call.kv_lens[b : b + 1])
        got, got_lse = host.decode(alone, grid=2)
        assert torch.equal(got[0], out[b]) and torch.equal(got_lse[0], lse[b])


def test_dense_and_varlen_are_views_of_the_same_kernel():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 64, generator=g).half() for n, h in ((3, 4), (70, 2), (70, 2)))
    out, lse = host.decode(Call(q, k, v, 0.125, causal=True, max_seqlen_q=3, max_seqlen_k=70), grid=6)
    want, want_lse = reference.attention(q, k, v, causal=True)
    close_out(out, want, reference.plain(reference.attention, q, k, v, causal=True)[0], q.dtype)
    cu_q, cu_k = torch.tensor([0, 3, 6]), torch.tensor([0, 70, 140])
    ragged = Call(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), 0.125, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3,
                  max_seqlen_k=70)
    again, again_lse = host.decode(ragged, grid=6)
    assert torch.equal(again.view_as(out), out) and torch.equal(again_lse.view_as(lse), lse)
    used = torch.tensor([20, 0])
    out, lse = host.decode(ragged._replace(seqused_k=used), grid=6)
    want, want_lse = reference.attention_varlen(*ragged[:3], cu_q, cu_k, 3, 70, seqused_k=used, causal=True)
    close_lse(lse, want_lse, want_lse, q.dtype)
    assert torch.allclose(out.double(), want, atol=2e-3)


def test_a_missing_barrier_is_found():
    """The tester is tested: with wave barriers taken out, the host device or the reference must notice."""
    call, args, kw = paged([200])
    library = host.build("divergent", 32)
    with pytest.raises(RuntimeError, match=r"divergent\.cpp:\d+"):
        host.run(library, "portattn_simt_divergent", b"", (1, 1))


def test_random_problems():
    random.seed(11)
    for seed in range(12):
        lens = [random.choice([0, 1, 15, 16, 17, 63, 64, 65, 200]) for _ in range(random.randint(1, 5))]
        call, args, kw = paged(lens, heads=random.choice([(2, 1), (6, 2), (4, 4)]), page=random.choice([16, 5, 64]), seed=seed,
                               q_lens=[random.randint(0, 9) for _ in lens] + [] if random.random() < 0.5 else None,
                               window=random.choice([(-1, -1), (20, 0)]), batch_invariant=random.random() < 0.3)
        if call.q.numel():
            check(call, args, kw, grid=random.choice([4, 12, 36]), order=host.RANDOM, seed=seed)


def test_the_lse_of_a_row_without_keys_is_the_sink_exactly():
    sinks = torch.tensor([1.9954504, -2.3, float("-inf"), 3.6340675])
    call, args, kw = paged([0, 20], sinks=sinks)
    _, lse = check(call, args, kw, grid=2)
    assert torch.equal(lse[0, 0], sinks)


@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_inside_the_length_is_the_callers_and_reaches_its_rows_alone(which):
    call, args, kw = paged([40, 40])
    cache = call.k if which == "k" else call.v
    cache[call.block_table[0, 1], 3] = float("nan")
    out, lse = host.decode(call, grid=6)
    assert out[0].isnan().all() and lse[0].isnan().all() == (which == "k") and not out[1].isnan().any() and not lse[1].isnan().any()


@pytest.mark.parametrize("page", [1, 7, 16, 48])
def test_pages_left_of_every_window_may_hold_anything(page):
    call, args, kw = paged([100, 333, 30], len_q=3, window=(16, 0), page=page)
    check(poisoned_left(call), args, kw, grid=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=lambda d: str(d)[6:])
def test_every_eight_bit_value_is_read_exactly(cache, dtype):
    """With one key, out is its value: all 256 codes over four kv heads of 64 columns; infinity and NaN too."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    v = codes.view(1, 1, 4, 64).view(cache)
    k = torch.zeros(1, 1, 4, 64, dtype=torch.uint8).view(cache)
    call = Call(torch.zeros(1, 1, 4, 64, dtype=dtype), k, v, 1.0, max_seqlen_q=1, max_seqlen_k=1, block_table=torch.zeros(1, 1, dtype=torch.int32),
                kv_lens=torch.ones(1, dtype=torch.int32))
    out, _ = host.decode(call, grid=4)
    assert torch.equal(out.flatten().float().nan_to_num(nan=7e7), v.flatten().float().to(dtype).float().nan_to_num(nan=7e7))
