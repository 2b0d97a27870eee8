"""A translated call that is recognised (portattn/compat/_kvcache.py, _packed.py) answers to everything that may differ from the
call before it."""

import pytest
import torch

import portattn
from portattn import ArgumentError, PortattnError, recent, reference
from portattn.compat import _kvcache, _packed
from portattn.compat import flash_attn as fa2
from portattn.compat import flash_attn_interface as fa3

INT = torch.int32
torch.manual_seed(11)
Q, K, V = torch.randn(2, 1, 4, 16), torch.randn(4, 8, 2, 16), torch.randn(4, 8, 2, 16)  # K and V: rows of a cache, or pages
NEW_K, NEW_V = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
COS, SIN = torch.rand(32, 8), torch.rand(32, 8)
TABLE = torch.tensor([[3, 1], [0, 2]], dtype=INT)
LENS = torch.tensor([5, 3], dtype=INT)


@pytest.fixture(autouse=True)
def forgotten():
    _kvcache._recent.forget()


def known(call):
    """The call, made often enough to be recognised."""
    for _ in range(4):
        got = call()
    if recent._Guards:
        assert _kvcache._recent.kinds
    return got


def close(got, expected):
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=2e-5, atol=2e-5)


def expected(table, lens, q=Q, **options):
    """Of a causal call over copies of K and V, lengths after an append."""
    return reference.attention_paged(q, K.clone(), V.clone(), table, lens, causal=True, **options)[0]


def decode(fa=fa2, **given):
    given = dict(cache_seqlens=LENS, causal=True) | given
    return fa.flash_attn_with_kvcache(Q, K.clone(), V.clone(), **given)


OWN_ROWS = torch.arange(2)[:, None]


@pytest.mark.parametrize("fa", [fa2, fa3], ids=["2", "3"])
@pytest.mark.parametrize("given", [{}, dict(k=NEW_K, v=NEW_V), dict(k=NEW_K, v=NEW_V, rotary_cos=COS, rotary_sin=SIN)],
                         ids=["decode", "append", "turned"])
def test_one_length_for_all_is_this_calls(fa, given):
    known(lambda: decode(fa, cache_seqlens=5, **given))
    options = given | (dict(rotary_interleaved=True) if "rotary_cos" in given else {})
    for length in (2, 7, 5):
        close(decode(fa, cache_seqlens=length, **given), expected(OWN_ROWS, torch.full((2,), length + ("k" in given)), **options))
    with pytest.raises(ArgumentError, match="cache_seqlens: wanted at most"):
        decode(fa, cache_seqlens=8 + ("k" not in given), **given)


def test_the_whole_cache_is_not_one_length():
    known(lambda: decode(cache_seqlens=3))
    known(lambda: decode(cache_seqlens=None))
    close(decode(cache_seqlens=None), expected(OWN_ROWS, torch.tensor([8, 8])))
    close(decode(cache_seqlens=3), expected(OWN_ROWS, torch.tensor([3, 3])))
    with pytest.raises(ArgumentError, match="cache_seqlens: wanted the lengths before"):
        decode(cache_seqlens=None, k=NEW_K, v=NEW_V)


@pytest.mark.parametrize("given", ["lens", "table", "rows"])
def test_what_changes_in_place_is_read_again(given):
    lens, table, rows = LENS.clone(), TABLE.clone(), torch.tensor([2, 0], dtype=INT)
    pages = dict(block_table=table) if given == "table" else dict(cache_batch_idx=rows)
    call = lambda: decode(cache_seqlens=lens, **pages)
    known(call)
    lens.copy_(torch.tensor([1, 8])), table.copy_(TABLE.flip(0)), rows.copy_(torch.tensor([1, 3]))
    close(call(), expected(table if given == "table" else rows[:, None], lens))


def test_rows_that_are_another_tensor_or_moved_are_looked_up_again():
    rows = torch.tensor([2, 0], dtype=INT)
    known(lambda: decode(cache_batch_idx=rows))
    other = torch.tensor([3, 1], dtype=INT)
    close(decode(cache_batch_idx=other), expected(other[:, None], LENS))
    rows.set_(torch.tensor([1, 2], dtype=INT))
    close(decode(cache_batch_idx=rows), expected(rows[:, None], LENS))
    both = torch.tensor([0, 2, 3], dtype=INT)
    rows.set_(both[1:])
    close(decode(cache_batch_idx=rows), expected(torch.tensor([[2], [3]]), LENS))


@pytest.mark.parametrize("changed, options", [
    (dict(window_size=(1, 0)), dict(window_size=(1, 0))), (dict(window_size=[2, -1]), dict(window_size=(2, -1))),
    (dict(softmax_scale=0.5), dict(softmax_scale=0.5)), (dict(softcap=0.5), dict(softcap=0.5)), (dict(softcap=-1.0), {}),
    (dict(alibi_slopes=torch.rand(4)), dict(alibi_slopes=None)), (dict(num_splits=2), {}), (dict(cache_seqlens=LENS.long()), {}),
], ids=lambda x: next(iter(x), "none"))
def test_an_option_that_differs_is_honoured(changed, options):
    known(lambda: decode())
    if "alibi_slopes" in options:
        options = dict(alibi_slopes=changed["alibi_slopes"])
    for _ in range(4):
        close(decode(**changed), expected(OWN_ROWS, LENS, **options))
    close(decode(), expected(OWN_ROWS, LENS))


def test_a_window_that_changes_in_place_is_this_calls():
    window = [1, 0]
    known(lambda: decode(window_size=window))
    window[0] = 3
    close(decode(window_size=window), expected(OWN_ROWS, LENS, window_size=(3, 0)))


def test_each_spelling_has_its_own_lse():
    empty = torch.tensor([5, 0], dtype=INT)
    two = lambda: decode(fa2, cache_seqlens=empty, return_softmax_lse=True)[1]
    three = lambda: decode(fa3, cache_seqlens=empty, return_softmax_lse=True)[1]
    for _ in range(4):
        assert (two()[1] == float("inf")).all() and (three()[1] == -float("inf")).all()


def test_left_pads_are_still_translated():
    pads = torch.tensor([1, 2], dtype=INT)
    known(lambda: decode())
    shifted = torch.stack([K[0, 1:], K[1, 1:]]), torch.stack([V[0, 1:], V[1, 1:]])
    shifted[0][1, :-1], shifted[1][1, :-1] = K[1, 2:], V[1, 2:]
    close(decode(cache_leftpad=pads), reference.attention_paged(Q, *shifted, OWN_ROWS, LENS - pads, causal=True)[0])


def test_a_fault_is_named_though_the_call_is_known():
    known(lambda: decode(k=NEW_K, v=NEW_V))
    known(lambda: decode(block_table=TABLE))
    with pytest.raises(ArgumentError, match="v: wanted k and v together"):
        decode(k=NEW_K)
    with pytest.raises(ArgumentError, match="v: wanted together with k"):
        decode(v=NEW_V)
    with pytest.raises(ArgumentError, match="rotary_sin"):
        decode(rotary_sin=SIN)
    with pytest.raises(ArgumentError, match="cache_batch_idx: wanted None together"):
        decode(block_table=TABLE, cache_batch_idx=torch.tensor([0, 1], dtype=INT))
    with pytest.raises(ArgumentError, match="block_table"):
        decode(block_table=TABLE[:1])


def test_a_gradient_is_asked_for_where_grad_mode_is_on():
    q = Q.clone().requires_grad_()
    call = lambda: fa2.flash_attn_with_kvcache(q, K, V, cache_seqlens=LENS, block_table=TABLE, causal=True)
    with torch.no_grad():
        known(call)
    assert call().requires_grad
    with pytest.raises(PortattnError, match="gradients"):
        call().sum().backward()


def test_checked_mode_checks_a_call_that_was_known_without(monkeypatch):
    known(lambda: decode(cache_seqlens=torch.tensor([5, 8], dtype=INT)))
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    with pytest.raises(ArgumentError, match=r"kv_lens\[1\]: wanted at most 8"):
        decode(cache_seqlens=torch.tensor([5, 9], dtype=INT))


# ------------------------------------------------------------------ q, k and v in one tensor
ROWS = torch.randn(5, 4, 16)
CU, CU_K = torch.tensor([0, 1, 5], dtype=INT), torch.tensor([0, 4, 5], dtype=INT)
PACKED = {  # name: (the packed call of x, of the shape given; the three tensors in it)
    "qkv": (lambda x, **o: fa2.flash_attn_qkvpacked_func(x, **o), (2, 5, 3, 4, 16), lambda x: x.unbind(2)),
    "kv": (lambda x, **o: fa2.flash_attn_kvpacked_func(Q, x, **o), (2, 5, 2, 2, 16), lambda x: (Q, *x.unbind(2))),
    "ragged qkv": (lambda x, **o: fa2.flash_attn_varlen_qkvpacked_func(x, CU, 4, **o), (5, 3, 4, 16), lambda x: x.unbind(1)),
    "ragged kv": (lambda x, **o: fa2.flash_attn_varlen_kvpacked_func(ROWS, x, CU, CU_K, 4, 4, **o), (5, 2, 2, 16),
                  lambda x: (ROWS, *x.unbind(1))),
    "ragged kv of q's lengths": (lambda x, **o: fa2.flash_attn_varlen_kvpacked_func(ROWS, x, CU, CU, 4, 4, **o), (5, 2, 2, 16),
                                 lambda x: (ROWS, *x.unbind(1))),
    "qkv, 3": (lambda x, **o: fa3.flash_attn_qkvpacked_func(x, **o), (2, 5, 3, 4, 16), lambda x: x.unbind(2)),
    "heads, 3": (lambda x, **o: fa3.flash_attn_qkvpacked_func(x, num_heads_q=4, **o), (2, 5, 8, 16),
                 lambda x: x.split([4, 2, 2], 2)),
}



def packed_expected(form, x, **options):
    q, k, v = PACKED[form][2](x)
    if "ragged" not in form:
        return reference.attention(q, k, v, causal=True, **options)[0]
    return reference.attention_varlen(q, k, v, CU, CU_K if form == "ragged kv" else CU, 4, 4, causal=True, **options)[0]


@pytest.mark.parametrize("form", PACKED)
def test_what_lies_in_one_tensor_is_found_there(form, backend):
    call, shape, _ = PACKED[form]
    _packed._recent.forget()
    with portattn.use(backend):
        for _ in range(5):
            x = torch.randn(shape)
            close(call(x, causal=True), packed_expected(form, x))
        if recent._Guards:
            assert bool(_packed._recent.kinds) == (backend == "cpu")
        whole = torch.randn(4, *shape)
        close(call(whole[2], causal=True), packed_expected(form, whole[2]))  # does not start where its storage does
        for x in (torch.randn(*shape[:-1], 32)[..., 8:24], torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)):
            if x.shape == shape:
                for _ in range(4):
                    close(call(x, causal=True), packed_expected(form, x))
        for options in (dict(softmax_scale=0.5), dict(window_size=(1, 0)), dict(softcap=0.5)):
            close(call(x, causal=True, **options), packed_expected(form, x, **options))


def test_packed_calls_with_lse_alibi_and_gradients():
    slopes, x = torch.rand(4), torch.randn(2, 5, 3, 4, 16)
    q, k, v = x.unbind(2)
    for _ in range(4):
        close(fa2.flash_attn_qkvpacked_func(x, causal=True, alibi_slopes=slopes),
              reference.attention(q, k, v, causal=True, alibi_slopes=slopes)[0])
        close(fa2.flash_attn_qkvpacked_func(x, return_attn_probs=True)[1], reference.attention(q, k, v)[1].transpose(1, 2))
    with torch.no_grad():
        for _ in range(4):
            fa2.flash_attn_qkvpacked_func(x.requires_grad_())
    fa2.flash_attn_qkvpacked_func(x).sum().backward()
    given = x.grad
    x.grad = None
    portattn.attention(*x.unbind(2)).sum().backward()
    torch.testing.assert_close(given, x.grad)


@pytest.mark.parametrize("name, right, wrong", [("softmax_scale", 1.0, True), ("softcap", 1.0, True), ("num_splits", 1, 1.0)])
def test_what_equals_an_option_but_is_of_another_type_is_refused_in_a_known_call(name, right, wrong):
    known(lambda: fa2.flash_attn_with_kvcache(Q, K, V, cache_seqlens=LENS, block_table=TABLE, **{name: right}))
    with pytest.raises(portattn.ArgumentTypeError, match=name):
        fa2.flash_attn_with_kvcache(Q, K, V, cache_seqlens=LENS, block_table=TABLE, **{name: wrong})
    if name != "num_splits":
        qkv = torch.randn(2, 5, 3, 4, 16)
        for _ in range(4):
            fa2.flash_attn_qkvpacked_func(qkv, **{name: right})
        with pytest.raises(portattn.ArgumentTypeError, match=name):
            fa2.flash_attn_qkvpacked_func(qkv, **{name: wrong})
