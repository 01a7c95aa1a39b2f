"""The sentences that many modules say."""

import sys

import pydantic
import pytest

from fitting import one_line
from i2cl.errors import I2CLError, did_you_mean, first_problem, needs


class Settings(pydantic.BaseModel):
    shots: int
    words: list[str] = []


def problem(**values):
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings(**values)
    return first_problem(caught.value)


def test_a_package_that_is_lacking_is_named_with_its_cure(monkeypatch, tmp_path):
    needs("nothing", "dev", "json", "pytest")
    with pytest.raises(I2CLError, match=r"^a map needs the package abacus: pip install 'i2cl\[maps\]'$"):
        needs("a map", "maps", "json", "abacus")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    message = r"needs the packages abacus and scikit-learn: pip install 'i2cl\[maps\]', or draw it$"
    one_line(message, needs, "a map", "maps", "abacus", "sklearn", instead="draw it")
    (tmp_path / "abacus").mkdir()  # a folder beside the user's files is no package
    monkeypatch.syspath_prepend(str(tmp_path))
    one_line("needs the package abacus", needs, "a map", "maps", "abacus")


def test_the_first_problem_is_one_line_with_place_and_value():
    assert problem(shots="many").startswith("shots='many': Input should be a valid integer")
    assert problem(shots=1, words=[[]]).startswith("words.0: Input should be a valid string")
    assert problem(shots="x" * 100).startswith("shots: Input should be")
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings.model_validate_json("{")
    assert first_problem(caught.value).startswith("Invalid JSON")
    assert first_problem(KeyError("a")) == "'a'"


def test_close_names_are_offered_in_any_case():
    known = ["mr", "sst2", "sst5"]
    assert did_you_mean("SST3", known) == "did you mean 'sst5' or 'sst2'? "
    assert did_you_mean("sst21", known, most=1) == "did you mean 'sst2'? "
    assert did_you_mean("colour", known) == ""
