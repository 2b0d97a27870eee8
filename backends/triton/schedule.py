"""From a call to a launch: which mode, which blocks, how many programs; all from shapes, never from values on the device.

    Machine   what the device offers: architecture, multiprocessors, shared memory, which 8-bit types it converts
    Config    block sizes, from tuning.yaml; Hopper, those of hopper.py
    Shape     what a call's compiled kernel depends on; `attend_spec` turns it into a launch.Spec
"""

from __future__ import annotations

import fnmatch
import functools
import os
from typing import Any, NamedTuple

import torch

from .launch import POINTER, Spec, interpreting

SPLIT_ROWS = 64  # calls with at most this many packed rows a sequence run as split programs
INVARIANT_KEYS = 1024  # batch_invariant: keys a part, whatever the batch
FULL_WAVES = 4  # parts per resident program where there is work for many: the last wave is then short
SHORT_KEYS = 1024  # up to here, one loop that masks every tile beats two loops where matrix instructions are asynchronous
MAX_SEARCH = 1024  # sequences that a program searches at once for its item; larger batches are not split

FORMATS = {
    torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}


class Machine(NamedTuple):
    """arch "sm_90" or "gfx942" ("" under the interpreter); shared memory a program may use, in bytes."""

    arch: str
    multiprocessors: int
    shared: int
    wave: int = 32

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether Triton converts this 8-bit type in hardware here; elsewhere the kernel does it by arithmetic."""
        if self.arch.startswith("sm_"):
            number = int("".join(c for c in self.arch[3:] if c.isdigit()))
            return dtype == torch.float8_e5m2 or (dtype == torch.float8_e4m3fn and number >= 89)
        if self.arch == "gfx942":
            return dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        if self.arch == "gfx950" or self.arch.startswith("gfx12"):
            return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return False


    @property
    def wgmma(self) -> bool:
        """Whether matrix instructions are asynchronous here."""
        return self.arch.startswith(("sm_9", "sm_10", "sm_11"))


class Config(NamedTuple):
    bm: int
    bn: int
    warps: int
    stages: int

    def smaller(self) -> "Config | None":
        """The next configuration to try where this one needs too much shared memory."""
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        if self.bn > 16:
            return self._replace(bn=self.bn // 2)
        if self.bm > 16:
            return self._replace(bm=self.bm // 2)
        return None


class Hopper(NamedTuple):
    """Blocks of hopper.py: consumer groups of 64 rows, keys a tile, tiles in a ring, registers of a consumer's thread, whether
    groups take turns at issuing matmuls, and for how many keys at most."""

    groups: int
    bn: int
    stages: int
    registers: int
    turns: int
    keys: int = 1 << 31


@functools.lru_cache(maxsize=None)
def _tables(path: str) -> tuple[dict, ...]:
    import yaml

    with open(path, encoding="utf-8") as f:
        return tuple(yaml.load(f, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def tables() -> tuple[dict, ...]:
    """This machine's own record, if `portattn tune` wrote one, then the shipped table."""
    from portattn import config

    own = os.path.join(config.cache_dir(), "triton-tuning.yaml")
    shipped = os.path.join(os.path.dirname(__file__), "tuning.yaml")
    return (_own(own) if os.path.exists(own) else ()) + _tables(shipped)


@functools.lru_cache(maxsize=None)
def _own(path: str) -> tuple[dict, ...]:
    """The tables of a record; () with a note for the doctor where it is not one: what speeds calls up must not end them."""
    from portattn import codeobjects

    try:
        found = _tables(path)
        wrong = "" if found and all(map(_is_table, found)) else "not of the form of tuning.yaml"
    except Exception as exc:  # unreadable, cut off, or no YAML
        wrong = " ".join(f"{type(exc).__name__}: {exc}".split())[:200]
    if wrong:
        codeobjects.note(path, f"{path} is not used: {wrong}; delete it, or run portattn tune again")
        return ()
    return found


_ROWS = {"tiles": (4,), "splits": (3,), "tiles32": (4,), "splits32": (3,)}  # numbers of a configuration; every class has one
_MORE = {"gather": (4,), "gather8": (4,), "mixed": (5,), "gather32": (4,), "mixed32": (5,), "hopper": (5,), "hopper_short": (6,)}
# Whose rows a kind takes: of these the first that a table has.
_LIKE = {"gather8": ("gather8", "gather"), "chunks": ("gather", "mixed"), "chunks8": ("gather8", "gather", "mixed")}


def _is_table(table: Any) -> bool:
    """Whether a table has what tuning.yaml says of it."""
    if not isinstance(table, dict) or not isinstance(table.get("arch"), list) or not all(isinstance(a, str) for a in table["arch"]):
        return False
    rows = {kind: table.get(kind, {}) for kind in (*_ROWS, *_MORE)}
    if not all(isinstance(found, dict) for found in rows.values()) or any(size not in rows[kind] for kind in _ROWS for size in (64, 128, 256, 512)):
        return False
    return all(isinstance(row, list) and len(row) in (_ROWS | _MORE)[kind] and all(type(n) is int and n >= (0 if "hopper" in kind else 1) for n in row)
               for kind, found in rows.items() for row in found.values())


@functools.lru_cache(maxsize=None)
def configs_for(arch: str, kind: str, head_dim: int, is_float32: bool) -> tuple[Config, Config]:
    """(tile, split) of the first table that names the architecture; kind "tiles", "gather", "mixed" or "chunks", of 8-bit caches
    "gather8" or "chunks8"; head_dim padded. A table without a kind, and without those like it, means its tiles and splits. The split
    has bm 0: it follows from the rows.
    """
    size = next((c for c in (64, 128, 256) if head_dim <= c), 512)
    end = "32" if is_float32 else ""
    for table in tables():
        if any(fnmatch.fnmatch(arch, pattern) for pattern in table["arch"]):
            tiles, splits = table["tiles" + end][size], table["splits" + end][size]
            named = [table.get(k + end, {}) for k in _LIKE.get(kind, (kind,))]
            found = next((sizes[size] for sizes in named if size in sizes), tiles)
            split = [found[4], *found[2:4]] if len(found) == 5 else splits
            return Config(*found[:4]), Config(0, *split)
    raise AssertionError(f"tuning.yaml has no table for {arch}")


@functools.lru_cache(maxsize=None)
def hoppers(arch: str, head_dim: int) -> tuple[Hopper, ...]:
    """Blocks of hopper.py, those for fewest keys first, of the first table that has them; () where it does not serve."""
    for table in tables():
        if head_dim in table.get("hopper", {}) and any(fnmatch.fnmatch(arch, pattern) for pattern in table["arch"]):
            return tuple(Hopper(*table[kind][head_dim]) for kind in ("hopper_short", "hopper") if head_dim in table.get(kind, {}))
    return ()


def hopper_for(arch: str, head_dim: int, keys: int) -> Hopper:
    """The blocks for this many keys a sequence, where `hoppers` has some."""
    return next(h for h in hoppers(arch, head_dim) if keys <= h.keys)


def pow2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and least."""
    return max(least, 1 << max(0, n - 1).bit_length())


def head_blocks(d: int) -> tuple[int, int]:
    """Padded head dim as one power of two, or as two where that pads less: 192 is 128 + 64, 576 is 512 + 64."""
    whole = pow2(d, 16)
    half = whole // 2
    if half >= 16 and d > half:
        rest = pow2(d - half, 16)
        if half + rest < whole:
            return half, rest
    return whole, 0


class Shape(NamedTuple):
    """What the machine code of `attend` depends on, besides block sizes."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype
    native_fp8: bool
    group: int
    d: int
    dv: int
    layout: str
    page_size: int
    left: bool
    right: bool
    softcap: bool
    bias: torch.dtype | None
    bias_rows: bool  # a row of the bias lies together; it begins and ends at multiples of 16 bytes
    alibi: bool
    sinks: torch.dtype | None
    lse: bool
    lse_form: int  # portattn/dialect.py
    rotary: int
    rotary_dtype: torch.dtype | None
    interleaved: bool
    k_scale: bool
    v_scale: bool
    table_dtype: torch.dtype | None
    kv_lens_dtype: torch.dtype | None
    cu_q_dtype: torch.dtype | None
    cu_k_dtype: torch.dtype | None
    aligned: bool
    v_in_k: bool
    wide: bool
    near: bool  # rows of pages start at multiples of 16 bytes from the first, of which 31 bits count all
    alike: bool  # K and V have the same strides
    ieee: bool
    short: bool  # few keys: one loop that masks every tile
    flip: bool  # the scale may be negative
    descriptors: bool  # keys of full tiles through tensor descriptors (TMA)
    wgmma: bool  # asynchronous matrix instructions: sm_90 and the sm_100 family


POINTERS = ("q", "k", "v", "k_desc", "v_desc", "k2_desc", "out", "lse", "table", "kv_lens", "cu_q", "cu_k", "bias", "alibi", "sinks",
            "k_scale", "v_scale",
            "cos", "sin", "parts", "stats", "counters")
NUMBERS = (("scale", "fp32"), ("softcap", "fp32"), ("v_factor", "fp32"), ("window_left", "i32"), ("window_right", "i32"))
STRIDES = ("q_b", "q_s", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "o_b", "o_s", "o_h", "table_b", "bias_b", "bias_h",
           "bias_q",
           "bias_k", "alibi_b", "ks_b", "ks_h", "vs_b", "vs_h", "cos_s")
SIZES = ("batch", "heads_kv", "len_q", "len_k", "page_size", "programs", "group", "slots", "budget", "fixed_chunk",
         "fixed_splits", "stripe", "before", "lse_rows", "merging")


def _bias_kind(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else "bool" if dtype in (torch.bool, torch.uint8) else "float"


def page_kind(page_size: int, bn: int) -> int:
    """The kernels' PAGE: -1 a tile of keys lies in one page, a power of two that divides BN, or 0 for any other size."""
    if page_size % bn == 0:
        return -1
    return page_size if bn % page_size == 0 else 0


def loops_for(s: Shape, bm: int) -> str:
    """The kernel's LOOPS for blocks of bm rows; below 64, matrix instructions are synchronous everywhere."""
    if not s.wgmma or s.ieee or bm < 64:
        return "edges"
    return "always" if s.short else "two"


def merge_parts(merge_rows: int, bdv: int) -> int:
    """Parts that one step of merging so many rows takes; four times as many made eight warps of latent heads three times as slow."""
    return max(1, min(64, 8192 // (merge_rows * bdv)))


def merging(rows: int, merge_rows: int, d: int, dv: int, split: Config) -> int:
    """How long a program merges one part of so many rows, in 64ths of the time in which it walks one tile of keys (kernels.tiles_a_part). On an H200 a
    step of merging takes 1.2 us, a tile of 32 keys of 128 0.5 us, one of more bytes as much more."""
    tile = 0.5 * max(1.0, split.bn * (d + dv) / 8192)
    return max(1, round(64 * 1.2 * -(-rows // merge_rows) / merge_parts(merge_rows, pow2(dv, 16)) / tile))


def boxes(s: Shape, tile: Config) -> dict[str, tuple[int, ...]]:
    """Boxes of the tensor descriptors of keys and values: over pages, of full tiles, each in one page, of which values are columns too."""
    bd, bd2 = head_blocks(s.d)
    if s.layout == "paged":
        return {"k_desc": (1, tile.bn, bd)} | ({"k2_desc": (1, tile.bn, bd2)} if bd2 else {})
    batch = (1,) if s.layout == "dense" else ()
    return {"k_desc": (*batch, tile.bn, bd), "v_desc": (*batch, tile.bn, pow2(s.dv, 16))}


def attend_spec(s: Shape, mode: str, tile: Config, split: Config, search: int, vector: bool, merge_rows: int) -> Spec:
    """The specialisation of `attend`; search: sequences searched at once; vector: split programs solve over all of them;
    merge_rows: rows that the last item of a block merges at a time."""
    eight = s.kv_dtype in FORMATS
    if not eight:
        form, kv = "same", POINTER[s.kv_dtype]
    elif s.native_fp8:
        form, kv = "native", POINTER[s.kv_dtype]
    else:
        form, kv = FORMATS[s.kv_dtype], "*u8"
    splits = mode != "tiles"
    types = {
        "q": POINTER[s.dtype], "k": kv, "v": kv, "k_desc": None, "v_desc": None, "k2_desc": None, "out": POINTER[s.out_dtype],
        "lse": "*fp32" if s.lse else None,
        "table": s.table_dtype and POINTER[s.table_dtype], "kv_lens": s.kv_lens_dtype and POINTER[s.kv_lens_dtype],
        "cu_q": s.cu_q_dtype and POINTER[s.cu_q_dtype], "cu_k": s.cu_k_dtype and POINTER[s.cu_k_dtype],
        "bias": s.bias and POINTER[s.bias], "alibi": "*fp32" if s.alibi else None, "sinks": s.sinks and POINTER[s.sinks],
        "k_scale": "*fp32" if s.k_scale else None, "v_scale": "*fp32" if s.v_scale else None,
        "cos": s.rotary_dtype and POINTER[s.rotary_dtype], "sin": s.rotary_dtype and POINTER[s.rotary_dtype],
        "parts": "*fp32" if splits else None, "stats": "*fp32" if splits else None, "counters": "*i32" if splits else None,
    }
    bd, bd2 = head_blocks(s.d)
    bdv = pow2(s.dv, 16)
    v_in_k = s.v_in_k and bdv == bd
    constants = {
        "MODE": mode, "BM": tile.bm, "BN": tile.bn, "SPLIT_BM": split.bm, "SPLIT_BN": split.bn, "BB": search if vector else 0,
        "SEARCH": search, "G": s.group, "D": s.d, "DV": s.dv, "BD": bd, "BD2": bd2, "BDV": bdv, "PAGED": s.layout == "paged",
        "PAGE": page_kind(s.page_size, tile.bn) if s.page_size else 0,
        "SPLIT_PAGE": page_kind(s.page_size, split.bn) if s.page_size else 0, "WIDE": s.wide, "NEAR": s.near, "ALIKE": s.alike,
        "LEFT": s.left, "RIGHT": s.right, "SOFTCAP": s.softcap, "BIAS": _bias_kind(s.bias), "BIAS_ROWS": s.bias_rows, "ROTARY": s.rotary, "INTERLEAVED": s.interleaved, "FORMAT": form,
        "V_IN_K": v_in_k, "IEEE": s.ieee, "LOOPS": loops_for(s, tile.bm), "SPLIT_LOOPS": loops_for(s, split.bm), "FLIP": s.flip,
        "MERGE_ROWS": merge_rows, "MERGE_PARTS": merge_parts(merge_rows, bdv), "LSE_FORM": s.lse_form,
    }
    if s.descriptors:
        kind = POINTER[s.kv_dtype][1:]
        types |= {name: f"tensordesc<{kind}[{', '.join(map(str, box))}]>" for name, box in boxes(s, tile).items()}
    runtime = [(name, types[name]) for name in POINTERS if types[name]]
    constants |= {name: None for name in POINTERS if not types[name]}
    runtime += [*NUMBERS, *((name, "i64") for name in STRIDES), *((name, "i32") for name in SIZES)]
    divisible = [("parts", 16), ("stats", 16)] if splits else []
    if s.aligned:
        size = {"q": s.dtype.itemsize, "k": s.kv_dtype.itemsize, "v": s.kv_dtype.itemsize, "o": s.out_dtype.itemsize}
        divisible += [(name, 16) for name in ("q", "k", "v", "out")]
        divisible += [(f"{t}_{axis}", 16 // size[t]) for t in "qkvo" for axis in "bsh"]
    if s.bias_rows:
        divisible += [("bias", 16), *((f"bias_{axis}", 16 // s.bias.itemsize) for axis in "bhq")]
    warps = split.warps if mode == "splits" else tile.warps
    stages = split.stages if mode == "splits" else tile.stages
    return Spec("attend", tuple(runtime), tuple(constants.items()), tuple(divisible), warps, stages)


HOPPER_STRIDES = ("o_b", "o_s", "o_h")
HOPPER_SIZES = ("k_h", "v_h", "batch", "heads", "len_q", "len_k", "programs", "group", "lse_rows")


def packed(group: int) -> int:
    """Query heads of a kv head that hopper.py packs into a block's rows."""
    return group if 64 % group == 0 else 1


def hopper_boxes(s: Shape, h: Hopper) -> tuple[list[int], list[int]]:
    """Boxes of the tensor maps of Q, and of K and V."""
    pack = packed(s.group)
    batch = [1] if s.layout == "dense" else []
    return [*batch, 64 // pack, pack, s.d], [*batch, h.bn, s.d]


def hopper_layout(rank: int):
    """Shared memory of a box: rows of 128 bytes, swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def hopper_spec(s: Shape, h: Hopper, search: int) -> Spec:
    """The specialisation of `attend_hopper`."""
    kind = POINTER[s.dtype][1:]
    described = [f"tensordesc<{kind}[{', '.join(map(str, box))}],{hopper_layout(len(box))!r}>" for box in hopper_boxes(s, h)]
    types = {
        "q_desc": described[0], "k_desc": described[1], "v_desc": described[1], "out": POINTER[s.out_dtype],
        "lse": "*fp32" if s.lse else None, "used_k": s.kv_lens_dtype and POINTER[s.kv_lens_dtype],
        "cu_q": s.cu_q_dtype and POINTER[s.cu_q_dtype], "cu_k": s.cu_k_dtype and POINTER[s.cu_k_dtype],
        "sinks": s.sinks and POINTER[s.sinks], "counters": "*i32",
    }
    constants = {name: None for name, kind in types.items() if not kind} | {
        "NC": h.groups, "PACK": packed(s.group), "G": s.group, "BN": h.bn, "D": s.d, "STAGES": h.stages, "QS": 2 if s.d < 256 else 1,
        "LEFT": s.left, "RIGHT": s.right, "SEARCH": search, "TURNS": bool(h.turns), "CONSUMER_REGISTERS": h.registers,
        "LSE_FORM": s.lse_form,
    }
    runtime = [(name, kind) for name, kind in types.items() if kind]
    runtime += [("scale", "fp32"), ("window_left", "i32"), ("window_right", "i32")]
    runtime += [*((name, "i64") for name in HOPPER_STRIDES), *((name, "i32") for name in HOPPER_SIZES)]
    divisible = (("out", 16), *((name, 8) for name in (*HOPPER_STRIDES, "k_h", "v_h")))
    return Spec("attend_hopper", tuple(runtime), tuple(constants.items()), divisible, 4, 1)


class Grid(NamedTuple):
    """Programs of one launch, and the numbers by which they find their work."""

    programs: int  # tile programs
    total: int
    group: int
    slots: int
    budget: int
    fixed_chunk: int
    fixed_splits: int


def grid_for(mode: str, tile: Config, split: Config, *, batch: int, heads_kv: int, group: int, max_q: int, max_k: int,
             total_q: int | None,
             kv_bytes: int, slots: int, num_splits: int, invariant: bool, one_part: bool) -> Grid:
    """How many programs; total_q is the number of ragged rows (None: max_q each), slots the programs resident at once."""
    rows = max_q * group
    programs, strip = 0, 1
    if mode != "splits":
        blocks = -(-rows // tile.bm)
        if total_q is None:
            programs = batch * heads_kv * blocks
            strip = max(1, min(batch * heads_kv, (32 << 20) // max(1, kv_bytes)))  # their keys fit the L2 cache
        else:
            programs = (total_q * group // tile.bm + batch) * heads_kv
    if mode == "tiles":
        return Grid(programs, programs, strip, 1, 1, 0, 0)
    blocks = 1 if mode == "both" else -(-rows // split.bm)
    pairs = batch * heads_kv * blocks
    if total_q is not None and mode == "splits":
        pairs = min(pairs, (batch + total_q * group // split.bm) * heads_kv)
    tiles = -(-max_k // split.bn)
    chunk = parts = budget = 0
    if one_part:
        parts, items = 1, pairs
    elif invariant:
        chunk = max(1, INVARIANT_KEYS // split.bn)
        items = pairs * max(1, -(-tiles // chunk))
    elif num_splits:
        parts = num_splits
        items = pairs * min(parts, max(1, tiles))
    else:
        budget = slots * (FULL_WAVES if pairs * tiles > 32 * slots else 1)
        items = pairs + min(budget, pairs * tiles)
    return Grid(programs, programs + items, strip, slots, max(1, budget), chunk, parts)


def pick_mode(multiprocessors: int, *, batch: int, heads_kv: int, group: int, max_q: int, max_k: int, total_q: int | None,
              layout: str,
              head_dim: int, invariant: bool) -> str:
    """"tiles", "splits" or "both". With batch_invariant it must not depend on the batch or on bounds."""
    rows = max_q * group
    if head_dim > 256:
        return "splits"
    if invariant:
        return "both" if layout != "dense" else "splits" if rows <= SPLIT_ROWS else "tiles"
    if rows <= SPLIT_ROWS:
        return "splits"
    blocks = batch * -(-rows // 128) if total_q is None else total_q * group // 128 + batch
    if blocks * heads_kv * 2 <= multiprocessors and max_k >= 2048:
        return "splits"  # too few tiles to fill the device
    return "both" if total_q is not None and max_q != max_k else "tiles"


def split_config(base: Config, tile: Config, mode: str, rows: int, group: int, dv: int) -> Config:
    """BM of split programs: the packed rows where they are few, else the tile's. In one launch both share warps and stages."""
    if mode == "both":
        return base._replace(bm=min(64, pow2(group, 16)), warps=tile.warps, stages=tile.stages)
    few = pow2(rows, 16)
    crowded = few * dv > 128 * 32 * base.warps and tile.warps > base.warps  # more than 128 registers of sums a thread
    return tile if rows > SPLIT_ROWS or crowded else base._replace(bm=few)


def append_spec(*, dtype: torch.dtype, kv_dtype: torch.dtype, d: int, dv: int, rotary: int, interleaved: bool,
                rotary_dtype: torch.dtype | None,
                table: torch.dtype | None, kv_lens: torch.dtype | None, cu_q: torch.dtype | None, slots: torch.dtype | None,
                k_scale: bool, v_scale: bool, search: int, counting: int = 0) -> Spec:
    """The specialisation of `append`: into slots, or at the ends of the sequences of a table."""
    eight = kv_dtype in FORMATS
    kv = "*u8" if eight else POINTER[kv_dtype]
    types = {
        "k_new": POINTER[dtype], "v_new": POINTER[dtype], "k": kv, "v": kv, "table": table and POINTER[table],
        "kv_lens": kv_lens and POINTER[kv_lens], "cu_q": cu_q and POINTER[cu_q], "slots": slots and POINTER[slots],
        "k_scale": "*fp32" if k_scale else None, "v_scale": "*fp32" if v_scale else None,
        "cos": rotary_dtype and POINTER[rotary_dtype], "sin": rotary_dtype and POINTER[rotary_dtype],
    }
    bd, bdv = pow2(d, 16), pow2(dv, 16)
    constants = {name: None for name, kind in types.items() if not kind} | {
        "BT": max(1, min(4, 1024 // max(bd, bdv))), "BB": search, "D": d, "DV": dv, "BD": bd, "BDV": bdv, "ROTARY": rotary,
        "INTERLEAVED": interleaved, "FORMAT": FORMATS[kv_dtype] if eight else "same", "BY_HAND": interpreting(),
        "COUNTING": counting,
    }
    runtime = [(name, kind) for name, kind in types.items() if kind] + [("k_divisor", "fp32"), ("v_divisor", "fp32")]
    runtime += [(name, "i64") for name in APPEND_STRIDES] + [(name, "i32") for name in APPEND_SIZES]
    return Spec("append", tuple(runtime), tuple(constants.items()), (), 4, 1)


APPEND_STRIDES = ("kn_b", "kn_s", "kn_h", "vn_b", "vn_s", "vn_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "table_b", "ks_b",
                  "ks_h", "vs_b", "vs_h", "cos_s")
APPEND_SIZES = ("batch", "len_q", "page_size", "tokens", "heads", "pages", "columns")


def merge_spec(*, dtype: torch.dtype, sinks: torch.dtype | None, dv: int) -> Spec:
    """The specialisation of `merge`."""
    bdv = pow2(dv, 16)
    runtime = [("outs", POINTER[dtype]), ("lses", "*fp32"), ("sinks", sinks and POINTER[sinks]), ("out", POINTER[dtype])]
    runtime.append(("lse", "*fp32"))
    constants = {name: None for name, kind in runtime if not kind} | {"BR": max(1, min(16, 4096 // bdv)), "DV": dv, "BDV": bdv,
                                                                      "BY_HAND": interpreting()}
    types = [item for item in runtime if item[1]] + [("parts", "i32"), ("rows", "i32"), ("heads", "i32"), ("part_stride", "i64")]
    return Spec("merge", tuple(types), tuple(constants.items()), (), 4, 1)
