"""The logistic loss of multi-label tasks: solvers against independent minimizers, and what heads return."""

from dataclasses import replace

import pytest
import torch

from fitting import new_decoder
from i2cl import Example, I2CLError, Injection, Task, Template
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.gauss_newton import fit_gauss_newton
from i2cl.core.injection import LabelHead
from i2cl.core.multi_label import MultiLabelObjective
from i2cl.models.scoring import LabelScorer

from .derivatives import linearize

ROWS = (("a warm film", (0, 2)), ("dull, dull, dull", (1,)), ("funny and kind", (0,)), ("no", ()))
SHOWN = tuple(Example.multi_label(text, labels) for text, labels in ROWS)
TASK = Task(
    "films", ("good", "bad", "unsure"), Template("Review: {text}\nSentiment:{label}"), multi_label=True
)
TEXTS = ["a lifeless film", "the best of the year, by far"]


def problem(decoder, shown=SHOWN):
    return MultiLabelObjective(LabelScorer.for_fit(decoder, TASK), shown, "both")


def summed_loss(fit, u, tau):
    odds = fit.scores(u).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, fit.gold.double(), reduction="sum")
    return (loss + tau / 2 * u.double().square().sum()).item()


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_derivatives_match_finite_differences(model_type):
    fit = problem(new_decoder(model_type))
    fit.linearize_start()
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(fit.size.parameters, generator=generator)
    along[: fit.vector_size] /= fit.unit.flatten().clamp_min(1e-9)
    u, step = torch.zeros(fit.size.parameters), 1e-3 * along / along.norm()
    point, _ = linearize(fit, u)
    up, down = ((fit.signs * fit.scores(u + sign * step)).flatten() for sign in (1, -1))
    assert torch.allclose(point.jacobian @ step, (up - down) / 2, rtol=0.02, atol=1e-5)


def test_gauss_newton_ends_at_the_minimum():
    fit = problem(new_decoder("llama"))
    u, tau, history = fit_gauss_newton(fit, 3.0, 100, tolerance=1e-7, settled=0)
    end = summed_loss(fit, u, tau)
    assert end < 0.9 * summed_loss(fit, torch.zeros_like(u), tau)
    assert history[-1] == pytest.approx(summed_loss(fit, u, 0.0) / len(SHOWN), rel=1e-4)
    for seed in range(5):
        step = torch.randn(u.shape, generator=torch.Generator().manual_seed(seed))
        for size in (0.03, 0.3):
            assert summed_loss(fit, u + size * step / step.norm(), tau) > end * (1 - 1e-4)


@pytest.mark.parametrize("solver", ["gauss_newton", "adamw"])
def test_a_fit_gives_each_example_its_labels(solver):
    decoder = new_decoder("llama")
    injection = anchor(decoder, TASK, SHOWN, AnchoredConfig(solver=solver))
    assert injection.settings["solved_by"] == solver
    assert injection.history[-1] < 0.3 * injection.history[0]
    words = [tuple(TASK.labels[label] for label in labels) for _, labels in ROWS]
    assert injection.predict(decoder, [text for text, _ in ROWS]) == words


def test_a_plain_fit_predicts_label_frequencies_on_average():
    fit = problem(new_decoder("llama"))
    _, scores, _ = fit.linearize_start()
    assert scores.mean(0).sigmoid().tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_sample_weights_count_like_repeated_rows():
    decoder = new_decoder("llama")
    weighted = [*SHOWN[:3], Example.multi_label("no", (), 2.0)]
    config = AnchoredConfig(steps=1)
    one = anchor(decoder, TASK, weighted, config)
    two = anchor(decoder, TASK, [*SHOWN, SHOWN[3]], config)
    # the thresholds of the start come from unweighted frequencies
    assert torch.allclose(
        one.with_head(bias=two.label_bias).log_probs(decoder, TEXTS), two.log_probs(decoder, TEXTS), atol=0.3
    )


def test_artefact_keeps_probabilities_and_thresholds(tmp_path):
    decoder = new_decoder("llama")
    injection = anchor(decoder, TASK, SHOWN, AnchoredConfig(steps=1))
    injection = injection.with_head(temperature=1.7, thresholds=(0.2, 0.5, 0.9))
    injection.save_pretrained(tmp_path / "new")
    loaded = Injection.from_pretrained(tmp_path / "new")
    assert loaded.head.thresholds == (0.2, 0.5, 0.9)
    assert loaded.task.multi_label
    assert torch.equal(loaded.log_probs(decoder, TEXTS), injection.log_probs(decoder, TEXTS))
    card = (tmp_path / "new" / "README.md").read_text()
    assert "Labels, of which a text has any number: good, bad, unsure" in card


def test_head_adds_the_bias_and_divides_by_the_temperature():
    head = LabelHead("words", bias=(1.0, -1.0), temperature=2.0, thresholds=(0.5, 0.5))
    log_probs = head.log_probs(torch.tensor([[3.0, -5.0]]))
    assert head.probabilities(log_probs)[0].tolist() == pytest.approx(
        torch.tensor([2.0, -3.0]).sigmoid().tolist()
    )


def test_probabilities_do_not_depend_on_other_tokens():
    """Scores are log-odds against the reference, so the vocabulary's normalizer cancels."""
    labels = LabelScorer(new_decoder("llama"), TASK).labels
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    assert labels.tokens[-1] == labels.reference
    assert torch.allclose(labels.scores(logits), labels.scores(logits.log_softmax(-1)), atol=1e-5)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ((), "no demonstrations"),
        ((Example("a film", 0),), "demonstration 1 has no valid list of labels"),
        (SHOWN[1:], "no demonstrations have the label 'unsure'"),
        (
            tuple(Example.multi_label(text, (0, 1, 2)) for text in TEXTS),
            "all demonstrations have the label 'good'",
        ),
    ],
)
def test_demonstrations_without_information_are_refused(shown, why):
    with pytest.raises(I2CLError, match=why) as refused:
        anchor(new_decoder("llama"), TASK, shown)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scoring", ["first_token", "sequence"])
def test_other_scorings_are_refused(scoring):
    with pytest.raises(I2CLError, match="scoring"):
        anchor(new_decoder("llama"), TASK, SHOWN, scoring=scoring)


def test_class_weights_are_refused():
    with pytest.raises(I2CLError, match="class_weight needs exactly one label per text"):
        anchor(new_decoder("llama"), TASK, SHOWN, AnchoredConfig(class_weight="balanced"))


def test_a_label_may_be_the_first_reference_word():
    task = Task("films", ("good", "none"), TASK.template, multi_label=True)
    labels = LabelScorer(new_decoder("llama"), task).labels
    assert labels.reference not in labels.tokens[:-1]


def test_kept_examples_are_stored_but_not_pushed(tmp_path, monkeypatch):
    pushed = []

    def upload(folder, *_, **__):
        pushed.extend(path.name for path in folder.iterdir())
        return ""

    monkeypatch.setattr("i2cl.core.injection.upload", upload)
    injection = replace(anchor(new_decoder("llama"), TASK, SHOWN, AnchoredConfig(steps=0)), examples=SHOWN)
    injection.save_pretrained(tmp_path / "new")
    assert Injection.from_pretrained(tmp_path / "new").examples == SHOWN
    injection.push_to_hub("user/films")
    assert sorted(pushed) == ["README.md", "injection.json", "injection.safetensors"]
