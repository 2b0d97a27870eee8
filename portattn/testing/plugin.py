"""The suite under pytest: each test and case a pytest item, a backend's no a skip that says its codes.

    pytest -p portattn.testing.plugin --pyargs portattn.testing --portattn-backend NAME --portattn-device cpu

Without `-p` (the conftest of this folder then loads the plugin too late for options) the variables PORTATTN_TEST_BACKEND,
PORTATTN_TEST_DEVICE and PORTATTN_TEST_LEVEL say the same.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from portattn import registry
from portattn.errors import NoBackendError

from .runner import quiet_environment
from .target import Check, Declined, Target, default_device

_OPTIONS = {"backend": "sdpa", "device": "", "level": "quick"}  # device: default_device's


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("portattn", "portattn conformance suite")
    for name, default in _OPTIONS.items():
        group.addoption(f"--portattn-{name}", default=None, help=f"{name} under test (default: {default or 'as portattn conformance'})")


def _option(config: pytest.Config, name: str) -> str:
    return config.getoption(f"portattn_{name}", None) or os.environ.get(f"PORTATTN_TEST_{name.upper()}") or _OPTIONS[name]


def _target(config: pytest.Config) -> Target:
    backend, device, level = (_option(config, name) for name in _OPTIONS)
    if backend not in registry.manifests():
        raise pytest.UsageError(f"--portattn-backend: wanted one of {', '.join(registry.manifests())}, got {backend}")
    if level not in ("quick", "full"):
        raise pytest.UsageError(f"--portattn-level: wanted quick or full, got {level}")
    return Target(backend, device or default_device(backend), level)


def _check(function: Any) -> Check | None:
    return getattr(function, "portattn_check", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    check = _check(metafunc.function)
    if check is None:
        return
    target = _target(metafunc.config)
    found = check.cases(target, target.level)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", found, ids=map(str, found))


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Any:
    """The backend on the device that the options name."""
    found, check = _target(request.config), _check(request.function)
    with quiet_environment():
        if reasons := registry.probe(found.backend, found.device):
            pytest.skip(f"{found.backend} does not work on {found.device}: {'; '.join(map(str, reasons))}")
        if check is not None and check.quick is None and check.full is None and not check.cases(found, found.level):
            pytest.skip("not on this device or level")
        yield found


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    outcome = yield
    if _check(pyfuncitem.function) is None or outcome.excinfo is None:
        return
    error = outcome.excinfo[1]
    if isinstance(error, Declined):
        outcome.force_exception(pytest.skip.Exception(f"declined: {error}"))
    elif isinstance(error, NoBackendError):
        try:
            reasons = pyfuncitem.funcargs["target"].judge(error)
        except AssertionError as lie:
            outcome.force_exception(lie)
        else:
            outcome.force_exception(pytest.skip.Exception("declined: " + "; ".join(map(str, reasons))))
