"""Load `plugin`, which imports torch, in processes that run tests, but not in the xdist controller."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load `plugin`, unless xdist workers run the tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("plugin")
