"""Runs vLLM on prompts, in rounds: `run_vllm.py MODEL PROMPTS.json NEW_TOKENS RESULTS.json [BACKEND]`, in vLLM's own Python.

PROMPTS.json holds rounds, lists of texts. RESULTS.json then holds the texts written, how many prompt tokens each request found in the prefix
cache, and which classes the worker's layers run on. The layers live in a process that vLLM starts by itself.
"""

import json
import os
import sys


def layers(worker):
    found = worker.vllm_config.compilation_config.static_forward_context.values()
    return sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in found})


def main(model, prompts, new_tokens, results, backend=None):
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `layers`, which travels to the worker
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    # Few tokens a step and small pages: prompts are prefilled in chunks, beside others that decode, and find each other's prefixes.
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=96, block_size=32,
              enable_prefix_caching=True, kv_cache_memory_bytes=1 << 28, attention_backend=backend, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=int(new_tokens), ignore_eos=True)
    with open(prompts, encoding="utf-8") as f:
        rounds = [llm.generate(texts, sampling, use_tqdm=False) for texts in json.load(f)]
    with open(results, "w", encoding="utf-8") as f:
        json.dump({"texts": [[r.outputs[0].text for r in one] for one in rounds], "cached": [[r.num_cached_tokens for r in one] for one in rounds],
                   "layers": llm.collective_rpc(layers)[0]}, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
