"""Writes resources.yaml: what the chosen instances take on every architecture. Run: python -m tests.hip.record"""

from __future__ import annotations

from . import objects
from .test_objects import GFX, TABLE, chosen


def main() -> None:
    lines = ["# Registers (VGPR), LDS bytes and waves a SIMD of each instance; written by python -m tests.hip.record."]
    for arch in GFX:
        if reason := objects.missing(arch):
            raise SystemExit(reason)
        lines.append(f"{arch}:")
        for instance in chosen(arch):
            r = objects.resources(arch, objects.metadata(objects.made(arch, instance)))
            lines.append(f"  {instance}: {{vgpr: {r.vgpr}, lds: {r.lds}, waves: {r.waves}}}")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
