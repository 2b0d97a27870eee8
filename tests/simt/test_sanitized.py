"""A few of the kernels' runs again under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from . import host

CASES = ("test_ragged_lengths_at_any_number_of_workers[14-32-4]", "test_options[offset-page]", "test_eight_bit_caches[e5m2-32-4]",
         "test_batch_invariant_rows_are_the_same_bits_alone_and_in_a_batch[6-2]")
PLAIN = ("test_ragged_lengths_at_any_number_of_workers[7-True]", "test_ragged_lengths_at_any_number_of_workers[7-False]",
         *(f"test_of_a_ragged_batch_only_sequences_of_one_token_are_computed[{cache}]" for cache in (None, "e4m3")))
AMD = ("test_pages_left_of_every_window_may_hold_anything[offset-page-gfx9]",)


def _library() -> str | None:
    if shutil.which("g++") is None:
        return None
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


pytestmark = pytest.mark.skipif(host.SANITIZED or _library() is None, reason="tool: no libasan beside g++")


def _run(*arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"LD_PRELOAD": _library(), "PORTATTN_SIMT_SANITIZE": "1", "UBSAN_OPTIONS": "print_stacktrace=1",
                        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    return subprocess.run([sys.executable, *arguments], env=env, cwd=host.ROOT, capture_output=True, text=True)


def test_kernels_are_clean():
    done = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/simt/test_decode.py::{c}" for c in CASES),
                *(f"tests/simt/test_plain.py::{c}" for c in PLAIN), *(f"tests/simt/test_amd_mixed.py::{c}" for c in AMD))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"{len(CASES) + len(PLAIN) + len(AMD)} passed" in done.stdout


def test_the_sanitizer_would_notice():
    """An overrun by one element, on purpose: the run must end with ASan's report."""
    code = ("import torch\nfrom tests.simt import host\n"
            "outs, lses = torch.zeros(2, 3, 1, 40), torch.zeros(2, 3, 1)\n"
            "import portattn.native as n\nreal = n.merge_values\n"
            "n.merge_values = lambda *a: real(*a) | {'rows': 4, 'lses_state': 4}\n"
            "host.merge(outs, lses)\n")
    done = _run("-c", code)
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr, done.stderr[-2000:]
