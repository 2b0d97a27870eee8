import sys
from pathlib import Path

import pytest
import torch

from portattn import registry

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Verdicts of one test never reach another, nor the user's folder."""
    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path / "cache"))
    registry.forget()
    yield
    registry.forget()


@pytest.fixture
def qkv():
    gen = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, n, h, 16, generator=gen) for n, h in ((5, 4), (9, 2), (9, 2)))
