"""On a CUDA device: random problems against the float64 reference, streams and graphs side by side. Skipped without one."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

import portattn
from portattn import instances, native, reference
from portattn.device import maker
from portattn.testing.tolerance import close_lse, close_out

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and torch.version.cuda), reason="device: no CUDA device")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def problem(lens, q_lens, heads, dim, dim_v, page, dtype, *, cache=None, hnd=False, ragged=False, seed=0, **options):
    """CPU arguments of attention_paged; unused slots are NaN and unused table entries wild."""
    g = torch.Generator().manual_seed(seed)
    (hq, hk), batch = heads, len(lens)
    width = max(1, max(-(-n // page) for n in lens)) + 2
    count = sum(-(-n // page) for n in lens) + 3
    k, v = torch.full((count, page, hk, dim), float("nan")), torch.full((count, page, hk, dim_v), float("nan"))
    order, table, at = torch.randperm(count, generator=g), torch.full((batch, width), 10**9, dtype=torch.int32), 0
    for b, n in enumerate(lens):
        pages = -(-n // page)
        table[b, :pages] = order[at : at + pages]
        at += pages
        j = torch.arange(n)
        rows = table[b].long()[j // page]
        k[rows, j % page], v[rows, j % page] = torch.randn(n, hk, dim, generator=g), torch.randn(n, hk, dim_v, generator=g)
    k, v = (x.to(FP8[cache] if cache else dtype) for x in (k, v))
    if hnd:
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        options["kv_layout"] = "HND"
    if ragged:
        q = torch.randn(sum(q_lens), hq, dim, generator=g).to(dtype)
        options |= dict(cu_seqlens_q=torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32), max_seqlen_q=max(q_lens))
    else:
        q = torch.randn(batch, q_lens[0], hq, dim, generator=g).to(dtype)
    return (q, k, v, table, torch.tensor(lens, dtype=torch.int32)), options


def on_gpu(args, options, **more):
    move = lambda x: x.cuda() if isinstance(x, torch.Tensor) else x
    return portattn.attention_paged(*map(move, args), **{k: move(v) for k, v in options.items()}, return_lse=True, backend="cuda", **more)


def check(args, options):
    out, lse = on_gpu(args, options)
    want, want_lse = reference.attention_paged(*args, **options)
    plain, plain_lse = reference.plain(reference.attention_paged, *args, **options)
    close_out(out.cpu(), want, plain, args[0].dtype)
    close_lse(lse.cpu(), want_lse, plain_lse, args[0].dtype)


@pytest.mark.parametrize("lens", [(1024,), (4000, 17, 300, 1024, 0), (70000,)])
def test_long_decodes(lens):
    check(*problem(lens, (1,), (32, 8), 128, 128, 16, torch.bfloat16, causal=True))


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed):
    r = random.Random(seed)
    batch = r.choice([1, 2, 3, 7, 40, 300])
    top = r.choice([20, 200, 3000]) if batch < 40 else 200
    hk, group = r.choice([1, 2, 4]), r.choice([1, 2, 3, 4, 8, 16])
    dim = r.choice([64, 128, 80, 96, 72, 36, 192, 256, 33])
    longest, ragged = r.choice([1, 1, 2, 5, 33, 150]) if batch < 40 else 1, r.random() < 0.4
    q_lens = [r.randint(0, longest) if ragged else longest for _ in range(batch)]
    q_lens[0] = max(1, q_lens[0])
    options = dict(causal=r.random() < 0.7, window_size=r.choice([(-1, -1), (-1, -1), (10, 0), (100, 3), (5, -1)]),
                   softcap=r.choice([0.0, 0.0, 5.0]), batch_invariant=r.random() < 0.3)
    g = torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.bfloat16, torch.float16])
    if r.random() < 0.3:
        options["alibi_slopes"] = torch.rand(hk * group, generator=g) * 0.5
    if r.random() < 0.3:
        options["sinks"] = torch.randn(hk * group, generator=g).to(dtype)
    if r.random() < 0.3:
        options |= dict(k_scale=torch.rand(batch, hk, generator=g) + 0.5, v_scale=torch.rand(hk, generator=g) + 0.5)
    check(*problem([r.randint(0, top) for _ in range(batch)], q_lens, (hk * group, hk), dim, r.choice([dim, dim, 64, dim - 1]),
                   r.choice([16, 16, 32, 1, 7, 64, 128]), dtype, cache=r.choice([None, None, None, "e4m3", "e5m2"]), hnd=r.random() < 0.4,
                   ragged=ragged, seed=seed, **options))


def test_graphs_and_eager_calls_at_the_same_time_do_not_share_partial_results():
    args, options = problem((3000, 2000), (1,), (8, 2), 128, 128, 16, torch.bfloat16, causal=True)
    gpu = [x.cuda() for x in args]
    run = lambda out: portattn.attention_paged(*gpu, causal=True, out=out, backend="cuda")
    want = run(torch.empty_like(gpu[0])).clone()
    graphs = []
    for _ in range(2):
        out, graph = torch.empty_like(gpu[0]), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                run(out)
        graphs.append((graph, out))
    streams = [torch.cuda.Stream() for _ in range(3)]
    eager = torch.empty_like(gpu[0])
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            run(eager)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for _, out in graphs) and torch.equal(eager, want)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dim", [64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window_size=(200, 0)), dict(), dict(causal=True, softcap=5.0)], ids=["causal", "window", "full", "softcap"])
def test_tiles_in_boxes(options, dim, large, monkeypatch):
    """Dense, ragged and over pages, in small tiles and in large; the numbers of heads and tokens keep bound calls apart."""
    monkeypatch.setattr(native, "large_tiles_pay", lambda call, dim, limits: large and dim in instances.SM90_LARGE_TILES)
    group, more = (4 if large else 2), 64 * large
    lens, q_lens = (500 + more, 17, 300, 0, 900), (450, 17, 1, 0, 200)
    check(*problem(lens, q_lens, (2 * group, 2), dim, dim, 16 * group, torch.bfloat16, ragged=True, **options))
    check(*problem(lens[:3], (200 + more,) * 3, (2 * group, 2), dim, dim, 16, torch.float16, **options))
    g = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(2, n, h, dim, generator=g).bfloat16() for n, h in ((270 + more, 2 * group), (400, 2), (400, 2)))
    cu_q, cu_k = torch.tensor([0, 100, 101, 270 + more], dtype=torch.int32), torch.tensor([0, 0, 150, 400], dtype=torch.int32)
    ragged = (q[0], k[0], v[0], cu_q, cu_k, 169 + more, 250)
    for name, args in (("attention", (q, k, v)), ("attention_varlen", ragged)):
        out, lse = getattr(portattn, name)(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in args), **options, return_lse=True, backend="cuda")
        want, want_lse = getattr(reference, name)(*args, **options)
        plain, plain_lse = reference.plain(getattr(reference, name), *args, **options)
        close_out(out.cpu(), want, plain, q.dtype)
        close_lse(lse.cpu(), want_lse, plain_lse, q.dtype)


@pytest.mark.parametrize("cache", [None, "e4m3", "e5m2"])
@pytest.mark.parametrize("heads", [(8, 2), (14, 2), (15, 3), (9, 3), (24, 2)], ids=str)
def test_tiles_of_whole_tokens(heads, cache):
    check(*problem((700, 17, 300, 0, 900), (450, 17, 1, 0, 200), heads, 128, 128, 16, torch.bfloat16, cache=cache, ragged=True, causal=True))
    check(*problem((700, 300), (90, 90), heads, 64, 64, 32, torch.float16, cache=cache, window_size=(100, 0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window_size=(200, 0)), dict(softcap=5.0, alibi_slopes=torch.rand(8)), dict(causal=True, sinks=torch.randn(8))], ids="-".join)
def test_tiles_over_eight_bit_caches(options, dim, cache, dtype):
    """Chunks, and steps of few rows that are faster as tiles; q of any size."""
    scales = dict(k_scale=torch.rand(5, 2) + 0.5, v_scale=torch.tensor(1.7))
    args, kw = problem((700, 17, 300, 0, 900), (450, 17, 1, 0, 200), (8, 2), dim, dim, 16, dtype, cache=cache, ragged=True, **options, **scales)
    if dtype is torch.bfloat16:
        args = (args[0] * torch.tensor([1.0, 2.0**-40, 2.0**20, 0.0, 2.0**-130])[torch.arange(args[0].shape[0]) % 5, None, None].bfloat16(), *args[1:])
    check(args, kw)
    args, kw = problem([300 + 7 * b for b in range(70)], (4,), (8, 2), dim, dim, 48, dtype, cache=cache, hnd=True, k_scale=0.5, v_scale=1.7, **options)
    check(args, kw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
@pytest.mark.parametrize("batch", [3, 16, 40])
def test_plain_decodes_over_eight_bit_caches(batch, dim, dtype, cache):
    """In clusters, in free blocks and in several on a multiprocessor; scales as numbers and as tensors; q as engines pass a step's, some padding."""
    r = random.Random(dim)
    lens = [1500, 0, *(round(16 * 40 ** r.random()) for _ in range(batch - 2))]
    scales = dict(k_scale=torch.tensor(0.5), v_scale=torch.rand(batch, 8, generator=torch.Generator().manual_seed(1)) + 0.5)
    check(*problem(lens, (1,), (32, 8), dim, dim, 16, dtype, cache=cache, causal=True, k_scale=0.5, v_scale=1.7))
    check(*problem(lens, (1,), (24, 8), dim, dim, 32, dtype, cache=cache, hnd=True, causal=True, **scales))
    check(*problem(lens, [0 if b % 5 == 4 else 1 for b in range(batch)], (32, 8), dim, dim, 16, dtype, cache=cache, ragged=True, causal=True, **scales))


@pytest.mark.parametrize("batch, dim, cache", [(2, 64, None), (2, 128, "e4m3"), (12, 80, None), (12, 256, None), (12, 64, "e4m3"), (12, 96, "e4m3"),
                                               (40, 64, None), (40, 128, None), (40, 192, "e4m3"), (40, 192, None)])
def test_plain_decodes_with_windows_softcap_and_sinks(batch, dim, cache):
    """In clusters and free blocks, windows within one block's keys and over several; table entries left of them are wild, and values NaN."""
    r = random.Random(dim)
    lens = [3000, 1, 0, *(round(16 * 40 ** r.random()) for _ in range(batch - 3))][:batch]
    sinks, ragged = torch.randn(32, generator=torch.Generator().manual_seed(1)), [0 if b % 5 == 4 else 1 for b in range(batch)]
    scales = dict(k_scale=0.5, v_scale=torch.rand(batch, 8, generator=torch.Generator().manual_seed(1)) + 0.5) if cache else {}
    for left, more, q_lens in ((0, {}, None), (127, dict(sinks=sinks), None), (1023, dict(sinks=sinks.bfloat16(), softcap=20.0), ragged), (-1, dict(softcap=5.0), None)):
        options = dict(causal=True, window_size=(left, 0), cache=cache, **more, **scales)
        args, options = problem(lens, q_lens or (1,), (32, 8), dim, dim, 16, torch.bfloat16, ragged=q_lens is not None, **options)
        check(args, options)
        out = on_gpu(args, options)[0]
        for b, n in enumerate(lens if left >= 0 else ()):
            gone = args[3][b, : max(0, n - 1 - left) // 16]
            for x in args[1:3]:
                x[gone.long()] = float("nan")
            gone.fill_(10**9)
        assert torch.equal(on_gpu(args, options)[0], out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [None, "e4m3", "e5m2"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_tiles_over_pages_of_every_cache(dim, cache, dtype):
    """More blocks of rows than multiprocessors, so that each takes several; ragged, among single tokens, with a window, and of one head each."""
    scales = dict(k_scale=torch.tensor(0.5), v_scale=torch.rand(8, generator=torch.Generator().manual_seed(1)) + 0.5) if cache else {}
    lens = [900, 130, 0, 2300, 77, 640]
    check(*problem(lens, (300,), (32, 8), dim, dim, 16, dtype, cache=cache, causal=True, **scales))
    check(*problem(lens, [1, 130, 40, 600, 77, 1], (24, 8), dim, dim, 32, dtype, cache=cache, ragged=True, causal=True, window_size=(400, 0), **scales))
    check(*problem(lens, (100,), (8, 8), dim, dim, 16, dtype, cache=cache, hnd=True, **scales))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
def test_every_value_of_an_eight_bit_cache_is_read_exactly(cache, dtype, dim):
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    row = lambda x: x.view(1, 1, -1, dim).expand(1, 16, -1, dim).contiguous().view(FP8[cache])
    heads, values = 256 // dim, codes.view(FP8[cache]).float().cuda()
    none, one, table = torch.zeros(256, dtype=torch.uint8), torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    run = lambda q, k, v: portattn.attention_paged(q, row(k).cuda(), row(v).cuda(), table, one, softmax_scale=1.0, return_lse=True, backend="cuda")
    q = torch.zeros(1, 1, heads, dim, dtype=dtype, device="cuda")
    assert torch.equal(run(q, none, codes)[0].flatten().float().nan_to_num(nan=7e7), values.nan_to_num(nan=7e7))
    finite = values.isfinite()
    for column in range(dim):
        q.zero_()[..., column] = 1.0
        lse = run(q, torch.where(finite.cpu(), codes, 0), none)[1].flatten()
        assert torch.allclose(lse, torch.where(finite, values, 0.0).view(heads, dim)[:, column], rtol=1e-6, atol=4e-6)
    nan = ~finite.view(heads, dim).all(1)  # zero times infinity too
    assert torch.equal(run(q, codes, none)[1].flatten().isnan(), nan)


@pytest.mark.parametrize("batch, top", [(1, 9000), (8, 1000), (256, 4000)])
@pytest.mark.parametrize("cache", [None, "e4m3", "e5m2"])
def test_plain_decodes_of_ragged_lengths_are_right_and_the_same_bits_in_every_replay(cache, batch, top):
    """Blocks of a cluster send each other states; the general kernel, which ALiBi asks for, has none of that."""
    r = random.Random(batch)
    lens = [top, *(round(16 * (top / 16) ** r.random()) for _ in range(batch - 1))]
    (q, *rest), _ = problem(lens, (1,), (32, 8), 128, 128, 16, torch.bfloat16, cache=cache)
    args = [x.cuda() for x in (q, *rest)]
    run = lambda **kw: portattn.attention_paged(*args, causal=True, backend="cuda", **kw)
    general, lse = run(alibi_slopes=torch.zeros(32, device="cuda"), return_lse=True)
    out, got_lse = run(return_lse=True)
    assert torch.allclose(out.float(), general.float(), atol=2e-3, rtol=2e-2) and torch.allclose(got_lse, lse, atol=1e-4)
    graph, captured = torch.cuda.CUDAGraph(), torch.empty_like(out)
    with torch.cuda.graph(graph):
        for _ in range(20):
            run(out=captured)
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, out)


def test_mixed_batches_whose_launches_overlap_are_right_in_every_replay_and_before_what_comes_next():
    r = random.Random(3)
    q_lens = [r.choice([1, 1, 1, 40, 200]) for _ in range(40)]
    lens = [n + r.randint(0, 900) for n in q_lens]
    args, options = problem(lens, q_lens, (32, 8), 128, 128, 16, torch.bfloat16, ragged=True, causal=True)
    check(args, options)
    want = on_gpu(args, options)[0].clone()
    gpu = [x.cuda() for x in args]
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    graph, out, seen = torch.cuda.CUDAGraph(), torch.empty_like(gpu[0]), []
    with torch.cuda.graph(graph):
        for _ in range(10):
            portattn.attention_paged(*gpu, **options, out=out, backend="cuda")
            seen.append(out.clone())
            out.fill_(float("nan"))
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, want) for x in seen)


def test_launches_that_begin_early_read_what_the_ones_before_wrote():
    """Each step's query, new key and new value are the last one's result; torch's own kernels come in between, or do not."""
    steps, start = 40, [700, 1, 90, 300]
    (q, k, v, table, lens), _ = problem(start, (1,), (8, 2), 64, 64, 16, torch.bfloat16)
    room = torch.arange(k.shape[0], k.shape[0] + 16, dtype=torch.int32).view(4, 4)  # pages for 40 more tokens each
    table = torch.cat((table[:, :-2], room), 1)
    for b, n in enumerate(start):
        table[b, -(-n // 16) :][:4] = room[b]
    k, v = (torch.cat((x, torch.zeros(16, *x.shape[1:], dtype=x.dtype))).cuda() for x in (k, v))
    q, table, lens = q.cuda(), table.cuda(), lens.cuda()
    lens = [lens + i + 1 for i in range(steps)]

    def chain(wait):
        q_now, caches, seen = q, (k.clone(), v.clone()), []
        for i in range(steps):
            new = q_now[:, :, :2].contiguous() if i % 3 else q_now[:, :, :2]
            q_now = portattn.attention_paged(q_now, *caches, table, lens[i], k=new, v=new, causal=True, backend="cuda")
            seen.append(q_now)
            if wait:
                torch.cuda.synchronize()
        return torch.stack(seen), *(x.nan_to_num(7.0) for x in caches)

    want = chain(wait=True)
    assert not want[0].isnan().any() and not torch.equal(want[0][-1], want[0][-2])
    for _ in range(20):
        assert all(map(torch.equal, chain(wait=False), want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(wait=False)
    for _ in range(20):
        got[0].fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("q_lens", [[1] * 6, [1, 1, 40, 1, 200, 1, 1, 130]], ids=["decodes", "mixed"])
def test_two_streams_of_a_graph_wait_for_what_they_fork_from_and_what_they_join(q_lens):
    """A step is one call, two that read its result on a stream each, and one that reads theirs; nothing of torch's comes in between."""
    ragged, lens = max(q_lens) > 1, [300 * i + n for i, n in enumerate(q_lens)]
    (q, *rest), options = problem(lens, q_lens if ragged else (1,), (32, 8), 128, 128, 16, torch.bfloat16, ragged=ragged, causal=True)
    q, k, v, table, kv_lens = (x.cuda() for x in (q, *rest))
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}

    def paged(q, k, v, out):
        portattn.attention_paged(q, k, v, table, kv_lens, **options, out=out, backend="cuda")

    def chain(outs, other, wait=lambda: None):
        now, main = q, torch.cuda.current_stream()
        for a, b, c, d in outs:
            paged(now, k, v, a)
            wait()
            other.wait_stream(main)
            with torch.cuda.stream(other):
                paged(a, v, k, b)
                wait()
            paged(a, k, v, c)
            wait()
            main.wait_stream(other)
            rows, keys, out = (x.view(1, -1, *q.shape[-2:]) for x in (b, c, d))
            portattn.attention(rows, keys[:, :, :8], keys[:, :, 8:16], causal=True, out=out, backend="cuda")
            wait()
            now = d

    def wanted():
        want = torch.full((3, 4, *q.shape), float("nan"), dtype=q.dtype, device="cuda")
        chain(want, torch.cuda.current_stream(), torch.cuda.synchronize)
        return want

    seen, got, graph, side = [wanted()], torch.empty_like(wanted()), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        chain(got, side)
    for seed in range(5):
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        seen.append(wanted())
        assert not seen[-1].isnan().any() and not torch.equal(seen[-1][-1], seen[-2][-1])
        for run in (graph.replay, lambda: chain(got, side)):
            for _ in range(4):
                got.fill_(float("nan"))
                run()
                torch.cuda.synchronize()
                assert torch.equal(got, seen[-1])


@pytest.mark.parametrize("shape", [(3, 1, 8, 64), (2, 3), (5,), (4, 0, 2), (0, 3), ()])
def test_a_new_tensor_is_as_torch_would_make_it(shape):
    make, want = maker(shape, torch.bfloat16, torch.device("cuda", 0)), torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        assert make().is_inference()
    got = make()
    assert (got.shape, got.stride(), got.dtype, got.device) == (want.shape, want.stride(), want.dtype, want.device)
    assert not got.is_inference() and not got.requires_grad and got.data_ptr() != make().data_ptr() or not got.numel()


def test_eight_threads_on_their_own_streams():
    args, options = problem((3000, 200), (1,), (8, 2), 64, 64, 16, torch.float16, causal=True)
    want, _ = on_gpu(args, options)
    errors = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert torch.equal(on_gpu(args, options)[0], want)
        except Exception as exc:
            errors.append(exc)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors[0]
