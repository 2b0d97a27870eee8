"""Engines set another default dtype while they load a model: results, their types and the known answers of first uses stay the same."""

from __future__ import annotations

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = """
import sys, torch
other = getattr(torch, sys.argv[1])
torch.set_default_dtype(other)  # before the import: nothing made then depends on it either
import portattn

def results(backend):
    g = torch.Generator().manual_seed(0)
    rnd = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float32)
    q, k, pages, states, lses = rnd(2, 20, 4, 16), rnd(2, 24, 2, 16), rnd(6, 8, 2, 16), rnd(3, 5, 4, 16), rnd(3, 5, 4)
    cu_q, cu_k, table, lens = torch.tensor([0, 5, 5, 15]), torch.tensor([0, 9, 12, 24]), torch.arange(6).view(2, 3), torch.tensor([24, 20])
    features = dict(causal=True, softcap=3.0, window_size=(9, 0), sinks=rnd(4), alibi_slopes=rnd(4), return_lse=True)
    for options in (dict(return_lse=True), features):
        yield from portattn.attention(q, k, k, backend=backend, **options)
        yield from portattn.attention(q[:, :1], k, k, backend=backend, **options)
        yield from (x[:15] for x in portattn.attention_varlen(q[0], k[0], k[0], cu_q, cu_k, 10, 12, backend=backend, **options))
        yield from portattn.attention_paged(q, pages, pages, table, lens, backend=backend, **options)
        yield from portattn.attention_paged(q[:, :1], pages, pages, table, lens, backend=backend, **options)
    yield from portattn.merge_states(states, lses, backend=backend)
    cache = pages.clone()
    portattn.cache_append(k[0, :2], k[0, :2], cache, cache.clone(), torch.tensor([3, 40]), backend=backend)
    yield cache
    if backend == "sdpa":
        for starts in ([0, 5, 15], [0]):
            x, cu = q[0].clone().requires_grad_(), torch.tensor(starts)
            out, lse = portattn.attention_varlen(x, k[0], k[0], cu, cu, 20, 20, return_lse=True)
            yield out[: starts[-1]].detach()
            yield lse[: starts[-1]].detach()

for backend in ("sdpa", "cpu"):
    if not portattn.backends()[backend].reasons:
        got = list(results(backend))
        torch.set_default_dtype(torch.float32)
        for i, (a, b) in enumerate(zip(got, results(backend), strict=True)):
            assert a.dtype == b.dtype == torch.float32 and torch.allclose(a, b, atol=1e-5), (backend, i, a.dtype)
        torch.set_default_dtype(other)
        assert portattn.backends()[backend].level == "ready", portattn.backends()[backend]
"""


def test_the_default_dtype_changes_nothing(cache_folder):
    environment = dict(os.environ, PYTHONPATH=ROOT, OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", SCRIPT, "bfloat16"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
