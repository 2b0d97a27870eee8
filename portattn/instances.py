"""Which device code there is: the sources by name and their hash, and the kernel instance that suits a device.

Imports nothing of portattn and no torch, so that a build without either can load this file alone (cmake/objects.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import Callable, NamedTuple

_HERE = os.path.dirname(os.path.abspath(__file__))


class Instance(NamedTuple):
    """One kernel with its compile-time choices: kernel "decode", options (("PA_T", "bf16"), ("PA_D", "128"), …)."""

    kernel: str
    options: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "-".join([self.kernel, *(value if name in ("PA_T", "PA_C") else name[3:].lower() + value for name, value in self.options)])


# ------------------------------------------------------------------ sources
def source_folders(vendor: str) -> tuple[str, str]:
    """(folder of the shared headers, folder of the vendor's): in a wheel both are inside the package."""
    name = f"csrc_{vendor}"
    inside = os.path.join(_HERE, name)
    return os.path.join(_HERE, "include"), inside if os.path.isdir(inside) else os.path.join(os.path.dirname(_HERE), name)


@functools.lru_cache(maxsize=None)
def sources(vendor: str) -> dict[str, str]:
    """Every source by the name that `#include` uses, entry points included."""
    shared, own = source_folders(vendor)
    found = {}
    for folder, prefix, kinds in ((os.path.join(shared, "portattn"), "portattn/", (".h",)), (own, "", (".h", ".cu", ".hip"))):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.endswith(kinds):
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    found[prefix + name] = f.read()
    return found


@functools.lru_cache(maxsize=None)
def source_hash(vendor: str) -> str:
    """A hash of all of a vendor's device code."""
    digest = hashlib.sha256()
    for name, text in sorted(sources(vendor).items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


# ------------------------------------------------------------------ instances
TYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz",
         "float8_e5m2fnuz": "e5m2fnuz", "float32": "float"}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
TILE_ROWS = 16
DECODE_ROWS = 64  # sequences of more packed rows are computed in prefill tiles
MAX_CUTS, MAX_CUT_TILES = 16, 4
QUEUES = 4  # counters that the mixed kernel has besides


class Limits(NamedTuple):
    """What a device gives its blocks: shared memory of one block and of one multiprocessor, bytes; multiprocessors; lanes of a
    wave; whether keys wait in registers, for devices without asynchronous copies (AMD): shared memory is static there; whether it
    has wgmma (Hopper), and clusters of 16 blocks (Hopper, data centre Blackwell); whether a launch may begin before the last blocks
    of the one before have ended (Hopper on, CUDA 12.3 on, whose graphs keep that)."""

    shared_block: int
    shared_sm: int
    sms: int
    wave: int = 32
    staged: bool = False
    wgmma: bool = False
    clusters: bool = False
    overlap: bool = False


def head_dim_of(dim: int, dim_v: int) -> int:
    """The kernels' head size that holds both."""
    return next(d for d in HEAD_DIMS if d >= max(dim, dim_v))


class Shape(NamedTuple):
    """A decode instance and what its launches need."""

    instance: Instance
    threads: int
    shared: int
    unit: int  # keys that its waves take together
    blocks: int  # on a multiprocessor
    rows: int = 0  # of a prefill tile
    keys: int = 0  # that it takes at a time, where tensor maps bring them
    boxed: bool = False  # it takes nothing but what they bring


def decode_shared(kv_bytes: int, dim: int, waves: int, stages: int) -> int:
    """Decode::kSharedBytes of decode.h."""
    turned = stages > 1 and dim * kv_bytes % 128 == 0
    stage, tile = 2 * 16 * (dim * kv_bytes + (0 if turned else 16)), 2 * 16 * (dim + 8) * 2
    wave = tile if stages == 1 else stages * stage + (tile if kv_bytes == 1 else 0)
    ends = 112 if stages == 1 else 0
    return waves * (wave + ends) + TILE_ROWS * (dim + 8) * 2 + 2 * waves * TILE_ROWS * 4 + 4 * 34 + 4


def decode_shape(dtype: str, kv_dtype: str, dim: int, limits: Limits) -> Shape:
    """The decode instance for a device: two blocks on a multiprocessor if each can keep copies in flight, at most six stages."""
    kv_bytes = 2 if kv_dtype == dtype else 1
    if limits.staged:
        waves, stages = 4 if dim <= 128 else 3, 1
        blocks = 2 if 2 * decode_shared(kv_bytes, dim, waves, stages) <= limits.shared_sm else 1
        return _decode(dtype, kv_dtype, dim, waves, stages, blocks, limits)
    for waves, blocks, least in ((4, 2, 3), (4, 2, 2), (4, 1, 2), (2, 2, 2), (2, 1, 2), (1, 1, 2)):
        room = min(limits.shared_block, limits.shared_sm // blocks - 1024)
        stages = max((s for s in range(2, 7) if decode_shared(kv_bytes, dim, waves, s) <= room), default=0)
        if stages >= least:
            break
    else:
        raise ValueError(f"no decode instance of head size {dim} fits in {limits.shared_block} bytes of shared memory")
    return _decode(dtype, kv_dtype, dim, waves, stages, blocks, limits)


def _decode(dtype: str, kv_dtype: str, dim: int, waves: int, stages: int, blocks: int, limits: Limits) -> Shape:
    options = (("PA_T", TYPES[dtype]), ("PA_C", TYPES[kv_dtype]), ("PA_D", str(dim)), ("PA_WAVES", str(waves)), ("PA_STAGES", str(stages)),
               ("PA_BLOCKS", str(blocks)))
    shared = decode_shared(2 if kv_dtype == dtype else 1, dim, waves, stages)
    return Shape(Instance("decode", options), waves * limits.wave, shared, 16 * waves, blocks)


PLAIN_CACHES = ("float8_e4m3fn", "float8_e5m2")  # besides q's dtype
PLAIN_ROWS, MAX_CLUSTER = 8, 16  # kRows and kMaxCluster of plain.h


def plain_shared(kv_bytes: int, dim: int, waves: int, stages: int, clusters: bool = True) -> int:
    """PlainDecode::kSharedBytes of plain.h."""
    stage = 32 * (dim * kv_bytes + (0 if kv_bytes == 1 or dim % 64 == 0 else 16))
    state = 32 * (dim + 4) if kv_bytes == 1 else 0
    return waves * (stages * stage + state) + (2 * MAX_CLUSTER * (dim + 4) * 4 + 16 + 2 * 32 if clusters else 0)


def plain_shape(dtype: str, kv_dtype: str, dim: int, limits: Limits, ragged: bool = False) -> Shape:
    """The instance for plain calls (native.is_plain); `ragged`: of which only sequences of one token are its."""
    kv_bytes = 2 if kv_dtype == dtype else 1
    for waves in (8, 4, 2):
        stages = max((s for s in (2, 3) if plain_shared(kv_bytes, dim, waves, s) <= limits.shared_block), default=0)
        if stages:
            break
    return _plain(dtype, kv_dtype, dim, waves, stages, 1, ragged, clusters=True)


def free_shape(dtype: str, kv_dtype: str, dim: int, limits: Limits, many: bool, ragged: bool = False) -> Shape:
    """The same for blocks that are no clusters: large ones, and for many sequences two or three on a multiprocessor, so that one reads while
    another ends a sequence."""
    kv_bytes = 2 if kv_dtype == dtype else 1
    choices = ((4, 3, 2), (2, 3, 3), (2, 3, 2)) if many else ((8, 3, 1), (8, 2, 1), (4, 3, 1))
    fits = lambda waves, stages, blocks: plain_shared(kv_bytes, dim, waves, stages, False) <= min(limits.shared_block, limits.shared_sm // blocks - 1024)
    waves, stages, blocks = next(c for c in choices if fits(*c))
    return _plain(dtype, kv_dtype, dim, waves, stages, blocks, ragged, clusters=False)


def _plain(dtype: str, kv_dtype: str, dim: int, waves: int, stages: int, blocks: int, ragged: bool, clusters: bool) -> Shape:
    options = (("PA_T", TYPES[dtype]), ("PA_C", TYPES[kv_dtype]), ("PA_D", str(dim)), ("PA_WAVES", str(waves)), ("PA_STAGES", str(stages)),
               ("PA_BLOCKS", str(blocks)), ("PA_RAGGED", str(int(ragged))), ("PA_CLUSTERS", str(int(clusters))))
    shared = plain_shared(2 if kv_dtype == dtype else 1, dim, waves, stages, clusters)
    return Shape(Instance("plain", options), 32 * waves, shared, 16 * waves, blocks)


class Clusters(NamedTuple):
    """How plain.h shares work: lines, each of some kv heads, and blocks of a line's cluster."""

    lines: int
    size: int


def clusters_of(heads_kv: int, units: int, blocks: int, most: Callable[[int], int]) -> Clusters | None:
    """Clusters on at most `blocks` blocks, of which the device runs `most(size)` at the same time, for at most `units` of work in all; None
    where they would leave more than three quarters of the blocks idle that could have work."""
    found = []
    for lines in (n for n in range(1, heads_kv + 1) if heads_kv % n == 0 and n <= blocks):
        size = 1 << (min(MAX_CLUSTER, blocks // lines).bit_length() - 1)
        while size > 1 and most(size) < lines:
            size //= 2
        found.append((lines * size, lines, size))
    lines, size = max(found)[1:]
    return Clusters(lines, size) if 4 * lines * size >= min(blocks, 4 * units) else None


def prefill_shared(kv_bytes: int, dim: int, waves: int, m: int, n: int) -> int:
    """Prefill::kSharedBytes of prefill.h."""
    return 2 * 2 * n * (dim * kv_bytes + 16) + (2 * n * (dim + 8) * 2 if kv_bytes == 1 else 0) + 16 * m * waves * (dim + 8) * 2


def staged_prefill_shared(dim: int, waves: int, m: int, n: int, wave: int) -> int:
    """StagedPrefill::kSharedBytes of prefill_staged.h: q shares the stage's place where registers hold it; the queue."""
    stage, q = (n * (dim + 8) + dim * (n + (4 if wave == 64 else 8))) * 2, 16 * m * waves * (dim + 8) * 2
    return (max(stage, q) if wave == 64 else stage + q) + 4 * (waves * wave + 1 + 3 + 32)


def staged_prefill_shape(dtype: str, kv_dtype: str, dim: int, limits: Limits) -> Shape:
    """The prefill instance of devices without asynchronous copies. Tiles by what registers hold: of 512 a lane (waves of 64, whose matrix
    tiles have 32 rows and keys where head sizes allow) or 256."""
    waves = 4 if dim <= 128 else 3
    m, n = (2, 64 if dim <= 128 else 32) if limits.wave == 64 else (2 if dim <= 64 else 1, 32 if dim <= 128 else 16)
    options = (("PA_T", TYPES[dtype]), ("PA_C", TYPES[kv_dtype]), ("PA_D", str(dim)), ("PA_WAVES", str(waves)), ("PA_M", str(m)), ("PA_N", str(n)))
    shared = staged_prefill_shared(dim, waves, m, n, limits.wave)
    return Shape(Instance("prefill", options), waves * limits.wave, shared, 0, 2 if 2 * shared <= limits.shared_sm else 1, 16 * m * waves)


def mixed_shape(dtype: str, kv_dtype: str, dim: int, limits: Limits) -> Shape:
    """The instance that has prefill tiles beside decode: its decode half takes keys as the decode instance does, so that
    a request's bits do not depend on which of the two runs."""
    kv_bytes = 2 if kv_dtype == dtype else 1
    few = decode_shape(dtype, kv_dtype, dim, limits)
    waves = few.unit // 16
    queue = 4 * (waves * limits.wave + 1 + 3 + 32)
    m = 2 if dim <= 128 else 1
    for blocks in (2, 1):
        room = min(limits.shared_block, limits.shared_sm // blocks - 1024) - queue
        n = max((n for n in (16, 32, 64) if prefill_shared(kv_bytes, dim, waves, m, n) <= room and n <= (64 if dim < 128 else 32)), default=0)
        stages = max((s for s in range(2, 7) if decode_shared(kv_bytes, dim, waves, s) <= room), default=0)
        if n >= (32 if blocks == 2 else 16) and stages:
            break
    else:
        raise ValueError(f"no prefill instance of head size {dim} fits in {limits.shared_block} bytes of shared memory")
    shared = max(prefill_shared(kv_bytes, dim, waves, m, n), decode_shared(kv_bytes, dim, waves, stages)) + queue
    options = (("PA_T", TYPES[dtype]), ("PA_C", TYPES[kv_dtype]), ("PA_D", str(dim)), ("PA_WAVES", str(waves)), ("PA_STAGES", str(stages)),
               ("PA_BLOCKS", str(blocks)), ("PA_M", str(m)), ("PA_N", str(n)))
    return Shape(Instance("mixed", options), waves * limits.wave, shared, few.unit, blocks, 16 * m * waves)


# 8-bit caches of the Hopper prefill kernel.
SM90_CACHES = ("float8_e4m3fn", "float8_e5m2")
# Head size: (warpgroups that compute, 64 rows each, keys at a time), of which the smallest tile has so many rows; and, of three warpgroups, the larger
# tiles of calls that come in boxes.
SM90_TILES = {64: (2, 128), 80: (2, 128), 96: (2, 128), 128: (2, 128), 192: (2, 80), 256: (2, 64)}
SM90_ROWS = 64 * min(consumers for consumers, _ in SM90_TILES.values())
SM90_LARGE_TILES = {64: (3, 128), 80: (3, 112), 96: (3, 96), 128: (3, 80)}


def prefill_sm90_shared(kv_bytes: int, dim: int, consumers: int, n: int, boxed: bool, bf16: bool) -> int:
    """PrefillSm90::kSharedBytes of prefill_sm90.h: q, twice if there is room, out, if there is more, two or three stages of k and two of v, in
    panels of 64 columns; two blocks of 8 bits; its Control, with the units of rows of bf16 that become f16."""
    raw = 2 * n * dim if kv_bytes == 1 else 0
    panels, room = -(-dim // 64), (226 << 10) - raw
    q, stage = panels * 128 * 64 * consumers, panels * 128 * n
    halves = next(h for h in (6, 4, 3, 2) if (h != 3 or panels % 2 == 0) and h * q // 2 + 4 * stage <= room)  # of q's place
    rows = halves * q // 2
    k_stages = 3 if rows + 5 * stage <= room else 2
    barriers = 2 * (k_stages - 2) + (6 if kv_bytes == 1 and boxed else 0)  # besides those of every instance
    units = 4 * 64 * consumers * (2 if halves >= 4 else 1) if kv_bytes == 1 and boxed and bf16 else 8
    return rows + (2 + k_stages) * stage + raw + 1064 + 8 * barriers + units


def prefill_sm90_shape(dtype: str, kv_dtype: str, dim: int, boxed: bool = False, large: bool = False) -> Shape:
    """The Hopper prefill instance: one block on a multiprocessor, which takes tile after tile. `boxed`: the one of calls whose q, keys and values tensor
    maps describe. `large`: its larger tiles."""
    consumers, n = (SM90_LARGE_TILES if large else SM90_TILES)[dim]
    options = (("PA_T", TYPES[dtype]), ("PA_C", TYPES[kv_dtype]), ("PA_D", str(dim)), ("PA_CONSUMERS", str(consumers)), ("PA_N", str(n)),
               ("PA_BOXED", str(int(boxed))))
    kv_bytes = 1 if kv_dtype.startswith("float8") else 2
    warpgroups = consumers + (2 if kv_bytes == 1 and boxed and dim <= 192 else 1)
    shared = prefill_sm90_shared(kv_bytes, dim, consumers, n, boxed, dtype == "bfloat16")
    return Shape(Instance("prefill_sm90", options), 128 * warpgroups, shared, 0, 1, 64 * consumers, n, boxed)


def target(arch: str, instance: Instance) -> str:
    """The architecture to compile for: instructions of one generation alone have a name of their own."""
    return f"{arch}a" if instance.kernel.endswith("_sm90") else arch


def small_instance(kernel: str, dtype: str, kv_dtype: str | None = None) -> Instance:
    """The append or merge kernel for its types."""
    return Instance(kernel, (("PA_T", TYPES[dtype]), *((("PA_C", TYPES[kv_dtype]),) if kv_dtype else ())))


# Of one block that asks, and of a multiprocessor, KiB: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_KIB = {"sm_80": (163, 164), "sm_87": (163, 164), "sm_86": (99, 100), "sm_89": (99, 100), "sm_90": (227, 228), "sm_100": (227, 228),
              "sm_103": (227, 228), "sm_110": (227, 228), "sm_120": (99, 100), "sm_121": (99, 100)}


# Lanes of a wave, and shared memory (LDS) of what torch counts as a multiprocessor, KiB: a compute unit of CDNA, two of
# RDNA. A block may have 64 KiB everywhere.
GFX = {"gfx90a": (64, 64), "gfx942": (64, 64), "gfx950": (64, 160), "gfx1100": (32, 128), "gfx1151": (32, 128), "gfx1200": (32, 128),
       "gfx1201": (32, 128)}


def limits_of(arch: str, sms: int = 1) -> Limits:
    """The limits of an architecture, for building without one; an unknown one of CUDA gets the smallest."""
    if arch.startswith("gfx"):
        wave, sm = GFX[arch]
        return Limits(64 << 10, sm << 10, sms, wave, staged=True)
    block, sm = SHARED_KIB.get(arch, (99, 100))
    return Limits(block << 10, sm << 10, sms, wgmma=arch == "sm_90", clusters=arch in ("sm_90", "sm_100", "sm_103"))


def every_instance(limits: Limits) -> list[Instance]:
    """All instances that calls on such a device can want."""
    eight = [name for name in TYPES if name.startswith("float8")]
    found = []
    for dtype in ("float16", "bfloat16"):
        for kv in (dtype, *eight):
            for dim in HEAD_DIMS:
                found += [choose(dtype, kv, dim, limits).instance for choose in (decode_shape, staged_prefill_shape if limits.staged else mixed_shape)]
                if limits.clusters and kv in (dtype, *PLAIN_CACHES):
                    found += [plain_shape(dtype, kv, dim, limits, ragged).instance for ragged in (False, True)]
                    found += [free_shape(dtype, kv, dim, limits, many, ragged).instance for many in (False, True) for ragged in (False, True)]
        if limits.wgmma:
            found += [prefill_sm90_shape(dtype, kv, dim, boxed).instance for kv in (dtype, *SM90_CACHES) for boxed in (False, True) for dim in HEAD_DIMS]
            found += [prefill_sm90_shape(dtype, dtype, dim, True, large=True).instance for dim in SM90_LARGE_TILES]
    for dtype in ("float32", "float16", "bfloat16"):
        found += [small_instance("append", dtype, kv) for kv in (dtype, *eight)] + [small_instance("merge", dtype)]
    return [*found, Instance("selftest", ())]
