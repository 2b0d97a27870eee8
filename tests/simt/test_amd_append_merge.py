"""The append and merge kernels over csrc_hip's warp.h, on an emulated AMD device: the tests of test_append_merge.py."""

from __future__ import annotations

import pytest

from . import host
from .test_amd import GFX
from .test_append_merge import (  # noqa: F401  collected here too, under the fixture below
    test_a_call_appends_turned_keys_where_they_land,
    test_slots_are_written_and_negative_ones_skipped,
    test_states_merge_exactly_and_empty_ones_do_nothing,
    test_tokens_of_pages_outside_the_cache_go_nowhere,
)

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True, params=GFX)
def device(request, monkeypatch):
    def launched(kernel, options, packed, grid, tensors, order=host.RANDOM):
        host.run(host.build(kernel, **GFX[request.param], **options), f"portattn_simt_{kernel}", packed, grid, order)

    monkeypatch.setattr(host, "launch", launched)
