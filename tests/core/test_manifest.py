"""Manifests are strict: an unknown or missing key names file, path and nearest key."""

import copy

import pytest

from portattn import manifest, registry
from portattn.capability import Arch, Range, unmet
from portattn.problem import Problem

GOOD = dict(schema=1, name="good", title="Good", priority=1, capabilities=[
    dict(id="a", layouts=["dense", "paged"], dtypes=["float16"], devices=["cuda"], arch=dict(family="sm", min=80, max=90),
         kv_dtypes=["float8_e4m3fn"], head_dims=dict(min=8, max=128, multiple=8), head_dims_v=[64, 128], groups=dict(max=8),
         page_sizes=dict(min=16, multiple=16), q_len=["decode"], features=["causal"])])
PROBLEM = Problem("paged", "cuda", "sm_86", "float16", "float16", 8, 2, 64, 64, 16, "decode", causal=True)


def broken(path, value=None, drop=False):
    data = copy.deepcopy(GOOD)
    where = data
    for key in path[:-1]:
        where = where[key]
    if drop:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return data


@pytest.mark.parametrize("data, text", [
    (broken(("titel",), "x"), "x.yaml: top level: unknown key 'titel'; did you mean 'title'?"),
    (broken(("priority",), drop=True), "x.yaml: top level: missing key 'priority'"),
    (broken(("priority",), "high"), "x.yaml: priority: wanted int, got 'high'"),
    (broken(("priority",), True), "x.yaml: priority: wanted int"),
    (broken(("schema",), 2), "x.yaml: schema: wanted 1, got 2"),
    (broken(("capabilities", 0, "dtypes"), drop=True), r"x.yaml: capabilities\[0\]: missing key 'dtypes'"),
    (broken(("capabilities", 0, "head_dim"), [64]), r"x.yaml: capabilities\[0\]: unknown key 'head_dim'; did you mean 'head_dims'?"),
    (broken(("capabilities", 0, "features"), ["casual"]), r"features\[0\]: unknown value 'casual'; did you mean 'causal'?"),
    (broken(("capabilities", 0, "arch"), dict(familly="sm")), r"capabilities\[0\].arch: unknown key 'familly'; did you mean 'family'?"),
    (broken(("capabilities", 0, "head_dims"), ["64"]), r"head_dims\[0\]: wanted int, got '64'"),
    (broken(("capabilities",), dict()), "capabilities: wanted list"),
    (broken(("requires",), dict(torch_build=["hip", "cpu"])), r"requires.torch_build\[1\]: unknown value 'cpu'"),
    (broken(("requires",), dict(package={})), "requires: unknown key 'package'; did you mean 'packages'?"),
    (broken(("requires",), dict(packages={"triton": "~=3.4"})), "requires.packages.triton: wanted clauses of .* got '~=3.4'"),
    (broken(("requires",), dict(packages={"triton": "3.4"})), "requires.packages.triton: wanted clauses of .* got '3.4'"),
    (broken(("requires",), dict(packages={"triton": ">=3.4,<x"})), "requires.packages.triton: wanted clauses of .* got '<x'"),
    (broken(("requires",), dict(packages={3: ">=3.4"})), "requires.packages: wanted str, got 3"),
    (broken(("capabilities", 0, "head_dims"), dict(multiple=0)), r"head_dims.multiple: wanted at least 1, got 0"),
    ([1], "top level: wanted a mapping, got list"),
])
def test_a_fault_names_file_path_and_nearest_key(data, text):
    with pytest.raises(manifest.ManifestError, match=text.replace("?", r"\?").replace("(", r"\(")):
        manifest.parse(data, "x.yaml")


def test_a_file_that_cannot_be_read_or_is_not_yaml(tmp_path):
    with pytest.raises(manifest.ManifestError, match="cannot be read"):
        manifest.load(tmp_path)
    for content in (b"a: [", bytes(range(256)), "schema: 1".encode("utf-16"), b"date: 2026-13-45"):
        (tmp_path / "backend.yaml").write_bytes(content)
        with pytest.raises(manifest.ManifestError, match="not YAML"):
            manifest.load(tmp_path)


def test_the_name_is_the_folders(tmp_path):
    (tmp_path / "backend.yaml").write_text("{schema: 1, name: other, title: t, priority: 1, capabilities: []}")
    with pytest.raises(manifest.ManifestError, match="as the folder"):
        manifest.load(tmp_path)


def test_every_shipped_manifest_is_valid():
    assert registry.manifests() and not [n for n, m in registry.manifests().items() if not m.capabilities]


@pytest.mark.parametrize("changed, codes", [
    ({}, []),
    (dict(arch="sm_75"), ["arch"]), (dict(arch="sm_100"), ["arch"]), (dict(arch="gfx90a"), ["arch"]), (dict(device="hip", arch="gfx942"), ["device", "arch"]),
    (dict(dtype="bfloat16", kv_dtype="bfloat16"), ["dtype"]), (dict(kv_dtype="float8_e4m3fn"), []), (dict(kv_dtype="float8_e5m2"), ["kv_dtype"]),
    (dict(head_dim=72), []), (dict(head_dim=76), ["head_dim"]), (dict(head_dim_v=72), ["head_dim_v"]), (dict(head_dim=4, head_dim_v=32), ["head_dim", "head_dim_v"]),
    (dict(num_heads_q=32), ["group"]), (dict(page_size=24), ["page_size"]), (dict(q_len="extend"), ["q_len"]),
    (dict(layout="varlen", page_size=0), ["layout"]), (dict(softcap=True, lse=True), ["softcap", "lse"]), (dict(causal=False), []),
])
def test_unmet_gives_every_reason_and_nothing_for_yes(changed, codes):
    capability = manifest.parse(GOOD).capabilities[0]
    assert [r.code for r in unmet(capability, PROBLEM._replace(**changed))] == codes


def test_reasons_say_what_is_needed_and_what_is_there():
    capability = manifest.parse(GOOD).capabilities[0]
    (reason,) = unmet(capability, PROBLEM._replace(head_dim=76))
    assert (reason.need, reason.have) == ("8..128, a multiple of 8", "76")


@pytest.mark.parametrize("arch, name, yes", [
    (Arch("sm", 80), "sm_90", True), (Arch("sm", 80), "sm_120", True), (Arch("sm", 80), "sm_75", False), (Arch("sm", 90, 90), "sm_100", False),
    (Arch("gfx", 900), "gfx942", True), (Arch(names=("gfx90a",)), "gfx90a", True), (Arch(names=("gfx90a",)), "gfx942", False), (Arch(), "", True),
    (Arch("sm", 80), "", False)])
def test_architectures(arch, name, yes):
    assert (name in arch) is yes


def test_ranges():
    assert 3 in Range(values=(1, 3)) and 2 not in Range(values=(1, 3)) and 32 in Range(16, 64, 16) and 40 not in Range(16, 64, 16)
