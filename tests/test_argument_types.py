"""Arguments of wrong types: a name instead of a task or method, a dict instead of settings."""

from functools import partial

import pytest

from fitting import raises
from i2cl import (
    CalibrationConfig,
    InjectionPool,
    anchor,
    evaluate,
    extract,
    extract_classes,
    make_methods,
    review,
    suggest,
    transfer,
)
from i2cl.models.scoring import LabelScorer

FITS = {
    "anchor": anchor,
    "extract": extract,
    "extract_classes": extract_classes,
    "review": review,
    "suggest": suggest,
    "transfer": partial(transfer, anchors=[]),
    "evaluate": lambda decoder, task, _: evaluate(decoder, task, *make_methods(["zero_shot"])),
}


@pytest.mark.parametrize("work", FITS.values(), ids=FITS)
def test_name_instead_of_a_task_or_a_decoder_is_refused(work, decoder, task):
    raises("^task must be of type Task, not str: load one with load_task", work, decoder, "sst2", task.train)
    raises(
        "^decoder must be of type Decoder, not str: load one with Decoder.from_pretrained",
        *(work, "reference", task, task.train),
    )


def test_scorer_of_a_task_name_is_refused(decoder):
    scorer = object.__new__(LabelScorer)  # in its constructor, the shape checks of the tests come first
    vars(scorer).update(decoder=decoder, task="sst2")
    raises("^task must be of type Task, not str", scorer.__post_init__)


def test_unknown_scoring_is_refused(decoder, task):
    scorer = object.__new__(LabelScorer)
    vars(scorer).update(decoder=decoder, task=task, scoring="first")
    raises("^scoring is 'first': choose one of auto, first_token", scorer.__post_init__)


def test_name_instead_of_a_method_is_refused(decoder, task):
    message = "^method must be of type Method, not str: make one with make_methods"
    raises(message, evaluate, decoder, task, "zero_shot")


def test_pairs_instead_of_examples_are_refused(decoder, task):
    message = r"^demonstration 1 must be of type Example, not tuple: give Example\(text, label\)"
    raises(message, anchor, decoder, task, [("warm", 0), ("dull", 1)])


@pytest.mark.parametrize(
    ("work", "name", "kind"),
    [
        (anchor, "config", "AnchoredConfig"),
        (extract, "config", "ExtractConfig"),
        (FITS["transfer"], "config", "TransferConfig"),
        (FITS["transfer"], "calibration", "CalibrationConfig"),
        (FITS["transfer"], "extraction", "ExtractConfig"),
    ],
)
def test_dict_instead_of_settings_is_refused(work, name, kind, decoder, task):
    message = rf"^{name} must be of type {kind}, not dict: pass {kind}\(...\)"
    raises(message, work, decoder, task, task.train[:4], **{name: {"steps": 1}})


def test_settings_of_another_method_are_refused(decoder, task):
    message = "config must be of type AnchoredConfig, not CalibrationConfig"
    raises(message, anchor, decoder, task, task.train[:4], CalibrationConfig())


def test_path_instead_of_an_injection_is_refused(decoder):
    message = "^injection 'mood' must be of type Injection, not str: load it with Injection.from_pretrained"
    raises(message, InjectionPool(decoder).load, "mood", "mood/")
