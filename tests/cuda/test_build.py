"""The ahead-of-time build, and what nvcc says of the instances: registers, spills, shared memory. Typed skips without tools."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from portattn import instances
from portattn.instances import Instance, limits_of

ROOT = Path(__file__).parent.parent.parent
NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="tool: nvcc is not installed")
FULL = bool(os.environ.get("PORTATTN_CUDA_FULL"))  # every instance for every architecture: minutes
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Bytes that may spill: cold registers of the kernel that holds tiles and decode at once, and of copying threads, which have 32 beside three warpgroups.
SPILL = {"decode": 0, "plain": 0, "append": 0, "merge": 0, "mixed": 160, "prefill_sm90": 0}
SPILL_OF_THREE = 136


def chosen() -> list[tuple[str, Instance]]:
    """One instance of each kind and architecture; all of them where asked."""
    if FULL:
        return [(arch, i) for arch in ARCHS for i in instances.every_instance(limits_of(arch))]
    pick = []
    for arch, dim in zip(ARCHS, (128, 256, 128, 64, 96)):
        limits = limits_of(arch)
        pick += [(arch, instances.decode_shape("bfloat16", "bfloat16", dim, limits).instance)]
    limits = limits_of("sm_90")
    return [*pick, ("sm_90", instances.decode_shape("float16", "float8_e4m3fn", 128, limits).instance),
            *((arch, instances.plain_shape("bfloat16", kv, dim, limits_of(arch), ragged).instance)
              for arch, kv, dim, ragged in (("sm_90", "bfloat16", 128, False), ("sm_90", "float8_e4m3fn", 128, True), ("sm_90", "bfloat16", 256, False),
                                            ("sm_100", "bfloat16", 80, True))),
            *((arch, instances.free_shape("bfloat16", kv, dim, limits_of(arch), many).instance)
              for arch, kv, dim, many in (("sm_90", "bfloat16", 128, True), ("sm_90", "bfloat16", 192, False), ("sm_100", "float8_e4m3fn", 256, True),
                                         ("sm_100", "bfloat16", 96, True), ("sm_100", "bfloat16", 128, True))),
            ("sm_90", instances.mixed_shape("bfloat16", "bfloat16", 64, limits).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "bfloat16", 128).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "bfloat16", 64, boxed=True, large=True).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "bfloat16", 128, boxed=True, large=True).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "bfloat16", 256, boxed=True).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "float8_e4m3fn", 128).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "float8_e4m3fn", 128, boxed=True).instance),
            ("sm_90", instances.prefill_sm90_shape("bfloat16", "float8_e5m2", 256, boxed=True).instance),
            ("sm_80", instances.small_instance("append", "float16", "float8_e5m2")), ("sm_86", instances.small_instance("merge", "float32"))]


@NVCC
@pytest.mark.parametrize("arch, instance", chosen(), ids=lambda x: str(x))
def test_instances_compile_within_their_budgets(arch, instance, tmp_path):
    command = ["nvcc", "-cubin", f"-arch={instances.target(arch, instance)}", "-std=c++17", "-O3", "-I.", "-I../portattn/include", "-Xptxas", "-v",
               *(f"-D{n}={v}" for n, v in instance.options), f"{instance.kernel}.cu", "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, cwd=ROOT / "csrc_cuda", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    options = dict(instance.options)
    threads = 32 * int(options.get("PA_WAVES", 4))
    if "PA_CONSUMERS" in options:  # beside those that compute one that copies, and for small heads one that widens 8 bits which come in boxes
        widens = options["PA_BOXED"] == "1" and options["PA_C"].startswith("e") and int(options["PA_D"]) <= 192
        threads = 128 * (int(options["PA_CONSUMERS"]) + (2 if widens else 1))
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
    assert registers * threads * int(options.get("PA_BLOCKS", 1)) <= 65536
    allowed = SPILL_OF_THREE if options.get("PA_CONSUMERS") == "3" else SPILL[instance.kernel]
    assert spilled <= allowed, f"{spilled} bytes spill"
    assert not re.search(r"\d+ bytes smem", done.stderr), "shared memory is dynamic: its size is the host's to know"


def test_the_list_of_objects_needs_no_torch_and_names_every_instance():
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['objects.py', 'list', 'sm_90']; runpy.run_path('objects.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "cmake", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert len(lines) == len(set(lines)) == len(instances.every_instance(limits_of("sm_90")))
    assert any(x.startswith("decode-bf16-bf16-d128-waves4-stages3-blocks2.sm_90.cubin|sm_90|decode.cu|-DPA_T=bf16|") for x in lines)
    assert any("|sm_90a|prefill_sm90.cu|" in x for x in lines)


def test_the_index_carries_hashes_of_sources_and_objects(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "cmake")
    spec = importlib.util.spec_from_file_location("objects", ROOT / "cmake" / "objects.py")
    objects = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(objects)
    for _, file, *_ in objects.objects("sm_86"):
        (tmp_path / file).write_bytes(file.encode())
    index = objects.index(str(tmp_path), ["sm_86"])
    assert index["source"] == instances.source_hash("cuda")
    entry = index["objects"]["sm_86"]["merge-bf16"]
    assert entry == {"file": "merge-bf16.sm_86.cubin", "sha256": hashlib.sha256(b"merge-bf16.sm_86.cubin").hexdigest()}


@NVCC
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("ninja") is None, reason="tool: cmake and ninja are not installed")
def test_the_build_is_reproducible(tmp_path):
    made = []
    for name in ("a", "b"):
        folder = tmp_path / name
        for command in (["cmake", "-S", "cmake", "-B", str(folder / "build"), "-G", "Ninja", "-DPORTATTN_CUDA_ARCHS=80",
                         "-DPORTATTN_ONLY=^(merge-bf16|append-f16-f16)", f"-DPORTATTN_OUTPUT={folder}"], ["cmake", "--build", str(folder / "build")]):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        made.append({f.name: f.read_bytes() for f in (folder / "cuda").iterdir()})
    assert sorted(made[0]) == ["append-f16-f16.sm_80.cubin", "merge-bf16.sm_80.cubin"] and made[0] == made[1]
