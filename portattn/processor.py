"""What a CPU is called; needs Python alone, so that cmake/cpu.py can use it too."""

from __future__ import annotations

import platform


def cpu_arch() -> str:
    """"x86_64" or "aarch64", whatever the operating system calls them."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
