"""`portattn explain`: options and case ids become the call that they name."""

import json
import types

import pytest

from portattn import cli, registry
from portattn.capability import Capability
from portattn.manifest import Manifest


def explain(capsys, *args, code=0):
    assert cli.main(["explain", *args]) == code
    return capsys.readouterr()


def problem(capsys, *args):
    return json.loads(explain(capsys, "--json", *args).out)["problem"]


@pytest.fixture
def toy():
    """A backend `toy` that would be asked first, and takes float16 with a head_dim of 64 only."""
    c = Capability(
        "narrow", ("paged",), ("float16",), head_dims=registry.manifests_module.Range(values=(64,)), features=("causal",)
    )
    registry.register(Manifest("toy", "a toy", 10_000, (c,)), types.SimpleNamespace(attention=None))
    yield
    registry.unregister("toy")


def test_options_become_a_problem(capsys):
    p = problem(
        capsys,
        "--layout",
        "paged",
        "--dtype",
        "bfloat16",
        "--heads",
        "32/8",
        "--head-dim",
        "128",
        "--page-size",
        "16",
        "--features",
        "causal,softcap",
    )
    assert (p["layout"], p["dtype"], p["num_heads_q"], p["num_heads_kv"], p["head_dim"], p["page_size"]) == (
        "paged",
        "bfloat16",
        32,
        8,
        128,
        16,
    )
    assert p["q_len"] == "decode" and [f for f in ("causal", "softcap", "window", "sinks", "append", "lse") if p[f]] == [
        "causal",
        "softcap",
    ]


@pytest.mark.parametrize("layout, features", [
    ("dense", "causal,window,softcap,sinks,alibi,bias,lse,batch_invariant"),
    ("varlen", "causal,window,softcap,sinks,alibi,lse,batch_invariant"),
    ("paged", "causal,window,softcap,sinks,alibi,rotary,append,kv_scale,lse,batch_invariant"),
    ("dense", "grad"),
])
def test_every_feature_that_is_named_is_in_the_problem(capsys, layout, features):
    p = problem(capsys, "--layout", layout, "--features", features)
    assert {name for name, value in p.items() if value is True} == set(features.split(","))


def test_lengths_decide_the_kind_of_call(capsys):
    assert [problem(capsys, "--layout", "paged", "--lengths", n)["q_len"] for n in ("1/100", "16/100")] == ["decode", "extend"]
    assert problem(capsys, "--layout", "dense", "--lengths", "40")["q_len"] == "prefill"


def test_other_dims_and_caches(capsys):
    p = problem(capsys, "--layout", "paged", "--head-dim", "96/64", "--kv-dtype", "float8_e4m3fn", "--heads", "6/3")
    assert (p["head_dim"], p["head_dim_v"], p["kv_dtype"], p["num_heads_q"], p["num_heads_kv"]) == (96, 64, "float8_e4m3fn", 6, 3)


@pytest.mark.parametrize("layout", ["cache_append", "merge_states"])
def test_the_calls_that_attend_to_nothing(capsys, layout):
    assert problem(capsys, "--layout", layout)["layout"] == layout


def test_a_case_id_of_the_conformance_suite(capsys):
    p = problem(capsys, "paged-bf16-h8x2-d64-p16-q1k37*2+q5k5-causal-w16.0-sinks-poison")
    assert (p["layout"], p["num_heads_q"], p["head_dim"], p["window"], p["sinks"]) == ("paged", 8, 64, True, True)


def test_the_chosen_backend_and_each_no_are_printed(capsys, toy):
    text = explain(capsys, "--layout", "paged", "--features", "causal,sinks").out
    assert ": serves it" in text and "toy: serves it" not in text
    for no in ("dtype: need float16, have bfloat16", "head_dim: need 64, have 128", "sinks: need without, have sinks"):
        assert no in text, text


def test_a_forced_backend_that_cannot_is_exit_code_one_with_its_reasons(capsys, toy):
    assert "head_dim: need 64, have 128" in explain(capsys, "--layout", "paged", "--backend", "toy", code=1).out
    found = json.loads(explain(capsys, "--layout", "paged", "--backend", "toy", "--json", code=1).out)
    assert found["backend"] is None and {"dtype", "head_dim"} <= {r["code"] for r in found["rejected"]["toy"]}


@pytest.mark.parametrize("args, words", [
    (["--layout", "paged", "--page-size", "0"], "--page-size: wanted at least 1, got 0"),
    (["--batch", "-1"], "--batch: wanted at least 0, got -1"),
    (["--layout", "varlen", "--kv-dtype", "float8_e5m2"], "--kv-dtype: of a cache"),
    (["--features", "causl"], "did you mean 'causal'?"),
    (["--layout", "varlen", "--features", "bias"], "dense calls only"),
    (["--layout", "dense", "--features", "append,rotary"], "append, rotary: paged calls only"),
    (["--layout", "merge_states", "--features", "causal"], "has none"),
    (["--heads", "many"], "--heads"),
    (["--heads", "7/2"], "7"),
    (["--backend", "tritn"], "'tritn'"),
    (["--device", "cuda:77"], ""),
    (["paged-bf16-h8x2-oops"], "'oops'"),
])
def test_wrong_usage_is_one_line_on_stderr(capsys, args, words):
    out, err = explain(capsys, *args, code=2)
    assert out == "" and err.startswith("portattn explain: ") and words in err
