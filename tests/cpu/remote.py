"""The kernels' library as a process (driver.cpp): under qemu for other CPUs, and under sanitizers, which then see each tensor's bounds."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess

import torch

from .conftest import EMULATED, library, registry, sets

HERE = os.path.dirname(os.path.abspath(__file__))
_POINTERS = 20
_data_ptr = torch.Tensor.data_ptr


def compile_driver(compiler: str, folder: str, flags: tuple[str, ...]) -> str:
    """driver.cpp as a program; raises with the compiler's words."""
    target = os.path.join(folder, "driver")
    kept = [f for f in sets.FLAGS if f not in ("-shared", "-fPIC", "-fvisibility=hidden")]
    done = subprocess.run([compiler, *kept, f"-I{sets.HERE}", *flags, "-o", target, os.path.join(HERE, "driver.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return target


class Remote:
    """Stands in for the library that ctypes loads: the same two functions, each call sent to the process."""

    def __init__(self, command: list[str], monkeypatch, errors: str, isa: str = "portable"):
        self.errors = errors
        with open(errors, "wb") as f:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f)
        self.calls, self.tensors = 0, {}  # address: its tensor, kept so that no other tensor gets the address
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: self._seen(x))
        monkeypatch.setattr(library, "library", lambda: self)
        monkeypatch.setattr(library, "missing", lambda: None)
        monkeypatch.setenv("PORTATTN_CPU_ISA", isa)
        monkeypatch.setenv("PORTATTN_VERIFY", "0")
        registry.forget()

    def _seen(self, x: torch.Tensor) -> int:
        at = _data_ptr(x)
        self.tensors.setdefault(at, x)
        return at

    def pa_attention(self, shape: bytes, args: bytes) -> int:
        return self._call(0, shape, args)

    def pa_cache_append(self, shape: bytes, args: bytes) -> int:
        return self._call(1, shape, args)

    def _call(self, function: int, shape: bytes, args: bytes) -> int:
        pieces: dict[int, tuple[int, int]] = {}  # address of a storage: index, bytes
        places = []
        for at in struct.unpack_from(f"{_POINTERS}Q", args):
            if not at:
                places += [-1, 0]
                continue
            storage = self.tensors[at].untyped_storage()
            index, _ = pieces.setdefault(storage.data_ptr(), (len(pieces), storage.nbytes()))
            places += [index, at - storage.data_ptr()]
        send = [struct.pack("2q", function, len(pieces))]
        for at, (_, size) in pieces.items():
            send += [struct.pack("q", size), ctypes.string_at(at, size)]
        try:
            self.process.stdin.write(b"".join((*send, shape, struct.pack(f"{2 * _POINTERS}q", *places), args[8 * _POINTERS:])))
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        code = self._read(8)
        for at, (_, size) in pieces.items():
            ctypes.memmove(at, self._read(size), size)
        self.calls += 1
        return struct.unpack("q", code)[0]

    def _read(self, size: int) -> bytes:
        data = self.process.stdout.read(size)
        if len(data) < size:
            self.process.wait()
            raise AssertionError(f"the process ended with {self.process.returncode}: {self.said()[-4000:]}")
        return data

    def said(self) -> str:
        with open(self.errors, encoding="utf-8", errors="replace") as f:
            return f.read()

    def close(self) -> None:
        """Ends the process; raises if it ended badly (a sanitizer's report at exit) or said something."""
        self.process.stdin.close()
        self.process.stdout.close()
        code = self.process.wait(timeout=60)
        registry.forget()
        assert code == 0 and not self.said(), f"{code}: {self.said()[-4000:]}"


def flags_of(isa: str) -> tuple[str, ...]:
    return EMULATED.get(isa) or sets.SETS[isa]
