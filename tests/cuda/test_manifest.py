"""What backends/cuda declares, and where it stands in the order."""

from __future__ import annotations

import importlib
import os
import types
from pathlib import Path

import pytest

from portattn import manifest, native, registry
from portattn.capability import unmet
from portattn.problem import Problem

CUDA = manifest.load(os.fspath(Path(__file__).parent.parent.parent / "backends" / "cuda"))


def problem(**changed):
    return Problem("paged", "cuda", "sm_90", "bfloat16", "bfloat16", 32, 8, 128, 128, 16, "decode", "bfloat16", causal=True)._replace(**changed)


def serves(p):
    return next((c.id for c in CUDA.capabilities if not unmet(c, p)), None)


def test_each_kind_of_call_has_its_capability():
    assert serves(problem()) == serves(problem(kv_dtype="float8_e4m3fn", kv_scale=True)) == "step_sm90"
    assert serves(problem(sinks=True, window=True)) == serves(problem(softcap=True)) == "step_sm90" and serves(problem(q_len="extend")) == "tiles_sm90"
    assert serves(problem(arch="sm_100")) == serves(problem(alibi=True)) == serves(problem(num_heads_q=128)) == serves(problem(page_size=48)) == "decode"
    assert serves(problem(q_len="extend", arch="sm_80")) == serves(problem(q_len="prefill", kv_dtype="float8_e4m3fnuz")) == "tiles"
    eight = dict(q_len="prefill", kv_dtype="float8_e4m3fn", kv_scale=True)
    assert serves(problem(**eight)) == serves(problem(q_len="extend", kv_scale=True)) == "tiles_sm90_8bit"
    assert serves(problem(**eight, head_dim=72, head_dim_v=72)) == serves(problem(**eight, page_size=8)) == "tiles"
    assert serves(problem(layout="dense", q_len="prefill", head_dim=64, head_dim_v=64)) == "tiles_sm90_64"
    assert serves(problem(layout="dense", q_len="prefill", head_dim=64, head_dim_v=64, alibi=True)) == "tiles_dense"
    assert serves(problem(q_len="extend", page_size=1)) == "tiles"
    assert serves(problem(layout="cache_append", causal=False, dtype="float32", kv_dtype="float8_e5m2")) == "append"
    assert serves(problem(layout="dense", q_len="prefill")) == serves(problem(layout="varlen", q_len="prefill", head_dim=192)) == "tiles_sm90_dense"
    assert serves(problem(layout="merge_states", causal=False)) == "merge"


@pytest.mark.parametrize("changed", [dict(arch="sm_75"), dict(device="hip", arch="gfx942"), dict(dtype="float32", kv_dtype="float32"),
                                     dict(head_dim=257), dict(head_dim_v=512), dict(grad=True), dict(bias=True)], ids=str)
def test_what_the_kernels_do_not_do_is_declined(changed):
    assert serves(problem(**changed)) is None


def test_cuda_comes_first_on_hopper_for_what_tensor_maps_take_else_triton_and_other_dense_tiles_last():
    names = tuple(registry.backends())
    order = lambda p: [n for n in registry._by_capability(names, p, 0) if n in ("cuda", "triton", "sdpa")]
    assert order(problem()) == ["cuda", "triton", "sdpa"] and order(problem(alibi=True)) == ["triton", "cuda", "sdpa"]
    assert order(problem(q_len="extend")) == order(problem(q_len="extend", kv_dtype="float8_e5m2")) == ["cuda", "triton", "sdpa"]
    assert order(problem(q_len="extend", arch="sm_100")) == ["triton", "cuda", "sdpa"]
    small = dict(layout="dense", q_len="prefill", head_dim=64, head_dim_v=64)
    assert order(problem(**small)) == order(problem(**small, window=True)) == order(problem(layout="dense", q_len="prefill")) == ["cuda", "triton", "sdpa"]
    assert order(problem(**small | dict(head_dim=40, head_dim_v=40), causal=False)) == ["cuda", "triton", "sdpa"]
    assert order(problem(**small | dict(head_dim=32, head_dim_v=32))) == ["triton", "sdpa", "cuda"]
    assert order(problem(**small, alibi=True)) == ["triton", "sdpa", "cuda"]
    assert order(problem(**small, causal=False)) == ["cuda", "triton", "sdpa"]
    assert order(problem(layout="dense", q_len="prefill", arch="sm_80")) == ["triton", "sdpa", "cuda"]
    for other in (dict(), dict(head_dim=256, head_dim_v=256), dict(head_dim=192), dict(head_dim=80, head_dim_v=80), dict(softcap=True), dict(alibi=True)):
        assert order(problem(layout="varlen", q_len="prefill", **other)) == ["cuda", "triton", "sdpa"]
    assert order(problem(q_len="extend", page_size=1))[0] == order(problem(q_len="extend", head_dim=100))[0] == "triton"
    assert order(problem(q_len="extend", page_size=24))[0] == order(problem(layout="dense", q_len="prefill", head_dim=100, head_dim_v=100))[0] == "triton"


@pytest.mark.parametrize("dim", [1, 20, 64, 65, 80, 81, 100, 129, 200, 256])
def test_every_head_dim_has_an_instance(dim):
    limits = native.Limits(99 << 10, 100 << 10, 20)
    padded = native.head_dim_of(dim, 1)
    assert padded >= dim and native.decode_shape("float16", "float16", padded, limits).instance.options
    assert native.mixed_shape("float16", "float8_e5m2", padded, limits).instance.options


@pytest.mark.parametrize("version, able", [("11.8", False), ("12.0", False), ("12.1", True), ("12.10", True), ("13.0", True)])
def test_hoppers_kernels_want_cuda_12_1(monkeypatch, version, able):
    backend = importlib.import_module("portattn.backends.cuda")
    monkeypatch.setattr(backend.codeobjects, "prebuilt_index", lambda vendor: {})
    monkeypatch.setattr(backend.codeobjects, "nvrtc", lambda: types.SimpleNamespace(version=version))
    assert backend.builds_hopper("sm_90") is able
