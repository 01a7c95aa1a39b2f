import pytest

from export.cases import drawn, with_golden
from i2cl.export import export_hf, golden


@pytest.fixture(autouse=True)
def _few_golden_prompts(monkeypatch):
    """Two instead of six: what is tested of one holds for each."""
    monkeypatch.setattr(golden, "TEXTS", golden.TEXTS[:2])


@pytest.fixture
def exported(tmp_path):
    """A folded tiny Llama with its golden values."""
    with_golden(export_hf, drawn("llama"), tmp_path / "out")
    return tmp_path / "out"
