"""The kernel of plain decode steps on the host device, against the float64 reference: parts, clusters and what their blocks send, and
what free blocks leave in the workspace."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from portattn import dialect, instances, native, reference
from portattn.problem import Call
from portattn.testing.tolerance import close_lse, close_out

from . import host
from .test_decode import paged, poisoned_left

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")


def decode(call, *, workers: int, lines: int | None = None, waves: int = 4, stages: int = 3, clusters: bool = True, order: int = host.FORWARD, seed: int = 0):
    """(out, lse) of `lines` clusters of `workers` blocks, or of as many free blocks."""
    ragged = call.cu_seqlens_q is not None
    out, lse = torch.full_like(call.q, float("nan")), torch.full(dialect.lse_shape(call), float("nan"))
    dtype, kv, dim = str(call.q.dtype)[6:], str(call.k.dtype)[6:], call.q.shape[-1]
    values = native.attention_values(call, out)
    assert native.is_plain(call, values, dim)
    lines = lines or call.k.shape[-2]
    values = native.plain_values(values, native.dealing(call.k.shape[-2], lines * workers, lines))
    values |= dict(q=call.q.data_ptr(), k=call.k.data_ptr(), v=call.v.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
                   lengths=call.kv_lens.data_ptr(), block_table=call.block_table.data_ptr(), cu_q=call.cu_seqlens_q.data_ptr() if ragged else 0)
    values |= {name: x.data_ptr() for name in ("k_scale", "v_scale", "sinks") if isinstance(x := getattr(call, name), torch.Tensor)}
    room = native.plain_room(values, dim)
    partial, counters = torch.full((room.floats + 4,), float("nan")), torch.zeros(room.counters, dtype=torch.int32)
    if not clusters:
        values |= dict(partial=(partial.data_ptr() + 15) // 16 * 16, counters=counters.data_ptr())
    library = host.build("plain", t=native.TYPES[dtype], c=native.TYPES[kv], d=dim, waves=waves, stages=stages, ragged=int(ragged), clusters=int(clusters))
    host.run(library, "portattn_simt_plain", native.pack(native.ATTENTION, values), (lines, workers), order, seed)
    assert not counters.any(), "counters must be zero after a launch"
    return out, lse


def check(call, args, kw, **how):
    out, lse = decode(call, **how)
    want, want_lse = reference.attention_paged(*args, **kw)
    plain, plain_lse = reference.plain(reference.attention_paged, *args, **kw)
    close_out(out, want, plain, call.q.dtype)
    close_lse(lse, want_lse, plain_lse, call.q.dtype)
    return out, lse


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 7, 16])
def test_ragged_lengths_at_any_number_of_workers(workers, clusters):
    check(*paged([37, 300, 0, 5, 64, 129]), workers=workers, clusters=clusters)


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("lens", [(3000,), (700, 40, 1500, 64, 900)])
@pytest.mark.parametrize("workers, lines", [(1, 1), (2, 2), (3, 1)])
def test_long_lines_are_cut_into_parts_of_many_sizes(lens, workers, lines, clusters):
    check(*paged(lens, heads=(2, 2)), workers=workers, lines=lines, clusters=clusters)


def test_free_blocks_may_share_a_tile_by_more_than_a_warp_has_lanes():
    check(*paged([2400, 70], heads=(4, 1)), workers=37, clusters=False)


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("lens", [(200, 70, 33), (1800, 300)])
def test_bits_do_not_depend_on_the_order_of_lanes_and_blocks(order, lens, clusters):
    call, args, kw = paged(lens)
    first = check(call, args, kw, workers=4, clusters=clusters)
    for seed in (1, 2):
        again = decode(call, workers=4, clusters=clusters, order=order, seed=seed)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("order", [host.FORWARD, host.REVERSE])
def test_scores_that_rise_key_by_key_raise_the_base_again_and_again(order):
    call, args, kw = paged([900, 333], heads=(4, 2))
    for b, n in enumerate([900, 333]):  # keys along the first query, longer and longer: scores rise by a hundred powers of two
        direction = 10 * args[0][b, 0, ::2].float()
        for j in range(n):
            args[1][args[3][b, j // 16], j % 16] = (direction * (j / n)).to(args[1].dtype)
    check(call._replace(k=args[1]), args, kw, workers=2, order=order)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (14, 2), (16, 2), (3, 1)])
def test_group_sizes_and_heads_of_a_line(heads):
    for clusters in (True, False):
        check(*paged([90, 420], heads=heads), workers=3, clusters=clusters)
        check(*paged([90, 420], heads=heads), workers=5, lines=1, clusters=clusters)


@pytest.mark.parametrize("cache", [None, "e4m3"])
def test_of_a_ragged_batch_only_sequences_of_one_token_are_computed(cache):
    lens, q_lens = [90, 200, 300, 64, 40, 500, 33], [1, 70, 1, 0, 1, 3, 1]
    g = torch.Generator().manual_seed(1)
    call, args, kw = paged(lens, cache=cache)
    starts = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
    q = torch.randn(sum(q_lens), *call.q.shape[2:], generator=g).to(call.q.dtype)
    for how in (dict(workers=3), dict(workers=2, lines=1), dict(workers=3, clusters=False)):
        out, lse = decode(call._replace(q=q, cu_seqlens_q=starts, out=None, max_seqlen_q=max(q_lens)), **how)
        ragged = dict(kw, cu_seqlens_q=starts, max_seqlen_q=max(q_lens))
        want, want_lse = reference.attention_paged(q, *args[1:], **ragged)
        plain, plain_lse = reference.plain(reference.attention_paged, q, *args[1:], **ragged)
        one = torch.tensor([starts[b].item() for b, n in enumerate(q_lens) if n == 1])
        close_out(out[one], want[one], plain[one], q.dtype)
        close_lse(lse[one], want_lse[one], plain_lse[one], q.dtype)
        others = torch.ones(len(q), dtype=torch.bool)
        others[one] = False
        assert out[others].isnan().all(), "the others are another launch's"


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("cache", [None, "e4m3"])
@pytest.mark.parametrize("left", [0, 1, 15, 16, 63, 64, 100, 1000])
def test_windows_read_no_page_left_of_them(left, cache, clusters):
    call, args, kw = paged([37, 300, 0, 5, 64, 129, 700], window=(left, 0), cache=cache)
    out, lse = check(call, args, kw, workers=5, clusters=clusters)
    if left < 500:
        again, again_lse = decode(poisoned_left(call), workers=5, clusters=clusters)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("cache", [None, "e4m3"])
@pytest.mark.parametrize("options", [
    dict(softcap=2.0), dict(softcap=50.0, window=(40, 0)), dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])), dict(window=(20, 5), causal=False),
    dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0], dtype=torch.bfloat16), window=(127, -1), softcap=5.0),
], ids=lambda o: "-".join(o))
def test_softcap_sinks_and_windows_together(options, cache, clusters):
    for dim in (64, 96, 128):
        check(*paged([130, 45, 0, 900], cache=cache, dim=dim, **options), workers=6, clusters=clusters)


def test_windows_of_a_ragged_batch():
    call, args, kw = paged([90, 200, 300, 64], window=(70, 0), q_lens=[1, 1, 1, 1], sinks=torch.tensor([1.0, -2.0, 0.5, 8.0]))
    for how in (dict(workers=3), dict(workers=2, lines=1), dict(workers=3, clusters=False)):
        check(call, args, kw, **how)


@pytest.mark.parametrize("count", range(2, 17))
def test_rows_of_a_tile_that_any_number_of_blocks_share(count):
    check(*paged([64 * count - 5], heads=(7, 1)), workers=count)
    check(*paged([64 * count - 5], heads=(7, 1)), workers=count, clusters=False)


@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_page_sizes(page, dim):
    check(*paged([33, 150, 1], page=page, dim=dim, dtype=torch.float16), workers=6)


def test_head_dim_256():
    for clusters in (True, False):
        check(*paged([40, 170], dim=256, heads=(2, 1)), workers=3, waves=2, stages=2, clusters=clusters)


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_head_dims_whose_rows_are_not_whole_lines_or_not_a_power_of_two(dim):
    for clusters in (True, False):
        check(*paged([40, 170], dim=dim, heads=(4, 2)), workers=3, clusters=clusters)


@pytest.mark.parametrize("dim, dtype", [(64, torch.bfloat16), (80, torch.float16), (96, torch.bfloat16), (128, torch.float16), (192, torch.bfloat16),
                                        (256, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
def test_eight_bit_caches(dim, dtype, cache):
    for clusters in (True, False):
        check(*paged([70, 33, 200], dim=dim, dtype=dtype, heads=(6, 2), cache=cache, k_scale=0.7, v_scale=1.3), workers=4, waves=2, clusters=clusters)


@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("clusters", [True, False])
def test_bits_of_eight_bit_caches_do_not_depend_on_the_order_of_lanes_and_blocks(order, clusters):
    call, args, kw = paged([200, 70, 33, 900], dim=128, cache="e4m3")
    first = check(call, args, kw, workers=5, clusters=clusters)
    again = decode(call, workers=5, clusters=clusters, order=order, seed=1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("k_scale, v_scale", [
    (torch.tensor(0.5), torch.tensor(3.0)), (torch.tensor([0.5, 1.7]), 2.0), (torch.tensor([[0.5, 1.7], [2.0, 0.1]]), torch.tensor([[1.1, 0.4], [2.0, 1.0]])),
], ids=["one", "heads", "sequences"])
def test_scales_of_eight_bit_caches_may_be_tensors(k_scale, v_scale):
    for clusters in (True, False):
        check(*paged([700, 150], cache="e4m3", k_scale=k_scale, v_scale=v_scale), workers=3, lines=1, clusters=clusters)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_every_value_of_an_eight_bit_cache_is_read_exactly(cache, dim, dtype):
    """With one key, out is its value: all 256 codes over the kv heads, NaN too. Then as keys: only a head with one that is not finite is NaN, the others'
    lse tells."""
    heads = 256 // dim
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    row = lambda x: x.view(1, 1, heads, dim).view(cache).expand(1, 16, heads, dim).contiguous()
    call = Call(torch.zeros(1, 1, heads, dim, dtype=dtype), row(torch.zeros(256, dtype=torch.uint8)), row(codes), 1.0, max_seqlen_q=1, max_seqlen_k=16,
                block_table=torch.zeros(1, 1, dtype=torch.int32), kv_lens=torch.ones(1, dtype=torch.int32))
    out, _ = decode(call, workers=1)
    values = codes.view(cache).float()
    assert torch.equal(out.flatten().float().nan_to_num(nan=7e7), values.nan_to_num(nan=7e7))
    finite = values.isfinite()
    for column in range(dim):
        q = torch.zeros(1, 1, heads, dim, dtype=dtype)
        q[..., column] = 1.0
        lse = decode(call._replace(q=q, k=row(torch.where(finite, codes, 0))), workers=1)[1].flatten()
        want = torch.where(finite, values, 0.0).view(heads, dim)[:, column]
        assert torch.allclose(lse, want, rtol=1e-6, atol=4e-6), column
    out, lse = decode(call._replace(k=row(codes), v=row(torch.zeros(256, dtype=torch.uint8))), workers=1)
    nan = ~finite.view(heads, dim).all(1)  # zero times infinity too
    assert torch.equal(lse.flatten().isnan(), nan) and torch.equal(out[0, 0].isnan().all(1), nan) and torch.equal(out[0, 0].isnan().any(1), nan)


def test_queries_of_any_size_over_an_eight_bit_cache():
    """Rows of q from 2^-90 to 2^90 at once: scores of some are all alike, of others one key's is all that counts; and elements 2^20 apart in one row."""
    call, args, kw = paged([300, 77], heads=(8, 1), cache="e4m3", dim=128)
    q = call.q.float() * 2.0 ** torch.tensor([-90, -40, -10, 0, 3, 10, 40, 90]).view(1, 1, 8, 1)
    q[..., ::3] *= 2.0**-20
    q = q.to(call.q.dtype)
    check(call._replace(q=q), (q, *args[1:]), kw, workers=3)


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_in_an_eight_bit_cache_reaches_its_rows_alone(which, clusters):
    call, _, _ = paged([400, 40], cache="e4m3")
    (call.k if which == "k" else call.v)[call.block_table[0, 1], 3] = float("nan")
    out, lse = decode(call, workers=6, clusters=clusters)
    assert out[0].isnan().all() and not out[1].isnan().any() and not lse[1].isnan().any()


def test_scores_over_an_eight_bit_cache_that_rise_key_by_key_raise_the_base_again_and_again():
    call, args, kw = paged([900, 333], heads=(4, 2), cache="e4m3")
    for b, n in enumerate([900, 333]):
        direction = 10 * args[0][b, 0, ::2].float()
        for j in range(n):
            args[1][args[3][b, j // 16], j % 16] = (direction * (j / n)).to(args[1].dtype)
    check(call._replace(k=args[1]), args, kw, workers=2)


@pytest.mark.parametrize("clusters", [True, False])
def test_more_sequences_than_one_look(clusters):
    lens = [random.Random(b).choice([0, 1, 17, 64, 80]) for b in range(300)]
    check(*paged(lens, heads=(1, 1)), workers=7, lines=1, clusters=clusters)


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_inside_the_length_travels_between_parts_and_reaches_its_rows_alone(which, clusters):
    call, _, _ = paged([400, 40])
    (call.k if which == "k" else call.v)[call.block_table[0, 1], 3] = float("nan")
    out, lse = decode(call, workers=6, clusters=clusters)
    assert out[0].isnan().all() and not out[1].isnan().any() and not lse[1].isnan().any()


def test_shared_bytes_and_params_are_those_of_python():
    for t, c, dim, waves, stages in (("bf16", "bf16", 64, 4, 3), ("bf16", "bf16", 128, 4, 2), ("f16", "e4m3fn", 64, 4, 3), ("bf16", "bf16", 80, 4, 3),
                                     ("bf16", "e4m3fn", 80, 4, 3)):
        for clusters in (True, False):
            library = host.build("plain", t=t, c=c, d=dim, waves=waves, stages=stages, ragged=0, clusters=int(clusters))
            assert library.portattn_simt_shared_bytes() == instances.plain_shared(1 if c == "e4m3fn" else 2, dim, waves, stages, clusters)
        assert library.portattn_simt_params_bytes() == len(native.pack(native.ATTENTION, {}))


def test_random_problems():
    r = random.Random(3)
    for seed in range(10):
        lens = [r.choice([0, 1, 15, 16, 17, 63, 64, 65, 200, 900]) for _ in range(r.randint(1, 5))]
        call, args, kw = paged(lens, heads=r.choice([(2, 1), (6, 2), (4, 4)]), page=r.choice([16, 64]), seed=seed)
        check(call, args, kw, workers=r.choice([2, 6, 16]), clusters=seed % 2 == 0, order=host.RANDOM, seed=seed)


def test_lengths_past_the_table_count_as_what_it_has_room_for():
    call, _, _ = paged([40, 30])
    full = call._replace(block_table=call.block_table[:, :2].contiguous(), max_seqlen_k=32, kv_lens=torch.tensor([32, 30], dtype=torch.int32))
    long = full._replace(kv_lens=torch.tensor([4000, 30], dtype=torch.int32))
    for run in (lambda c: decode(c, workers=6), lambda c: decode(c, workers=6, clusters=False), lambda c: host.decode(c, grid=6)):
        assert all(torch.equal(a, b) for a, b in zip(run(full), run(long)))


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_parts_of_many_ragged_sequences(padded, clusters):
    """As engines pass a step's queries too: by their prefix sums, some sequences being a graph's padding, which have none."""
    r = random.Random(5)
    lens = [round(16 * 25 ** r.random()) for _ in range(140)]
    q_lens = [1 if b % 7 or b == 0 else 0 for b in range(140)] if padded else None
    check(*paged(lens, heads=(2, 2), q_lens=q_lens), workers=7, clusters=clusters, order=host.RANDOM, seed=2)
