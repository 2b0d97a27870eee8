"""C-ORDER, C-LSE, C-DTYPE, C-NODROP, C-TOL: the formula, its types and its accuracy."""

import math

import torch

from portattn import reference

from .cases import Call, Case, cases
from .target import Declined, Target, bitwise_equal, rule
from .tolerance import Mismatch

# ------------------------------------------------------------------ C-ORDER
ORDER = """
dense-f32-h4x2-d32-q5k9*2-cap2
dense-f32-h4x2-d32-q5k9*2-alibi
dense-f32-h4x2-d32-q5k9*2-alibib
dense-f32-h4x2-d32-q9k5*2-alibi
dense-f32-h4x2-d32-q5k9*2-bias
dense-f32-h4x2-d32-q5k9*2-biask
dense-f32-h4x2-d32-q5k9*2-biasb
dense-f32-h4x2-d32-q5k9*2-sinks
dense-f32-h4x2-d32-q5k9*2-cap2-alibi-bias-sinks
dense-f32-h4x2-d32-q5k9*2-cap2-bias-sinks-bhsd
dense-bf16-h4x2-d64-q17k65*2-causal-w30.0-cap5-sinks-alibi
dense-f16-h4x2-d64-q1k65*2-cap5-sinks-alibi-bias
dense-bf16-h4x2-d64-q33k144*2-causal-bias
varlen-f32-h4x2-d32-q5k9+q1k17+q9k5-cap2-alibi-sinks
varlen-bf16-h4x2-d64-q5k9+q1k70+q33k33-causal-cap2-alibib-sinks
paged-f32-h4x2-d32-p4-q5k9+q1k17+q9k9-cap2-alibi-sinks
paged-f16-h4x2-d64-p16-q1k70+q1k3-causal-cap2-alibib-sinks
paged-bf16-h32x8-d128-p32-q1k16+q1k17+q1k40-alibi
"""
ORDER_FULL = """
dense-f16-h8x2-d128-q129k257-causal-w100.0-cap20-sinks-alibi-bias
varlen-f16-h8x2-d128-q129k257+q1k240+q64k64-causal-w100.0-cap20-sinks-alibib
paged-f16-h8x2-d128-p16-q129k257+q1k240+q64k64-causal-w100.0-cap20-sinks-alibib
"""


@rule("C-ORDER", ORDER, ORDER_FULL)
def test_the_order_of_the_formula(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-ORDER", "dense-f32-h4x2-d32-q5k9*2-cap0.5-alibi\ndense-f32-h4x2-d32-q5k9*2-cap0.5-bias\n"
      "varlen-f32-h4x2-d32-q5k9*2-cap0.5-alibi\n"
      "paged-f32-h4x2-d32-p4-q5k9*2-cap0.5-alibi")
def test_softcap_comes_before_alibi_and_bias(target: Target, case: Case) -> None:
    """The added terms are far above the cap: capped after them, they would be lost."""
    call = target.build(case)
    for name, gain in (("alibi_slopes", 4.0), ("bias", 8.0)):
        if name in call.kwargs:
            call.kwargs[name] = call.kwargs[name] * gain
    target.check(call)


@rule("C-ORDER", "dense-f32-h4x2-d32-q5k9*2\nvarlen-f32-h4x2-d32-q5k9*2\npaged-f32-h4x2-d32-p4-q5k9*2")
def test_any_finite_scale(target: Target, case: Case) -> None:
    call = target.build(case)
    for scale in (0.0, -0.3, 1.0, 0.02):
        target.check(call, softmax_scale=scale)


@rule("C-ORDER", "dense-f32-h4x2-d32-q5k9*2-sinks-cap2\npaged-f32-h4x2-d32-p4-q1k9*2-sinks-cap2")
def test_the_sink_is_not_scaled_or_capped(target: Target, case: Case) -> None:
    call = target.build(case)
    call.kwargs["sinks"].copy_(torch.linspace(3.0, 9.0, case.heads))
    target.check(call, softmax_scale=0.01)


@rule("C-ORDER", "dense-f32-h4x2-d32-q5k9*2-sinks\nvarlen-bf16-h4x2-d32-q5k9+q3k3-sinks\npaged-f32-h4x2-d32-p4-q1k9*2-sinks")
def test_a_sink_of_minus_infinity_is_none(target: Target, case: Case) -> None:
    call = target.build(case)
    call.kwargs["sinks"][::2] = -math.inf
    target.check(call)


@rule("C-ORDER", "dense-f32-h4x2-d32-q5k9*2-sinks\ndense-bf16-h4x2-d32-q5k9*2-sinks\npaged-f16-h4x2-d32-p4-q1k9*2-sinks")
def test_sinks_of_either_type(target: Target, case: Case) -> None:
    call = target.build(case)
    sinks = call.kwargs["sinks"]
    target.check(call, sinks=sinks.to(call.args[0].dtype))
    target.check(call, sinks=sinks.float())


@rule("C-ORDER", "dense-bf16-h2x1-d64-q4k8-cap50\ndense-f32-h2x1-d64-q4k8-cap50\nvarlen-bf16-h2x1-d64-q4k8*2-cap50\n"
      "paged-bf16-h2x1-d64-p4-q1k8-cap50")
def test_softcap_saturates(target: Target, case: Case) -> None:
    """Scores up to 1e4: a tanh from exponentials overflows at 88 times the cap."""
    call = target.build(case)
    call.args[0].mul_(40.0)
    call.args[1].mul_(40.0)
    target.check(call, softmax_scale=1.0)


@rule("C-ORDER", "dense-f16-h2x1-d16-q5k40\ndense-bf16-h2x1-d16-q5k40\nvarlen-f16-h2x1-d16-q5k40*2\n"
      "paged-f16-h2x1-d16-p16-q1k40*2")
def test_large_logits_do_not_overflow(target: Target, case: Case) -> None:
    """q.k is beyond float16's range; then, with a bigger scale, the logits are beyond exp's."""
    call = target.build(case)
    call.args[0].mul_(30.0)
    call.args[1].mul_(30.0)
    for scale in (0.25, -0.25):
        out, _ = target.check(call, softmax_scale=scale)
        if not bool(torch.isfinite(out).all()):
            raise Mismatch("large logits: wanted finite values")


@rule("C-ORDER")
def test_huge_equal_logits_average_the_values(target: Target) -> None:
    """q = k = 133120 in bfloat16: logits of 7e10, all equal, whose difference to their maximum must be exactly 0."""
    x = torch.full((1, 16, 1, 16), 133120.0, dtype=torch.bfloat16, device=target.device)
    v = target.draw(1).normal(1, 16, 1, 16, dtype=torch.bfloat16)
    out = target.attention(x, x, v, softmax_scale=0.25)
    wanted = v.double().mean(1, keepdim=True).expand(1, 16, 1, 16)
    if not torch.allclose(out.double(), wanted, rtol=0, atol=1e-2):
        raise Mismatch(f"equal logits: wanted the average of the values, off by {float((out.double() - wanted).abs().max()):.3g}")


@rule("C-ORDER", "dense-f16-h4x4-d64-q7k7*2\ndense-f32-h2x2-d64-q40k40\ndense-bf16-h4x4-d64-q7k7*2")
def test_rows_filled_with_the_lowest_number(target: Target, case: Case) -> None:
    """Engines mask with finfo.min: a row of it is an average, not NaN; in a causal mask it takes no weight."""
    call = target.build(case)
    dtype = call.args[0].dtype
    low = torch.finfo(dtype).min
    bias = torch.zeros(len(case.lens), 1, case.qlen, case.klen, dtype=dtype)
    bias.masked_fill_(~torch.ones(case.qlen, case.klen, dtype=torch.bool).tril(), low)
    bias[..., :3] = low  # left padding: rows 0..2 hold nothing but the lowest number
    out, _ = target.check(call.replace(bias=bias.to(target.device)))
    if not bool(torch.isfinite(out).all()):
        raise Mismatch("rows of finfo.min: wanted finite values")


@rule("C-ORDER", [Case(lens=((1, n),), heads=1, heads_kv=1, dim=64) for n in (1, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257)]
      + [Case("paged", page=16, lens=((1, n),), heads=8, heads_kv=1, dim=64, dtype="bf16") for n in (33, 63, 64, 65, 240, 257)])
def test_weights_sum_to_one(target: Target, case: Case) -> None:
    """V = 1: out is exactly 1 within an ulp, so that a sum over half a wave shows."""
    call = target.build(case)
    call.args[2].fill_(1.0)
    out = target.run(call)
    if not torch.allclose(out.float(), torch.ones_like(out).float(), rtol=0, atol=1e-2 if case.dtype == "bf16" else 1e-5):
        raise Mismatch(f"V = 1: wanted 1, got {float(out.float().min()):g} .. {float(out.float().max()):g}")


BROADCAST = ((2, 1, 8, 9), (1, 4, 8, 9), (2, 4, 1, 9), (2, 4, 8, 1), (8, 9), (9,), (4, 8, 9), (1, 1, 1, 1), (2, 4, 8, 9),
             (2, 1, 1, 9))


@rule("C-ORDER", "dense-f32-h4x2-d16-q8k9*2\ndense-bf16-h4x2-d16-q8k9*2-bhsd")
def test_every_broadcast_form_of_bias(target: Target, case: Case) -> None:
    """Axes are (B, Hq, Sq, Sk) whatever the layout; forms, types and strides (expanded, transposed, a slice) differ."""
    call, draw = target.build(case), target.draw(3)
    for shape in BROADCAST:
        full = draw.normal(*shape, gain=2.0)
        for bias in (full, full.to(call.args[0].dtype), full > 0):
            target.check(call.replace(bias=bias))
    full = draw.normal(2, 4, 8, 9, gain=2.0)
    target.check(call.replace(bias=full[:, :1].expand(2, 4, 8, 9)))
    target.check(call.replace(bias=full.transpose(2, 3).contiguous().transpose(2, 3)))
    target.check(call.replace(bias=draw.normal(2, 4, 8, 19, gain=2.0)[..., 3:12]))


@rule("C-ORDER", slow=True)
def test_long_sequences_with_large_logits(target: Target) -> None:
    """Length over 16384 in float16, V = 1, and one key that outshines all others at the very end."""
    draw = target.draw(5)
    q = draw.normal(1, 1, 2, 16, dtype=torch.float16, gain=4.0)
    k = draw.normal(1, 16411, 1, 16, dtype=torch.float16, gain=4.0)
    v = draw.normal(1, 16411, 1, 16, dtype=torch.float16)
    k[:, -1] = q[:, 0, :1] * 4
    target.check(Call("attention", (q, k, v), {"softmax_scale": 1.0}))
    ones = target.attention(q, k, torch.ones_like(v), softmax_scale=0.01)
    if not torch.allclose(ones.float(), torch.ones_like(ones).float(), rtol=0, atol=2e-3):
        raise Mismatch("16411 keys, V = 1: wanted 1")


@rule("C-ORDER", "dense-f32-h4x2-d128-q33k65\nvarlen-f32-h4x2-d128-q33k65*2\npaged-f32-h4x2-d128-p16-q1k300")
def test_float32_stays_float32_whatever_torch_allows(target: Target, case: Case) -> None:
    """The global flags permit TF32 (and bfloat16 on CPUs); C-TOL of float32 does not."""
    saved = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        target.check(case)
    finally:
        torch.set_float32_matmul_precision(saved)


# ------------------------------------------------------------------ C-LSE
LSE = """
dense-f32-h4x2-d32-q5k9*2-causal
dense-f32-h4x2-d32-q5k9*2-bhsd
dense-bf16-h4x2-d32-q5k9*2-cap2-sinks-alibi-bias
varlen-bf16-h8x8-d64-q33k33+q7k7+q59k59
varlen-f32-h4x2-d32-q5k9+q1k3+q8k4-causal-w3.0-sinks
paged-f32-h4x2-d32-p4-q5k9*2-sinks-cap2-alibi
paged-f32-h4x2-d32-p4-q5k9+q1k3+q8k8-causal
paged-bf16-h8x2-d64-p16-q1k40*3-ragged
paged-f32-h8x2-d64-p16-q1k200*2-splits3
"""


@rule("C-LSE", LSE)
def test_lse_is_natural_float32_and_sequence_major(target: Target, case: Case) -> None:
    call = target.build(case)
    out, lse = target.run(call, return_lse=True)
    target.compare(call, out, lse)


@rule("C-LSE")
def test_lse_of_equal_scores_is_the_log_of_the_count(target: Target) -> None:
    q = torch.zeros(1, 1, 1, 8, device=target.device)
    for n in (1, 3, 64, 100):
        k = torch.zeros(1, n, 1, 8, device=target.device)
        _, lse = target.attention(q, k, k, return_lse=True)
        if abs(float(lse) - math.log(n)) > 1e-5:
            raise Mismatch(f"{n} equal scores of 0: wanted lse log {n} = {math.log(n):.6f}, got {float(lse):.6f}")


@rule("C-LSE", "dense-bf16-h4x4-d128-q1k700\ndense-f32-h4x2-d32-q5k90-cap3-sinks\npaged-f32-h4x2-d64-p16-q1k200")
def test_lse_of_two_halves_merges_to_the_whole(target: Target, case: Case) -> None:
    """What lse is for: two parts, merged by the reference, equal one pass."""
    call = target.build(case)
    sinks = call.kwargs.pop("sinks", None)
    split = case.klen - case.klen // 5
    if case.layout == "dense":
        q, k, v = call.args
        parts = [target.attention(q, x, y, return_lse=True, **call.kwargs)
                 for x, y in ((k[:, :split], v[:, :split]), (k[:, split:], v[:, split:]))]
    else:
        q, k, v, table, lens = call.args
        split = split // case.page * case.page
        parts = [target.attention_paged(q, k, v, table, torch.full_like(lens, split), return_lse=True, **call.kwargs),
                 target.attention_paged(q, k, v, table[:, split // case.page :], lens - split, return_lse=True, **call.kwargs)]
    out, lse = reference.merge_states([p[0] for p in parts], [p[1] for p in parts], sinks=sinks)
    target.compare(call.replace(sinks=sinks), out.to(call.args[0].dtype), lse.float())


# ------------------------------------------------------------------ C-DTYPE
TYPES = [c for base in ("dense-f32-h4x2-d32-q5k9*2", "varlen-f32-h4x2-d32-q5k9+q3k3", "paged-f32-h4x2-d32-p4-q1k9*2")
         for c in (Case.parse(base)._replace(dtype=d) for d in ("f32", "f16", "bf16"))]


@rule("C-DTYPE", TYPES)
def test_out_has_the_type_of_q(target: Target, case: Case) -> None:
    call = target.build(case)
    out = target.run(call)
    if out.dtype != call.args[0].dtype or str(out.device).split(":")[0] != torch.device(target.device).type:
        raise Mismatch(f"out: wanted {call.args[0].dtype} on {target.device}, got {out.dtype} on {out.device}")
    target.compare(call, out, None)


def _out_of(call: Call, dtype: torch.dtype, strided: bool, device: str) -> torch.Tensor:
    """A tensor of out's shape, full of NaN; strided: inside a bigger one, heads before rows."""
    shape = (*call.args[0].shape[:-1], call.args[2].shape[-1])
    if not strided:
        return torch.full(shape, math.nan, dtype=dtype, device=device)
    axes = list(range(len(shape)))
    axes[-3], axes[-2] = axes[-2], axes[-3]
    big = torch.full([*(shape[a] + 2 for a in axes[:-1]), shape[-1] + 5], math.nan, dtype=dtype, device=device)
    view = big[tuple(slice(1, 1 + shape[a]) for a in axes[:-1]) + (slice(2, 2 + shape[-1]),)]
    return view.permute(axes)


@rule("C-DTYPE", TYPES + cases("dense-bf16-h4x2-d32-q5k0*2\ndense-f16-h4x2-d32-q9k5*2-causal\ndense-bf16-h4x2-d40-q5k9*2-bhsd\n"
                               "varlen-bf16-h4x2-d40v24-q5k9+q3k0\npaged-bf16-h4x2-d64-p16-q5k9+q1k30-causal\n"
                               "paged-f16-h4x2-d64-p16-q1k0*2"))
def test_out_is_filled_and_returned(target: Target, case: Case) -> None:
    """Of q's type and of float32, contiguous and strided: all rows written, nothing around them."""
    call = target.build(case)
    for dtype in dict.fromkeys((call.args[0].dtype, torch.float32)):
        for strided in (False, True):
            out = _out_of(call, dtype, strided, target.device)
            result = target.run(call, out=out)
            if result is not out:
                raise Mismatch("out=: wanted the same object back")
            target.compare(call, out, None)
            if strided and out.numel():
                base = out._base if out._base is not None else out
                if int((~base.isnan()).sum()) != out.numel():
                    raise Mismatch("out=: values around the view were written")


@rule("C-DTYPE", "dense-f32-h4x2-d32-q5k9*2\nvarlen-bf16-h4x2-d40v24-q5k9+q3k0\npaged-bf16-h4x2-d64-p16-q1k30*2")
def test_a_new_out_is_contiguous(target: Target, case: Case) -> None:
    """.view() on it works on every backend, or on none."""
    call = target.build(case)
    if not (out := target.run(call)).is_contiguous():
        raise Mismatch(f"out: wanted contiguous, got strides {out.stride()} of shape {tuple(out.shape)}")


# ------------------------------------------------------------------ C-NODROP
ARGUMENTS = cases("""
dense-f32-h4x2-d32-q5k9*2-causal
dense-f32-h4x2-d32-q5k9*2-w2.1
dense-f32-h4x2-d32-q5k9*2-cap2
dense-f32-h4x2-d32-q5k9*2-sinks
dense-f32-h4x2-d32-q5k9*2-alibi
dense-f32-h4x2-d32-q5k9*2-bias
dense-f32-h4x2-d32-q5k9*2-biasb
varlen-f32-h4x2-d32-q5k9*2-causal
varlen-f32-h4x2-d32-q5k9*2-w2.1
varlen-f32-h4x2-d32-q5k9*2-cap2
varlen-f32-h4x2-d32-q5k9*2-sinks
varlen-f32-h4x2-d32-q5k9*2-alibi
varlen-f32-h4x2-d32-q5k9*2-used
paged-f32-h4x2-d32-p4-q5k9*2-causal
paged-f32-h4x2-d32-p4-q5k9*2-w2.1
paged-f32-h4x2-d32-p4-q5k9*2-cap2
paged-f32-h4x2-d32-p4-q5k9*2-sinks
paged-f32-h4x2-d32-p4-q5k9*2-alibi
paged-f32-h4x2-d32-p4-q5k9*2-rope16
paged-f32-h4x2-d32-p4-q5k9*2-append
paged-f32-h4x2-d32-p4-q5k9*2-scaleh
paged-f32-h4x2-d32-p4-q1k9*2-cap2
paged-f32-h4x2-d32-p4-q1k9*2-sinks
paged-f32-h4x2-d32-p4-q1k9*2-alibi
paged-f32-h4x2-d32-p4-q1k9*2-w2.1
dense-bf16-h4x2-d64-q1k65-cap2
dense-bf16-h4x2-d64-q33k65-cap2-sinks
""")


@rule("C-NODROP", ARGUMENTS)
def test_every_argument_changes_the_result(target: Target, case: Case) -> None:
    """With it the result is right; without it, it is another one."""
    call = target.build(case)
    given = [n for n in ("causal", "window_size", "softcap", "sinks", "alibi_slopes", "bias", "seqused_k", "rotary_cos", "k",
                         "k_scale")
             if n in call.kwargs]
    pairs = {"k": ("k", "v"), "rotary_cos": ("rotary_cos", "rotary_sin")}
    with_it, _ = target.check(call)
    for name in given:
        fresh = target.build(case).replace(**{n: None for n in pairs.get(name, (name,))})
        without = target.run(fresh)
        if torch.allclose(with_it.float(), without.float(), rtol=0, atol=1e-3):
            raise Mismatch(f"{name}: the result is the same without it")


@rule("C-NODROP", "paged-f32-h4x2-d32-p4-q5k9*2-rope16-append", )
def test_v_scale_and_pairing_are_honoured_alone(target: Target, case: Case) -> None:
    for change in ({"v_scale": 3.0}, {"k_scale": 0.25}, {"rotary_interleaved": True}):
        target.check(target.build(case), **change)


@rule("C-NODROP", "dense-f32-h4x2-d32-q5k90*2-causal\nvarlen-f32-h4x2-d32-q5k90+q1k33\npaged-f32-h4x2-d32-p16-q1k200+q1k3\n"
      "paged-bf16-h4x2-d32-p16-q1k200*2-sinks")
def test_hints_do_not_change_the_meaning(target: Target, case: Case) -> None:
    for splits in (1, 2, 7, 64):
        target.check(target.build(case), num_splits=splits)


@rule("C-NODROP", lambda target: [declared_case(target, c, f) for c in target.capabilities for f in (None, *c.features)
                                  if declared_case(target, c, f)])
def test_what_is_declared_runs(target: Target, case: Case) -> None:
    """One case for each capability and each feature that it names: a no is a lie of the manifest, whatever its reason."""
    from portattn.errors import NoBackendError

    from .target import Dishonest

    try:
        target.check(case)
    except NoBackendError as error:
        raise Dishonest(f"declared, but: {'; '.join(map(str, target.judge(error)))}") from None


def declared_case(target: Target, capability, feature: str | None) -> Case | None:
    """A small case within a capability that uses a feature, or None where a case cannot say it."""
    if feature in ("grad", "lse"):
        return None
    layouts = [n for n in ("dense", "varlen", "paged") if n in capability.layouts]
    if feature in ("append", "rotary", "kv_scale"):
        layouts = [n for n in layouts if n == "paged"]
    if feature == "bias":
        layouts = [n for n in layouts if n == "dense"]
    if not layouts:
        return None
    layout = layouts[-1] if feature is None else layouts[0]

    def inside(r, near: int) -> int:
        return min((n for n in (r.values or range(r.min, min(r.max, 1024) + 1)) if n in r), key=lambda n: abs(n - near))

    dim = inside(capability.head_dims, 64)
    dim_v = dim if capability.equal_head_dims or capability.head_dims_v is None else inside(capability.head_dims_v, dim)
    group = inside(capability.groups, 2)
    lengths = {"decode": (1, 37), "extend": (5, 37), "prefill": (37, 37)}
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[capability.dtypes[0]]
    case = Case(layout, short, heads=2 * group, heads_kv=2, dim=dim, dim_v=dim_v if dim_v != dim else 0,
                page=inside(capability.page_sizes, 16) if layout == "paged" else 0, lens=(lengths[capability.q_len[0]],) * 2)
    changes = {"causal": {"causal": True}, "window": {"window": (9, 0)}, "softcap": {"cap": 3.0}, "sinks": {"sinks": True},
               "alibi": {"alibi": "alibi"}, "bias": {"bias": "bias"}, "rotary": {"rope": dim // 2 * 2},
               "append": {"append": True},
               "kv_scale": {"scale": "scale"}, "batch_invariant": {"invariant": True}, None: {}}
    if feature == "rotary" and dim < 2:
        return None
    return case._replace(**changes[feature])


# ------------------------------------------------------------------ C-TOL
ACCURACY = """
dense-f32-h2x1-d64-q33k300
dense-f16-h2x1-d64-q33k300
dense-bf16-h2x1-d64-q33k300
dense-bf16-h2x1-d128-q1k700
varlen-bf16-h4x2-d64-q33k300+q17k128
varlen-f32-h4x2-d64-q33k300+q17k128
paged-bf16-h8x2-d128-p16-q1k700+q1k65
paged-f16-h8x2-d64-p16-q1k700+q1k65
paged-f32-h8x2-d64-p16-q1k700+q1k65
"""
ACCURACY_FULL = """
dense-f32-h2x1-d128-q65k2049
dense-bf16-h2x1-d128-q65k2049-causal
paged-bf16-h8x1-d128-p16-q1k4097*2
paged-f32-h8x1-d128-p16-q1k4097*2
varlen-f16-h8x2-d256-q65k513+q257k257-causal
"""


@rule("C-TOL", ACCURACY, ACCURACY_FULL)
def test_error_is_at_most_twice_plain_torchs(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-TOL", "dense-bf16-h2x1-d64-q9k1025\ndense-f16-h2x1-d64-q9k1025\ndense-f32-h2x1-d64-q9k257\n"
      "paged-bf16-h8x2-d64-p16-q1k257*2\n"
      "paged-f16-h8x2-d64-p16-q1k257*2\nvarlen-bf16-h2x1-d64-q9k257*2")
def test_values_with_a_common_offset(target: Target, case: Case) -> None:
    """V = 8 + noise: sums that are kept in 16 bits lose the noise."""
    call = target.build(case)
    call.args[2].add_(8.0)
    target.check(call)


@rule("C-TOL", "dense-f32-h4x2-d32-q5k9*2-causal")
def test_case(target: Target, case: Case) -> None:
    """What `--case` runs: any one case."""
    target.check(case)


@rule("C-DTYPE", lambda target: [Case("paged", "bf16", kv=kv, page=16, dim=64, lens=((1, 40), (1, 17)), scale=s, poison=True)
                                 for kv in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz") for s in ("", "scaleh")])
def test_the_cache_type_decides_how_its_bytes_are_read(target: Target, case: Case) -> None:
    """e4m3fn bytes read as e4m3fnuz are off by 2, and -0 becomes NaN."""
    target.check(case)


@rule("C-DTYPE", "paged-bf16-h4x2-d64-p16-q1k40*2-e4m3", )
def test_every_byte_of_a_cache_has_its_value(target: Target, case: Case) -> None:
    """One key: out is its value, for all 256 bytes but NaN and Inf, with scale 1 and another."""
    for kv in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        dtype = getattr(torch, kv)
        if not any(kv in c.kv_dtypes for c in target.capabilities):
            continue
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        codes.view(torch.uint8)[~torch.isfinite(codes.float())] = 0
        cache = codes.view(torch.uint8).view(4, 1, 1, 64).view(dtype).to(target.device)
        q = torch.zeros(4, 1, 1, 64, dtype=torch.bfloat16, device=target.device)
        table = torch.arange(4, dtype=torch.int32, device=target.device)[:, None]
        lens = torch.ones(4, dtype=torch.int32, device=target.device)
        for scale in (None, 0.5):
            out = target.attention_paged(q, torch.zeros_like(cache.view(torch.uint8)).view(dtype), cache, table, lens,
                                         **({} if scale is None else {"k_scale": scale, "v_scale": scale}))
            wanted = (codes.float() * (scale or 1.0)).to(torch.bfloat16).view(4, 1, 1, 64)
            if not bitwise_equal(out.cpu(), wanted):
                bad = int((out.cpu() != wanted).flatten().nonzero()[0])
                raise Mismatch(f"{kv} byte {bad:#x}: wanted {float(wanted.flatten()[bad]):g}, got {float(out.flatten()[bad]):g}")
    if not any(c.kv_dtypes for c in target.capabilities):
        raise Declined("kv_dtype", "an 8-bit cache", "none declared")
