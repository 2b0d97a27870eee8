"""An engine may set torch's default device while it loads a model (nano-vllm does): calls and known answers do not depend on it."""

import pytest
import torch

import portattn
from portattn import reference, registry, verdicts
from portattn.problem import Problem

CPU = torch.device("cpu")
AVAILABLE = [name for name in ("sdpa", "cpu") if not registry.probe(name, CPU)]


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("layout", ["dense", "varlen", "paged", "cache_append", "merge_states"])
def test_known_answers(backend, layout):
    page = 4 if layout in ("paged", "cache_append") else 0
    problem = Problem(layout, "cpu", verdicts.facts(CPU).arch, "float32", "float32", 4, 2, 32, 32, page, causal=layout in ("dense", "varlen", "paged"))
    with torch.device("meta"):
        assert verdicts.measure(registry.bind(problem, CPU, backend, check=False), CPU)[0] < 1e-5


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("options", [{}, dict(window_size=(2, 0)), dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])), dict(return_lse=True)], ids=str)
def test_calls(backend, options):
    cu, q, k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.randn(7, 4, 32), torch.randn(7, 2, 32)
    table, lens, cache = torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 3]), torch.randn(6, 4, 2, 32)
    first = lambda got: got[0] if isinstance(got, tuple) else got
    expected = reference.attention_varlen(q, k, k, cu, cu, causal=True, **{k: v for k, v in options.items() if k != "return_lse"})[0]
    expected_paged = reference.attention_paged(q[:2, None], cache, cache, table, lens, causal=True, **{k: v for k, v in options.items() if k != "return_lse"})[0]
    with torch.device("meta"):
        out = first(portattn.attention_varlen(q, k, k, cu, cu, 4, 4, causal=True, backend=backend, **options))
        paged = first(portattn.attention_paged(q[:2, None], cache, cache, table, lens, causal=True, backend=backend, **options))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(paged.double(), expected_paged, rtol=1e-5, atol=1e-5)
