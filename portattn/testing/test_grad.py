"""C-GRAD: gradients that match the reference's, or a clear no; never silently detached."""

import torch

import portattn
from portattn import reference

from .cases import Call, Case
from .target import Declined, Dishonest, Target, rule
from .tolerance import Mismatch, ulp

GRAD = """
dense-f32-h4x2-d32-q5k9*2
dense-f32-h4x2-d32-q9k5*2-causal
dense-f32-h4x2-d32v16-q33k70-causal-w20.0-cap3-sinks-alibi
dense-f32-h4x2-d32-q5k9*2-bias
dense-f32-h4x2-d32-q5k9*2-bhsd-sinks
dense-bf16-h4x2-d64-q17k33-causal
dense-f16-h6x2-d40-q17k33-cap5
varlen-f32-h4x2-d32-q5k9+q1k17+q9k5-causal
varlen-bf16-h4x4-d64-q17k17+q23k23-causal
varlen-f32-h4x2-d32-q5k0+q7k7+q0k3-sinks-alibi
varlen-f32-h4x2-d32-q5k9+q1k17-used
"""
LEARNED = ("bias", "alibi_slopes", "sinks")


def gradients(call: Call, run, dout: torch.Tensor, dlse: torch.Tensor | None, double: bool) -> dict[str, torch.Tensor]:
    """Gradients of q, k, v and of what else is learned, for given gradients of out and lse."""
    lift = (lambda x: x.detach().cpu().double()) if double else (lambda x: x.detach())
    leaves = {n: lift(x).clone().requires_grad_() for n, x in zip("qkv", call.args)}
    leaves |= {n: lift(call.kwargs[n]).clone().requires_grad_() for n in LEARNED if n in call.kwargs and call.kwargs[n].is_floating_point()}
    given = call._replace(args=(*(leaves[n] for n in "qkv"),
                                *call.args[3:])).replace(**{n: leaves[n] for n in LEARNED if n in leaves})
    out, lse = run(given)
    outputs, grads = [out], [dout.to(out.dtype).to(out.device)]
    if dlse is not None:
        finite = torch.isfinite(lse)
        outputs.append(lse.masked_fill(~finite, 0.0))
        grads.append(dlse.to(lse.dtype).to(lse.device))
    torch.autograd.backward(outputs, grads)
    return {n: x.grad for n, x in leaves.items()}


def hold_gradients(target: Target, call: Call, dout: torch.Tensor, with_lse: bool = False) -> None:
    oracle = getattr(reference, call.function)
    dlse = None
    if with_lse:
        _, lse = oracle(*call.args, **call.kwargs)
        dlse = target.draw(8).normal(*lse.shape).cpu()

    def ours(c: Call):
        if with_lse:
            return target.run(c, return_lse=True)
        return target.run(c), None

    got = gradients(call, ours, dout, dlse, double=False)
    want = gradients(call, lambda c: oracle(*c.args, **c.kwargs), dout, dlse, double=True)
    plain = gradients(call, lambda c: reference.plain(oracle, *c.args, **c.kwargs), dout, dlse, double=False)
    dtype = call.args[0].dtype
    for name, wanted in want.items():
        if got[name] is None:
            raise Mismatch(f"gradient of {name}: none came: silently detached")
        grad = got[name].detach().cpu().double()
        if bool(grad.isnan().any()):
            raise Mismatch(f"gradient of {name}: NaN")
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        floor = 1e-4 * largest + 1e-6 if dtype == torch.float32 else 4 * ulp(largest, dtype)
        limit = 2 * float((plain[name].cpu().double() - wanted).abs().max() if wanted.numel() else 0.0) + floor
        error = float((grad - wanted).abs().max()) if wanted.numel() else 0.0
        if error > limit:
            raise Mismatch(f"gradient of {name}: error {error:.3g} over the limit {limit:.3g}")


def grad_out(target: Target, call: Call) -> torch.Tensor:
    return target.draw(4).normal(*call.args[0].shape[:-1], call.args[2].shape[-1]).cpu()


@rule("C-GRAD", GRAD)
def test_gradients_match(target: Target, case: Case) -> None:
    """Of q, k, v, and of bias, slopes and sinks; rows without keys give and get 0."""
    call = target.build(case)
    hold_gradients(target, call, grad_out(target, call))


@rule("C-GRAD", "dense-f32-h4x2-d32-q9k5*2-causal-sinks\nvarlen-f32-h4x2-d32-q5k9+q3k0-cap3")
def test_gradients_through_lse(target: Target, case: Case) -> None:
    call = target.build(case)
    hold_gradients(target, call, grad_out(target, call), with_lse=True)


@rule("C-GRAD", "dense-f32-h4x2-d32-q5k9*2\nvarlen-bf16-h4x4-d64-q17k17+q23k23")
def test_gradients_of_any_strides_come_back(target: Target, case: Case) -> None:
    """Out's gradient is expanded (out.sum()), or transposed in memory."""
    call = target.build(case)
    shape = grad_out(target, call).shape
    hold_gradients(target, call, torch.ones(()).expand(shape))
    hold_gradients(target, call, grad_out(target, call).transpose(-3, -2).contiguous().transpose(-3, -2))


@rule("C-GRAD", "dense-f32-h2x2-d16-q2k2\ndense-bf16-h4x2-d32-q5k9")
def test_gradients_of_masked_rows_are_finite(target: Target, case: Case) -> None:
    call = target.build(case)
    bias = torch.ones(case.qlen, case.klen, dtype=torch.bool, device=target.device)
    bias[0] = False
    hold_gradients(target, call.replace(bias=bias), grad_out(target, call))


@rule("C-GRAD", "dense-f32-h4x2-d32-q5k9\nvarlen-f32-h4x2-d32-q5k9+q1k3\npaged-f32-h4x2-d32-p4-q5k9")
def test_where_undeclared_a_gradient_is_declined(target: Target, case: Case) -> None:
    """Inputs that require grad, grad mode on: a graph, or NoBackendError; under no_grad always a result."""
    call = target.build(case)
    q = call.args[0].requires_grad_()
    with torch.no_grad():
        target.run(call)
    try:
        out = target.run(call)
    except portattn.NoBackendError as error:
        if "grad" in {r.code for r in target.judge(error)}:
            return
        raise
    if not out.requires_grad:
        raise Mismatch("q requires grad, out does not: silently detached")
    out.sum().backward()
    if q.grad is None or not bool(torch.isfinite(q.grad).all()):
        raise Dishonest("grad is declared, but no finite gradient came")


@rule("C-GRAD", "dense-f32-h4x2-d32-q5k9\nvarlen-f32-h4x2-d32-q5k9+q1k3")
def test_gradients_of_gradients_match_or_are_refused(target: Target, case: Case) -> None:
    """A penalty on a gradient, as it is trained with: torch leaves it out where out's own gradient is a constant, unless told."""
    def penalized(call: Call, run, dtype: torch.dtype | None) -> torch.Tensor:
        q = call.args[0].detach().to("cpu" if dtype else target.device, dtype).requires_grad_()
        out = run(call._replace(args=(q, *call.args[1:])))
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        return torch.autograd.grad(out.sum() + first.square().sum(), q)[0].cpu().double()

    call = target.build(case)
    oracle = getattr(reference, call.function)
    wanted = penalized(call, lambda c: oracle(*c.args, **c.kwargs)[0], torch.float64)
    try:
        got = penalized(call, target.run, None)
    except RuntimeError:  # NoBackendError, too
        return
    if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
        raise Mismatch(f"gradient of a gradient's square: off by {float((got - wanted).abs().max()):g}")


@rule("C-GRAD")
def test_gradients_of_a_merge(target: Target) -> None:
    """Of outs, lses and sinks, through out and lse; a row without keys has none. Or NoBackendError."""
    draw = target.draw("merge")
    outs, lses, sinks = draw.normal(3, 2, 5, 4, 16), draw.normal(3, 2, 5, 4, gain=2.0), draw.normal(4)
    lses[1, 0] = lses[:, 1, 2] = -float("inf")
    sinks[0] = -float("inf")
    given = [x.requires_grad_() for x in (outs, lses, sinks)]
    try:
        out, lse = target.merge_states(outs, lses, sinks=sinks)
    except portattn.NoBackendError as error:
        if "grad" in {r.code for r in target.judge(error)}:
            return
        raise
    if not out.requires_grad or not lse.requires_grad:
        raise Mismatch("inputs require grad, the results do not: silently detached")
    wide = [x.detach().double().cpu().requires_grad_() for x in given]
    logits = torch.cat([wide[1], wide[2].expand(1, 2, 5, 4)])
    weights = logits.masked_fill(logits.isneginf().all(0), 0.0).softmax(0)[:-1]
    weights = torch.where(wide[1].isneginf(), 0.0, weights)
    want = (weights[..., None] * wide[0]).sum(0), logits.logsumexp(0)
    weight_of_lse = torch.where(want[1].detach().isneginf(), 0.0, 1.0)
    loss = lambda out, lse, factor: (out.sin().sum() + torch.where(factor > 0, lse, 0.0).sin().sum())
    expected = torch.autograd.grad(loss(*want, weight_of_lse), wide)
    got = torch.autograd.grad(loss(out, lse, weight_of_lse.to(out.device)), given)
    for name, a, b in zip(("outs", "lses", "sinks"), got, expected):
        if not torch.allclose(a.double().cpu(), b.nan_to_num(), rtol=1e-4, atol=1e-5):
            raise Mismatch(f"gradient of {name}: off by {float((a.double().cpu() - b).abs().max()):g}")


@rule("C-GRAD", "dense-f32-h4x2-d32-q5k9")
def test_out_with_an_input_that_requires_grad_is_an_argument_error(target: Target, case: Case) -> None:
    call = target.build(case)
    out = torch.empty_like(call.args[0])
    call.args[0].requires_grad_()
    try:
        target.run(call, out=out)
    except portattn.ArgumentError:
        return
    except portattn.NoBackendError as error:
        raise Declined("grad", "grad", "declined first") from error
    raise Mismatch("out= with an input that requires grad: wanted an ArgumentError")
