"""The table of known faults, and each guard that decides by it. Guards that are the code's way are tested as behaviour."""

from __future__ import annotations

import inspect

import pytest
import torch
from conftest import check, randn, sdpa

import portattn
from portattn.problem import Call

holes, fused, tiled, arith = sdpa.holes, sdpa.fused, sdpa.tiled, sdpa.arith
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_ids_are_unique_and_ranges_are_ranges():
    ids = [hole.id for hole in holes.HOLES]
    assert len(ids) == len(set(ids))
    assert all(hole.since < hole.until and hole.what and hole.guard for hole in holes.HOLES)


@pytest.mark.parametrize(
    "text, want", [("2.13.0+cpu", (2, 13)), ("2.6.0", (2, 6)), ("2.15.0a0+git123", (2, 15)), ("2.9rc1", (2, 9))]
)
def test_release_reads_versions(text, want):
    assert holes.release(text) == want if text != "2.9rc1" else holes.release(text)[0] == 2


@pytest.mark.parametrize(
    "hole, inside, outside",
    [
        ("mps-decode-q-stride", (2, 8), (2, 9)),
        ("mps-decode-gqa", (2, 10), (2, 11)),
        ("mps-index-copy", (2, 7), (2, 8)),
        ("cpu-nan-query", (2, 6), (2, 7)),
    ],
)
def test_a_hole_is_active_in_its_versions_only(hole, inside, outside):
    device = hole.partition("-")[0]
    assert hole in holes.active(device, inside) and hole not in holes.active(device, outside)
    assert hole not in holes.active("cuda", inside)


@pytest.mark.parametrize(
    "device, version, refused",
    [
        ("mps", (2, 6), True),
        ("mps", (2, 14), True),
        ("xpu", (2, 14), True),
        ("privateuse1", (2, 14), True),
        ("cpu", (2, 6), True),
        ("cpu", (2, 13), False),
        ("cuda", (2, 13), False),
    ],
)
def test_sdpa_is_refused_where_a_hole_is(device, version, refused):
    assert bool(holes.no_sdpa(device, "", version)) == refused


@pytest.mark.parametrize(
    "arch, refused", [("gfx90a", False), ("gfx942", False), ("gfx1100", True), ("gfx1201", True), ("", True)]
)
def test_flash_on_amd_is_for_cdna(arch, refused):
    assert bool(holes.no_sdpa("hip", arch, (2, 13))) == refused


@pytest.mark.parametrize("device, limit", [("mps", 1 << 29), ("xpu", 1 << 30), ("cuda", 1 << 31), ("cpu", 1 << 31)])
def test_tiles_stay_below_the_largest_safe_tensor(pretend, device, limit):
    assert holes.score_limit(device, (2, 13)) == limit
    pretend(device)
    assert tiled.limits(torch.device("cpu")).scores <= limit


@pytest.mark.parametrize(
    "device, arch, dtype, dims, plain, served",
    [
        ("cpu", "x86_64", F32, (64, 64), True, True),
        ("cpu", "x86_64", F16, (64, 64), True, False),  # cpu-fp16
        ("cpu", "x86_64", F32, (64, 32), True, False),  # cpu-value-dim
        ("cpu", "x86_64", F32, (64, 64), False, False),
        ("cuda", "sm_90", BF16, (128, 128), True, True),
        ("cuda", "sm_75", F16, (64, 64), True, False),
        ("cuda", "sm_90", F32, (64, 64), True, False),  # cuda-math: no fused kernel that is exact
        ("cuda", "sm_90", F16, (72, 72), True, True),
        ("cuda", "sm_90", F16, (33, 33), True, False),  # cuda-math
        ("cuda", "sm_90", F16, (512, 512), True, False),  # cuda-math
        ("hip", "gfx942", BF16, (64, 64), True, True),
        ("mps", "", F32, (64, 64), True, False),
        ("xpu", "", F16, (64, 64), True, False),
    ],
)
def test_fused_serves_only_what_it_takes(monkeypatch, device, arch, dtype, dims, plain, served):
    monkeypatch.setattr(holes, "release", lambda *_: (2, 13))
    assert (fused.declined(device, arch, dtype, *dims, plain) == "") == served


def test_gpus_get_the_flash_operator_by_name():  # cudnn-gqa-sm100, cuda-math, cuda-int32-mask
    assert "scaled_dot_product_attention(" not in inspect.getsource(fused.dense)
    assert "mask" not in inspect.getsource(fused.dense).split('"""')[2]


@pytest.mark.parametrize("scale, served", [(0.1, True), (-0.1, False), (0.0, False)])
def test_flash_on_gpus_is_for_positive_scales(pretend, scale, served):  # cuda-negative-scale
    pretend("cuda")
    x = randn(1, 5, 2, 16, dtype=BF16)
    assert sdpa._fused_dense(Call(x, x, x, scale), True) == served


def test_flash_on_gpus_is_for_aligned_tensors():  # cuda-misaligned
    wide = torch.zeros(2, 5, 3, 68, dtype=BF16)  # rows of 136 bytes
    assert fused.aligned(torch.zeros(2, 5, 3, 64, dtype=BF16)) and fused.aligned(
        torch.zeros(1, 1, 1, 64, dtype=BF16).expand(2, 5, 3, 64)
    )
    assert not fused.aligned(wide[..., :64]) and fused.aligned(wide[:1, :1, :1, :64])
    assert not fused.aligned(torch.zeros(65, dtype=BF16)[1:].view(1, 1, 1, 64))


@pytest.mark.parametrize("sq, sk", [(1, 9), (4, 9), (9, 4), (9, 9)])
def test_causal_is_bottom_right_whatever_the_lengths(sq, sk):  # cpu-top-left, cuda-top-left, cpu-empty-lse
    check("attention", randn(1, sq, 2, 16), randn(1, sk, 2, 16), randn(1, sk, 2, 16, seed=1), causal=True)


@pytest.mark.parametrize("sq, sk", [(0, 3), (3, 0), (0, 0)])
def test_empty_lengths_reach_no_kernel(sq, sk):  # cpu-empty-crash
    out, lse = portattn.attention(randn(1, sq, 2, 16), randn(1, sk, 2, 16), randn(1, sk, 2, 16), return_lse=True, backend="sdpa")
    assert out.shape == (1, sq, 2, 16) and not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unused_slots_do_not_reach_a_result(value):  # cpu-masked-nan
    cache = [randn(3, 4, 2, 16, seed=s) for s in range(2)]
    for c in cache:
        c[2], c[1, 2:] = value, value
    table = torch.tensor([[0, 1, 99]])
    out = portattn.attention_paged(randn(1, 1, 4, 16), *cache, table, torch.tensor([6]), causal=True, backend="sdpa")
    assert out.isfinite().all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_nan(where):  # cpu-nan-query, and the empty row's test is for keys, not for sums
    x = {name: randn(1, 6, 2, 8, seed=i) for i, name in enumerate("qkv")}
    x[where][0, 2] = torch.nan
    for kw in ({}, {"softcap": 2.0}, {"bias": torch.ones(1, 1, 6, 6, dtype=torch.bool)}, {"batch_invariant": True}):
        assert portattn.attention(**x, backend="sdpa", **kw)[0, 2].isnan().all()


@pytest.mark.parametrize("keys", [1, 5, 8, 15, 16, 1024 + 3])
def test_nan_stays_nan_with_few_keys(keys):  # cpu-nan-few-keys
    q, cache = randn(2, 1, 4, 8), randn(2, 1100, 2, 8)
    table, lens = torch.tensor([[0], [1]]), torch.tensor([keys, keys])
    q[0, 0, 1] = torch.nan
    out = portattn.attention_paged(q, cache, cache, table, lens, backend="sdpa")
    assert out[0, 0, 1].isnan().all() and out[1].isfinite().all() and out[0, 0, 0].isfinite().all()
    q[0, 0, 1], cache[0, keys - 1] = 0, torch.nan
    assert portattn.attention_paged(q, cache, cache, table, lens, backend="sdpa")[0].isnan().all()
    assert portattn.attention(q[:1], cache[:1, :keys], cache[:1, :keys], backend="sdpa").isnan().all()


def test_least_keys_is_a_vector_of_floats():
    assert holes.least_keys("AVX2") == 8 and holes.least_keys("AVX512") == 16 and holes.least_keys("DEFAULT") == 16


def test_fp16_never_runs_a_16_bit_matmul_on_cpu():  # cpu-fp16
    assert arith.work_dtype(torch.device("cpu"), F16) == F32


def test_older_macs_are_declined(monkeypatch):  # mps-bf16-macos13
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    monkeypatch.setattr(holes, "release", lambda *_: (2, 8))
    assert sdpa.probe(torch.device("mps"))[0].need == "macOS 14"
    monkeypatch.setattr(holes, "release", lambda *_: (2, 9))
    assert sdpa.probe(torch.device("mps")) == ()


@pytest.mark.parametrize("lens", [[3, 5], [1, 7]])
def test_shapes_on_a_device_do_not_depend_on_lengths(pretend, lens):  # mps-graph-cache
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append((str(func), tuple(out.shape) if isinstance(out, torch.Tensor) else None))
            return out

    pretend("mps")
    cu = torch.tensor([0, 2, 8])
    q, k = randn(8, 2, 8), randn(8, 2, 8)
    shapes = []
    for used in (lens, [0, 0]):
        seen.clear()
        with torch.no_grad(), Shapes():
            portattn.attention_varlen(q, k, k, cu, cu, 6, 6, seqused_k=torch.tensor(used), backend="sdpa")
        shapes.append(list(seen))
    assert shapes[0] == shapes[1]
