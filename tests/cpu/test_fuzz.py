"""Random problems against the float64 reference: features meet here that no listed case combines."""

from __future__ import annotations

import os
import random

import pytest

from portattn.testing.cases import KV_DTYPES, Case
from portattn.testing.target import Target

PROBLEMS = int(os.environ.get("PORTATTN_FUZZ", "60"))  # for each instruction set; more for a thorough run
SEED = int(os.environ.get("PORTATTN_FUZZ_SEED", "20"))
DIMS = (1, 3, 8, 13, 16, 31, 32, 40, 64, 65, 72, 96, 100, 128, 160, 256)


def any_case(draw: random.Random) -> Case:
    """A case that the backend takes, small enough for the reference."""
    maybe = lambda share: draw.random() < share
    layout = draw.choice(("dense", "varlen", "paged", "paged"))
    group, heads_kv = draw.choice((1, 1, 2, 3, 4, 4, 5, 7, 8, 16, 17)), draw.choice((1, 2, 3))
    dim = draw.choice(DIMS)
    batch = draw.choice((1, 2, 3, 5))
    top_q = draw.choice((1, 1, 2, 5, 17, 40, 100))
    lens = [(top_q if maybe(0.6) else draw.randint(0, top_q), draw.choice((0, 1, 7, 63, 64, 65, 100, 129, 300, 600))) for _ in range(batch)]
    if layout == "dense":
        lens = lens[:1] * batch
    left, right = (draw.choice((-1, 0, 1, 5, 63, 100)) for _ in range(2))
    case = Case(layout, draw.choice(("f32", "f32", "bf16", "f16")), group * heads_kv, heads_kv, dim, draw.choice((0, 0, *DIMS)),
                lens=tuple(lens), causal=maybe(0.5), window=(left, right) if maybe(0.35) else (-1, -1), cap=5.0 if maybe(0.2) else 0.0,
                sinks=maybe(0.2), alibi=draw.choice(("", "", "", "alibi", "alibib")), poison=maybe(0.5), splits=draw.choice((0, 0, 1, 3)),
                invariant=maybe(0.15), i64=layout != "dense" and maybe(0.3))
    if layout == "dense":
        return case._replace(bias=draw.choice(("", "", "bias", "biask", "biasb")), bhsd=maybe(0.3))
    if layout == "varlen":
        return case._replace(used=maybe(0.3))
    kv = draw.choice(("", "", *KV_DTYPES))
    rope = draw.randint(1, dim // 2) * 2 if dim > 1 and maybe(0.3) else 0
    return case._replace(page=draw.choice((1, 3, 16, 64, 100)), kv=kv, scale=draw.choice(("", "scale", "scale0", "scaleh", "scaleb")),
                         append=maybe(0.4), rope=rope, pairs=bool(rope) and maybe(0.5), hnd=maybe(0.4), ragged=maybe(0.5))


def check(problems: int) -> None:
    target, draw, failed = Target("cpu"), random.Random(SEED), []
    for _ in range(problems):
        case = any_case(draw)
        try:
            target.check(case)
        except AssertionError as exc:
            failed.append(f"{case}: {exc}")
    if failed:
        pytest.fail(f"{len(failed)} of {problems} (seed {SEED}):\n" + "\n".join(failed[:20]))


def test_random_problems_match_the_reference(isa):
    check(PROBLEMS)


def test_units_that_a_cpu_may_lack_match_the_reference_when_emulated(emulated):
    check(PROBLEMS // 4)
