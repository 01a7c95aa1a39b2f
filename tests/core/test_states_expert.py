"""The expert on hidden states: which state it sees, its classifier, the pool, saving, and the evaluation."""

import json

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from commands import run_command, write_csv
from fitting import ASKED, HOOKS, TASKS, decoder_of, raises, random_injection
from i2cl import Example, Injection, Task, Template, make_methods
from i2cl.core.experts import StatesExpert
from i2cl.experiments.evidence.fit_evaluation import FitRequest, plan_evaluation
from i2cl.experiments.fitting import fit_task
from i2cl.injections.ensemble import (
    EXPERT_PRIORS,
    EnsembleConfig,
    WeightPrior,
    fit_ensemble,
    with_states_expert,
)
from i2cl.injections.pool import InjectionPool
from i2cl.interfaces.batch_prediction import digest
from i2cl.methods import make_injector
from i2cl.storage.card import describe_llm_alone
from i2cl.storage.layout import CARD, DESCRIPTION, TENSORS
from tiny import tiny_folder

TEXTS = list(ASKED)
LLM_PRIOR = WeightPrior(0.25, 0.5)
FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt"])
WORDS = ("refund", "delivery", "login")
PHRASES = ("money back please", "parcel is late", "cannot sign in")
ROWS = [(f"{number} {PHRASES[number % 3]}", WORDS[number % 3]) for number in range(30)]
TICKETS = Task(
    "tickets",
    WORDS,
    Template("Ticket: {text}\nTopic: {label}"),
    train=tuple(Example(text, WORDS.index(word)) for text, word in ROWS),
)


def rows_of(task):
    words = ("warm film night", "match was lost", "company made money")
    return [Example(f"{words[row % len(task.labels)]} {row}", row % len(task.labels)) for row in range(6)]


def fitted(task, family="llama", experts=("llm", "tfidf")):
    decoder, rows = decoder_of(family), rows_of(task)
    config = EnsembleConfig(experts=experts)
    injection = fit_ensemble(random_injection(decoder, task, 3), config, LLM_PRIOR, rows, "cpu")
    return with_states_expert(injection, decoder, LLM_PRIOR, rows)


def states_of(decoder, injection, text, layer):
    """Mean input of a block over all tokens but the first, by a plain hook."""
    (ids,) = injection.scorer(decoder).queries([text])
    seen = []

    def keep(_module, args, keywords):
        seen.append((args[0] if args else keywords["hidden_states"]).detach())

    handle = decoder.blocks[layer].register_forward_pre_hook(keep, with_kwargs=True)
    injection.log_probs(decoder, [text])
    handle.remove()
    (state,) = seen
    assert state.shape[1] == len(ids)
    return state[0, 1:].mean(0)


@FAMILIES
def test_states_are_means_over_the_edited_queries_without_their_first_token(family):
    decoder = decoder_of(family)
    injection = random_injection(decoder, TASKS[1], 3)
    for layer in (0, decoder.layers - 1):
        scores, states = injection.scores_and_states(decoder, TEXTS, layer)
        expected = torch.stack([states_of(decoder, injection, text, layer) for text in TEXTS])
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            scores.log_softmax(-1), injection.log_probs(decoder, TEXTS), atol=1e-5, rtol=1e-5
        )
    assert not any(getattr(module, hooks) for module in decoder.model.modules() for hooks in HOOKS)


def test_states_do_not_depend_on_the_scoring():
    decoder = decoder_of("llama")
    injection = random_injection(decoder, TASKS[1], 3)
    _, states = injection.scores_and_states(decoder, TEXTS, 1)
    _, with_sequences = injection.scores_and_states(decoder, TEXTS, 1, scoring="sequence")
    torch.testing.assert_close(with_sequences, states, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("labels", [2, 3])
def test_the_classifier_is_logistic_regression_on_standardized_states(labels):
    task, draw = TASKS[labels - 2], torch.Generator().manual_seed(0)
    rows = rows_of(task)
    states = 5 + 3 * torch.randn(len(rows), 16, generator=draw)
    states[:, 3] = 7.0  # constant
    expert = StatesExpert.fit(states, 1, task, rows)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=10_000))
    model.fit(states.double().numpy(), [row.label for row in rows])
    others = 5 + 3 * torch.randn(8, 16, generator=draw)
    expected = torch.from_numpy(model.predict_log_proba(others.double().numpy())).float()
    torch.testing.assert_close(expert.scores(others).log_softmax(-1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("experts", [("llm",), ("llm", "tfidf")])
def test_log_probs_are_the_weighted_product_of_the_experts(experts):
    decoder, injection = decoder_of("llama"), fitted(TASKS[1], experts=experts)
    head = injection.head
    assert head.members == ("llm", "states", *experts[1:])
    assert head.expert_weights[:2] == (0.25, EXPERT_PRIORS["states"].mean)
    states = torch.stack([states_of(decoder, injection, text, head.states.layer) for text in TEXTS])
    each = [injection.llm_alone().log_probs(decoder, TEXTS), head.states.scores(states).log_softmax(-1)]
    each += [expert.scores(TEXTS).log_softmax(-1) for expert in head.text_experts]
    weighted = zip(head.expert_weights, each, strict=True)
    expected = sum(weight * log_probs for weight, log_probs in weighted).log_softmax(-1)
    torch.testing.assert_close(injection.log_probs(decoder, TEXTS), expected, atol=1e-5, rtol=1e-5)


def test_it_is_saved_and_shares_batches_with_other_tasks(tmp_path):
    decoder, injection = decoder_of("llama"), fitted(TASKS[1])
    injection.save_pretrained(tmp_path / "new")
    stored = json.loads((tmp_path / "new" / DESCRIPTION).read_text(encoding="utf-8"))
    assert stored["ensemble"]["states_layer"] == injection.head.states.layer == decoder.layers - 1
    loaded = Injection.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(loaded.log_probs(decoder, TEXTS), injection.log_probs(decoder, TEXTS))
    assert digest(loaded) == digest(injection) != digest(injection.llm_alone())
    card = " ".join((tmp_path / "new" / CARD).read_text(encoding="utf-8").split())
    assert "weights llm 0.25, states" in card
    assert f"enters block {injection.head.states.layer} of the edited model" in card
    tasks = {"states": loaded, "plain": random_injection(decoder, TASKS[0], 3), "other": fitted(TASKS[0])}
    names = list(tasks) * 2
    for name, text, row in zip(
        names, TEXTS, InjectionPool(decoder, tasks).log_probs(TEXTS, names), strict=True
    ):
        torch.testing.assert_close(row, tasks[name].log_probs(decoder, [text])[0], atol=1e-5, rtol=1e-5)


def test_damaged_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    fitted(TASKS[1]).save_pretrained(tmp_path / "new")
    tensors = load_file(tmp_path / "new" / TENSORS)
    tensors["states_weights"] = tensors["states_weights"][:, :-1].contiguous()
    save_file(tensors, tmp_path / "new" / TENSORS)
    raises("weights of the hidden states are damaged", Injection.from_pretrained, tmp_path / "new")


@pytest.mark.parametrize("held_out", [True, False], ids=["held-out rows", "cross-validation"])
def test_its_weight_is_fitted_beside_the_others(held_out):
    decoder = decoder_of("llama")
    request = FitRequest(
        make_injector("anchored", {"steps": 2}), EnsembleConfig(experts=("llm", "states", "tfidf"))
    )
    shown = TICKETS.train[: 12 if held_out else 30]
    plan = plan_evaluation(TICKETS, shown)
    assert bool(plan.folds) != held_out
    injection = fit_task(decoder, TICKETS, shown, request, plan)
    assert injection.head.members == ("llm", "states", "tfidf")
    assert injection.head.expert_weights[1] != EXPERT_PRIORS["states"].mean
    methods = injection.evaluation["methods"]
    assert {"anchored", "states", "char_tfidf", "ensemble"} <= set(methods)
    times = {name: one["milliseconds_per_query"] for name, one in methods.items()}
    assert times["ensemble"] == pytest.approx(times["anchored"] + times["char_tfidf"])
    if held_out:
        texts, gold = zip(*((row.text, row.label) for row in plan.rows), strict=True)
        _, states = injection.scores_and_states(decoder, texts, injection.head.states.layer)
        right = (injection.head.states.scores(states).argmax(-1) == torch.tensor(gold)).float().mean()
        assert methods["states"]["accuracy"] == pytest.approx(float(right))
    assert "LLM alone, without states and tfidf" in describe_llm_alone(injection.description())


def test_the_method_ensemble_equals_the_fit():
    decoder, rows = decoder_of("llama"), TICKETS.train[:12]
    options = {"experts": "llm,states,tfidf", "steps": 2}
    (method,) = make_methods(["ensemble"], options)
    request = FitRequest(make_injector("anchored", {"steps": 2}), EnsembleConfig(experts=options["experts"]))
    stored = fit_task(decoder, TICKETS, rows, request, plan_evaluation(TICKETS, rows, limit=0))
    predictor = method.fit(decoder, TICKETS, rows, 0)
    alone = stored.with_head(expert_weights=predictor.weights)
    torch.testing.assert_close(
        predictor.log_probs(TEXTS), alone.log_probs(decoder, TEXTS), atol=1e-4, rtol=1e-4
    )
    (other,) = make_methods(["few_shot+ensemble"], {"experts": options["experts"]})
    raises("needs a method that edits the LLM", other.fit, decoder, TICKETS, rows, 0)


def test_a_label_without_an_example_leaves_it_out():
    decoder = decoder_of("llama")
    some = [row for row in TICKETS.train[:12] if row.label != 2]
    plain = random_injection(decoder, TICKETS, 3)
    assert with_states_expert(plain, decoder, LLM_PRIOR, some) is plain
    (method,) = make_methods(["ensemble"], {"experts": "llm,states", "steps": 1})
    raises("needs an example of every label", method.fit, decoder, TICKETS, some, 0)


def test_it_needs_the_llm_and_one_label_per_text(tmp_path, capsys):
    raises("add 'llm' to experts", EnsembleConfig(experts=("states", "tfidf")).members)
    rows = [(text, f"{word},x" if row % 2 else word) for row, (text, word) in enumerate(ROWS)]
    path = write_csv(tmp_path / "topics.csv", ("text", "label"), rows)
    options = ["--label-separator", ",", "--experts", "llm,states", "-o", tmp_path / "new"]
    code, _, error = run_command(capsys, "fit", tiny_folder(tmp_path / "model"), path, *options)
    assert code == 2
    assert "the expert 'states' needs one label per text" in " ".join(error.split())


def test_fit_and_update_on_the_command_line(tmp_path, capsys):
    path = write_csv(tmp_path / "tickets.csv", ("text", "label"), ROWS)
    arguments = ["--experts", "llm,states", "--shots", "4", "--set", "steps=2", "--keep-examples", "--json"]
    model, folder = tiny_folder(tmp_path / "model"), tmp_path / "task"
    code, output, error = run_command(capsys, "fit", model, path, "-o", folder, *arguments)
    assert code == 0, error
    assert set(json.loads(output)["ensemble"]["weights"]) == {"llm", "states"}
    more = write_csv(tmp_path / "more.csv", ("text", "label"), [("where is my parcel", "delivery")])
    code, _, error = run_command(capsys, "update", folder, more, "--model", model, "-o", tmp_path / "next")
    assert code == 0, error
    assert Injection.from_pretrained(tmp_path / "next").head.members == ("llm", "states")
