"""Compiling and launching Triton kernels: one compiled kernel a specialisation, launched through its function handle.

Triton's own launcher costs 11 to 17 us a call on a fast host; a packed argument buffer and cuLaunchKernel (its HIP twin)
through ctypes cost 2 to 3. Signatures are written here and never guessed from values, so what is compiled ahead of time in
the tests is what runs. Triton's launcher stays as the fallback, and the interpreter (TRITON_INTERPRET=1) runs through it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any, NamedTuple, Sequence

import torch
import triton

POINTER = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*u8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8", torch.float8_e5m2fnuz: "*fp8e5b16",
}
_FORMAT = {"i32": "i", "i64": "q", "fp32": "f"}


def interpreting() -> bool:
    """Whether Triton's interpreter is on: kernels then run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


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
        windows = os.name == "nt"
        name = ("amdhip64.dll" if windows else "libamdhip64.so") if hip else ("nvcuda.dll" if windows else "libcuda.so.1")
        library = ctypes.CDLL(name)
        self.launch = library.hipModuleLaunchKernel if hip else library.cuLaunchKernel
        self.launch.restype = ctypes.c_int
        self.launch_ex = None if hip else getattr(library, "cuLaunchKernelEx", None)
        if self.launch_ex is not None:
            self.launch_ex.restype = ctypes.c_int


NO_CONTEXT = 201  # of both vendors: a thread that has not used the device yet
REFUSED = (1, 801)  # invalid value, not supported: cuLaunchKernel may still do
_driver: _Driver | None | bool = None


def driver() -> _Driver | None:
    """The driver's launch function, or None where its library cannot be loaded (Triton's launcher serves then)."""
    global _driver
    if _driver is None:
        try:
            _driver = _Driver()
        except (OSError, AttributeError):
            _driver = False
    return _driver or None


class Launch:
    """A compiled kernel with its arguments packed; `changing` of them, the first ones, are given at each call."""

    def __init__(self, kernel: Any, spec: Spec, fixed: Sequence[float], grid: int, device: int):
        self.kernel, self.spec, self.grid, self.device = kernel, spec, grid, device
        self.fixed = tuple(fixed)
        self.lock = threading.Lock()
        kernel.run  # loads the binary: raises OutOfResources where it does not fit
        self.described: Any = None  # set by calls.py where the kernel takes tensor descriptors: what makes them of a call
        self.driver = driver()
        descriptors = any(kind.startswith("tensordesc") for _, kind in spec.types)
        if self.driver is None or descriptors or not isinstance(kernel.function, int) or _needs_scratch(kernel.metadata):
            self.driver = None
            return
        codes = ["Q" if t.startswith("*") else _FORMAT[t] for _, t in spec.types]
        changing = len(codes) - len(self.fixed)
        # Natural alignment, as struct's native mode lays it out; two null pointers for Triton's scratch arguments.
        offsets = [struct.calcsize("@" + "".join(codes[:i]) + "0" + code) for i, code in enumerate(codes)]
        whole = struct.Struct("@" + "".join(codes) + "0Q" + "QQ")
        self.buffer = ctypes.create_string_buffer(whole.size)
        whole.pack_into(self.buffer, 0, *([0] * changing), *self.fixed, 0, 0)
        offsets += [whole.size - 16, whole.size - 8]
        self.pack = struct.Struct("@" + "".join(codes[:changing])).pack_into
        base = ctypes.addressof(self.buffer)
        self.pointers = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))
        meta = kernel.metadata
        threads = meta.num_warps * meta.target.warp_size
        one, u = ctypes.c_uint(1), ctypes.c_uint
        self.function = ctypes.c_void_p(kernel.function)
        self.shape = (u(grid), one, one, u(threads), one, one, u(meta.shared))
        self.launch, self.launch_ex = self.driver.launch, self.driver.launch_ex
        self.config = Config((grid, 1, 1), (threads, 1, 1), meta.shared)
        self.config_ref = ctypes.byref(self.config)

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
            self.pack(self.buffer, 0, *changing)
            if self.launch_ex is None:
                return self.launch(self.function, *self.shape, ctypes.c_void_p(stream), self.pointers, None)
            self.config.stream = stream
            return self.launch_ex(self.config_ref, self.function, self.pointers, None)

    def _failed(self, error: int, stream: int, changing: tuple) -> None:
        if error == NO_CONTEXT:
            torch.cuda.set_device(self.device)
            error = self._enqueue(stream, changing)
        if error in REFUSED and self.launch_ex is not None:
            self.launch_ex = None
            error = self._enqueue(stream, changing)
        if error:
            from portattn.errors import KernelError

            raise KernelError(f"triton kernel {self.spec.name}: the driver refused to launch {self.grid} programs, error {error}")

    def _through_triton(self, changing: tuple) -> None:
        values = iter((*changing, *self.fixed))
        runtime = dict(self.spec.types)
        constants = dict(self.spec.constants)
        arguments = [next(values) if name in runtime else constants[name] for name in self.kernel.src.fn.arg_names]
        self.kernel[(self.grid, 1, 1)](*arguments)


def _needs_scratch(metadata: Any) -> bool:
    return bool(getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0)
                or getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False))


_one_at_a_time = threading.Lock()


class Interpreted:
    """The same calls under TRITON_INTERPRET=1; pointers are tensors. The interpreter patches Triton while it runs: one thread."""

    def __init__(self, spec: Spec, fixed: Sequence[float], grid: int):
        from . import kernels

        self.fn, self.spec, self.fixed, self.grid = getattr(kernels, spec.name), spec, tuple(fixed), grid

    def __call__(self, stream: int, *changing: Any) -> None:
        values = dict(zip((name for name, _ in self.spec.types), (*changing, *self.fixed)))
        with _one_at_a_time:
            self.fn[(self.grid,)](**values, **dict(self.spec.constants))
