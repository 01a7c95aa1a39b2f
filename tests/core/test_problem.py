"""Which problems are solved in a kernel: by their size and the memory that derivatives may take."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from fitting import made, one_line
from i2cl import AnchoredConfig, CalibrationConfig, Example, Task, Template, anchor
from i2cl.core import problem as module
from i2cl.core.problem import Problem, memory_taken
from i2cl.experiments.evidence.fit_evaluation import refitting
from i2cl.methods.anchored import Anchored
from i2cl.methods.i2cl import I2CL
from i2cl.models.encoding import ScoringWarning
from i2cl.models.memory import MemoryWarning
from i2cl.models.scoring import Questions

LETTERS = Task("letters", tuple("abcdef"), Template("{text}\n{label}"))
SHOWN = tuple(Example(f"text {at}", at) for at in range(6))


def asked(shown=SHOWN, scoring="auto"):
    return Problem(Questions(made("llama"), LETTERS, scoring), shown, "both")


def test_a_kernel_is_solved_where_it_fits_the_memory():
    fit = asked()
    taken = memory_taken(6 * 5, fit.scale.numel()) / 1e9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit.fits(1.0001 * taken)
        assert not asked(SHOWN * 40).fits(None)  # 1,200 rows
    with pytest.warns(MemoryWarning, match="than the .* GB that they may: going on by descent"):
        assert not fit.fits(0.999 * taken)


@pytest.mark.parametrize(
    ("times", "scoring", "limit", "message"),
    [
        (1, "full", 1e-6, r"give more memory \(--memory\), or leave out scoring='full'"),
        (160, "full", None, "4800 whole sequences are more than the 4096"),
        (1, "auto", 1e-6, r"vectors and their gradients take .*: give more memory \(--memory\)"),
        (40, "auto", 1e-6, "more than the 1e-06 GB that they may"),
    ],
)
def test_what_does_not_fit_is_refused(times, scoring, limit, message):
    one_line(message, asked(SHOWN * times, scoring).fits, limit)
    assert asked(SHOWN * 40, "full").fits(None)  # 1,200 rows


def test_a_solver_that_is_named_is_taken_or_refused():
    many = asked(SHOWN * 40)  # 1,200 rows
    assert many.fits(None, "kernel")
    assert not asked().fits(None, "descent")
    one_line("the 1e-06 GB that they may: .*leave out solver='kernel'", asked().fits, 1e-6, "kernel")
    one_line("4800 columns are more than the 4096", asked(SHOWN * 160).fits, None, "kernel")
    one_line("leave out solver='kernel', or give fewer", asked(SHOWN * 160, "full").fits, None, "kernel")
    one_line("leave out scoring='full' or solver='descent'", asked(scoring="full").fits, None, "descent")
    steps = AnchoredConfig(steps=1)
    for solver in ("kernel", "descent"):
        config = steps.model_copy(update={"solver": solver})
        assert anchor(made("llama"), LETTERS, SHOWN, config).settings["solved_by"] == solver
    same = Task("same", ("~a", "~b"), LETTERS.template)
    config = steps.model_copy(update={"solver": "descent"})
    with pytest.warns(ScoringWarning, match="a descent takes no whole ones: each is scored by its words"):
        assert anchor(made("llama"), same, SHOWN[:2], config).scoring == "words"


def test_a_refit_is_made_as_the_fit_was(monkeypatch):
    """Two thirds of the rows would go into a kernel, and their labels would be whole."""
    decoder, method = made("llama"), Anchored(AnchoredConfig(steps=1))
    same = Task("same", ("~a", "~b"), LETTERS.template)
    monkeypatch.setattr("i2cl.core.anchored.MOST_WHOLE", 1)
    monkeypatch.setattr(module, "MOST_COLUMNS", 1)
    with pytest.warns(ScoringWarning, match="2 labels share first tokens"):
        fit = method.injection(decoder, same, SHOWN[:2])
    monkeypatch.undo()
    assert method.injection(decoder, same, SHOWN[:2]).settings["solved_by"] == "kernel"
    again = refitting(method, fit)(decoder, same, SHOWN[:2])
    assert (again.settings["solved_by"], again.scoring) == ("descent", "words")
    i2cl = I2CL(calibration=CalibrationConfig(epochs=1))
    assert refitting(i2cl, i2cl.injection(decoder, LETTERS, SHOWN))(decoder, LETTERS, SHOWN).scoring == "auto"


def test_without_a_limit_it_is_a_quarter_of_what_is_free(monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: 4 * 10**9)
    assert asked().fits(None)
    monkeypatch.setattr(module, "free_memory", lambda: 80_000)
    with pytest.warns(MemoryWarning, match="more than the 2e-05 GB that they may"):
        assert not asked().fits(None)


def test_the_limit_is_no_setting_of_the_artefact():
    configs = (AnchoredConfig(steps=1, memory=memory) for memory in (1.0, None))
    limited, free = (anchor(made("llama"), LETTERS, SHOWN, config) for config in configs)
    assert "memory" not in limited.settings
    assert limited.settings.keys() == free.settings.keys()


def test_more_examples_than_it_takes_are_refused():
    decoder = made("llama")
    one_line(r"18000 examples are more than the 16384 .*--shots", anchor, decoder, LETTERS, SHOWN * 3000)
    one_line("leave out scoring='full'", anchor, decoder, LETTERS, SHOWN * 160, scoring="full")


def test_processes_of_a_tensor_parallel_model_choose_the_same_solver(monkeypatch):
    fit = asked()
    other = 80_000  # bytes that another process has free
    consensus = SimpleNamespace(smallest=lambda value: min(value, other))
    monkeypatch.setattr(fit.questions.decoder, "consensus", consensus)
    with pytest.warns(MemoryWarning, match="going on by descent"):
        assert not fit.fits(None)


@pytest.mark.parametrize("scoring", ["first_token", "full"])
def test_derivatives_are_taken_in_batches_that_the_training_memory_holds(scoring, monkeypatch):
    fit = asked(scoring=scoring)
    decoder, rows = fit.questions.decoder, []
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda batch, **more: [rows.append(len(batch.rows)), forward(batch, **more)][1]
    )
    whole, _ = fit.point(torch.zeros(fit.scale.numel()))
    assert max(rows) > 2
    longest = max(map(len, fit.queries)) + fit.questions.labels.room
    monkeypatch.setattr(decoder, "training_memory", 2 * (longest * decoder.token_bytes + fit._row_bytes))
    rows.clear()
    parts, _ = fit.point(torch.zeros(fit.scale.numel()))
    assert max(rows) == 2
    torch.testing.assert_close(parts.jacobian, whole.jacobian, atol=1e-5, rtol=1e-4)


def test_full_sequences_hold_one_jacobian(monkeypatch):
    fit, empty, sizes = asked(scoring="full"), torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *size, **more: [sizes.append(size), empty(*size, **more)][1])
    fit.point(torch.zeros(fit.scale.numel()))
    assert [size for size in sizes if size[-1] == fit.scale.numel()] == [(6, 5, fit.scale.numel())]


def test_labels_that_no_scoring_can_tell_apart_are_refused_without_a_word_on_scoring(monkeypatch):
    same = Task("same", ("ab", "a b"), Template("{text}\n{label}"))
    tokens = lambda encoder, template, labels, line, end="": ((1,),) * len(labels)  # noqa: E731
    monkeypatch.setattr("i2cl.models.encoding._behind", tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScoringWarning)
        one_line("same tokens", anchor, made("llama"), same, SHOWN[:2], AnchoredConfig(solver="descent"))
