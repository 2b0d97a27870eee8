"""Registers the plugin where pytest was not told to load it."""

import pytest

from portattn.testing import plugin


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, "portattn.testing.plugin")
