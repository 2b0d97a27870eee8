"""The flash-attn spellings against the float64 oracle: values, lse shapes and conventions, lengths, positions, and what raises."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import portattn
from portattn import ArgumentError, PortattnError, reference
from portattn.compat import flash_attn as fa2
from portattn.compat import flash_attn_interface as fa3
from portattn.compat import flashinfer, vllm_flash_attn
from portattn.compat.flash_attn import bert_padding
from portattn.compat.flash_attn import flash_attn_interface as fa2_interface

INF = float("inf")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def close(got, expected, tolerance=2e-5):
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def turned(x, position, cos, sin, interleaved):
    """x (S, H, D) turned at position (S,): complex numbers, in float64."""
    pairs = cos.shape[1]
    angle = torch.complex(cos.double(), sin.double())[position][:, None]
    x = x.double().clone()
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    z = torch.complex(x[..., first].clone(), x[..., second].clone()) * angle
    x[..., first], x[..., second] = z.real, z.imag
    return x


def tables(length, dim, spread=10.0):
    angle = torch.arange(length)[:, None] / spread ** (torch.arange(dim // 2) / (dim // 2))
    return angle.cos().float(), angle.sin().float()


# ------------------------------------------------------------------ dense
@pytest.mark.parametrize("causal, window, softcap", [(False, (-1, -1), 0.0), (True, (-1, -1), 0.0), (True, (2, 0), 5.0), (False, (1, 2), -1.0)])
def test_dense_forms_agree_with_the_oracle(causal, window, softcap):
    q, k, v = torch.randn(2, 5, 6, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    expected, lse = reference.attention(q, k, v, causal=causal, window_size=window, softcap=max(softcap, 0.0), softmax_scale=0.3)
    out, got_lse, mask = fa2.flash_attn_func(q, k, v, 0.0, 0.3, causal, window, softcap, None, False, True)
    close(out, expected)
    assert got_lse.shape == (2, 6, 5) and got_lse.dtype == torch.float32 and got_lse.is_contiguous() and mask.numel() == 0
    close(got_lse, lse.transpose(1, 2).masked_fill(lse.transpose(1, 2) == -INF, INF))
    kv = torch.stack([k, v], 2)
    close(fa2.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, causal, window, softcap), expected)
    close(fa3.flash_attn_func(q, k, v, 0.3, causal, window_size=window, softcap=softcap), expected)
    self_expected, _ = reference.attention(k, k, v, causal=causal, window_size=window, softcap=max(softcap, 0.0), softmax_scale=0.3)
    close(fa2.flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), 0.0, 0.3, causal, window, softcap), self_expected)
    close(fa3.flash_attn_qkvpacked_func(torch.stack([k, k, v], 2), 0.3, causal, window_size=window, softcap=softcap), self_expected)


def test_qkv_of_grouped_heads_in_one_tensor():
    qkv = torch.randn(2, 5, 4 + 2 + 2, 16)
    expected, _ = reference.attention(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:], causal=True)
    close(fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), expected)


def test_lse_of_a_row_without_keys_is_plus_infinity_in_2_and_minus_infinity_in_3():
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 1, 2, 8)  # causal, bottom-right: rows 0 and 1 see nothing
    out, lse, _ = fa2.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert torch.equal(out[0, :2], torch.zeros(2, 2, 8))
    assert (lse[0, :, :2] == INF).all() and lse[0, :, 2].isfinite().all()
    _, lse = fa3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (lse[0, :, :2] == -INF).all()


def test_alibi_is_added():
    q, k, slopes = torch.randn(2, 3, 4, 8), torch.randn(2, 6, 4, 8), torch.rand(2, 4)
    expected, _ = reference.attention(q, k, k, causal=True, alibi_slopes=slopes)
    close(fa2.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes), expected)


def test_gradients_flow():
    q, k = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 4, 2, 8, requires_grad=True)
    fa2.flash_attn_func(q, k, k, causal=True).sum().backward()
    p, r = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    reference.attention(p, r, r, causal=True)[0].sum().backward()
    close(q.grad, p.grad)
    close(k.grad, r.grad)


# ------------------------------------------------------------------ varlen
def ragged(lens_q=(3, 0, 5), lens_k=(4, 2, 5), heads=(4, 2), dim=16):
    cu = lambda lens: torch.tensor([0, *lens]).cumsum(0).int()
    k = torch.randn(sum(lens_k), heads[1], dim)
    return torch.randn(sum(lens_q), heads[0], dim), k, torch.randn_like(k), cu(lens_q), cu(lens_k), max(lens_q), max(lens_k)


def pages_of(x, cu, page_size=4, poison=float("nan")):
    """Ragged rows as shuffled pages and their table; unused slots hold poison, unused entries -1."""
    counts = [(int(n) + page_size - 1) // page_size for n in cu.diff()]
    order = torch.randperm(sum(counts) + 1).tolist()
    pages = torch.full((sum(counts) + 1, page_size, *x.shape[1:]), poison)
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    for b, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        for j in range(end - start):
            if j % page_size == 0:
                table[b, j // page_size] = order.pop()
            pages[table[b, j // page_size], j % page_size] = x[start + j]
    return pages, table


def two_caches(k, v, cu, page_size=4):
    pages, table = pages_of(torch.cat([k, v], -1), cu, page_size)
    k_pages, v_pages = pages.split([k.shape[-1], v.shape[-1]], -1)
    return k_pages.contiguous(), v_pages.contiguous(), table


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_forms_agree_with_the_oracle(causal):
    q, k, v, cu_q, cu_k, max_q, max_k = ragged()
    expected, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, causal=causal)
    out, got_lse, _ = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, None, causal, (-1, -1), 0.0, None, False, True)
    close(out, expected)
    assert got_lse.shape == (4, 8)
    close(got_lse, lse.T.masked_fill(lse.T == -INF, INF))
    close(fa2.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu_q, cu_k, max_q, max_k, causal=causal), expected)
    close(fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=causal), expected)
    close(vllm_flash_attn.flash_attn_varlen_func(q, k, v, max_q, cu_q, max_k, cu_k, causal=causal), expected)
    expected, _ = reference.attention_varlen(k, k, v, cu_k, cu_k, causal=causal)
    close(fa2.flash_attn_varlen_qkvpacked_func(torch.stack([k, k, v], 1), cu_k, max_k, causal=causal), expected)


def test_varlen_with_a_block_table_reads_pages():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged()
    k_pages, v_pages, table = two_caches(k, v, cu_k)
    expected, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    close(fa2.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, max_q, max_k, causal=True, block_table=table), expected)
    lens, buffer = cu_k.diff().int(), torch.empty_like(q)
    out, got_lse = vllm_flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, max_q, cu_q, max_k, seqused_k=lens, causal=True, window_size=[-1, -1],
                                                          block_table=table, return_softmax_lse=True, out=buffer, fa_version=3)
    assert out is buffer
    close(out, expected)
    close(got_lse, lse.T)


def test_vllm_sinks_and_descales():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged()
    k_pages, v_pages, table = two_caches(k, v, cu_k)
    sinks, ks, vs = torch.randn(4), torch.rand(1).expand(3, 2), torch.rand(1).expand(3, 2)
    scale = ks[0, 0].item(), vs[0, 0].item()
    expected, _ = reference.attention_varlen(q, k * scale[0], v * scale[1], cu_q, cu_k, causal=True, sinks=sinks)
    options = dict(causal=True, s_aux=sinks, k_descale=ks, v_descale=vs)
    lens = cu_k.diff().int()
    close(vllm_flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, max_q, cu_q, max_k, seqused_k=lens, block_table=table, **options), expected)
    out = torch.empty_like(q)
    assert vllm_flash_attn.flash_attn_varlen_func(q, k, v, max_q, cu_q, max_k, cu_k, out=out, **options) is out
    close(out, expected)


def test_vllm_keys_in_use_of_ragged_sequences():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged((4, 3, 5), (4, 6, 5))
    used = torch.tensor([3, 6, 4], dtype=torch.int32)
    k[3], v[14] = float("nan"), float("nan")  # keys not in use
    expected, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, causal=True)
    out, got_lse = vllm_flash_attn.flash_attn_varlen_func(q, k, v, max_q, cu_q, max_k, cu_k, used, causal=True, return_softmax_lse=True, fa_version=4)
    close(out, expected)
    close(got_lse, lse.T)


def test_descales_multiply_each_sequence_and_head():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    a, b, c = torch.rand(2, 2), torch.rand(2, 2), torch.rand(2, 2)
    expected, _ = reference.attention(q * a.repeat_interleave(2, 1)[:, None, :, None], k * b[:, None, :, None], v * c[:, None, :, None])
    close(fa3.flash_attn_func(q, k, v, q_descale=a, k_descale=b, v_descale=c), expected)
    close(fa3.flash_attn_with_kvcache(q, k, v, q_descale=a, k_descale=b, v_descale=c), expected)
    cu_q, cu_k = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, 5, 10], dtype=torch.int32)
    out = fa3.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, 3, 5, q_descale=a, k_descale=b, v_descale=c)
    close(out.view_as(expected), expected)


def test_seqused_q_and_k_count_the_rows_in_use():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged((4, 3, 5), (4, 6, 5))
    used_q, used_k = torch.tensor([2, 0, 5], dtype=torch.int32), torch.tensor([3, 6, 4], dtype=torch.int32)
    q[2:7] = float("nan")  # rows not in use
    out, lse = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, used_q, used_k, causal=True, return_attn_probs=True)
    for b, (start, n) in enumerate(zip(cu_q.tolist(), used_q.tolist())):
        keys = slice(int(cu_k[b]), int(cu_k[b] + used_k[b]))
        expected, expected_lse = reference.attention(q[None, start : start + n], k[None, keys], v[None, keys], causal=True)
        close(out[start : start + n], expected[0])
        close(lse[:, start : start + n], expected_lse[0].T)
    assert torch.equal(out[2:7], torch.zeros_like(out[2:7]))


# ------------------------------------------------------------------ kvcache
def kvcache_by_hand(q, k_cache, v_cache, lens, rows, k=None, v=None, cos=None, sin=None, interleaved=True, leftpad=None, causal=False,
                    window=(-1, -1), rotary_at=None):
    """flash-attn's documentation, a sequence at a time; returns (out, lse, the caches after)."""
    k_cache, v_cache, outs, lses = k_cache.double().clone(), v_cache.double().clone(), [], []
    for b, (n, row) in enumerate(zip(lens, rows)):
        q_b, end = q[b].double(), n
        at = n if rotary_at is None else rotary_at[b]
        if k is not None:
            k_b, end = k[b].double(), n + k.shape[1]
            if cos is not None:
                follows = causal or window != (-1, -1)
                q_b = turned(q_b, at + (torch.arange(len(q_b)) if follows else torch.zeros(len(q_b), dtype=torch.long)), cos, sin, interleaved)
                k_b = turned(k_b, at + torch.arange(len(k_b)), cos, sin, interleaved)
            k_cache[row, n:end], v_cache[row, n:end] = k_b, v[b].double()
        keys = slice(0 if leftpad is None else leftpad[b], end)
        out, lse = reference.attention(q_b[None], k_cache[row, keys][None], v_cache[row, keys][None], causal=causal, window_size=window)
        outs.append(out[0])
        lses.append(lse[0].T)
    return torch.stack(outs), torch.stack(lses), k_cache, v_cache


MASKS = [(False, (-1, -1)), (True, (-1, -1)), (False, (3, 1)), (True, (2, 0))]


@pytest.mark.parametrize("causal, window", MASKS)
@pytest.mark.parametrize("len_q, len_new", [(1, 1), (3, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_kvcache_appends_turns_and_attends_as_documented(causal, window, len_q, len_new, interleaved):
    lens, rows, leftpad = [5, 0, 9], [3, 1, 0], [2, 0, 4]
    q, k, v = torch.randn(3, len_q, 4, 16), torch.randn(3, len_new, 2, 16), torch.randn(3, len_new, 2, 16)
    k_cache, v_cache = torch.randn(4, 16, 2, 16), torch.randn(4, 16, 2, 16)
    cos, sin = tables(32, 8)
    for pads in (None, leftpad):
        expected, lse, k_after, v_after = kvcache_by_hand(q, k_cache, v_cache, lens, rows, k, v, cos, sin, interleaved, pads, causal, window)
        for call in (fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache):
            k_got, v_got = k_cache.clone(), v_cache.clone()
            out, got_lse, *_ = call(
                q, k_got, v_got, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=torch.tensor(lens, dtype=torch.int32),
                cache_batch_idx=torch.tensor(rows, dtype=torch.int32), cache_leftpad=pads if pads is None else torch.tensor(pads, dtype=torch.int32),
                causal=causal, window_size=window, rotary_interleaved=interleaved, return_softmax_lse=True)
            close(out, expected)
            close(k_got, k_after)
            close(v_got, v_after)
            close(got_lse, lse if call is fa3.flash_attn_with_kvcache else lse.masked_fill(lse == -INF, INF))


@pytest.mark.parametrize("cache_seqlens", [None, 6, torch.tensor([6, 0], dtype=torch.int32)], ids=["whole", "int", "tensor"])
def test_kvcache_without_an_append(cache_seqlens):
    q, k_cache, v_cache = torch.randn(2, 2, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    lens = [8, 8] if cache_seqlens is None else [6, 6] if isinstance(cache_seqlens, int) else [6, 0]
    expected, lse, *_ = kvcache_by_hand(q, k_cache, v_cache, lens, [0, 1], causal=True)
    out, got = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=True, return_softmax_lse=True)
    close(out, expected)
    close(got, lse.masked_fill(lse == -INF, INF))


@pytest.mark.parametrize("seqlens", [4, torch.tensor([4, 4], dtype=torch.int32)], ids=["int", "tensor"])
def test_kvcache_append_counts_lengths_before_it(seqlens):
    q, k, k_cache = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 8, 2, 8)
    expected, _, after, _ = kvcache_by_hand(q, k_cache, k_cache, [4, 4], [0, 1], k, k, causal=True)
    caches = k_cache.clone(), k_cache.clone()
    close(fa2.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=seqlens, causal=True), expected)
    close(caches[0], after)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("turns", [True, False])
def test_what_is_appended_before_the_call_is_rounded_once(kind, turns):
    """Left pads and chunks have keys turned, divided and stored here; the caches hold what the call itself stores without them."""
    q, new, scale = torch.randn(2, 32, 4, 64, dtype=torch.bfloat16), torch.randn(2, 2, 32, 2, 64, dtype=torch.bfloat16), torch.rand(2, 2, 2) + 0.3
    cos, sin = tables(64, 64)

    def stored(**options):
        caches = torch.zeros(2, 40, 2, 64).to(kind), torch.zeros(2, 40, 2, 64).to(kind)
        fa3.flash_attn_with_kvcache(q, *caches, *new, rotary_cos=cos if turns else None, rotary_sin=sin if turns else None, cache_seqlens=torch.tensor([3, 5], dtype=torch.int32),
                                    causal=True, k_descale=scale[0], v_descale=scale[1], **options)
        return [x.view(torch.uint8) for x in caches]

    for options in (dict(cache_leftpad=torch.tensor([0, 1], dtype=torch.int32)), dict(attention_chunk=16)):
        for got, expected in zip(stored(**options), stored()):
            assert (got != expected).float().mean() < 1e-4  # the last bit of a quotient, which float32 and float64 round apart


def test_kvcache_over_pages_of_any_size_ignores_what_lies_past_the_lengths():
    q, k, v, _, cu_k, _, _ = ragged((1, 1, 1), (5, 1, 11))
    k_pages, v_pages, table = two_caches(k, v, cu_k, page_size=3)
    lens = cu_k.diff().int()
    expected, _ = reference.attention_varlen(q, k, v, torch.arange(4), cu_k)
    close(fa2.flash_attn_with_kvcache(q[:, None], k_pages, v_pages, cache_seqlens=lens, block_table=table, causal=True)[:, 0], expected)
    close(fa3.flash_attn_with_kvcache(q[:, None], k_pages, v_pages, cache_seqlens=lens, page_table=table, causal=True)[:, 0], expected)


@pytest.mark.parametrize("same", [True, False], ids=["as q", "of its own lengths"])
def test_kvcache_of_ragged_queries_and_new_keys(same):
    lens, lens_q, lens_new = [5, 0, 7], [2, 3, 1], [2, 3, 1] if same else [1, 4, 2]
    cu_q, cu_new = (torch.tensor([0, *x]).cumsum(0).int() for x in (lens_q, lens_new))
    q, k, v = torch.randn(6, 4, 16), torch.randn(sum(lens_new), 2, 16), torch.randn(sum(lens_new), 2, 16)
    caches = torch.randn(3, 12, 2, 16), torch.randn(3, 12, 2, 16)
    cos, sin = tables(32, 16)
    at = [1, 9, 4]
    for rotary_at in (None, at):
        got = caches[0].clone(), caches[1].clone()
        out = fa3.flash_attn_with_kvcache(q, *got, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=torch.tensor(lens, dtype=torch.int32),
                                          cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_q if same else cu_new, max_seqlen_q=3, causal=True,
                                          rotary_seqlens=rotary_at if rotary_at is None else torch.tensor(rotary_at, dtype=torch.int32))
        for b in range(3):
            part, new = slice(cu_q[b], cu_q[b + 1]), slice(cu_new[b], cu_new[b + 1])
            if same:
                new = part
            expected, _, k_after, _ = kvcache_by_hand(q[None, part], caches[0], caches[1], [lens[b]], [b], k[None, new], v[None, new], cos, sin, True,
                                                      None, True, rotary_at=None if rotary_at is None else [rotary_at[b]])
            close(out[part], expected[0])
            close(got[0][b], k_after[b])


def test_dense_new_keys_beside_ragged_queries():
    cu_q = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k = torch.randn(5, 2, 8), torch.randn(2, 2, 2, 8)
    cache = torch.randn(2, 9, 2, 8)
    got = cache.clone(), cache.clone()
    out = fa3.flash_attn_with_kvcache(q, *got, k, k, cache_seqlens=3, cu_seqlens_q=cu_q, max_seqlen_q=3, causal=True)
    for b, part in enumerate([slice(0, 2), slice(2, 5)]):
        expected, _, after, _ = kvcache_by_hand(q[None, part], cache, cache, [3], [b], k[b][None], k[b][None], causal=True)
        close(out[part], expected[0])
        close(got[0][b], after[b])


def test_cache_views_are_written_in_place():
    whole = torch.randn(2, 2, 16, 2, 8)  # k and v of one allocation, a slice of its rows
    k_cache, v_cache = whole[0, :, :12], whole[1, :, :12]
    q = torch.randn(2, 2, 2, 8)
    expected, _, k_after, _ = kvcache_by_hand(q, k_cache, v_cache, [3, 7], [0, 1], q[:, :1], q[:, :1], leftpad=[1, 2])
    before = whole.clone()
    out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, q[:, :1], q[:, :1], cache_seqlens=torch.tensor([3, 7], dtype=torch.int32),
                                      cache_leftpad=torch.tensor([1, 2], dtype=torch.int32))
    close(out, expected)
    close(k_cache, k_after)
    assert torch.equal(whole[:, :, 12:], before[:, :, 12:])


# ------------------------------------------------------------------ merging
def test_combine_merges_partial_results():
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    parts = [reference.attention(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 5), slice(5, 9))]
    expected, lse = reference.attention(q, k, v)
    partial = torch.stack([p[0] for p in parts]).float(), torch.stack([p[1] for p in parts]).float()
    out, got = fa3.flash_attn_combine(*partial, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    close(out, expected, 2e-2)
    close(got, lse)
    buffer = torch.empty(2, 3, 4, 8)
    assert fa3.flash_attn_combine(*partial, out=buffer)[0] is buffer
    close(buffer, expected)


def test_flashinfer_states_are_base_two():
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    a = flashinfer.single_prefill_with_kv_cache(q, k[:4], v[:4], return_lse=True)
    b = flashinfer.single_prefill_with_kv_cache(q, k[4:].transpose(0, 1), v[4:].transpose(0, 1), kv_layout="HND", return_lse=True)
    expected, lse = (x[0] for x in reference.attention(q[None], k[None], v[None]))
    for out, s in (flashinfer.merge_state(*a, *b), flashinfer.merge_states(torch.stack([a[0], b[0]], 1), torch.stack([a[1], b[1]], 1))):
        close(out, expected)
        close(s, lse / math.log(2))
    kept = a[0].clone(), a[1].clone()
    mask = torch.tensor([1, 0, 1, 1, 0])
    flashinfer.merge_state_in_place(*a, *b, mask=mask)
    close(a[0][mask == 1], expected[mask == 1])
    assert torch.equal(a[0][mask == 0], kept[0][mask == 0]) and torch.equal(a[1][mask == 0], kept[1][mask == 0])


def test_flashinfer_single_requests():
    q, k, v = torch.randn(3, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    expected, lse = reference.attention(q[None], k[None], v[None], causal=True, window_size=(4, -1), softcap=3.0, softmax_scale=0.5)
    out, s = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=4, logits_soft_cap=3.0, sm_scale=0.5, return_lse=True)
    close(out, expected[0])
    close(s, lse[0] / math.log(2))
    out, s = flashinfer.single_decode_with_kv_cache(q[-1], k, v, window_left=4, logits_soft_cap=3.0, q_scale=0.5, k_scale=2.0, v_scale=3.0,
                                                    sm_scale=0.5, return_lse=True)
    close(out, 3 * expected[0, -1])
    close(s, lse[0, -1] / math.log(2))
    mask = torch.rand(3, 9) < 0.5
    expected, _ = reference.attention(q[None], k[None], v[None], bias=mask)
    for given in (mask, mask.flatten()):
        close(flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=given, causal=True), expected[0])
    with pytest.raises(ArgumentError, match="custom_mask: wanted 3 . 9 elements"):
        flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask[0])


def test_flashinfer_scales_of_keys_and_values():
    q, k, v = torch.randn(3, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    expected, lse = reference.attention(q[None], k[None] * 0.5, v[None] * 3.0)
    out, s = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, k_scale=0.5, v_scale=3.0)
    close(out, expected[0])
    close(s, lse[0] / math.log(2))


def test_flashinfer_converts_out_before_it_is_rounded():
    q, k, v = torch.randn(3, 4, 8).bfloat16(), torch.randn(9, 2, 8).bfloat16(), torch.randn(9, 2, 8).bfloat16()
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, o_dtype=torch.float32)
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    q.requires_grad_()
    flashinfer.single_prefill_with_kv_cache(q, k, v, o_dtype=torch.float32).sum().backward()
    assert q.grad is not None


# ------------------------------------------------------------------ private names, padding
def test_private_forwards_return_four():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged()
    out, lse, probs, state = fa2_interface._flash_attn_forward(q[None], k[None], v[None], 0.0, 0.25, True, -1, -1, 0.0, None, False)
    expected, expected_lse = reference.attention(q[None], k[None], v[None], causal=True, softmax_scale=0.25)
    close(out, expected)
    close(lse, expected_lse.transpose(1, 2))
    used = torch.tensor([2, 2, 4], dtype=torch.int32)
    out, lse, probs, state = fa2_interface._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, 0.25, False, seqused_k=used)
    expected, expected_lse = reference.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, softmax_scale=0.25)
    close(out, expected)
    close(lse, expected_lse.T)
    assert probs.numel() == 0 and state.numel() == 0


def test_private_names_that_engines_import_together_are_there_and_backward_raises():
    assert fa2_interface._wrapped_flash_attn_forward is fa2_interface._flash_attn_forward
    assert fa2_interface._wrapped_flash_attn_varlen_forward is fa2_interface._flash_attn_varlen_forward
    q = torch.randn(1, 2, 2, 16)
    for name in ("_flash_attn_backward", "_flash_attn_varlen_backward", "_wrapped_flash_attn_backward", "_wrapped_flash_attn_varlen_backward"):
        with pytest.raises(PortattnError, match="through autograd"):
            getattr(fa2_interface, name)(q, q, q, q, q, None, dq=None)
    with pytest.raises(PortattnError, match="through autograd"):
        fa3._flash_attn_backward(q, q, q, q, q, None)


def test_the_private_forward_of_3_is_each_of_its_functions():
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    options = dict(softmax_scale=0.3, causal=True, window_size_left=4, softcap=2.0)
    public = dict(softmax_scale=0.3, causal=True, window_size=(4, -1), softcap=2.0)
    same = lambda got, want: all(torch.equal(a, b) for a, b in zip(got, want))
    buffer = torch.empty_like(q)
    got = fa3._flash_attn_forward(q, k, v, out_=buffer, **options)
    assert len(got) == 4 and got[0] is buffer and same(got, fa3.flash_attn_func(q, k, v, return_attn_probs=True, **public))
    cu_q, cu_k, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 6], [0, 8, 16], [5, 7]))
    rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    got = fa3._flash_attn_forward(*rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=used, max_seqlen_q=3, max_seqlen_k=8, **options)
    assert same(got, fa3.flash_attn_varlen_func(*rows, cu_q, cu_k, 3, 8, seqused_k=used, return_attn_probs=True, **public))
    new, caches, others = torch.randn(2, 1, 2, 16), (k.clone(), v.clone()), (k.clone(), v.clone())
    got = fa3._flash_attn_forward(q, *caches, new, new, seqused_k=used, leftpad_k=used - 3, **options)
    want = fa3.flash_attn_with_kvcache(q, *others, new, new, cache_seqlens=used, cache_leftpad=used - 3, return_softmax_lse=True, **public)
    assert same((*got, *caches), (*want, *others))
    with pytest.raises(ArgumentError, match="leftpad_k: wanted None together"):
        fa3._flash_attn_forward(*rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, leftpad_k=used, max_seqlen_q=3, max_seqlen_k=8)
    with pytest.raises(ArgumentError, match="seqused_q: wanted None"):
        fa3._flash_attn_forward(q, k, v, seqused_q=used)


def test_padding_there_and_back():
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert cu.tolist() == [0, 3, 8, 9] and cu.dtype == torch.int32 and longest == 5 and used.tolist() == [3, 5, 1]
    assert indices.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 11]
    assert torch.equal(rows[3:8], x[1])
    back = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())


def test_padding_takes_indices_of_either_integer_type():
    rows = torch.randn(2, 2, 4)
    back = bert_padding.pad_input(rows, torch.tensor([0, 3], dtype=torch.int32), 2, 2)  # transformers' places of one token each
    assert torch.equal(back[0, 0], rows[0]) and torch.equal(back[1, 1], rows[1]) and not back[0, 1].any() and not back[1, 0].any()


def test_padding_counts_allocated_rows_apart_from_rows_in_use():
    x, mask, spare = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, mask, spare)
    assert cu.tolist() == [0, 3, 4] and used.tolist() == [2, 1] and longest == 3 and len(rows) == 4


def test_padding_of_sequences_that_share_a_row():
    x = torch.randn(2, 6, 3)
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]]))
    assert cu.tolist() == [0, 2, 5, 9] and longest == 4 and indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :4]]))


# ------------------------------------------------------------------ what raises
def test_dropout_raises_with_the_reason():
    q = torch.randn(1, 2, 2, 8)
    with pytest.raises(ArgumentError, match="dropout_p.*inference"):
        fa2.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ArgumentError, match="dropout_p"):
        vllm_flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], 2, torch.tensor([0, 2]), 2, torch.tensor([0, 2]), dropout_p=0.5)


@pytest.mark.parametrize("given, words", [
    (dict(k=1), "cache_seqlens"),
    (dict(rotary=1), "rotary_cos.*k="),
    (dict(block_table=1, cache_batch_idx=1), "cache_batch_idx"),
    (dict(rows=3), "k_cache.*at least 3 rows"),
    (dict(length=5), "cache_seqlens: wanted at most 4.*got 5"),
    (dict(k=1, length=4), "cache_seqlens: wanted at most 3.*got 4"),
])
def test_kvcache_refuses_what_flash_attn_refuses(given, words):
    q, cache = torch.randn(given.get("rows", 2), 1, 2, 8), torch.randn(2, 4, 2, 8)
    options = {}
    if "k" in given:
        options.update(k=q, v=q)
    if "rotary" in given:
        options.update(rotary_cos=tables(8, 8)[0], rotary_sin=tables(8, 8)[1])
    if "block_table" in given:
        options.update(block_table=torch.zeros(2, 1, dtype=torch.int32), cache_batch_idx=torch.zeros(2, dtype=torch.int32))
    if "length" in given:
        options.update(cache_seqlens=given["length"])
    before = cache.clone()
    with pytest.raises(ArgumentError, match=words):
        fa2.flash_attn_with_kvcache(q, cache, cache, **options)
    assert torch.equal(cache, before)


# ------------------------------------------------------------------ chunks
def in_chunks(q, k, v, chunk, **options):
    """One sequence, q (Sq, H, D): a query sees the keys of its own chunk. Drawn as a mask for the oracle."""
    position = torch.arange(len(q)) + len(k) - len(q)
    same = torch.div(position, chunk, rounding_mode="floor")[:, None] == torch.arange(len(k)) // chunk
    out, lse = reference.attention(q[None], k[None], v[None], bias=same[None, None], **options)
    return out[0], lse[0]


CHUNKED = [dict(), dict(causal=True), dict(causal=True, window_size=(2, 0)), dict(window_size=(1, 2), softcap=3.0)]


@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
@pytest.mark.parametrize("len_q, len_k", [(7, 7), (3, 13), (1, 9), (9, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("options", CHUNKED, ids=str)
def test_a_query_sees_its_own_chunk(chunk, len_q, len_k, options):
    q, k, v = torch.randn(2, len_q, 4, 16), torch.randn(2, len_k, 2, 16), torch.randn(2, len_k, 2, 16)
    out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
    for b in range(2):
        expected, expected_lse = in_chunks(q[b], k[b], v[b], chunk, **options)
        close(out[b], expected)
        close(lse[b], expected_lse.T)


@pytest.mark.parametrize("used", [None, (3, 0, 8)])
@pytest.mark.parametrize("options", CHUNKED, ids=str)
def test_ragged_sequences_in_chunks(monkeypatch, used, options):
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    lens_q, lens_k = (3, 2, 6), (4, 2, 11)
    q, k, v, cu_q, cu_k, max_q, max_k = ragged(lens_q, lens_k)
    seqused = None if used is None else torch.tensor(used, dtype=torch.int32)
    out, lse = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, seqused_k=seqused, attention_chunk=4, return_attn_probs=True, **options)
    for b, (n, m) in enumerate(zip(lens_q, used or lens_k)):
        rows, keys = slice(cu_q[b], cu_q[b] + n), slice(cu_k[b], cu_k[b] + m)
        expected, expected_lse = in_chunks(q[rows], k[keys], v[keys], 4, **options)
        close(out[rows], expected)
        close(lse[:, rows], expected_lse.T)


@pytest.mark.parametrize("chunk", [4, 6, 8])  # pages of 4: one a chunk, not a whole number, two
@pytest.mark.parametrize("len_q", [1, 6])
@pytest.mark.parametrize("options", CHUNKED, ids=str)
def test_a_paged_cache_in_chunks(monkeypatch, chunk, len_q, options):
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    lens = [9, 17, 6]
    _, k, v, _, cu_k, _, _ = ragged(lens, lens)
    k_pages, v_pages, table = two_caches(k, v, cu_k)
    q, scale = torch.randn(3, len_q, 4, 16), torch.tensor([[0.5, 2.0], [1.0, 3.0], [0.25, 1.5]])
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=torch.tensor(lens, dtype=torch.int32), page_table=table,
                                               attention_chunk=chunk, k_descale=scale, v_descale=scale, return_softmax_lse=True, **options)
    for b, n in enumerate(lens):
        keys = slice(cu_k[b], cu_k[b] + n)
        expected, expected_lse = in_chunks(q[b], k[keys] * scale[b][:, None], v[keys] * scale[b][:, None], chunk, **options)
        close(out[b], expected)
        close(lse[b], expected_lse.T)


def test_chunks_after_an_append_with_rotary():
    q, new = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16)
    k_cache, v_cache, lens, (cos, sin) = torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16), [2, 7], tables(16, 16)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    out = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=torch.tensor(lens, dtype=torch.int32), rotary_cos=cos, rotary_sin=sin,
                                      causal=True, attention_chunk=4)
    for b, n in enumerate(lens):
        position = torch.arange(n, n + 3)
        expected_k[b, n : n + 3], expected_v[b, n : n + 3] = turned(new[b], position, cos, sin, True).float(), new[b]
        expected, _ = in_chunks(turned(q[b], position, cos, sin, True).float(), expected_k[b, : n + 3], expected_v[b, : n + 3], 4, causal=True)
        close(out[b], expected)
    close(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_gradients_flow_through_chunks():
    q, k = torch.randn(1, 6, 2, 8, requires_grad=True), torch.randn(1, 6, 2, 8, requires_grad=True)
    fa3.flash_attn_func(q, k, k, causal=True, attention_chunk=4).square().sum().backward()
    p, r = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    in_chunks(p[0], r[0], r[0], 4, causal=True)[0].square().sum().backward()
    close(q.grad, p.grad)
    close(k.grad, r.grad)


def test_a_negative_chunk_raises():
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ArgumentError, match="attention_chunk"):
        fa3.flash_attn_func(q, q, q, attention_chunk=-1)


# ------------------------------------------------------------------ what is kept between calls
def test_lengths_follow_a_tensor_that_changes_in_place():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged((1, 1), (6, 5))
    k_pages, v_pages, table = two_caches(k, v, cu_k)
    call = lambda cu: fa2.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu, max_q, max_k, causal=True, block_table=table)
    first = call(cu_k)
    other = torch.tensor([0, 4, 7], dtype=torch.int32)
    expected = call(other)
    cu_k.copy_(other)
    assert torch.equal(call(cu_k), expected) and not torch.equal(first, expected)
    cu_k.set_(torch.tensor([0, 6, 11], dtype=torch.int32))
    assert torch.equal(call(cu_k), first)


CACHE, NEW = torch.randn(2, 8, 2, 16), torch.randn(2, 1, 2, 16)
LENS, STARTS = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call, args", [
    (lambda q, cache, lens, new: fa2.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lens, causal=True),
     (torch.randn(2, 1, 4, 16), CACHE, LENS, NEW)),
    (lambda q, cache: fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, causal=True), (torch.randn(2, 1, 4, 16), CACHE)),
    (lambda q, cache, cu_q, cu_k: fa2.flash_attn_varlen_func(q, cache, cache, cu_q, cu_k, 3, 8, causal=True, block_table=torch.tensor([[0], [1]])),
     (torch.randn(5, 4, 16), CACHE, STARTS, STARTS)),
    (lambda q, k, cu: fa3.flash_attn_varlen_func(q, k, k, cu, cu, 3, 3, causal=True, attention_chunk=2),
     (torch.randn(5, 4, 16), torch.randn(5, 2, 16), STARTS)),
], ids=["lengths before an append", "one length", "pages", "chunks"])
def test_what_is_kept_stays_out_of_batched_and_fake_calls(call, args):
    given = lambda: [x.clone() for x in args]
    expected = [call(*given()) for _ in range(3)][-1]
    batched = torch.func.vmap(call)(*(torch.stack([x, x]) for x in given()))
    close(batched[0], expected)
    close(batched[1], expected)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in given()]
    with mode:
        fake = call(*fakes)
    assert fake.shape == expected.shape and fake.stride() == expected.stride()
    close(call(*given()), expected)


def test_cache_batch_idx_names_rows_of_the_page_table_in_3_and_is_refused_with_one_in_2():
    _, k, v, _, cu_k, _, _ = ragged((5, 9, 3), (5, 9, 3))
    k_pages, v_pages, table = two_caches(k, v, cu_k)
    q, rows, lens = torch.randn(2, 1, 4, 16), torch.tensor([2, 0], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=lens, cache_batch_idx=rows, page_table=table, causal=True)
    for b, row in enumerate(rows):
        keys = slice(cu_k[row], cu_k[row + 1])
        close(out[b], reference.attention(q[b][None], k[keys][None], v[keys][None], causal=True)[0][0])
    with pytest.raises(ArgumentError, match="cache_batch_idx"):
        fa2.flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=lens, cache_batch_idx=rows, block_table=table)


def test_pages_that_require_grad_are_read_and_raise_in_backward():
    q, k, v, cu_q, cu_k, max_q, max_k = ragged()
    k_pages, v_pages, table = two_caches(k, v, cu_k)
    call = lambda q: fa2.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, max_q, max_k, causal=True, return_attn_probs=True, block_table=table)
    expected, expected_lse, _ = call(q)
    out, lse, _ = call(q.clone().requires_grad_())
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and out.requires_grad
    with pytest.raises(PortattnError, match="block_table"):
        out.sum().backward()


@pytest.mark.parametrize("given", [{}, dict(cache_leftpad=torch.tensor([1, 0], dtype=torch.int32)), dict(attention_chunk=4)], ids=str)
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_cache_takes_what_requires_grad_and_raises_in_backward(given, with_lse):
    q, new, lens = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 2, 16), torch.tensor([3, 5], dtype=torch.int32)
    cache = torch.randn(2, 8, 2, 16)
    for fa in (fa3,) if "attention_chunk" in given else (fa2, fa3):
        def call(q, new, caches):
            got = fa.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=lens, causal=True, return_softmax_lse=with_lse, **given)
            return got if with_lse else (got,)

        plain, caches = (cache.clone(), cache.clone()), (cache.clone(), cache.clone())
        expected = call(q, new, plain)
        for _ in range(4):  # a call of a kind that is met again, too
            got = call(q.clone().requires_grad_(), new.clone().requires_grad_(), caches)
            assert all(torch.equal(a, b) for a, b in zip((*got, *caches), (*expected, *plain)))
        assert got[0].requires_grad and not caches[0].requires_grad
        with pytest.raises(PortattnError, match="flash_attn_with_kvcache.*no_grad"):
            got[0].sum().backward()


# ------------------------------------------------------------------ lengths as flash-attn counts them, on every backend of this machine
@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_counted_as_flash_attn_does_whoever_serves(backend, dtype, check, monkeypatch):
    monkeypatch.setenv("PORTATTN_CHECK", check)
    cos, sin = tables(16, 16)
    before = torch.tensor([0, 3, 9], dtype=dtype)
    q, k = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16)
    cache, other = torch.randn(3, 12, 2, 16), torch.randn(3, 12, 2, 16)
    table = torch.arange(3)[:, None]
    want = reference.attention_paged(q, cache, other, table, before + 2, k=k, v=k, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=True, causal=True)[0]
    ragged = torch.tensor([0, 2, 2, 5], dtype=dtype)
    cu_k, pages = torch.tensor([0, 4, 4, 13], dtype=dtype), (torch.arange(3)[:, None] * 3 + torch.arange(3)).to(dtype)
    rows = torch.randn(5, 4, 16)
    keys = cache.view(9, 4, 2, 16)
    of_pages = reference.attention_paged(rows, keys, keys, pages, cu_k.diff(), cu_seqlens_q=ragged, causal=True)[0]
    new = torch.randn(5, 2, 16)
    lens = torch.tensor([1, 0, 6], dtype=dtype)
    appended = reference.attention_paged(rows, keys, keys, pages, lens + ragged.diff(), cu_seqlens_q=ragged, k=new, v=new, causal=True)[0]
    with portattn.use(backend):
        close(fa2.flash_attn_varlen_func(rows, keys, keys, ragged, cu_k, 3, 9, causal=True, block_table=pages), of_pages)
        close(fa2.flash_attn_with_kvcache(q, cache.clone(), other.clone(), k, k, cos, sin, cache_seqlens=before, causal=True), want)
        close(fa3.flash_attn_with_kvcache(rows, keys.clone(), keys.clone(), new, new, cache_seqlens=lens, page_table=pages, cu_seqlens_q=ragged,
                                          cu_seqlens_k_new=ragged, max_seqlen_q=3, causal=True), appended)


def test_an_lse_has_its_heads_first_whoever_serves(backend):
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 3, 2, 16)  # causal, bottom-right: rows 0 and 1 see nothing
    expected = reference.attention(q, k, k, causal=True)[1].transpose(1, 2)
    cu_q, cu_k = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
    table, lens = torch.tensor([[0], [1]]), torch.tensor([3, 3])
    rows = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), cu_q, cu_k, 5, 3)
    with portattn.use(backend):
        two = (fa2.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1],
               fa2.flash_attn_varlen_func(*rows, causal=True, return_attn_probs=True)[1].unflatten(1, (2, 5)).transpose(0, 1),
               fa2.flash_attn_with_kvcache(q, k, k, cache_seqlens=lens, causal=True, return_softmax_lse=True)[1])
        three = (fa3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1],
                 fa3.flash_attn_with_kvcache(q, k, k, cache_seqlens=3, causal=True, return_softmax_lse=True)[1],
                 vllm_flash_attn.flash_attn_varlen_func(rows[0], k, k, 5, cu_q, 3, seqused_k=lens, block_table=table, causal=True,
                                                        return_softmax_lse=True)[1].unflatten(1, (2, 5)).transpose(0, 1))
    for lse in two:
        close(lse, expected.masked_fill(expected == -INF, INF))
    for lse in three:
        close(lse, expected)


def test_a_compiled_append_counts_lengths_before_it():
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    cache, lens = torch.randn(2, 8, 2, 16), torch.tensor([2, 5], dtype=torch.int32)
    call = lambda keys: fa2.flash_attn_with_kvcache(q, keys, keys, k, k, cache_seqlens=lens, causal=True)
    close(torch.compile(call, fullgraph=True, backend="eager")(cache.clone()), call(cache.clone()))


@pytest.mark.parametrize("name, right, wrong", [
    ("cache_seqlens", 3, 3.0), ("cache_seqlens", 3, "3"), ("window_size", (1, 0), (1.0, 0)), ("window_size", (1, 0), 1), ("window_size", (1, 0), (1, 0, 0)),
    ("num_splits", 1, True), ("softmax_scale", 1.0, True),
], ids=lambda x: str(x))
def test_a_number_of_another_type_is_refused_in_a_known_call_too(name, right, wrong):
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)
    for fa in (fa2, fa3):
        call = lambda value: fa.flash_attn_with_kvcache(q, cache, cache, **dict(cache_seqlens=4) | {name: value})
        for times in (0, 4):
            for _ in range(times):
                call(right)
            with pytest.raises(portattn.ArgumentTypeError, match=f"{name}: wanted "):
                call(wrong)


def test_angles_of_one_kind_only_raise():
    q, cache, lens = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16), torch.tensor([3], dtype=torch.int32)
    for fa in (fa2, fa3):
        with pytest.raises(ArgumentError, match="rotary"):
            fa.flash_attn_with_kvcache(q, cache, cache, q, q, rotary_sin=torch.randn(8, 8), cache_seqlens=lens)


def test_the_empty_tensor_is_kept_but_not_one_that_somebody_changed():
    q = torch.randn(1, 2, 2, 16)
    empty = lambda: fa2.flash_attn_func(q, q, q, return_attn_probs=True)[2]
    with torch.inference_mode():
        first = empty()
    assert empty() is first and first.numel() == 0 and first.dtype == q.dtype and not first.is_inference()

    class Function(torch.autograd.Function):  # as flash-attn's own: all three are its results
        @staticmethod
        def forward(ctx, x):
            return fa2.flash_attn_func(x, x, x, return_attn_probs=True)

    assert Function.apply(q.clone().requires_grad_())[2].requires_grad
    assert not empty().requires_grad
    empty().resize_(3)
    assert empty().numel() == 0


def test_over_pages_what_asks_for_gradients_gets_no_empty_tensor_with_a_history():
    pages, table = torch.randn(2, 4, 2, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    cu_q, cu_k, q = torch.tensor([0, 2]), torch.tensor([0, 6]), torch.randn(2, 2, 16)
    with_grad = fa2.flash_attn_varlen_func(q.clone().requires_grad_(), pages, pages, cu_q, cu_k, 2, 6, causal=True, block_table=table,
                                           return_attn_probs=True)
    without = fa2.flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 2, 6, causal=True, block_table=table, return_attn_probs=True)
    assert with_grad[0].requires_grad and not with_grad[2].requires_grad
    for got, want in zip(with_grad, without):
        assert torch.equal(got, want)
