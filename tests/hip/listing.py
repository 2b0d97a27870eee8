"""The instructions of a finished AMD code object, as llvm-objdump lists them. Encodings of gfx950 that llvm-objdump 19 does not know
are decoded here, from AMD's ISA document."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple


def tool(name: str) -> str | None:
    """llvm's tool of that name, of version 19 or newer."""
    return next(filter(None, (shutil.which(f"{name}-{n}") for n in range(29, 18, -1))), None) or shutil.which(f"/opt/rocm/llvm/bin/{name}")


class Text(NamedTuple):
    """One instruction of a listing."""

    pc: int
    size: int
    name: str
    rest: str
    line: int


# ------------------------------------------------------------------ gfx950's own encodings
def _source(code: int, acc: bool = False) -> str:
    if code >= 256:
        return f"{'a' if acc else 'v'}{code - 256}"
    if code < 102:
        return f"s{code}"
    named = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0",
             246: "4.0", 247: "-4.0"}
    return named.get(code) or str(code - 128 if code <= 192 else 192 - code)


def _many(text: str, count: int) -> str:
    return text if text[0] not in "va" else f"{text[0]}[{text[1:]}:{int(text[1:]) + count - 1}]"


def gfx950_encoding(low: int, high: int) -> tuple[str, str] | None:
    """An instruction that is new with gfx950, as text; None where it is not one."""
    op, word = low >> 16, low | high << 32
    sources = [word >> 32 & 511, word >> 41 & 511, word >> 50 & 511]
    if op in (0xD233, 0xD234, 0xD267, 0xD268):
        signs, magnitudes = word >> 61 & 7, word >> 8 & 7
        if op in (0xD233, 0xD234):
            table = (word >> 59 & 3) << 6 | magnitudes << 3 | signs
            halves = f" op_sel:[{','.join(str(low >> 11 + n & 1) for n in range(4))}]" if op == 0xD233 else ""
            return f"v_bitop3_b{16 * (op - 0xD232)}", f"v{low & 255}, " + ", ".join(_source(s) for s in sources) + f" bitop3:{table:#x}" + halves
        texts = [("-" if signs >> n & 1 else "") + (f"|{_source(s)}|" if magnitudes >> n & 1 else _source(s)) for n, s in enumerate(sources[:2])]
        return f"v_cvt_pk_{'bf16' if op == 0xD268 else 'f16'}_f32", f"v{low & 255}, " + ", ".join(texts)
    matrices = {0xD3D4: ("16x16x32_f16", 4), 0xD3B5: ("16x16x32_bf16", 4), 0xD3D5: ("32x32x16_f16", 16), 0xD3B7: ("32x32x16_bf16", 16)}
    if op in matrices:
        name, out = matrices[op]
        in_acc, acc = word >> 59 & 3, low >> 15 & 1
        return f"v_mfma_f32_{name}", ", ".join([_many(f"{'a' if acc else 'v'}{low & 255}", out), _many(_source(sources[0], in_acc & 1), 4),
                                                _many(_source(sources[1], bool(in_acc & 2)), 4), _many(_source(sources[2], bool(acc)), out)])
    if op == 0xD9C6:
        return "ds_read_b64_tr_b16", f"v[{high >> 24}:{(high >> 24) + 1}], v{high & 255} offset:{low & 0xffff}"
    return None


# ------------------------------------------------------------------ a listing
def texts(arch: str, file: Path) -> list[Text]:
    """Every instruction of an object; padding is left out."""
    mcpu = ["--mcpu=gfx942"] if arch == "gfx950" else []
    text = subprocess.run([tool("llvm-objdump"), "-d", *mcpu, str(file)], capture_output=True, text=True, check=True).stdout
    found: list[Text] = []
    words: dict[int, int] = {}
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        m = re.match(r"^\t(\S+)\s*(.*?)\s*// ([0-9A-F]+): ([0-9A-F ]+)", line)
        if m:
            pc, code = int(m[3], 16), [int(w, 16) for w in m[4].split()]
            words |= {pc + 4 * n: w for n, w in enumerate(code)}
            lines.append((pc, 4 * len(code), m[1], m[2], number))
    skip = 0
    for pc, size, name, rest, number in lines:
        if pc < skip:
            continue
        if name == ".long" or name.startswith("<"):
            new = gfx950_encoding(words[pc], words.get(pc + 4, 0))
            if new is None:
                raise ValueError(f"{file.name}: {words[pc]:#010x} at {pc:#x} is no instruction that is known")
            found.append(Text(pc, 8, *new, number))
            skip = pc + 8
            continue
        if name == "s_code_end":
            continue
        if found and found[-1].name == "s_endpgm" and name == "s_nop" and rest == "0":
            continue
        found.append(Text(pc, size, name, rest, number))
    return found
