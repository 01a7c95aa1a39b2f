"""Helpers for error messages."""

import sys

import pydantic
import pytest

from fitting import raises
from i2cl.errors import I2CLError, did_you_mean, first_problem, require_packages


class Settings(pydantic.BaseModel):
    shots: int
    words: list[str] = []


def problem(**values):
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings(**values)
    return first_problem(caught.value)


def test_missing_packages_name_the_install_command(monkeypatch, tmp_path):
    require_packages("nothing", "dev", "json", "pytest")
    with pytest.raises(I2CLError, match=r"^a map needs the package abacus: pip install 'i2cl\[maps\]'$"):
        require_packages("a map", "maps", "json", "abacus")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    message = r"needs the packages abacus and scikit-learn: pip install 'i2cl\[maps\]', or draw it$"
    raises(message, require_packages, "a map", "maps", "abacus", "sklearn", instead="draw it")
    (tmp_path / "abacus").mkdir()  # a folder in the working directory is not a package
    monkeypatch.syspath_prepend(str(tmp_path))
    raises("needs the package abacus", require_packages, "a map", "maps", "abacus")


def test_first_problem_has_field_and_value():
    assert problem(shots="many").startswith("shots='many': Input should be a valid integer")
    assert problem(shots=1, words=[[]]).startswith("words.0: Input should be a valid string")
    assert problem(shots="x" * 100).startswith("shots: Input should be")
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings.model_validate_json("{")
    assert first_problem(caught.value).startswith("Invalid JSON")
    assert first_problem(KeyError("a")) == "'a'"


def test_did_you_mean_ignores_case():
    known = ["mr", "sst2", "sst5"]
    assert did_you_mean("SST3", known) == "did you mean 'sst5' or 'sst2'? "
    assert did_you_mean("sst21", known, limit=1) == "did you mean 'sst2'? "
    assert did_you_mean("colour", known) == ""
