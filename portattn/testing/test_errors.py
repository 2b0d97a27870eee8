"""C-ERR and C-DTYPE's refusals: exact errors before anything runs, the same on every backend; and honest noes."""

import math

import torch

import portattn
from portattn import ArgumentError, ArgumentTypeError, NoBackendError
from portattn.capability import unmet

from .cases import Call, Case
from .target import Declined, Dishonest, Target, bitwise_equal, rule
from .tolerance import Mismatch

BASE = {"dense": "dense-f32-h4x2-d32-q5k9*2", "varlen": "varlen-f32-h4x2-d32-q5k9+q1k17",
        "paged": "paged-f32-h4x2-d32-p4-q5k9*2-append-rope16"}


def hold_error(target: Target, call: Call, named: str, kind: type = ArgumentError) -> str:
    """The call raises exactly `kind`, its text names the argument, and nothing is written."""
    out = call.kwargs.get("out")
    written = [x for x in (*call.args[1:3], out) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in written]
    try:
        getattr(portattn, call.function)(*call.args, **{"backend": target.backend, **call.kwargs})
    except (ArgumentError, ArgumentTypeError) as error:
        text = str(error)
        if type(error) is not kind:
            raise Mismatch(f"{named}: wanted {kind.__name__}, got {type(error).__name__}: {text}") from error
        if named not in text:
            raise Mismatch(f"wanted an error that names {named!r}, got: {text}") from error
        if not all(bitwise_equal(a, b) for a, b in zip(before, written)):
            raise Mismatch(f"{named}: something was written before the error") from error
        return text
    except Exception as error:
        raise Mismatch(f"{named}: wanted {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise Mismatch(f"{named}: wanted {kind.__name__}, but the call ran")


def changed(call: Call, **new) -> Call:
    """The call with arguments replaced, positional ones by their names."""
    names = {"attention": ("q", "k", "v"), "attention_varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
                                                                "max_seqlen_k"),
             "attention_paged": ("q", "k_cache", "v_cache", "block_table", "kv_lens")}[call.function]
    args = tuple(new.pop(n) if n in new else x for n, x in zip(names, call.args))
    return call._replace(args=args, kwargs={**call.kwargs, **new})


def get(call: Call, name: str) -> torch.Tensor:
    return dict(zip(("q", "k", "v"), call.args))[name] if name in "qkv" else call.kwargs[name]


@rule("C-ERR")
def test_wrong_shapes_of_dense_arguments(target: Target) -> None:
    call = target.build(BASE["dense"])
    q, k, v = call.args
    z = lambda *s: torch.zeros(s, device=target.device)
    for named, new in (
        ("q", {"q": q[0]}), ("k", {"k": k[:, 0]}), ("v", {"v": v[:, :-1]}), ("k", {"k": k[:1]}), ("k", {"k": k[..., :-1]}),
        ("v", {"v": v[:, :, :1]}),
        ("heads", {"q": q[:, :, :3]}), ("q: wanted at least one head", {"q": q[:, :, :0]}), ("heads", {"k": k[:, :, :0], "v": v[:, :, :0]}),
        ("bias", {"bias": z(2, 4, 5, 8)}), ("bias", {"bias": z(1, 2, 4, 5, 9)}),
        ("alibi_slopes", {"alibi_slopes": z(3)}),
        ("alibi_slopes", {"alibi_slopes": z(3, 4)}), ("sinks", {"sinks": z(2)}), ("sinks", {"sinks": z(4, 1)}),
        ("out", {"out": z(2, 5, 4, 31)}),
        ("layout", {"layout": "sbhd"}),
    ):
        hold_error(target, changed(call, **new), named)


@rule("C-ERR")
def test_wrong_shapes_of_varlen_arguments(target: Target) -> None:
    call = target.build(BASE["varlen"])
    q, k, v, cu_q, cu_k, *_ = call.args
    for named, new in (
        ("q", {"q": q[None]}), ("k", {"k": k[..., :-1]}), ("v", {"v": v[:-1]}), ("cu_seqlens_q", {"cu_seqlens_q": cu_q[None]}),
        ("cu_seqlens_k", {"cu_seqlens_k": cu_k[:-1]}),
        ("cu_seqlens_q", {"cu_seqlens_q": cu_q[:0], "cu_seqlens_k": cu_k[:0]}), ("cu_seqlens_q", {"cu_seqlens_q": cu_q.float()}),
        ("cu_seqlens_k", {"cu_seqlens_k": cu_k.short()}),
        ("seqused_k", {"seqused_k": cu_k}), ("seqused_k", {"seqused_k": cu_k[1:].float()}),
        ("max_seqlen_q", {"max_seqlen_q": -1}), ("max_seqlen_k", {"max_seqlen_k": -5}),
    ):
        hold_error(target, changed(call, **new), named)
    hold_error(target, changed(call, max_seqlen_k=cu_k[1]), "max_seqlen_k", ArgumentTypeError)
    hold_error(target, changed(call, max_seqlen_q=5.0), "max_seqlen_q", ArgumentTypeError)


@rule("C-ERR")
def test_wrong_shapes_of_paged_arguments(target: Target) -> None:
    call = target.build(BASE["paged"])
    q, k_cache, v_cache, table, lens = call.args
    k, v, cos, sin = (call.kwargs[n] for n in ("k", "v", "rotary_cos", "rotary_sin"))
    scale = lambda *s: torch.ones(s, device=target.device)
    for named, new in (
        ("k_cache", {"k_cache": k_cache[0]}), ("v_cache", {"v_cache": v_cache[:-1]}), ("k_cache", {"k_cache": k_cache[..., :-1]}),
        ("block_table", {"block_table": table[0]}),
        ("block_table", {"block_table": table[:1]}), ("block_table", {"block_table": table.float()}),
        ("kv_lens", {"kv_lens": lens[:1]}), ("kv_lens", {"kv_lens": lens.float()}),
        ("kv_lens", {"kv_lens": lens[:, None]}), ("k", {"k": k[..., :-1]}), ("v", {"v": v[:, :1]}), ("v", {"v": None}),
        ("k", {"k": None}), ("rotary_sin", {"rotary_sin": None}),
        ("rotary_cos", {"rotary_cos": None}), ("rotary_sin", {"rotary_sin": sin[:, :-1]}), ("kv_layout", {"kv_layout": "DHN"}),
        ("k_scale", {"k_scale": scale(3)}),
        ("v_scale", {"v_scale": scale(2, 3)}), ("k_scale", {"k_scale": scale(2).double()}), ("k_scale", {"k_scale": math.nan}),
    ):
        hold_error(target, changed(call, **new), named)


@rule("C-ERR")
def test_rotary_tables_of_doubled_width_are_refused(target: Target) -> None:
    """cos of width D (each angle twice) is plausible, and wrong: rotary_dim would be 2 D."""
    call = target.build(BASE["paged"])
    cos, sin = (torch.cat([call.kwargs[n]] * 4, 1) for n in ("rotary_cos", "rotary_sin"))
    assert cos.shape[1] * 2 > 32
    hold_error(target, changed(call, rotary_cos=cos, rotary_sin=sin), "rotary_cos")


@rule("C-ERR")
def test_wrong_numbers(target: Target) -> None:
    for base in BASE.values():
        call = target.build(base)
        for named, new in (
            ("softmax_scale", {"softmax_scale": math.nan}), ("softmax_scale", {"softmax_scale": math.inf}),
            ("softcap", {"softcap": -1.0}), ("softcap", {"softcap": math.inf}),
            ("window_size", {"window_size": (-2, 0)}), ("window_size", {"window_size": (1, 2, 3)}),
            ("num_splits", {"num_splits": -1}),
            # finite for Python, not for kernels
            ("softmax_scale", {"softmax_scale": 1e300}), ("softmax_scale", {"softmax_scale": 10**400}), ("softcap", {"softcap": 1e39}),
            ("softcap", {"softcap": 1e-300}), ("softcap", {"softcap": 1e-30, "softmax_scale": 1e30}),
        ):
            hold_error(target, changed(call, **new), named)


@rule("C-ERR")
def test_integers_of_any_size_are_taken(target: Target) -> None:
    """Windows, splits and bounds past every length, 64 bits or not, are what unbounded ones are."""
    for base in BASE.values():
        call = target.build(base)
        expected = target.run(call)
        for huge in (1 << 31, 1 << 63, 10**30):
            new: dict = {"window_size": (huge, huge), "num_splits": huge}
            if call.function != "attention":
                new["max_seqlen_q"] = huge
            if call.function == "attention_varlen":
                new["max_seqlen_k"] = huge
            if not torch.allclose(target.run(changed(call, **new)), expected, atol=0.02):
                raise Mismatch(f"{base}: with {', '.join(new)} = {huge:g}: another result")


@rule("C-ERR")
def test_wrong_python_types(target: Target) -> None:
    for base in BASE.values():
        call = target.build(base)
        one = torch.ones((), device=target.device)
        for named, new in (("softmax_scale", {"softmax_scale": one}), ("softcap", {"softcap": one}),
                           ("window_size", {"window_size": 3}),
                           ("q", {"q": [1.0]}), ("sinks", {"sinks": [0.0] * 4}), ("num_splits", {"num_splits": 1.5})):
            hold_error(target, changed(call, **new), named, ArgumentTypeError)


@rule("C-ERR")
def test_unknown_keywords_are_pythons_own_type_error(target: Target) -> None:
    call = target.build(BASE["dense"])
    try:
        portattn.attention(*call.args, casual=True, backend=target.backend)
    except TypeError as error:
        if isinstance(error, ArgumentTypeError) or "casual" not in str(error):
            raise Mismatch(f"an unknown keyword: wanted Python's TypeError, got {type(error).__name__}: {error}") from error
        return
    raise Mismatch("an unknown keyword was taken")


@rule("C-ERR")
def test_all_faults_are_named_at_once(target: Target) -> None:
    call = target.build(BASE["dense"])
    q, k, v = call.args
    text = hold_error(target, changed(call, v=v[:, :-1], softcap=-1.0, window_size=(-3, 0),
                                      sinks=torch.zeros(9, device=target.device)), "v")
    for name in ("softcap", "window_size", "sinks"):
        if name not in text:
            raise Mismatch(f"four faults in one call: {name} is not named in: {text}")


@rule("C-ERR")
def test_an_unknown_backend_is_an_argument_error_that_lists_the_names(target: Target) -> None:
    call = target.build(BASE["dense"])
    text = hold_error(target, changed(call, backend="cdua"), "cdua")
    if target.backend not in text:
        raise Mismatch(f"wanted the known names in: {text}")
    try:
        with portattn.use("no such backend"):
            pass
    except ArgumentError:
        return
    raise Mismatch("use() of an unknown name: wanted an ArgumentError")


@rule("C-ERR")
def test_out_that_does_not_fit_or_overlaps_is_refused(target: Target) -> None:
    for base in BASE.values():
        call = target.build(base)
        q = call.args[0]
        for out in (q, torch.zeros_like(q).double(), torch.zeros_like(q).to(torch.float16),
                    torch.zeros(*q.shape, 2, device=q.device)[..., 0]):
            hold_error(target, changed(call, out=out), "out")
        hold_error(target, changed(call, out=torch.zeros_like(q)[:, :1]), "out")


@rule("C-ERR")
def test_a_tensor_whose_storage_was_freed_is_refused(target: Target) -> None:
    """In the first call of its kind, before a kernel or torch reads there: shapes that no other test has."""
    for case in ("dense-f32-h4x2-d32-q6k11*2", "varlen-f32-h4x2-d32-q6k11+q1k19", "paged-f32-h4x2-d32-p4-q6k11*2"):
        for place, name in enumerate(("q", "k", "v")):
            call = target.build(case)
            args = [x.clone() if isinstance(x, torch.Tensor) else x for x in call.args]
            args[place].untyped_storage().resize_(0)
            try:
                getattr(portattn, call.function)(*args, **{"backend": target.backend, **call.kwargs})
            except ArgumentError as error:
                if f"{name}_cache" not in str(error) and f"{name}: wanted a storage" not in str(error):
                    raise Mismatch(f"wanted an error that names {name}, got: {error}") from error
            else:
                raise Mismatch(f"{name} without memory: wanted an ArgumentError, but the call ran")


@rule("C-ERR", devices=("cuda", "mps", "xpu"))
def test_tensors_of_two_devices_are_refused(target: Target) -> None:
    for base in BASE.values():
        call = target.build(base)
        hold_error(target, changed(call, sinks=torch.zeros(4)), "sinks")
        hold_error(target, call._replace(args=(call.args[0], call.args[1].cpu(), *call.args[2:])), "k")


@rule("C-ERR")
def test_cache_append_refuses_what_does_not_fit(target: Target) -> None:
    from .test_paged import append_call

    call = append_call(target, "f32", 16, [3, 4])
    k, v, k_cache, v_cache, slots = call.args
    scale = torch.ones(2, 2, device=target.device)
    for named, args, kwargs in (
        ("slot_mapping", (k, v, k_cache, v_cache, slots[:1]), {}), ("slot_mapping", (k, v, k_cache, v_cache, slots.float()), {}),
        ("k", (k[0], v, k_cache, v_cache, slots), {}),
        ("v", (k, v[:1], k_cache, v_cache, slots), {}), ("k", (k, v, k_cache[..., :4], v_cache, slots), {}),
        ("v_cache", (k, v, k_cache, v_cache.to(torch.float16), slots), {}),
        ("k_scale", call.args, {"k_scale": scale}), ("kv_layout", call.args, {"kv_layout": "X"}),
    ):
        written = [x.clone() for x in (k_cache, v_cache)]
        try:
            portattn.cache_append(*args, **kwargs, backend=target.backend)
        except ArgumentError as error:
            if named not in str(error):
                raise Mismatch(f"wanted an error that names {named!r}, got: {error}") from error
        else:
            raise Mismatch(f"{named}: wanted an ArgumentError")
        if not all(bitwise_equal(a, b) for a, b in zip(written, (k_cache, v_cache))):
            raise Mismatch(f"{named}: a cache was written before the error")


@rule("C-ERR")
def test_merge_states_refuses_what_does_not_fit(target: Target) -> None:
    x, l = torch.zeros(3, 4, 8, device=target.device), torch.zeros(3, 4, device=target.device)
    for args, kwargs in ((([x], [l, l]), {}), (([x, x[:2]], [l, l]), {}), (([x], [l[:, :2]]), {}), (([x], [l.half()]), {}),
                         (([x], [l]), {"sinks": torch.zeros(3, device=x.device)}),
                         (([x, x.half()], [l, l]), {})):
        try:
            portattn.merge_states(*args, **kwargs, backend=target.backend)
        except ArgumentError:
            continue
        raise Mismatch(f"shapes {[tuple(a.shape) for a in args[0]]} and {[tuple(a.shape) for a in args[1]]}, {kwargs.keys()}: wanted an ArgumentError")


# ------------------------------------------------------------------ C-DTYPE
@rule("C-DTYPE")
def test_mixtures_of_types_are_refused(target: Target) -> None:
    dense = target.build(BASE["dense"])
    q, k, v = dense.args
    for named, new in (("k", {"k": k.half()}), ("v", {"v": v.bfloat16()}),
                       ("q", {"q": q.double(), "k": k.double(), "v": v.double()}), ("q", {"q": q.int()}),
                       ("bias", {"bias": torch.zeros(9, device=q.device).half()}),
                       ("bias", {"bias": torch.zeros(9, device=q.device, dtype=torch.int32)}),
                       ("sinks", {"sinks": torch.zeros(4, device=q.device).half()}),
                       ("alibi_slopes", {"alibi_slopes": torch.zeros(4, device=q.device).half()})):
        hold_error(target, changed(dense, **new), named)
    paged = target.build(BASE["paged"])
    _, k_cache, v_cache, *_ = paged.args
    for named, new in (("k_cache", {"k_cache": k_cache.half(), "v_cache": v_cache.half()}),
                       ("v_cache", {"v_cache": v_cache.to(torch.float8_e5m2)}),
                       ("k_cache", {"k_cache": k_cache.to(torch.int8), "v_cache": v_cache.to(torch.int8)}),
                       ("k", {"k": paged.kwargs["k"].half()}),
                       ("v_cache", {"k_cache": k_cache.to(torch.float8_e5m2), "v_cache": v_cache.to(torch.float8_e4m3fn)}),
                       ("rotary_cos", {"rotary_cos": paged.kwargs["rotary_cos"].half(),
                                       "rotary_sin": paged.kwargs["rotary_sin"].half()})):
        hold_error(target, changed(paged, **new), named)


# ------------------------------------------------------------------ honest noes
def undeclared(target: Target) -> list[Case]:
    """Small cases, each of which no capability covers in exactly one respect."""
    base = Case("dense", "f32", heads=4, heads_kv=2, dim=64, lens=((37, 37),))
    tries = [base._replace(layout=n, page=16 if n == "paged" else 0, dtype=t) for n in ("dense", "varlen",
                                                                                        "paged") for t in ("f32", "f16", "bf16")]
    tries += [base._replace(dim=d) for d in (1, 3, 40, 257, 300, 512, 576, 1000)] + [base._replace(dim_v=d) for d in (1, 32, 300)]
    tries += [base._replace(lens=n) for n in (((1, 37),), ((5, 37),))] + [base._replace(heads=h) for h in (14, 34, 66)]
    tries += [base._replace(**x) for x in ({"causal": True}, {"window": (3, 0)}, {"cap": 2.0}, {"sinks": True},
                                           {"alibi": "alibi"}, {"bias": "bias"}, {"invariant": True})]
    paged = base._replace(layout="paged", page=16, lens=((1, 37),))
    tries += [paged._replace(page=p) for p in (1, 3, 24, 1056)] + [paged._replace(kv=k) for k in ("e4m3", "e5m2", "e4m3fnuz",
                                                                                                  "e5m2fnuz")]
    tries += [paged._replace(**x) for x in ({"append": True}, {"rope": 32}, {"scale": "scale"})]
    return tries


@rule("C-ERR", undeclared)
def test_what_is_not_declared_raises_exactly_its_reasons(target: Target, case: Case) -> None:
    """A forced backend never falls through: it runs, and then rightly, or NoBackendError carries the reasons that the manifest implies."""
    try:
        target.check(case)
    except NoBackendError as error:
        reasons = target.judge(error)
        if error.problem is None or not any(r.code in str(error) for r in reasons) or target.backend not in str(error):
            raise Mismatch(f"wanted backend and reasons in the text, got: {error}") from error
        if all(unmet(c, error.problem) == () for c in target.manifest.capabilities):
            raise Dishonest("declined although it is declared") from error


@rule("C-ERR")
def test_a_refused_call_writes_nothing(target: Target) -> None:
    """NoBackendError leaves out and caches as they were."""
    if not target.capabilities or all(1024 in c.head_dims and "paged" in c.layouts for c in target.capabilities):
        raise Declined("head_dim", "a head_dim that is not declared", "1024 is")
    call = target.build("paged-f32-h2x2-d1024-p4-q1k5-append")
    before = [x.clone() for x in call.args[1:3]]
    out = torch.full_like(call.args[0], 7.0)
    try:
        target.run(call, out=out)
    except NoBackendError as error:
        target.judge(error)
        if not bool((out == 7).all()) or not all(bitwise_equal(a, b) for a, b in zip(before, call.args[1:3])):
            raise Mismatch("a refused call wrote to out or to a cache") from error
        return
    raise Dishonest("head_dim 1024 ran although it is not declared")


@rule("C-ERR")
def test_an_order_of_one_does_not_fall_through(target: Target) -> None:
    """use(NAME) serves what it can and refuses what it cannot, as backend=NAME does."""
    call = target.build("dense-f32-h2x2-d1024-q1k5")
    with portattn.use(target.backend):
        try:
            portattn.attention(*call.args)
        except NoBackendError as error:
            if target.backend not in error.rejected:
                raise Mismatch(f"wanted the reasons of {target.backend} in: {error}") from error
            return
    if not any(1024 in c.head_dims for c in target.capabilities):
        raise Mismatch("use() of one backend fell through to another")
