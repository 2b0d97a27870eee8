"""Stand-in for the package portattn.backends in a bare checkout, where it lies beside portattn/ as backends/.

A wheel holds the real package in this place instead (pyproject.toml maps it) and leaves this file out.
"""

import pathlib

__path__ = [str(pathlib.Path(__file__).resolve().parent.parent / "backends")]
__doc__ = None
