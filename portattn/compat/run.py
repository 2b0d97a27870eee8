"""`python -m portattn.compat.run [--names a,b] [--shadow] script.py arguments…`: a program after `portattn.compat.install()`.

Also `-m module arguments…`. The program sees its own sys.argv, and its own folder first in sys.path, as if Python had started it;
behind that stands the folder in which this was started. Processes that it spawns do not inherit the installation: there, call
portattn.compat.install() (or run them through this).
"""

from __future__ import annotations

import os
import runpy
import sys


def main(arguments: list[str]) -> int:
    """Runs the program named in arguments; returns 2 with a sentence on stderr if there is none to run."""
    from . import install

    names: tuple[str, ...] = ()
    shadow = False
    while arguments and arguments[0] in ("--names", "--shadow"):
        if arguments.pop(0) == "--shadow":
            shadow = True
        elif arguments:
            names = tuple(arguments.pop(0).split(","))
    as_module = bool(arguments) and arguments[0] == "-m"
    if as_module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if not as_module and not os.path.exists(arguments[0]):
        print(f"portattn.compat.run: there is no file {arguments[0]}", file=sys.stderr)
        return 2
    install(*names, shadow=shadow)
    sys.argv = arguments
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
