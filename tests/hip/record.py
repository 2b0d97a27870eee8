"""Writes resources.yaml: what every instance takes, on the architectures named or on all. Run: python -m tests.hip.record [ARCH ...]
Compiling them takes a minute an architecture on two cores."""

from __future__ import annotations

import sys
from multiprocessing import Pool

from portattn.instances import every_instance, limits_of

from . import objects
from .test_objects import GFX, TABLE, recorded


def row(arch_and_instance) -> str:
    arch, instance = arch_and_instance
    r = objects.resources(arch, objects.metadata(objects.made(arch, instance)))
    return f"  {instance}: {{vgpr: {r.vgpr}, lds: {r.lds}, waves: {r.waves:g}}}"


def main(archs: list[str]) -> None:
    lines = ["# Registers (VGPR), LDS bytes and waves a SIMD of each instance; written by python -m tests.hip.record."]
    known = recorded()
    for arch in GFX:
        lines.append(f"{arch}:")
        if archs and arch not in archs:
            lines += [f"  {name}: {{vgpr: {r['vgpr']}, lds: {r['lds']}, waves: {r['waves']:g}}}" for name, r in known[arch].items()]
            continue
        if reason := objects.missing(arch):
            raise SystemExit(reason)
        with Pool() as pool:
            lines += pool.map(row, [(arch, i) for i in every_instance(limits_of(arch))], chunksize=1)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
