"""`import portattn` is cheap and harmless, and survives what surrounds it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import portattn


def run(code, timeout=120, **env):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, env=dict(os.environ, **env))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_no_triton_no_context_no_thread_and_no_adapter():
    run("""
        import sys, threading, torch
        before, threads = set(sys.modules), threading.active_count()
        import portattn
        new = set(sys.modules) - before
        assert not [m for m in new if m.split(".")[0] in ("triton", "flash_attn", "aiter", "transformers", "pytest")], new
        assert not [m for m in new if m.startswith("portattn.backends.")], new
        assert threading.active_count() == threads and not torch.cuda.is_initialized()
        portattn.backends()
        assert not torch.cuda.is_initialized()
    """)


def test_everything_runs_with_other_peoples_packages_blocked_or_broken():
    run("""
        import sys, types
        class Broken(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                raise KeyError(f"Unknown GPU architecture: {name}")
        for name in ("triton", "flash_attn", "xformers", "flashinfer"):
            sys.modules[name] = None
        sys.modules["aiter"] = Broken("aiter")
        import torch, portattn
        q = torch.randn(1, 2, 2, 8)
        cu = torch.tensor([0, 2])
        portattn.attention(q, q, q)
        portattn.attention_varlen(q[0], q[0], q[0], cu, cu, 2, 2)
        portattn.attention_paged(q, q, q.clone(), torch.tensor([[0]]), torch.tensor([2]))
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_forked_while_another_thread_makes_a_choice_computes():
    run("""
        import os, signal, threading, torch, portattn
        from portattn import registry
        held, done = threading.Event(), threading.Event()
        def choosing():  # as the first use of a backend does for seconds, while it compiles
            with registry._lock:
                held.set()
                done.wait()
        threading.Thread(target=choosing, daemon=True).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            torch.set_num_threads(1)
            q = torch.randn(1, 2, 2, 8)
            os._exit(0 if portattn.attention(q, q, q, backend="sdpa").shape == q.shape else 1)
        status = os.waitpid(pid, 0)[1]
        done.set()
        assert status == 0, status
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_no_lock_is_held_in_a_forked_child():
    run("""
        import importlib, importlib.util, os, threading
        names = ["registry", "driver", "codeobjects", "backends.cpu.library"] + ["backends.triton.calls"] * (importlib.util.find_spec("triton") is not None)
        modules = [importlib.import_module("portattn." + name) for name in names]
        thread = threading.Thread(target=lambda: [m._lock.acquire() for m in modules])
        thread.start(), thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(sum(not m._lock.acquire(timeout=1) for m in modules))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_forked_while_another_thread_asks_for_statuses_has_them():
    run("""
        import os, signal, threading, torch, portattn
        from portattn import registry
        asked, done, installed = threading.Event(), threading.Event(), registry._installed_version
        def slow(package):
            asked.set()
            done.wait()
            return installed(package)
        registry._installed_version = slow
        threading.Thread(target=portattn.backends, daemon=True).start()
        assert asked.wait(30)
        registry._installed_version = installed
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            os._exit(0 if portattn.backends()["sdpa"].level == "ready" else 1)
        status = os.waitpid(pid, 0)[1]
        done.set()
        assert status == 0, status
    """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_forked_after_import_computes():
    run("""
        import os, torch, portattn
        pid = os.fork()
        if pid == 0:
            q = torch.randn(1, 2, 2, 8)
            portattn.attention(q, q, q)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    """)


def test_no_posix_module_is_needed_at_import():
    run("""
        import sys
        import torch, yaml, importlib.metadata
        for name in ("resource", "fcntl", "pwd", "grp", "termios"):
            sys.modules[name] = None
        import portattn, portattn.cli
    """)


def test_a_package_without_backends_as_in_a_zip_file_says_so():
    run("""
        import torch, portattn
        portattn.backends.__path__ = ["/somewhere/portattn.zip/portattn/backends"]
        q = torch.randn(1, 2, 2, 8)
        try:
            portattn.attention(q, q, q)
        except portattn.NoBackendError as error:
            assert "no backend was found" in str(error) and "zip" in str(error), error
        else:
            raise SystemExit(1)
    """)


def test_the_backends_folder_says_what_to_import_instead():
    folder = Path(next(iter(portattn.backends.__path__)))
    if folder.name != "backends" or folder.parent.name == "portattn":
        pytest.skip("installed: there is no top-level folder")
    done = subprocess.run([sys.executable, "-c", "import backends"], capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode != 0 and "import portattn.backends" in done.stderr


def test_backends_is_the_package_and_the_call():
    import portattn.backends.sdpa as adapter

    assert portattn.backends()["sdpa"].level == "ready" and adapter.attention
