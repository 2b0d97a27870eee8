"""Finished AMD code objects, executed on the CPU: llvm-objdump's listing becomes instructions for machine.h.

The instructions' meaning is written from AMD's ISA documents, apart from csrc_hip and from the compiler, so that what a compiler
made of a kernel is tested without the device.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.hip import listing, objects
from tests.hip.listing import Text

HERE = Path(__file__).parent
FORWARD, REVERSE, RANDOM = 0, 1, 2

NONE, VECTOR, SCALAR, LITERAL, SCC = range(5)
CLAMPED = ("v_add_nc_u32", "v_sub_nc_u32", "v_subrev_nc_u32", "v_add_f32", "v_sub_f32", "v_subrev_f32", "v_mul_f32", "v_max_f32", "v_min_f32")
SCALARS = {"vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126, "exec_hi": 127}


class Operand(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("kind", "index", "value", "count", "negate", "absolute", "sel", "sext")]


class Inst(ctypes.Structure):
    _fields_ = ([(n, ctypes.c_int64) for n in ("pc", "next", "op", "count")] + [("o", Operand * 7)]
                + [(n, ctypes.c_int64) for n in ("offset", "offset1", "dpp", "dpp_arg", "row_mask", "bank_mask", "bound_ctrl", "dst_sel", "dst_unused",
                                                 "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")]
                + [("waits", ctypes.c_int64 * 4)] + [(n, ctypes.c_int64) for n in ("flags", "line")])


class Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_uint64), ("end", ctypes.c_uint64)]


class Stats(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("instructions", "load_bytes", "store_bytes", "wide_loads", "shared_cycles", "shared_least")]


class Launch(ctypes.Structure):
    _fields_ = [("program", ctypes.c_void_p), ("count", ctypes.c_int64), ("places", ctypes.c_void_p)] + [
        (n, ctypes.c_int64) for n in ("place_count", "barrier_op", "wave", "generation", "grid_x", "grid_y", "threads", "lds_bytes", "kernarg", "dispatch",
                                      "private_segment", "dispatch_ptr", "user_registers", "workgroup_id_x", "workgroup_id_y", "order", "seed")] + [
        ("ranges", ctypes.c_void_p), ("range_count", ctypes.c_int64), ("limit", ctypes.c_int64)]


@functools.lru_cache(maxsize=None)
def machine() -> ctypes.CDLL:
    """The instructions, built by g++ once per source state."""
    digest = hashlib.sha256(b"".join((HERE / n).read_bytes() for n in ("machine.h", "instructions.cpp"))).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"portattn-isa-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{digest}.so"
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror",
                        str(HERE / "instructions.cpp"), "-o", str(part)], check=True)
        os.replace(part, file)
    lib = ctypes.CDLL(str(file))
    lib.isa_op.restype = lib.isa_inst_bytes.restype = ctypes.c_int64
    lib.isa_run.restype = ctypes.c_char_p
    assert lib.isa_inst_bytes() == ctypes.sizeof(Inst)
    return lib


def missing(arch: str) -> str:
    """Why objects of an architecture cannot be run here; "" where they can."""
    return objects.missing(arch) or ("" if shutil.which(os.environ.get("CXX", "g++")) else "tool: no C++ compiler")


# ------------------------------------------------------------------ names
_WIDTHS = {"dwordx16": "b512", "dwordx8": "b256", "dwordx4": "b128", "dwordx3": "b96", "dwordx2": "b64", "dword": "b32"}
_RENAMES = [  # gfx9's and gfx12's names of what the others have too
    (r"^(s_load|global_load|global_store)_(dword\w*)$", lambda m: f"{m[1]}_{_WIDTHS[m[2]]}"),
    (r"^(global_load)_(ubyte|ushort)$", lambda m: f"{m[1]}_{'u8' if m[2] == 'ubyte' else 'u16'}"),
    (r"^(global_load)_(short|ubyte)_d16(_hi)?$", lambda m: f"{m[1]}_d16{m[3] or ''}_{'b16' if m[2] == 'short' else 'u8'}"),
    (r"^(global_store)_(byte|short)(_d16_hi)?$", lambda m: f"{m[1]}{m[3] or ''}_{'b8' if m[2] == 'byte' else 'b16'}"),
    (r"^ds_(read|write)2(st64)?_(b\d+)$", lambda m: f"ds_{'load' if m[1] == 'read' else 'store'}_2addr_{'stride64_' if m[2] else ''}{m[3]}"),
    (r"^ds_read_(\w+)$", r"ds_load_\1"),
    (r"^ds_write_(\w+)$", r"ds_store_\1"),
    (r"^v_(add|sub|subrev)_(u32|u16)$", r"v_\1_nc_\2"),
    (r"^v_addc_co_u32$", "v_add_co_ci_u32"),
    (r"^v_sub(b|brev)_co_u32$", lambda m: f"v_sub{'rev' if m[1] == 'brev' else ''}_co_ci_u32"),
    (r"^v_mad_(u64_u32|i64_i32)$", r"v_mad_co_\1"),
    (r"^s_(and|or)n2_(\w+)$", r"s_\1_not1_\2"),
    (r"^(s_\w+_saveexec)_b\d\d$", r"\1"),
    (r"^s_(add|sub)_co_(u32|i32)$", r"s_\1_\2"),
    (r"^s_addk_co_i32$", "s_addk_i32"),
    (r"^s_add_co_ci_u32$", "s_addc_u32"),
    (r"^s_sub_co_ci_u32$", "s_subb_u32"),
    (r"^(v_\w+)_num_(f\d\d)$", r"\1_\2"),
    (r"^v_mfma_f32_(\d+x\d+x\d+)(f16|bf16)(_1k)?$", r"v_mfma_f32_\1_\2"),
    (r"^global_atomic_add$", "global_atomic_add_u32"),
    (r"^v_cvt_pk_rtz_f16_f32$", "v_cvt_pkrtz_f16_f32"),
    (r"^s_barrier_wait$", "s_barrier"),
    (r"^s_cmp_(eq|lg)_f32$", r"s_cmp_\1_f32"),
]


def plain_name(name: str, arch: str) -> tuple[str, str]:
    """(the name in machine.h, the encoding's suffix)."""
    m = re.match(r"^(\w+?)_(e32|e64|dpp|e64_dpp|sdwa)$", name)
    name, encoding = (m[1], m[2]) if m else (name, "")
    name = name.replace("v_dual_", "v_")
    for pattern, to in _RENAMES:
        name = re.sub(pattern, to, name)
    if re.match(r"^v_cvt_(pk_)?f32_(fp8|bf8)$", name) and arch == "gfx942":
        name += "_fnuz"
    return name, encoding


# ------------------------------------------------------------------ operands
def _literal(text: str, half: bool) -> int | None:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16)
    if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        x = float(text)
        return int(np.array(x, np.float16).view(np.uint16)) if half else int(np.array(x, np.float32).view(np.uint32))
    return None


def operand(text: str, half: bool = False) -> Operand:
    o = Operand(NONE, 0, 0, 1, 0, 0, 6, 0)
    if m := re.fullmatch(r"sext\((.*)\)", text):
        o.sext, text = 1, m[1]
    if text.startswith("-") and (text[1:2] in "v|asn"):
        o.negate, text = 1, text[1:]
    if m := re.fullmatch(r"neg\((.*)\)", text):
        o.negate, text = 1, m[1]
    if m := re.fullmatch(r"\|(.*)\|", text):
        o.absolute, text = 1, m[1]
    if m := re.fullmatch(r"([vas])\[(\d+):(\d+)\]", text):
        o.kind, o.index, o.count = (SCALAR if m[1] == "s" else VECTOR), int(m[2]) + 256 * (m[1] == "a"), int(m[3]) - int(m[2]) + 1
    elif m := re.fullmatch(r"([vas])(\d+)(\.[lh])?", text):
        o.kind, o.index = (SCALAR if m[1] == "s" else VECTOR), int(m[2]) + 256 * (m[1] == "a")
        o.sel = {".l": 4, ".h": 5}.get(m[3] or "", 6)
    elif m := re.fullmatch(r"ttmp(\d+)", text):
        o.kind, o.index = SCALAR, 108 + int(m[1])
    elif text in SCALARS:
        o.kind, o.index = SCALAR, SCALARS[text]
    elif text in ("null", "off", ""):
        o.kind = NONE
    elif text in ("scc", "src_scc"):
        o.kind = SCC
    else:
        value = _literal(text, half)
        if value is None:
            raise ValueError(f"an operand {text!r}")
        o.kind, o.value = LITERAL, value if value < 1 << 63 else value - (1 << 64)
    return o


_SDWA = {**{f"BYTE_{i}": i for i in range(4)}, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
_UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
_DPP = {"quad_perm": 1, "row_shl": 2, "row_shr": 3, "row_ror": 4, "row_mirror": 5, "row_half_mirror": 6, "row_share": 7, "row_xmask": 8}
_MODIFIER = re.compile(r"\s(\w+):(\[[^\]]*\]|swizzle\([^)]*\)|[\w\-]+)|\s(row_mirror|row_half_mirror|sc0|sc1|nt|glc|slc|dlc|clamp|gds|lds|row_bcast)\b")


def _bits(text: str) -> int:
    return sum(int(b) << i for i, b in enumerate(text.strip("[]").split(",")))


def parse(t: Text, arch: str) -> list[Inst]:
    """The instruction, or the two halves of a dual one."""
    if "::" in t.rest:
        first, second = (t.name + " " + t.rest).split("::")
        halves = [parse(Text(t.pc, t.size, *(part.strip().partition(" ")[::2]), t.line), arch)[0] for part in (first, second)]
        halves[0].flags |= 2
        return halves
    name, encoding = plain_name(t.name, arch)
    i = Inst(pc=t.pc, next=t.pc + t.size, row_mask=15, bank_mask=15, dst_sel=6, line=t.line)
    for c in range(4):
        i.waits[c] = -1
    rest, found = " " + t.rest, {}
    for m in _MODIFIER.finditer(rest):
        found[m[1] or m[3]] = m[2] or "1"
    rest = _MODIFIER.sub("", rest).strip()
    if _waits(name, rest, i, arch):
        name, rest = "s_wait", ""
    half = bool(re.search(r"_f16\b", name)) and not re.search(r"cvt_f16_f32|fma_mix|mfma|wmma", name)
    operands = [operand(x.strip(), half) for x in re.split(r",(?![^\[]*\])", rest) if x.strip() or "," in rest] if name not in ("s_sendmsg", "s_delay_alu",
                                                                                                          "s_waitcnt_depctr", "s_wait_alu") else []
    if name.startswith("v_cmpx") and arch.startswith("gfx1"):
        operands.insert(0, Operand())
    is_packed = name.startswith("v_pk_") and name != "v_pk_mov_b32"
    i.op_sel, i.op_sel_hi = _bits(found.pop("op_sel", "[0]")), _bits(found.pop("op_sel_hi", "[1,1,1]" if is_packed else "[0]"))
    i.neg_lo, i.neg_hi = _bits(found.pop("neg_lo", "[0]")), _bits(found.pop("neg_hi", "[0]"))
    offset = found.pop("offset", "0")
    if m := re.fullmatch(r"swizzle\(SWAP,(\d+)\)", offset):
        i.offset = int(m[1]) << 10 | 0x1F
    elif m := re.fullmatch(r"swizzle\(BITMASK_PERM,\s*\"?([01pi]{5})\"?\)", offset):
        i.offset = sum((("0" if b in "01" else "1") == "1") << n | (b == "1") << 5 + n | (b == "i") << 10 + n for n, b in enumerate(reversed(m[1])))
    else:
        i.offset = int(offset, 0)
    if "offset0" in found or "offset1" in found:
        i.offset, i.offset1 = int(found.pop("offset0", "0"), 0), int(found.pop("offset1", "0"), 0)
    for key, value in list(found.items()):
        if key in _DPP:
            i.dpp = _DPP[key]
            i.dpp_arg = sum(int(x) << 2 * n for n, x in enumerate(value.strip("[]").split(","))) if key == "quad_perm" else int(value)
            del found[key]
    i.row_mask, i.bank_mask = int(found.pop("row_mask", "0xf"), 0), int(found.pop("bank_mask", "0xf"), 0)
    i.bound_ctrl = found.pop("bound_ctrl", "") != ""
    i.dst_sel, i.dst_unused = _SDWA[found.pop("dst_sel", "DWORD")], _UNUSED[found.pop("dst_unused", "UNUSED_PAD")]
    for n in (0, 1):
        sel = found.pop(f"src{n}_sel", None)
        if sel:
            operands[n + 1].sel = _SDWA[sel]
    i.clamp = found.pop("clamp", "") == "1"
    if i.clamp and name not in CLAMPED:
        raise ValueError(f"{name} with clamp")
    returns = found.pop("sc0", "") == "1" and "atomic" in name or found.pop("glc", "") == "1" and "atomic" in name or "RETURN" in found.pop("th", "")
    i.flags |= 1 if returns else 0
    for ignored in ("sc1", "nt", "slc", "dlc", "scope", "sc0", "glc"):
        found.pop(ignored, None)
    ttbl = found.pop("bitop3", None)
    if ttbl is not None:
        i.offset = int(ttbl, 0)
    if found:
        raise ValueError(f"a modifier {found} of {t.name}")
    i.count = len(operands)
    for n, o in enumerate(operands):
        i.o[n] = o
    for n in range(len(operands), 7):
        i.o[n].sel = 6
    i.op = machine().isa_op(name.encode())
    if i.op < 0:
        raise ValueError(f"no instruction {name} ({t.name} {t.rest})")
    return [i]


def _waits(name: str, rest: str, i: Inst, arch: str) -> bool:
    """Fills in what an instruction waits for; says whether it is one that does."""
    if name == "s_waitcnt":
        for what, n in re.findall(r"(\w+)\((\d+)\)", rest):
            if what != "expcnt":
                i.waits[{"vmcnt": 0, "lgkmcnt": 2}[what]] = int(n)
    elif name == "s_waitcnt_vscnt":
        i.waits[1] = int(rest.split(",")[1], 0)
    elif m := re.fullmatch(r"s_wait_(load|store|ds|km)cnt(_dscnt)?", name):
        n = int(rest, 0)
        i.waits[{"load": 0, "store": 1, "ds": 2, "km": 3}[m[1]]] = n >> 8 & 63 if m[2] else n
        if m[2]:
            i.waits[2] = n & 63
    else:
        return False
    return True


# ------------------------------------------------------------------ an object
class Descriptor(NamedTuple):
    """What a kernel's descriptor asks to be set up."""

    private_segment: bool  # four registers first
    dispatch_ptr: bool
    user_registers: int    # the workgroup's id comes after them
    workgroup_id_x: bool
    workgroup_id_y: bool


def _descriptor(file: Path, name: str) -> Descriptor:
    data = file.read_bytes()
    shoff, = struct.unpack_from("<Q", data, 0x28)
    size, count, _ = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + n * size) for n in range(count)]
    for s in sections:
        if s[1] not in (2, 11):
            continue
        strings = sections[s[6]]
        for at in range(s[4], s[4] + s[5], 24):
            text, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(b"\0", strings[4] + text)
            if data[strings[4] + text : end].decode() == f"{name}.kd":
                home = next(x for x in sections if x[3] <= value < x[3] + x[5] and x[3])
                kd = data[home[4] + value - home[3] :][:64]
                rsrc2, properties, preload = struct.unpack_from("<IHH", kd, 52)
                assert not preload & 127 and not properties & 0b1110100, "scalar registers that machine.h does not set up"
                return Descriptor(bool(properties & 1), bool(properties & 2), rsrc2 >> 1 & 31, bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1))
    raise ValueError(f"no {name}.kd in {file}")


class Program:
    """A kernel of a finished object, ready to run."""

    def __init__(self, arch: str, file: Path):
        self.arch, self.file, self.kernel = arch, file, objects.metadata(file)
        self.wave = self.kernel[".wavefront_size"]
        self.generation = 9 if arch.startswith("gfx9") else int(arch[3:5])
        self.descriptor = _descriptor(file, self.kernel[".name"])
        self.texts = listing.texts(arch, file)
        unknown, insts = [], []
        for t in self.texts:
            try:
                insts += parse(t, arch)
            except ValueError as exc:
                unknown.append(str(exc))
        if unknown:
            raise ValueError(f"{file.name}: " + "; ".join(sorted(set(unknown))[:20]))
        self.insts = (Inst * len(insts))(*insts)
        first, last = insts[0].pc, insts[-1].next
        places = np.full((last - first) // 4, -1, dtype=np.int32)
        for n in reversed(range(len(insts))):
            places[(insts[n].pc - first) // 4] = n
        self.places = places

    def run(self, params: bytes, grid: tuple[int, int], memory: list[tuple[int, int]], order: int = FORWARD, seed: int = 0, limit: int = 5_000_000) -> Stats:
        """Launches the kernel; `memory` lists (address, bytes) that it may touch. Raises RuntimeError with what it did wrong."""
        threads = self.kernel[".max_flat_workgroup_size"]
        size = self.kernel[".kernarg_segment_size"]
        visible = self.kernel[".args"][0][".size"]
        assert visible == len(params)
        kernarg = ctypes.create_string_buffer(params, max(size, visible) + 16)
        dispatch = ctypes.create_string_buffer(struct.pack("<HHHHHHIII", 0, 1, threads, 1, 1, 0, grid[0] * threads, grid[1], 1), 64)
        ranges = [(ctypes.addressof(kernarg), size), (ctypes.addressof(dispatch), 64), *memory]
        table = (Range * len(ranges))(*((a, a + n) for a, n in ranges))
        d = self.descriptor
        launch = Launch(ctypes.addressof(self.insts), len(self.insts), self.places.ctypes.data, len(self.places), machine().isa_op(b"s_barrier"), self.wave,
                        self.generation, *grid, threads, self.kernel[".group_segment_fixed_size"], ctypes.addressof(kernarg), ctypes.addressof(dispatch),
                        d.private_segment, d.dispatch_ptr, d.user_registers, d.workgroup_id_x, d.workgroup_id_y, order, seed, ctypes.addressof(table), len(ranges), limit)
        stats = Stats()
        said = machine().isa_run(ctypes.byref(launch), ctypes.byref(stats)).decode()
        if said:
            number = int(m[1]) if (m := re.search(r"line (\d+)", said)) else 0
            where = next((f"{t.name} {t.rest} at {t.pc:#x}" for t in self.texts if t.line == number), "")
            raise RuntimeError(f"{self.file.name}: {said} ({where})")
        return stats


@functools.lru_cache(maxsize=None)
def program(arch: str, instance: Any) -> Program:
    return Program(arch, objects.made(arch, instance))
