import pytest

from i2cl.export import golden


@pytest.fixture(autouse=True)
def _few_golden_prompts(monkeypatch):
    """Two instead of six: what is tested of one holds for each."""
    monkeypatch.setattr(golden, "TEXTS", golden.TEXTS[:2])
