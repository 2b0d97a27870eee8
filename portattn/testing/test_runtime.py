"""C-NOSYNC, C-GRAPH, C-COMPILE: what a call may do besides computing, checked mode, graphs and torch.compile."""

import contextlib
import os

import torch

import portattn
from portattn import ArgumentError

from .cases import Call, Case
from .target import Declined, Target, bitwise_equal, rule
from .tolerance import Mismatch


# ------------------------------------------------------------------ C-NOSYNC
@contextlib.contextmanager
def checked():
    os.environ["PORTATTN_CHECK"] = "1"
    try:
        yield
    finally:
        del os.environ["PORTATTN_CHECK"]


def hold_checked(target: Target, call: Call, *named: str) -> None:
    """Under PORTATTN_CHECK=1 the call raises an ArgumentError that has all of `named` in it, and writes nothing."""
    before = [x.clone() for x in call.args[1:4] if isinstance(x, torch.Tensor)]
    with checked():
        try:
            getattr(portattn, call.function)(*call.args, **call.kwargs, backend=target.backend)
        except ArgumentError as error:
            missing = [n for n in named if n not in str(error)]
            if missing:
                raise Mismatch(f"checked mode: wanted {' and '.join(missing)} in: {error}") from error
            if not all(bitwise_equal(a, b) for a, b in zip(before, call.args[1:4])):
                raise Mismatch("checked mode: something was written before the error") from error
            return
    raise Mismatch(f"checked mode: wanted an ArgumentError that names {', '.join(named)}")


@rule("C-NOSYNC")
def test_checked_mode_names_the_sequence_with_a_wrong_length(target: Target) -> None:
    call = target.build("paged-f32-h4x2-d32-p4-q1k9*3-append")
    room = call.args[3].shape[1] * 4
    call.args[4][1] = room + 1
    hold_checked(target, call, "kv_lens", "1", str(room + 1))


@rule("C-NOSYNC")
def test_checked_mode_names_the_entry_with_a_wrong_page(target: Target) -> None:
    for bad in (-1, 10**6):
        call = target.build("paged-f32-h4x2-d32-p4-q1k9*3")
        call.args[3][2, 1] = bad
        hold_checked(target, call, "block_table", "2", str(bad))


@rule("C-NOSYNC")
def test_checked_mode_looks_only_at_entries_that_are_read(target: Target) -> None:
    with checked():
        target.check("paged-f32-h4x2-d32-p4-q1k9+q1k0+q1k4-poison")
        target.check("varlen-f32-h4x2-d32-q5k9+q3k0-used-poison")
        target.check("paged-f32-h4x2-d32-p4-q3k9*2-append-rope16-poison")


@rule("C-NOSYNC")
def test_checked_mode_reads_cu_seqlens(target: Target) -> None:
    base = "varlen-f32-h4x2-d32-q5k9+q1k17+q2k3"
    for position, name, at, value in ((3, "cu_seqlens_q", 1, 7), (4, "cu_seqlens_k", 2, 3), (3, "cu_seqlens_q", 0, 1),
                                      (4, "cu_seqlens_k", 3, 10**6)):
        call = target.build(base)
        call.args[position][at] = value
        hold_checked(target, call, name)
    call = target.build(base)
    hold_checked(target, call._replace(args=(*call.args[:5], 4, call.args[6])), "max_seqlen_q")
    hold_checked(target, call._replace(args=(*call.args[:6], 16)), "max_seqlen_k")
    hold_checked(target, call.replace(seqused_k=torch.tensor([9, 18, 3], dtype=torch.int32, device=target.device)), "seqused_k",
                 "1")


@rule("C-NOSYNC")
def test_checked_mode_refuses_a_negative_rotary_position(target: Target) -> None:
    call = target.build("paged-f32-h4x2-d32-p4-q3k9+q3k2-rope16")
    hold_checked(target, call, "kv_lens[1]", "2")


@rule("C-NOSYNC")
def test_checked_mode_refuses_slots_outside_of_the_cache(target: Target) -> None:
    from .test_paged import append_call

    call = append_call(target, "f32", 4, [3, 20, -1])
    with checked():
        try:
            target.run(call)
        except ArgumentError as error:
            if "slot_mapping" not in str(error) or "20" not in str(error):
                raise Mismatch(f"checked mode: wanted slot_mapping and 20 in: {error}") from error
            return
    raise Mismatch("checked mode: slot 20 of 20 was taken")


NOSYNC = """
dense-bf16-h4x2-d64-q33k65*2-causal-sinks
varlen-bf16-h4x2-d64-q33k65+q1k9-causal
paged-bf16-h8x2-d64-p16-q1k40+q1k9
paged-bf16-h8x2-d64-p16-q5k40+q1k9+q33k33-causal-w20.0-sinks
paged-bf16-h8x2-d64-p16-q2k40*2-append-rope64-i64
paged-bf16-h8x2-d64-p16-q1k40*2-e4m3-scaleh
varlen-bf16-h4x2-d64-q33k65+q1k9-used-i64
dense-f32-h4x2-d32-q5k9*2-cap3-alibi
"""


@rule("C-NOSYNC", NOSYNC, devices=("cuda",))
def test_no_call_waits_for_the_device(target: Target, case: Case) -> None:
    call = target.build(case)
    target.run(call)
    torch.cuda.synchronize(target.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.run(call)
        target.run(call)
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise Mismatch(f"a call waited for the device: {str(error).splitlines()[0]}") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")


@rule("C-NOSYNC", "paged-bf16-h8x2-d64-p16-q1k400*4\nvarlen-bf16-h4x2-d64-q64k64*3-causal", devices=("cuda",))
def test_no_allocation_depends_on_values(target: Target, case: Case) -> None:
    """Other lengths on the device, the same bytes and the same number of allocations."""
    call = target.build(case)

    def cost() -> tuple[int, int]:
        stats = torch.cuda.memory_stats(target.device)
        before = stats["allocation.all.allocated"], stats["allocated_bytes.all.allocated"]
        target.run(call)
        stats = torch.cuda.memory_stats(target.device)
        return stats["allocation.all.allocated"] - before[0], stats["allocated_bytes.all.allocated"] - before[1]

    target.run(call)
    first = cost()
    if case.layout == "paged":
        call.args[4].copy_(torch.tensor([1, 33, 0, 200]))
    else:
        call.args[4].copy_(torch.tensor([0, 5, 5, 40]))
    if (second := cost()) != first:
        raise Mismatch(f"(allocations, bytes) were {first}, with other lengths {second}")


# ------------------------------------------------------------------ C-GRAPH
GRAPH = """
dense-bf16-h8x8-d64-q128k128
dense-bf16-h4x2-d64-q5k40*2-causal-sinks
varlen-bf16-h4x2-d64-q33k65+q7k9-causal
paged-bf16-h8x2-d64-p16-q1k60*4
paged-bf16-h8x2-d64-p16-q1k60*4-splits4
paged-bf16-h8x2-d64-p16-q1k60*8-causal-w30.0-sinks
paged-bf16-h8x2-d64-p16-q1k60
paged-bf16-h8x2-d64-p16-q5k60+q1k33+q20k40-causal
paged-bf16-h8x2-d64-p16-q2k60*4-append-rope64
paged-bf16-h8x2-d64-p16-q1k60*4-e4m3-scaleh
"""


@rule("C-GRAPH", GRAPH, devices=("cuda",))
def test_a_captured_call_replays_with_other_values(target: Target, case: Case) -> None:
    """Tensors keep their place; values, lengths and tables change; the replay equals the reference."""
    call = target.build(case)
    pool = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, torch.Tensor)]
    saved = [x.clone() for x in pool]
    stream = torch.cuda.Stream(target.device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            target.with_lse(call)
    torch.cuda.current_stream(target.device).wait_stream(stream)
    torch.cuda.synchronize(target.device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out, lse = target.with_lse(call)
    except Exception as error:
        if all(c.graph == "none" for c in target.capabilities):
            raise Declined("graph", "full", f"none declared ({type(error).__name__})") from error
        raise
    draw = target.draw(1)
    for step in range(3):
        for x, was in zip(pool, saved):
            x.copy_(was)
        for x in (call.args[0], *(call.kwargs[n] for n in ("k", "v") if n in call.kwargs)):
            x.copy_(draw.normal(*x.shape))
        if case.layout == "paged":
            table, lens = call.args[3:5]
            table.copy_(table.roll(step + 1, 0))
            lens.copy_(torch.minimum(lens.roll(step, 0), torch.tensor([max(k - 17 * step, q) for q, k in case.lens],
                                                                      device=lens.device, dtype=lens.dtype)))
        elif case.layout == "varlen":
            call.args[1].copy_(draw.normal(*call.args[1].shape))
            call.args[4][1] -= 3 * step
        before = call.map(lambda x: x.clone())
        graph.replay()
        torch.cuda.synchronize(target.device)
        target.compare(before, out, lse)
        if "k" in call.kwargs:
            target.compare_caches(before, call.args[1], call.args[2])


# ------------------------------------------------------------------ C-COMPILE
COMPILE = """
dense-f32-h4x2-d32-q5k9*2-causal
varlen-f32-h4x2-d32-q5k9+q1k17-causal-w5.0
paged-f32-h4x2-d32-p4-q3k9*2-append-causal-rope16
"""
COMPILE_FULL = """
dense-bf16-h4x2-d64-q20k20-bhsd-sinks-cap3
dense-f32-h4x2-d32-q5k9*2-bias-alibi
paged-f32-h4x2-d32-p4-q1k9*2
paged-bf16-h8x2-d64-p16-q5k40+q1k9-causal
"""


@rule("C-COMPILE", COMPILE, COMPILE_FULL)
def test_compiles_as_one_graph(target: Target, case: Case) -> None:
    """fullgraph=True, twice: for these shapes, and for shapes marked dynamic; equal to the reference, strides as in eager."""
    torch._dynamo.reset()
    call = target.build(case)
    eager = target.run(call.map(lambda x: x.clone()))
    function = getattr(portattn, call.function)
    for dynamic in (False, True):
        compiled = torch.compile(lambda *a, **k: function(*a, **k, backend=target.backend), fullgraph=True, dynamic=dynamic,
                                 backend="aot_eager")
        fresh = target.build(case)
        before = fresh.map(lambda x: x.clone())
        with torch.no_grad():
            out = compiled(*fresh.args, **fresh.kwargs)
        if out.dtype != eager.dtype or out.stride() != eager.stride():
            raise Mismatch(f"compiled: wanted {eager.dtype} and strides {eager.stride()}, got {out.dtype} and {out.stride()}")
        target.compare(before, out, None)
        if "k" in call.kwargs:
            target.compare_caches(before, fresh.args[1], fresh.args[2])
    torch._dynamo.reset()


@rule("C-COMPILE", "dense-f32-h4x2-d32-q5k9*2-causal\nvarlen-f32-h4x2-d32-q5k9+q1k17\npaged-f32-h4x2-d32-p4-q3k9*2-append\n"
      "paged-f32-h4x2-d32-p4-q1k9*2")
def test_fake_tensors_have_the_shapes_strides_and_types_of_real_ones(target: Target, case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = target.build(case)
    real = target.with_lse(call.map(lambda x: x.clone()))
    with FakeTensorMode() as mode:
        fake = target.with_lse(call.map(mode.from_tensor))
    for name, a, b in zip(("out", "lse"), real, fake):
        if a is not None and (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
            raise Mismatch(f"{name}: real is {tuple(a.shape)}, {a.stride()}, {a.dtype}; fake is {tuple(b.shape)}, {b.stride()}, {b.dtype}")


def recorded_ops(call: Call, backend: str) -> list[tuple]:
    """(op, args, kwargs) of portattn's custom ops that a compiled call makes."""
    found = []

    def keep(module: torch.fx.GraphModule, example_inputs):
        class Record(torch.fx.Interpreter):
            def call_function(self, function, args, kwargs):
                if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and "portattn" in str(function):
                    overload = function if isinstance(function, torch._ops.OpOverload) else function.default
                    clone = lambda x: x.clone() if isinstance(x, torch.Tensor) else x
                    found.append((overload, tuple(map(clone, args)), {k: clone(v) for k, v in kwargs.items()}))
                return super().call_function(function, args, kwargs)

        return lambda *args: Record(module).run(*args)

    torch._dynamo.reset()
    function = getattr(portattn, call.function)
    torch.compile(lambda *a, **k: function(*a, **k, backend=backend), fullgraph=True, backend=keep)(*call.args, **call.kwargs)
    torch._dynamo.reset()
    return found


@rule("C-COMPILE", "dense-f32-h4x2-d32-q5k9*2-causal-sinks\nvarlen-f32-h4x2-d32-q5k9+q1k17\npaged-f32-h4x2-d32-p4-q1k9*2\n"
      "paged-f32-h4x2-d32-p4-q3k9*2-append-rope16")
def test_opcheck_passes(target: Target, case: Case) -> None:
    """Schema, fake implementation and AOT dispatch of the custom op behind the call; autograd where grad is declared."""
    call = target.build(case)
    target.run(call.map(lambda x: x.clone()))
    with torch.no_grad():
        ops = recorded_ops(call, target.backend)
    if not ops:
        raise Mismatch("a compiled call contains no portattn op")
    for op, args, kwargs in ops:
        torch.library.opcheck(op, args, kwargs)


@rule("C-COMPILE", "dense-f32-h4x2-d32-q5k9*2-causal\npaged-f32-h4x2-d32-p4-q1k9*2", slow=True)
def test_compiles_with_inductor(target: Target, case: Case) -> None:
    import shutil

    if torch.device(target.device).type == "cpu" and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise Declined("compiler", "a C++ compiler", "none on PATH")
    torch._dynamo.reset()
    call = target.build(case)
    function = getattr(portattn, call.function)
    compiled = torch.compile(lambda *a, **k: function(*a, **k, backend=target.backend) * 1.0, fullgraph=True)
    target.compare(call, compiled(*call.args, **call.kwargs), None)
    torch._dynamo.reset()


@rule("C-COMPILE", "dense-f32-h4x2-d32-q5k9*2-causal\nvarlen-f32-h4x2-d32-q5k9+q1k17")
def test_compiled_gradients(target: Target, case: Case) -> None:
    from .test_grad import grad_out, gradients

    if not target.declares("grad"):
        raise Declined("grad", "grad", "not declared")
    torch._dynamo.reset()
    call = target.build(case)
    function = getattr(portattn, call.function)
    compiled = torch.compile(lambda *a, **k: function(*a, **k, backend=target.backend), fullgraph=True, backend="aot_eager")
    dout = grad_out(target, call)
    got = gradients(call, lambda c: (compiled(*c.args, **c.kwargs), None), dout, None, double=False)
    want = gradients(call, lambda c: (target.run(c), None), dout, None, double=False)
    for name in want:
        if got[name] is None or not torch.allclose(got[name], want[name], rtol=1e-4, atol=1e-5):
            raise Mismatch(f"gradient of {name} differs between compiled and eager")
    torch._dynamo.reset()
