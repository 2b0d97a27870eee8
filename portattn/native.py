"""The host side of the native kernels, for CUDA and HIP alike: a Call becomes one packed struct and one launch.

What depends only on shapes, strides and options is worked out once and kept in `bound.state`; a call then patches
the pointers into a ready struct and launches. The kernels find their work from the lengths on the device, so
nothing is planned and nothing waits. Struct layouts are those of include/portattn/params.h.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import struct
import threading
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from . import dialect, freed, overlaps
from .appended import Appended
from .device import maker
from .driver import Driver, Function, LaunchConfig
from .errors import KernelError
from .instances import (
    DECODE_ROWS,
    HEAD_DIMS,
    MAX_CUT_TILES,
    MAX_CUTS,
    PLAIN_CACHES,
    PLAIN_ROWS,
    QUEUES,
    SM90_CACHES,
    SM90_LARGE_TILES,
    SM90_ROWS,
    SM90_TILES,
    TILE_ROWS,
    TYPES,
    Instance,
    Limits,
    Shape,
    clusters_of,
    decode_shape,
    decode_shared,
    free_shape,
    head_dim_of,
    mixed_shape,
    plain_shape,
    prefill_shared,
    prefill_sm90_shape,
    small_instance,
    staged_prefill_shape,
)
from .problem import Call, Problem
from .registry import DIRECT
from .tensor_map import ALIGNMENT, BYTES, SWIZZLE_128, SWIZZLE_NONE, TensorMap

# ------------------------------------------------------------------ structs
# (name, struct code) in the order of params.h: Q pointer, q int64, i int32, f float, I uint32.
ATTENTION = tuple((n, "Q") for n in (
    "q k v out lse lengths block_table cu_q cu_k alibi sinks k_scale v_scale rotary_cos rotary_sin partial counters".split())) + tuple(
    (n, "q") for n in ("q_batch q_token q_head k_batch k_token k_head v_batch v_token v_head out_batch out_token out_head lse_batch "
                       "lse_token lse_head table_batch").split()) + tuple(
    (n, "i") for n in ("batch heads_q heads_kv group head_dim head_dim_v len_q len_k page_size page_shift window_left window_right alibi_batch "
                       "scale_batch_k scale_head_k scale_batch_v scale_head_v rotary_dim partial_rows cut_tiles lines line_heads workers "
                       "workers_shift").split()) + (
    ("workers_inverse", "I"), ("scale", "f"), ("softcap", "f"), ("v_factor", "f"), ("flags", "I"), ("mixed_stride", "i"))
APPEND = tuple((n, "Q") for n in "k v k_cache v_cache slots lengths block_table cu_q k_scale v_scale rotary_cos rotary_sin".split()) + tuple(
    (n, "q") for n in ("k_batch k_token k_head v_batch v_token v_head kc_page kc_token kc_head vc_page vc_token vc_head table_batch").split()) + tuple(
    (n, "i") for n in ("batch pages heads_kv head_dim head_dim_v len_q page_size scale_batch_k scale_head_k scale_batch_v scale_head_v "
                       "rotary_dim").split()) + (("k_factor", "f"), ("v_factor", "f"), ("flags", "I"), ("columns", "i"))
MERGE = tuple((n, "Q") for n in "outs lses sinks out lse".split()) + tuple((n, "q") for n in "outs_state lses_state rows".split()) + (
    ("states", "i"), ("heads", "i"), ("head_dim", "i"), ("flags", "I"))

(OUT_FLOAT, ALIGNED, OUT_ALIGNED, UNIFORM_PAGES, INVARIANT, LENGTHS_64, TABLE_64, CU_Q_64, CU_K_64, INTERLEAVED, ROTARY_FLOAT, SINKS_FLOAT, PAGED,
 TILED, MAPPED, BEFORE, PREFIX_SUMS, UNSEEN_INF, ALL_TILES, MAPPED_Q, MAPPED_OUT) = (1 << i for i in range(21))
COUNTING = {dialect.AFTER: 0, dialect.BEFORE: BEFORE, dialect.PREFIX_SUMS: PREFIX_SUMS}  # the flag that says what lengths count


def pack(fields: tuple[tuple[str, str], ...], values: dict[str, Any]) -> bytearray:
    """A struct with the values given and zeros elsewhere; an unknown name is an error."""
    unknown = values.keys() - {name for name, _ in fields}
    if unknown:
        raise KeyError(f"no such field: {', '.join(sorted(unknown))}")
    return bytearray(struct.pack("<" + "".join(code for _, code in fields), *(values.get(name, 0) for name, _ in fields)))


def pointers(fields: tuple[tuple[str, str], ...]) -> int:
    """How many of a struct's fields are pointers: they come first, and are all that a call patches."""
    return sum(code == "Q" for _, code in fields)


# ------------------------------------------------------------------ a call's constants
def _wide(x: Tensor | None) -> bool:
    return x is not None and x.dtype is torch.int64


def _strides(x: Tensor, batched: bool) -> tuple[int, int, int]:
    """(batch, token, head) strides of (B, S, H, D), or of (T, H, D)."""
    return tuple(x.stride()[:3]) if batched else (0, *x.stride()[:2])  # type: ignore[return-value]


def _aligned(x: Tensor, bytes_: int) -> bool:
    """Whether every row begins at a multiple of `bytes_`, if the first one does."""
    return all(n == 1 or s * x.element_size() % bytes_ == 0 for n, s in zip(x.shape[:-1], x.stride()[:-1]))


def scale_strides(scale: Tensor | float | None) -> tuple[int, int]:
    """(batch, head) strides of a scale: (), (H,), (B, H), or a number."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return 0, 0
    return (0, scale.stride(0)) if scale.dim() == 1 else (scale.stride(0), scale.stride(1))


def group_of(call: Call) -> int:
    """Query heads of a kv head."""
    return call.q.shape[-2] // call.k.shape[-2]


def most_tiles(call: Call, rows: int, at_most: int | None = None) -> int:
    """A bound for the tiles of `rows` packed rows that a call has, all kv heads; of sequences of `at_most` rows, if given."""
    heads_kv, group = call.k.shape[-2], group_of(call)
    longest = call.max_seqlen_q * group
    if at_most is not None:
        longest = min(longest, at_most)
    if call.q.dim() == 4:
        tiles = call.q.shape[0] * -(-longest // rows)
    else:
        batch = call.cu_seqlens_q.shape[0] - 1
        tiles = min(batch * -(-longest // rows), call.q.shape[0] * group // rows + batch)
    return tiles * heads_kv


def attention_values(call: Call, out: Tensor) -> dict[str, Any]:
    """Every field of AttentionParams but pointers and workspace. `out` has the strides that it will have."""
    q, k, v, paged = call.q, call.k, call.v, call.block_table is not None
    batched = q.dim() == 4
    names = ("batch", "token", "head")
    values: dict[str, Any] = {}
    for name, x, b in (("q", q, batched), ("k", k, k.dim() == 4), ("v", v, v.dim() == 4), ("out", out, batched)):
        values |= {f"{name}_{axis}": s for axis, s in zip(names, _strides(x, b))}
    group = q.shape[-2] // k.shape[-2]
    scale, v_factor = call.softmax_scale, 1.0
    if call.k_scale is not None and not isinstance(call.k_scale, Tensor):
        scale *= call.k_scale
    if call.v_scale is not None and not isinstance(call.v_scale, Tensor):
        v_factor = call.v_scale
    flags = (PAGED if paged else 0) | COUNTING[call.counting] | (UNSEEN_INF if call.lse_form == dialect.FLASH_ATTN_2 else 0)
    lengths = call.kv_lens if paged else call.seqused_k
    for bit, on in (
        (OUT_FLOAT, out.dtype is torch.float32), (ALIGNED, _aligned(k, 16) and _aligned(v, 16)),
        (OUT_ALIGNED, _aligned(out, 4 * out.element_size()) and out.shape[-1] % 4 == 0),
        (UNIFORM_PAGES, not paged or k.shape[1] % 16 == 0), (INVARIANT, call.batch_invariant), (LENGTHS_64, _wide(lengths)),
        (TABLE_64, _wide(call.block_table)), (CU_Q_64, _wide(call.cu_seqlens_q)), (CU_K_64, _wide(call.cu_seqlens_k)),
        (INTERLEAVED, call.rotary_interleaved), (ROTARY_FLOAT, call.rotary_cos is not None and call.rotary_cos.dtype is torch.float32),
        (SINKS_FLOAT, call.sinks is not None and call.sinks.dtype is torch.float32),
    ):
        flags |= bit if on else 0
    kb, kh = scale_strides(call.k_scale)
    vb, vh = scale_strides(call.v_scale)
    right = 0 if call.causal else call.window_right
    tiles = -(-call.max_seqlen_q * group // TILE_ROWS)
    return values | {
        "lse_batch": q.shape[1] * q.shape[2] if batched else 0, "lse_token": 1 if call.lse_form else q.shape[-2],
        "lse_head": q.shape[-3] if call.lse_form else 1, "table_batch": call.block_table.stride(0) if paged else 0,
        "batch": q.shape[0] if batched else call.cu_seqlens_q.shape[0] - 1, "heads_q": q.shape[-2], "heads_kv": k.shape[-2],
        "group": group, "page_shift": k.shape[1].bit_length() - 1 if paged and k.shape[1] & (k.shape[1] - 1) == 0 else -1,
        "head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "len_q": q.shape[1] if batched else 0,
        "len_k": min(k.shape[1] * call.block_table.shape[1], (1 << 31) - 1) if paged else k.shape[1] if call.cu_seqlens_k is None else 0,
        "page_size": k.shape[1] if paged else 1,
        "window_left": min(call.window_left, 1 << 30), "window_right": min(right, 1 << 30),
        "alibi_batch": call.alibi_slopes.stride(0) if call.alibi_slopes is not None and call.alibi_slopes.dim() == 2 else 0,
        "scale_batch_k": kb, "scale_head_k": kh, "scale_batch_v": vb, "scale_head_v": vh,
        "rotary_dim": 2 * call.rotary_cos.shape[-1] if call.rotary_cos is not None else 0,
        "partial_rows": min(TILE_ROWS, (call.max_seqlen_q * group + 1) // 2 * 2), "cut_tiles": min(MAX_CUT_TILES, tiles),
        "scale": scale, "softcap": call.softcap, "v_factor": v_factor, "flags": flags,
    }


def lines_of(heads_kv: int, workers: int) -> int:
    """How many kv heads are read side by side (schedule.h): as many as leave at most 2 % of the workers idle."""
    return max(n for n in range(1, heads_kv + 1) if heads_kv % n == 0 and n <= workers and workers % n * 50 <= workers)


def division(d: int) -> tuple[int, int]:
    """(inverse, shift) with a // d == (a * inverse >> 32) >> shift for 0 <= a < 2^31 and d > 1 (quotient_by of vec.h)."""
    shift = max(0, (d - 1).bit_length() - 1)
    inverse = ((1 << (32 + shift)) + d - 1) // d
    return (inverse, shift) if inverse < 1 << 32 else (0, 0)


def even_parts(parts: int, tiles: int) -> int:
    """At most `parts`, and at least nine tenths of them, so that parts of `tiles` of one size end where tiles do, or share a tile evenly."""
    even = tiles * (parts // tiles) if parts >= tiles else -(-tiles // -(-tiles // parts))
    return even if 10 * even >= 9 * parts else parts


def dealing(heads_kv: int, workers: int, lines: int | None = None, tiles: int | None = None) -> dict[str, int]:
    """How `workers` blocks share the work: the fields of schedule.h. With the number of `tiles` of a kv head, as few as can be share one if
    all sequences are equally long."""
    lines = lines_of(heads_kv, workers) if lines is None else lines
    each = workers // lines if tiles is None else even_parts(workers // lines, tiles * heads_kv // lines)
    inverse, shift = division(each)
    return {"lines": lines, "line_heads": heads_kv // lines, "workers": each, "workers_inverse": inverse, "workers_shift": shift}


def few_pay_tiles(call: Call, rows: int, heads_kv: int, limits: Limits) -> bool:
    """Whether sequences of few rows are faster as prefill tiles: decode reads all keys once for each 16 rows, on all multiprocessors; tiles
    read them once, a multiprocessor a tile, of which all together read as fast, and 8-bit keys nearly twice as fast. With batch_invariant no: other
    sequences must not decide it."""
    eight = call.k.dtype is not call.q.dtype
    if not look_equal(call) or call.batch_invariant or not (0 if eight else TILE_ROWS) < rows <= DECODE_ROWS or call.max_seqlen_q == 1 and not eight:
        return False
    pairs = heads_kv * (call.q.shape[0] if call.q.dim() == 4 else call.cu_seqlens_q.shape[0] - 1)
    if call.max_seqlen_q == 1 and pairs < 2 * limits.sms:  # whose lengths may differ much: a tile's keys are one multiprocessor's
        return False
    return 10 * pairs * -(-rows // TILE_ROWS) > (5 if eight else 9) * limits.sms * -(-pairs // limits.sms)


# By head size, the time of a row and key in larger tiles, to one in others.
LARGE_TILES_PACE = {64: 0.87, 80: 0.86, 96: 0.92, 128: 0.96}


def in_boxes(call: Call, flags: int) -> bool:
    """Whether tensor maps can bring all of q, keys and values (`tile_maps`); the driver has the last word."""
    group = group_of(call)
    return (flags & (ALIGNED | UNIFORM_PAGES) == ALIGNED | UNIFORM_PAGES and (call.k.dtype is call.q.dtype or str(call.k.dtype)[6:] in SM90_CACHES)
            and 10 * (SM90_ROWS % group) < SM90_ROWS and call.rotary_cos is None and _aligned(call.q, 16))


def large_tiles_pay(call: Call, dim: int, limits: Limits) -> bool:
    """Whether Hopper's larger tiles, if there are any, are sooner through on all multiprocessors, whole tiles and blocks of keys counted. With
    batch_invariant no: other sequences must not decide it."""
    if dim not in SM90_LARGE_TILES or call.batch_invariant:
        return False
    group = group_of(call)
    def work(tiles: tuple[int, int]) -> int:
        rows, keys = 64 * tiles[0], tiles[1]
        return rows * -(-most_tiles(call, rows - rows % group) // limits.sms) * keys * -(-call.max_seqlen_k // keys)
    return LARGE_TILES_PACE[dim] * work(SM90_LARGE_TILES[dim]) < work(SM90_TILES[dim])


def tile_rows(shape: Shape, group: int) -> int:
    """Packed rows of a prefill tile: where boxes bring q, those of whole tokens."""
    return shape.rows - shape.rows % group if shape.boxed else shape.rows


def attention_shape(call: Call, problem: Problem, dim: int, limits: Limits, boxed: bool) -> Shape:
    """The decode kernel where no sequence can have more rows than it is for, else the mixed one or, before which decode is launched on its
    own, the prefill kernel of Hopper, `boxed` or not, or of AMD's devices."""
    rows = call.max_seqlen_q * (problem.num_heads_q // problem.num_heads_kv)
    few = rows <= DECODE_ROWS
    same = problem.kv_dtype == problem.dtype
    if limits.wgmma and (same or boxed or not few and problem.kv_dtype in SM90_CACHES) and (
            not few or few_pay_tiles(call, rows, problem.num_heads_kv, limits)):
        return prefill_sm90_shape(problem.dtype, problem.kv_dtype, dim, boxed, boxed and same and large_tiles_pay(call, dim, limits))
    return (decode_shape if few else staged_prefill_shape if limits.staged else mixed_shape)(problem.dtype, problem.kv_dtype, dim, limits)


def units_of(call: Call, shape: Shape) -> int:
    """Of a tile, at most."""
    units = max(1, -(-call.max_seqlen_k // shape.unit))
    seen = call.window_left + call.max_seqlen_q  # by all rows of a sequence, where there is a window
    return units if call.window_left < 0 else min(units, (seen + shape.unit - 2) // shape.unit + 1)


def sharing(call: Call, shape: Shape, limits: Limits) -> dict[str, int]:
    """How a call's work is dealt out: in the decode kernel a part a resident block, in the mixed one smaller parts, whose
    number does not matter to the tiles beside them; none where every sequence has tiles."""
    group = group_of(call)
    if shape.rows and (call.q.dim() == 4 or not shape.unit):
        return {"lines": 1, "line_heads": 0, "workers": 0, "mixed_stride": limits.sms}
    units = most_tiles(call, TILE_ROWS, DECODE_ROWS if shape.rows else None) * units_of(call, shape)
    workers = min(shape.blocks * limits.sms * (3 if shape.rows else 1), units)
    assert group and workers, "an empty call is not launched"
    tiles = None if shape.rows or call.q.dim() == 3 else call.q.shape[0] * -(-call.q.shape[1] * group // TILE_ROWS)
    return dealing(call.k.shape[-2], workers, tiles=tiles) | {"mixed_stride": limits.sms}


def grid_of(call: Call, shape: Shape, values: dict[str, Any]) -> tuple[int, int]:
    """Blocks of a launch: one a worker; or one a tile and one a part; or one a tile; or one a multiprocessor, which takes tiles."""
    if not shape.rows:
        return values["lines"], values["workers"]
    if not shape.unit:
        tiles = most_tiles(call, tile_rows(shape, group_of(call)))
        return min(tiles, values["mixed_stride"]) if shape.keys else tiles, 1
    return most_tiles(call, shape.rows) + values["lines"] * values["workers"], 1


def look_equal(call: Call) -> bool:
    """Whether all sequences have as many queries as the longest, unless rows of q belong to none: lengths are the device's. With batch_invariant,
    nothing may depend on it."""
    return call.q.dim() == 4 or call.q.shape[0] == (call.cu_seqlens_q.shape[0] - 1) * call.max_seqlen_q


class Room(NamedTuple):
    """Workspace of a launch: 4-byte counters, and floats of partial states."""

    counters: int
    floats: int


def room(values: dict[str, Any], dim: int) -> Room:
    """What a decode launch needs."""
    if values["flags"] & INVARIANT:
        counters = values["batch"] * values["heads_kv"] * values["cut_tiles"]
        slots = counters * MAX_CUTS
    else:
        counters = values["lines"] * values["workers"]
        slots = 2 * counters
    return Room(QUEUES + counters, slots * values["partial_rows"] * (dim + 2))


# ------------------------------------------------------------------ plain calls
MAX_SEQUENCES = 1024  # kMaxSequences of plain.h
FREE_UNITS = 4  # that a block has at least, without clusters: less takes longer to merge than to compute


def is_plain(call: Call, values: dict[str, Any], dim: int) -> bool:
    """Whether plain.h can compute a call, or of a ragged one the sequences of one token: paged, and asking for little (PlainParams of params.h)."""
    kv, dtype = str(call.k.dtype)[6:], str(call.q.dtype)[6:]
    absent = (call.alibi_slopes, call.rotary_cos)
    if kv == dtype:  # scales as tensors are for 8-bit caches
        absent += tuple(x for x in (call.k_scale, call.v_scale) if isinstance(x, Tensor))
    return (
        (call.q.dim() == 3 or one_each(call)) and 0 < values["batch"] <= MAX_SEQUENCES
        and values["flags"] & ~(BEFORE | PREFIX_SUMS | UNSEEN_INF | SINKS_FLOAT) == ALIGNED | OUT_ALIGNED | UNIFORM_PAGES | PAGED and values["page_shift"] >= 4
        and values["head_dim"] == values["head_dim_v"] == dim and values["group"] <= PLAIN_ROWS
        and all(values[f"{x}_{axis}"] < 1 << 31 for x in "kv" for axis in ("batch", "token"))
        and all(x is None for x in absent) and _aligned(call.q, 16)
        and (kv == dtype or kv in PLAIN_CACHES)
    )


def plain_values(values: dict[str, Any], dealt: dict[str, int]) -> dict[str, Any]:
    """The fields of a launch of plain.h, but pointers and workspace. Without a window, window_left is so large that the kernel needs no test."""
    return values | dealt | {"window_left": values["window_left"] if values["window_left"] >= 0 else (1 << 31) - 1}


def pays_clusters(values: dict[str, Any], limits: Limits) -> bool:
    """Whether clusters are the faster blocks of plain.h: not from so many sequences on that blocks have whole ones, for which the half of the
    multiprocessors that clusters take is too few."""
    return 4 * values["batch"] * values["heads_kv"] < 3 * limits.sms


def free_shape_of(call: Call, problem: Problem, values: dict[str, Any], dim: int, limits: Limits) -> Shape:
    many = 2 * values["batch"] * values["heads_kv"] >= 3 * limits.sms
    return free_shape(problem.dtype, problem.kv_dtype, dim, limits, many, call.q.dim() == 3)


def one_each(call: Call) -> bool:
    """Whether no sequence has more than one token."""
    return (call.q.shape[1] if call.q.dim() == 4 else call.max_seqlen_q) == 1


def kernel_of(call: Call, problem: Problem, limits: Limits) -> Shape:
    """The kernel that serves a call whose pointers are aligned."""
    dim = head_dim_of(problem.head_dim, problem.head_dim_v)
    out = call.out if call.out is not None else torch.empty((*call.q.shape[:-1], call.v.shape[-1]), dtype=call.q.dtype, device="meta")
    values = attention_values(call, out)
    if one_each(call) and limits.clusters and is_plain(call, values, dim):
        if pays_clusters(values, limits):
            return plain_shape(problem.dtype, problem.kv_dtype, dim, limits, call.q.dim() == 3)
        return free_shape_of(call, problem, values, dim, limits)
    return attention_shape(call, problem, dim, limits, in_boxes(call, values["flags"]))


def plain_room(values: dict[str, Any], dim: int) -> Room:
    """What a launch of plain.h without clusters needs: of each block, states of the two tiles that its part may share."""
    rows = PLAIN_ROWS * values["lines"] * values["workers"]
    return Room(QUEUES + rows, 2 * rows * (dim + 4))


# ------------------------------------------------------------------ workspaces
class Workspaces:
    """Counters and partial states, one pair per stream. Between launches the counters are zero: the kernels put them back.

    A graph capture gets a pair of its own, from the graph's memory pool and zeroed by the graph, so that replays and
    eager calls, or two graphs, do not share one.
    """

    def __init__(self, device: torch.device, driver: Driver):
        self.device, self.driver = device, driver
        self.eager: dict[int, tuple[Room, int, int, Tensor]] = {}
        self.captured: dict[int, tuple[int, Room, int, int, Tensor]] = {}

    def _make(self, need: Room) -> tuple[int, int, Tensor]:
        counters = -(-need.counters // 64) * 64  # partial states start at a multiple of 256 bytes
        whole = torch.empty(counters + need.floats, dtype=torch.int32, device=self.device)
        whole[:counters].zero_()
        return whole.data_ptr() + 4 * counters, whole.data_ptr(), whole

    def get(self, stream: int, need: Room) -> tuple[int, int]:
        """(address of the partial states, address of the counters), both at least as large as needed."""
        if stream and torch._C._cuda_isCurrentStreamCapturing():  # the default stream, 0, cannot be captured: a microsecond saved
            return self._for_capture(stream, need)
        found = self.eager.get(stream)
        if found is None or found[0].counters < need.counters or found[0].floats < need.floats:
            if found is not None:
                need = Room(max(need.counters, found[0].counters), max(need.floats, found[0].floats))
            need = Room(max(need.counters, 4096), need.floats)
            found = self.eager[stream] = (need, *self._make(need))
        return found[1], found[2]

    def _for_capture(self, stream: int, need: Room) -> tuple[int, int]:
        capture = self.driver.capture_id(stream)
        found = self.captured.get(stream)
        if found is None or found[0] != capture or found[1].counters < need.counters or found[1].floats < need.floats:
            found = self.captured[stream] = (capture, need, *self._make(need))
        return found[2], found[3]


# ------------------------------------------------------------------ tensor maps
BOX_ROWS = 16  # of out
Mapped = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


def mapped(x: Tensor) -> Mapped:
    """Of (pages or B, page_size or S, H, D), or of (T, H, D) as one batch."""
    x = x if x.dim() == 4 else x[None]
    return x.dtype, tuple(x.shape), (*(16 if n == 1 else s for n, s in zip(x.shape[:3], x.stride())), 1)  # of one there is no stride to tell


class Mapping(NamedTuple):
    """A tensor that the copy engine knows: its place in TileMaps and among the pointers of a launch, the flag that says so, what TensorMap takes."""

    place: int
    pointer: int
    flag: int
    tensor: Mapped
    box: tuple[int, ...]
    swizzle: int = SWIZZLE_128


class TileMaps:
    """The second argument of prefill_sm90.h: k, v, q and out for the copy engine, as boxes of 64 columns; k and v of 8 bits, of all.

    Args:
        encode: the driver's cuTensorMapEncodeTiled. mappings: of what is mapped. numbers: TileMaps' other fields.
    """

    def __init__(self, encode: Any, mappings: Sequence[Mapping], numbers: tuple[int, int, int, int]):
        self._room = ctypes.create_string_buffer(4 * BYTES + 2 * ALIGNMENT)
        self.address = -(-ctypes.addressof(self._room) // ALIGNMENT) * ALIGNMENT
        struct.pack_into("<3iI", self._room, self.address - ctypes.addressof(self._room) + 4 * BYTES, *numbers)
        self.maps = [(m.pointer, m.flag, TensorMap(encode, *m.tensor, m.box, m.swizzle, self.address + m.place * BYTES)) for m in mappings]

    def move(self, addresses: Sequence[int], off: int = 0) -> None:
        """Has the maps describe the tensors at these pointers of a launch, but for those whose flags are in `off`."""
        for pointer, flag, tensor_map in self.maps:
            if tensor_map.pointer != addresses[pointer] and not off & flag:
                tensor_map.move(addresses[pointer])


def tile_maps(encode: Any, call: Call, out: Mapped, shape: Shape, dim: int, flags: int) -> tuple[Callable[[], TileMaps], int]:
    """(what makes TileMaps for such calls, the flags of what is mapped): what is aligned and has strides that the driver accepts; keys of 8 bits
    where the kernel takes nothing but boxes."""
    keys = shape.keys
    group, wanted = group_of(call), []
    rows = math.gcd(call.k.shape[1], keys) if call.block_table is not None else keys
    same = call.k.dtype is call.q.dtype
    if flags & (ALIGNED | UNIFORM_PAGES) == ALIGNED | UNIFORM_PAGES and (same or shape.boxed):
        columns, swizzle = (64, SWIZZLE_128) if same else (dim, SWIZZLE_NONE)
        wanted.append([Mapping(place, place + 1, MAPPED, mapped(x), (1, rows, 1, columns), swizzle) for place, x in enumerate((call.k, call.v))])
    tile = tile_rows(shape, group)
    if tile % group == 0 and call.rotary_cos is None:
        wanted.append([Mapping(2, 0, MAPPED_Q, mapped(call.q), (1, tile // group, group, 64))])
    if BOX_ROWS % group == 0 and flags & OUT_ALIGNED and out[0] is call.q.dtype:
        wanted.append([Mapping(3, 3, MAPPED_OUT, out, (1, BOX_ROWS // group, group, 64))])
    numbers = rows, keys // rows, tile, (0xFFFFFFFF // group + 1) % (1 << 32)
    found: list[Mapping] = []
    for mappings in wanted if encode else ():
        try:
            TileMaps(encode, mappings, numbers).move([call.q.data_ptr() & ~15] * 4)  # any address will do
            found += mappings
        except KernelError:
            pass  # such strides take the kernel's other copies
    return functools.partial(TileMaps, encode, found, numbers), functools.reduce(operator.or_, (m.flag for m in found), 0)


# ------------------------------------------------------------------ launches
class Record(NamedTuple):
    """A struct ready to be patched, and the pointers to it, and to its config, that a launch takes."""

    buffer: bytearray
    arguments: ctypes.Array
    pointer: ctypes.c_void_p  # to arguments
    config: LaunchConfig | None = None  # of a launch with attributes
    at_config: ctypes.c_void_p | None = None
    maps: TileMaps | None = None


def record(packed: bytearray, config: LaunchConfig | None = None, maps: TileMaps | None = None) -> Record:
    buffer = (ctypes.c_char * len(packed)).from_buffer(packed)
    arguments = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), maps and maps.address)
    at_config = None if config is None else ctypes.c_void_p(ctypes.addressof(config))
    return Record(packed, arguments, ctypes.c_void_p(ctypes.addressof(arguments)), config, at_config, maps)


class Launcher:
    """A kernel bound to constants and a grid: patches pointers and launches. Safe to use from several threads at once.

    `cluster`: blocks of a column that run together. `overlapping`: its blocks may begin before the stream's launch before has ended, whose
    kernel says from when on; it waits for that one where it needs to. `maps` makes the kernel's second argument, if it has one.
    """

    def __init__(self, function: Function, fields: tuple[tuple[str, str], ...], values: dict[str, Any], grid: tuple[int, int], threads: int,
                 about: str, cluster: int = 1, overlapping: bool = False, maps: Callable[[], TileMaps] | None = None):
        self.cluster, self.overlapping, self.maps = cluster, overlapping, maps
        self.plainly = cluster == 1 and not overlapping  # without attributes
        self.function, self.grid, self.threads, self.about = function, grid, threads, about
        self.fields, self.values = fields, values
        self.pointers = struct.Struct(f"<{pointers(fields)}Q").pack_into
        self.records: dict[int, list[Record]] = {0: []}
        # ctypes objects made once: converting the numbers at each call costs more than the call.
        numbers = (*grid, 1, threads, 1, 1, function.shared)
        self.handle, self.extended = ctypes.c_void_p(function.handle), function.driver.launch_ex
        self.raw = functools.partial(function.raw, self.handle, *map(ctypes.c_uint, numbers))

    def __call__(self, stream: int, off: int, addresses: Sequence[int]) -> None:
        """Launches with these pointers; `off` are flags that do not hold for them (alignment)."""
        pool = self.records.get(off)
        if pool is None:
            pool = self.records.setdefault(off, [])
        try:
            item = pool.pop()  # nobody else has it meanwhile
        except IndexError:
            config = None if self.plainly else self.function.config(self.grid, self.threads, self.cluster, self.overlapping)
            item = record(pack(self.fields, self.values | {"flags": self.values["flags"] & ~off}), config, self.maps and self.maps())
        self.pointers(item.buffer, 0, *addresses)
        if item.maps is not None:
            item.maps.move(addresses, off)
        code = self._start(stream, item)
        if code:
            self.function.failed(code, functools.partial(self._start, stream, item), self.grid, self.threads, self.about)
        pool.append(item)

    def _start(self, stream: int, item: Record) -> int:
        config = item.config
        if config is None:
            return self.raw(stream, item.pointer, None)
        config.stream = stream
        return self.extended(item.at_config, self.handle, item.pointer, None)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _tensor_address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, Tensor) else 0


class Device:
    """A GPU as the native kernels see it: its driver, limits and workspaces."""

    def __init__(self, driver: Driver, device: torch.device, arch: str, limits: Limits):
        self.driver, self.arch, self.limits = driver, arch, limits
        self.device = device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
        self.index = self.device.index
        self.workspaces = Workspaces(self.device, driver)
        self.tiles = threading.Lock()  # held over launches that take tiles from the stream's queue

    def function(self, instance: Instance, shared: int) -> Function:
        shared = 0 if self.limits.staged else shared  # static there
        return self.driver.function(self.index, self.arch, instance, shared, f"portattn_{instance.kernel}")


def append_values(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Any, v_scale: Any, call: Call | None = None,
                  slots: Tensor | None = None) -> dict[str, Any]:
    """Every field of AppendParams but pointers: for `cache_append` with `slots`, for an attention call with `call`."""
    names = ("batch", "token", "head")
    values: dict[str, Any] = {}
    for name, x in (("k", k), ("v", v)):
        values |= {f"{name}_{axis}": s for axis, s in zip(names, _strides(x, x.dim() == 4))}
    for name, x in (("kc", k_cache), ("vc", v_cache)):
        values |= {f"{name}_{axis}": s for axis, s in zip(("page", "token", "head"), x.stride()[:3])}
    kb, kh = scale_strides(k_scale)
    vb, vh = scale_strides(v_scale)
    number = lambda x: 1.0 if x is None or isinstance(x, Tensor) else x
    values |= {
        "pages": k_cache.shape[0], "page_size": k_cache.shape[1], "heads_kv": k.shape[-2], "head_dim": k.shape[-1], "head_dim_v": v.shape[-1],
        "scale_batch_k": kb, "scale_head_k": kh, "scale_batch_v": vb, "scale_head_v": vh, "k_factor": number(k_scale), "v_factor": number(v_scale),
        "flags": LENGTHS_64 if _wide(slots if call is None else call.kv_lens) else 0,
    }
    if call is not None:
        rotary = call.rotary_cos
        values |= {
            "batch": call.block_table.shape[0], "columns": call.block_table.shape[1], "table_batch": call.block_table.stride(0),
            "len_q": k.shape[1] if k.dim() == 4 else 0, "rotary_dim": 0 if rotary is None else 2 * rotary.shape[-1],
        }
        for bit, on in ((TABLE_64, _wide(call.block_table)), (CU_Q_64, _wide(call.cu_seqlens_q)), (INTERLEAVED, call.rotary_interleaved),
                        (ROTARY_FLOAT, rotary is not None and rotary.dtype is torch.float32)):
            values["flags"] |= bit if on else 0
        values["flags"] |= COUNTING[call.counting]
    return values


def merge_values(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> dict[str, Any]:
    """Every field of MergeParams but pointers; outs and lses are contiguous."""
    rows = outs.shape[1:-1].numel()
    return {"outs_state": rows * outs.shape[-1], "lses_state": rows, "rows": rows, "states": outs.shape[0], "heads": outs.shape[-2],
            "head_dim": outs.shape[-1], "flags": SINKS_FLOAT if sinks is not None and sinks.dtype is torch.float32 else 0}


SMALL_THREADS = 128  # of the append and merge kernels


class _Bound:
    """A kernel bound to calls of one shape, strides and options, launched on the tensors' device and torch's stream."""

    def __init__(self, device: Device):
        self.device, self.index = device, device.index

    def stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.index)

    def there(self) -> bool:
        return torch._C._cuda_getDevice() == self.index


class Append(_Bound):
    """New tokens into a cache: `cache_append`, or the first half of an attention call with k and v."""

    def __init__(self, device: Device, tensors: tuple[Tensor, Tensor, Tensor, Tensor], values: dict[str, Any], dtype: str, kv_dtype: str, about: str):
        super().__init__(device)
        self.tokens = tensors[0].shape[:-2].numel() if values["heads_kv"] else 0
        self.appended = Appended(*tensors)
        if self.tokens:
            function = device.function(small_instance("append", dtype, kv_dtype), 0)
            self.launch = Launcher(function, APPEND, values, (self.tokens, 1), SMALL_THREADS, about, overlapping=device.limits.overlap)

    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor | None, k_scale: Any, v_scale: Any,
                 call: Call | None = None) -> None:
        if not self.tokens:
            return
        if not self.there():
            with torch.cuda.device(self.index):
                return self(k, v, k_cache, v_cache, slots, k_scale, v_scale, call)
        lengths, table, cu_q, cos, sin = (0, 0, 0, 0, 0) if call is None else (
            _address(call.kv_lens), _address(call.block_table), _address(call.cu_seqlens_q), _address(call.rotary_cos), _address(call.rotary_sin))
        places = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        if places not in self.appended.apart:
            self.appended.look("cache_append" if call is None else "attention_paged", places, k, v, k_cache, v_cache)
        self.launch(self.stream(), 0, (*places, 0 if slots is None else slots.data_ptr(), lengths, table, cu_q,
                                       0 if k_scale is None else _tensor_address(k_scale), 0 if v_scale is None else _tensor_address(v_scale), cos, sin))


class Merge(_Bound):
    """`merge_states`."""

    def __init__(self, device: Device, outs: Tensor, lses: Tensor, sinks: Tensor | None, about: str):
        super().__init__(device)
        values = merge_values(outs, lses, sinks)
        self.rows = values["rows"]
        if self.rows:
            function = device.function(small_instance("merge", str(outs.dtype)[6:]), 0)
            blocks = -(-self.rows // (SMALL_THREADS // 32))
            self.launch = Launcher(function, MERGE, values, (blocks, 1), SMALL_THREADS, about, overlapping=device.limits.overlap)

    def __call__(self, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.there():
            with torch.cuda.device(self.index):
                return self(outs, lses, sinks)
        outs, lses = outs.contiguous(), lses.contiguous()
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
        lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device)
        if self.rows:
            self.launch(self.stream(), 0, (outs.data_ptr(), lses.data_ptr(), _address(sinks), out.data_ptr(), lse.data_ptr()))
        return out, lse


class Attention(_Bound):
    """Attention over dense, varlen or paged keys; with new tokens, they are appended first."""

    def __init__(self, device: Device, call: Call, problem: Problem, aligned: bool = True):
        super().__init__(device)
        out = call.out if call.out is not None else self._new_out(call)
        dim = head_dim_of(problem.head_dim, problem.head_dim_v)
        self.problem, self.values = problem, attention_values(call, out)
        self.launch, self.before, self.general = None, None, None
        self.plain, self.boxed = False, False  # kernels for aligned pointers
        self.out_form, self.mapped = mapped(out), 0
        self.turns: threading.Lock | None = None
        self.workspaces = device.workspaces
        self.lse_wanted = call.return_lse
        self.new_out, self.new_lse = maker(out.shape, out.dtype, out.device), maker(dialect.lse_shape(call), torch.float32, out.device)
        self.append = None
        if call.k_new is not None:
            values = append_values(call.k_new, call.v_new, call.k, call.v, call.k_scale, call.v_scale, call)
            self.append = Append(device, (call.k_new, call.v_new, call.k, call.v), values, problem.dtype, problem.kv_dtype, str(problem))
        self.empty = out.numel() == 0
        if self.empty:
            return
        self.room: Room | None = None  # plain.h's clusters need none
        plain = aligned and device.limits.clusters and is_plain(call, self.values, dim)
        if plain and one_each(call):
            if pays_clusters(self.values, device.limits):
                self.launch = self._plain_launcher(call, dim, device.limits.sms)
            self.launch = self.launch or self._free_launcher(call, dim, device.limits)
            self.plain = True
        if not self.plain:
            self._bind_general(call, dim, plain, aligned and in_boxes(call, self.values["flags"]))
        self.kv_mask = 15 if self.values["flags"] & ALIGNED else 0
        self.out_mask = 15 if self.mapped & MAPPED_OUT else 4 * out.element_size() - 1 if self.values["flags"] & OUT_ALIGNED else 0
        self.q_mask = 15 if self.plain or self.mapped & MAPPED_Q else 0
        # The pointers that such calls have besides q, k, v, out and lse: (place in the struct, the Call's field).
        names = {"lengths": "kv_lens" if call.block_table is not None else "seqused_k", "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k",
                 "alibi": "alibi_slopes"}
        places = [(i, Call._fields.index(names.get(name, name))) for i, (name, _) in enumerate(ATTENTION[5:15], 5)]
        self.present = [(place, field) for place, field in places if isinstance(call[field], Tensor)]
        self.start = self.launch if self.turns is None else self._take_turns
        self._prepare_direct(call)

    def _prepare_direct(self, call: Call) -> None:
        """What `direct` needs; a call that appends, or turns q, is not taken that way."""
        self.taken_directly = call.block_table is not None and self.append is None and call.rotary_cos is None
        more = [(place, Call._fields[field]) for place, field in self.present if Call._fields[field] in DIRECT]
        self.more = [(place, DIRECT.index(name)) for place, name in more]
        read = [(place, getattr(call, name)) for place, name in more if name in ("alibi_slopes", "sinks", "k_scale", "v_scale")]
        self.reaches = overlaps.Reaches(call.out, [(0, call.q), (1, call.k), (2, call.v), *read])

    def _launcher(self, shape: Shape, values: dict[str, Any], grid: tuple[int, int], cluster: int = 1,
                  maps: Callable[[], TileMaps] | None = None) -> Launcher:
        function = self.device.function(shape.instance, shape.shared)
        if shape.instance.kernel not in ("decode", "plain"):
            self.turns = self.device.tiles
        return Launcher(function, ATTENTION, values, grid, shape.threads, str(self.problem), cluster, self.device.limits.overlap, maps)

    def _plain_launcher(self, call: Call, dim: int, blocks: int, flags: int = 0) -> Launcher | None:
        """plain.h in clusters of at most so many blocks; None where the device does not run its clusters all at once. `flags`: TILED where the tiles'
        launch is next."""
        ragged = call.q.dim() == 3  # how many sequences are of one token is the device's to know
        shape = plain_shape(self.problem.dtype, self.problem.kv_dtype, dim, self.device.limits, ragged)
        function, heads = self.device.function(shape.instance, shape.shared), self.values["heads_kv"]
        units = self.values["batch"] * heads * units_of(call, shape)
        c = clusters_of(heads, units, blocks, functools.partial(function.clusters, shape.threads))
        if c is None:
            return None
        values = plain_values(self.values, dealing(heads, c.lines * c.size, c.lines)) | {"flags": self.values["flags"] | flags}
        return self._launcher(shape, values, (c.lines, c.size), c.size)

    def _free_launcher(self, call: Call, dim: int, limits: Limits) -> Launcher:
        """plain.h on all multiprocessors, without clusters."""
        shape = free_shape_of(call, self.problem, self.values, dim, limits)
        heads = self.values["heads_kv"]
        units = self.values["batch"] * heads * units_of(call, shape)
        values = plain_values(self.values, dealing(heads, max(1, min(shape.blocks * limits.sms, units // FREE_UNITS)), tiles=self.values["batch"]))
        self.room = plain_room(values, dim)
        return self._launcher(shape, values, (values["lines"], values["workers"]))

    def _bind_general(self, call: Call, dim: int, plain: bool, boxed: bool) -> None:
        """The other kernels; `plain`: of a ragged call, plain.h may compute the sequences of one token; `boxed`: q, keys and values may come in boxes
        alone."""
        problem, limits, maps = self.problem, self.device.limits, None
        shape = attention_shape(call, problem, dim, limits, boxed)
        if shape.keys:
            maps, self.mapped = tile_maps(self.device.driver.encode_map, call, self.out_form, shape, dim, self.values["flags"])
            if shape.boxed and self.mapped & (MAPPED | MAPPED_Q) != MAPPED | MAPPED_Q:  # the driver maps no such tensors
                return self._bind_general(call, dim, plain, False)
        self.boxed = shape.boxed
        values = self.values | sharing(call, shape, limits) | {"flags": self.values["flags"] | self.mapped}
        self.room = room(values, dim)
        grid = grid_of(call, shape, values)
        # Alone: what has parts for few rows too, what has none of few rows, and Hopper's tiles, which take those of few rows if they are told.
        if shape.unit or call.q.dim() == 4 or (shape.keys and look_equal(call) and not call.batch_invariant):
            alone = ALL_TILES if shape.keys else 0
            self.launch = self._launcher(shape, values | {"flags": values["flags"] | alone}, grid, maps=maps)
            return
        # Before tiles alone comes a launch for sequences of few rows. Where that is plain.h, it leaves multiprocessors to the tiles,
        # which take the others too when it ends: one that waits for memory and one that computes, side by side.
        if plain:
            self.before = self._plain_launcher(call, dim, limits.sms // 2, TILED)
        if self.before is not None:
            self.plain = True
            self.launch = self._launcher(shape, values | {"flags": values["flags"] | TILED}, grid, maps=maps)
            return
        self.launch = self._launcher(shape, values, grid, maps=maps)
        few = decode_shape(problem.dtype, problem.kv_dtype, dim, limits)
        values = self.values | sharing(call, few, limits) | {"flags": self.values["flags"] | TILED}
        self.room = room(values, dim)
        self.before = self._launcher(few, values, grid_of(call, few, values))

    @staticmethod
    def _new_out(call: Call) -> Tensor:
        return torch.empty((*call.q.shape[:-1], call.v.shape[-1]), dtype=call.q.dtype, device=call.q.device)

    def __call__(self, call: Call) -> Tensor | tuple[Tensor, Tensor]:
        if not self.there():
            with torch.cuda.device(self.index):
                return self(call)
        out = call.out
        if out is None:
            out = self.new_out()
        lse = self.new_lse() if call.return_lse else None
        if self.append is not None:
            self.append(call.k_new, call.v_new, call.k, call.v, None, call.k_scale, call.v_scale, call)
        if not self.empty:
            self._run(call, out, lse)
        return out if lse is None else (out, lse)

    def direct(self, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, kv_lens: Tensor, *others_and_out: Tensor | None) -> Any:
        """`__call__` on the tensors of a paged call, without a Call: registry.Bound.direct."""
        if not self.there():
            return None
        given = out = others_and_out[-1]
        if out is None:
            out = self.new_out()
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, kv_lens.data_ptr(), block_table.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0,
                     *(self.workspaces.get(stream, self.room) if self.room else (0, 0))]
        if (addresses[1] | addresses[2]) & self.kv_mask or addresses[3] & self.out_mask or addresses[0] & self.q_mask or 0 in addresses[:4]:
            return None
        for place, nth in self.more:
            addresses[place] = others_and_out[nth].data_ptr()
        if given is not None and self.reaches.near(addresses[3], addresses):
            return None
        lse = None
        if self.lse_wanted:
            lse = self.new_lse()
            addresses[4] = lse.data_ptr()
        self.start(stream, 0, addresses)
        return out if lse is None else (out, lse)

    def _run(self, call: Call, out: Tensor, lse: Tensor | None) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        q, k, v, o, within = call[0].data_ptr(), call[1].data_ptr(), call[2].data_ptr(), out.data_ptr(), call.within
        if not (q and k and v and o):
            freed.refuse_of(call)  # or one of them has no elements
        if within is not None:
            q, k, v = q + within[0], k + within[1], v + within[2]
        off = ((ALIGNED | MAPPED if (k | v) & self.kv_mask else 0) | (OUT_ALIGNED | MAPPED_OUT if o & self.out_mask else 0)
               | (MAPPED_Q if q & self.q_mask else 0))
        if off and self.plain or off & (ALIGNED | MAPPED | MAPPED_Q) and self.boxed:  # boxes need not bring rows to out
            if self.general is None:
                self.general = Attention(self.device, call, self.problem, aligned=False)
            return self.general._run(call, out, lse)
        addresses = [q, k, v, o, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, *(self.workspaces.get(stream, self.room) if self.room else (0, 0))]
        if lse is not None:
            addresses[4] = lse.data_ptr()
        for place, field in self.present:
            addresses[place] = call[field].data_ptr()
        self.start(stream, off, addresses)

    def _take_turns(self, stream: int, off: int, addresses: list[int]) -> None:
        """The launch before, and the tiles' beside it: no other thread's tiles may come between them, whose queue of the same stream the
        second would begin to read before they are through with it."""
        with self.turns:
            if self.before is not None:
                self.before(stream, off, addresses)
            self.launch(stream, off, addresses)


__all__ = ["Append", "Attention", "DECODE_ROWS", "Device", "HEAD_DIMS", "Instance", "Launcher", "Limits", "MAX_CUTS", "MAX_CUT_TILES", "Merge",
           "QUEUES", "Shape", "TILE_ROWS", "TYPES", "Workspaces", "append_values", "attention_values", "decode_shape", "decode_shared",
           "head_dim_of", "merge_values", "mixed_shape", "pack", "prefill_shared", "small_instance", "staged_prefill_shape"]
