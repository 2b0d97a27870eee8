"""The SGLang adapter against a stand-in for its interface: registration, metadata, decode and extend over a token pool.

SGLang itself is not run here.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from portattn import ArgumentError, integrations, reference
from portattn.integrations import sglang as ours

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 64


@pytest.fixture
def engine(monkeypatch):
    """The names that the adapter imports of sglang."""
    modules = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention",
                                                   "sglang.srt.layers.attention.attention_registry",
                                                   "sglang.srt.layers.attention.base_attn_backend", "sglang.srt.server_args")}
    registry, args = modules["sglang.srt.layers.attention.attention_registry"], modules["sglang.srt.server_args"]
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = lambda name: lambda make: registry.ATTENTION_BACKENDS.setdefault(name, make)
    args.ATTENTION_BACKEND_CHOICES = ["triton"]
    args.add_attention_backend_choices = args.ATTENTION_BACKEND_CHOICES.extend
    modules["sglang.srt.layers.attention.base_attn_backend"].AttentionBackend = type("AttentionBackend", (), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(integrations.importlib.metadata, "version", lambda name: "0.5.4")
    return SimpleNamespace(backends=registry.ATTENTION_BACKENDS, choices=args.ATTENTION_BACKEND_CHOICES)


class Pool:
    def __init__(self):
        self.k, self.v = torch.randn(SLOTS + 1, KV_HEADS, DIM), torch.randn(SLOTS + 1, KV_HEADS, DIM)

    def set_kv_buffer(self, layer, slots, k, v, k_scale=None, v_scale=None):
        for mine, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            stored = torch.uint8 if mine.itemsize == 1 else mine.dtype  # torch indexes few 8-bit float tensors
            new = new / scale if mine.itemsize == 1 and scale is not None else new
            mine.view(stored)[slots] = new.to(mine.dtype).view(-1, KV_HEADS, DIM).view(stored)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def batch_of(lens, lens_q, page_size, decode):
    """Requests in shuffled pages: (runner, forward batch, pool, slots of each request's tokens)."""
    torch.manual_seed(4)
    pages = torch.randperm(SLOTS // page_size)
    req_to_token = torch.full((5, SLOTS), 10**6, dtype=torch.int32)  # what lies past a length must not be looked at
    rows, slots, at = [3, 0, 4][: len(lens)], [], 0
    for row, n in zip(rows, lens):
        own = (pages[at : at + -(-n // page_size), None] * page_size + torch.arange(page_size)).flatten()[:n]
        at += -(-n // page_size)
        req_to_token[row, :n] = own
        slots.append(own)
    pool = Pool()
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor(rows), seq_lens=torch.tensor(lens), seq_lens_cpu=torch.tensor(lens), spec_info=None,
        extend_seq_lens=torch.tensor(lens_q), extend_seq_lens_cpu=lens_q, forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decode),
        out_cache_loc=torch.cat([s[len(s) - n :] for s, n in zip(slots, lens_q)]))
    runner = SimpleNamespace(page_size=page_size, token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), server_args=SimpleNamespace())
    return runner, batch, pool, slots


def layer(**given):
    return SimpleNamespace(tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=DIM, v_head_dim=DIM, layer_id=0, scaling=0.3,
                           **{"is_cross_attention": False, "sliding_window_size": -1, "logit_cap": 0.0, "attn_type": "decoder"} | given)


def test_register_adds_the_backend_and_the_choice_once(engine):
    assert ours.register() == ours.register() == "portattn"
    assert engine.choices == ["triton", "portattn"] and engine.backends["portattn"] is ours.make_backend


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("given", [{}, dict(sliding_window_size=3), dict(logit_cap=2.0), dict(attn_type="encoder_only")], ids=str)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_a_batch_attends_to_its_own_tokens(engine, page_size, given, decode):
    lens, lens_q = [9, 4, 13], [1, 1, 1] if decode else [2, 4, 5]
    runner, batch, pool, slots = batch_of(lens, lens_q, page_size, decode)
    backend = ours.make_backend(runner)
    total = sum(lens_q)
    q, k, v = torch.randn(total, HEADS * DIM), torch.randn(total, KV_HEADS * DIM), torch.randn(total, KV_HEADS * DIM)
    sinks = torch.randn(HEADS)
    backend.init_forward_metadata(batch)
    out = (backend.forward_decode if decode else backend.forward_extend)(q, k, v, layer(**given), batch, sinks=sinks)
    causal = decode or given.get("attn_type") != "encoder_only"
    left = given.get("sliding_window_size", -1)
    at = 0
    for own, n in zip(slots, lens_q):
        torch.testing.assert_close(pool.k[own[len(own) - n :]], k[at : at + n].view(n, KV_HEADS, DIM))
        expected, _ = reference.attention(q[at : at + n].view(1, n, HEADS, DIM), pool.k[own][None], pool.v[own][None], causal=causal, softmax_scale=0.3,
                                          window_size=(left, -1), softcap=given.get("logit_cap", 0.0), sinks=sinks)
        torch.testing.assert_close(out[at : at + n].double(), expected[0].flatten(1), rtol=1e-5, atol=1e-5)
        at += n


def test_what_is_not_covered_raises(engine):
    runner, batch, _, _ = batch_of([4], [1], 1, True)
    backend = ours.make_backend(runner)
    backend.init_forward_metadata(batch)
    q, k = torch.randn(1, HEADS * DIM), torch.randn(1, KV_HEADS * DIM)
    with pytest.raises(ArgumentError, match="q_rope"):
        backend.forward_decode(q, k, k, layer(), batch, q_rope=q)
    for name in ("spec_info", "encoder_lens"):
        with pytest.raises(ArgumentError, match=name):
            backend.init_forward_metadata(SimpleNamespace(**vars(batch) | {name: object()}))
    with pytest.raises(ArgumentError, match="--disable-cuda-graph"):
        backend.init_cuda_graph_state(8, 8)


@pytest.mark.parametrize("given", [dict(is_cross_attention=True), dict(attn_type="decoder_bidirectional"), dict(use_irope=True),
                                   dict(logit_capping_method="other"), dict(pos_encoding_mode="ALIBI"), dict(xai_temperature_len=1024)], ids=str)
def test_what_a_layer_asks_for_beside_is_refused_and_not_ignored(engine, given):
    runner, batch, pool, _ = batch_of([4], [1], 1, True)
    backend, q, k, before = ours.make_backend(runner), torch.randn(1, HEADS * DIM), torch.randn(1, KV_HEADS * DIM), pool.k.clone()
    backend.init_forward_metadata(batch)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"{next(iter(given))}: wanted"):
            backend.forward_extend(q, k, k, layer(**given), batch)
    assert torch.equal(pool.k, before)


def test_pools_that_keep_windowed_layers_apart_and_mla_are_refused_at_the_start(engine):
    runner, *_ = batch_of([4], [1], 1, True)
    with pytest.raises(ArgumentError, match="use_mla_backend"):
        ours.make_backend(SimpleNamespace(**vars(runner), use_mla_backend=True))
    runner.token_to_kv_pool.translate_loc_from_full_to_swa = lambda slots: slots
    with pytest.raises(ArgumentError, match="--disable-hybrid-swa-memory"):
        ours.make_backend(runner)


def test_an_8_bit_pool_holds_what_was_divided_by_the_scales(engine):
    runner, batch, pool, slots = batch_of([9], [9], 1, False)
    pool.k, pool.v = pool.k.to(torch.float8_e4m3fn), pool.v.to(torch.float8_e4m3fn)
    backend = ours.make_backend(runner)
    backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(9, heads * DIM) * 8 for heads in (HEADS, KV_HEADS, KV_HEADS))
    scales = dict(k_scale=torch.tensor(4.0), v_scale=torch.tensor(0.5), k_scale_float=4.0, v_scale_float=0.5)
    out = backend.forward_extend(q, k, v, layer(**scales), batch)
    rounded = [(x / scale).to(torch.float8_e4m3fn).float().view(1, 9, KV_HEADS, DIM) * scale for x, scale in ((k, 4.0), (v, 0.5))]
    expected, _ = reference.attention(q.view(1, 9, HEADS, DIM), *rounded, causal=True, softmax_scale=0.3)
    torch.testing.assert_close(out.double(), expected[0].flatten(1), rtol=1e-5, atol=1e-5)
