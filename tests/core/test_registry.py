"""Order, overrides, reasons, warnings, plugins and quarantine: what the registry promises, on toy backends."""

import asyncio
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import warnings

import pytest
import torch
from toys import attention, toy, toy_manifest

import portattn
from portattn import Reason, config, reference, registry, verdicts  # noqa: F401  (Reason is public for adapters)
from portattn.manifest import ManifestError


def chosen(*args, **kw):
    return portattn.explain(portattn.attention, *args, **kw).backend


# ------------------------------------------------------------------ order
def test_the_highest_priority_that_can_is_chosen(qkv):
    with toy("high", priority=901, capability=dict(dtypes=["bfloat16"])), toy("low", priority=900):
        assert chosen(*qkv) == "low"
        assert chosen(*(x.bfloat16() for x in qkv)) == "high"


def test_backend_argument_comes_before_use_before_the_environment(qkv, monkeypatch):
    with toy("a"), toy("b"), toy("c"):
        monkeypatch.setenv("PORTATTN_BACKEND", "c")
        assert chosen(*qkv) == "c"
        with portattn.use("b"):
            assert chosen(*qkv) == "b"
            assert chosen(*qkv, backend="a") == "a"
        assert chosen(*qkv) == "c"


def test_a_change_of_the_environment_is_honoured_between_two_equal_calls(qkv, monkeypatch):
    with toy("a") as a, toy("b") as b:
        monkeypatch.setenv("PORTATTN_BACKEND", "a")
        portattn.attention(*qkv)
        monkeypatch.setenv("PORTATTN_BACKEND", "b")
        portattn.attention(*qkv)
    assert a and b


@pytest.mark.parametrize("value", ["", " ", ",", " , ,", "\t"])
def test_an_order_that_names_nothing_is_none(qkv, usual, monkeypatch, value):
    monkeypatch.setenv("PORTATTN_BACKEND", value)
    assert chosen(*qkv) == usual
    portattn.attention(*qkv)


def test_a_backend_is_not_ready_for_being_importable(monkeypatch):
    """A device that a backend serves besides those that it is made for, as an interpreter does, says nothing before it was tried."""
    with toy(capability=dict(devices=["cpu", "xpu"]), native=["xpu"]):
        monkeypatch.setattr(registry, "_present_devices", lambda: {"cpu"})
        status = portattn.backends()["toy"]
        assert status.level == "unavailable" and status.reasons[0].need == "xpu"
        assert not registry.probe("toy", "cpu") and portattn.backends()["toy"].level == "ready"
        monkeypatch.setattr(registry, "_present_devices", lambda: {"cpu", "xpu"})
    with toy(capability=dict(devices=["cpu", "xpu"]), native=["xpu"]):
        assert portattn.backends()["toy"].level == "ready"


def test_a_gpu_that_is_too_old_for_a_backend_breaks_it_not(monkeypatch):
    """Turing beside kernels for Ampere is no trouble that doctor would have to report as an error."""
    old = Reason("arch", "sm_80 or newer", "sm_75")
    with toy(probe=lambda device: (old,) if device.type == "meta" else ()):
        assert registry.probe("toy", "meta") == (old,)
        assert portattn.backends()["toy"] == ("unavailable", (old,))
        registry.probe("toy", "cpu")
        assert portattn.backends()["toy"] == ("partial", (old,))  # a box of two kinds
    with toy(probe=lambda device: (Reason("driver", "a driver", "none"),) if device.type == "meta" else (old,)):
        registry.probe("toy", "cpu")
        registry.probe("toy", "meta")
        assert portattn.backends()["toy"].level == "broken"


def test_an_amd_gpu_without_a_name_of_its_architecture_is_declined(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name in (None, ""):
        properties = types.SimpleNamespace(gcnArchName=name, name="GPU", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        registry.forget()
        assert portattn.device.facts(torch.device("cuda", 0)) == ("hip", "", "GPU")


def test_a_driver_that_raises_when_devices_are_counted_is_no_device(monkeypatch):
    def raises(*_):
        raise RuntimeError("no HIP GPUs are available")

    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "device_count", raises)
    monkeypatch.setattr(torch.backends.mps, "is_available", raises)
    states = portattn.backends()
    assert states["sdpa"].level == "ready" and states["hip"].level == "unavailable"


def test_a_forced_backend_never_falls_through(qkv):
    with toy(capability=dict(features=["lse"])):
        with pytest.raises(portattn.NoBackendError) as caught:
            portattn.attention(*qkv, softcap=3.0, backend="toy")
        assert [r.code for r in caught.value.rejected["toy"]] == ["softcap"]
        assert "sdpa" in str(caught.value), "the text says which backend would be able"
        with portattn.use("toy"), pytest.raises(portattn.NoBackendError):
            portattn.attention(*qkv, softcap=3.0)
        with portattn.use("toy", "sdpa"):
            assert chosen(*qkv, softcap=3.0) == "sdpa"


def test_unknown_names_are_errors_that_list_the_names(qkv, monkeypatch):
    with pytest.raises(portattn.ArgumentError, match="sdpa"):
        portattn.attention(*qkv, backend="sdqa")
    with pytest.raises(portattn.ArgumentError, match="sdpa"):
        portattn.use("sdqa")
    with pytest.raises(portattn.ArgumentError):
        portattn.use()
    monkeypatch.setenv("PORTATTN_BACKEND", "sdqa")
    with pytest.raises(portattn.ArgumentError, match="PORTATTN_BACKEND.*sdpa"):
        portattn.attention(*qkv)


def test_use_is_local_to_its_context_and_decorates(qkv):
    with toy():
        seen = []
        with portattn.use("toy"):
            thread = threading.Thread(target=lambda: seen.append(registry.current_order()))
            thread.start()
            thread.join()
            assert registry.current_order() == ("toy",)
        assert seen == [None]

        @portattn.use("toy")
        def inside():
            return chosen(*qkv)

        assert inside() == "toy" and registry.current_order() is None


# ------------------------------------------------------------------ reasons and text
def test_one_use_object_serves_threads_and_tasks_at_once():
    order, faults = portattn.use("sdpa"), []

    def enter_often():
        try:
            for _ in range(100):
                with order, order:
                    time.sleep(0)
                    assert registry.current_order() == ("sdpa",)
                assert registry.current_order() is None
        except Exception as exc:
            faults.append(exc)

    threads = [threading.Thread(target=enter_often) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not faults

    async def task(n):
        with order:
            await asyncio.sleep(n * 1e-4)
            assert registry.current_order() == ("sdpa",)
        assert registry.current_order() is None

    async def main():
        await asyncio.gather(*map(task, [3, 0, 2, 1]))

    asyncio.run(main())


def test_use_decorates_coroutines_and_refuses_what_it_would_leave_too_early():
    @portattn.use("sdpa")
    async def coroutine():
        await asyncio.sleep(0)
        return registry.current_order()

    assert asyncio.run(coroutine()) == ("sdpa",) and registry.current_order() is None

    def generator():
        yield

    async def asynchronous():
        yield

    for function in (generator, asynchronous):
        with pytest.raises(portattn.ArgumentTypeError, match="generator"):
            portattn.use("sdpa")(function)


def test_an_order_with_a_name_that_is_gone_is_an_argument_error(qkv):
    with toy("gone"):
        order = portattn.use("gone")
    with order, pytest.raises(portattn.ArgumentError, match="use: unknown backend 'gone'"):
        portattn.attention(*qkv)


def test_the_error_names_every_backend_with_every_reason(qkv):
    with toy("one", capability=dict(dtypes=["bfloat16"], head_dims=[64, 128], features=[])), toy("two", probe=lambda d: (Reason("broken", "x", "y", "z"),)):
        with portattn.use("one", "two"), pytest.raises(portattn.NoBackendError) as caught:
            portattn.attention(*qkv, causal=True)
    text = str(caught.value)
    assert [r.code for r in caught.value.rejected["one"]] == ["dtype", "head_dim", "causal"]
    assert "head_dim: need 64|128, have 16" in text and "two" in text and "fix: z" in text


def test_explain_runs_nothing_and_says_why_not_the_others(qkv, usual):
    with toy(capability=dict(features=[])) as calls:
        choice = portattn.explain(portattn.attention, *qkv, softcap=1.0)
        assert choice.backend == usual and [r.code for r in choice.rejected["toy"]] == ["softcap"]
        assert choice.problem.head_dim == 16 and "softcap: need without, have softcap" in str(choice)
        assert not calls


@pytest.mark.usefixtures("cpu_kernels")
def test_falling_below_a_native_choice_warns_once_with_the_reason(qkv):
    registry._warned.clear()
    with toy(capability=dict(features=[]), native=["cpu"]):
        with pytest.warns(RuntimeWarning, match="toy.*softcap") as told:
            portattn.attention(*qkv, softcap=1.0)
        assert [warning.filename for warning in told] == [__file__]  # the caller's line
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            portattn.attention(*qkv, softcap=2.0)
            portattn.attention(*qkv, softcap=1.0, backend="sdpa")


def test_a_backend_of_another_device_is_passed_over_in_silence(qkv, usual):
    with toy(capability=dict(devices=["cuda"]), native=["cuda"]), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(*qkv) == usual
        assert [r.code for r in portattn.explain(portattn.attention, *qkv).rejected["toy"]] == ["device"]


def test_quadratic_memory_is_refused_above_the_threshold_unless_allowed(qkv, usual, monkeypatch):
    monkeypatch.setattr(registry, "QUADRATIC_LIMIT", 2 * 4 * 5 * 9 - 1)
    with toy(capability=dict(memory="quadratic")):
        assert chosen(*qkv) == usual
        assert [r.code for r in portattn.explain(portattn.attention, *qkv).rejected["toy"]] == ["memory"]
        monkeypatch.setenv("PORTATTN_ALLOW_QUADRATIC", "1")
        assert chosen(*qkv) == "toy"


# ------------------------------------------------------------------ adapters that misbehave
def test_an_adapter_that_raises_at_import_is_a_reason(tmp_path, qkv, usual):
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "backend.yaml").write_text("{schema: 1, name: bad, title: b, priority: 999, capabilities: [{id: a, layouts: [dense], dtypes: [float32]}]}")
    registry._add("bad", str(folder), "a_module_that_is_not_there")
    try:
        assert chosen(*qkv) == usual
        (reason,) = portattn.explain(portattn.attention, *qkv).rejected["bad"]
        assert reason.code == "import" and "a_module_that_is_not_there" in reason.have
        assert portattn.backends()["bad"].level == "broken"
    finally:
        registry.unregister("bad")


@pytest.mark.parametrize("ends", [RuntimeError("no driver"), SystemExit("no driver"), "no driver"], ids=repr)
def test_a_probe_that_raises_or_answers_no_reasons_is_a_reason(ends, qkv, usual):
    def probe(device):
        if isinstance(ends, str):
            return [ends]
        raise ends

    with toy(probe=probe):
        assert chosen(*qkv) == usual
        assert "no driver" in portattn.backends()["toy"].reasons[0].have and portattn.backends()["toy"].level == "broken"


def test_a_missing_package_says_how_to_get_it(qkv):
    with toy(requires=dict(packages={"no-such-package": ">=3.4"})):
        status = portattn.backends()["toy"]
        assert status.level == "unavailable" and status.reasons[0].code == "not_installed"
        assert status.reasons[0].fix == "pip install 'no-such-package>=3.4'"


@pytest.mark.parametrize("metadata, have", [(None, "None"), ("Name: leftover\n", "None"), ("Name: leftover\nVersion: \n", ""), (b"\xff\xfe\xff", "")],
                         ids=["empty", "no version", "blank", "no text"])
def test_what_an_uninstallation_left_behind_is_a_reason(qkv, usual, tmp_path, monkeypatch, metadata, have):
    folder = tmp_path / "leftover-1.0.dist-info"
    folder.mkdir()
    if metadata is not None:
        (folder / "METADATA").write_bytes(metadata if isinstance(metadata, bytes) else metadata.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    with toy(requires={"packages": {"leftover": ">=1.0"}}):
        assert chosen(*qkv) == usual
        reason = portattn.backends()["toy"].reasons[0]
        assert reason.code == "version" and have in reason.have and "pip install 'leftover>=1.0'" in reason.fix


@pytest.mark.parametrize("distribution, version, level", [
    ("pytorch-triton-rocm", "3.5.1", "ready"), ("triton-rocm", "3.6.0+rocm7.2", "ready"), ("triton-windows", "3.5.1.post21", "ready"),
    ("pytorch-triton", "3.3.1", "unavailable"), ("triton-of-somebody", "3.5.1", "unavailable")])
def test_triton_counts_under_the_names_that_torchs_wheels_give_it(monkeypatch, distribution, version, level):
    def installed(name):
        if name == distribution:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with toy(requires={"packages": {"triton": ">=3.4"}}):
        assert portattn.backends()["toy"].level == level


@pytest.mark.parametrize("have, spec, yes", [("3.4.0", ">=3.4", True), ("3.10", ">=3.4,<4", True), ("3.3.1", ">=3.4", False),
                                             ("2.13.0+cpu", "==2.13.0", True), ("4.0", ">=3.4,<4", False), ("3.4", "!=3.4", False),
                                             ("3.4-rc1", "==3.4.0", True)])
def test_version_clauses(have, spec, yes):
    assert registry.version_matches(have, spec) is yes


def test_a_plugin_that_raises_at_import_is_reported_and_breaks_nothing(tmp_path):
    plugin = tmp_path / "ghastly"
    (plugin / "backend").mkdir(parents=True)
    (plugin / "__init__.py").write_text("raise KeyError('Unknown GPU architecture: gfx1151')")
    (plugin / "backend" / "__init__.py").write_text("")
    info = tmp_path / "ghastly-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ghastly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[portattn.backends]\nghastly = ghastly.backend\n")
    code = """
        import torch, portattn
        q = torch.randn(1, 2, 2, 8)
        assert portattn.attention(q, q, q).shape == q.shape
        status = portattn.backends()["ghastly"]
        assert status.level == "broken" and "gfx1151" in status.reasons[0].have, status
    """
    env = dict(__import__("os").environ, PYTHONPATH=f"{tmp_path}:{next(iter(importlib.import_module('portattn').__path__))}/..")
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=env)


@pytest.mark.parametrize("text", [b"[console_scripts]\nbroken line\n", b"\xff\xfe[portattn.backends]\nx = y\n"], ids=["no value", "no text"])
def test_another_packages_broken_entry_points_hide_no_backend(tmp_path, text):
    for name, entries in (("broken", text), ("plugin", b"[portattn.backends]\nplugged = no_such_module\n")):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_bytes(entries)
    code = "import torch, portattn; q = torch.randn(1, 2, 2, 8); portattn.attention(q, q, q); print(*portattn.backends())"
    path = os.pathsep.join((str(tmp_path), os.path.dirname(os.path.dirname(portattn.__file__))))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                          capture_output=True, text=True)  # torch looks at entry points too
    assert done.returncode == 0 and {"sdpa", "plugged"} <= set(done.stdout.split()), done.stderr


def test_an_entry_point_is_named_as_its_manifest(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "backend.yaml").write_text(
        "{schema: 1, name: own, title: o, priority: 1, capabilities: [{id: a, layouts: [dense], dtypes: [float32]}]}")
    for name in ("own", "other"):
        registry._add(name, str(tmp_path / "own"), "own")
    try:
        assert portattn.backends()["own"].level == "ready"
        status = portattn.backends()["other"]
        assert status.level == "broken" and status.reasons[0].code == "name" and "'own'" in status.reasons[0].need
    finally:
        registry.unregister("own")
        registry.unregister("other")


def test_a_discovery_that_was_interrupted_begins_anew(tmp_path):
    for name, body in (("good", ""), ("slow", "import os\nif os.environ.pop('STOP', ''): raise KeyboardInterrupt\n")):
        (tmp_path / name / "backend").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(body)
        (tmp_path / name / "backend" / "__init__.py").write_text("")
    manifest = "{schema: 1, name: backend, title: b, priority: 1, capabilities: [{id: a, layouts: [dense], dtypes: [float32]}]}"
    (tmp_path / "good" / "backend" / "backend.yaml").write_text(manifest)
    info = tmp_path / "both-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: both\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[portattn.backends]\nbackend = good.backend\nsecond = slow.backend\n")
    code = """
        import torch, portattn
        try:
            portattn.backends()
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            print(*portattn.backends())
    """
    path = os.pathsep.join((str(tmp_path), os.path.dirname(os.path.dirname(portattn.__file__))))
    env = os.environ | {"PYTHONPATH": path, "STOP": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"sdpa", "backend", "second"} <= set(done.stdout.split()) and "(plugin)" not in done.stdout, done.stdout


def test_names_are_unique_and_unregistering_an_unknown_one_is_an_error():
    with toy():
        with pytest.raises(portattn.ArgumentError, match="exists already"):
            registry.register(toy_manifest("toy"), object())
    with pytest.raises(portattn.ArgumentError):
        registry.unregister("toy")


def test_a_registered_folder_is_a_backend(tmp_path, qkv):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "backend.yaml").write_text("{schema: 1, name: outside, title: o, priority: 999, capabilities: [{id: a, layouts: [dense], dtypes: [float32]}]}")
    (folder / "__init__.py").write_text("from toys import attention\n")
    assert registry.register(folder) == "outside"
    try:
        assert chosen(*qkv) == "outside"
        (folder / "backend.yaml").write_text("{schema: 1}")
        with pytest.raises(ManifestError):
            registry.register(folder)
    finally:
        registry.unregister("outside")


# ------------------------------------------------------------------ known answers
def wrong(call, bound):
    out = attention(call, bound)
    return tuple(x + 0.5 for x in out) if isinstance(out, tuple) else out + 0.5


def test_a_paged_call_that_an_adapter_takes_directly_needs_no_call_and_one_that_it_leaves_is_a_call():
    cache, table, lens = torch.randn(4, 16, 2, 16), torch.tensor([[2, 0], [1, 3]]), torch.tensor([20, 5])
    q, out, sinks, taken, answers = torch.randn(2, 1, 4, 16), torch.empty(2, 1, 4, 16), torch.randn(4), [], []

    def run(call, bound):
        if bound.verbatim:
            bound.direct = lambda *tensors: taken.append(tensors) or (answers and answers.pop() or None)
        return attention(call, bound)

    def attend(**kw):
        return portattn.attention_paged(q, cache, cache, table, lens, causal=True, **kw)

    with toy("straight", run) as calls:
        want = attend(sinks=sinks, out=out, backend="straight").clone()
        assert not taken
        for before in (len(calls), len(calls) + 1):  # left to a call, twice
            assert torch.equal(attend(sinks=sinks, out=out, backend="straight"), want) and len(calls) == before + 1
        assert len(taken) == 2 and all(a is b for a, b in zip(taken[-1], (q, cache, cache, table, lens, None, None, sinks, None, None, out)))
        answer = torch.ones(())
        answers.append(answer)
        before = len(calls)
        assert attend(sinks=sinks, out=out, backend="straight") is answer and len(calls) == before
        with pytest.raises(portattn.ArgumentError, match="memory"):
            attend(sinks=sinks, out=q, backend="straight")
        del taken[:]
        strided = torch.randn(2, 1, 4, 32)[..., ::2]  # is copied first
        for _ in range(3):
            portattn.attention_paged(strided, cache, cache, table, lens, backend="straight")
        assert not taken


def test_a_wrong_known_answer_quarantines_and_the_next_backend_serves(qkv):
    with toy(run=wrong, native=["cpu"]):
        with pytest.warns(RuntimeWarning, match="known answer"):
            out = portattn.attention(*qkv)
        torch.testing.assert_close(out, portattn.attention(*qkv, backend="sdpa"))
        status = portattn.backends()["toy"]
        assert status.level in ("partial", "broken") and status.reasons[0].code == "quarantined"
        with pytest.raises(portattn.NoBackendError, match="quarantined"):
            portattn.attention(*qkv, backend="toy")


def test_a_kernel_that_raises_in_the_check_is_quarantined(qkv):
    def run(call, bound):
        raise RuntimeError("an illegal memory access was encountered")

    with toy(run=run):
        portattn.attention(*qkv)
        assert "illegal memory access" in portattn.backends()["toy"].reasons[0].have


def test_an_exit_in_the_check_ends_no_caller(qkv, usual):
    with toy(run=lambda call, bound: sys.exit("no license")):
        portattn.attention(*qkv)
        assert "SystemExit: no license" in portattn.backends()["toy"].reasons[0].have and chosen(*qkv) == usual


def test_an_adapter_whose_own_words_raise_serves_all_the_same(qkv):
    def raises(*_):
        raise OSError("no driver version")

    registry.register(toy_manifest("mute"), types.SimpleNamespace(attention=attention, identity=raises, notes=raises))
    try:
        portattn.attention(*qkv)
        choice = portattn.explain(portattn.attention, *qkv)
        assert choice.backend == "mute" and choice.notes == ("no notes: OSError: no driver version",)
    finally:
        registry.unregister("mute")


def test_the_verdict_is_kept_on_disk_and_spares_the_next_process_the_check(qkv):
    with toy() as calls:
        portattn.attention(*qkv)
        first = len(calls)
        registry.forget()
        portattn.attention(*qkv)
        assert first == 3 and len(calls) == 4, "two runs of the known answer, one call; then one call"
        assert [v.stored for v in registry.known_answers() if v.backend == "toy"] == [True]


@pytest.mark.skipif(os.name == "nt", reason="platform: POSIX modes")
def test_a_verdict_that_others_can_write_is_none(qkv, cache_folder):
    with toy() as calls:
        portattn.attention(*qkv)
        (file,) = (cache_folder / "verdicts").iterdir()
        file.chmod(0o666)
        registry.forget()
        portattn.attention(*qkv)
        assert len(calls) == 6 and file.stat().st_mode & 0o777 == 0o600


def test_a_verdict_of_another_portattn_is_none(qkv, monkeypatch, tmp_path):
    """What an earlier version's packing of arguments did wrong, a later one may do right."""
    with toy() as calls:
        for _ in range(2):
            portattn.attention(*qkv)
            registry.forget()
            (tmp_path / "native.py").write_text("# mended")
            monkeypatch.setattr(verdicts, "_HERE", str(tmp_path))
        assert len(calls) == 6, "two runs of the known answer and one call, twice"


def test_a_process_that_died_in_the_check_quarantines_for_the_next_one(tmp_path):
    code = """
        import os, sys, torch
        sys.path.insert(0, {here!r})
        from toys import toy
        import portattn
        def crash(call, bound):
            os._exit(9)
        q = torch.randn(1, 2, 2, 8)
        with toy(run=crash):
            portattn.attention(q, q, q)
            print(portattn.backends()["toy"].reasons[0].have)
    """
    code = textwrap.dedent(code).format(here=str(__import__("pathlib").Path(__file__).parent))
    run = lambda: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run().returncode == 9
    second = run()
    assert second.returncode == 0 and "an earlier process ended" in second.stdout, second.stderr


def test_a_dead_process_of_our_own_number_is_dead(qkv, monkeypatch):
    """A container's first process has number 1 each time it is started, and may keep the host's name and the cache folder."""
    monkeypatch.setattr(verdicts._File, "write", lambda *_: None)
    monkeypatch.setattr(verdicts._File, "remove", lambda *_: None)
    with toy():  # leaves its announcement, as a process that is ended does
        portattn.attention(*qkv)
    with toy() as calls:
        portattn.attention(*qkv)
        assert not calls and "an earlier process ended" in portattn.backends()["toy"].reasons[0].have


@pytest.mark.skipif(os.name == "nt", reason="platform: locks of POSIX")
@pytest.mark.parametrize("number", [os.getpid(), 2**30], ids=["our own number", "a number that is none here"])
def test_a_check_that_runs_in_another_container_is_no_dead_one(number, monkeypatch):
    """Containers may share the host's name and the cache folder, and each counts its processes anew."""
    file = lambda: verdicts._File(types.SimpleNamespace(backend="toy", adapter=None), "cpu", "any-dense", "float32")
    other = file()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: number)
        other.announce()
    assert file().read() is None
    del other  # the kernel lets go of the lock of a process that ended
    assert "an earlier process ended" in file().read()[2]


def test_a_host_without_a_name_may_check(qkv, monkeypatch):
    def nameless():
        raise OSError("no name")

    monkeypatch.setattr(verdicts.socket, "gethostname", nameless)
    with toy() as calls:
        portattn.attention(*qkv)
        assert len(calls) == 3


def test_verification_can_be_switched_off(qkv, monkeypatch):
    monkeypatch.setenv("PORTATTN_VERIFY", "0")
    with toy(run=wrong) as calls:
        portattn.attention(*qkv)
        assert len(calls) == 1 and not [v for v in registry.known_answers() if v.backend == "toy"]


def test_an_unwritable_cache_only_means_that_nothing_is_kept(qkv, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PORTATTN_CACHE", str(blocked))
    with toy() as calls:
        portattn.attention(*qkv)
        assert len(calls) == 3


def test_a_full_disk_leaves_no_parts_of_verdicts(qkv, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("PORTATTN_CACHE", str(tmp_path / "here"))
    monkeypatch.setattr(os, "replace", full)
    with toy():
        portattn.attention(*qkv)
    assert not list((tmp_path / "here" / "verdicts").iterdir())


@pytest.mark.skipif(os.name == "nt", reason="platform: folders of users there are found otherwise")
def test_the_cache_folder_of_a_user_without_home_is_no_folder_named_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("PORTATTN_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == str(tmp_path / "mine")
    for name in ("PORTATTN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert os.path.isabs(config.cache_dir()) and "portattn" in config.cache_dir()


@pytest.mark.skipif(os.name == "nt", reason="platform: folders of users there are found otherwise")
def test_the_cache_folder_of_a_user_whose_home_holds_nothing_is_a_temporary_one(monkeypatch, tmp_path):
    for name in ("PORTATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    temporary = os.path.join(tempfile.gettempdir(), f"portattn-{os.getuid()}")
    monkeypatch.setenv("HOME", "/dev/null")
    assert config.cache_dir() == temporary
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == str(tmp_path / ".cache" / "portattn")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a file system that is only to be read
    assert config.cache_dir() == temporary
    (tmp_path / ".cache" / "portattn").mkdir(parents=True)  # what was put there before is read
    assert config.cache_dir() == str(tmp_path / ".cache" / "portattn")


def test_the_known_answer_check_leaves_the_random_state_alone(qkv):
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    with toy():
        portattn.attention(*qkv)
    assert torch.equal(torch.rand(1), want)


def test_eight_threads_bind_a_cold_problem_once_and_agree(qkv):
    with toy() as calls:
        results, threads = [], []
        for _ in range(8):
            threads.append(threading.Thread(target=lambda: results.append(portattn.attention(*qkv, backend="toy"))))
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert len(results) == 8 and all(torch.equal(r, results[0]) for r in results)
        assert len(calls) == 10, "one known-answer check, whatever the threads"


def test_what_a_known_answer_leaves_in_a_binding_reaches_no_call(qkv):
    """Adapters keep in Bound.state what belongs to the shapes of their first call."""
    def shapes_of(bound, *tensors):
        return bound.state.setdefault("shapes", [t.shape for t in tensors])

    def run(call, bound):
        assert shapes_of(bound, call.q, call.k) == [call.q.shape, call.k.shape]
        return attention(call, bound)

    def merge_states(outs, lses, sinks, bound):
        assert shapes_of(bound, outs) == [outs.shape]
        out, lse = reference.merge_states(outs, lses, sinks=sinks)
        return out.to(outs.dtype), lse.float()

    def cache_append(k, v, k_cache, v_cache, slots, k_scale, v_scale, bound):
        assert shapes_of(bound, k, k_cache) == [k.shape, k_cache.shape]
        for cache, after in zip((k_cache, v_cache), reference.cache_append(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)):
            cache.copy_(after)

    layouts = ["dense", "varlen", "paged", "cache_append", "merge_states"]
    found = toy_manifest("keeps", capability=dict(layouts=layouts))
    registry.register(found, types.SimpleNamespace(attention=run, merge_states=merge_states, cache_append=cache_append))
    try:
        q, k, v = qkv
        starts, table = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([[1], [0]])
        portattn.attention(q, k, v, backend="keeps")
        portattn.attention_varlen(q[0], k[0], v[0], starts, starts, 5, 5, backend="keeps")
        portattn.attention_paged(q, k, v, table, torch.tensor([9, 6]), backend="keeps")
        out, lse = portattn.merge_states(q[None], q[None, ..., 0], backend="keeps")
        assert torch.equal(out, q) and torch.equal(lse, q[..., 0])
        portattn.cache_append(k[0], v[0], k.clone(), v.clone(), torch.arange(9), backend="keeps")
        assert len(registry.known_answers()) == 5
    finally:
        registry.unregister("keeps")
