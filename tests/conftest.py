"""Shared by all tests: a cache folder that is a test's own, but for compiled kernels, which take seconds."""

import contextlib
import shutil
import types

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


@pytest.fixture
def cpu_kernels():
    """Skips where the backend cpu cannot run: on another system, or without a C++ compiler."""
    from portattn import registry

    if no := [reason for reason in registry.probe("cpu", "cpu") if reason.code in ("platform", "compiler")]:
        pytest.skip(str(no[0]))


@pytest.fixture
def triton_without_gpu(monkeypatch):
    """The Triton backend's host code on CPU tensors, as on an H200: a function that has the arguments of every launch put into a list."""
    def fake(launches: list) -> None:
        import torch

        pytest.importorskip("triton", minversion="3.4")
        from portattn.backends.triton import calls, schedule

        class Launch:
            described = ()

            def __init__(self, *_):
                pass

            def __call__(self, *args):
                launches.append(args)

        kernel = types.SimpleNamespace(metadata=types.SimpleNamespace(shared=0), run=None)
        for name, answer in dict(interpreting=lambda: False, machine_of=lambda device: schedule.Machine("sm_90", 132, 227 << 10),
                                 _load=lambda spec, index: kernel, Launch=Launch, _current_device=lambda: 0, _current_stream=lambda index: 0x90,
                                 _capturing=lambda: False).items():
            monkeypatch.setattr(calls, name, answer)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    return fake
