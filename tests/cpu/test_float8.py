"""8-bit caches: every code is widened exactly, bfloat16 queries take products of pairs where the CPU has them, and the backend serves them."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

import portattn
from portattn import api, registry
from portattn.problem import Problem
from portattn.processor import cpu_arch

from .conftest import EMULATED, choose, sets

KINDS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15), torch.float8_e4m3fnuz: (3, 8), torch.float8_e5m2fnuz: (2, 16)}  # mantissa bits, bias
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (1, 20, 70)  # read in place, in place or in tiles of AMX, packed into panels


@pytest.fixture(params=(*sets.OF_ARCH.get(cpu_arch(), ("portable",)), *EMULATED))
def any_isa(request, monkeypatch) -> str:
    choose(request.param, monkeypatch)
    yield request.param
    registry.forget()


def meanings(kind: torch.dtype) -> torch.Tensor:
    """The values of a format's 256 codes, by its definition."""
    mantissa, bias = KINDS[kind]

    def meaning(code: int) -> float:
        size, sign = code & 127, -1.0 if code & 128 else 1.0
        exponent, rest = size >> mantissa, size & (1 << mantissa) - 1
        if "fnuz" in str(kind):
            if code == 128:
                return math.nan
        elif kind == torch.float8_e4m3fn and size == 127:
            return math.nan
        elif kind == torch.float8_e5m2 and exponent == 31:
            return math.nan if rest else sign * math.inf
        return sign * math.ldexp(rest + (1 << mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)

    return torch.tensor([meaning(code) for code in range(256)])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_code_is_widened_exactly(any_isa, kind, dtype, rows):
    want = meanings(kind)
    for dim in (256, 77):  # whole vectors, and a part behind them
        codes = torch.arange(256 - dim, 256, dtype=torch.uint8)
        keys, values = torch.zeros(1, 1, 1, dim, dtype=torch.uint8), codes.view(1, 1, 1, dim)
        out = portattn.attention_paged(torch.ones(1, rows, 1, dim, dtype=dtype), keys.view(kind), values.view(kind),
                                       torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), backend="cpu")
        expected = want[-dim:].expand(rows, dim)
        assert torch.equal(out[0, :, 0].float().nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))

    keys = torch.zeros(256, 1, 1, 77, dtype=torch.uint8)  # sequence i: one key, with code i
    keys[torch.arange(256), 0, 0, torch.arange(256) % 77] = torch.arange(256, dtype=torch.uint8)
    _, lse = portattn.attention_paged(torch.ones(256, rows, 1, 77, dtype=dtype), keys.view(kind), torch.zeros_like(keys).view(kind),
                                      torch.arange(256, dtype=torch.int32)[:, None], torch.ones(256, dtype=torch.int32), softmax_scale=1.0,
                                      return_lse=True, backend="cpu")
    finite = want.isfinite()
    assert torch.equal(lse[finite][..., 0], want[finite, None].expand(-1, rows)) and not lse[~finite].isfinite().any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_bfloat16_queries_take_pairs(any_isa, dtype, rows):
    """Weights 1 and 0.5005 of values -1 and 2: 0.001 remains, and nothing where weights are rounded to bfloat16."""
    keys, values = (torch.tensor(x, dtype=torch.float32).view(1, 2, 1, 1).to(torch.float8_e4m3fn) for x in ([0.0, -1.0], [-1.0, 2.0]))
    out = portattn.attention_paged(torch.ones(1, rows, 1, 1, dtype=dtype), keys, values, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]),
                                   softmax_scale=-math.log(0.5005), backend="cpu")
    if dtype == torch.bfloat16 and ("bf16" in any_isa or "amx" in any_isa):
        assert not out.any()
    else:
        torch.testing.assert_close(out.float(), torch.full(out.shape, 0.001 / 1.5005), rtol=0.01, atol=0)


@pytest.mark.parametrize("q_len", ["decode", "extend", "prefill"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("arch, first", [("x86_64", "cpu"), ("x86_64_avx512", "cpu"), ("x86_64_amx", "cpu"), ("aarch64", "sdpa")])
def test_who_serves_8_bit_caches(arch, first, dtype, q_len):
    problem = Problem("paged", "cpu", arch, dtype, "float8_e4m3fn", 8, 2, 64, 64, 16, q_len, causal=True, kv_scale=True)
    assert registry._by_capability(("sdpa", "cpu"), problem, 0)[0] == first


@pytest.mark.usefixtures("cpu_kernels")
def test_values_are_the_cpus_whatever_the_default_device(monkeypatch):
    cpu = importlib.import_module("portattn.backends.cpu")
    monkeypatch.setenv("PORTATTN_VERIFY", "0")  # a check would have asked for them before
    registry.forget()
    cpu._values.cache_clear()
    q, cache, table = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8).to(torch.float8_e5m2fnuz), torch.zeros(1, 1, dtype=torch.int32)
    lens = torch.ones(1, dtype=torch.int32)
    with torch.device("meta"):
        out = portattn.attention_paged(q, cache, cache, table, lens, backend="cpu")
    assert torch.equal(out, q)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_binding_keeps_the_table_whose_address_it_has():
    """Two threads may have made one each, of which the other is forgotten."""
    cache = torch.zeros(2, 16, 1, 16, dtype=torch.float8_e4m3fn)
    registry.forget()
    portattn.attention_paged(torch.randn(1, 1, 2, 16), cache, cache.clone(), torch.tensor([[1]]), torch.tensor([9]), backend="cpu")
    kept = [b.state for b in api._memo.values() if b.backend == "cpu" and b.state.get("values")]
    assert kept and all(s["table"].data_ptr() == s["values"] for s in kept)
