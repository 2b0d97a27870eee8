"""`portattn explain`: what would run one kind of call, and why not the other backends.

The call is described by options, or by a case id of the conformance suite; its tensors are made (small ones, unless
--lengths says otherwise), so that what is said of padding, copies and routes is what a real call would do. Nothing is run.

    portattn explain --layout paged --dtype bfloat16 --heads 32/8 --head-dim 128 --page-size 16 --features causal,softcap
    portattn explain paged-bf16-h8x2-d64-p16-q1k37*2+q5k5-causal-w16.0-sinks-poison
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from typing import Any, Callable

import torch

from . import api, registry
from .errors import NoBackendError, PortattnError
from .manifest import DTYPES, KV_DTYPES, LAYOUTS
from .problem import FEATURES
from .testing import cases

ON: dict[str, dict[str, Any]] = {  # features as fields of a Case; rotary, lse and grad, which are none, are seen to below
    "causal": dict(causal=True),
    "window": dict(window=(128, 0)),
    "softcap": dict(cap=30.0),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi="alibi"),
    "bias": dict(bias="bias"),
    "append": dict(append=True),
    "kv_scale": dict(scale="scale"),
    "batch_invariant": dict(invariant=True),
}


class Usage(Exception):
    """An option has a value that makes no call."""


def pair(text: str, name: str) -> tuple[int, int]:
    """"32/8" as (32, 8), "128" as (128, 128)."""
    try:
        first, _, second = text.partition("/")
        return int(first), int(second or first)
    except ValueError:
        raise Usage(f"{name}: wanted N or N/M, got {text!r}") from None


def case_of(args: argparse.Namespace, features: list[str]) -> cases.Case:
    """The conformance case that options describe."""
    if args.layout != "paged" and (paged := {"rotary", "append", "kv_scale"} & set(features)):
        raise Usage(f"--features: {', '.join(sorted(paged))}: paged calls only")
    if args.layout != "dense" and "bias" in features:
        raise Usage("--features: bias: dense calls only")
    heads, heads_kv = pair(args.heads, "--heads")
    dim, dim_v = pair(args.head_dim, "--head-dim")
    lengths = pair(args.lengths or ("1/1000" if args.layout == "paged" else "512"), "--lengths")
    more: dict[str, Any] = {}
    for name in features:
        more |= ON.get(name, {})
    if "rotary" in features:
        more["rope"] = dim // 2 * 2
    short = {long: code for code, long in {**cases.DTYPES, **cases.KV_DTYPES}.items()}
    return cases.Case(layout=args.layout, dtype=short[args.dtype], heads=heads, heads_kv=heads_kv, dim=dim, dim_v=dim_v,
                      page=args.page_size if args.layout == "paged" else 0, lens=(lengths,) * args.batch,
                      kv=short[args.kv_dtype] if args.kv_dtype else "", **more)


def other_call(args: argparse.Namespace) -> tuple[Callable, tuple, dict[str, Any]]:
    """A call of cache_append or merge_states."""
    heads, heads_kv = pair(args.heads, "--heads")
    dim, dim_v = pair(args.head_dim, "--head-dim")
    dtype = getattr(torch, args.dtype)
    zeros = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype, device=args.device)
    if args.layout == "merge_states":
        return api.merge_states, (zeros(2, args.batch, heads, dim_v), zeros(2, args.batch, heads, dtype=torch.float32)), {}
    stored = getattr(torch, args.kv_dtype or args.dtype)
    caches = [zeros(2, args.page_size, heads_kv, d, dtype=stored) for d in (dim, dim_v)]
    tokens = [zeros(args.batch, heads_kv, d) for d in (dim, dim_v)]
    return api.cache_append, (*tokens, *caches, torch.zeros(args.batch, dtype=torch.int64, device=args.device)), {}


def call_of(args: argparse.Namespace) -> tuple[Callable, tuple, dict[str, Any]]:
    """(function, args, kwargs) of what was asked for; Usage says what is wrong with it."""
    features = [name.strip() for name in args.features.split(",") if name.strip()]
    for option, got, least in (("--page-size", args.page_size, 1), ("--batch", args.batch, 0)):
        if got < least:
            raise Usage(f"{option}: wanted at least {least}, got {got}")
    if args.kv_dtype and args.case is None and args.layout not in ("paged", "cache_append"):
        raise Usage("--kv-dtype: of a cache, which paged and cache_append calls have")
    for name in features:
        if name not in FEATURES:
            near = difflib.get_close_matches(name, FEATURES, n=1)
            raise Usage(
                f"--features: unknown {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FEATURES)}")
            )
    if args.case is None and args.layout in ("cache_append", "merge_states"):
        if features:
            raise Usage(f"--features: {args.layout} has none")
        return other_call(args)
    try:
        case = cases.Case.parse(args.case) if args.case else case_of(args, features)
    except ValueError as exc:
        raise Usage(str(exc)) from None
    made = cases.build(case, args.device)
    call_args, kwargs = made.args, dict(made.kwargs)
    if "lse" in features:
        kwargs["return_lse"] = True
    if "grad" in features:
        call_args[0].requires_grad_()
    return getattr(api, made.function), call_args, kwargs


def main(argv: list[str] | None = None) -> int:
    """`portattn explain`. Exit code 0 with a backend, 1 without one, 2 for wrong usage."""
    ap = argparse.ArgumentParser(prog="portattn explain", description="What would run a call, and why not the other backends.",
                                 epilog="Exit code: 0 a backend serves it, 1 none does, 2 wrong usage.")
    ap.add_argument(
        "case",
        nargs="?",
        metavar="CASE_ID",
        help="a case id as `portattn conformance` prints it; else the options below describe the call",
    )
    ap.add_argument("--layout", choices=LAYOUTS, default="dense")
    ap.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of q (default bfloat16)")
    ap.add_argument("--kv-dtype", choices=KV_DTYPES, help="of an 8-bit cache")
    ap.add_argument("--heads", default="32/8", metavar="HQ/HKV", help="query and key/value heads (default 32/8)")
    ap.add_argument("--head-dim", default="128", metavar="D[/DV]", help="of q and k, and of v where it differs (default 128)")
    ap.add_argument("--page-size", type=int, default=16, help="tokens a page (default 16)")
    ap.add_argument("--batch", type=int, default=2, help="sequences (default 2)")
    ap.add_argument("--lengths", metavar="LQ[/LK]", help="queries and keys of a sequence (default 512, paged 1/1000)")
    ap.add_argument("--features", default="", metavar="NAMES", help="comma-separated: " + ", ".join(FEATURES))
    ap.add_argument("--device", default="cpu", help="a torch device (default cpu)")
    ap.add_argument("--backend", help="as backend= of the call: this one or an error")
    ap.add_argument("--json", action="store_true")
    args = ap.parse_args(argv)
    try:
        function, call_args, kwargs = call_of(args)
        choice = api.explain(function, *call_args, backend=args.backend, **kwargs)
    except NoBackendError as exc:
        print(json.dumps({"backend": None, "error": str(exc), "rejected": _plain(exc.rejected)}, indent=2) if args.json else exc)
        return 1
    except (
        Usage,
        PortattnError,
        RuntimeError,
        AssertionError,
    ) as exc:  # torch names a device that is not there in the last two ways
        print(f"portattn explain: {exc}", file=sys.stderr)
        return 2
    if args.json:
        found = {
            "problem": choice.problem._asdict(),
            "backend": choice.backend,
            "capability": choice.capability.id,
            "notes": list(choice.notes),
        }
        print(json.dumps({**found, "rejected": _plain(choice.rejected)}, indent=2))
    else:
        print(choice)
    return 0


def _plain(rejected: dict[str, tuple[registry.Reason, ...]]) -> dict[str, list[dict[str, str]]]:
    return {name: [reason._asdict() for reason in reasons] for name, reasons in rejected.items()}
