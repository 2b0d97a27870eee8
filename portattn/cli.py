"""The command `portattn`: a sub-command each for doctor, conformance, explain, matrix, support-table, bench, demo, tune.

A command's module is imported when it is asked for, and parses its own arguments: `main(argv) -> exit code`.
Exit codes: 0 well; 1 the command's own no (an error found, a failed case, a stale table); 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import io
import os
import sys
from typing import Callable

COMMANDS = {  # name: (module, function, what it does)
    "doctor": ("portattn.doctor", "main", "what this machine can do, what stands in the way, and what mends it"),
    "conformance": ("portattn.testing", "main", "check a backend against every rule of the contract"),
    "explain": ("portattn.explain_cli", "main", "what would run a problem, and why not the other backends"),
    "matrix": ("portattn.matrix", "main", "the CI jobs that the manifests ask for"),
    "support-table": ("portattn.matrix", "support_table", "the support table; keeps a README current"),
    "bench": ("portattn.bench", "main", "overhead, speed against plain torch, memory and import cost on this machine"),
    "demo": ("portattn.demo", "main", "a small engine generates text with a real model"),
}


def commands() -> dict[str, str]:
    """Commands by name, each with its one-line description; tune only where a backend has something to tune."""
    known = {name: text for name, (_, _, text) in COMMANDS.items()}
    if tunable := _tunable():
        known["tune"] = f"measure this machine and keep what is fastest ({', '.join(tunable)})"
    return known


def _tunable() -> dict[str, str]:
    """Backends with a module `tune`: {name: module}. Asks the file system only, so that --help imports no adapter."""
    from . import backends

    files = (file for root in backends.__path__ for file in glob.glob(os.path.join(glob.escape(root), "*", "tune.py")))
    names = sorted(os.path.basename(os.path.dirname(file)) for file in files)
    return {name: f"portattn.backends.{name}.tune" for name in names}


def _tune(argv: list[str]) -> int:
    ap = argparse.ArgumentParser(prog="portattn tune", add_help=False)
    ap.add_argument("--backend", choices=_tunable(), default=next(iter(_tunable()), None))
    args, rest = ap.parse_known_args(argv)
    return importlib.import_module(_tunable()[args.backend]).main(rest)


def _run(name: str) -> Callable[[list[str]], int]:
    if name == "tune":
        return _tune
    module, function, _ = COMMANDS[name]
    return getattr(importlib.import_module(module), function)


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    ap = argparse.ArgumentParser(prog="portattn", description="One attention API over many kernels and devices.",
                                 epilog="Each command explains itself: portattn COMMAND --help. "
                                 "Exit codes: 0 well, 1 the command's own no, 2 wrong usage, 130 interrupted.")
    ap.add_argument("--version", action="store_true", help="the version, and torch's")
    sub = ap.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in commands().items():
        sub.add_parser(name, help=text, description=text, add_help=False)
    args = ap.parse_args(argv[:1])
    if args.version:
        import torch

        from .version import __version__

        print(f"portattn {__version__}, torch {torch.__version__}")
        return 0
    if args.command is None:
        ap.print_help()
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path or a device's name may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(_run(args.command)(argv[1:]) or 0)
        if sys.stdout is not None:  # closed: portattn doctor >&-
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `portattn matrix | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 0


if __name__ == "__main__":
    sys.exit(main())
