"""Runs the Gluon kernel of hopper.py on the CPU: one task a partition, tensors as numpy arrays, so that indices, masks and the
protocol of barriers are tested without a GPU.

Asynchronous work is made as late, and as visible, as the contract allows: a TMA load poisons its destination when it is issued and
writes it when somebody waits for its barrier; a matmul reads its operands when it is waited for. Tasks run one at a time, and change
where one waits in vain or has arrived at a barrier; of those that can go on, the same one always goes on: a task that was started
later, so that producers are ahead of consumers, or the other way round. So a slot released too early, or read too early, gives NaN
in every run; where no task can go on, the launch ends in Stuck.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections import deque
from pathlib import Path
from unittest import mock

import numpy as np

SOURCE = Path(__file__).parents[2] / "backends" / "triton" / "hopper.py"


class Stuck(Exception):
    """Barriers that nobody completes."""


class _Ended(BaseException):
    """Unwinds the tasks of a launch that has failed."""


class Task:
    """A thread that runs while it has the turn."""

    def __init__(self, launch: "Launch", pid: int, function, arguments):
        self.launch, self.pid, self.flying, self.ready, self.done = launch, pid, [], lambda: True, False
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self.thread.start()

    def _run(self, function, arguments) -> None:
        _here.task = self
        try:
            self._wait_for_turn()
            with np.errstate(all="ignore"):
                function(*arguments)
        except _Ended:
            pass
        except BaseException as error:
            self.launch.failed = self.launch.failed or error
        self.done = True
        self.launch.turn.release()

    def _wait_for_turn(self) -> None:
        self.turn.acquire()
        if self.launch.failed:
            raise _Ended

    def pause(self, ready=lambda: True) -> None:
        """Lets the tasks run that go first, and goes on once it is ready."""
        self.ready = ready
        self.launch.turn.release()
        self._wait_for_turn()


class Launch:
    """The tasks of a grid; of those that are ready, the one that was started last goes on if `ahead`, else the first."""

    def __init__(self, ahead: bool):
        self.ahead, self.tasks = ahead, []
        self.turn = threading.Semaphore(0)
        self.failed: BaseException | None = None

    def start(self, pid: int, function, arguments=()) -> Task:
        self.tasks.append(Task(self, pid, function, arguments))
        return self.tasks[-1]

    def run(self) -> None:
        while self.tasks:
            task = next((t for t in self.tasks[:: -1 if self.ahead else 1] if self.failed or t.ready()), None)
            if task is None:
                self.failed = Stuck("barriers that nobody completes")
                continue
            task.turn.release()
            self.turn.acquire()
            if task.done:
                self.tasks.remove(task)
        if self.failed:
            raise self.failed


_here = threading.local()


class Tensor(np.ndarray):
    """Values in registers; division of integers truncates, as on the device; 0-d results stay tensors."""

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return np.asarray(array).view(Tensor)

    def to(self, dtype):
        return self.astype(dtype)

    def __floordiv__(self, other):
        return tensor(np.trunc(np.asarray(self) / np.asarray(other)).astype(np.asarray(self).dtype))

    def __rfloordiv__(self, other):
        return tensor(other) // self


def tensor(x, dtype=None) -> Tensor:
    return np.asarray(x, dtype).view(Tensor)


class Pointer:
    """A flat array and element offsets into it."""

    def __init__(self, array: np.ndarray, at=0):
        self.array, self.at = array, at

    def __add__(self, offset):
        return Pointer(self.array, np.asarray(self.at) + np.asarray(offset))

    def __getitem__(self, index):
        raise TypeError("pointers are offset, not indexed")


def load(pointer: Pointer, mask=None, other=0):
    at = np.asarray(pointer.at)
    ok = np.broadcast_to(True if mask is None else np.asarray(mask), at.shape)
    assert ((at >= 0) & (at < pointer.array.size))[ok].all(), "a load outside its tensor"
    return tensor(np.where(ok, pointer.array.reshape(-1)[np.where(ok, at, 0)], other).astype(pointer.array.dtype))


def store(pointer: Pointer, value, mask=None):
    at = np.broadcast_to(np.asarray(pointer.at), np.shape(value))
    ok = np.broadcast_to(True if mask is None else np.asarray(mask), at.shape)
    assert ((at >= 0) & (at < pointer.array.size))[ok].all(), "a store outside its tensor"
    pointer.array.reshape(-1)[at[ok]] = np.asarray(value)[ok]


def atomic_add(pointer: Pointer, value):
    before = tensor(pointer.array.reshape(-1)[pointer.at])
    pointer.array.reshape(-1)[pointer.at] += value
    return before


class Shared:
    """A view of shared memory."""

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype.type, array.shape

    def index(self, i):
        return self.array[int(i)].item() if self.array.dtype == object else Shared(self.array[int(i)])

    def reshape(self, shape):
        return Shared(self.array.reshape(shape))

    def slice(self, start, length, dim=0):
        assert dim == 0
        return Shared(self.array[start : start + length])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def store(self, value):
        self.array[...] = value

    def load(self, layout):
        return tensor(self.array.copy())


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes are there."""

    def __init__(self):
        self.count, self.left, self.bytes, self.phase, self.loads = 0, 0, 0, 0, deque()

    def change(self, arrivals=0, by=0):
        self.left -= arrivals
        self.bytes += by
        assert self.left >= 0, "more arrivals than a barrier counts"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase ^ 1

    def passed(self, phase: int) -> bool:
        """Whether this phase has ended; somebody waits for it, so what is on its way arrives."""
        while self.loads and self.phase == phase:
            self.loads.popleft()()
        return self.phase != phase


def arrive(barrier, count=1, pred=True):
    if pred:
        barrier.change(count)
        _here.task.pause()


def init(barrier, count):
    barrier.count = barrier.left = int(count)


def wait(barrier, phase, pred=True, deps=()):
    if pred and not barrier.passed(int(phase)):
        _here.task.pause(lambda: barrier.passed(int(phase)))


class Descriptor:
    """A tensor map: an array of up to four dimensions and a box."""

    def __init__(self, array: np.ndarray, block_shape):
        self.array, self.block_shape, self.dtype, self.layout = array, list(block_shape), array.dtype.type, None


def load_tile(descriptor, coordinates, barrier, shared):
    shared.array[...] = np.nan
    box = np.zeros(descriptor.block_shape, descriptor.array.dtype)
    ranges = [(int(c), min(int(c) + n, s)) for c, n, s in zip(coordinates, descriptor.block_shape, descriptor.array.shape)]
    assert all(lo >= 0 for lo, _ in ranges)
    if all(lo < hi for lo, hi in ranges):
        box[tuple(slice(0, hi - lo) for lo, hi in ranges)] = descriptor.array[tuple(slice(lo, hi) for lo, hi in ranges)]

    def land():
        shared.array[...] = box.reshape(shared.array.shape)
        barrier.change(by=-box.nbytes)

    barrier.loads.append(land)


class Product:
    """A matmul in flight."""

    def __init__(self, a, b, acc, use_acc):
        self.parts, self.value = (a, b, acc, use_acc), None

    def run(self):
        a, b, acc, use_acc = self.parts
        a = a.array if isinstance(a, Shared) else a
        product = np.asarray(a, np.float32) @ np.asarray(b.array, np.float32)
        self.value = tensor(product + np.asarray(acc) if use_acc else product)


class Grid:
    programs = 1


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    _here.task.flying.append(product)
    return product


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    flying = _here.task.flying
    while len(flying) > num_outstanding:
        flying.pop(0).run()
    done = [d.value if isinstance(d, Product) else d for d in deps]
    assert all(d is not None for d in done), "a result that has not been waited for"
    return done[0] if len(done) == 1 else tuple(done)


def warp_specialize(partitions, warps, registers):
    task = _here.task
    parts = [task.launch.start(task.pid, function, arguments) for function, arguments in partitions]
    task.pause(lambda: all(part.done for part in parts))


def allocate_shared_memory(dtype, shape, layout):
    if layout == "barriers":
        cells = np.empty(shape, object)
        for at in itertools.product(*map(range, shape)):
            cells[at] = Barrier()
        return Shared(cells)
    return Shared(np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else -99, dtype))


def _modules():
    any_layout = lambda *a, **k: None
    both = lambda f: lambda *a: tensor(f(*a))
    gl = types.ModuleType("triton.experimental.gluon.language")
    gl.__dict__.update(
        constexpr=lambda x: x, static_range=range, int32=np.int32, int64=np.int64, float32=np.float32,
        program_id=lambda axis: tensor(_here.task.pid), num_programs=lambda axis: tensor(Grid.programs), num_warps=lambda: 4,
        arange=lambda a, b, layout=None: tensor(np.arange(a, b, dtype=np.int32)),
        zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
        where=both(np.where), maximum=both(np.maximum), minimum=both(np.minimum), abs=both(np.abs), floor=both(np.floor),
        exp2=both(lambda x: np.exp2(np.asarray(x, np.float32))), log2=both(lambda x: np.log2(np.asarray(x, np.float32))),
        max=lambda x, axis: tensor(np.asarray(x).max(axis)), sum=lambda x, axis: tensor(np.asarray(x).sum(axis)),
        load=load, store=store, atomic_add=atomic_add, convert_layout=lambda x, layout: x, barrier=lambda: None,
        allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize,
        BlockedLayout=any_layout, SwizzledSharedLayout=any_layout, SliceLayout=any_layout, DotOperandLayout=any_layout, NVMMADistributedLayout=any_layout)
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=init, wait=wait, expect=lambda b, n: b.change(1, int(n)),
        arrive=arrive)
    hopper.tma = types.SimpleNamespace(async_load=load_tile)
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = warpgroup_mma, warpgroup_mma_wait
    nvidia = types.ModuleType("triton.experimental.gluon.language.nvidia")
    nvidia.hopper = hopper
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.language = (lambda f: f), gl
    gl.nvidia = nvidia
    return {m.__name__: m for m in (gluon, gl, nvidia, hopper)}


def kernels(source: str | None = None):
    """hopper.py, or a changed copy of it, its functions as plain Python; whether Gluon itself has been imported or not."""
    import triton.experimental

    fake, module = _modules(), types.ModuleType("hopper_on_host")
    gluon = fake["triton.experimental.gluon"]
    with mock.patch.dict(sys.modules, fake), mock.patch.object(triton.experimental, "gluon", gluon, create=True):
        exec(compile(source or SOURCE.read_text(encoding="utf-8"), str(SOURCE), "exec"), module.__dict__)
    return module


def launch(kernel, grid: int, /, ahead: bool = True, **arguments) -> None:
    """Runs all programs, beside each other."""
    Grid.programs, run = grid, Launch(ahead)
    for pid in range(grid):
        run.start(pid, lambda: kernel(**arguments))
    run.run()
