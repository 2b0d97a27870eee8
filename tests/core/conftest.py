import sys
from pathlib import Path

import pytest
import torch

import portattn
from portattn import registry

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_cache(cache_folder):
    """What one test finds out about backends never reaches another."""
    registry.forget()
    yield
    registry.forget()


@pytest.fixture
def qkv():
    gen = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, n, h, 16, generator=gen) for n, h in ((5, 4), (9, 2), (9, 2)))


@pytest.fixture
def usual(qkv):
    """The backend that serves qkv when no test has added one."""
    return portattn.explain(portattn.attention, *qkv).backend
