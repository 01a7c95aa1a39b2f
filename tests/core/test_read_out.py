"""The read-out against its objective minimised otherwise, and where it goes with an injection."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, one_hot

from i2cl import Example, I2CLError, Injection, InjectionPool, Task, Template, extract, transfer
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.artefact import READ_OUT_VERSION, TENSORS
from i2cl.core.read_out import FLOOR, head_states, read_out
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions
from tiny import tiny_model, tiny_tokenizer

LABELS = ("good", "bad", "unsure")
SHOWN = tuple(
    Example(text, label)
    for text, label in [
        ("a warm film", 0),
        ("dull, dull", 1),
        ("kind all the way", 0),
        ("no", 2),
        ("so so", 2),
    ]
)
TASK = Task("films", LABELS, Template("Review: {text}\n{label}"))
TEXTS = ["a fine thing", "dull", "no idea at all what this was"]


def drawn(n=12, d=7, labels=3):
    generator = torch.Generator().manual_seed(1)
    gold = torch.arange(n) % labels
    states = torch.randn(n, d, generator=generator) * 3 + 5
    states[:, 0] += gold
    return states, torch.randn(n, labels, generator=generator), gold


def certain(gold):
    return one_hot(gold, 3).double()


def made():
    return Decoder(tiny_model("llama"), tiny_tokenizer(), name="llama")


def fitted(decoder, **config):
    return anchor(decoder, TASK, SHOWN, extract(decoder, TASK, SHOWN), AnchoredConfig(reach=3.0, **config))


def reading(decoder, **config):
    """Anchored, and a read-out of the demonstrations on top."""
    plain = fitted(decoder, **config)
    queries = Questions(decoder, TASK).queries([one.text for one in SHOWN])
    scores = torch.randn(len(SHOWN), 3, generator=torch.Generator().manual_seed(2))
    gold = torch.tensor([one.label for one in SHOWN])
    rows = read_out(head_states(decoder, queries, edit=plain.edit()), scores, certain(gold), 3.0).rows
    told = plain.settings | {"method": "distilled", "read_out_reach": 3.0}
    return replace(plain, read_out=rows, settings=told)


def added(rows, states):
    return states.double() @ rows[:, :-1].double().T + rows[:, -1].double()


def objective(weights, states, scores, target, tau):
    fit = scores.double() + states @ weights.T
    return cross_entropy(fit, target, reduction="sum") + tau / 2 * weights.square().sum()


@pytest.mark.parametrize("share", [1.0, 0.7], ids=["labels", "a teacher's probabilities"])
def test_it_is_the_optimum_of_logistic_regression_on_standardised_states(share):
    states, scores, gold = drawn()
    target = share * certain(gold) + (1 - share) / 3
    found = read_out(states, scores, target, 2.0)
    wide = states.double()
    standard = (wide - wide.mean(0)) / (wide.std(0, correction=0) + FLOOR)
    # the spread that the prior gives a query's scores is the reach
    tau = standard.square().sum(1).mean().item() * (1 - 1 / 3) / 2.0**2
    weights = torch.zeros(3, 7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = objective(weights, standard, scores, target, tau)
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = standard @ weights.detach().T
    assert torch.allclose(added(found.rows, states), expected, atol=1e-4)
    assert expected.abs().max() > 0.1


def test_left_out_scores_are_near_those_of_refits():
    states, scores, gold = drawn(40)
    found = read_out(states, scores, certain(gold), 3.0)
    near = far = 0.0
    for out in range(40):
        rest = [row for row in range(40) if row != out]
        again = read_out(states[rest], scores[rest], certain(gold)[rest], 3.0)
        one = (scores[out] + added(again.rows, states[[out]])[0]).softmax(0)
        kept = (scores[out] + added(found.rows, states[[out]])[0]).softmax(0)
        near += (found.left_out[out].double().softmax(0) - one).abs().max().item()
        far += (kept - one).abs().max().item()
    assert near < 0.3 * far


def test_labels_that_states_do_not_tell_get_none_and_those_that_they_do_get_some():
    states, scores, gold = drawn(60)
    picker = torch.Generator().manual_seed(0)
    assert read_out(torch.randn(60, 7, generator=picker), torch.eye(3)[gold] * 3, certain(gold)).rows is None
    states[:, 1] = 4.0 * gold
    found = read_out(states, torch.zeros_like(scores), certain(gold))
    assert found.reach > 0
    assert (added(found.rows, states).argmax(1) == gold).float().mean() > 0.9


@pytest.mark.parametrize("reach", [None, 1.0, 1e-300])
def test_states_that_are_all_the_same_or_a_reach_of_nothing_add_nothing(reach):
    states, scores, gold = drawn()
    assert read_out(states[:1].expand(12, 7), scores, certain(gold), reach).rows is None
    assert read_out(states, scores, certain(gold), 1e-300).rows is None


def test_scores_are_those_of_the_injection_and_weights_of_the_heads_input():
    decoder = made()
    injection = reading(decoder)
    questions = Questions(decoder, TASK)
    below = questions.scores(TEXTS, edit=injection.edit())
    states = head_states(decoder, questions.queries(TEXTS), edit=injection.edit())
    norm, head = decoder.model.model.norm, decoder.model.lm_head
    seen = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1]))
    with torch.no_grad():
        questions.scores(TEXTS[:1], edit=injection.edit())
    handle.remove()
    assert norm.weight.shape == states[0].shape
    assert torch.allclose(seen[0], states[0], atol=1e-6)
    expected = below + added(injection.read_out, states).float()
    assert torch.allclose(injection.scores(decoder, TEXTS), expected, atol=1e-5)
    assert (expected - below).abs().max() > 1e-3


def test_saved_pooled_and_refused_elsewhere(tmp_path):
    decoder = made()
    injection, other = reading(decoder), fitted(decoder)
    scores = injection.scores(decoder, TEXTS)
    injection.save_pretrained(tmp_path / "one")
    again = Injection.from_pretrained(tmp_path / "one")
    assert again.description()["format_version"] == READ_OUT_VERSION
    assert torch.equal(again.scores(decoder, TEXTS), scores)
    assert "with a read-out" in (tmp_path / "one" / "README.md").read_text()
    other.save_pretrained(tmp_path / "two")
    assert "with a read-out" not in (tmp_path / "two" / "README.md").read_text()
    pool = InjectionPool(decoder, {"read": again, "plain": other})
    mixed = pool.scores([*TEXTS, *TEXTS], ["read"] * 3 + ["plain"] * 3)
    assert torch.allclose(torch.stack(mixed[:3]), scores, atol=1e-5)
    assert torch.allclose(torch.stack(mixed[3:]), other.scores(decoder, TEXTS), atol=1e-5)
    (tensors := load_file(tmp_path / "one" / TENSORS))["read_out"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "one" / TENSORS)
    with pytest.raises(I2CLError, match="no finite numbers as read_out"):
        Injection.from_pretrained(tmp_path / "one")
    with pytest.raises(I2CLError, match="has a read-out, which does not carry over"):
        transfer(decoder, TASK, SHOWN, [reading(decoder, free="scalars")])
    with pytest.raises(I2CLError, match="first tokens"):
        injection.scores(decoder, TEXTS, scoring="full")
    with pytest.raises(I2CLError, match=r"read_out has the shape \(3, 5\)"):
        replace(injection, read_out=torch.zeros(3, 5))
