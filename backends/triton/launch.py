"""Compiling and launching Triton kernels: one compiled kernel a specialisation, launched through its function handle.

Triton's own launcher costs 11 to 17 us a call on a fast host; a packed argument buffer and cuLaunchKernel (its HIP twin)
through ctypes cost 2 to 3. Signatures are written here and never guessed from values, so what is compiled ahead of time in
the tests is what runs. Triton's launcher stays as the fallback, and the interpreter (TRITON_INTERPRET=1) runs through it.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
from typing import Any, NamedTuple, Sequence

import torch
import triton

from portattn import forks
from portattn.driver import CUDA, HIP, open_library
from portattn.errors import KernelError
from portattn.tensor_map import KINDS, TensorMap

POINTER = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*u8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8", torch.float8_e5m2fnuz: "*fp8e5b16",
}
_FORMAT = {"i32": "i", "i64": "q", "fp32": "f"}


def interpreting() -> bool:
    """Whether Triton's interpreter is on: kernels then run on CPU tensors. Its variable is read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


class Spec(NamedTuple):
    """One specialisation of a kernel: everything that its machine code depends on."""

    name: str  # attend | append | merge, of kernels.py; attend_hopper, of hopper.py
    types: tuple[tuple[str, str], ...]  # runtime arguments, in order: ("q", "*bf16"), ("len_q", "i32")
    constants: tuple[tuple[str, Any], ...]  # the others; None for an absent tensor
    divisible: tuple[tuple[str, int], ...]  # arguments known to be multiples of a number
    warps: int
    stages: int


def compiled(spec: Spec, target: Any = None) -> Any:
    """The compiled kernel (triton.compiler.CompiledKernel) for a target, this machine's by default."""
    if spec.name == "attend_hopper":
        from triton.experimental.gluon._runtime import GluonASTSource as Source

        from . import hopper as module
    else:
        from triton.compiler import ASTSource as Source

        from . import kernels as module

    fn = getattr(module, spec.name)
    index = {name: i for i, name in enumerate(fn.arg_names)}
    signature = {name: "constexpr" for name in fn.arg_names} | dict(spec.types)
    constants = {(index[name],): value for name, value in spec.constants}
    attrs = {(index[name],): [["tt.divisibility", by]] for name, by in spec.divisible}
    if target is None:
        target = triton.runtime.driver.active.get_current_target()
    options = {"num_warps": spec.warps, "num_stages": spec.stages, "enable_fp_fusion": True}
    return triton.compile(Source(fn, signature, constants, attrs), target=target, options=options)


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h, CUDA 11.8 and newer."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint)]


class _Driver:
    """cuLaunchKernel or hipModuleLaunchKernel, with the same eleven arguments; and cuLaunchKernelEx, whose four cost half of
    that in ctypes."""

    def __init__(self):
        hip = bool(getattr(torch.version, "hip", None))
        library = open_library(HIP if hip else CUDA)
        self.launch = library.hipModuleLaunchKernel if hip else library.cuLaunchKernel
        self.launch.restype = ctypes.c_int
        self.encode = None if hip else getattr(library, "cuTensorMapEncodeTiled", None)
        self.launch_ex = None if hip else getattr(library, "cuLaunchKernelEx", None)
        if self.launch_ex is not None:
            self.launch_ex.restype = ctypes.c_int


_ASKED = 48 << 10  # bytes of shared memory above which Triton asks the driver for all that there are
NO_CONTEXT = 201  # of both vendors: a thread that has not used the device yet
REFUSED = (1, 801)  # invalid value, not supported: cuLaunchKernel may still do
_driver: _Driver | None | bool = None


def driver() -> _Driver | None:
    """The driver's launch function, or None where its library cannot be loaded (Triton's launcher serves then)."""
    global _driver
    if _driver is None:
        try:
            _driver = _Driver()
        except (KernelError, AttributeError):
            _driver = False
    return _driver or None


own_maps = True  # calls.py takes this back where a known answer is wrong that way


class Map(NamedTuple):
    """What a tensor descriptor says besides an address: shape and strides in elements, the box, and Gluon's layout of the box."""

    dtype: torch.dtype  # 16 bits
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any = None

    def at(self, pointer: int) -> Any:
        """As Triton's own launcher takes it."""
        base = _Address(pointer, self.dtype)
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.box), self.layout)


class _Address:
    """As much of a tensor as Triton's descriptors ask for."""

    def __init__(self, pointer: int, dtype: torch.dtype):
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


class _TensorMap(TensorMap):
    """A tensor map with the shape and strides that Triton passes behind it."""

    def __init__(self, encode: Any, m: Map, box: Sequence[int], swizzle: int):
        super().__init__(encode, m.dtype, m.shape, m.strides, box, swizzle)
        rank = len(m.shape)
        behind = struct.pack(f"@{rank}i0q{rank}q", *m.shape, *m.strides)
        self.behind = ctypes.create_string_buffer(behind, len(behind))
        first = ctypes.addressof(self.behind)
        strides = first + len(behind) - 8 * rank
        self.parameters = [self.address, *(first + 4 * i for i in range(rank)), *(strides + 8 * i for i in range(rank))]


class Launch:
    """A compiled kernel with its arguments packed; `changing` of them, the first ones, are given at each call: numbers, and
    pointers as ints, a tensor descriptor as the address that it starts from (`maps` has the rest of each)."""

    def __init__(self, kernel: Any, spec: Spec, fixed: Sequence[float], grid: int, device: int, maps: Sequence[Map] = (), shared: int = 0):
        """shared: bytes that a program takes at least, where the driver lets it."""
        self.kernel, self.spec, self.grid, self.device = kernel, spec, grid, device
        self.fixed = tuple(fixed)
        self.again: list[int] = []  # which of the pointers that a call gives are descriptors' too, behind them
        self.lock = threading.Lock()
        kernel.run  # loads the binary: raises OutOfResources where it does not fit
        self.described = tuple(zip((i for i, (_, kind) in enumerate(spec.types) if kind.startswith("tensordesc")), maps))
        self.driver = driver()
        if self.driver is None or not isinstance(kernel.function, int) or _needs_scratch(kernel.metadata):
            self.driver = None
            return
        self.maps = self._encoded()
        if self.maps is None:
            self.driver = None
            return
        places = dict(self.maps)
        codes = ["" if i in places else "Q" if t.startswith("*") else _FORMAT[t] for i, (_, t) in enumerate(spec.types)]
        changing = len(codes) - len(self.fixed)
        self.plain = [i for i in range(changing) if i not in places] if places else None
        # Natural alignment, as struct's native mode lays it out; two null pointers for Triton's scratch arguments.
        offsets = [struct.calcsize("@" + "".join(codes[:i]) + "0" + code) if code else -1 for i, code in enumerate(codes)]
        whole = struct.Struct("@" + "".join(codes) + "0Q" + "QQ")
        self.buffer = ctypes.create_string_buffer(whole.size)
        whole.pack_into(self.buffer, 0, *([0] * (changing - len(places))), *self.fixed, 0, 0)
        self.pack = struct.Struct("@" + "".join(codes[:changing])).pack_into
        base = ctypes.addressof(self.buffer)
        parameters = [p for i, o in enumerate(offsets) for p in (places[i].parameters if i in places else [base + o])]
        parameters += [base + whole.size - 16, base + whole.size - 8]
        if places and len(parameters) != _parameters(kernel):  # a Triton that passes something else behind a descriptor
            self.driver = None
            return
        self.pointers = (ctypes.c_void_p * len(parameters))(*parameters)
        meta = kernel.metadata
        threads = meta.num_warps * meta.target.warp_size
        one, u = ctypes.c_uint(1), ctypes.c_uint
        self.function = ctypes.c_void_p(kernel.function)
        shared = max(meta.shared, min(shared, _ASKED) if meta.shared <= _ASKED else shared)
        self.shape = (u(grid), one, one, u(threads), one, one, u(shared))
        self.launch, self.launch_ex = self.driver.launch, self.driver.launch_ex
        self.config = Config((grid, 1, 1), (threads, 1, 1), shared)
        self.config_ref = ctypes.byref(self.config)

    def _encoded(self) -> list[tuple[int, _TensorMap]] | None:
        """The descriptors' tensor maps; None for Triton's own launcher: where it does not say how it lays out their boxes, and for
        kernels that no known answer has seen with ours."""
        if not self.described:
            return []
        if not own_maps or self.spec.name != "attend_hopper":
            return None
        metas = getattr(self.kernel.metadata, "tensordesc_meta", None) or []
        known = len(metas) == len(self.described) and all(m and {"swizzle", "block_size"} <= m.keys() for m in metas)
        if self.driver.encode is None or not known or any(m.dtype not in KINDS for _, m in self.described):
            return None
        return [(i, _TensorMap(self.driver.encode, m, meta["block_size"], meta["swizzle"]))
                for (i, m), meta in zip(self.described, metas)]

    def __call__(self, stream: int, *changing: float) -> None:
        """Launches on a raw stream handle; pointers are ints."""
        if self.driver is None:
            self._through_triton(changing)
            return
        error = self._enqueue(stream, changing)
        if error:
            self._failed(error, stream, changing)

    def _enqueue(self, stream: int, changing: tuple) -> int:
        with self.lock:  # one buffer: packed and read by the driver before another thread packs it
            if self.plain is not None:
                for i, tensor_map in self.maps:
                    if tensor_map.pointer != changing[i]:
                        tensor_map.move(changing[i])
                changing = [changing[i] for i in self.plain]
            self.pack(self.buffer, 0, *changing)
            if self.launch_ex is None:
                return self.launch(self.function, *self.shape, ctypes.c_void_p(stream), self.pointers, None)
            self.config.stream = stream
            return self.launch_ex(self.config_ref, self.function, self.pointers, None)

    def _failed(self, error: int, stream: int, changing: tuple) -> None:
        if error == NO_CONTEXT:
            with torch.cuda.device(self.device):  # set_device makes the context too where the device is the thread's already
                torch.cuda.set_device(self.device)
                error = self._enqueue(stream, changing)
        if error in REFUSED and self.launch_ex is not None:
            self.launch_ex = None
            error = self._enqueue(stream, changing)
        if error:
            raise KernelError(f"triton kernel {self.spec.name}: the driver refused to launch {self.grid} programs, error {error}")

    def _through_triton(self, changing: tuple) -> None:
        given = list(changing)
        for i, m in self.described:
            given[i] = m.at(given[i])
        values = iter((*given, *self.fixed))
        runtime = dict(self.spec.types)
        constants = dict(self.spec.constants)
        arguments = [next(values) if name in runtime else constants[name] for name in self.kernel.src.fn.arg_names]
        self.kernel[(self.grid, 1, 1)](*arguments)


def _parameters(kernel: Any) -> int:
    """How many parameters the machine code takes."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", kernel.asm.get("ptx", ""), re.S)
    return entry[1].count(".param") if entry else -1


def _needs_scratch(metadata: Any) -> bool:
    return bool(getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0)
                or getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False))


_lock = forks.lock(globals())


class Interpreted:
    """The same calls under TRITON_INTERPRET=1; pointers are tensors. The interpreter patches Triton while it runs: one thread."""

    def __init__(self, spec: Spec, fixed: Sequence[float], grid: int):
        from . import kernels

        self.fn, self.spec, self.fixed, self.grid = getattr(kernels, spec.name), spec, tuple(fixed), grid

    def __call__(self, stream: int, *changing: Any) -> None:
        values = dict(zip((name for name, _ in self.spec.types), (*changing, *self.fixed)))
        with _lock:
            self.fn[(self.grid,)](**values, **dict(self.spec.constants))
