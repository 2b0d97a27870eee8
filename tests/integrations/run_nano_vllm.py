"""Runs an unchanged checkout of nano-vllm on portattn: `run_nano_vllm.py CHECKOUT MODEL PROMPTS.json NEW_TOKENS [--graphs]`.

Prints the generated token ids as JSON on the last line. On a machine without CUDA the engine's CUDA calls go to cuda_calls_on_cpu.
"""

import json
import os
import sys


def main(checkout, model, prompts, new_tokens, *options):
    import torch

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # @torch.compile would need a C++ compiler
        os.environ.setdefault("PORTATTN_BACKEND", "sdpa")  # the interpreter is for the engine's kernel, not for portattn's triton backend
        import cuda_calls_on_cpu

        cuda_calls_on_cpu.install()
    import portattn.compat

    portattn.compat.install("flash_attn")
    sys.path.insert(0, checkout)
    from nanovllm import LLM, SamplingParams
    from nanovllm.layers import attention

    # The engine's two symbols, counted: what ran must have gone through portattn.
    calls = {"prefill": 0, "prefill, paged": 0, "decode": 0}
    prefill, decode = attention.flash_attn_varlen_func, attention.flash_attn_with_kvcache

    def counted_prefill(*args, **kwargs):
        calls["prefill" if kwargs["block_table"] is None else "prefill, paged"] += 1
        return prefill(*args, **kwargs)

    def counted_decode(*args, **kwargs):
        calls["decode"] += 1
        return decode(*args, **kwargs)

    attention.flash_attn_varlen_func, attention.flash_attn_with_kvcache = counted_prefill, counted_decode
    llm = LLM(model, enforce_eager="--graphs" not in options, max_model_len=512, max_num_batched_tokens=1024, max_num_seqs=8,
              gpu_memory_utilization=0.9 if on_cpu else 0.1)
    with open(prompts, encoding="utf-8") as f:
        prompts = json.load(f)
    sampling = SamplingParams(temperature=1e-6, max_tokens=int(new_tokens), ignore_eos=True)  # as greedy as it allows
    results = []
    for batch in (prompts[:1], prompts):  # the second round finds the first prompt's prefix in the cache
        results.append([r["token_ids"] for r in llm.generate(batch, sampling, use_tqdm=False)])
    print(json.dumps({"tokens": results, "calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
