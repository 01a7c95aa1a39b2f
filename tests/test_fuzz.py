"""Corrupted inputs are read or refused with an error. `make fuzz` tries many more."""

import pytest
from hypothesis import HealthCheck, given, settings

from experiments.report.synthetic import grid, trial
from fuzzing import Folders, refused, targets
from storage.test_hub import decoder_named, make_injection

EXAMPLES = {"command lines": 25}  # 60 of the others, which are read in a third of the time
QUIET = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
NAMES = ["rows", "templates", "task TOML", "grid TOML", "options", "command lines", "artefacts", "stores"]


def good_folders(home):
    decoder = decoder_named()
    return Folders(home, make_injection(decoder), decoder, trial(), grid(views=("tasks",)))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return targets(good_folders(tmp_path_factory.mktemp("home")))


@pytest.mark.parametrize("name", NAMES)
def test_spoiled_inputs_are_read_or_refused(kinds, tmp_path, name):
    inputs, read = kinds[name]
    outcomes = set()

    @settings(max_examples=EXAMPLES.get(name, 60), derandomize=True, **QUIET)
    @given(inputs)
    def try_one(result):
        outcomes.add(refused(lambda: read(tmp_path, result)))

    try_one()
    assert outcomes == {True, False}  # neither all good nor all bad
    assert set(kinds) == set(NAMES)
