"""Shared by all tests: a cache folder that is a test's own, but for compiled kernels, which take seconds."""

import shutil

import pytest


@pytest.fixture
def cache_folder(tmp_path, tmp_path_factory, monkeypatch):
    """PORTATTN_CACHE is a folder of this test: verdicts reach neither other tests nor the user's folder."""
    cache, kept = tmp_path / "cache", tmp_path_factory.getbasetemp() / "kernels"
    if kept.exists():
        shutil.copytree(kept, cache / "kernels")
    monkeypatch.setenv("PORTATTN_CACHE", str(cache))
    yield cache
    if (cache / "kernels").is_dir() and not kept.exists():
        shutil.copytree(cache / "kernels", kept)
