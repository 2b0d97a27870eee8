"""Lengths that do not fit their tensors are the caller's fault: results are wrong, but nothing beside the tensors is read or written."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

import portattn
from portattn import registry

pytestmark = pytest.mark.skipif(bool(registry.probe("cpu", "cpu")), reason="no CPU kernels here")


def inside(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor between NaN, the whole buffer)."""
    room = torch.full((shape[0] + 200, *shape[1:]), float("nan"))
    room[100:-100] = torch.randn(shape)
    return room[100:-100], room


@pytest.mark.parametrize("ends", [[0, 3, 9], [-2, 1, 4], [0, 50, 4], [0, 2**40, 2**62], [-(2**62), 2**62, 3], [7, 9, 11]], ids=str)
@pytest.mark.parametrize("of", ["q", "k", "both"])
def test_prefix_sums_past_the_rows(ends, of):
    (q, _), (k, _), (v, _), (out, around) = inside(4, 4, 16), inside(6, 2, 16), inside(6, 2, 16), inside(4, 4, 16)
    bad, cu_q, cu_k = torch.tensor(ends), torch.tensor([0, 1, 4]), torch.tensor([0, 3, 6])
    got = portattn.attention_varlen(q, k, v, bad if of != "k" else cu_q, bad if of != "q" else cu_k, 60, 60, out=out, backend="cpu")
    assert got.isfinite().all() and around[:100].isnan().all() and around[-100:].isnan().all()
    cache = torch.randn(2, 4, 2, 16)
    table, lens = torch.tensor([[0], [1]]), torch.tensor([4, 3])
    kw = dict(cu_seqlens_q=bad, max_seqlen_q=60, out=out, backend="cpu")
    assert portattn.attention_paged(q, cache, cache, table, lens, **kw).isfinite().all()
    new, _ = inside(4, 2, 16)
    assert portattn.attention_paged(q, cache, cache.clone(), table, lens, k=new, v=new, **kw).isfinite().all()
    assert around[:100].isnan().all() and around[-100:].isnan().all() and cache.isfinite().all()


def test_used_keys_past_a_sequence_are_not_the_next_ones():
    q, k, cu = torch.randn(4, 4, 16), torch.randn(6, 2, 16), torch.tensor([0, 3, 6])
    call = lambda used: portattn.attention_varlen(q, k, k, torch.tensor([0, 2, 4]), cu, 2, 3, seqused_k=torch.tensor(used), backend="cpu")
    assert torch.equal(call([5, 99]), call([3, 3]))


def test_rotary_tables_that_end_before_the_keys():
    (cos, _), (sin, _) = inside(3, 8), inside(3, 8)
    q, cache = torch.randn(1, 2, 4, 16), torch.randn(2, 4, 2, 16)
    out = portattn.attention_paged(q, cache, cache, torch.tensor([[0, 1]]), torch.tensor([7]), k=q[:, :, :2], v=q[:, :, :2], rotary_cos=cos,
                                   rotary_sin=sin, backend="cpu")
    assert out.isfinite().all() and cache.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, rows", [((4, 2), 1), ((16, 8), 1), ((4, 2), 20), ((4, 2), 60)])
@pytest.mark.parametrize("left", [36, 37])  # bfloat16 values are taken in pairs
def test_pages_left_of_every_window_may_be_anyones(heads, rows, dtype, left):
    unseen = 250 - rows - left
    cache, table = torch.randn(16, 16, heads[1], 64).to(dtype), torch.arange(16)[None].clone()
    q, call = torch.randn(1, rows, heads[0], 64).to(dtype), dict(window_size=(left, 0), return_lse=True, backend="cpu")
    want = portattn.attention_paged(q, cache, cache, table, torch.tensor([250]), **call)
    cache.view(256, heads[1], 64)[:unseen] = float("nan")
    table[0, : unseen // 16] = -1
    for got, expected in zip(portattn.attention_paged(q, cache, cache, table, torch.tensor([250]), **call), want):
        assert torch.equal(got, expected)


# ------------------------------------------------------------------ storages that were freed
def dense(sk: int = 3):
    return portattn.attention, {"q": (1, 2, 4, 8), "k": (1, sk, 2, 8), "v": (1, sk, 2, 8), "bias": (2, sk), "sinks": (4,), "alibi_slopes": (4,), "out": (1, 2, 4, 8)}, {}


def varlen():
    return portattn.attention_varlen, {"q": (4, 4, 8), "k": (6, 2, 8), "v": (6, 2, 8), "sinks": (4,), "out": (4, 4, 8)}, dict(
        cu_seqlens_q=torch.tensor([0, 1, 4]), cu_seqlens_k=torch.tensor([0, 3, 6]), seqused_k=torch.tensor([3, 2]), max_seqlen_q=3, max_seqlen_k=3)


def paged():
    return portattn.attention_paged, {"q": (1, 2, 4, 8), "k_cache": (2, 4, 2, 8), "v_cache": (2, 4, 2, 8), "k": (1, 2, 2, 8), "v": (1, 2, 2, 8), "rotary_cos": (8, 4),
                                      "rotary_sin": (8, 4), "k_scale": (2,), "v_scale": (2,), "out": (1, 2, 4, 8)}, dict(
        block_table=torch.tensor([[1, 0]]), kv_lens=torch.tensor([6]))


def copied():
    """Tensors that are copied first."""
    return portattn.attention_paged, {"q": (1, 2, 4, 8), "k_cache": (2, 4, 2, 8), "v_cache": (2, 4, 2, 8), "sinks": (4,)}, dict(
        block_table=torch.tensor([[1, 5, 0]])[:, ::2], kv_lens=torch.tensor([6, 9])[::2])


def swapped():
    return portattn.attention, {"q": (1, 4, 2, 8), "k": (1, 2, 3, 8), "v": (1, 2, 3, 8), "out": (1, 4, 2, 8)}, dict(layout="bhsd")


def heads_first():
    return portattn.cache_append, {"k": (3, 2, 8), "v": (3, 2, 8), "k_cache": (2, 2, 4, 8), "v_cache": (2, 2, 4, 8)}, dict(
        slot_mapping=torch.tensor([1, 5, -1]), kv_layout="HND")


def append():
    return portattn.cache_append, {"k": (3, 2, 8), "v": (3, 2, 8), "k_cache": (2, 4, 2, 8), "v_cache": (2, 4, 2, 8)}, dict(slot_mapping=torch.tensor([1, 5, -1]))


def fresh(kind, offset: int, dtype: torch.dtype) -> tuple:
    """(call, tensors): each tensor so many bytes from the start of a storage of its own."""
    call, shapes, more = kind()
    tensors = {}
    for name, shape in shapes.items():
        of = torch.float32 if name.endswith(("scale", "slopes")) else dtype
        whole = torch.ones(offset // of.itemsize + torch.Size(shape).numel(), dtype=of)
        tensors[name] = whole[offset // of.itemsize:].view(shape)
    return call, tensors | {name: x.clone() if isinstance(x, torch.Tensor) and x.is_contiguous() else x for name, x in more.items()}


NAMES = [(kind, name) for kind in (dense, varlen, paged, copied, swapped, append, heads_first)
         for name, x in (kind()[1] | kind()[2]).items() if not isinstance(x, (int, str))]


@pytest.mark.parametrize("known, offset", [(False, 64), (True, 0), (True, 1 << 20)])
@pytest.mark.parametrize("kind, name", NAMES, ids=[f"{kind.__name__}-{name}" for kind, name in NAMES])
def test_a_tensor_whose_storage_was_freed_is_named(kind, name, known, offset):
    """In a first call and in one like the last ones, which is known by its tensors; at any place in the storage."""
    registry.forget()
    for _ in range(4 if known else 0):
        call, tensors = fresh(kind, offset, torch.bfloat16)
        call(**tensors, backend="cpu")
    call, tensors = fresh(kind, offset, torch.bfloat16)
    written = {n: x.clone() for n, x in tensors.items() if n in ("out", "k_cache", "v_cache") and n != name}
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(portattn.ArgumentError, match=rf"{call.__name__}: {name}: wanted a storage of \d+ bytes, got one of 0"):
        call(**tensors, backend="cpu")
    assert all(torch.equal(tensors[n], x) for n, x in written.items())


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("form", ["lists", "stacked", "planned"])
@pytest.mark.parametrize("name", ["outs", "lses", "sinks"])
def test_a_state_whose_storage_was_freed_is_named(name, form, known):
    registry.forget()
    given = lambda: {"outs": torch.ones(2, 3, 4, 8), "lses": torch.ones(2, 3, 4), "sinks": torch.ones(4)}
    for _ in range(3 if known else 0):
        portattn.merge_states(**given(), backend="cpu")
    states = given()
    call = portattn.plan(portattn.merge_states, **states, backend="cpu") if form == "planned" else lambda: portattn.merge_states(**states, backend="cpu")
    if form == "lists":
        states |= {"outs": [x.clone() for x in states["outs"]], "lses": [x.clone() for x in states["lses"]]}
    freed = states[name][1] if form == "lists" and name != "sinks" else states[name]
    freed.untyped_storage().resize_(0)
    with pytest.raises(portattn.ArgumentError, match=rf"merge_states: {name}: wanted a storage"):
        call()


def test_without_elements_nothing_is_missing():
    registry.forget()
    for _ in range(4):
        call, tensors = fresh(lambda: dense(0), 0, torch.float32)
        for name in ("k", "v", "bias"):
            tensors[name].untyped_storage().resize_(0)
        assert (call(**tensors, backend="cpu") == 0).all()


@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 1 << 32, reason="where memory lies is Linux's to say")
def test_memory_at_low_addresses_is_memory():
    """Heaps of programs at fixed places, and what some drivers map."""
    libc, size = ctypes.CDLL(None), 1 << 20
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = libc.mmap(0x3_0000_0000, size, 3, 0x22, -1, 0)  # private, anonymous
    if not at or at >= 1 << 36:
        pytest.skip(f"the system gave memory at {at}")
    low = torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.float32)
    registry.forget()
    cache, q = low[:128].view(2, 4, 2, 8), torch.randn(1, 1, 4, 8)
    cache.copy_(torch.randn(2, 4, 2, 8))
    want = portattn.attention_paged(q, cache.clone(), cache.clone(), torch.tensor([[1, 0]]), torch.tensor([6]), backend="cpu")
    for place in (128, 128, 128, size // 4 - 256):  # where it was met before, and elsewhere
        other = low[place:place + 128].view(2, 4, 2, 8)
        other.copy_(cache)
        assert torch.equal(portattn.attention_paged(q, cache, other, torch.tensor([[1, 0]]), torch.tensor([6]), backend="cpu"), want)
    low.numpy()  # the mapping outlives what reads it
