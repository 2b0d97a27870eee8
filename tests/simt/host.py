"""Builds the shared kernels for the host with g++ and runs them on CPU tensors, packed by the same code as on a GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from portattn import dialect, native
from portattn.problem import Call

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FORWARD, REVERSE, RANDOM = 0, 1, 2
SANITIZED = bool(os.environ.get("PORTATTN_SIMT_SANITIZE"))


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.lru_cache(maxsize=None)
def _sources_hash() -> str:
    digest = hashlib.sha256()
    for folder in (HERE, HERE / "amd", ROOT / "portattn/include/portattn", ROOT / "csrc_cuda", ROOT / "csrc_hip"):
        for file in sorted(folder.iterdir()):
            if file.suffix in (".h", ".cpp"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=None)
def build(kernel: str, wave: int = 32, gfx: int = 0, **options: object) -> ctypes.CDLL:
    """The library of one instance; built once per source state into the temporary folder.

    gfx 0 is CUDA's warp.h and mma.h; 9, 11 and 12 are AMD's, over waves of 64, 32 and 32 lanes (9 where wave is 64).
    """
    gfx = gfx or (9 if wave == 64 else 0)
    flags = [f"-DSIMT_WAVE={wave}", *([f"-DSIMT_GFX={gfx}"] if gfx else []), *(f"-DPA_{name.upper()}={value}" for name, value in sorted(options.items()))]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"] if SANITIZED else ["-O1"]
    key = hashlib.sha256(" ".join([kernel, _sources_hash(), *flags]).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"portattn-simt-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{kernel}-{key}.so"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as f:
            made = f.name
        command = [compiler() or "g++", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas", *(["-I", str(HERE / "amd")] if gfx else []), "-I", str(HERE), "-I",
                   str(ROOT / "portattn/include"), *flags, str(HERE / f"{kernel}.cpp"), "-o", made]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        os.replace(made, target)
    return ctypes.CDLL(str(target))


def run(library: ctypes.CDLL, symbol: str, packed: bytes, grid: tuple[int, int], order: int = FORWARD, seed: int = 0) -> None:
    """Runs a kernel; raises RuntimeError with what the host device says."""
    error = ctypes.create_string_buffer(2000)
    if getattr(library, symbol)(ctypes.c_char_p(bytes(packed)), *grid, order, ctypes.c_uint(seed), error, len(error)):
        raise RuntimeError(error.value.decode())


def launch(kernel: str, options: dict, packed: bytes, grid: tuple[int, int], tensors: tuple, order: int = FORWARD) -> None:
    """Runs a small kernel by CUDA's headers; `tensors` are those that it may touch. Other tests put another device here."""
    run(build(kernel, **options), f"portattn_simt_{kernel}", packed, grid, order)


def mixed(call: Call, *, parts: int, m: int = 2, n: int = 32, waves: int = 4, **how):
    """(out, lse) of the mixed kernel, or AMD's two, whose decode work is cut into `parts`; as `decode` otherwise."""
    return decode(call, grid=parts, waves=waves, tile=(m, n), **how)


class Launch(NamedTuple):
    kernel: str
    options: dict
    grid: tuple[int, int]


class Prepared(NamedTuple):
    """Launches on CPU tensors, one after the other, with the same params."""

    launches: tuple[Launch, ...]
    packed: bytes
    out: torch.Tensor
    lse: torch.Tensor
    counters: torch.Tensor
    tensors: tuple  # whatever the kernel may touch

    def results(self):
        assert not self.counters.any(), "counters must be zero after a launch"
        return self.out, self.lse


def prepare(call: Call, *, grid: int, tile: tuple[int, int] | None = None, lines: int | None = None, waves: int = 4, stages: int = 3) -> Prepared:
    """The decode kernel by `grid` workers; with `tile` (row tiles a wave, keys at a time), the mixed kernel, or with one stage the prefill
    kernel after decode."""
    q, out = call.q, call.out
    if out is None:
        out = torch.empty((*q.shape[:-1], call.v.shape[-1]), dtype=q.dtype)
    out.fill_(float("nan"))
    lse = torch.full(dialect.lse_shape(call), float("nan"))
    dtype, kv = str(q.dtype)[6:], str(call.k.dtype)[6:]
    dim = native.head_dim_of(q.shape[-1], call.v.shape[-1])
    values = native.attention_values(call, out)
    off = 0 if not (call.k.data_ptr() | call.v.data_ptr()) & 15 else native.ALIGNED
    off |= native.OUT_ALIGNED if out.data_ptr() % (4 * out.element_size()) else 0
    values["flags"] &= ~off
    values |= native.dealing(call.k.shape[-2], grid, lines) | {"mixed_stride": 3}
    options, parts = dict(t=native.TYPES[dtype], c=native.TYPES[kv], d=dim, waves=waves), (values["lines"], values["workers"])
    launches = (Launch("decode", options | dict(stages=stages), parts),)
    if tile:
        tiles, of_tile = native.most_tiles(call, 16 * tile[0] * waves), dict(m=tile[0], n=tile[1])
        if stages == 1:
            values["flags"] |= native.TILED
            launches = (*(launches if call.q.dim() == 3 else ()), Launch("prefill", options | of_tile, (tiles, 1)))
        else:
            launches = (Launch("mixed", options | dict(stages=stages) | of_tile, (tiles + parts[0] * parts[1], 1)),)
    room = native.room(values, dim)
    partial, counters = torch.full((room.floats + 4,), float("nan")), torch.zeros(room.counters, dtype=torch.int32)
    at = lambda x: x.data_ptr() if isinstance(x, torch.Tensor) else 0
    lengths = call.kv_lens if call.block_table is not None else call.seqused_k
    values |= {
        "q": at(q), "k": at(call.k), "v": at(call.v), "out": at(out), "lse": at(lse), "lengths": at(lengths), "block_table": at(call.block_table),
        "cu_q": at(call.cu_seqlens_q), "cu_k": at(call.cu_seqlens_k), "alibi": at(call.alibi_slopes), "sinks": at(call.sinks),
        "k_scale": at(call.k_scale), "v_scale": at(call.v_scale), "rotary_cos": at(call.rotary_cos), "rotary_sin": at(call.rotary_sin),
        "partial": (at(partial) + 15) // 16 * 16, "counters": at(counters),
    }
    used = (q, call.k, call.v, out, lse, lengths, call.block_table, call.cu_seqlens_q, call.cu_seqlens_k, call.alibi_slopes, call.sinks, call.k_scale,
            call.v_scale, call.rotary_cos, call.rotary_sin, partial, counters)
    return Prepared(launches, bytes(native.pack(native.ATTENTION, values)), out, lse, counters, tuple(x for x in used if isinstance(x, torch.Tensor)))


def decode(call: Call, *, wave: int = 32, gfx: int = 0, order: int = FORWARD, seed: int = 0, **how):
    """(out, lse) of the decode kernel (`how`: see prepare); checks that the counters are zero again."""
    how.setdefault("stages", 3 if wave == 32 and not gfx else 1)  # AMD's copies come through registers
    p = prepare(call, **how)
    for kernel, options, where in p.launches:
        run(build(kernel, wave, gfx, **options), f"portattn_simt_{kernel}", p.packed, where, order, seed)
    return p.results()


def append(k, v, k_cache, v_cache, *, slots=None, call: Call | None = None, k_scale=None, v_scale=None, order: int = FORWARD) -> None:
    """Runs the append kernel on the caches, in place."""
    values = native.append_values(k, v, k_cache, v_cache, k_scale, v_scale, call, slots)
    at = lambda x: x.data_ptr() if isinstance(x, torch.Tensor) else 0
    values |= {"k": at(k), "v": at(v), "k_cache": at(k_cache), "v_cache": at(v_cache), "slots": at(slots), "k_scale": at(k_scale),
               "v_scale": at(v_scale)}
    if call is not None:
        values |= {"lengths": at(call.kv_lens), "block_table": at(call.block_table), "cu_q": at(call.cu_seqlens_q),
                   "rotary_cos": at(call.rotary_cos), "rotary_sin": at(call.rotary_sin)}
    used = (k, v, k_cache, v_cache, slots, k_scale, v_scale, *(call or ()))
    launch("append", dict(t=native.TYPES[str(k.dtype)[6:]], c=native.TYPES[str(k_cache.dtype)[6:]]), bytes(native.pack(native.APPEND, values)),
           (k.shape[:-2].numel(), 1), used, order)


def merge(outs, lses, sinks=None):
    """(out, lse) of the merge kernel."""
    out, lse = torch.full(outs.shape[1:], float("nan"), dtype=outs.dtype), torch.full(lses.shape[1:], float("nan"))
    values = native.merge_values(outs, lses, sinks)
    values |= {"outs": outs.data_ptr(), "lses": lses.data_ptr(), "sinks": 0 if sinks is None else sinks.data_ptr(), "out": out.data_ptr(),
               "lse": lse.data_ptr()}
    launch("merge", dict(t=native.TYPES[str(outs.dtype)[6:]]), bytes(native.pack(native.MERGE, values)), (-(-values["rows"] // 4), 1),
           (outs, lses, sinks, out, lse))
    return out, lse
