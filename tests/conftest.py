"""What runs tests needs `plugin`, and torch with it; what hands them out to others needs neither."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Take it, and torch with it, unless workers do the work."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("plugin")
