"""The conformance suite: every rule of the contract as named tests, for any backend, also one of your own.

    portattn conformance --backend NAME [--device cuda] [--level full]
    pytest -p portattn.testing.plugin --pyargs portattn.testing --portattn-backend NAME --portattn-device cpu

Files: cases (what a call looks like), tolerance (C-TOL), target (runs, compares, judges a no), runner (outcomes and report),
test_*.py (the rules). A test fails when its rule is broken: tests/meta holds broken backends that prove it.
"""

from __future__ import annotations

from typing import Any


def run(backend: str, device: str = "cpu", level: str = "quick", **options: Any):
    """Runs the suite on a backend; see `portattn.testing.runner.run`."""
    from .runner import run as _run

    return _run(backend, device, level, **options)


def main(argv=None) -> int:
    """`portattn conformance`; returns the exit code."""
    from .runner import main as _main

    return _main(argv)


__all__ = ["main", "run"]
