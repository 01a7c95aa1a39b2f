"""Class weights and sample weights in the losses of anchored calibration and of I2CL."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from sklearn.utils import class_weight

from fitting import injected, raises
from i2cl import AnchoredConfig, CalibrationConfig, Decoder, Example, anchor, load_task
from i2cl.core.weights import apply_class_weight, example_weights
from i2cl.methods import make_injector

TASK = load_task("mood-colour-1")
EVEN = TASK.sample(2, 0)
UNEVEN = (*TASK.sample(2, 0), *TASK.held_out(3, EVEN, 0))
QUERIES = [example.text for example in TASK.test[:20]]
SOLVERS = ["gauss_newton", "adamw"]


@cache
def reference():
    return Decoder.from_pretrained("reference")


def anchored(shown, **options):
    return anchor(reference(), TASK, shown, AnchoredConfig(**options))


def probabilities(injection):
    return injection.log_probs(reference(), QUERIES).double().softmax(-1)


def test_balanced_weights_match_scikit_learn():
    labels = [example.label for example in UNEVEN]
    weights = [one.weight for one in apply_class_weight(UNEVEN, TASK.labels, "balanced")]
    assert weights == pytest.approx(class_weight.compute_sample_weight("balanced", labels))


def test_class_weights_multiply_sample_weights():
    rows = [Example("a", 0, 2.0), Example("b", 1, 3.0)]
    word = TASK.labels[1]
    assert [one.weight for one in apply_class_weight(rows, TASK.labels, ((word, 5.0),))] == [2, 15]
    assert [one.weight for one in apply_class_weight(rows, TASK.labels, "balanced")] == [2.5, 2.5]


def test_equal_weights_have_no_effect():
    assert example_weights(apply_class_weight(EVEN, TASK.labels, "balanced")) is None


@pytest.mark.parametrize("solver", SOLVERS)
def test_balanced_weights_of_equal_counts_do_not_change_an_anchored_fit(solver, few_steps):
    options = {"solver": solver, "steps": 1}
    plain, balanced = (anchored(EVEN, class_weight=way, **options) for way in (None, "balanced"))
    assert torch.equal(plain.context, balanced.context)
    assert plain.history == balanced.history


def test_integer_weights_equal_repeated_rows():
    factors = [1, 2, 3, 1, 1, 2, 1, 2]
    repeated = [one for one, times in zip(EVEN, factors, strict=True) for _ in range(times)]
    weighted = [replace(one, weight=float(times)) for one, times in zip(EVEN, factors, strict=True)]
    for way in (None, "balanced"):
        options = {"solver": "gauss_newton", "say_label": False, "class_weight": way, "steps": 3}
        one, other = (anchored(rows, **options) for rows in (repeated, weighted))
        torch.testing.assert_close(probabilities(one), probabilities(other), atol=1e-4, rtol=0)
        assert one.history == pytest.approx(other.history, rel=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_heavier_class_gets_more_probability(solver, few_steps):
    word = TASK.labels[0]
    plain = anchored(UNEVEN, solver=solver)
    heavy = anchored(UNEVEN, solver=solver, class_weight={word: 20.0})
    assert probabilities(heavy)[:, 0].mean() > probabilities(plain)[:, 0].mean()


@pytest.mark.parametrize("recipe", ["paper", "fast"])
def test_balanced_weights_change_i2cl_only_for_unequal_counts(recipe):
    def fitted(shown, way):
        config = CalibrationConfig.recipe(recipe, epochs=1, passes=3, class_weight=way)
        return injected(reference(), TASK, shown, config).coefficients

    assert torch.equal(fitted(EVEN, None), fitted(EVEN, "balanced"))
    assert not torch.equal(fitted(UNEVEN, None), fitted(UNEVEN, "balanced"))


def test_class_weights_are_stored_with_the_fit_and_only_if_given():
    assert "class_weight" not in anchored(EVEN, steps=1).settings
    words = {TASK.labels[0]: 2.0}
    assert anchored(EVEN, steps=1, class_weight=words).settings["class_weight"] == words


def test_class_weights_can_be_given_on_the_command_line():
    method = make_injector(None, {"class_weight": "spam=5, ham=0.5"})
    assert method.anchoring.class_weight == (("spam", 5.0), ("ham", 0.5))


@pytest.mark.parametrize("value", ["even", "spam", "spam=many", "spam=0", "spam=-1", "spam=inf", "=", 3])
def test_invalid_class_weights_are_refused(value):
    raises("option class_weight=", make_injector, None, {"class_weight": value})


def test_weight_for_an_unknown_label_is_refused():
    raises("class_weight names 'mauve'.*labels are '", anchored, EVEN, class_weight={"mauve": 2})
