"""The append and merge kernels as the compilers made them: the tests of tests/simt, executed instruction by instruction."""

from __future__ import annotations

import pytest
import torch

from portattn.instances import Instance
from tests.simt import host
from tests.simt.test_append_merge import (  # noqa: F401  collected here too, under the fixture below
    test_a_call_appends_turned_keys_where_they_land,
    test_slots_are_written_and_negative_ones_skipped,
    test_states_merge_exactly_and_empty_ones_do_nothing,
    test_storing_rounds_to_nearest_even_and_saturates,
    test_tokens_of_pages_outside_the_cache_go_nowhere,
    test_tokens_past_the_table_and_slots_past_the_cache_go_nowhere,
)

from . import launch, program
from .test_attention import CHIEF


@pytest.fixture(autouse=True, params=CHIEF)
def finished(request, monkeypatch):
    """host.append and host.merge launch finished objects."""
    if reason := program.missing(request.param):
        pytest.skip(reason)

    def launched(kernel, options, packed, grid, tensors, order=program.FORWARD):
        instance = Instance(kernel, tuple((f"PA_{name.upper()}", value) for name, value in options.items()))
        program.program(request.param, instance).run(packed, grid, launch.memory(x for x in tensors if isinstance(x, torch.Tensor)), order)

    monkeypatch.setattr(host, "launch", launched)
