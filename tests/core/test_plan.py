"""Which solver and scoring a fit uses, by its size and the memory that it may take."""

import warnings

import pytest
import torch

from fitting import new_decoder, raises
from i2cl import AnchoredConfig, CalibrationConfig, Example, Task, Template, anchor
from i2cl.core import anchored, plan
from i2cl.core.objective import Linearization, Objective
from i2cl.core.plan import FitSize, plan_fit
from i2cl.experiments.evidence.fit_evaluation import refitting
from i2cl.methods.anchored import Anchored
from i2cl.methods.i2cl import I2CL
from i2cl.models.memory import MemoryWarning
from i2cl.models.scoring import LabelScorer

LETTERS = Task("letters", tuple("abcdef"), Template("{text}\n{label}"))
SHARED = Task("shared", ("~a", "~b"), LETTERS.template)  # the labels share their first token
SHOWN = tuple(Example(f"text {at}", at) for at in range(6))
SMALL = FitSize(examples=20, labels=4, parameters=1000)
GB = 10**9


@pytest.mark.parametrize(
    ("size", "solver"),
    [
        (SMALL, "gauss_newton"),
        (FitSize(128, 5, 1000), "gauss_newton"),
        (FitSize(129, 5, 1000), "adamw"),
        (FitSize(129, 5, 1000, word_level=True), "gauss_newton"),
        (FitSize(24, 24, 1000, word_level=True), "gauss_newton"),
        (FitSize(385, 77, 1000, word_level=True), "adamw"),
    ],
)
def test_the_number_of_examples_and_wrong_labels_decides(size, solver):
    result = plan_fit(size, GB)
    assert result.solver == solver
    assert not result.warning


def test_a_kernel_that_exceeds_the_memory_falls_back_to_adamw():
    size = FitSize(examples=100, labels=4, parameters=1000)
    assert plan_fit(size, size.kernel_bytes).solver == "gauss_newton"
    result = plan_fit(size, size.kernel_bytes - 1)
    assert result.solver == "adamw"
    assert "GB may be used: using AdamW" in result.warning


def test_a_requested_solver_is_used():
    many = FitSize(examples=240, labels=6, parameters=1000)  # 1,200 pairs
    assert plan_fit(many, GB, "gauss_newton").solver == "gauss_newton"
    assert plan_fit(SMALL, GB, "adamw").solver == "adamw"


@pytest.mark.parametrize(
    ("size", "memory", "solver", "message"),
    [
        (SMALL, 1000, "auto", r"needs .* GB beside it, but 1e-06 GB may be used: .*--memory"),
        (SMALL, 1000, "gauss_newton", r"1e-06 GB may be used: .*--memory.*leave out solver='gauss_newton'"),
        (FitSize(960, 6, 1000), GB, "gauss_newton", "up to 4096 pairs, not 4800 .*--shots"),
    ],
)
def test_a_fit_that_is_too_large_is_refused(size, memory, solver, message):
    raises(message, plan_fit, size, memory, solver)


def test_the_cost_grows_with_labels_and_steps():
    def passes(labels, steps=4, word_level=False):
        return plan_fit(FitSize(10, labels, 1000, word_level), GB, steps=steps).passes

    assert passes(2) < passes(3) < passes(10)
    assert passes(10, steps=1) < passes(10, steps=2) < passes(10, steps=4)
    assert passes(24) < passes(24, word_level=True)  # fits most examples later


@pytest.mark.parametrize("solver", ["gauss_newton", "adamw"])
def test_settings_store_the_solver(solver, few_steps):
    config = AnchoredConfig(steps=1, solver=solver)
    assert anchor(new_decoder("llama"), LETTERS, SHOWN, config).settings["solved_by"] == solver


@pytest.mark.parametrize("solver", ["gauss_newton", "adamw"])
def test_labels_that_share_first_tokens_are_scored_by_words_without_a_warning(solver, few_steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        injection = anchor(new_decoder("llama"), SHARED, SHOWN[:2], AnchoredConfig(steps=1, solver=solver))
    assert injection.scoring == "words"


def test_full_sequences_are_refused():
    message = "scoring='sequence' is for methods without a fit.*scoring='words'"
    raises(message, anchor, new_decoder("llama"), SHARED, SHOWN[:2], scoring="sequence")


def test_a_refit_uses_the_solver_and_scoring_of_the_fit(few_steps, monkeypatch):
    decoder, method = new_decoder("llama"), Anchored(AnchoredConfig(steps=1))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "MAX_WORD_KERNEL_PAIRS", 1)
        fit = method.fit_injection(decoder, SHARED, SHOWN[:2])
    assert method.fit_injection(decoder, SHARED, SHOWN[:2]).settings["solved_by"] == "gauss_newton"
    again = refitting(method, fit)(decoder, SHARED, SHOWN[:2])
    assert (again.settings["solved_by"], again.scoring) == ("adamw", "words")
    i2cl = I2CL(calibration=CalibrationConfig(epochs=1))
    fit = i2cl.fit_injection(decoder, LETTERS, SHOWN)
    assert refitting(i2cl, fit)(decoder, LETTERS, SHOWN).scoring == "auto"


def test_the_default_limit_is_a_quarter_of_the_free_memory(monkeypatch):
    decoder = new_decoder("llama")
    monkeypatch.setattr(anchored, "free_memory", lambda: 80_000)
    with pytest.warns(MemoryWarning, match="but 2e-05 GB may be used: using AdamW"):
        anchor(decoder, LETTERS, SHOWN, AnchoredConfig(steps=0))


def test_the_limit_is_not_stored():
    configs = (AnchoredConfig(steps=1, memory=memory) for memory in (1.0, None))
    limited, free = (anchor(new_decoder("llama"), LETTERS, SHOWN, config) for config in configs)
    assert "memory" not in limited.settings
    assert limited.settings.keys() == free.settings.keys()


def test_more_examples_than_the_maximum_are_refused():
    raises(r"16384 examples, not 18000.*--shots", anchor, new_decoder("llama"), LETTERS, SHOWN * 3000)


def test_derivatives_are_taken_in_batches_that_the_training_memory_holds(monkeypatch):
    fit = Objective(LabelScorer(new_decoder("llama"), LETTERS), SHOWN, "both")
    decoder, rows = fit.scorer.decoder, []
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda batch, **more: [rows.append(len(batch.rows)), forward(batch, **more)][1]
    )
    zeros, scores = torch.zeros(fit.vector_size), torch.zeros(len(SHOWN), len(LETTERS.labels))
    slopes = torch.empty(len(SHOWN) * (len(LETTERS.labels) - 1), fit.vector_size)
    whole = fit.relinearize(Linearization(scores, slopes), zeros, scores, fit.rows).jacobian.clone()
    assert max(rows) > 2
    longest = max(map(len, fit.queries))
    monkeypatch.setattr(decoder, "training_memory", 2 * (longest * decoder.token_bytes + fit._row_bytes))
    rows.clear()
    parts = fit.relinearize(Linearization(scores, slopes), zeros, scores, fit.rows).jacobian
    assert max(rows) == 2
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)
