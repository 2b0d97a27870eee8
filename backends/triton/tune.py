"""`portattn tune`: measures block sizes on this machine and writes them where schedule.py reads them before the shipped table.

For each head-dim class it times a few configurations of prefill tiles, of split decode and of a mixed batch, in bfloat16 or
float16, and keeps the fastest of each; where hopper.py serves, its blocks for few keys and for many, too. The record is a table
of the same form as tuning.yaml, in portattn's cache folder.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Callable

import torch

from portattn.problem import Call

TILES = [(64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 4, 2),
         (128, 32, 8, 3),
         (64, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1), (64, 16, 4, 1), (32, 32, 4, 1)]
SPLITS = [(32, 2, 3), (64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 3), (32, 4, 3), (64, 4, 1), (32, 4, 1), (16, 4, 1)]
HOPPERS = [(2, 128, 2, 240, 1), (2, 128, 2, 240, 0), (2, 64, 4, 240, 1), (2, 64, 2, 240, 0), (2, 128, 4, 240, 1), (3, 128, 3, 160, 1),
           (3, 128, 2, 160, 1), (3, 64, 4, 160, 1)]
KEYS = (512, 1024, 2048, 8192)  # a sequence: lengths at which hopper.py's blocks are timed
MEASURED = ("hopper", "tiles", "gather", "gather8", "splits", "mixed")
KINDS = ("hopper", "hopper_short", "tiles", "gather", "gather8", "mixed", "splits", "tiles32", "splits32")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 3 where there is no device to measure."""
    ap = argparse.ArgumentParser(prog="portattn tune --backend triton", description=__doc__)
    ap.add_argument("--device", default="cuda", help="torch device (default: cuda)")
    ap.add_argument("--head-dims", default="64,128,256", help="classes to measure, of 64, 128 and 256")
    ap.add_argument("--kinds", default=",".join(MEASURED), help="what to measure (default: %(default)s)")
    ap.add_argument("--dry-run", action="store_true", help="print the record, write nothing")
    args = ap.parse_args(argv)
    if unknown := set(args.kinds.split(",")) - set(MEASURED):
        ap.error(f"--kinds: wanted some of {','.join(MEASURED)}, got {','.join(sorted(unknown))}")
    if not torch.cuda.is_available() or torch.device(args.device).type != "cuda":
        print("tune: there is no CUDA or HIP device here to measure")
        return 3
    device = torch.device("cuda", torch.device(args.device).index or torch.cuda.current_device())
    with torch.cuda.device(device), torch.inference_mode():
        record = measure(device, [int(d) for d in args.head_dims.split(",")], args.kinds.split(","))
    text = render(record)
    print(text)
    if not args.dry_run:
        from portattn import codeobjects, config

        path = os.path.join(config.cache_dir(), "triton-tuning.yaml")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        codeobjects.write_whole(path, text.encode())
        print(f"written to {path}; delete it to return to the shipped table")
    return 0


def render(record: dict[str, Any]) -> str:
    """The record as YAML."""
    lines = [f"- arch: [{record['arch']}]"]
    for kind in filter(record.get, KINDS):
        lines.append(f"  {kind}: {{{', '.join(f'{size}: {list(c)}' for size, c in record[kind].items())}}}")
    return "\n".join(lines) + "\n"


def measure(device: torch.device, sizes: list[int], kinds: list[str]) -> dict[str, Any]:
    """The fastest configurations; classes and kinds that are not measured keep what the tables say."""
    from . import calls, schedule

    machine = calls.machine_of(device)
    record: dict[str, Any] = {"arch": machine.arch} | {kind: {} for kind in KINDS}
    for size in (64, 128, 256):
        for blocks in schedule.hoppers(machine.arch, size):
            keep_hopper(record, size, blocks)
    for kind in ("tiles", "gather", "gather8", "mixed", "splits", "tiles32", "splits32"):
        for size in (64, 128, 256, 512):
            base = kind.removesuffix("32")
            tile, split = schedule.configs_for(machine.arch, "tiles" if base == "splits" else base, size, kind.endswith("32"))
            found = list(split[1:]) if base == "splits" else list(tile)
            record[kind][size] = found + [split.bn] if base == "mixed" else found
    hip = machine.arch.startswith("gfx")
    for size in sizes:
        if "hopper" in kinds and schedule.hoppers(machine.arch, size):
            measure_hopper(device, size, record)
        stages = lambda c: (c[-1] <= 2) == hip or c[-1] == 2  # HIP: no software pipelining through shared memory
        for kind, options in (("tiles", TILES), ("gather", TILES), ("gather8", TILES), ("splits", SPLITS), ("mixed", TILES)):
            if kind not in kinds:
                continue
            times = {}
            for option in filter(stages, options):
                candidates = [(*option, bn) for bn in (32, 64, 128)] if kind == "mixed" else [option]
                for candidate in candidates:
                    if (seconds := _time(device, kind, size, candidate, record)) is not None:
                        times[candidate] = seconds
            if times:
                best = min(times, key=times.get)
                record[kind][size] = list(best)
                print(f"head dim {size}, {kind}: {list(best)}, {times[best]:.1f} us (of {len(times)})", flush=True)
    return record


def keep_hopper(record: dict[str, Any], size: int, blocks: Any) -> None:
    """Puts blocks of hopper.py into the record: for at most blocks.keys keys, or for any number."""
    few = blocks.keys < type(blocks)._field_defaults["keys"]
    record["hopper_short" if few else "hopper"][size] = list(blocks if few else blocks[:-1])


def measure_hopper(device: torch.device, size: int, record: dict[str, Any]) -> None:
    """hopper.py's blocks that are fastest for the most keys; and for the fewest, up to where those are no longer faster."""
    from . import calls, schedule

    shared = calls.machine_of(device).shared
    times: dict[tuple, list[float]] = {}
    for option in filter(lambda o: fits(size, o, shared), HOPPERS):
        found = []
        for keys in KEYS:
            if (seconds := _time_hopper(device, size, option, keys)) is None:
                break
            found.append(seconds)
        else:
            times[option] = found
    if not times:
        return
    many, few = (min(times, key=lambda option: times[option][at]) for at in (-1, 0))
    record["hopper_short"].pop(size, None)
    keep_hopper(record, size, schedule.Hopper(*many))
    faster = [keys for keys, a, b in zip(KEYS, times[few], times[many]) if a < b]
    if faster and few != many:
        keep_hopper(record, size, schedule.Hopper(*few, keys=max(faster)))
    for kind in ("hopper_short", "hopper"):
        if size in record[kind]:
            option = tuple(record[kind][size][:5])
            print(f"head dim {size}, {kind}: {record[kind][size]}, {', '.join(f'{t:.1f}' for t in times[option])} us for "
                  f"{', '.join(map(str, KEYS))} keys (of {len(times)})", flush=True)


def fits(size: int, option: tuple, shared: int) -> bool:
    """Whether rings of Q, K and V fit shared memory, and O, S and P a thread's registers: Triton prints pages where they do not."""
    groups, bn, stages, registers, _ = option
    slots = 2 if size < 256 else 1  # of Q
    return slots * groups * 64 * size * 2 + 2 * stages * bn * size * 2 < shared and size // 2 + bn // 2 + bn // 4 <= registers


def _measured(about: str, asked: str, answer: Any, call: Callable[[], Call], hopper: bool, taken: Callable[[Any], bool] = lambda run: True) -> float | None:
    """Microseconds of a call for which schedule's function `asked` gives `answer`, or None where that does not fit or compile, or is not `taken`."""
    from triton.testing import do_bench

    from . import calls, schedule

    known = getattr(schedule, asked)
    setattr(schedule, asked, lambda *_: answer)  # what a call asks for
    try:
        made = call()
        run = calls.Attention(made, hopper=hopper)
        run(made)
        return do_bench(lambda: run(made), warmup=10, rep=40, return_mode="median") * 1e3 if taken(run) else None
    except Exception as exc:  # out of registers or of shared memory, or refused by the compiler: not a candidate
        print(f"  {about}: {type(exc).__name__}")
        return None
    finally:
        setattr(schedule, asked, known)


def _time_hopper(device: torch.device, size: int, option: tuple, keys: int) -> float | None:
    """Microseconds of a causal call of 16,384 tokens with these blocks, or None where they do not fit or compile."""
    from . import schedule

    return _measured(f"hopper {size} {option}", "hoppers", (schedule.Hopper(*option),), lambda: _call(device, "hopper", size, keys), True)


def _time(device: torch.device, kind: str, size: int, option: tuple, record: dict[str, Any]) -> float | None:
    """Microseconds a call with this configuration, or None where it does not fit or compile."""
    from . import schedule

    tile = schedule.Config(*(option[:4] if kind != "splits" else record["gather"][size]))
    if kind == "splits":
        split = schedule.Config(0, *option)
    else:
        split = schedule.Config(0, option[4], *option[2:4]) if kind == "mixed" else schedule.Config(0, *record["splits"][size])
    nth, wanted = (2, split) if kind == "splits" else (1, tile)
    return _measured(f"{kind} {size} {option}", "configs_for", (tile, split), lambda: _call(device, kind, size), False,
                     lambda run: run.described[nth].bn == wanted.bn)  # shared memory can make it another one


def _call(device: torch.device, kind: str, d: int, keys: int = 2048) -> Call:
    """The problem that a kind is measured on: 8 kv heads, group 4, causal. keys: of a sequence, where there are no pages."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    rand = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)
    common = dict(softmax_scale=d**-0.5, causal=True, window_right=0)
    if kind in ("tiles", "hopper"):
        batch = (16384 if kind == "hopper" else 8192) // keys
        q, k, v = rand(batch, keys, 32, d), rand(batch, keys, 8, d), rand(batch, keys, 8, d)
        return Call(q, k, v, max_seqlen_q=keys, max_seqlen_k=keys, out=torch.empty_like(q), **common)
    lens = {"gather": [4096] * 4, "gather8": [4096] * 4, "splits": [4096] * 32, "mixed": [4096] * 28 + [2048] * 2}[kind]
    rows = {"gather": [512] * 4, "gather8": [512] * 4, "splits": [1] * 32, "mixed": [1] * 28 + [512] * 2}[kind]
    page = 16
    pages = sum(lens) // page
    table = torch.zeros(len(lens), max(lens) // page, dtype=torch.int32)
    order, at = torch.randperm(pages, dtype=torch.int32), 0
    for b, n in enumerate(lens):
        table[b, : n // page] = order[at : at + n // page]
        at += n // page
    q, k, v = rand(sum(rows), 32, d), rand(pages, page, 8, d), rand(pages, page, 8, d)
    if kind == "gather8":
        k, v = (x.to(torch.float8_e5m2) for x in (k, v))
    cu = torch.tensor([0, *rows]).cumsum(0).int().to(device)
    return Call(q, k, v, block_table=table.to(device), kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
                cu_seqlens_q=cu,
                max_seqlen_q=max(rows), max_seqlen_k=max(lens), out=torch.empty_like(q), **common)


if __name__ == "__main__":
    raise SystemExit(main())
