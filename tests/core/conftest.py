"""Fixtures of the tests of fits."""

import pytest

from i2cl.core import plan


@pytest.fixture
def few_steps(monkeypatch):
    """A tenth of AdamW's usual number of steps."""
    monkeypatch.setattr(plan, "MIN_ADAMW_STEPS", 24)
