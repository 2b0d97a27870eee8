"""Bound calls: everything about a call that its shapes decide is worked out once; a call then fills in pointers and launches."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable

import torch
from torch import Tensor

from portattn import config, dialect, forks, freed, overlaps
from portattn.appended import Appended
from portattn.device import maker
from portattn.problem import Call
from portattn.registry import DIRECT

from . import launch as launching
from . import schedule
from .launch import Interpreted, Launch, Map, Spec, compiled, interpreting
from .schedule import FORMATS, Config, Machine, Shape

_WIDEST = 1 << 30
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_kernels: dict[tuple[int, Spec], Any] = {}
_lock = forks.lock(globals())


def machine_of(device: torch.device) -> Machine:
    """Facts about a device that decide configurations; shared memory is asked of the driver."""
    index = device.index if device.index is not None else (torch.cuda.current_device() if device.type == "cuda" else 0)
    return _machine(device.type, index)


@functools.lru_cache(maxsize=None)
def _machine(kind: str, index: int) -> Machine:
    if kind != "cuda":
        return Machine("", 3, 1 << 30)  # the interpreter: few programs, so that small shapes are split too
    import triton

    from portattn.device import facts

    driver = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(index)
    return Machine(facts(torch.device(kind, index)).arch, properties["multiprocessor_count"], properties["max_shared_mem"],
                   driver.get_current_target().warp_size)


def _load(spec: Spec, device: int) -> Any:
    """The compiled kernel on a device; compiled once a process, and once a machine thanks to Triton's cache on disk."""
    with _lock:
        kernel = _kernels.get((device, spec))
        if kernel is None:
            with torch.cuda.device(device):
                kernel = _kernels[device, spec] = compiled(spec)
        return kernel


class Workspace:
    """Partial results and arrival counters of split launches on one device.

    Eager calls on one stream run in order and share that stream's buffer. A captured call must not share memory with calls
    outside its graph: its partial results come from the graph's own pool, its counters are a slice of an arena that no other
    captured call uses until the arena wraps around. Counters are zero between launches: the last program of a block resets its
    own.
    """

    ARENA = 1 << 20

    def __init__(self, device: torch.device):
        self.device = device
        self.streams: dict[int, tuple[Tensor, Tensor, int, int]] = {}
        self.arena: Tensor | None = None
        self.next = 0
        self.lock = threading.Lock()

    def prepare(self) -> None:
        """Makes the arena, when the device is probed; waits for the device, so that any stream may use it from then on."""
        with self.lock:
            if self.arena is None and self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                with torch.inference_mode(), torch.cuda.device(self.device):
                    self.arena = torch.zeros(self.ARENA, dtype=torch.int32, device=self.device)
                    torch.cuda.current_stream(self.device).synchronize()

    def eager(self, stream: int, floats: int, counters: int) -> tuple[Tensor, Tensor, int, int]:
        """(partial results, counters, and their addresses) for a call on this stream."""
        found = self.streams.get(stream)
        if found is None or found[0].numel() < floats or found[1].numel() < counters:
            have = (found[0].numel(), found[1].numel()) if found else (0, 0)
            with torch.inference_mode(), torch.cuda.device(self.device):
                parts = torch.empty(max(floats, have[0]), dtype=torch.float32, device=self.device)
                zeros = torch.zeros(max(counters, have[1], 4096), dtype=torch.int32, device=self.device)
            found = self.streams[stream] = (parts, zeros, parts.data_ptr(), zeros.data_ptr())
        return found

    def captured(self, floats: int, counters: int) -> tuple[Tensor, Tensor, int, int]:
        """The same for a call that is being captured into a graph."""
        parts = torch.empty(floats, dtype=torch.float32, device=self.device)
        with self.lock:
            if self.arena is not None and counters <= self.ARENA:
                if self.next + counters > self.ARENA:
                    self.next = 0
                zeros = self.arena[self.next : self.next + counters]
                self.next += counters
            else:  # no arena, or not enough of it: the graph zeroes its counters itself
                zeros = torch.zeros(counters, dtype=torch.int32, device=self.device)
        return parts, zeros, parts.data_ptr(), zeros.data_ptr()


_workspaces: dict[torch.device, Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """The device's workspace."""
    found = _workspaces.get(device)
    if found is None:
        found = _workspaces.setdefault(device, Workspace(device))
    return found


def _row_strides(t: Tensor) -> tuple[int, int, int]:
    """(batch entry or page, row, head) strides; ragged tensors have no batch entry."""
    s = t.stride()
    return (s[0], s[1], s[2]) if t.dim() == 4 else (0, s[0], s[1])


def _scale_strides(scale: Any) -> tuple[int, int]:
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return 0, 0
    return (0, scale.stride(0)) if scale.dim() == 1 else (scale.stride(0), scale.stride(1))


def _dtype(t: Any) -> torch.dtype | None:
    return t.dtype if isinstance(t, Tensor) else None


def _plain(t: Tensor) -> bool:
    return t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] <= 1


def _nested(t: Tensor) -> bool:
    """Whether the heads of a token lie inside its row, and the tokens of a batch entry inside its stride: what the driver's
    documentation promises of tensor maps. Expanded and head-major keys go through pointers."""
    *batch_s, row, head, _ = t.stride()
    *_, tokens, heads, d = t.shape
    inside = head * (heads - 1) + d <= row and (heads == 1 or head >= d)
    return inside and all(s >= tokens * row or n == 1 for s, n in zip(batch_s, t.shape)) and max(t.stride()) < 1 << 38


def _near(t: Tensor) -> bool:
    """Whether rows of a cache start at multiples of 16 bytes from its first, of which 31 bits count all."""
    strides = [s * t.element_size() for s in t.stride()[:2]]
    return all(s % 16 == 0 for s in strides) and sum((n - 1) * s for n, s in zip(t.shape, strides)) < 1 << 35


def _map_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: Any, layout: Any = None) -> Map:
    """A tensor map; the stride of an axis of length 1, which may be anything, is one that the driver takes."""
    found, inner = [], 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        found.append(inner if n == 1 else stride)
        inner = max(inner, found[-1] * n)
    return Map(dtype, shape, tuple(reversed(found)), tuple(box), layout)


def _rows_of_all_heads(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of K or V with a token's heads in one row: a head's columns start at its stride."""
    *batch, tokens, heads, d = t.shape
    *batch_s, row, head, _ = t.stride()
    return (*batch, tokens, (heads - 1) * head + d), (*batch_s, row, 1)


def _bytes(t: Tensor) -> Tensor:
    """8-bit floats and bools as the uint8 tensors that the interpreter takes."""
    return t.view(torch.uint8) if t.dtype in FORMATS or t.dtype == torch.bool else t


class Attention:
    """One kind of attention call, ready to run."""

    def __init__(self, call: Call, hopper: bool | None = None):
        """hopper: whether hopper.py serves, where it could; by default where it is trusted."""
        self.interpreted, self.forced = interpreting(), hopper
        q, k, v = call.q, call.k, call.v
        self.device = q.device
        self.index = q.device.index or 0
        self.machine = machine_of(q.device)
        self.layout = "paged" if call.block_table is not None else "varlen" if call.cu_seqlens_k is not None else "dense"
        ragged = call.cu_seqlens_q is not None
        self.heads_q, self.heads_kv = q.shape[-2], k.shape[-2]
        self.group = self.heads_q // self.heads_kv
        self.d, self.dv = q.shape[-1], v.shape[-1]
        self.batch = (call.cu_seqlens_q.shape[0] - 1) if ragged else q.shape[0]
        self.total_q = q.shape[0] if ragged else None
        self.max_q = call.max_seqlen_q if ragged else q.shape[1]
        self.page_size = k.shape[1] if self.layout == "paged" else 0
        self.max_k = {"paged": lambda: call.block_table.shape[1] * self.page_size, "varlen": lambda: min(call.max_seqlen_k,
                                                                                                         k.shape[0]),
                      "dense": lambda: k.shape[1]}[self.layout]()
        self.out_shape = (*q.shape[:-1], self.dv)
        self.lse_shape, self.lse_rows = dialect.lse_shape(call), q.shape[-3]
        self.before = int(call.counting == dialect.BEFORE)
        self.views = tuple((tuple(t.shape), t.stride()) for t in (q, k, v))
        self.empty = 0 in self.out_shape or self.batch == 0 or self.max_q == 0  # rows of no sequence are no work either
        self.has_lse = call.return_lse
        self.num_splits, self.invariant = call.num_splits, call.batch_invariant
        self.fixed = self._fixed_strides(call)
        self.tensors = self._optional(call)
        self.float_scales = any(s is not None and not isinstance(s, Tensor) for s in (call.k_scale, call.v_scale))
        self.space = workspace(q.device)
        self.variants: dict[tuple[bool, bool, bool], tuple] = {}
        self.append = Append(call) if call.k_new is not None and not self.empty else None
        self.shape = self._shape(call)
        self.numbers = self._numbers(call)
        self._prepare_direct(call)

    # ---- worked out once

    def _optional(self, call: Call) -> tuple[tuple[str, Callable | None], ...]:
        """Attributes of a call that the kernel reads besides q, k, v, out and lse, in its order; and what to do to each first."""
        names = ["block_table", "seqused_k" if self.layout == "varlen" else "kv_lens", "cu_seqlens_q", "cu_seqlens_k", "bias",
                 "alibi_slopes", "sinks", "k_scale", "v_scale", "rotary_cos", "rotary_sin"]
        if call.counting == dialect.PREFIX_SUMS:  # in the place of cu_seqlens_k, which pages have not
            names[1:4] = ["cu_seqlens_q", "kv_lens"]
        found = []
        for name in names:
            t = getattr(call, name)
            if isinstance(t, Tensor):
                free = name in ("bias", "k_scale", "v_scale")  # any strides
                found.append((name, None if free or _plain(t) else Tensor.contiguous))
        return tuple(found)

    def _fixed_strides(self, call: Call) -> list[int]:
        bias = [s if n > 1 else 0 for n, s in zip(call.bias.shape, call.bias.stride())] if call.bias is not None else [0] * 4
        table, alibi, cos = call.block_table, call.alibi_slopes, call.rotary_cos
        out = call.out
        contiguous = (self.max_q * self.heads_q * self.dv if call.q.dim() == 4 else 0, self.heads_q * self.dv, self.dv)
        o = contiguous if out is None else _row_strides(out)
        row = lambda t: (t.stride(0) if _plain(t) else t.shape[1]) if t is not None else 0
        return [*_row_strides(call.q), *_row_strides(call.k), *_row_strides(call.v), *o, row(table), *bias,
                row(alibi) if alibi is not None and alibi.dim() == 2 else 0, *_scale_strides(call.k_scale),
                *_scale_strides(call.v_scale),
                row(cos)]

    def _shape(self, call: Call) -> Shape:
        q, k, v = call.q, call.k, call.v
        out_dtype = call.out.dtype if call.out is not None else q.dtype
        strides = [s * t.element_size() for t in (q, k, v) for s in _row_strides(t)]
        strides += [s * out_dtype.itemsize for s in self.fixed[9:12]]
        widest, alike = max(abs(_row_strides(t)[1]) for t in (k, v)), _row_strides(k) == _row_strides(v)
        lens, cu_k = call.seqused_k if self.layout == "varlen" else call.kv_lens, call.cu_seqlens_k
        if call.counting == dialect.PREFIX_SUMS:
            lens, cu_k = None, lens
        return Shape(
            dtype=q.dtype, kv_dtype=k.dtype, out_dtype=out_dtype,
            native_fp8=not self.interpreted and self.machine.converts(k.dtype),
            group=self.group, d=self.d, dv=self.dv, layout=self.layout, page_size=self.page_size, left=call.window_left >= 0,
            right=call.window_right >= 0, softcap=call.softcap > 0, bias=_dtype(call.bias), bias_rows=False, alibi=call.alibi_slopes is not None,
            sinks=_dtype(call.sinks), lse=self.has_lse, lse_form=call.lse_form, rotary=2 * call.rotary_cos.shape[1] if call.rotary_cos is not None else 0,
            rotary_dtype=_dtype(call.rotary_cos), interleaved=call.rotary_interleaved, k_scale=isinstance(call.k_scale, Tensor),
            v_scale=isinstance(call.v_scale, Tensor), table_dtype=_dtype(call.block_table), kv_lens_dtype=_dtype(lens),
            cu_q_dtype=_dtype(call.cu_seqlens_q), cu_k_dtype=_dtype(cu_k), aligned=all(s % 16 == 0 for s in strides),
            v_in_k=k.dtype == v.dtype and alike and self.dv <= self.d, wide=widest * 256 >= 1 << 31,
            near=self.layout == "paged" and all(map(_near, (k, v))), alike=alike,
            ieee=q.dtype == torch.float32 or (self.interpreted and q.dtype == torch.bfloat16),
            short=self.max_k <= schedule.SHORT_KEYS and self.layout != "varlen" and not self.invariant, flip=False,
            descriptors=False, wgmma=self.machine.wgmma,
        )

    def _prepare(self, call: Call, aligned: bool, v_in_k: bool, negative: bool) -> tuple:
        """(launch, floats of workspace, counters) of one variant: by what the pointers allow."""
        shape = self.shape._replace(aligned=aligned, v_in_k=v_in_k, flip=negative or self.shape.k_scale)
        if call.bias is not None and aligned and not call.bias.data_ptr() & 15:
            *others, along = self.fixed[13:17]
            whole = all(n * call.bias.element_size() % 16 == 0 for n in (call.bias.shape[-1], *others))
            shape = shape._replace(bias_rows=along == 1 and whole)
        is32 = shape.dtype == torch.float32
        bd, bd2 = schedule.head_blocks(self.d)
        padded = max(bd + bd2, schedule.pow2(self.dv, 16))
        padded = padded if padded <= 256 else 512
        sizes = dict(batch=self.batch, heads_kv=self.heads_kv, group=self.group, max_q=self.max_q, max_k=self.max_k,
                     total_q=self.total_q)
        mode = schedule.pick_mode(self.machine.multiprocessors, layout=self.layout, head_dim=max(self.d, self.dv),
                                  invariant=self.invariant,
                                  **sizes)
        shape = shape._replace(descriptors=mode == "tiles" and self._descriptors(call, shape))
        if shape.descriptors and self._hopper(call, shape):
            return self._prepare_hopper(call, shape)
        # Chunks of about one length are tiles with some splits; a batch of mostly decodes wants both kinds side by side.
        chunks = not self.invariant and self.total_q is not None and self.total_q * 2 >= self.batch * self.max_q
        kind = "tiles" if shape.descriptors else "gather" if mode != "both" else "chunks" if chunks else "mixed"
        if shape.kv_dtype in FORMATS and kind in ("gather", "chunks"):
            kind += "8"
        tile, base = schedule.configs_for(self.machine.arch, kind, padded, is32)
        if self.interpreted and self.max_k >= 2048:  # its time is counted in tiles
            tile, base = tile._replace(bm=128, bn=256), base._replace(bn=256)
        rows = self.max_q * self.group
        uniform = self.layout == "dense"
        # A batch too large to search is not split either; with batch_invariant that would change bits, so the limit is higher.
        limit = schedule.MAX_SEARCH * (8 if self.invariant else 1)
        vector = not uniform and self.batch <= limit
        search = next(n for n in (16, 128, 1024, limit) if self.batch <= n or n >= limit)
        while True:
            split = schedule.split_config(base, tile, mode, rows, self.group, self.dv)
            merge_rows = min(16, split.bm, schedule.pow2(self.group if mode == "both" else rows))
            if mode == "splits":
                shape = shape._replace(descriptors=split is tile and self._page_descriptors(call, shape, tile))
            spec = schedule.attend_spec(shape, mode, tile, split, search, vector and mode != "tiles", merge_rows)
            shared = 0
            if self.interpreted:
                slots = 4
                break
            kernel = _load(spec, self.index)
            if kernel.metadata.shared <= self.machine.shared:
                resident = self._resident(kernel, spec)
                slots = self.machine.multiprocessors * resident
                if mode == "splits" and self.machine.arch == "sm_90":
                    # Room for so many and no more: else they stand unevenly (64 x 1k, head dim 256: 80 us for 69 on an H200).
                    shared = (self.machine.shared + 1024) // (resident + 1) - 1023
                break
            if mode == "splits" and split is not tile:
                base = base.smaller()
            else:
                tile = tile.smaller()
            if base is None or tile is None:
                raise RuntimeError(f"no configuration of {spec.name} fits {self.machine.shared} bytes of shared memory")
        grid = schedule.grid_for(mode, tile, split, slots=slots, num_splits=self.num_splits, invariant=self.invariant,
                                 kv_bytes=self.max_k * (self.d + self.dv) * shape.kv_dtype.itemsize,
                                 one_part=not uniform and not vector, **sizes)
        fixed = [*self.fixed, self.batch, self.heads_kv, self.max_q, self.max_k, max(1, self.page_size), grid.programs,
                 grid.group, grid.slots,
                 grid.budget, grid.fixed_chunk, grid.fixed_splits, self.machine.multiprocessors, self.before, self.lse_rows,
                 schedule.merging(min(rows, split.bm), merge_rows, self.d, self.dv, split)]
        if self.interpreted:
            launch: Any = Interpreted(spec, fixed, grid.total)
        else:
            with torch.cuda.device(self.index):
                launch = Launch(kernel, spec, fixed, grid.total, self.index, self._maps(call, shape, tile) if shape.descriptors else (), shared)
            launch.again = [2 if name == "v_desc" else 1 for name in schedule.boxes(shape, tile)] if shape.descriptors else []
        items = grid.total - grid.programs
        block = split.bm * schedule.pow2(self.dv, 16)
        self.described = (mode, tile, split, grid)
        return launch, items * block if mode != "tiles" else 0, items * split.bm * 2, items

    def _descriptors(self, call: Call, shape: Shape) -> bool:
        """Whether tiles of keys go through tensor descriptors: nested strides, unpadded head dims, and enough work to hide the
        cost of Triton's own launcher, which encodes them."""
        if not shape.wgmma or self.layout == "paged" or not self._mappable(call, shape):
            return False
        exact = all(64 <= d <= 256 and d == schedule.pow2(d) for d in (self.d, self.dv))
        batch = 1 if self.invariant else self.batch  # which kernel computes a row must not depend on the rest of the batch
        enough = self.forced is not None or batch * self.max_q * self.heads_q >= 32768
        return exact and enough

    def _hopper(self, call: Call, shape: Shape) -> bool:
        """Whether hopper.py computes this: by its features, by tensor maps for Q too, and once it has given a known answer."""
        plain = not (shape.softcap or shape.alibi or shape.bias or shape.rotary or shape.flip or shape.k_scale or shape.v_scale)
        if not plain or self.d != self.dv or shape.out_dtype != shape.dtype or not _nested(call.q) or self.forced is False:
            return False
        if not schedule.hoppers(self.machine.arch, self.d):
            return False
        return self.forced or not hopper_trouble(self.index, self.machine.arch, shape.dtype, self.d)

    def _prepare_hopper(self, call: Call, shape: Shape) -> tuple:
        keys = self.max_k if self.total_q is None else call.k.shape[0] // self.batch  # ragged: on average
        blocks_of = schedule.hopper_for(self.machine.arch, self.d, keys)
        spec = schedule.hopper_spec(shape, blocks_of, next(n for n in (32, 128, 1024) if self.batch <= n or n == 1024))
        kernel = _load(spec, self.index)
        rows, pack = 64 * blocks_of.groups, schedule.packed(self.group)
        heads = self.heads_q // pack
        blocks = self.batch * -(-self.max_q * pack // rows) if self.total_q is None else self.total_q * pack // rows + self.batch
        blocks *= heads
        programs = min(blocks, self.machine.multiprocessors)
        kv_bytes = self.max_k * 2 * self.d * shape.kv_dtype.itemsize * pack // self.group
        group = max(1, min(self.batch * heads, (32 << 20) // max(1, kv_bytes)))
        k_h, v_h = self.fixed[5], self.fixed[8]
        fixed = [*self.fixed[9:12], k_h, v_h, self.batch, heads, self.max_q, self.max_k, blocks, group, self.lse_rows]
        boxes = schedule.hopper_boxes(shape, blocks_of)
        layouts = [schedule.hopper_layout(len(box)) for box in boxes]
        maps = [_map_of(call.q.dtype, tuple(call.q.shape), tuple(call.q.stride()), boxes[0], layouts[0])]
        maps += [_map_of(t.dtype, *_rows_of_all_heads(t), boxes[1], layouts[1]) for t in (call.k, call.v)]
        with torch.cuda.device(self.index):
            launch = Launch(kernel, spec, fixed, programs, self.index, maps)
        self.described = ("hopper", blocks_of, None, schedule.Grid(programs, programs, group, 1, 1, 0, 0))
        return launch, 0, 0, 2

    def _page_descriptors(self, call: Call, shape: Shape, tile: Config) -> bool:
        """The same over pages: of latent heads, whose values are their keys' first columns, in blocks that wgmma takes."""
        if self.machine.arch != "sm_90" or self.layout != "paged" or not self._mappable(call, shape):
            return False
        latent = shape.v_in_k and max(self.d, self.dv) > 256
        exact = sum(schedule.head_blocks(self.d)) == self.d and self.dv == schedule.pow2(self.dv, 16)
        whole = self.page_size % tile.bn == 0 and schedule.loops_for(shape, tile.bm) == "two"
        return latent and exact and whole

    @staticmethod
    def _mappable(call: Call, shape: Shape) -> bool:
        """Whether K and V are what tensor descriptors describe, and what matrix units take as it is loaded."""
        k, v = call.k, call.v
        return shape.aligned and not shape.ieee and k.dtype == v.dtype == call.q.dtype and _nested(k) and _nested(v) and k.numel() > 0

    def _maps(self, call: Call, shape: Shape, tile: Config) -> list[Map]:
        """Tensor maps of K and V for kernels.attend."""
        return [_map_of(t.dtype, *_rows_of_all_heads(t), box)
                for name, box in schedule.boxes(shape, tile).items() for t in (call.v if name == "v_desc" else call.k,)]

    def _resident(self, kernel: Any, spec: Spec) -> int:
        """Programs that one multiprocessor holds at once."""
        if not self.machine.arch.startswith("sm_"):
            return 2
        with torch.cuda.device(self.index):
            kernel.run  # loads it, so that its registers are known
        by_shared = (self.machine.shared + 1024) // (kernel.metadata.shared + 1024)
        registers = max(16, -(-getattr(kernel, "n_regs", 128) // 8) * 8)
        by_registers = 65536 // (registers * 32 * spec.warps)
        # Of four warps a third one lost a sixth on an H200, where 256 pairs met 396 places.
        most = min(4, 8 // spec.warps) if self.machine.arch == "sm_90" else 4
        return max(1, min(by_shared, by_registers, most))

    # ---- at every call

    def __call__(self, call: Call) -> Any:
        q, out = call.q, call.out
        if out is None:
            out = torch.empty(self.out_shape, dtype=q.dtype, device=self.device)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device) if self.has_lse else None
        if not self.empty:
            if self.interpreted:
                self._interpret(call, out, lse)
            else:
                self._launch(call, out, lse)
        return (out, lse) if self.has_lse else out

    def _prepare_direct(self, call: Call) -> None:
        """What `direct` needs; a call that appends, or turns q, is not taken that way."""
        names = ("block_table", "kv_lens", *DIRECT)
        known = all(name in names for name, _ in self.tensors)
        self.taken_directly = self.layout == "paged" and known and self.append is None and not (self.empty or self.interpreted)
        if self.taken_directly:
            self.order = [names.index(name) for name, _ in self.tensors]
            self.new_out, self.new_lse = maker(self.out_shape, call.q.dtype, self.device), maker(self.lse_shape, torch.float32, self.device)
            read = (x if isinstance(x, Tensor) else None for x in (call.alibi_slopes, call.sinks, call.k_scale, call.v_scale))
            self.reaches = overlaps.Reaches(call.out, enumerate((call.q, call.k, call.v, *read)))

    def direct(self, q: Tensor, k: Tensor, v: Tensor, *others_and_out: Tensor | None) -> Any:
        """`__call__` on the tensors of a paged call, without a Call: registry.Bound.direct."""
        index, given = self.index, others_and_out[-1]
        if _current_device() != index:
            return None
        out = self.new_out() if given is None else given
        pointers = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
        ready = self.variants.get(self._variant(*pointers))
        if ready is None or 0 in pointers:
            return None
        if given is not None:
            read = [x.data_ptr() if isinstance(x, Tensor) else 0 for x in others_and_out[3:7]]  # alibi_slopes, sinks, scales
            if self.reaches.near(pointers[3], pointers[:3] + read):
                return None
        lse = self.new_lse() if self.has_lse else None
        self._enqueue(ready, _current_stream(index), pointers, lse, [others_and_out[n] for n in self.order])
        return out if lse is None else (out, lse)

    def _viewed(self, call: Call) -> Call:
        """The call with q, k and v themselves, where it gives the tensors that hold them."""
        if call.within is None:
            return call
        q, k, v = (t.as_strided(*view, t.storage_offset() + place // t.element_size())
                   for t, view, place in zip((call.q, call.k, call.v), self.views, call.within))
        return call._replace(q=q, k=k, v=v, within=None)

    def _numbers(self, call: Call) -> tuple[float, float, float, int, int]:
        scale, v_factor = call.softmax_scale, 1.0
        left, right = call.window_left, call.window_right
        if self.float_scales:
            if call.k_scale is not None and not isinstance(call.k_scale, Tensor):
                scale = scale * call.k_scale
            if call.v_scale is not None and not isinstance(call.v_scale, Tensor):
                v_factor = call.v_scale
        if left > _WIDEST or right > _WIDEST:  # so that position + window stays an int32
            left, right = min(left, _WIDEST), min(right, _WIDEST)
        return scale, call.softcap, v_factor, left, right

    def _launch(self, call: Call, out: Tensor, lse: Tensor | None) -> None:
        index = self.index
        if _current_device() != index:
            with torch.cuda.device(index):
                return self._launch(call, out, lse)
        stream = _current_stream(index)
        if self.append is not None:
            self.append(call, stream)
        pointers = [call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), out.data_ptr()]
        if 0 in pointers:
            freed.refuse_of(call)  # or one of them has no elements
        if call.within is not None:
            pointers[:3] = [pointer + place for pointer, place in zip(pointers, call.within)]
        variant = self._variant(*pointers)
        ready = self.variants.get(variant)
        if ready is None:
            ready = self.variants[variant] = self._prepare(self._viewed(call), *variant)
        self._enqueue(ready, stream, pointers, lse, [getattr(call, name) for name, _ in self.tensors])

    def _variant(self, pq: int, pk: int, pv: int, po: int) -> tuple[bool, bool, bool]:
        return self.shape.aligned and not (pq | pk | pv | po) & 15, pk == pv and self.shape.v_in_k, self.numbers[0] < 0

    def _enqueue(self, ready: tuple, stream: int, pointers: list[int], lse: Tensor | None, tensors: list[Tensor]) -> None:
        """Launches with q's, k's, v's and out's pointers, and the tensors that self.tensors names."""
        launch, floats, stats, counters = ready
        numbers = self.numbers
        if launch.again:  # kernels.attend takes K and V as pointers, too
            pointers[3:3] = [pointers[i] for i in launch.again]
        if lse is not None:
            pointers.append(lse.data_ptr())
        kept = None
        for t, (_, first) in zip(tensors, self.tensors):
            if first is not None:
                t = first(t)
                kept = (kept, t)  # alive until the launch is enqueued; the allocator is ordered by stream after that
            pointers.append(t.data_ptr())
        if counters:
            space = self.space
            held = space.captured(floats + stats, counters) if _capturing() else space.eager(stream, floats + stats, counters)
            if floats:
                pointers += (held[2], held[2] + 4 * floats, held[3])
            else:  # hopper.py
                pointers.append(held[3])
                numbers = (numbers[0], *numbers[3:])
        launch(stream, *pointers, *numbers)

    def _interpret(self, call: Call, out: Tensor, lse: Tensor | None) -> None:
        if self.append is not None:
            self.append(call, 0)
        call = self._viewed(call)
        numbers = self.numbers
        variant = (False, call.k.data_ptr() == call.v.data_ptr() and self.shape.v_in_k, numbers[0] < 0)
        if variant not in self.variants:
            self.variants[variant] = self._prepare(call, *variant)
        launch, floats, stats, counters = self.variants[variant]
        tensors = [call.q, _bytes(call.k), _bytes(call.v), out] + ([lse] if lse is not None else [])
        tensors += [_bytes((first or (lambda x: x))(getattr(call, name))) for name, first in self.tensors]
        if floats:
            space = torch.empty(floats + stats, dtype=torch.float32, device=self.device)
            tensors += [space, space[floats:], torch.zeros(counters, dtype=torch.int32, device=self.device)]
        launch(0, *tensors, *numbers)


_troubles: dict[tuple[int, torch.dtype, int], str] = {}


def hopper_trouble(index: int, arch: str, dtype: torch.dtype, d: int) -> str:
    """"" where hopper.py may serve a device, dtype and head dim, else why not: Gluon is experimental, its names and what its
    compiler makes of them move between versions. At the first use, outside of a capture, it has to compute a known answer."""
    key = (index, dtype, d)
    found = _troubles.get(key)
    if found is None:
        try:
            from . import hopper  # noqa: F401

            if not config.flag("PORTATTN_VERIFY", True):
                return ""
            if _capturing():
                return "met first while a graph was captured"
            found = _answered(index, arch, dtype, d)
            if found and launching.own_maps:  # was it our way of passing tensor maps?
                launching.own_maps = False
                found = _answered(index, arch, dtype, d)
        except Exception as exc:
            found = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
        _troubles[key] = found
    return found


def hopper_notes() -> list[str]:
    """What stands in hopper.py's way on this machine."""
    return [f"hopper.py does not serve {dtype}, head dim {d}: {why}" for (_, dtype, d), why in _troubles.items() if why]


def _answered(index: int, arch: str, dtype: torch.dtype, d: int) -> str:
    """What is wrong with hopper.py's answers, with blocks for few keys and for many."""
    gen, error = torch.Generator("cpu").manual_seed(23), 0.0
    with torch.inference_mode(), torch.cuda.device(index), torch.device("cpu"), torch.autocast("cuda", enabled=False):
        for n in [300, *(h.keys + 100 for h in schedule.hoppers(arch, d)[:-1])]:
            q, k, v = (torch.randn(1, n, heads, d, generator=gen).to(device=f"cuda:{index}", dtype=dtype) for heads in (2, 1, 1))
            call = Call(q, k, v, softmax_scale=d**-0.5, causal=True, window_right=0, max_seqlen_q=n, max_seqlen_k=n)
            try:
                ours = Attention(call, hopper=True)(call).float()
            except Exception as exc:
                return " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
            scores = torch.einsum("bihd,bjd->bhij", q.float(), k[:, :, 0].float()) * d**-0.5
            hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
            want = torch.einsum("bhij,bjd->bihd", scores.masked_fill_(hidden, -torch.inf).softmax(-1), v[:, :, 0].float())
            error = max(error, float(torch.nan_to_num((ours - want).abs(), nan=torch.inf).max()))
    return "" if error <= 0.04 else f"known answer: error {error:.3g}"


class Append:
    """Writes k_new and v_new of a paged call, or of cache_append, into the caches: one small launch."""

    def __init__(self, call: Call | None, slots: tuple[Tensor, ...] | None = None):
        self.interpreted = interpreting()
        if call is not None:
            k_new, v_new, k, v = call.k_new, call.v_new, call.k, call.v
            ragged = call.cu_seqlens_q is not None
            k_scale, v_scale, cos = call.k_scale, call.v_scale, call.rotary_cos
            batch = call.block_table.shape[0]
            names = ["block_table", "kv_lens"] + (["cu_seqlens_q"] if ragged else [])
            dtypes = dict(table=call.block_table.dtype, kv_lens=call.kv_lens.dtype, cu_q=_dtype(call.cu_seqlens_q), slots=None)
            table_b = call.block_table.stride(0) if _plain(call.block_table) else call.block_table.shape[1]
            len_q, columns = 0 if ragged else k_new.shape[1], call.block_table.shape[1]
            interleaved, counting = call.rotary_interleaved, call.counting
        else:
            k_new, v_new, k, v, mapping, k_scale, v_scale = slots
            batch, names, len_q, columns, table_b, cos, interleaved = 1, ["slot_mapping"], 0, 0, 0, None, False
            counting = dialect.AFTER
            dtypes = dict(table=None, kv_lens=None, cu_q=None, slots=mapping.dtype)
        self.names = names + [n for n, s in (("k_scale", k_scale), ("v_scale", v_scale)) if isinstance(s, Tensor)]
        self.names += ["rotary_cos", "rotary_sin"] if cos is not None else []
        small = [mapping] if call is None else [getattr(call, name) for name in self.names if not name.endswith("scale")]
        self.tidy = all(map(_plain, small))
        self.appended, self.function = Appended(k_new, v_new, k, v), "cache_append" if call is None else "attention_paged"
        self.tokens = k_new.shape[0] * (k_new.shape[1] if k_new.dim() == 4 else 1)
        heads = k_new.shape[-2]
        self.index = k.device.index or 0
        search = next(n for n in (16, 128, 1024) if batch < n or n == 1024)
        spec = schedule.append_spec(
            dtype=k_new.dtype, kv_dtype=k.dtype, d=k.shape[-1], dv=v.shape[-1], rotary=2 * cos.shape[1] if cos is not None else 0,
            interleaved=interleaved, rotary_dtype=_dtype(cos), k_scale=isinstance(k_scale, Tensor), v_scale=isinstance(v_scale,
                                                                                                                       Tensor),
            search=search, counting=counting, **dtypes)
        cos_s = (cos.stride(0) if _plain(cos) else cos.shape[1]) if cos is not None else 0
        fixed = [*_row_strides(k_new), *_row_strides(v_new), *_row_strides(k), *_row_strides(v), table_b,
                 *_scale_strides(k_scale),
                 *_scale_strides(v_scale), cos_s, batch, max(1, len_q), k.shape[1], self.tokens, heads, k.shape[0], columns]
        grid = -(-self.tokens // dict(spec.constants)["BT"]) * heads
        self.launch: Any = None
        if grid:
            if self.interpreted:
                self.launch = Interpreted(spec, fixed, grid)
            else:
                kernel = _load(spec, self.index)
                with torch.cuda.device(self.index):
                    self.launch = Launch(kernel, spec, fixed, grid, self.index)

    def __call__(self, call: Call, stream: int) -> None:
        self.run(stream, (call.k_new, call.v_new, call.k, call.v), [getattr(call, name) for name in self.names], call.k_scale,
                 call.v_scale)

    def here(self, tensors: tuple, more: list, k_scale: Any, v_scale: Any) -> None:
        """Launches on the current stream of the tensors' device."""
        if self.interpreted:
            self.run(0, tensors, more, k_scale, v_scale)
        else:
            with torch.cuda.device(self.index):
                self.run(_current_stream(self.index), tensors, more, k_scale, v_scale)

    def run(self, stream: int, tensors: tuple, more: list, k_scale: Any, v_scale: Any) -> None:
        """Launches on a stream; tensors k_new, v_new, k, v, then the optional ones in the kernel's order."""
        if self.launch is None:
            return
        divisors = [float(s) if s is not None and not isinstance(s, Tensor) else 1.0 for s in (k_scale, v_scale)]
        if not self.tidy:
            more = [t if name in ("k_scale", "v_scale") or _plain(t) else t.contiguous() for name, t in zip(self.names, more)]
        places = tuple([t.data_ptr() for t in tensors])
        if places not in self.appended.apart:
            self.appended.look(self.function, places, *tensors)
        if self.interpreted:
            self.launch(0, *(_bytes(t) for t in (*tensors, *more)), *divisors)
        else:
            self.launch(stream, *places, *(t.data_ptr() for t in more), *divisors)


class Merge:
    """merge_states for stacked outs (n, ..., Hq, Dv) and lses (n, ..., Hq)."""

    def __init__(self, outs: Tensor, lses: Tensor, sinks: Tensor | None):
        self.interpreted = interpreting()
        self.index = outs.device.index or 0
        self.parts, self.heads, dv = outs.shape[0], outs.shape[-2], outs.shape[-1]
        self.rows = lses[0].numel()
        self.shape = outs.shape[1:]
        self.launch: Any = None
        if self.rows and dv:
            spec = schedule.merge_spec(dtype=outs.dtype, sinks=_dtype(sinks), dv=dv)
            fixed = [self.parts, self.rows, self.heads, dv]
            grid = -(-self.rows // dict(spec.constants)["BR"])
            if self.interpreted:
                self.launch = Interpreted(spec, fixed, grid)
            else:
                kernel = _load(spec, self.index)
                with torch.cuda.device(self.index):
                    self.launch = Launch(kernel, spec, fixed, grid, self.index)

    def __call__(self, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        outs, lses = outs.contiguous(), lses.contiguous()
        out = torch.empty(self.shape, dtype=outs.dtype, device=outs.device)
        lse = torch.empty(self.shape[:-1], dtype=torch.float32, device=outs.device)
        if self.launch is not None:
            tensors = [outs, lses] + ([sinks.contiguous()] if sinks is not None else []) + [out, lse]
            if self.interpreted:
                self.launch(0, *tensors)
            else:
                with torch.cuda.device(self.index):
                    self.launch(_current_stream(self.index), *(t.data_ptr() for t in tensors))
        return out, lse
