"""The READMEs' Python runs as it is written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(file):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_the_first_example_computes():
    [code] = blocks("README.md")
    run(code + "assert out.shape == q.shape and out.isfinite().all()")


@pytest.mark.parametrize("code", [code for code in blocks("portattn/compat/README.md") if "portattn.compat.install(" in code])
def test_modules_of_other_names_are_there_as_written(code):
    run(code)
