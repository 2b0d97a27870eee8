"""A backend out of tree (naive_attention/, a tutorial) is found by its entry point and passes the suite for what it declares."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A site folder as pip leaves it, with the entry points of the tutorial's pyproject.toml."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(os.path.join(HERE, "naive_attention", "naive_attention"), site / "naive_attention")
    with open(os.path.join(HERE, "naive_attention", "pyproject.toml"), encoding="utf-8") as f:
        group, name, value = re.search(r'entry-points\."([\w.]+)"\]\n(\w+) = "(\w+)"', f.read()).groups()
    info = site / "naive_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: naive-attention\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return site


def python(site, *argv, cwd, **env):
    path = os.pathsep.join([str(site), ROOT])
    return subprocess.run([sys.executable, *argv], cwd=cwd, env={**os.environ, "PYTHONPATH": path, "PORTATTN_CACHE": str(cwd),
                                                                 **env},
                          capture_output=True, text=True, timeout=280)


def test_it_is_found_and_serves(installed, tmp_path):
    code = ("import torch, portattn, sys; assert 'naive_attention' not in sys.modules; print(portattn.backends()['naive_attention'].level);"
            "q = torch.randn(1, 3, 2, 8); a = portattn.attention(q, q, q, causal=True, backend='naive_attention');"
            "print(torch.allclose(a, portattn.attention(q, q, q, causal=True, backend='sdpa'), atol=1e-5))")
    done = python(installed, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready", "True"]


def test_it_passes_the_suite_for_what_it_declares(installed, tmp_path):
    done = python(installed, "-m", "portattn", "conformance", "--backend", "naive_attention", "--json",
                  str(tmp_path / "report.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"]["failed"] == 0 and report["counts"]["passed"] > 200
    codes = {code for r in report["results"] for code in r["codes"]}
    assert {"layout", "alibi", "bias", "grad"} <= codes, "what it does not declare is declined with its reason"
    assert "\r" not in done.stdout + done.stderr, "quiet in a pipe"


def test_pytest_runs_the_suite_on_it(installed, tmp_path):
    done = python(installed, "-m", "pytest", "-p", "portattn.testing.plugin", "--pyargs", "portattn.testing",
                  "--portattn-backend", "naive_attention",
                  "--portattn-device", "cpu", "-q", "-k", "C_ALIGN or bottom_right or merge_of_any", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" in done.stdout


def test_it_is_about_forty_lines():
    with open(os.path.join(HERE, "naive_attention", "naive_attention", "__init__.py"), encoding="utf-8") as f:
        assert sum(bool(line.strip()) and not line.strip().startswith(('"""', "#")) for line in f) <= 45
