"""Code objects to functions to launches, through the GPU driver's C API by ctypes: CUDA and HIP by the same calls.

Nothing here links torch, Python or a runtime library, so one wheel serves every torch and every driver. The driver
library is opened at the first use, never at import; modules are loaded once per device, into torch's own (primary)
context; a launch goes to the stream that the caller names. Every failure is a KernelError with the driver's words.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import Any, Callable, NamedTuple

from . import forks
from .codeobjects import Instance, code_object
from .errors import KernelError
from .rtc import mapped


class Vendor(NamedTuple):
    """How one vendor's driver spells what this module calls."""

    name: str
    libraries: tuple[str, ...]
    init: str
    version: str
    device: str
    retain: str
    push: str
    pop: str
    load: str
    unload: str
    function: str
    attribute: str
    launch: str
    launch_ex: str | None   # with attributes
    clusters: str | None    # how many clusters run at once
    tensor_map: str | None  # describes a tensor for the copy engine
    capture_info: str
    capture_mode: str
    error_name: str
    error_string: str
    strings_returned: bool  # hipGetErrorString returns its text, cuGetErrorString writes a pointer
    shared_attribute: int   # the attribute that raises the dynamic shared memory limit
    wrong_context: tuple[int, ...]
    hints: dict[int, str]


CUDA = Vendor(
    "cuda", ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1",),
    "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel", "cuLaunchKernelEx", "cuOccupancyMaxActiveClusters",
    "cuTensorMapEncodeTiled", "cuStreamGetCaptureInfo",
    "cuThreadExchangeStreamCaptureMode", "cuGetErrorName", "cuGetErrorString", False, 8,
    (201, 400),  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
    {3: "after a fork the parent's use of the GPU cannot go on: start processes with spawn",
     100: "no GPU is visible to the driver: see nvidia-smi and CUDA_VISIBLE_DEVICES",
     209: "the code object is for another architecture",
     222: "the driver is older than the compiler of this code: update the driver, or install a torch built for an older CUDA",
     35: "update the driver"},
)
HIP = Vendor(
    "hip", ("amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll") if sys.platform == "win32"
    else ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
    "hipInit", "hipDriverGetVersion", "hipDeviceGet", "hipDevicePrimaryCtxRetain", "hipCtxPushCurrent", "hipCtxPopCurrent",
    "hipModuleLoadData", "hipModuleUnload", "hipModuleGetFunction", "hipFuncSetAttribute", "hipModuleLaunchKernel", None, None, None,
    "hipStreamGetCaptureInfo", "hipThreadExchangeStreamCaptureMode", "hipGetErrorName", "hipGetErrorString", True, 8, (201, 400), {},
)
VENDORS = {"cuda": CUDA, "hip": HIP}

class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of one whose value is up to three ints."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 3), ("rest", ctypes.c_char * 52)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")] + [
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint)]


_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: begin when the launch before says that one may
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: of more than 8 blocks
_RELAXED = 2  # capture mode: this thread may allocate and load while another, or itself, captures
_lock = forks.lock(globals())


class Driver:
    """One vendor's driver library, opened and initialised.

    Args:
        vendor: CUDA or HIP.
        library: path to open instead of the vendor's names (tests).

    Raises:
        KernelError: no library, or it does not initialise.
    """

    def __init__(self, vendor: Vendor, library: str | None = None):
        self.vendor = vendor
        self.lib = open_library(vendor, library)
        self._symbols: dict[str, Any] = {}
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, Instance], Function] = {}
        v = ctypes.c_void_p
        u = ctypes.c_uint
        self.launch_raw = self._symbol(vendor.launch, v, u, u, u, u, u, u, u, v, v, v)
        self.launch_ex = None  # where the driver has it: CUDA 11.8 on
        if vendor.launch_ex and hasattr(self.lib, vendor.launch_ex):
            self.launch_ex = self._symbol(vendor.launch_ex, v, v, v, v)
        self.encode_map = getattr(self.lib, vendor.tensor_map, None) if vendor.tensor_map else None  # CUDA 12 on
        self.call(vendor.init, ctypes.c_uint(0))

    def _symbol(self, name: str, *argtypes: Any) -> Any:
        try:
            function = getattr(self.lib, name)
        except AttributeError:
            raise KernelError(f"the {self.vendor.name} driver has no {name}: it is too old") from None
        if argtypes:
            function.argtypes = argtypes
        function.restype = ctypes.c_int
        return function

    def describe(self, code: int) -> str:
        """The driver's name and text of an error code, and what mends it where that is known."""
        vendor, parts = self.vendor, []
        for symbol in (vendor.error_name, vendor.error_string):
            function = getattr(self.lib, symbol, None)
            if function is None:
                continue
            if vendor.strings_returned:
                function.restype = ctypes.c_char_p
                text = function(ctypes.c_int(code))
            else:
                found = ctypes.c_char_p()
                function(ctypes.c_int(code), ctypes.byref(found))
                text = found.value
            if text:
                parts.append(text.decode(errors="replace"))
        hint = vendor.hints.get(code)
        return f"error {code}" + (f" ({': '.join(parts)})" if parts else "") + (f"; {hint}" if hint else "")

    def call(self, symbol: str, *args: Any, what: str = "") -> None:
        """Calls a function of the driver; raises KernelError if it says anything but success."""
        if symbol not in self._symbols:
            self._symbols[symbol] = self._symbol(symbol)
        code = self._symbols[symbol](*args)
        if code:
            raise KernelError(f"{what or symbol}: {self.describe(code)}")

    def version(self) -> int:
        """The newest runtime that the driver serves: 13000 for CUDA 13.0."""
        found = ctypes.c_int()
        self.call(self.vendor.version, ctypes.byref(found))
        return found.value

    @contextlib.contextmanager
    def context(self, index: int):
        """Makes a device's primary context, which is torch's, current in this thread, and then puts back what was."""
        with _lock:
            if index not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self.call(self.vendor.device, ctypes.byref(device), ctypes.c_int(index))
                self.call(self.vendor.retain, ctypes.byref(context), device)
                self._contexts[index] = context
        self.call(self.vendor.push, self._contexts[index])
        try:
            yield
        finally:
            before = ctypes.c_void_p()
            self.call(self.vendor.pop, ctypes.byref(before))

    @contextlib.contextmanager
    def _unguarded(self):
        """Lets this thread load modules although a stream is being captured."""
        mode = ctypes.c_int(_RELAXED)
        self.call(self.vendor.capture_mode, ctypes.byref(mode))
        try:
            yield
        finally:
            self.call(self.vendor.capture_mode, ctypes.byref(mode))

    def function(self, index: int, arch: str, instance: Instance, shared: int, symbol: str) -> Function:
        """The loaded function of an instance on a device; compiled and loaded at the first call for that device.

        Args:
            index: torch's device index. arch: "sm_90", "gfx942". shared: dynamic shared memory of its launches, bytes.
            symbol: the kernel's name in the code object.
        """
        key = (index, instance)
        found = self._functions.get(key)
        if found is None:
            with _lock:
                found = self._functions.get(key)
                if found is None:
                    image = code_object(self.vendor.name, arch, instance).image
                    found = self._functions[key] = self.load(index, image, symbol, shared, f"{instance} for {arch}")
        return found

    def load(self, index: int, image: bytes, symbol: str, shared: int, what: str) -> Function:
        """Loads a code object on a device and takes one function of it."""
        with self.context(index), self._unguarded():
            module, handle = ctypes.c_void_p(), ctypes.c_void_p()
            self.call(self.vendor.load, ctypes.byref(module), ctypes.c_char_p(image), what=f"loading {what}")
            try:
                self.call(self.vendor.function, ctypes.byref(handle), module, symbol.encode(), what=f"finding {symbol} in {what}")
                if shared > 48 << 10:
                    self.call(self.vendor.attribute, handle, ctypes.c_int(self.vendor.shared_attribute), ctypes.c_int(shared),
                              what=f"asking for {shared} bytes of shared memory for {what}")
            except KernelError:
                getattr(self.lib, self.vendor.unload)(module)
                raise
        return Function(self, index, handle.value, shared, what)

    def capture_id(self, stream: int) -> int:
        """A number that tells one graph capture on a stream from another; 0 when it is not being captured."""
        status, number = ctypes.c_int(), ctypes.c_ulonglong()
        self.call(self.vendor.capture_info, ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
        return number.value if status.value == 1 else 0


def open_library(vendor: Vendor, path: str | None = None) -> ctypes.CDLL:
    """A vendor's driver library: torch's copy of the HIP runtime where it has one, as a second one in a process misbehaves.

    Each call gives an object of its own, with types of arguments of its own. Raises KernelError where there is none.
    """
    tried = []
    for name in (path,) if path else _mapped(vendor) + vendor.libraries:
        try:
            return ctypes.CDLL(name)
        except OSError as exc:
            tried.append(f"{name}: {exc}")
    raise KernelError(f"no {vendor.name} driver: " + "; ".join(tried))


def _mapped(vendor: Vendor) -> tuple[str, ...]:
    """The HIP runtime that torch has mapped."""
    if vendor.name != "hip":
        return ()
    if sys.platform == "win32":
        return tuple(name for name in vendor.libraries if ctypes.windll.kernel32.GetModuleHandleW(name))
    return tuple(mapped("libamdhip64.so"))


class Function:
    """A kernel on a device. `launch` is for any caller; hot paths keep `raw` and the argument pointers themselves."""

    __slots__ = ("driver", "index", "handle", "shared", "what", "raw")

    def __init__(self, driver: Driver, index: int, handle: int, shared: int, what: str):
        self.driver, self.index, self.handle, self.shared, self.what = driver, index, handle, shared, what
        self.raw = driver.launch_raw

    def launch(self, grid: tuple[int, int], threads: int, stream: int, params: ctypes.Array, about: str = "") -> None:
        """Launches `grid` (x, y) blocks of `threads` with one packed params struct; the struct may be reused on return."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        launch = functools.partial(self.raw, self.handle, *grid, 1, threads, 1, 1, self.shared, stream, arguments, None)
        code = launch()
        if code:
            self.failed(code, launch, grid, threads, about)

    def config(self, grid: tuple[int, int], threads: int, cluster: int = 1, overlapping: bool = False) -> LaunchConfig:
        """For `driver.launch_ex`; the caller sets `stream`. `cluster`: blocks of a column that run together. `overlapping`: beside the stream's
        launch before, from when that one says."""
        values = ([(_CLUSTER, (1, cluster, 1))] if cluster > 1 else []) + ([(_OVERLAP, (1, 0, 0))] if overlapping else [])
        attributes = (LaunchAttribute * max(1, len(values)))(*(LaunchAttribute(i, b"", v, b"") for i, v in values))
        return LaunchConfig(*grid, 1, threads, 1, 1, self.shared, None, attributes, len(values))

    def clusters(self, threads: int, size: int) -> int:
        """How many clusters of `size` blocks, 2 or more, the device runs at the same time; 0 where the driver knows none."""
        symbol = self.driver.vendor.clusters
        if symbol is None or self.driver.launch_ex is None or not hasattr(self.driver.lib, symbol):
            return 0
        found, config = ctypes.c_int(), self.config((1, size), threads, size)
        with self.driver.context(self.index):
            if size > 8:
                self.driver.call(self.driver.vendor.attribute, ctypes.c_void_p(self.handle), ctypes.c_int(_LARGE_CLUSTERS), ctypes.c_int(1))
            self.driver.call(symbol, ctypes.byref(found), ctypes.c_void_p(self.handle), ctypes.byref(config))
        return found.value

    def failed(self, code: int, launch: Callable[[], int], grid: tuple[int, int], threads: int, about: str = "") -> None:
        """After `launch` said `code`: launches again if only the thread's context was another, else raises."""
        if code in self.driver.vendor.wrong_context:
            with self.driver.context(self.index):
                code = launch()
            if not code:
                return
        raise KernelError(f"launching {self.what}, {grid[0]} x {grid[1]} blocks of {threads}, {self.shared} bytes shared, device {self.index}: "
                          f"{self.driver.describe(code)}" + (f"\n  {about}" if about else ""))


@functools.lru_cache(maxsize=None)
def _driver(vendor: str) -> Driver | KernelError:
    try:
        return Driver(VENDORS[vendor])
    except KernelError as exc:
        return exc


def driver(vendor: str) -> Driver:
    """The driver of "cuda" or "hip"; raises KernelError (the same one again) where there is none."""
    with _lock:
        found = _driver(vendor)
    if isinstance(found, KernelError):
        raise found.with_traceback(None)
    return found


forks.in_child(_driver.cache_clear)  # handles of the parent mean nothing there; a fork before the first call loses nothing

__all__ = ["CUDA", "Driver", "Function", "HIP", "LaunchConfig", "VENDORS", "Vendor", "driver", "open_library"]
