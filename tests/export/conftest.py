import pytest

from export.cases import drawn
from i2cl.export import export_hf, golden, make_golden


@pytest.fixture(autouse=True)
def _few_golden_prompts(monkeypatch):
    """Two instead of six: what is tested of one holds for each."""
    monkeypatch.setattr(golden, "TEXTS", golden.TEXTS[:2])


@pytest.fixture
def exported(tmp_path):
    """A folded tiny Llama with its golden values."""
    decoder, injection = drawn("llama")
    export_hf(decoder, injection, tmp_path / "out", golden=lambda: make_golden(decoder, injection))
    return tmp_path / "out"
