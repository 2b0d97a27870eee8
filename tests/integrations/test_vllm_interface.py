"""The vLLM backend without an engine: what the manifests answer (anywhere), and its classes against vLLM's own interface (where vLLM is).

    venv-vllm/bin/pip install pytest pytest-timeout; PYTHONPATH=. venv-vllm/bin/python -m pytest tests/integrations/test_vllm_interface.py
"""

import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from portattn import ArgumentError, integrations, reference
from portattn.integrations import vllm as ours

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: PORTATTN_TEST_VLLM's Python runs this file")
CPU = ("cpu", "x86_64")


# ------------------------------------------------------------------ the manifests' answers
def test_a_decoder_layer_is_served_for_every_kind_of_call():
    got = ours.served("bfloat16", "auto", 64, 16, at=CPU)
    assert not got.reasons
    assert len(got.capabilities) == 4  # decode, extend, prefill, cache writes


@pytest.mark.parametrize("given", [dict(window=True), dict(sinks=True), dict(softcap=True), dict(alibi=True), dict(causal=False), dict(encoder=True, causal=False),
                                   dict(batch_invariant=True), dict(kv_cache_dtype="fp8"), dict(kv_cache_dtype="fp8_e5m2"), dict(block_size=None),
                                   dict(block_size=128), dict(dtype=torch.float32), dict(head_size=80)], ids=str)
def test_what_the_manifests_declare_is_served(given):
    assert not ours.served(at=CPU, **given).reasons


@pytest.mark.parametrize("given, text", [(dict(head_size=1024), "head_dim"), (dict(dtype="float64"), "dtype"), (dict(kv_cache_dtype="nvfp4"), "nvfp4"),
                                         (dict(kv_cache_dtype="float16"), "kv_dtype"), (dict(grad=True), "grad")], ids=str)
def test_what_they_do_not_declare_has_reasons(given, text):
    reasons = ours.served(at=CPU, **given).reasons
    assert reasons and text in "; ".join(reasons)


def test_the_order_that_the_user_set_decides(monkeypatch):
    monkeypatch.setenv("PORTATTN_BACKEND", "triton")  # on CPU it takes nothing without its interpreter's capability
    named = ours.served(at=("mps", ""))
    assert named.reasons and all("triton" in reason and "sdpa" not in reason for reason in named.reasons)
    monkeypatch.setenv("PORTATTN_BACKEND", "sdpa")
    assert {c.id for c in ours.served(at=CPU).capabilities} == {"any"}


def test_cache_dtypes_are_those_of_the_device():
    assert ours.cache_dtype("auto", "float16", *CPU) == "float16"
    assert ours.cache_dtype("fp8", "float16", "hip", "gfx942") == "float8_e4m3fnuz"
    assert ours.cache_dtype("fp8", "float16", "hip", "gfx950") == "float8_e4m3fn"


def test_a_vllm_without_this_interface_gives_a_warning(monkeypatch):
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.v1.attention.backends.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.warns(RuntimeWarning, match=r"made for vLLM >=0\.32,<0\.34"):
        ours.register()


# ------------------------------------------------------------------ vLLM's interface
HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 24


@pytest.fixture
def registry():
    found = pytest.importorskip("vllm.v1.attention.backends.registry")
    members = found.AttentionBackendEnum.CUSTOM, found.AttentionBackendEnum.CPU_ATTN
    for member in members:
        member.clear_override()
    yield found
    for member in members:
        member.clear_override()


@needs_vllm
def test_cpu_keeps_vllms_backend_unless_the_option_says_custom(registry, monkeypatch):
    import vllm.config

    ours.register()
    ours.register()
    names = registry.AttentionBackendEnum
    for option, name in ((None, "CPUAttentionBackend"), (names.CPU_ATTN, "CPUAttentionBackend"), (names.CUSTOM, "PortattnBackend")):
        config = SimpleNamespace(attention_config=SimpleNamespace(backend=option))
        monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda config=config: config)
        assert names.CPU_ATTN.get_class().__name__ == name
    assert names.CUSTOM.get_class().__name__ == "PortattnBackend"


@needs_vllm
def test_a_name_that_another_plugin_took_is_left_to_it(registry):
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "somebody.Else")
    ours.register()
    assert registry.AttentionBackendEnum.CUSTOM.get_path() == "somebody.Else"


@needs_vllm
def test_another_version_gives_one_warning_that_names_the_range(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(integrations, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"vllm 0\.99\.0.*>=0\.32,<0\.34") as caught:
        assert ours.Backend is ours.Backend
    assert len(caught) == 1


@needs_vllm
def test_every_method_takes_what_vllm_passes():
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    backend = ours.Backend
    for mine, theirs in ((backend, AttentionBackend), (backend.get_impl_cls(), AttentionImpl), (backend.get_builder_cls(), AttentionMetadataBuilder)):
        assert issubclass(mine, theirs) and not inspect.isabstract(mine)
    assert backend.get_name() in {member.name for member in __import__("vllm.v1.attention.backends.registry", fromlist=["x"]).AttentionBackendEnum}
    for name, base in (("__init__", AttentionImpl), ("forward", AttentionImpl), ("do_kv_cache_update", TritonAttentionImpl)):
        theirs = list(inspect.signature(getattr(base, name)).parameters)
        assert list(inspect.signature(getattr(backend.get_impl_cls(), name)).parameters)[: len(theirs)] == theirs


@needs_vllm
@pytest.mark.parametrize("asked, word", [({}, ""), (dict(has_sink=True, has_sliding_window=True), ""), (dict(attn_type="encoder_only"), ""),
                                         (dict(head_size=1024), "head_dim"), (dict(use_mla=True), "MLA"), (dict(use_mm_prefix=True), "multimodal"),
                                         (dict(attn_type="encoder_decoder"), "encoder_decoder"), (dict(kv_cache_dtype="int8_per_token_head"), "int8")], ids=str)
def test_configurations(asked, word):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(**dict(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16) | asked)
    reasons = ours.Backend.validate_configuration(device_capability=None, **config._asdict())
    assert word in "; ".join(reasons) if word else not reasons


def batch(lens, lens_q):
    """The pages of a batch in shuffled order: (metadata of vLLM, table, slot_mapping)."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(3)
    order = torch.randperm(BLOCKS, dtype=torch.int32)
    table = torch.full((len(lens), 4), 10**6, dtype=torch.int32)  # what lies past a length must not be looked at
    slots, at = [], 0
    for i, (n, new) in enumerate(zip(lens, lens_q)):
        used = -(-n // BLOCK)
        table[i, :used] = order[at : at + used]
        at += used
        position = torch.arange(n - new, n)
        slots.append(table[i, position // BLOCK].long() * BLOCK + position % BLOCK)
    start = torch.tensor([0, *lens_q]).cumsum(0, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=start, query_start_loc_cpu=start, seq_lens=torch.tensor(lens, dtype=torch.int32), num_reqs=len(lens),
        num_actual_tokens=sum(lens_q), max_query_len=max(lens_q), max_seq_len=max(lens), block_table_tensor=table, slot_mapping=torch.cat(slots))


def cache_of(shape):
    """A layer's cache full of keys, and it as (tokens' slots, kv heads, D) keys and values."""
    if shape == "(2, blocks, block, heads, D)":
        cache = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM)
        return cache, cache[0].flatten(0, 1), cache[1].flatten(0, 1)
    packed = torch.randn(BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    if shape == "packed, tokens first in memory":
        packed = torch.randn(BLOCKS, BLOCK, KV_HEADS, 2 * DIM).transpose(1, 2)
    return packed, None, None


@needs_vllm
@pytest.mark.parametrize("given", [{}, dict(sliding_window=5), dict(logits_soft_cap=2.0), dict(alibi_slopes=[0.5, 0.25, 0.1, 0.0]),
                                   dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))], ids=lambda given: next(iter(given), "plain"))
@pytest.mark.parametrize("shape", ["packed", "packed, tokens first in memory", "(2, blocks, block, heads, D)"])
def test_a_mixed_batch_writes_and_attends(given, shape):
    lens, lens_q = [40, 7, 33, 1], [5, 7, 1, 1]
    m = ours.Backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, batch(lens, lens_q))
    impl = ours.Backend.get_impl_cls()(HEADS, DIM, 0.2, KV_HEADS, **dict(alibi_slopes=None, sliding_window=None) | given)
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    cache, _, _ = cache_of(shape)
    padded = sum(lens_q) + 3  # rows of a larger CUDA graph
    q, k, v = torch.randn(padded, HEADS, DIM), torch.randn(padded, KV_HEADS, DIM), torch.randn(padded, KV_HEADS, DIM)
    impl.do_kv_cache_update(layer, k, v, cache, m.slot_mapping)
    out = torch.full((padded, HEADS, DIM), 7.0)
    assert impl.forward(layer, q, k, v, cache, m, out) is out
    assert (out[sum(lens_q) :] == 7.0).all()
    keys, values = (cache[0], cache[1]) if cache.dim() == 5 else (part.transpose(1, 2) for part in cache.split(DIM, -1))
    at = 0
    for i, (n, new) in enumerate(zip(lens, lens_q)):
        own = m.block_table[i, : -(-n // BLOCK)].long()
        k_own, v_own = keys[own].flatten(0, 1)[:n], values[own].flatten(0, 1)[:n]
        assert torch.equal(k_own[n - new :], k[at : at + new]) and torch.equal(v_own[n - new :], v[at : at + new])
        window = (given.get("sliding_window", 0) - 1, -1)
        slopes = torch.tensor(given["alibi_slopes"]) if "alibi_slopes" in given else None
        expected, _ = reference.attention(q[at : at + new][None], k_own[None], v_own[None], causal=True, softmax_scale=0.2, window_size=window,
                                          softcap=given.get("logits_soft_cap", 0.0), alibi_slopes=slopes, sinks=given.get("sinks"))
        torch.testing.assert_close(out[at : at + new].double(), expected[0], rtol=1e-5, atol=1e-5)
        at += new


@needs_vllm
def test_an_8_bit_cache_of_bytes_is_scaled():
    lens, lens_q = [20], [20]
    m = ours.Backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, batch(lens, lens_q))
    impl = ours.Backend.get_impl_cls()(HEADS, DIM, 0.2, KV_HEADS, kv_cache_dtype="fp8")
    layer = SimpleNamespace(_k_scale=torch.tensor(0.25), _v_scale=torch.tensor(4.0))
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.uint8)
    q, k, v = torch.randn(20, HEADS, DIM), torch.randn(20, KV_HEADS, DIM), 50 * torch.randn(20, KV_HEADS, DIM)
    impl.do_kv_cache_update(layer, k, v, cache, m.slot_mapping)
    out = impl.forward(layer, q, k, v, cache, m, torch.empty(20, HEADS, DIM))
    stored = lambda x, scale: (x / scale).to(torch.float8_e4m3fn).float() * scale
    expected, _ = reference.attention(q[None], stored(k, 0.25)[None], stored(v, 4.0)[None], causal=True, softmax_scale=0.2)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-4)


@needs_vllm
def test_an_encoder_layer_attends_both_ways_and_writes_nothing():
    lens = [9, 4]
    m = ours.Backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, batch(lens, lens))
    impl = ours.Backend.get_impl_cls()(HEADS, DIM, 0.2, KV_HEADS, None, 3, attn_type="encoder_only")
    q, k, v = torch.randn(13, HEADS, DIM), torch.randn(13, KV_HEADS, DIM), torch.randn(13, KV_HEADS, DIM)
    impl.do_kv_cache_update(None, k, v, torch.empty(0), m.slot_mapping)
    out = impl.forward(None, q, k, v, torch.empty(0), m, torch.empty(13, HEADS, DIM))
    for part in (slice(0, 9), slice(9, 13)):
        expected, _ = reference.attention(q[part][None], k[part][None], v[part][None], softmax_scale=0.2, window_size=(2, 2))
        torch.testing.assert_close(out[part].double(), expected[0], rtol=1e-5, atol=1e-5)


@needs_vllm
def test_memory_is_measured_without_a_batch():
    impl = ours.Backend.get_impl_cls()(HEADS, DIM, 0.2, KV_HEADS)
    out = impl.forward(None, torch.randn(3, HEADS, DIM), None, None, torch.empty(0), None, torch.full((3, HEADS, DIM), float("nan")))
    assert torch.equal(out, torch.zeros(3, HEADS, DIM))


@needs_vllm
def test_what_is_not_known_raises():
    impl_class, builder = ours.Backend.get_impl_cls(), ours.Backend.get_builder_cls()(None, [], None, torch.device("cpu"))
    with pytest.raises(ArgumentError, match="chunk_lookback"):
        impl_class(HEADS, DIM, 0.2, KV_HEADS, chunk_lookback=4)
    with pytest.raises(ArgumentError, match="attn_type"):
        impl_class(HEADS, DIM, 0.2, KV_HEADS, attn_type="encoder_decoder")
    with pytest.raises(ArgumentError, match="output_scale"):
        impl_class(HEADS, DIM, 0.2, KV_HEADS).forward(None, None, None, None, None, None, None, torch.tensor(1.0))
    with pytest.raises(ArgumentError, match="causal"):
        builder.build(0, batch([4], [4]).replace(causal=torch.tensor([True])))
    with pytest.raises(ArgumentError, match="rswa_prefix_lens"):
        builder.build(0, batch([4], [4]).replace(rswa_prefix_lens=torch.tensor([1])))


@needs_vllm
@pytest.mark.parametrize("backend, expected", [("sdpa", "UNIFORM_BATCH"), ("cpu", "NEVER")])
def test_cuda_graphs_are_answered_from_the_manifests(monkeypatch, backend, expected):
    monkeypatch.setenv("PORTATTN_BACKEND", backend)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16), cache_config=SimpleNamespace(cache_dtype="auto"))
    spec = SimpleNamespace(head_size=64, block_size=16)
    assert ours.Backend.get_builder_cls().get_cudagraph_support(config, spec).name == expected


