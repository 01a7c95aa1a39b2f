import pytest

from export.cases import drawn
from i2cl.export import export_causal_lm


@pytest.fixture(autouse=True)
def _few_golden_prompts(few_golden_prompts):
    """Use few golden texts in all of these tests."""


@pytest.fixture
def exported(tmp_path):
    """A folded tiny Llama with golden answers."""
    export_causal_lm(*drawn("llama"), tmp_path / "out")
    return tmp_path / "out"
