"""C-GQA, C-DIM, C-STRIDE: heads, head dims, and where tensors may lie in memory."""

import torch

from .cases import Case
from .memory import spread
from .target import Declined, Target, bitwise_equal, rule
from .tolerance import Mismatch

# ------------------------------------------------------------------ C-GQA
GROUPS = ((1, 1), (2, 2), (3, 1), (9, 3), (10, 2), (12, 2), (7, 1), (14, 2), (8, 1), (24, 2), (16, 1), (5, 5), (28, 4))


@rule("C-GQA", [Case("dense", heads=q, heads_kv=kv, dim=16, lens=((5, 9),)) for q, kv in GROUPS]
      + [Case("varlen", heads=q, heads_kv=kv, dim=16, lens=((1, 5), (5, 9))) for q, kv in GROUPS[2:7]]
      + [Case("paged", "bf16", heads=q, heads_kv=kv, dim=64, page=16, lens=((1, 33), (1, 5))) for q, kv in GROUPS],
      [Case("paged", "f16", heads=q, heads_kv=kv, dim=128, page=16, lens=((1, 300), (5, 70), (1, 1))) for q, kv in GROUPS]
      + [Case("varlen", "bf16", heads=q, heads_kv=kv, dim=64, lens=((1, 300), (65, 70), (33, 33)), causal=True) for q,
         kv in GROUPS])
def test_groups(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-GQA", "dense-bf16-h32x4-d128-q1k300*8-biasb\ndense-bf16-h32x2-d128-q1k1023\ndense-bf16-h32x2-d128-q1k1024\n"
      "paged-bf16-h32x2-d128-p16-q1k1024+q1k1023\ndense-f32-h12x2-d16-q5k1000",
      "dense-bf16-h32x2-d128-q1k4096\ndense-bf16-h32x4-d128-q1k1500*64-biasb")
def test_decode_of_grouped_heads_over_long_and_padded_keys(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-GQA", [Case(layout, heads=q, heads_kv=kv, dim=16, page=4 * (layout == "paged"), lens=((n, 9),) * 2)
                for layout in ("dense", "varlen", "paged") for q, kv in ((6, 2), (12, 4), (4, 4), (21, 3)) for n in (1, 5)])
def test_each_query_head_reads_its_kv_head(target: Target, case: Case) -> None:
    """Every value of kv head n is n + 1: out of head h is exactly h // group + 1."""
    call = target.build(case)
    v = call.args[2]
    v.copy_((torch.arange(case.heads_kv, device=v.device) + 1.0)[:, None].expand_as(v))
    out = target.run(call)
    wanted = (torch.arange(case.heads) // (case.heads // case.heads_kv) + 1.0)[:, None].expand(out.shape).to(out.device)
    if not torch.allclose(out, wanted, rtol=1e-5, atol=0):
        got = out.reshape(-1, case.heads, case.dim)[0, :, 0].tolist()
        raise Mismatch(f"heads read kv heads {[round(x - 1, 2) for x in got]}, wanted {[h // (case.heads // case.heads_kv) for h in range(case.heads)]}")


# ------------------------------------------------------------------ C-DIM
DIMS = (1, 3, 7, 8, 40, 72, 80, 96, 112, 120, 136, 192, 200, 256)


@rule("C-DIM", [Case("dense", "bf16", dim=d, lens=((5, 17),), causal=True) for d in DIMS] + [Case("dense", dim=d,
                                                                                                  lens=((9, 17),)) for d in DIMS]
      + [Case("paged", "bf16", heads=8, dim=d, page=16, lens=((1, 9), (1, 40))) for d in DIMS],
      [Case("dense", "f16", heads=8, dim=d, lens=((64, 64),), causal=True) for d in (*range(8, 257, 8), 5, 13, 33, 65, 129, 255)]
      + [Case("varlen", "f16", dim=d, lens=((33, 33), (5, 17))) for d in DIMS]
      + [Case("paged", "f16", dim=d, page=16, lens=((33, 33), (5, 17))) for d in DIMS])
def test_head_dims(target: Target, case: Case) -> None:
    target.check(case)


UNEQUAL = ((32, 24), (24, 32), (192, 128), (64, 1), (1, 64), (96, 256), (40, 33))


@rule("C-DIM", [Case(layout, dtype, dim=d, dim_v=e, page=16 * (layout == "paged"), lens=((5, 17),) * 2, causal=True)
                for layout, dtype in (("dense", "f32"), ("varlen", "bf16"), ("paged", "bf16")) for d, e in UNEQUAL]
      + [Case("paged", "bf16", dim=192, dim_v=128, page=16, lens=((1, 40),) * 2)])
def test_values_of_another_head_dim(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-DIM", "dense-f16-h1x1-d512-q17k33\npaged-bf16-h8x2-d512-p16-q1k9+q1k70\nvarlen-bf16-h2x1-d512-q17k33*2-causal")
def test_head_dim_512(target: Target, case: Case) -> None:
    target.check(case)


@rule("C-DIM", "paged-bf16-h16x1-d576v512-p16-q1k70+q1k3\npaged-f32-h4x1-d576v512-p8-q3k20*2-causal")
def test_latent_attention_with_v_a_view_of_k(target: Target, case: Case) -> None:
    call = target.build(case)
    q, k_cache, _, table, lens = call.args
    target.check(call._replace(args=(q, k_cache, k_cache[..., :512], table, lens)))


# ------------------------------------------------------------------ C-STRIDE
def swapped(x):
    """Axes -3 and -2 swapped in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def every_second(x):
    big = x.new_full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), float("nan"))
    big[..., ::2, :, :] = x
    return big[..., ::2, :, :]


def wide_rows(x):
    """A slice of wider rows: head and row strides that are no multiple of anything."""
    big = x.new_full((*x.shape[:-1], x.shape[-1] + 5), float("nan"))
    big[..., 2 : 2 + x.shape[-1]] = x
    return big[..., 2 : 2 + x.shape[-1]]


def unaligned(x):
    """Starts one element after an allocation does."""
    flat = x.new_full((x.numel() + 1,), float("nan"))
    view = flat[1:].view(x.shape)
    view.copy_(x)
    return view


def last_stride_two(x):
    big = x.new_full((*x.shape, 2), float("nan"))
    big[..., 0] = x
    return big[..., 0]


PLAIN = """
dense-f32-h4x2-d32-q5k9*2
dense-bf16-h3x3-d64-q3k3*4-causal
dense-bf16-h4x2-d40-q5k33*2
varlen-bf16-h4x2-d64-q5k9+q1k33-causal
varlen-f32-h4x2-d32-q5k9+q1k33
paged-bf16-h4x2-d64-p16-q1k40*2
paged-f32-h4x2-d32-p4-q5k9*2
paged-bf16-h4x2-d64-p16-q5k40*2-append
"""


def restrided(target: Target, case: Case, change) -> None:
    """All of q, k, v (or the caches, and appended tokens) in another place, with NaN around."""
    call = target.build(case)
    args = tuple(change(x) if i < 3 else x for i, x in enumerate(call.args))
    target.check(call._replace(args=args, kwargs={n: change(x) if n in ("k", "v") else x for n, x in call.kwargs.items()}))


@rule("C-STRIDE", PLAIN)
def test_rows_and_heads_swapped_in_memory(target: Target, case: Case) -> None:
    restrided(target, case, swapped)


@rule("C-STRIDE", PLAIN)
def test_every_second_row(target: Target, case: Case) -> None:
    restrided(target, case, every_second)


@rule("C-STRIDE", PLAIN)
def test_slices_of_wider_rows(target: Target, case: Case) -> None:
    restrided(target, case, wide_rows)


@rule("C-STRIDE", PLAIN)
def test_unaligned_starts(target: Target, case: Case) -> None:
    restrided(target, case, unaligned)


@rule("C-STRIDE", "dense-f32-h4x2-d32-q5k9*2\nvarlen-bf16-h4x2-d64-q5k9+q1k33")
def test_a_last_stride_that_is_not_one(target: Target, case: Case) -> None:
    restrided(target, case, last_stride_two)


@rule("C-STRIDE", "dense-f32-h4x4-d64-q3k3*7\ndense-bf16-h4x4-d64-q33k33*2-causal\ndense-f16-h4x2-d128-q7k19*2-bias\n"
      "dense-f32-h4x2-d32-q5k9*2-bhsd\n"
      "dense-bf16-h4x2-d40-q5k9*2-bhsd-causal-w3.0-sinks", )
def test_layouts_over_either_memory_order(target: Target, case: Case) -> None:
    """layout= says what the axes mean; memory may hold them in either order."""
    call = target.build(case)
    target.check(call)
    target.check(call._replace(args=tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in call.args)))


@rule("C-STRIDE", "dense-bf16-h4x4-d64-q9k9*2-causal\nvarlen-f16-h2x2-d128-q9k9+q3k3-causal")
def test_q_k_v_packed_in_one_tensor(target: Target, case: Case) -> None:
    call = target.build(case)
    packed = torch.stack(call.args[:3], -3)
    target.check(call._replace(args=(*packed.unbind(-3), *call.args[3:])))


@rule("C-STRIDE", "paged-f16-h8x2-d64-p16-q1k40*2\npaged-f32-h4x2-d32-p3-q5k9*2\npaged-bf16-h4x2-d64-p16-q5k40*2-append\n"
      "paged-bf16-h4x2-d64-p16-q1k40*2-hnd")
def test_k_and_v_pages_interleaved_in_one_tensor(target: Target, case: Case) -> None:
    call = target.build(case)
    q, k_cache, v_cache, *rest = call.args
    both = torch.stack([k_cache, v_cache], 1)
    target.check(call._replace(args=(q, both[:, 0], both[:, 1], *rest)))


@rule("C-STRIDE", "dense-f32-h4x2-d32-q5k9*3\ndense-bf16-h4x2-d64-q1k33*3\ndense-bf16-h4x4-d64-q33k33*2-causal")
def test_expanded_tensors(target: Target, case: Case) -> None:
    """One k, v for the whole batch, and one for all heads, with stride 0."""
    call = target.build(case)
    q, k, v = call.args
    target.check(call._replace(args=(q, k[:1].expand_as(k), v[:1].expand_as(v))))
    target.check(call._replace(args=(q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v))))
    target.check(call._replace(args=(q[:1].expand_as(q), k, v)))


def rows_apart(x):
    """Rows of a wider tensor: what lies between them is no number, or no page."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan") if x.is_floating_point() else -1)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


@rule("C-STRIDE", "paged-bf16-h4x2-d64-p16-q1k40*2\npaged-f32-h4x2-d32-p4-q5k9*3-causal")
def test_strided_tables_and_lengths(target: Target, case: Case) -> None:
    call = target.build(case)
    q, k_cache, v_cache, table, lens = call.args
    wide = table.new_full((table.shape[0], 2 * table.shape[1] + 3), -1)
    wide[:, 1 : 1 + 2 * table.shape[1] : 2] = table
    long = lens.new_full((2 * len(lens),), 1 << 30)
    long[::2] = lens
    target.check(call._replace(args=(q, k_cache, v_cache, wide[:, 1 : 1 + 2 * table.shape[1] : 2], long[::2])))
    target.check(call._replace(args=(q, k_cache, v_cache, table.t().contiguous().t(), lens)))
    target.check(call._replace(args=(q, k_cache, v_cache, rows_apart(table), lens)))  # a part of an engine's wider table


@rule("C-STRIDE", "paged-f32-h4x2-d32-p4-q5k9*3-causal-alibib-scaleb\npaged-bf16-h8x2-d64-p16-q1k40*3-e4m3-scaleb\n"
      "paged-bf16-h8x2-d64-p16-q2k40*3-append-scaleb\nvarlen-f32-h4x2-d32-q5k9+q1k33-alibib\ndense-f32-h4x2-d32-q5k9*2-alibib")
def test_strided_slopes_and_scales(target: Target, case: Case) -> None:
    """A row a sequence, the rows apart; one row for all, and one number for all heads, with stride 0."""
    call = target.build(case)
    for change in (rows_apart, last_stride_two, lambda x: x[:1].expand_as(x), lambda x: x[:, :1].expand_as(x)):
        target.check(call._replace(kwargs={name: change(x) if name in ("alibi_slopes", "k_scale", "v_scale") else x
                                           for name, x in call.kwargs.items()}))


GUARDS = [Case("dense", "f16", dim=64, heads=2, heads_kv=1, lens=((1, n),), poison=True) for n in (1, 15, 16, 17, 31, 33, 63, 65,
                                                                                                   127, 128, 129, 200, 228)] \
    + [Case("dense", "f32", dim=64, heads=2, heads_kv=2, lens=((5, n),), poison=True) for n in (33, 65, 361, 364, 368)] \
    + [Case("dense", "bf16", dim=40, heads=2, heads_kv=2, lens=((17, n),), poison=True, bhsd=True, causal=True) for n in (17, 31,
                                                                                                                          65)]


@rule("C-STRIDE", GUARDS, [Case("dense", "f16", dim=64, heads=2, heads_kv=1, lens=((1, n),), poison=True) for n in range(126,
                                                                                                                         230)])
def test_nothing_beside_the_tensors_is_read(target: Target, case: Case) -> None:
    """Rows of NaN and Inf right before and after q, k and v in the same storage."""
    target.check(case)


def far(target: Target, case: Case | str, which: dict[int | str, tuple[int, int]]) -> None:
    """A call with some arguments spread over a large range: {position or name: (axis, stride)}."""
    call = target.build(case)
    args = list(call.args)
    kwargs = dict(call.kwargs)
    for name, (axis, stride) in which.items():
        holder = kwargs if isinstance(name, str) else args
        holder[name] = spread(holder[name], axis, stride)
    target.check(call._replace(args=tuple(args), kwargs=kwargs))


FAR_DENSE = "dense-f16-h4x2-d16-q3k5*3"


@rule("C-STRIDE", f"{FAR_DENSE}\ndense-bf16-h4x2-d64-q1k40*3")
def test_offsets_beyond_32_bits_between_batches(target: Target, case: Case) -> None:
    """Stride 2^31: a wrapped offset is negative and meets NaN; stride 2^32: it meets batch 0."""
    for name in (0, 1, 2):
        far(target, case, {name: (0, 1 << 31)})
    far(target, case._replace(lens=case.lens[:2]), {1: (0, 1 << 32), 2: (0, 1 << 32)})


@rule("C-STRIDE", f"{FAR_DENSE}\nvarlen-f16-h4x2-d16-q3k9+q7k9")
def test_offsets_beyond_32_bits_between_rows_and_heads(target: Target, case: Case) -> None:
    row = 1 if case.layout == "dense" else 0
    for name in (0, 1, 2):
        far(target, case._replace(lens=case.lens[-1:]), {name: (row, 1 << 30)})
    far(target, case._replace(lens=case.lens[:1]), {1: (row + 1, 1 << 32)})


@rule("C-STRIDE", "paged-f16-h4x2-d16-p4-q1k17+q1k9\npaged-bf16-h4x1-d64-p16-q1k170*2\npaged-f16-h4x2-d16-p4-q3k17+q5k9-causal")
def test_offsets_beyond_32_bits_between_pages(target: Target, case: Case) -> None:
    """Page id x page stride reaches 2^32 elements and more."""
    for name in (1, 2):
        far(target, case, {name: (0, 1 << 29)})


@rule("C-STRIDE", "paged-f16-h4x2-d16-p4-q1k17+q3k9-append\npaged-bf16-h4x2-d16-p4-q1k17*2-append-rope8")
def test_an_append_beyond_32_bits_writes_its_own_page(target: Target, case: Case) -> None:
    for name in (1, 2):
        far(target, case, {name: (0, 1 << 29)})


@rule("C-STRIDE", FAR_DENSE)
def test_out_and_bias_beyond_32_bits(target: Target, case: Case) -> None:
    call = target.build(case)
    shape = call.args[0].shape
    target.check(call, out=spread(torch.zeros(shape, dtype=call.args[0].dtype, device=target.device), 0, 1 << 31))
    far(target, case._replace(bias="bias"), {"bias": (0, 1 << 31)})


@rule("C-STRIDE", slow=True)
def test_more_than_65535_sequences_or_heads(target: Target) -> None:
    """The big axis does not fit a launch grid's y or z. One key each: out is its value."""
    n, draw = 65537, target.draw(2)
    ran = False
    for shape in ((n, 1, 1, 8), (1, 1, n, 8)):
        q, k, v = (draw.normal(*shape, dtype=torch.float16) for _ in range(3))
        if not bitwise_equal(target.attention(q, k, v), v):
            raise Mismatch(f"shape {shape}: out of one key is not its value")
        ran = True
    x = draw.normal(n, 1, 8, dtype=torch.float16)
    cu = torch.arange(n + 1, dtype=torch.int32, device=target.device)
    if any("varlen" in c.layouts for c in target.capabilities) and not bitwise_equal(target.attention_varlen(x, x, x, cu, cu, 1,
                                                                                                             1), x):
        raise Mismatch(f"{n} ragged sequences: out of one key is not its value")
    if not ran:
        raise Declined("layout", "dense", "none")


@rule("C-STRIDE", slow=True, devices=("cuda",))
def test_masks_with_more_than_32_bit_many_elements(target: Target) -> None:
    """A bool mask of 46341 x 46341 says causal; so does causal=True."""
    n, draw = 46341, target.draw(4)
    q, k, v = (draw.normal(1, n, 1, 16, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(n, n, dtype=torch.bool, device=target.device).tril_()
    a, b = target.attention(q, k, v, bias=mask), target.attention(q, k, v, causal=True)
    if not torch.allclose(a.float(), b.float(), rtol=0, atol=2e-2):
        raise Mismatch("a causal mask and causal=True differ")


@rule("C-STRIDE", slow=True, devices=("cuda",))
def test_gradients_with_more_than_32_bit_many_elements(target: Target) -> None:
    """B x H x Sq x D of more than 2^31: rows of the last batch get the gradients that they get alone."""
    draw = target.draw(6)
    q = draw.normal(400, 10496, 4, 128, dtype=torch.bfloat16)
    k = draw.normal(400, 128, 4, 128, dtype=torch.bfloat16)
    v = draw.normal(400, 128, 4, 128, dtype=torch.bfloat16)

    def grads(*xs):
        xs = [x.detach().requires_grad_() for x in xs]
        target.attention(*xs).sum().backward()
        return [x.grad[-1] for x in xs]

    for a, b in zip(grads(q, k, v), grads(q[-1:], k[-1:], v[-1:])):
        if not torch.allclose(a.float(), b.float(), rtol=0, atol=2e-2 * float(b.abs().max())):
            raise Mismatch("gradients of the last batch differ from those alone")


def largest_temporary(run, device: str) -> int:
    """Elements of the largest tensor that an operator makes while `run` runs (CPU), or bytes / 4 at the peak (CUDA)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    if torch.device(device).type == "cuda":
        run()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) // 4
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // 4)
            return result

    with Watch():
        run()
    return largest


@rule("C-NODROP", "dense-f32-h4x4-d8-q4096k4096\ndense-f32-h4x4-d8-q4096k4096-causal-w15.0\n"
      "varlen-f32-h4x4-d8-q4096k4096-causal-w15.0-cap3-sinks")
def test_declared_linear_memory_is_linear(target: Target, case: Case) -> None:
    """Where the serving capability says memory: linear, no tensor comes near the Sq x Sk scores of all heads."""
    if any(c.memory == "quadratic" and case.layout in c.layouts for c in target.capabilities):
        raise Declined("memory", "linear", "quadratic")
    call = target.build(case)
    scores = case.heads * case.qlen * case.klen
    found = largest_temporary(lambda: target.run(call), target.device)
    if found > scores // 8:
        raise Mismatch(f"a temporary of {found} elements where all scores are {scores}: that is not linear memory")
