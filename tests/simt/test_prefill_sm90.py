"""The Hopper prefill kernel on the host device, against the float64 reference: products read their tiles through emulated
descriptors, run early or late, and lanes take turns in three orders."""

from __future__ import annotations

import ctypes
import functools
import math

import pytest
import torch

from portattn import instances, native, reference
from portattn.problem import Call
from portattn.testing.tolerance import close_lse, close_out

from . import host
from .test_decode import paged, poisoned_left

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")


def prefill_sm90(call, *, blocks: int = 2, consumers: int = 2, n: int = 64, boxed: bool | None = None, order: int = host.FORWARD, seed: int = 0, maps: bool = True,
                 more_flags: int = 0, **more: int):
    """(out, lse) of the kernel on `blocks` multiprocessors; checks that the counters are zero again. `maps`: that k and v have tensor maps;
    `boxed`: the instance of calls that they bring, by default wherever it can serve."""
    prepared = host.prepare(call, grid=1)
    options = {name: prepared.launches[0].options[name] for name in ("t", "c", "d")}
    dim = int(options["d"])
    packed, at = bytearray(prepared.packed), len(prepared.packed) - 8  # flags
    flags = int.from_bytes(packed[at : at + 4], "little")
    can = maps and native.in_boxes(call, flags) and call.q.data_ptr() % 16 == 0
    assert can or not boxed
    boxed = can if boxed is None else boxed
    library = host.build("prefill_sm90", consumers=consumers, n=n, boxed=int(boxed), **options, **more)
    out = call.out if call.out is not None else prepared.out
    shape = instances.prefill_sm90_shape(str(call.q.dtype)[6:], str(call.k.dtype)[6:], dim, boxed)._replace(keys=n, rows=64 * consumers)
    made, mapped = native.tile_maps(library.portattn_simt_encode if maps else None, call, native.mapped(out), shape, dim, flags)
    assert bool(mapped & native.MAPPED) == (maps and (boxed or call.k.dtype is call.q.dtype) and flags & native.ALIGNED != 0 and flags & native.UNIFORM_PAGES != 0)
    argument, addresses = made(), [x.data_ptr() for x in (call.q, call.k, call.v, out)]
    off = (native.MAPPED_Q if addresses[0] % 16 else 0) | (native.MAPPED_OUT if addresses[3] % 16 else 0)
    argument.move(addresses, off)
    packed[at : at + 4] = (flags | mapped & ~off | more_flags).to_bytes(4, "little")
    error = ctypes.create_string_buffer(2000)
    if library.portattn_simt_prefill_sm90(bytes(packed), ctypes.c_void_p(argument.address), blocks, 1, order, seed, error, len(error)):
        raise RuntimeError(error.value.decode())
    return prepared.results()


def check(call, args, kw, skip=(), **how):
    """Compares what the kernel writes; sequences of few rows, whose numbers are in `skip`, are the decode kernel's."""
    out, lse = prefill_sm90(call, **how)
    want, want_lse = reference.attention_paged(*args, **kw)
    plain, plain_lse = reference.plain(reference.attention_paged, *args, **kw)
    if skip:
        cu = call.cu_seqlens_q.tolist()
        for b in skip:
            assert out[cu[b] : cu[b + 1]].isnan().all(), "rows of another kernel were written"
        keep = torch.ones(out.shape[0], dtype=torch.bool)
        for b in skip:
            keep[cu[b] : cu[b + 1]] = False
        out, lse, want, want_lse, plain, plain_lse = (x[keep] for x in (out, lse, want, want_lse, plain, plain_lse))
    close_out(out, want, plain, call.q.dtype)
    close_lse(lse, want_lse, plain_lse, call.q.dtype)
    return out, lse


@pytest.mark.parametrize("boxed", [None, False])
@pytest.mark.parametrize("options", [
    dict(), dict(causal=False), dict(window=(40, 0)), dict(window=(30, 5), causal=False), dict(softcap=3.0), dict(offset=1),
    dict(sinks=torch.tensor([1.0, -2.0, float("-inf"), 8.0])), dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.0, 2.0])), dict(page=7),
], ids=lambda o: "-".join(o) or "causal")
def test_chunks(options, boxed):
    check(*paged([150, 33, 200, 0, 90], q_lens=[70, 1, 40, 0, 50], **options), skip=(1, 3), boxed=boxed)


@pytest.mark.parametrize("q_lens", [[70, 1, 40, 0, 5], [8, 8, 8, 8, 8], [1, 1, 2, 1, 1]], ids=str)
def test_alone_it_takes_sequences_of_few_rows_too(q_lens):
    check(*paged([150, 33, 200, 0, 90], q_lens=q_lens), more_flags=native.ALL_TILES)


@pytest.mark.parametrize("order", [host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("blocks", [1, 3])
def test_bits_do_not_depend_on_the_order_of_lanes_and_blocks(order, blocks):
    call, args, kw = paged([300, 70, 133], q_lens=[150, 40, 33])
    first, _ = check(call, args, kw)
    again, _ = prefill_sm90(call, blocks=blocks, order=order, seed=3)
    assert torch.equal(first, again)


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("dim, n", [(64, 64), (256, 64)])  # with room for q of two tiles, and of one
def test_more_queries_than_keys_and_no_keys_at_all(dim, n, maps):
    out, lse = check(*paged([20, 0], len_q=70, dim=dim), n=n, blocks=1, maps=maps)
    assert not out[1].any() and (lse[1] == float("-inf")).all() and not out[0, :50].any()


@pytest.mark.parametrize("order", [host.FORWARD, host.REVERSE])
@pytest.mark.parametrize("lens, q_lens, dim, n, options", [
    ([64, 0], [40, 40], 192, 80, dict(heads=(4, 1))), ([0, 20, 0], [150, 0, 0], 64, 64, dict(heads=(2, 2), page=48, window=(0, 0))),
    ([20, 0, 200], [90, 150, 90], 256, 64, dict(heads=(2, 2), page=7, causal=False)),
], ids=lambda x: str(len(x)) if isinstance(x, list) else None)
def test_tiles_without_keys_among_others(lens, q_lens, dim, n, options, order):
    few = [b for b, rows in enumerate(q_lens) if rows * options["heads"][0] // options["heads"][1] <= 64 and rows]
    check(*paged(lens, q_lens=q_lens, dim=dim, **options), skip=few, n=n, blocks=1, order=order)


@pytest.mark.parametrize("dim, dim_v, consumers, n", [(128, 128, 2, 128), (64, 64, 2, 192), (64, 64, 3, 96), (96, 40, 2, 96), (80, 80, 2, 64), (192, 128, 2, 80),
                                                      (256, 256, 2, 64), (20, 36, 2, 64)])
def test_head_dims(dim, dim_v, consumers, n):
    check(*paged([200, 90], dim=dim, dim_v=dim_v, heads=(2, 1), q_lens=[120, 40], dtype=torch.float16), consumers=consumers, n=n, order=host.REVERSE)


def test_rotary_turns_q_and_float_out():
    angle = torch.arange(140)[:, None] * 0.3 ** torch.arange(16)
    call, args, kw = paged([130, 45], q_lens=[80, 40], rotary_cos=angle.cos(), rotary_sin=angle.sin())
    check(call, args, kw)
    check(call._replace(out=torch.empty(120, 4, 65)[..., :64]), args, kw)


def test_a_q_that_is_not_aligned():
    call, args, kw = paged([130, 45], q_lens=[80, 40])
    shifted = torch.zeros(call.q.numel() + 3, dtype=call.q.dtype)[3:].view(call.q.shape).copy_(call.q)
    check(call._replace(q=shifted), args, kw)


@pytest.mark.parametrize("heads, consumers", [((3, 3), 2), ((6, 2), 2), ((16, 1), 3), ((32, 1), 2), ((5, 1), 2), ((14, 2), 3), ((12, 1), 2), ((71, 1), 2)],
                         ids=str)  # tiles of whole tokens, boxes of 16 rows, neither
@pytest.mark.parametrize("options", [dict(), dict(window=(20, 9), causal=False)], ids=["causal", "window"])
def test_groups(heads, options, consumers):
    group = heads[0] // heads[1]
    q_lens = [-(-200 // group), 3, -(-65 // group)]
    check(*paged([200, 70, 133], q_lens=q_lens, heads=heads, **options), skip=(1,) if 3 * group <= 64 else (), order=host.REVERSE, blocks=1, consumers=consumers)


@pytest.mark.parametrize("order", [host.FORWARD, host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("dim, n", [(64, 64), (256, 64)])  # with room for q of two tiles, and of one
def test_boxes_of_out_stay_within_their_sequence(dim, n, order):
    """The same bits as without maps, and nothing else is written: rows of q and out that belong to no sequence lie behind the last."""
    call, args, kw = paged([150, 90, 200, 40], q_lens=[150, 77, 131, 33], dim=dim, heads=(2, 2), dtype=torch.float16)
    q = torch.cat([call.q, torch.full((20, 2, dim), float("nan"), dtype=call.q.dtype)])
    call = call._replace(q=q)
    out, lse = prefill_sm90(call, n=n, order=order, more_flags=native.ALL_TILES)
    plain, plain_lse = prefill_sm90(call, n=n, maps=False, more_flags=native.ALL_TILES)
    assert torch.equal(out[:391], plain[:391]) and torch.equal(lse[:391], plain_lse[:391]) and out[391:].isnan().all()
    want, _ = reference.attention_paged(*args, **kw)
    close_out(out[:391], want, reference.plain(reference.attention_paged, *args, **kw)[0], call.q.dtype)


@pytest.mark.parametrize("blocks, order", [(1, host.REVERSE), (3, host.RANDOM)])
@pytest.mark.parametrize("dim, consumers, n", [(64, 3, 128), (128, 3, 80), (192, 2, 80), (256, 2, 64)])
@pytest.mark.parametrize("options", [dict(causal=True), dict(), dict(causal=True, window_left=130), dict(causal=True, max_seqlen_k=200)], ids=["causal", "full", "window", "more_queries"])
def test_dense_in_boxes_alone(dim, consumers, n, options, blocks, order):
    g = torch.Generator().manual_seed(3)
    keys = options.get("max_seqlen_k", 330)
    q, k, v = (torch.randn(2, s, h, dim, generator=g).half() for s, h in ((330, 4), (keys, 2), (keys, 2)))
    call = Call(q, k, v, 0.125, max_seqlen_q=330, **dict(max_seqlen_k=330) | options)
    out, lse = prefill_sm90(call, consumers=consumers, n=n, boxed=True, blocks=blocks, order=order)
    kw = dict(causal=call.causal, softmax_scale=0.125, window_size=(call.window_left, -1))
    close_out(out, reference.attention(q, k, v, **kw)[0], reference.plain(reference.attention, q, k, v, **kw)[0], q.dtype)


@pytest.mark.parametrize("scale", [0.125, -0.5, 0.0])
def test_dense(scale):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 80, h, 64, generator=g).half() for h in (4, 2, 2))
    out, lse = prefill_sm90(Call(q, k, v, scale, causal=True, max_seqlen_q=80, max_seqlen_k=80))
    kw = dict(causal=True, softmax_scale=scale)
    close_out(out, reference.attention(q, k, v, **kw)[0], reference.plain(reference.attention, q, k, v, **kw)[0], q.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stay_in_range_where_scores_are_so_large_that_their_sums_round(dtype):
    """Of 1.5 x 2^27, where float32 has steps of 16: a key 16 above what was seen before it weighs 2^16 as much, which f16 cannot hold."""
    q, k, v = torch.zeros(1, 70, 1, 64), torch.zeros(1, 128, 1, 64), torch.randn(1, 128, 1, 64, generator=torch.Generator().manual_seed(3))
    q[..., 0], q[..., 1], k[..., 0], k[:, 3, :, 1] = 1.5 * 2**13, 16.0, 2.0**14, 1.0
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, _ = prefill_sm90(Call(q, k, v, math.log(2), max_seqlen_q=70, max_seqlen_k=128))
    kw = dict(softmax_scale=math.log(2))
    close_out(out, reference.attention(q, k, v, **kw)[0], reference.plain(reference.attention, q, k, v, **kw)[0], dtype)


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("order", [host.FORWARD, host.RANDOM])
def test_ragged_keys_among_which_others_poison_lies(order, boxed):
    """Blocks that come in boxes, and tails, which stop at a sequence's end: behind it are another one's NaN."""
    g = torch.Generator().manual_seed(5)
    q_lens, k_lens = [70, 150, 40], [130, 260, 64]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (q_lens, k_lens))
    q, k, v = (torch.randn(sum(n), h, 64, generator=g).half() for n, h in ((q_lens, 4), (k_lens, 2), (k_lens, 2)))
    poisoned = k.clone(), v.clone()
    for x in poisoned:
        x[130:390] = float("nan")
    call = Call(q, *poisoned, 0.125, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=150, max_seqlen_k=260)
    out, lse = prefill_sm90(call, order=order, boxed=boxed)
    args = (q, k, v, cu_q, cu_k, 150, 260)
    want, plain = (f(*args, causal=True, softmax_scale=0.125)[0] for f in (reference.attention_varlen, functools.partial(reference.plain, reference.attention_varlen)))
    keep = torch.cat([torch.arange(70), torch.arange(220, 260)])
    close_out(out[keep], want[keep], plain[keep], q.dtype)
    assert out[70:220].isnan().all()


@pytest.mark.parametrize("order", [host.FORWARD, host.RANDOM])
@pytest.mark.parametrize("page, boxed", [(1, False), (16, False), (16, True), (48, False), (48, True)])
def test_pages_left_of_every_window_may_hold_anything(page, order, boxed):
    """Blocks with such pages come in pieces after others that came in boxes, the warps without boxes far ahead."""
    call, args, kw = paged([300, 420, 133], q_lens=[90, 150, 40], window=(150, 0), page=page)
    check(poisoned_left(call), args, kw, order=order, blocks=1, boxed=boxed)


@pytest.mark.parametrize("maps", [True, False])
def test_maps_change_no_bits(maps):
    call, args, kw = paged([300, 70, 133], q_lens=[150, 40, 33])
    first, _ = check(call, args, kw)
    assert torch.equal(first, prefill_sm90(call, maps=maps, order=host.REVERSE)[0])


def test_heads_whose_keys_are_too_many_for_the_cache_come_in_sections():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, s, h, 64, generator=g).half() for s, h in ((200, 6), (200, 3), (200, 3)))
    out, lse = prefill_sm90(Call(q, k, v, 0.125, causal=True, max_seqlen_q=200, max_seqlen_k=200), together=401)
    kw = dict(causal=True, softmax_scale=0.125)
    close_out(out, reference.attention(q, k, v, **kw)[0], reference.plain(reference.attention, q, k, v, **kw)[0], q.dtype)


@pytest.mark.parametrize("boxed", [None, False])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype, dim, n, order, options", [
    (torch.bfloat16, 64, 64, host.REVERSE, dict()), (torch.float16, 128, 128, host.RANDOM, dict(heads=(2, 2))), (torch.bfloat16, 80, 64, host.FORWARD, dict()),
    (torch.float16, 192, 80, host.REVERSE, dict(heads=(2, 1))), (torch.bfloat16, 256, 64, host.REVERSE, dict(heads=(2, 1))),
    (torch.float16, 96, 96, host.RANDOM, dict(heads=(2, 1), page=48)), (torch.bfloat16, 200, 64, host.FORWARD, dict(heads=(2, 1), window=(70, 0))),
    (torch.bfloat16, 64, 64, host.RANDOM, dict(window=(40, 3), causal=False)), (torch.bfloat16, 64, 64, host.REVERSE, dict(offset=1)),
    (torch.float16, 72, 64, host.FORWARD, dict(page=7)),
], ids=str)
def test_caches_of_8_bits(cache, dtype, dim, n, order, options, boxed):
    """Each block widened by the threads that copied it, or, of boxes, by others; scales as a number and as a tensor."""
    options = dict(heads=(4, 2)) | options
    k_scale = 0.5 if cache == "e5m2" else torch.linspace(0.25, 1.5, options["heads"][1])
    call, args, kw = paged([150, 33, 300, 0, 90], q_lens=[70, 1, 140, 0, 66], dim=dim, dtype=dtype, cache=cache, k_scale=k_scale, v_scale=2.0, **options)
    check(poisoned_left(call) if "window" in options else call, args, kw, skip=(1, 3), n=n, order=order, blocks=1, boxed=boxed)


@pytest.mark.parametrize("options", [dict(), dict(softcap=4.0, alibi_slopes=torch.tensor([0.5, 0.1]), sinks=torch.tensor([1.0, -2.0]))], ids=lambda o: "-".join(o))
def test_rows_of_q_of_any_size_over_8_bits(options):
    """bf16 whose products are of f16: a unit a row. A row that is not finite is no other's."""
    call, args, kw = paged([150, 90], q_lens=[70, 66], dim=64, heads=(2, 1), cache="e4m3", **options)
    size = torch.tensor([1.0, 2.0**40, 2.0**-50, 0.0, 2.0**-120, 2.0**100, 2.0**-133])[torch.arange(136) % 7]
    q = (call.q * size[:, None, None]).bfloat16()
    q[:, :, 5] *= 2.0**-20
    args = (q, *args[1:])
    out, lse = prefill_sm90(call._replace(q=q), order=host.REVERSE, boxed=True)
    want, want_lse = reference.attention_paged(*args, **kw)
    close_out(out, want, reference.plain(reference.attention_paged, *args, **kw)[0], q.dtype)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=2e-3)
    tiny = prefill_sm90(call._replace(q=q, k_scale=1e-9), boxed=True)[0]
    assert not tiny[3].isnan().any(), "a row of zeros, whose unit times the scale is not zero"
    spoiled = q.clone()
    spoiled[8, 0, 3], spoiled[9, 1, 7] = float("nan"), float("inf")
    out, lse = prefill_sm90(call._replace(q=spoiled), boxed=True)
    whole, whole_lse = prefill_sm90(call._replace(q=q), boxed=True)
    keep = torch.ones(136, 2, dtype=torch.bool)
    keep[8, 0] = keep[9, 1] = False
    assert torch.equal(out[keep], whole[keep]) and torch.equal(lse[keep], whole_lse[keep]) and out[8, 0].isnan().all()


@pytest.mark.parametrize("kv", ["bfloat16", *instances.SM90_CACHES])
@pytest.mark.parametrize("dim", instances.HEAD_DIMS)
def test_the_host_knows_the_kernels_shared_memory_and_it_fits(dim, kv):
    large = [(True, True)] if kv == "bfloat16" and dim in instances.SM90_LARGE_TILES else []
    for how in [(False, False), (True, False), *large]:
        shape = instances.prefill_sm90_shape("bfloat16", kv, dim, *how)
        assert shape.shared <= instances.limits_of("sm_90").shared_block
        if dim in (96, 192, 256) and kv != "float8_e5m2" or shape.rows > 128:
            options = {name[3:].lower(): value for name, value in shape.instance.options}
            assert host.build("prefill_sm90", **options).portattn_simt_shared_bytes() == shape.shared


@pytest.mark.parametrize("boxed", [True, False])
def test_tiles_are_found_among_many_sequences(boxed):
    """More than copying threads, of which few have tiles."""
    lens, q_lens = [0] * 300, [0] * 300
    for b, n in ((0, 70), (5, 90), (6, 66), (255, 130), (299, 75)):
        lens[b], q_lens[b] = n + 20, n
    check(*paged(lens, q_lens=q_lens, heads=(2, 2)), boxed=boxed, order=host.RANDOM)


@pytest.mark.parametrize("order", [host.FORWARD, host.REVERSE, host.RANDOM])
@pytest.mark.parametrize("options", [dict(), dict(window=(50, 0), sinks=torch.tensor([1.0, -2.0, 0.5, 8.0])), dict(page=32, softcap=5.0), dict(page=48)], ids=lambda o: "-".join(o))
def test_three_warpgroups_take_tiles_of_192_rows(order, options):
    call, args, kw = paged([700, 150, 33, 300], q_lens=[400, 70, 1, 97], **options)
    for blocks in (1, 3):
        check(call, args, kw, skip=(2,), consumers=3, n=96, order=order, blocks=blocks)
