"""Threads of the kernels: several callers at once, forks, sleep between calls, and results that do not depend on them."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import portattn
from portattn import reference

library = importlib.import_module("portattn.backends.cpu.library")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def problem(seed: int, len_q: int = 70, len_k: int = 3000):
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, n, h, 64, generator=gen) for n, h in ((len_q, 8), (len_k, 2), (len_k, 2)))


def test_callers_in_several_threads_do_not_disturb_each_other(isa, two_threads):
    work = [problem(seed) for seed in range(6)]
    want = [portattn.attention(*qkv, causal=True, backend="cpu") for qkv in work]
    wrong = []

    def caller(i):
        for _ in range(5):
            if not torch.equal(portattn.attention(*work[i], causal=True, backend="cpu"), want[i]):
                wrong.append(i)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(len(work))]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert not wrong
    expected, _ = reference.attention(*work[0], causal=True)
    torch.testing.assert_close(want[0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("len_q, len_k", [(1, 9000), (70, 3000)], ids=["decode", "extend"])
def test_batch_invariant_results_do_not_depend_on_the_number_of_threads(isa, two_threads, len_q, len_k):
    qkv = problem(1, len_q, len_k)
    two = portattn.attention(*qkv, batch_invariant=True, backend="cpu")
    torch.set_num_threads(1)
    assert torch.equal(two, portattn.attention(*qkv, batch_invariant=True, backend="cpu"))


def test_threads_sleep_between_calls(isa, two_threads):
    qkv = problem(2)
    for _ in range(3):
        portattn.attention(*qkv, backend="cpu")
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1, "processor time is spent while no call runs"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one processor, or no way to choose one")
@pytest.mark.usefixtures("cpu_kernels")
def test_a_woken_thread_leaves_the_callers_processor():
    """In a forked child, whose threads are the kernels' own. Each call first puts its helper where the caller runs."""
    script = """
        import ctypes, os, sys, torch, portattn
        torch.set_num_threads(2)
        qkv = [torch.randn(1, n, 8, 64) for n in (70, 3000, 3000)]
        tasks, libc = lambda: {int(x) for x in os.listdir("/proc/self/task")}, ctypes.CDLL(None)
        run = lambda: portattn.attention(*qkv, backend="cpu")
        run()
        if os.fork() == 0:
            before, allowed = tasks(), os.sched_getaffinity(0)
            for _ in range(500):
                run()
                for helper in tasks() - before:
                    here = libc.sched_getcpu()
                    os.sched_setaffinity(helper, {here})
                    run()
                    if os.sched_getaffinity(helper) == allowed - {here}:
                        os._exit(0)
            os._exit(1)
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "GOMP_parallel"), reason="torch has no OpenMP threads here")
def test_the_threads_of_torch_are_used_and_no_others_beside_them(isa):
    code = textwrap.dedent("""
        import os, torch, portattn
        torch.set_num_threads(2)
        qkv = [torch.randn(1, n, h, 64) for n, h in ((70, 8), (3000, 2), (3000, 2))]
        portattn.attention(*(x[:, :1] for x in qkv), backend="cpu")  # loads the kernels; one key is one thread's work
        torch.zeros(1 << 20).add_(1)
        before = len(os.listdir("/proc/self/task"))
        portattn.attention(*qkv, backend="cpu")
        print(len(os.listdir("/proc/self/task")) - before)
    """)
    more = []
    while len(more) < 5 and 0 not in more:  # other processes may keep torch's threads from running just then
        more.append(int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout))
    assert 0 in more


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_calls_work_after_fork(isa):
    code = textwrap.dedent("""
        import os, signal, torch, portattn
        torch.set_num_threads(2)
        qkv = [torch.randn(1, n, h, 64) for n, h in ((70, 8), (3000, 2), (3000, 2))]
        call = lambda: portattn.attention(*qkv, backend="cpu").tolist()  # torch.equal would hang in a child: torch's own threads
        want = call()
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if call() == want else 3)
        parent = call() == want
        print(parent, os.waitpid(child, 0)[1])
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_a_thread_that_finds_no_memory_is_told_to_the_caller_and_ends_no_process(tmp_path):
    compiler = library._compiler()
    if compiler is None:
        pytest.skip("tool: no C++ compiler")
    (tmp_path / "main.cpp").write_text("""
        #include <chrono>
        #include "threads.h"
        int main() {
          std::atomic<int> here{0}, ended{0};
          auto work = [&] {
            for (here++; here < 2;) std::this_thread::yield();
            ended++;
            throw std::bad_alloc();
          };
          try {
            pa::Pool::instance().run(2, 2, work);
          } catch (const std::bad_alloc&) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));  // in which the other thread might end the process
            return ended == 2 ? 0 : 3;
          }
          return 4;
        }
    """)
    program = str(tmp_path / "main")
    subprocess.run([*compiler, "-std=c++17", "-pthread", f"-I{library.sets.HERE}", str(tmp_path / "main.cpp"), "-o", program], check=True)
    assert subprocess.run([program], timeout=60).returncode == 0
