"""C-ERR: every fault of a call named at once, before dispatch, with nothing written; the same whatever the backend."""

import decimal
import fractions
import inspect
import types
import weakref

import numpy
import pytest
import torch
from toys import toy, toy_manifest

import portattn
from portattn import ArgumentError, ArgumentTypeError, NoBackendError, api, recent, reference


def dense(**changed):
    kw = dict(q=torch.randn(2, 5, 4, 8), k=torch.randn(2, 9, 2, 8), v=torch.randn(2, 9, 2, 8)) | changed
    return portattn.attention(kw.pop("q"), kw.pop("k"), kw.pop("v"), **kw)


def varlen(**changed):
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    kw = dict(q=torch.randn(7, 4, 8), k=torch.randn(7, 2, 8), v=torch.randn(7, 2, 8), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4,
              max_seqlen_k=4) | changed
    return portattn.attention_varlen(**kw)


def paged(**changed):
    kw = dict(q=torch.randn(2, 1, 4, 8), k_cache=torch.randn(6, 4, 2, 8), v_cache=torch.randn(6, 4, 2, 8),
              block_table=torch.arange(6, dtype=torch.int32).view(2, 3), kv_lens=torch.tensor([5, 12], dtype=torch.int32)) | changed
    return portattn.attention_paged(**kw)


def append(**changed):
    kw = dict(k=torch.randn(3, 2, 8), v=torch.randn(3, 2, 8), k_cache=torch.zeros(2, 4, 2, 8), v_cache=torch.zeros(2, 4, 2, 8),
              slot_mapping=torch.tensor([1, -1, 7])) | changed
    return portattn.cache_append(**kw)


FAULTS = [
    # call, changed argument(s), the argument that the text must name, its kind
    (dense, dict(q=torch.randn(5, 4, 8)), "q", ArgumentError),
    (dense, dict(q=torch.randn(2, 5, 4, 8).double()), "q", ArgumentError),
    (dense, dict(q=[[1.0]]), "q", ArgumentTypeError),
    (dense, dict(k=torch.randn(2, 9, 3, 8)), "k", ArgumentError),
    (dense, dict(k=torch.randn(3, 9, 2, 8)), "k", ArgumentError),
    (dense, dict(k=torch.randn(2, 9, 2, 16)), "k", ArgumentError),
    (dense, dict(k=torch.randn(2, 9, 2, 8).bfloat16()), "k", ArgumentError),
    (dense, dict(k=torch.randn(2, 9, 2, 8, device="meta")), "k", ArgumentError),
    (dense, dict(v=torch.randn(2, 8, 2, 8)), "v", ArgumentError),
    (dense, dict(v=torch.randn(2, 9, 1, 8)), "v", ArgumentError),
    (dense, dict(causal=1), "causal", ArgumentTypeError),
    (dense, dict(window_size=(-2, 0)), "window_size", ArgumentError),
    (dense, dict(window_size=(1, 2, 3)), "window_size", ArgumentError),
    (dense, dict(window_size=3), "window_size", ArgumentTypeError),
    (dense, dict(window_size=(1.5, 0)), "window_size", ArgumentTypeError),
    (dense, dict(softmax_scale=float("nan")), "softmax_scale", ArgumentError),
    (dense, dict(softmax_scale=float("inf")), "softmax_scale", ArgumentError),
    (dense, dict(softmax_scale=torch.tensor(1.0)), "softmax_scale", ArgumentTypeError),
    (dense, dict(softcap=-1.0), "softcap", ArgumentError),
    (dense, dict(softcap=torch.tensor(1.0)), "softcap", ArgumentTypeError),
    (dense, dict(bias=torch.randn(3, 9)), "bias", ArgumentError),
    (dense, dict(bias=torch.randn(5, 9).half()), "bias", ArgumentError),
    (dense, dict(bias=torch.randn(1, 2, 4, 5, 9)), "bias", ArgumentError),
    (dense, dict(alibi_slopes=torch.ones(3)), "alibi_slopes", ArgumentError),
    (dense, dict(alibi_slopes=torch.ones(4).half()), "alibi_slopes", ArgumentError),
    (dense, dict(alibi_slopes=torch.ones(3, 4)), "alibi_slopes", ArgumentError),
    (dense, dict(sinks=torch.ones(2)), "sinks", ArgumentError),
    (dense, dict(sinks=torch.ones(4).double()), "sinks", ArgumentError),
    (dense, dict(layout="bnsd"), "layout", ArgumentError),
    (dense, dict(out=torch.empty(2, 5, 4, 16)), "out", ArgumentError),
    (dense, dict(out=torch.empty(2, 5, 4, 8).half()), "out", ArgumentError),
    (dense, dict(out=torch.empty(2, 5, 8, 4).transpose(2, 3)), "out", ArgumentError),
    (dense, dict(out=torch.empty(1, 5, 4, 8).expand(2, 5, 4, 8)), "out", ArgumentError),
    (dense, dict(q=torch.randn(2, 5, 4, 8, requires_grad=True), out=torch.empty(2, 5, 4, 8)), "out", ArgumentError),
    (dense, dict(num_splits=-1), "num_splits", ArgumentError),
    (dense, dict(num_splits=1.0), "num_splits", ArgumentTypeError),
    (dense, dict(batch_invariant=None), "batch_invariant", ArgumentTypeError),
    (dense, dict(return_lse=1), "return_lse", ArgumentTypeError),
    (dense, dict(backend="nothing"), "backend", ArgumentError),
    (dense, dict(backend=3), "backend", ArgumentTypeError),
    (varlen, dict(cu_seqlens_q=torch.tensor([0.0, 3, 7])), "cu_seqlens_q", ArgumentError),
    (varlen, dict(cu_seqlens_q=torch.tensor([], dtype=torch.int32)), "cu_seqlens_q", ArgumentError),
    (varlen, dict(cu_seqlens_k=torch.tensor([0, 7])), "cu_seqlens_k", ArgumentError),
    (varlen, dict(cu_seqlens_k=[0, 3, 7]), "cu_seqlens_k", ArgumentTypeError),
    (varlen, dict(max_seqlen_q=torch.tensor(4)), "max_seqlen_q", ArgumentTypeError),
    (varlen, dict(max_seqlen_k=-1), "max_seqlen_k", ArgumentError),
    (varlen, dict(seqused_k=torch.tensor([3])), "seqused_k", ArgumentError),
    (varlen, dict(v=torch.randn(6, 2, 8)), "v", ArgumentError),
    (varlen, dict(q=torch.randn(1, 7, 4, 8)), "q", ArgumentError),
    (paged, dict(q=torch.randn(2, 4, 8)), "cu_seqlens_q", ArgumentError),
    (paged, dict(block_table=torch.zeros(3, 3, dtype=torch.int32)), "block_table", ArgumentError),
    (paged, dict(block_table=torch.zeros(6, dtype=torch.int32)), "block_table", ArgumentError),
    (paged, dict(block_table=torch.zeros(2, 3)), "block_table", ArgumentError),
    (paged, dict(kv_lens=torch.tensor([5])), "kv_lens", ArgumentError),
    (paged, dict(kv_lens=torch.tensor([5, 12], dtype=torch.int16)), "kv_lens", ArgumentError),
    (paged, dict(k_cache=torch.randn(6, 4, 2, 8).half()), "k_cache", ArgumentError),
    (paged, dict(v_cache=torch.randn(5, 4, 2, 8)), "v_cache", ArgumentError),
    (paged, dict(v_cache=torch.randn(6, 4, 2, 8).to(torch.float8_e4m3fn)), "v_cache", ArgumentError),
    (paged, dict(kv_layout="HDN"), "kv_layout", ArgumentError),
    (paged, dict(k=torch.randn(2, 1, 2, 8)), "v", ArgumentError),
    (paged, dict(k=torch.randn(2, 1, 4, 8), v=torch.randn(2, 1, 2, 8)), "k", ArgumentError),
    (paged, dict(rotary_cos=torch.ones(16, 4)), "rotary_sin", ArgumentError),
    (paged, dict(rotary_cos=torch.ones(16, 8), rotary_sin=torch.ones(16, 8)), "rotary_cos", ArgumentError),
    (paged, dict(rotary_cos=torch.ones(16, 4), rotary_sin=torch.ones(15, 4)), "rotary_sin", ArgumentError),
    (paged, dict(k_scale=torch.ones(3)), "k_scale", ArgumentError),
    (paged, dict(k_scale=torch.ones(2).double()), "k_scale", ArgumentError),
    (paged, dict(v_scale=float("nan")), "v_scale", ArgumentError),
    (paged, dict(v_scale="one"), "v_scale", ArgumentTypeError),
    (append, dict(slot_mapping=torch.tensor([1, 2])), "slot_mapping", ArgumentError),
    (append, dict(slot_mapping=torch.tensor([1.0, 2, 3])), "slot_mapping", ArgumentError),
    (append, dict(k=torch.randn(3, 1, 8)), "k", ArgumentError),
    (append, dict(v=torch.randn(2, 2, 8)), "v", ArgumentError),
    (append, dict(k_cache=torch.zeros(2, 1, 2, 8).expand(2, 4, 2, 8)), "k_cache", ArgumentError),
    (append, dict(k_scale=torch.ones(3, 2)), "k_scale", ArgumentError),
]


@pytest.mark.parametrize("call, changed, name, kind", FAULTS, ids=[f"{c.__name__}-{'-'.join(ch)}-{i}" for i, (c, ch, _, _) in enumerate(FAULTS)])
def test_a_fault_names_the_argument(call, changed, name, kind):
    with pytest.raises(kind) as caught:
        call(**changed)
    assert f"{name}: wanted " in str(caught.value) and ", got " in str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError)) and isinstance(caught.value, portattn.PortattnError)


@pytest.mark.parametrize("call", [dense, varlen, paged, append])
def test_what_the_faults_change_is_legal_otherwise(call):
    call()


def test_all_faults_are_named_at_once():
    with pytest.raises(ArgumentError) as caught:
        dense(k=torch.randn(2, 9, 3, 8).half(), softmax_scale=float("nan"), sinks=torch.ones(1), causal=None, num_splits=-3)
    for name in ("k: wanted float32", "k: wanted a number of heads", "softmax_scale", "sinks", "causal", "num_splits"):
        assert name in str(caught.value)


def test_a_cached_call_does_not_hide_a_fault():
    """A window of floats equals one of ints as a key; a key must not be made of what was never checked."""
    q = torch.randn(1, 4, 2, 8)
    portattn.attention(q, q, q, causal=True)
    with pytest.raises(ArgumentTypeError):
        portattn.attention(q, q, q, causal=1)
    with pytest.raises(ArgumentTypeError):
        portattn.attention(q, q, q, causal=torch.tensor(True))
    for _ in range(4):
        dense(batch_invariant=True)
        varlen(batch_invariant=True)
        paged(batch_invariant=True, rotary_cos=torch.ones(16, 4), rotary_sin=torch.ones(16, 4), rotary_interleaved=True)
    for call in (dense, varlen, paged):
        with pytest.raises(ArgumentTypeError, match="batch_invariant"):
            call(batch_invariant=1)
    with pytest.raises(ArgumentTypeError, match="rotary_interleaved"):
        paged(rotary_cos=torch.ones(16, 4), rotary_sin=torch.ones(16, 4), rotary_interleaved=1)
    portattn.attention(q, q, q, window_size=[1, 0])
    for window in ((1.0, 0), 3, (), (1,), {}, "10"):
        with pytest.raises(ArgumentError if window in ((), (1,)) else ArgumentTypeError, match="window_size: wanted"):
            portattn.attention(q, q, q, window_size=window)
    with pytest.raises(ArgumentError):
        portattn.attention(q, q, q, window_size=[1, -3])


EQUAL = [("softmax_scale", 1.0, True), ("softmax_scale", 1.0, 1 + 0j), ("softmax_scale", 0.5, decimal.Decimal("0.5")), ("softcap", 0.0, False), ("softcap", 1.0, True),
         ("softcap", 2.0, decimal.Decimal(2)), ("num_splits", 0, False), ("num_splits", 1, True), ("num_splits", 2, 2.0), ("window_size", (3, 0), (3.0, 0)),
         ("window_size", (1, 0), (1, False)), ("window_size", (1, 0), (True, 0)), ("window_size", (-1, -1), (-1.0, -1)), ("return_lse", False, 0),
         ("batch_invariant", True, 1.0), ("causal", False, 0.0), ("max_seqlen_q", 4, 4.0), ("max_seqlen_k", 4, 4.0), ("k_scale", 1.0, True), ("v_scale", 0.5, 0.5 + 0j),
         ("rotary_interleaved", False, 0)]


@pytest.mark.parametrize("how", ["by tensors", "by key"])
@pytest.mark.parametrize("name, right, wrong", EQUAL, ids=[f"{name}-{wrong!r}" for name, _, wrong in EQUAL])
def test_what_equals_an_option_but_is_of_another_type_is_refused_in_a_known_call(monkeypatch, name, right, wrong, how):
    assert right == wrong and hash(right) == hash(wrong)
    if how == "by key":
        monkeypatch.setattr(recent, "_Guards", None)
    functions = {dense: portattn.attention, varlen: portattn.attention_varlen, paged: portattn.attention_paged, append: portattn.cache_append}
    for call in [call for call, function in functions.items() if name in inspect.signature(function).parameters]:
        more = {"k_scale": 1.0, "v_scale": 0.5} if name in ("k_scale", "v_scale") else {}
        for _ in range(3):
            call(**more | {name: right})
        with pytest.raises(ArgumentTypeError, match=f"{name}: wanted "):
            call(**more | {name: wrong})
        call(**more | {name: right})


def test_numbers_of_every_kind_that_is_taken_are_taken_in_known_calls():
    for _ in range(3):
        for scale, splits, window in ((1, 0, (3, 0)), (1.0, numpy.int64(0), (numpy.int64(3), 0)), (numpy.float32(1), 0, [3, 0]), (fractions.Fraction(1), 0, None)):
            dense(softmax_scale=scale, num_splits=splits, window_size=window)


@pytest.fixture
def known():
    """Calls that are recognised by their tensors, without a key."""
    if not recent._Guards:
        pytest.skip("package: this torch has other guards, keys do")
    for call, kinds in ((dense, api._recent_dense), (varlen, api._recent_varlen), (paged, api._recent_paged)):
        kinds.forget()
        for _ in range(3):
            call()
        assert kinds.kinds, call.__name__


@pytest.mark.parametrize("call, changed, name, kind", [f for f in FAULTS if f[0] is not append],
                         ids=[f"{f[0].__name__}-{f[2]}-{i}" for i, f in enumerate(f for f in FAULTS if f[0] is not append)])
def test_a_call_like_the_last_ones_does_not_hide_a_fault(known, call, changed, name, kind):
    test_a_fault_names_the_argument(call, changed, name, kind)


@pytest.mark.parametrize("changed", [
    dict(q=torch.randn(2, 3, 4, 8)), dict(k_cache=torch.randn(6, 2, 4, 8).transpose(1, 2)), dict(block_table=torch.arange(6).view(2, 3)),
    dict(kv_lens=torch.tensor([5, 12])), dict(causal=True), dict(softmax_scale=0.5), dict(return_lse=True), dict(window_size=(2, 0)), dict(sinks=torch.ones(4)),
    dict(out=torch.empty(2, 1, 4, 8)), dict(k_scale=0.5, v_scale=2.0), dict(k_scale=torch.tensor(0.5), v_scale=2.0), dict(batch_invariant=True),
    dict(k=torch.randn(2, 1, 2, 8), v=torch.randn(2, 1, 2, 8)), dict(alibi_slopes=torch.rand(4)), dict(kv_layout="NHD"),
], ids=lambda x: next(iter(x)))
def test_a_call_that_differs_from_the_last_ones_in_one_thing_is_itself(known, changed):
    alike = dict(q=torch.randn(2, 1, 4, 8), k_cache=torch.randn(6, 4, 2, 8), v_cache=torch.randn(6, 4, 2, 8)) | changed
    got = paged(**alike)
    want = reference.attention_paged(alike.pop("q"), alike.pop("k_cache"), alike.pop("v_cache"),
                                     alike.pop("block_table", torch.arange(6, dtype=torch.int32).view(2, 3)),
                                     alike.pop("kv_lens", torch.tensor([5, 12], dtype=torch.int32)), **alike)
    torch.testing.assert_close(got[0] if changed.get("return_lse") else got, want[0].float())


def test_what_the_last_calls_were_keeps_no_tensor_alive(known):
    q = torch.randn(2, 1, 4, 8)
    gone = weakref.ref(q)
    for _ in range(3):
        paged(q=q)
    del q
    assert gone() is None


def test_another_backend_is_asked_after_the_order_changed(known):
    with portattn.use("sdpa"):
        assert portattn.plan(portattn.attention_paged, torch.randn(2, 1, 4, 8), torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8),
                             torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([5, 12], dtype=torch.int32)).choice.backend == "sdpa"
        paged()


def test_what_wants_a_gradient_is_not_taken_for_what_does_not(known):
    q = torch.randn(2, 1, 4, 8, requires_grad=True)
    with pytest.raises(NoBackendError, match="grad"):
        paged(q=q)
    with torch.no_grad():
        paged(q=q)


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "k_scale", "v_scale"])
def test_an_append_drops_no_gradient_silently(name):
    scales = dict(k_scale=torch.ones(2), v_scale=torch.ones(2))
    append(**scales)
    given = dict(k=torch.randn(3, 2, 8), v=torch.randn(3, 2, 8), k_cache=torch.zeros(2, 4, 2, 8), v_cache=torch.zeros(2, 4, 2, 8)) | scales
    given[name].requires_grad_()
    with pytest.raises(NoBackendError, match="grad"):
        append(**given)
    with torch.no_grad():
        append(**given)


def test_what_needed_no_gradient_under_no_grad_needs_one_without(known):
    q = torch.randn(2, 1, 4, 8, requires_grad=True)
    with torch.no_grad():
        for _ in range(4):
            paged(q=q)
    with pytest.raises(NoBackendError, match="grad"):
        paged(q=q)


def test_kinds_of_calls_that_take_turns_are_recognised():
    if not recent._Guards:
        pytest.skip("package: this torch has other guards, keys do")
    api._recent_dense.forget()
    for _ in range(3):
        dense()
        dense(causal=True)
    assert len(api._recent_dense.kinds) == 2


def test_one_tensor_at_several_places_is_told_from_several_tensors():
    if not recent._Guards:
        pytest.skip("package: this torch has other guards, keys do")
    api._recent_dense.forget()
    x, y, z = torch.randn(3, 1, 5, 2, 8)
    for _ in range(4):
        for q, k, v in ((x, y, y), (x, y, x), (x, x, x), (x, x, y), (x, y, z)):
            torch.testing.assert_close(portattn.attention(q, k, v), reference.attention(q, k, v)[0].float())
    assert len(api._recent_dense.kinds) == 5


def test_an_unknown_keyword_is_pythons_own_error():
    with pytest.raises(TypeError, match="dropout_p"):
        dense(dropout_p=0.1)
    with pytest.raises(TypeError):
        varlen(bias=torch.ones(1))


def test_the_same_fault_is_the_same_error_on_every_backend():
    texts = set()
    with toy():
        for backend in ("toy", "sdpa", None):
            with pytest.raises(ArgumentError) as caught:
                dense(k=torch.randn(2, 9, 3, 8), backend=backend)
            texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_over_an_input_is_refused_on_every_call(name):
    tensors = {n: torch.randn(1, 4, 2, 8) for n in "qkv"}
    portattn.attention(**tensors, out=torch.empty(1, 4, 2, 8))
    before = tensors[name].clone()
    with pytest.raises(ArgumentError, match=f"out: .*memory of {name}"):
        portattn.attention(**tensors, out=tensors[name])
    assert torch.equal(tensors[name], before)


def test_a_backend_merges_with_sinks_without_gaps():
    """Kernels read them by address."""
    seen = []

    def merge(outs, lses, sinks, bound):
        seen.append(sinks)
        return tuple(x.to(y.dtype) for x, y in zip(reference.merge_states(outs, lses, sinks=sinks), (outs, lses)))

    kind = toy_manifest("merger", capability=dict(layouts=["merge_states"]))
    portattn.registry.register(kind, types.SimpleNamespace(merge_states=merge))
    try:
        outs, lses = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
        for sinks in (torch.rand(4, 2)[:, 1], torch.rand(1).expand(4)):
            want = reference.merge_states(outs, lses, sinks=sinks)[0].float()
            torch.testing.assert_close(portattn.merge_states(outs, lses, sinks=sinks, backend="merger")[0], want)
            torch.testing.assert_close(portattn.plan(portattn.merge_states, outs, lses, sinks=sinks, backend="merger")()[0], want)
    finally:
        portattn.registry.unregister("merger")
    assert all(sinks.is_contiguous() for sinks in seen if sinks is not None) and sum(sinks is not None for sinks in seen) == 4


@pytest.mark.parametrize("name", ["q", "sinks", "alibi_slopes", "bias", "k_cache", "k", "rotary_cos", "k_scale", "v_scale"])
def test_out_over_an_input_of_another_kind_is_refused_in_a_known_call(name):
    """Sinks, a bias or tables are read as long as rows are written; a q with gaps is copied, and still no place for out."""
    def given():
        if name in ("k_scale", "v_scale"):
            tensors = {"q": torch.randn(2, 1, 4, 1), "k_cache": torch.randn(2, 4, 4, 1), "v_cache": torch.randn(2, 4, 4, 1),
                       "block_table": torch.tensor([[1], [0]]), "kv_lens": torch.tensor([3, 4]), name: torch.rand(2, 4)}
            return paged, tensors
        if name in ("k_cache", "k", "rotary_cos"):
            tensors = {"q": torch.randn(1, 2, 4, 8), "k_cache": torch.randn(2, 4, 1, 8), "v_cache": torch.randn(2, 4, 1, 8),
                       "block_table": torch.tensor([[1]]), "kv_lens": torch.tensor([3]), "k": torch.randn(1, 8, 1, 8)[:, :2],
                       "v": torch.randn(1, 2, 1, 8), "rotary_cos": torch.randn(16, 4), "rotary_sin": torch.randn(16, 4)}
            return paged, tensors
        tensors = {"q": torch.randn(1, 1, 4, 2)[..., ::2], "k": torch.randn(1, 3, 1, 1), "v": torch.randn(1, 3, 1, 1),
                   "bias": torch.randn(1, 4, 1, 3), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
        return dense, tensors

    for _ in range(4):
        call, tensors = given()
        call(**tensors, out=torch.empty(tensors["q"].shape))
    call, tensors = given()
    aliased = tensors[name].as_strided(tensors["q"].shape, torch.empty(tensors["q"].shape).stride())
    before = tensors[name].clone()
    with pytest.raises(ArgumentError, match=f"out: .*memory of {name}$"):
        call(**tensors, out=aliased)
    assert torch.equal(tensors[name], before)


def test_nothing_is_written_when_no_backend_takes_the_call():
    out, cache = torch.full((2, 1, 4, 8), 7.0), torch.full((6, 4, 2, 8), 3.0)
    with toy(capability=dict(features=[])), pytest.raises(NoBackendError):
        paged(k_cache=cache, v_cache=cache.clone(), k=torch.randn(2, 1, 2, 8), v=torch.randn(2, 1, 2, 8), out=out, backend="toy")
    assert (out == 7).all() and (cache == 3).all()


# ------------------------------------------------------------------ PORTATTN_CHECK=1
CHECKED = [
    (varlen, dict(cu_seqlens_q=torch.tensor([1, 3, 7])), r"cu_seqlens_q\[0\]: wanted 0, got 1"),
    (varlen, dict(cu_seqlens_k=torch.tensor([0, 5, 4])), r"cu_seqlens_k\[2\].*sequence 1"),
    (varlen, dict(cu_seqlens_k=torch.tensor([0, 3, 8])), r"cu_seqlens_k\[2\]: wanted at most 7 rows"),
    (varlen, dict(max_seqlen_q=3), r"max_seqlen_q: wanted at least 4.*sequence 1"),
    (varlen, dict(seqused_k=torch.tensor([4, 2])), r"seqused_k\[0\]: wanted 0..3"),
    (paged, dict(kv_lens=torch.tensor([5, 13])), r"kv_lens\[1\]: wanted at most 12"),
    (paged, dict(block_table=torch.tensor([[0, -1, 9], [1, 2, 3]])), r"block_table\[0, 1\].*got -1"),
    (paged, dict(block_table=torch.tensor([[0, 1, 9], [1, 6, 3]])), r"block_table\[1, 1\].*sequence 1.*got 6"),
    (paged, dict(kv_lens=torch.tensor([0, 12]), rotary_cos=torch.ones(16, 4), rotary_sin=torch.ones(16, 4)), r"kv_lens\[0\]: wanted at least the 1 query"),
    (paged, dict(rotary_cos=torch.ones(8, 4), rotary_sin=torch.ones(8, 4)), r"kv_lens\[1\]: wanted at most the 8 positions"),
    (append, dict(slot_mapping=torch.tensor([0, 8, 1])), r"slot_mapping\[1\]: wanted a slot below 8, got 8"),
]


@pytest.mark.parametrize("call, changed, text", CHECKED, ids=[f"{c.__name__}-{'-'.join(ch)}" for c, ch, _ in CHECKED])
def test_checked_mode_names_the_sequence_and_the_entry(call, changed, text, monkeypatch):
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    with pytest.raises(ArgumentError, match=text):
        call(**changed)


def test_checked_mode_waits_for_nothing_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    monkeypatch.setenv("PORTATTN_VERIFY", "0")
    with toy(run=lambda call, bound: call.q.new_zeros(*call.q.shape[:-1], call.v.shape[-1])):
        bad = dict(cu_seqlens_q=torch.tensor([1, 3, 7]), backend="toy")
        with pytest.raises(ArgumentError, match="cu_seqlens_q"):
            varlen(**bad)
        monkeypatch.setattr(portattn.validate, "capturing", lambda device: True)
        varlen(**bad)
        paged(kv_lens=torch.tensor([5, 13]), backend="toy")
        append(slot_mapping=torch.tensor([0, 8, 1]), backend="sdpa")


def test_checked_mode_lets_what_is_never_read_hold_anything(monkeypatch):
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    paged(block_table=torch.tensor([[0, 1, -1], [2, 3, 4]]), kv_lens=torch.tensor([5, 12]))
    paged(kv_lens=torch.tensor([-3, 0]), block_table=torch.full((2, 3), 2**31 - 1, dtype=torch.int32))


def test_the_check_can_be_switched_on_between_two_equal_calls(monkeypatch):
    tensors = dict(q=torch.randn(7, 4, 8), max_seqlen_q=4)
    varlen(**tensors)
    monkeypatch.setenv("PORTATTN_CHECK", "1")
    with pytest.raises(ArgumentError):
        varlen(**tensors, cu_seqlens_q=torch.tensor([1, 3, 7], dtype=torch.int32))


@pytest.mark.parametrize("backend", [n for n in portattn.registry.manifests() if not portattn.registry.probe(n, "cpu")])
def test_lengths_past_the_table_and_page_ids_past_the_cache_write_nothing_elsewhere(backend):
    """Undefined values, but no other memory changes: a canary before and after the cache, and the other sequence's pages."""
    whole = torch.full((8, 4, 2, 8), 3.0)
    cache, new = whole[1:7], torch.ones(2, 1, 2, 8)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    common = dict(k_cache=cache, v_cache=cache.clone(), backend=backend)
    for call, changed in ((paged, dict(block_table=table, kv_lens=torch.tensor([5, 9]), k=new, v=new)),
                          (paged, dict(block_table=table, kv_lens=torch.tensor([4000, 4]))),
                          (paged, dict(block_table=torch.tensor([[-1], [6]]), kv_lens=torch.tensor([3, 4]), k=new, v=new)),
                          (append, dict(k=new[:, 0], v=new[:, 0], slot_mapping=torch.tensor([24, 4 * 1000])))):
        try:
            call(**common, **changed)
        except (IndexError, ArgumentError):
            pass  # a refusal is as good
    assert (whole == 3).all()
