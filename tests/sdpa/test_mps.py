"""The tiled paths under a mode that permits only operators and dtypes that Apple MPS has, version by version, and no sync."""

from __future__ import annotations

import pathlib

import pytest
import torch
import yaml
from conftest import check, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import portattn

FACTS = yaml.safe_load(pathlib.Path(__file__).with_name("mps_ops.yaml").read_text(encoding="utf-8"))
DTYPES = {getattr(torch, name) for name in FACTS["dtypes"]}
VERSIONS = [(2, 6), (2, 8), (2, 11), (2, 14)]
# They answer on the host: a call that uses one waits for the device.
SYNCS = {
    "_local_scalar_dense.default",
    "nonzero.default",
    "masked_select.default",
    "equal.default",
    "_unique2.default",
    "bincount.default",
}


def version(text: str) -> tuple[int, int]:
    return tuple(map(int, text.split(".")))


class LikeMPS(TorchDispatchMode):
    """Raises for whatever MPS lacks at a version of torch."""

    def __init__(self, at: tuple[int, int]):
        super().__init__()
        self.permitted = {name for since, names in FACTS["operators"].items() if version(since) <= at for name in names} - SYNCS

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if name not in self.permitted:
            raise AssertionError(f"MPS has no {name}, or it syncs")
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.dtype not in DTYPES or isinstance(x, torch.dtype) and x not in DTYPES:
                raise AssertionError(f"MPS has no {x if isinstance(x, torch.dtype) else x.dtype} ({name})")
        return result


def calls(dtype: torch.dtype) -> list[tuple[str, tuple, dict]]:
    """One call of each kind with every feature that it takes, by name, arguments and options."""
    q, k, v = randn(2, 33, 6, 16, dtype=dtype), randn(2, 40, 2, 16, dtype=dtype), randn(2, 40, 2, 24, dtype=dtype)
    features = dict(causal=True, window_size=(20, 0), softcap=4.0, alibi_slopes=torch.rand(6), sinks=randn(6), return_lse=True)
    cu_q, cu_k = torch.tensor([0, 5, 5, 33], dtype=torch.int32), torch.tensor([0, 11, 12, 40], dtype=torch.int32)
    used = torch.tensor([11, 0, 20], dtype=torch.int32)
    k_pages, v_pages = randn(8, 4, 2, 16, dtype=dtype), randn(8, 4, 2, 24, dtype=dtype)
    table, lens = torch.tensor([[5, 1, 7, -1], [0, 2, 3, 4]]), torch.tensor([10, 16])
    angles = dict(rotary_cos=torch.rand(32, 4), rotary_sin=torch.rand(32, 4))
    new = dict(
        k=randn(2, 3, 2, 16, dtype=dtype), v=randn(2, 3, 2, 24, dtype=dtype), k_scale=0.5, v_scale=torch.tensor([2.0, 0.5])
    )
    turned = {**features, "rotary_interleaved": True, **angles, **new}
    return [
        ("attention", (q, k, v), dict(features, bias=randn(1, 6, 33, 40))),
        ("attention", (q, q[:, :, :2], q[:, :, :2]), dict(causal=True)),
        ("attention", (q, k, v), dict(bias=torch.rand(2, 1, 33, 40) > 0.5)),
        ("attention_varlen", (q[0], k[0], v[0], cu_q, cu_k, 28, 28), dict(features, seqused_k=used)),
        ("attention_varlen", (q[0], q[0, :, :2], q[0, :, :2], cu_q, cu_q, 28, 28), dict(causal=True)),
        ("attention_paged", (q[:, :1], k_pages, v_pages, table, lens), dict(features)),
        ("attention_paged", (q[:, :3], k_pages, v_pages, table, lens), turned),
        (
            "attention_paged",
            (q[0, :9], k_pages, v_pages, table, lens),
            dict(features, cu_seqlens_q=torch.tensor([0, 1, 9]), max_seqlen_q=8),
        ),
        (
            "attention_paged",
            (q[0, :9], k_pages, v_pages, table, lens),
            dict(cu_seqlens_q=torch.tensor([0, 1, 9]), max_seqlen_q=8, batch_invariant=True, kv_layout="NHD", **angles),
        ),
    ]


@pytest.mark.parametrize("at", VERSIONS, ids=lambda v: f"torch{v[0]}.{v[1]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_calls_use_only_what_mps_has(pretend, at, dtype):
    pretend("mps", at)
    for name, args, kw in calls(dtype):
        with torch.no_grad(), LikeMPS(at):
            getattr(portattn, name)(*args, backend="sdpa", **kw)


@pytest.mark.parametrize("at", VERSIONS, ids=lambda v: f"torch{v[0]}.{v[1]}")
def test_append_and_merge_use_only_what_mps_has(pretend, at):
    pretend("mps", at)
    cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    new, outs, lses, sinks, slots = randn(3, 2, 8), randn(3, 5, 2, 8), randn(3, 5, 2), randn(2), torch.tensor([1, -1, 9])
    with torch.no_grad(), LikeMPS(at):
        portattn.cache_append(new, new, *cache, slots, k_scale=2.0, backend="sdpa")
        portattn.merge_states(outs, lses, sinks=sinks, backend="sdpa")
    assert torch.equal(cache[0][0, 1], new[0] / 2) and torch.equal(cache[1][2, 1], new[2])
    assert not cache[0][3, 3].any()  # slot -1 is not the last slot


@pytest.mark.parametrize("at", VERSIONS, ids=lambda v: f"torch{v[0]}.{v[1]}")
def test_backward_uses_only_what_mps_has(pretend, at):
    pretend("mps", at)
    q, k, sinks = randn(2, 5, 4, 8).requires_grad_(), randn(2, 9, 2, 8).requires_grad_(), randn(4)
    with LikeMPS(at):
        out, lse = portattn.attention(q, k, k, causal=True, softcap=3.0, sinks=sinks, return_lse=True, backend="sdpa")
        (out.sum() + lse.sum()).backward()
    assert q.grad.isfinite().all() and k.grad.abs().sum() > 0


@pytest.mark.parametrize("index", range(9))
def test_calls_are_right_as_mps_would_run_them(pretend, index):
    pretend("mps")
    name, args, kw = calls(torch.float32)[index]
    kw.pop("return_lse", None)
    check(name, *args, **kw)


def test_the_mode_refuses_what_mps_lacks():
    with pytest.raises(AssertionError, match="index_copy_"), LikeMPS((2, 6)):
        torch.zeros(3).index_copy_(0, torch.tensor([1]), torch.ones(1))
    with pytest.raises(AssertionError, match="float64"), LikeMPS((2, 14)):
        torch.zeros(3).double()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), LikeMPS((2, 14)):
        torch.zeros(1).item()


def test_float8_caches_are_declined_on_mps(monkeypatch):
    from portattn import registry
    from portattn.problem import Problem

    def problem(device: str) -> Problem:
        return Problem("paged", device, "", "float32", "float8_e4m3fn", 2, 2, 16, 16, 16, "decode")

    assert registry.covering("sdpa", problem("cpu"))[0].id == "float8-cache"
    found, reasons = registry.covering("sdpa", problem("mps"))
    assert found is None and reasons
