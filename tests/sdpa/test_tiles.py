"""Tiles: cut anywhere, they compute the same; memory stays linear; bits repeat and do not depend on the batch."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import check, randn, sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import portattn
from portattn import reference
from portattn.testing.tolerance import close_lse, close_out

arith, tiled = sdpa.arith, sdpa.tiled
INVARIANT = dict(batch_invariant=True, backend="sdpa", causal=True, softcap=5.0)


@pytest.mark.parametrize("scores", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_any_cut_is_exact(pretend, kind, scores):
    pretend(kind)
    q, k, v = randn(2, 21, 6, 8), randn(2, 34, 2, 8), randn(2, 34, 2, 5)
    options = dict(
        causal=True, window_size=(15, 0), softcap=3.0, bias=randn(2, 1, 21, 34), alibi_slopes=torch.rand(6), sinks=randn(6)
    )
    rules = tiled.Rules(8**-0.5, 15, 0, 3.0, options["bias"], options["alibi_slopes"], options["sinks"])
    out, lse = torch.empty(2, 21, 6, 5), torch.empty(2, 21, 6)
    largest = Largest()
    with largest:
        tiled.attend(q, k, v, rules, out, lse, tiled.Limits(16, scores, 1 << 12))
    want, plain = reference.attention(q, k, v, **options), reference.plain(reference.attention, q, k, v, **options)
    close_out(out, want[0], plain[0], q.dtype)
    close_lse(lse, want[1], plain[1], q.dtype)
    if scores >= 100:  # below, one row of one head's group and one key is the least
        assert largest.scores <= max(scores, 3 * 3) + 3 * 16  # the sink's column


class Largest(TorchDispatchMode):
    """The largest result of a matrix product that is a tile of scores: its last two axes are rows and keys."""

    scores = elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
            if "softmax" in str(func):
                self.scores = max(self.scores, out.numel())
        return out


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_memory_is_linear_in_length(pretend, kind):
    pretend(kind)
    n, heads = 4096, 8
    q, k = randn(1, n, heads, 8), randn(1, n, 2, 8)
    largest = Largest()
    with largest:
        portattn.attention(
            q,
            k,
            k,
            causal=True,
            softcap=4.0,
            window_size=(n, 0),
            sinks=randn(heads),
            alibi_slopes=torch.rand(heads),
            bias=randn(1, heads, 1, n),
            return_lse=True,
            backend="sdpa",
        )
    assert largest.elements <= tiled.limits(torch.device("cpu")).scores + n * heads < n * n * heads // 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_logits_do_not_overflow(dtype):
    q, k, v = (randn(1, 300, 2, 64, dtype=dtype, seed=s) * 60 for s in range(3))
    check("attention", q, k, v, causal=True, softmax_scale=1.0)


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (3, 7), (256, 256), (576, 512)])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_head_dims_and_groups(dim, dim_v, group):
    check("attention", randn(1, 9, 2 * group, dim), randn(1, 12, 2, dim), randn(1, 12, 2, dim_v), causal=True)


def test_values_may_be_a_view_of_the_keys():
    latent = randn(1, 20, 1, 576)
    check("attention", randn(1, 3, 8, 576), latent, latent[..., :512], causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_request_has_the_same_bits_in_any_batch(pretend, kind, dtype):
    pretend(kind)
    lens_q, lens_k = [7, 1, 40], [30, 50, 40]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in (lens_q, lens_k))
    q, k, v = randn(48, 6, 16, dtype=dtype), randn(120, 2, 16, dtype=dtype), randn(120, 2, 16, dtype=dtype, seed=1)
    together = portattn.attention_varlen(q, k, v, cu_q, cu_k, 64, 99, **INVARIANT)
    pages = [x.new_zeros(12, 16, 2, 16) for x in (k, v)]
    for b, (n, m) in enumerate(zip(lens_q, lens_k)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = torch.tensor([0, n]), torch.tensor([0, m])
        alone = portattn.attention_varlen(q[rows], k[keys], v[keys], *own, n, m, **INVARIANT)
        assert torch.equal(together[rows], alone)
        placed = []
        for start in (0, 5):  # the same keys on other pages
            table = torch.arange(start, start + 4)[None]
            for cache, x in zip(pages, (k, v)):
                cache.view(-1, 2, 16)[start * 16 : start * 16 + m] = x[keys]
            placed.append(
                portattn.attention_paged(
                    q[rows], *pages, table, torch.tensor([m]), cu_seqlens_q=own[0], max_seqlen_q=n + start, **INVARIANT
                )
            )
        assert torch.equal(*placed)


def test_bits_repeat():
    q, k = randn(2, 100, 4, 32), randn(2, 100, 2, 32)
    first = portattn.attention(q, k, k, causal=True, sinks=randn(4), backend="sdpa")
    assert all(torch.equal(first, portattn.attention(q, k, k, causal=True, sinks=randn(4), backend="sdpa")) for _ in range(3))


def test_kept_buffers_are_a_threads_own():
    cache, table = [randn(40, 16, 2, 32, seed=s) for s in range(2)], torch.randperm(40)[None]
    jobs = [(randn(1, 1, 4, 32, seed=s), torch.tensor([37 * s + 20])) for s in range(8)]
    run = lambda q, n: portattn.attention_paged(q, *cache, table, n, causal=True, window_size=(500, 0), backend="sdpa")
    want, wrong = [run(*job) for job in jobs], []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(run(*jobs[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_buffers_kept_in_inference_mode_serve_outside_it():
    cache, table, lens = [randn(9, 16, 2, 24, seed=s) for s in range(2)], torch.arange(9)[None], torch.tensor([140])
    run = lambda: portattn.attention_paged(
        randn(1, 1, 4, 24), *cache, table, lens, window_size=(130, 0), causal=True, backend="sdpa"
    )
    sdpa.paged._kept.__dict__.clear()
    with torch.inference_mode():
        first = run()
    assert torch.equal(first, run())


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_tensors_made_in_inference_mode_are_written_outside_it(pretend, kind):
    """As kernels that take pointers write them; what is new is a tensor like any other."""
    pretend(kind)
    table, lens, new = torch.arange(3)[:, None], torch.tensor([4, 9, 1]), randn(3, 1, 2, 24)
    usual = [randn(3, 16, 2, 24, seed=s) for s in range(2)]
    with torch.inference_mode():
        made = [x.clone() for x in usual]
        dense, ragged, paged = (torch.empty(shape) for shape in ((3, 1, 4, 24), (7, 4, 24), (3, 1, 4, 24)))
    q, cu = randn(3, 1, 4, 24), torch.tensor([0, 3, 7])

    def append(cache, **out):
        portattn.cache_append(new[:, 0], new[:, 0], *cache, torch.tensor([2, -1, 40]), backend="sdpa")
        return portattn.attention_paged(q, *cache, table, lens, k=new, v=new, causal=True, return_lse=True, backend="sdpa", **out)

    expected = append(usual)
    for got in (append(made), append(made, out=paged)):
        assert all(torch.equal(a, b) for a, b in zip((*got, *made), (*expected, *usual)))
        assert not got[1].is_inference()
    assert got[0] is paged and not append(made)[0].is_inference()
    rows = randn(7, 4, 24)
    for call, args, out in ((portattn.attention, (q, usual[0], usual[1]), dense), (portattn.attention_varlen, (rows, rows, rows, cu, cu, 4, 4), ragged)):
        assert call(*args, out=out, backend="sdpa") is out and torch.equal(out, call(*args, backend="sdpa"))


def test_a_windowed_decode_gathers_only_visible_pages(monkeypatch):
    spans, real = [], sdpa.paged.gather
    monkeypatch.setattr(
        sdpa.paged, "gather", lambda c, t, first, last, name: spans.append((first, last)) or real(c, t, first, last, name)
    )
    cache = [randn(64, 16, 2, 16, seed=s) for s in range(2)]
    for c in cache:
        c[:55] = torch.nan
    out = portattn.attention_paged(
        randn(1, 1, 4, 16), *cache, torch.arange(64)[None], torch.tensor([1000]), causal=True, window_size=(99, 0), backend="sdpa"
    )
    assert spans == [(900, 1000)] * 2 and out.isfinite().all()


# ------------------------------------------------------------------ float32 is float32
@pytest.mark.parametrize("inner", [8, 129])
def test_split_product_survives_tf32(inner):
    def tf32(x: torch.Tensor) -> torch.Tensor:  # round to 10 stored mantissa bits, as the hardware does
        return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

    a, b = randn(2, 33, inner), randn(2, inner, 40)
    want = a.double() @ b.double()
    real, torch.bmm = torch.bmm, lambda x, y: real(tf32(x.contiguous()), tf32(y.contiguous()))
    try:
        split, plain = arith.split_product(a, b), torch.bmm(a, b)
    finally:
        torch.bmm = real
    largest = want.abs().max()
    assert (split - want).abs().max() < 2e-6 * largest
    assert (plain - want).abs().max() > 1e-4 * largest  # what a flag would have cost


def test_global_precision_flags_change_nothing():
    q, k = randn(1, 70, 4, 64), randn(1, 200, 2, 64)
    torch.set_float32_matmul_precision("medium")
    try:
        assert arith.reduced("cpu") and arith.reduced("cuda")
        check("attention", q, k, k, causal=True)
        check("attention", q[:, :3], k[:, :5], k[:, :5], softcap=2.0)
        assert torch.get_float32_matmul_precision() == "medium"  # and the flag is left alone
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not arith.reduced("cpu") and not arith.reduced("cuda")


@pytest.mark.parametrize("value, reduced", [("1", True), ("0", False), ("", False)])
def test_tf32_forced_by_nvidias_variable_is_seen(monkeypatch, value, reduced):
    """cuBLAS heeds it whatever torch's flags say."""
    arith.tf32_forced.cache_clear()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    try:
        assert arith.reduced("cuda") is reduced and not arith.reduced("cpu")
    finally:
        arith.tf32_forced.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(sinks=True),
        dict(alibi=True),
        dict(softcap=3.0),
        dict(window_size=(700, 0)),
        dict(k_scale=0.5, v_scale=torch.tensor([2.0, 0.25])),
    ],
    ids=lambda o: next(iter(o), "plain"),
)
def test_long_decodes_in_chunks(monkeypatch, dtype, options):
    monkeypatch.setattr(sdpa.paged, "chunk_tokens", lambda: 256)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = randn(4)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(3, 4) / 50
    cache, table = [randn(60, 16, 2, 32, dtype=dtype, seed=s) for s in range(2)], torch.randperm(60).view(3, 20)
    lens = torch.tensor([300, 257, 5])  # 257 leaves one key to the last chunk
    check("attention_paged", randn(3, 1, 4, 32, dtype=dtype), *cache, table, lens, causal=True, **options)


@pytest.mark.parametrize("keys", [80, 100, 200])
def test_rows_that_a_mask_hides_leave_those_beside_them_alone(keys):
    """With AMX, a NaN row of a bf16 product's left operand reaches the row before it."""
    q, k = randn(1, 33, 4, 64, dtype=torch.bfloat16), randn(1, keys, 2, 64, dtype=torch.bfloat16)
    bias = torch.ones(33, keys, dtype=torch.bool)
    bias[[0, 5, 20, 21]] = False
    want, plain = reference.attention(q, k, k, bias=bias), reference.plain(reference.attention, q, k, k, bias=bias)
    close_out(portattn.attention(q, k, k, bias=bias, backend="sdpa"), want[0], plain[0], q.dtype)


@pytest.mark.parametrize("options", [dict(window_size=(300, 0)), dict(softcap=100.0), dict(sinks=torch.zeros(4))], ids=lambda o: next(iter(o)))
def test_a_nan_query_leaves_the_rows_beside_it_alone(monkeypatch, options):
    """AMX is pretended: a product hands a NaN row of its left operand on to the row before it."""
    real = arith.product

    def handing_on(a, b):
        out = real(a, b)
        if a.dtype == torch.bfloat16:
            out[:, :-1].masked_fill_(a[:, 1:].isnan().any(-1, keepdim=True), float("nan"))
        return out

    for name in ("cpu_has_bf16", "cpu_has_amx"):
        monkeypatch.setattr(arith, name, lambda: True)
    monkeypatch.setattr(arith, "product", handing_on)
    q, k = randn(1, 70, 4, 64, dtype=torch.bfloat16), randn(1, 300, 2, 64, dtype=torch.bfloat16)
    want = portattn.attention(q, k, k, backend="sdpa", **options)
    q[0, 5, 1, 3] = q[0, 40, 2, 0] = q[0, 69, 0] = float("nan")
    out = portattn.attention(q, k, k, backend="sdpa", **options)
    hurt = q.isnan().any(-1)
    assert out[hurt].isnan().all() and torch.equal(out[~hurt], want[~hurt])


@pytest.mark.parametrize("rows", [3, 40])
def test_a_scale_of_zero_hides_no_nan(rows):
    q, k = randn(1, rows, 2, 16), randn(1, 300, 2, 16)
    q[0, 1, 1, 3] = float("nan")
    out = portattn.attention(q, k, k, softmax_scale=0.0, backend="sdpa")
    assert out[0, 1, 1].isnan().all() and out.isnan().sum() == 16


@pytest.mark.parametrize("options", [dict(window_size=(50, 0)), dict(softcap=100.0), dict(sinks=torch.zeros(4))], ids=lambda o: next(iter(o)))
def test_large_scores_of_16_bit_inputs_are_not_rounded(options):
    q, k = 5 * randn(1, 200, 4, 64, dtype=torch.bfloat16), 5 * randn(1, 200, 2, 64, dtype=torch.bfloat16)
    v = randn(1, 200, 2, 64, dtype=torch.bfloat16, seed=1)
    want, plain = reference.attention(q, k, v, **options), reference.plain(reference.attention, q, k, v, **options)
    close_out(portattn.attention(q, k, v, backend="sdpa", **options), want[0], plain[0], q.dtype)


@pytest.mark.parametrize("len_q, len_k, left", [(1, 130, 3), (5, 400, 20), (1, 9000, 100)], ids=["few", "several", "many"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_keys_before_every_window_may_hold_anything(len_q, len_k, left, junk):
    """An engine frees pages that a window has left behind; ragged and dense keys are no different."""
    q, k, v = randn(1, len_q, 4, 16), randn(1, len_k, 2, 16), randn(1, len_k, 2, 16, seed=1)
    window = dict(causal=True, window_size=(left, 0), return_lse=True, backend="sdpa")
    want = reference.attention(q, k, v, causal=True, window_size=(left, 0))
    k[:, : len_k - len_q - left], v[:, : len_k - len_q - left] = junk, junk
    starts = lambda n: torch.tensor([0, n], dtype=torch.int32)
    dense = portattn.attention(q, k, v, **window)
    ragged = portattn.attention_varlen(q[0], k[0], v[0], starts(len_q), starts(len_k), len_q, len_k, **window)
    for out, lse in (dense, [x[None] for x in ragged]):
        torch.testing.assert_close(out.double(), want[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=0)


def test_the_error_over_many_keys_is_that_of_plain_torch():
    """A row of probabilities is a long sum; in one tile of 300,001 keys it was beyond C-TOL."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, h, 64, generator=gen) for n, h in ((1, 4), (300_001, 2), (300_001, 2)))
    check("attention", q * 4, k, v)
