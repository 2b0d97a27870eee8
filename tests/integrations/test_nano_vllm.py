"""nano-vllm, unchanged, on portattn: its greedy tokens are transformers'. Opt-in: PORTATTN_TEST_NANO_VLLM names a checkout of it.

    git clone --depth 1 <nano-vllm>; PORTATTN_TEST_NANO_VLLM=nano-vllm python -m pytest tests/integrations/test_nano_vllm.py
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

import portattn

CHECKOUT = os.environ.get("PORTATTN_TEST_NANO_VLLM", "")
if not os.path.isdir(os.path.join(CHECKOUT, "nanovllm")):
    pytest.skip("opt-in: PORTATTN_TEST_NANO_VLLM names a checkout of nano-vllm", allow_module_level=True)
missing = [name for name in ("transformers", "triton", "safetensors", "tokenizers", "tqdm", "xxhash") if importlib.util.find_spec(name) is None]
if missing:
    pytest.skip(f"nano-vllm needs {', '.join(missing)}", allow_module_level=True)

NEW_TOKENS = 8
WAYS = ["--eager", *(["--graphs"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def small_qwen3(tmp_path_factory):
    """A small random Qwen3 with a tokenizer of one word a token: (folder, model)."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    # 16 bits: uncompiled, the engine's norms write into float32 inputs that they should have copied.
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    config = transformers.Qwen3Config(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
                                      initializer_range=0.2, eos_token_id=1, dtype=dtype,
                                      rope_parameters={"rope_type": "default", "rope_theta": 1e6})  # the engine's own default
    model = transformers.Qwen3ForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", unk_token="w0").save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(small_qwen3, tmp_path, way):
    folder, model = small_qwen3
    generator = torch.Generator().manual_seed(2)
    words = lambda n: torch.randint(2, 128, (n,), generator=generator).tolist()
    long = words(300)  # more than a page of 256: its first page is found in the cache in the second round
    prompts = [long, words(5), long[:280], words(17)]
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(prompts))
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(portattn.__file__))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, os.path.join(here, "run_nano_vllm.py"), CHECKOUT, str(folder), str(file), str(NEW_TOKENS), way],
                          capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    assert all(got["calls"].values()), got["calls"]
    for prompt, tokens in [(long, got["tokens"][0][0]), *zip(prompts, got["tokens"][1])]:
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1].float()
        # By induction the whole text is transformers' own, up to ties within the rounding of 16 bits.
        behind = logits.amax(-1) - logits[torch.arange(NEW_TOKENS), tokens]
        assert behind.max() <= 0.01 * logits.abs().max(), (prompt[:3], behind)
