"""Every kernel compiled ahead of time for every family of hardware, with no GPU: matrix instructions, no spills, shared memory.

A representative set by default; PORTATTN_TRITON_FULL=1 compiles the whole cross of architectures and variants."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.4")
from portattn.backends.triton import schedule  # noqa: E402
from portattn.backends.triton.launch import compiled, interpreting  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET=1: nothing is compiled"),
]
FULL = bool(os.environ.get("PORTATTN_TRITON_FULL"))
KIB = 1024
SHARED = {"sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx950": 160}  # KiB a program may use; others 64
MATRIX = {"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "sm_120": "mma.sync",
          "gfx90a": "v_mfma_", "gfx942": "v_mfma_", "gfx950": "v_mfma_", "gfx1100": "v_wmma_", "gfx1151": "v_wmma_",
          "gfx1201": "v_wmma_"}

BASE = dict(
    dtype=torch.bfloat16, kv_dtype=torch.bfloat16, out_dtype=torch.bfloat16, native_fp8=False, group=4, d=128, dv=128,
    layout="dense",
    page_size=0, left=False, right=True, softcap=False, bias=None, bias_rows=False, alibi=False, sinks=None, lse=False, lse_form=0, rotary=0,
    rotary_dtype=None,
    interleaved=False, k_scale=False, v_scale=False, table_dtype=None, kv_lens_dtype=None, cu_q_dtype=None, cu_k_dtype=None,
    aligned=True,
    v_in_k=False, wide=False, near=False, alike=True, ieee=False, short=False, flip=False, descriptors=False, wgmma=False,
)
PAGED = dict(layout="paged", page_size=16, near=True, table_dtype=torch.int32, kv_lens_dtype=torch.int32)
VARIANTS = {
    "dense": ("tiles", {}),
    "dense-short": ("tiles", dict(short=True)),
    "decode": ("splits", PAGED),
    "mixed": ("both", PAGED | dict(cu_q_dtype=torch.int32)),
    "chunks": ("both", PAGED | dict(cu_q_dtype=torch.int32)),  # of about one length: blocks of gathers, with some splits
    "big-pages": ("both", PAGED | dict(cu_q_dtype=torch.int64, table_dtype=torch.int64, kv_lens_dtype=torch.int64, page_size=128,
                                       left=True)),
    "odd-pages": ("splits", PAGED | dict(table_dtype=torch.int64, page_size=24)),
    "varlen": ("tiles", dict(layout="varlen", cu_q_dtype=torch.int32, cu_k_dtype=torch.int32, d=64, dv=64, group=1)),
    "d256": ("tiles", dict(d=256, dv=256)),
    "features": ("tiles", dict(left=True, softcap=True, alibi=True, bias=torch.float32, sinks=torch.float32, lse=True, d=80,
                               dv=72)),
    "rotary": ("splits", PAGED | dict(rotary=128, rotary_dtype=torch.float32, left=True, sinks=torch.bfloat16, lse=True)),
    "fp8": ("splits", PAGED | dict(kv_dtype=torch.float8_e4m3fn, k_scale=True, v_scale=True, flip=True)),
    "latent": ("splits", PAGED | dict(d=576, dv=512, group=16, v_in_k=True)),
    "latent-many": ("splits", PAGED | dict(d=576, dv=512, group=128, v_in_k=True, page_size=64)),
    "float32": ("tiles", dict(dtype=torch.float32, kv_dtype=torch.float32, out_dtype=torch.float32, ieee=True, d=64, dv=64)),
}
SPILLS_ALLOWED = {"big-pages", "features", "latent", "latent-many", "float32", "rotary"}  # rare, and register-hungry: they must compile and fit


def machine(arch: str) -> schedule.Machine:
    return schedule.Machine(arch, 132, SHARED.get(arch, 64) * KIB, 64 if arch.startswith("gfx9") else 32)


def target(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, machine(arch).wave)


def compile_for(spec, arch: str):
    try:
        return compiled(spec, target(arch))
    except Exception as error:
        if "ld.lld not found" in str(error):
            pytest.skip("this Triton links for AMD with ROCm's own ld.lld, which is not installed")
        raise


def build(arch: str, name: str):
    """(kernel, spec) of a variant, with the configuration that a call on this architecture would take."""
    mode, changes = VARIANTS[name]
    m = machine(arch)
    s = schedule.Shape(**(BASE | changes))
    s = s._replace(wgmma=m.wgmma, native_fp8=m.converts(s.kv_dtype))
    exact = s.d == s.dv == schedule.pow2(s.d)
    s = s._replace(descriptors=m.wgmma and mode == "tiles" and s.layout != "paged" and exact and not s.ieee or (arch == "sm_90" and name == "latent-many"))
    bd, bd2 = schedule.head_blocks(s.d)
    padded = max(bd + bd2, schedule.pow2(s.dv, 16))
    kind = "tiles" if s.descriptors else "gather" if mode != "both" else "chunks" if name == "chunks" else "mixed"
    tile, base = schedule.configs_for(arch, kind, padded if padded <= 256 else 512, s.dtype == torch.float32)
    while True:
        split = schedule.split_config(base, tile, mode, s.group, s.group, s.dv)
        spec = schedule.attend_spec(s, mode, tile, split, 16, mode != "tiles", min(16, schedule.pow2(s.group)))
        kernel = compile_for(spec, arch)
        if kernel.metadata.shared <= m.shared:
            return kernel, spec
        smaller = (base if mode == "splits" else tile).smaller()
        assert smaller is not None, f"{name} fits {arch} in no configuration"
        tile, base = (tile, smaller) if mode == "splits" else (smaller, base)


def spills(kernel, arch: str, tmp_path) -> int:
    """Registers spilled to memory: vector registers in the object's notes (AMD; scalar ones spill into vector registers), or the
    bytes of stack that the assembler reports (NVIDIA)."""
    if arch.startswith("gfx"):
        return sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"]))
    return int(re.search(r"STACK:(\d+)", tool_says(kernel, tmp_path, "cuobjdump", "--dump-resource-usage"))[1])


def tool_says(kernel, tmp_path, tool: str, option: str) -> str:
    """What one of NVIDIA's tools, as Triton brings them, prints of a kernel."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", tool)
    return subprocess.run([path, option, str(cubin)], capture_output=True, text=True, check=True).stdout


ARCHES = list(MATRIX)
SAMPLE = [
    ("sm_80", "dense"), ("sm_80", "decode"), ("sm_90", "dense"), ("sm_90", "dense-short"), ("sm_90", "decode"), ("sm_90", "mixed"),
    ("sm_90", "chunks"), ("sm_90", "fp8"), ("sm_90", "latent"), ("sm_90", "latent-many"), ("sm_100", "dense"), ("sm_120", "dense"), ("sm_120", "decode"), ("gfx90a", "dense"),
    ("gfx942", "dense"), ("gfx942", "fp8"), ("gfx942", "features"), ("gfx942", "odd-pages"), ("gfx950", "decode"), ("gfx1100",
                                                                                                                    "dense"),
                                                                                                                    ("gfx1151",
                                                                                                                 "decode"),
    ("gfx1201", "dense"), ("gfx1201", "rotary"),
]


@pytest.mark.parametrize(("arch", "name"), [(a, n) for a in ARCHES for n in VARIANTS] if FULL else SAMPLE)
def test_attention_compiles_to_matrix_instructions_and_fits(arch, name, tmp_path):
    kernel, spec = build(arch, name)
    code = kernel.asm["amdgcn" if arch.startswith("gfx") else "ptx"]
    if name != "float32":  # IEEE float32 has no matrix unit here, by design
        small = arch.startswith("sm_") and VARIANTS[name][0] == "splits" and name != "latent-many"  # 16 rows are below what wgmma and tcgen05 take
        assert ("mma.sync" if small else MATRIX[arch]) in code
    assert kernel.metadata.shared <= machine(arch).shared
    if name not in SPILLS_ALLOWED and (arch, name) != ("sm_86", "fp8"):  # there 8 bits are decoded by arithmetic: 24 bytes with CUDA 13
        assert spills(kernel, arch, tmp_path) == 0
    if "wgmma.mma_async" in code:  # the assembler waits behind each, where it sees accumulators copied
        sass = tool_says(kernel, tmp_path, "nvdisasm", "-c")
        assert sass.count("WARPGROUP.DEPBAR") * 2 <= sass.count("HGMMA")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1100"])
def test_append_and_merge_compile(arch, tmp_path):
    for kv in (torch.bfloat16, torch.float8_e4m3fn):
        spec = schedule.append_spec(dtype=torch.bfloat16, kv_dtype=kv, d=128, dv=128, rotary=128, interleaved=False,
                                    rotary_dtype=torch.float32,
                                    table=torch.int32, kv_lens=torch.int32, cu_q=torch.int32, slots=None, k_scale=True,
                                    v_scale=True,
                                    search=16)
        assert spills(compile_for(spec, arch), arch, tmp_path) == 0
    merge = compile_for(schedule.merge_spec(dtype=torch.bfloat16, sinks=torch.float32, dv=128), arch)
    assert spills(merge, arch, tmp_path) == 0


def test_a_captured_signature_has_no_scratch():
    """The fast launcher passes null for Triton's scratch arguments, so kernels must not use them."""
    kernel, _ = build("sm_90", "decode")
    assert not getattr(kernel.metadata, "global_scratch_size", 0) and not getattr(kernel.metadata, "profile_scratch_size", 0)
