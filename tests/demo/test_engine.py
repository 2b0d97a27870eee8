"""The demo's engine: greedy tokens are those of transformers, whoever joins or leaves and however few pages there are."""

import os

import pytest
import torch

from portattn import reference
from portattn.demo import PROMPTS, weights
from portattn.demo.engine import Engine
from portattn.demo.model import Config

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def small():
    """A random model with grouped heads, small enough to be run without a cache for the expected tokens."""
    config = Config(256, 48, 96, num_layers=2, num_heads_q=6, num_heads_kv=2, head_dim=8, max_position=128)
    return weights.random(torch.float32, torch.device("cpu"), config, seed=3).model


@pytest.fixture(scope="module")
def small_prompts():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 2, 7, 8, 9, 17, 30, 3, 16)]


def without_cache(model, prompt, new_tokens):
    """Greedy tokens by running everything again for each token, with the float64 oracle as attention."""

    def attend(layer, q, k, v):
        out, _ = reference.attention(q[None], k[None], v[None], causal=True)
        return out[0].to(q.dtype)

    tokens = list(prompt)
    for _ in range(new_tokens):
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def small_expected(small, small_prompts):
    return [without_cache(small, prompt, 12) for prompt in small_prompts]


def run(engine, prompts, new_tokens, every=0):
    """Generates for all prompts; with every, a request arrives each so many steps. Returns the sequences."""
    arriving, sequences, steps = list(prompts), [], 0
    while arriving or engine.busy:
        while arriving and (not every or steps >= every * len(sequences)):
            sequences.append(engine.submit(arriving.pop(0), new_tokens))
        engine.step()
        owned = [page for s in sequences for page in s.pages]
        assert len(owned) == len(set(owned)), "a page belongs to two sequences"
        assert len(owned) + engine.cache.num_free == engine.cache.num_pages, "a page was lost"
        steps += 1
        assert steps < 10_000, "the engine makes no progress"
    assert engine.cache.num_free == engine.cache.num_pages
    return sequences


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("max_batch", [1, 3, 9])
def test_tokens_are_those_of_each_prompt_alone(small, small_prompts, small_expected, page_size, max_batch):
    engine = Engine(small, num_pages=max_batch * -(-42 // page_size), page_size=page_size, max_batch=max_batch)
    assert [s.generated for s in run(engine, small_prompts, 12)] == small_expected


def test_tokens_stay_the_same_when_pages_run_out_and_sequences_wait(small, small_prompts, small_expected):
    engine = Engine(small, num_pages=11, page_size=4, max_batch=9)  # 42 tokens, the longest request, need 11
    assert [s.generated for s in run(engine, small_prompts, 12)] == small_expected
    assert engine.stats.evictions > 0, "the cache was too big for this test"


def test_sequences_join_and_leave_while_others_run(small, small_prompts, small_expected):
    engine = Engine(small, num_pages=40, page_size=8, max_batch=4)
    assert [s.generated for s in run(engine, small_prompts, 12, every=3)] == small_expected
    assert engine.stats.prefill_steps > 4


def test_a_sequence_ends_at_its_stop_token(small, small_prompts, small_expected):
    wanted = small_expected[5]
    engine = Engine(small, num_pages=8, page_size=8)
    sequence = engine.submit(small_prompts[5], 12, frozenset({wanted[4]}))
    while engine.busy:
        engine.step()
    assert sequence.generated == wanted[: wanted.index(wanted[4]) + 1]


def test_a_request_that_can_never_fit_is_refused_at_once(small):
    engine = Engine(small, num_pages=4, page_size=4)
    with pytest.raises(ValueError, match="need 5 pages of 4 tokens; the cache has 4"):
        engine.submit([1] * 10, 7)
    with pytest.raises(ValueError, match="exceed the model's 128 positions"):
        engine.submit([1] * 100, 29)
    with pytest.raises(ValueError, match="at least 1, got 0 tokens"):
        engine.submit([], 3)
    assert not engine.busy


def test_a_request_that_just_fits_runs_to_its_end(small):
    engine = Engine(small, num_pages=4, page_size=4)
    (sequence,) = run(engine, [[1] * 10], 6)
    assert len(sequence.generated) == 6


# ------------------------------------------------------------------ the real model
@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers gguf")
    try:
        return weights.smollm2(torch.float32, torch.device("cpu"))
    except weights.ModelUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def transformers_model(smollm2):
    """The same file in transformers: eager attention, float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder, file = os.path.split(weights.gguf_file())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    )


def likeliest(model, sequence):
    """What transformers would generate greedily in the place of each generated token, given all tokens before it.

    If that is the generated token at every place, the whole text is, by induction, the one that it generates.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([sequence.tokens[:-1]]), use_cache=False).logits[0]
    return logits[sequence.num_prompt - 1 :].argmax(-1).tolist()


@pytest.mark.model
@pytest.mark.parametrize("way", ["all at once", "staggered joins and scarce pages"])
def test_greedy_tokens_equal_those_of_transformers(smollm2, transformers_model, way):
    prompts = [smollm2.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len(prompts) >= 8 and len({len(prompt) for prompt in prompts}) >= 6, "prompts of different lengths"
    if way == "all at once":
        engine = Engine(smollm2.model, num_pages=64, page_size=16, max_batch=8)
        sequences = run(engine, prompts, NEW_TOKENS)
    else:
        engine = Engine(smollm2.model, num_pages=20, page_size=7, max_batch=5)
        sequences = run(engine, prompts, NEW_TOKENS, every=4)
        assert engine.stats.evictions > 0, "the cache was too big for this test"
    for sequence in sequences:
        assert len(sequence.generated) == NEW_TOKENS
        assert sequence.generated == likeliest(transformers_model, sequence)


@pytest.mark.model
def test_an_answer_ends_where_that_of_transformers_ends(smollm2, transformers_model):
    prompt = smollm2.tokenizer.encode("What is the capital of France?")
    engine = Engine(smollm2.model, num_pages=8, page_size=16)
    sequence = engine.submit(prompt, 40, smollm2.tokenizer.stop)
    while engine.busy:
        engine.step()
    tokens = torch.tensor([prompt])
    expected = transformers_model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=40)
    assert sequence.tokens == expected[0].tolist()
    assert len(sequence.generated) < 40 and "Paris" in smollm2.tokenizer.decode(sequence.generated)
