"""portattn/driver.py against a driver library built from C that checks every argument and can fail on demand."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from portattn import driver, native
from portattn.codeobjects import Found, Instance
from portattn.driver import CUDA, Driver
from portattn.errors import KernelError

from .fakes import log, params

INSTANCE = Instance("decode", (("PA_T", "bf16"), ("PA_D", "64")))

def test_a_function_is_loaded_once_a_device_in_its_primary_context(fake):
    d, library = fake
    first = d.function(0, "sm_90", INSTANCE, 100 << 10, "portattn_decode")
    assert d.function(0, "sm_90", INSTANCE, 100 << 10, "portattn_decode") is first
    other = d.function(1, "sm_80", INSTANCE, 0, "portattn_decode")
    assert other is not first and other.index == 1
    lines = log(library)
    assert [x for x in lines if x.startswith("load")] == ["load KERNEL s"] * 2
    assert [x for x in lines if x.startswith("retain")] == ["retain 100", "retain 101"]
    assert [x for x in lines if x.startswith("attribute")] == [f"attribute 8 {100 << 10}"], "only what exceeds 48 KiB is asked for"
    assert library.fake_depth() == 0, "the caller's context is put back"


def test_a_launch_passes_grid_stream_shared_memory_and_the_struct(fake):
    d, library = fake
    f = d.function(0, "sm_90", INSTANCE, 1000, "portattn_decode")
    packed = native.pack(native.ATTENTION, {"q": 0x1122334455667788, "flags": 0xABCD, "scale": 0.5})
    buffer = (ctypes.c_char * len(packed)).from_buffer(packed)
    f.launch((8, 33), 128, 0x77, buffer)
    assert log(library)[-1] == "launch grid 8 33 1 block 128 1 1 shared 1000 stream 0x77"
    seen = ctypes.string_at(params(library), len(packed))
    assert seen == bytes(packed)


def test_errors_carry_the_drivers_words_and_the_problem(fake, monkeypatch):
    d, library = fake
    f = d.function(0, "sm_90", INSTANCE, 0, "portattn_decode")
    monkeypatch.setenv("FAKE_FAIL", "launch:1:719")
    with pytest.raises(KernelError, match=r"(?s)decode-bf16-d64 for sm_90.*1 x 1 blocks of 32.*719.*(LAUNCH_FAILED|LaunchFailure): unspecified launch failure.*paged decode") as e:
        f.launch((1, 1), 32, 0, ctypes.create_string_buffer(400), "paged decode bfloat16")
    assert "device 0" in str(e.value)


def test_a_thread_with_another_context_is_helped_once(fake, monkeypatch):
    d, library = fake
    f = d.function(0, "sm_90", INSTANCE, 0, "portattn_decode")
    monkeypatch.setenv("FAKE_FAIL", "launch:1:201")
    f.launch((1, 1), 32, 0, ctypes.create_string_buffer(400))
    assert [x.split()[0] for x in log(library)][-3:] == ["launch", "push", "launch"] and library.fake_depth() == 0


def test_a_module_without_the_function_is_unloaded(fake):
    d, library = fake
    with pytest.raises(KernelError, match="finding wrong in decode-bf16-d64 for sm_90: error 500"):
        d.function(0, "sm_90", INSTANCE, 0, "wrong")
    assert log(library)[-1].startswith("unload") and library.fake_depth() == 0


def test_code_for_another_architecture_says_so(fake, monkeypatch):
    d, library = fake
    monkeypatch.setattr(driver, "code_object", lambda *a: Found(b"OTHER", "test"))
    with pytest.raises(KernelError, match="loading decode-bf16-d64 for sm_90: error 209"):
        d.function(0, "sm_90", INSTANCE, 0, "portattn_decode")
    monkeypatch.undo()


def test_a_driver_older_than_the_code_is_told_to_be_updated(fake, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", f"load:1:{222 if fake[0].vendor.name == 'cuda' else 209}")
    with pytest.raises(KernelError, match="loading decode-bf16-d64 for sm_90: error 2") as caught:
        fake[0].function(0, "sm_90", INSTANCE, 0, "portattn_decode")
    assert ("update the driver" in str(caught.value)) == (fake[0].vendor.name == "cuda")


def test_two_devices_of_different_architectures_have_code_of_their_own(fake):
    d, library = fake
    first, second = (d.function(i, arch, INSTANCE, 0, "portattn_decode") for i, arch in enumerate(("sm_90", "sm_86")))
    assert first is not second and (first.index, second.index) == (0, 1) and "sm_86" in second.what
    assert d.function(0, "sm_90", INSTANCE, 0, "portattn_decode") is first


def test_eight_threads_load_one_module(fake):
    d, library = fake
    found, errors = [], []

    def work():
        try:
            f = d.function(0, "sm_90", INSTANCE, 0, "portattn_decode")
            for _ in range(50):
                f.launch((1, 1), 32, 0, ctypes.create_string_buffer(400))
            found.append(f)
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and len(set(map(id, found))) == 1
    assert sum(x.startswith("load") for x in log(library)) == 1


def test_a_capture_has_a_number(fake):
    d, _ = fake
    assert d.capture_id(7) == 42 and d.capture_id(5) == 0


def test_a_missing_driver_is_one_clear_error():
    with pytest.raises(KernelError, match="no cuda driver: /nowhere/libcuda.so"):
        Driver(CUDA, "/nowhere/libcuda.so")


def test_a_driver_that_fails_to_start_is_one_clear_error(libraries, monkeypatch):
    ctypes.CDLL(libraries["cuda"]).fake_reset()
    monkeypatch.setenv("FAKE_FAIL", "init:1:100")
    with pytest.raises(KernelError, match="cuInit: error 100.*no GPU is visible"):
        Driver(CUDA, libraries["cuda"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_before_the_first_call_starts_afresh(libraries, monkeypatch):
    monkeypatch.setitem(driver.VENDORS, "cuda", CUDA._replace(libraries=("/nowhere/libcuda.so",)))
    driver._driver.cache_clear()
    with pytest.raises(KernelError):
        driver.driver("cuda")
    driver._lock.acquire()  # as another thread of the parent may hold it
    pid = os.fork()
    if pid == 0:
        monkeypatch.setitem(driver.VENDORS, "cuda", CUDA._replace(libraries=(libraries["cuda"],)))
        try:
            os._exit(0 if driver.driver("cuda").version() == 13000 else 1)
        except BaseException:
            os._exit(2)
    driver._lock.release()
    assert os.waitpid(pid, 0)[1] == 0
    driver._driver.cache_clear()


def test_launchers_patch_pointers_and_flags_of_their_own_copy(fake):
    d, library = fake
    f = d.function(0, "sm_90", INSTANCE, 0, "portattn_decode")
    launcher = native.Launcher(f, native.ATTENTION, {"flags": native.ALIGNED | native.PAGED, "batch": 3}, (2, 5), 64,
                               "a problem")
    addresses = [*range(1, 1 + native.pointers(native.ATTENTION))]
    for off, want in ((0, native.ALIGNED | native.PAGED), (native.ALIGNED, native.PAGED)):
        launcher(9, off, addresses)
        assert log(library)[-1] == "launch grid 2 5 1 block 64 1 1 shared 0 stream 0x9"
        seen = ctypes.string_at(params(library), len(native.pack(native.ATTENTION, {})))
        assert seen == bytes(native.pack(native.ATTENTION, {"flags": want, "batch": 3} | dict(zip((n for n, _ in native.ATTENTION), addresses))))
