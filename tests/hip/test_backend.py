"""The hip backend's manifest and adapter: what is declared can be built, and nothing is claimed that was not seen."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from portattn import device, instances, matrix, native, registry
from portattn.instances import GFX, limits_of
from portattn.manifest import DTYPES

MANIFEST = registry.manifests()["hip"]


def test_the_manifest_names_exactly_the_architectures_that_are_built():
    for c in MANIFEST.capabilities:
        assert set(c.arch.names) == set(GFX), c.id
    lanes = {arch for lane in MANIFEST.ci if lane["lane"] == "compile" for arch in lane["arch"]}
    assert lanes == set(GFX)


def test_the_table_says_compiled_emulated_and_not_run():
    assert not MANIFEST.verified
    for c in MANIFEST.capabilities:
        said = matrix.evidence(MANIFEST, c)
        assert "emulated" in said and "compiles" in said and said.endswith("not run on AMD hardware") and "run:" not in said


def test_a_rocm_lane_runs_the_suite_on_hardware():
    [lane] = [lane for lane in MANIFEST.ci if lane["lane"] == "gpu"]
    assert lane["runner"] == ["self-hosted", "rocm"] and "+rocm" in lane["torch"] and lane["level"] == "full"


@pytest.mark.parametrize("arch", GFX)
def test_every_declared_type_and_head_size_has_an_instance(arch):
    decode = MANIFEST.capabilities[0]
    limits = limits_of(arch)
    every = set(instances.every_instance(limits))
    for dtype in decode.dtypes:
        for kv in (dtype, *decode.kv_dtypes):
            for dim, choose in itertools.product(range(1, 257), (instances.decode_shape, instances.staged_prefill_shape)):
                shape = choose(dtype, kv, native.head_dim_of(dim, 1), limits)
                assert shape.instance in every and shape.shared <= 64 << 10 and shape.threads <= 256 and shape.blocks * shape.shared <= limits.shared_sm
    assert set(DTYPES) >= set(decode.dtypes)


@pytest.mark.parametrize("said, arch", [("gfx90a:sramecc+:xnack-", "gfx90a"), ("gfx942:sramecc+:xnack-", "gfx942"), ("gfx1100", "gfx1100")])
def test_gcn_names_lose_their_feature_suffixes(monkeypatch, said, arch):
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(gcnArchName=said, name="AMD", major=9, minor=0))
    device._facts.cache_clear()
    assert device._facts("cuda", 0) == ("hip", arch, "AMD"), "never by (major, minor), which say (9, 0) on gfx90a"
    device._facts.cache_clear()


def test_shared_memory_is_static_so_launches_ask_for_none():
    class Driver:
        def function(self, index, arch, instance, shared, symbol):
            return shared, symbol

    made = native.Device(Driver(), torch.device("cuda", 0), "gfx942", limits_of("gfx942"))
    shape = instances.decode_shape("float16", "float16", 64, made.limits)
    assert shape.shared > 0 and made.function(shape.instance, shape.shared) == (0, "portattn_decode")
