"""The decision APIs: which task answers, probabilities, diagnostics and errors."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fitting import random_injection
from i2cl import Decoder, Task, Template
from i2cl.interfaces.server.service import Service
from i2cl.models.scoring import LabelScorer
from tiny import tiny_model, tiny_tokenizer

from .conftest import TEXTS, client_of, error_of

TEXT = TEXTS[0]
DECISIONS, SYSTEMONE = "/v1/decisions", "/v1/systemone"
TASKS = {
    "topics": ("world", "sports", "company"),
    "flags": ("no", "yes"),
    "stars": ("1", "2", "3"),
    "films": ("positive", "negative"),
    "spam": ("ham", "spam"),
    "long": ("a very bad film", "a very good film"),
}


@pytest.fixture(scope="module")
def injections():
    tasks = {
        name: Task(name, labels, Template(f"{name}: {{text}}\nLabel: {{label}}"))
        for name, labels in TASKS.items()
    }
    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")
    return {
        name: random_injection(decoder, task, seed, fields={"temperature": 2.0})
        for seed, (name, task) in enumerate(tasks.items())
    }


@contextmanager
def running(injections, folder):
    """Run a service of the tasks."""
    service = Service(Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama"), folder)
    for name, injection in injections.items():
        service.tasks.put(name, injection)
    yield service
    service.close()


@pytest.fixture(scope="module")
def service(injections, tmp_path_factory):
    """The service of all tests that neither change its tasks nor count its requests."""
    with running(injections, tmp_path_factory.mktemp("served") / "tasks") as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    return client_of(service)


@pytest.fixture
def own_service(injections, tmp_path):
    """A service for one test."""
    with running(injections, tmp_path / "tasks") as service:
        yield service


@pytest.fixture
def probabilities(service, injections):
    """Function that returns the probabilities of a task by label, as `i2cl predict` computes them."""

    def compute(name):
        values = injections[name].log_probs(service.decoder, [TEXT])[0].softmax(-1).tolist()
        return dict(zip(TASKS[name], values, strict=True))

    return compute


def choice(*values, **fields):
    return {
        "type": "choice",
        "instructions": "Which one?",
        "choices": [{"value": value} for value in values],
        **fields,
    }


def decide(client, *questions, model="tiny-llama", text=TEXT):
    return client.post(DECISIONS, json={"model": model, "input": text, "questions": questions})


def ask(client, model=None, state=TEXT, **questions):
    model_field = {} if model is None else {"model": model}
    return client.post(SYSTEMONE, json={"state": state, "questions": questions, **model_field})


def by_value(answer):
    return {item["value"]: item["probability"] for item in answer["probabilities"]}


@pytest.mark.parametrize("name", ["topics", "long"])
def test_choice_has_the_probabilities_of_the_task(client, probabilities, name):
    expected = probabilities(name)
    reply = decide(client, choice(*TASKS[name], name=name)).json()
    answer = reply["answers"][0]
    assert by_value(answer) == pytest.approx(expected, abs=1e-5)
    assert answer["choice"] == max(expected, key=expected.get)
    assert answer["confidence"] == pytest.approx(max(expected.values()), abs=1e-5)
    assert reply["diagnostics"][0]["answered_by"] == "task"
    systemone = ask(client, **{name: {"type": "choice", "criteria": dict.fromkeys(TASKS[name])}}).json()
    assert systemone["answers"][name]["probabilities"] == pytest.approx(expected, abs=1e-5)


def test_a_request_may_name_its_task_as_model(client, probabilities):
    answer = decide(client, choice(*TASKS["topics"], name="other"), model="topics").json()["answers"][0]
    assert by_value(answer) == pytest.approx(probabilities("topics"), abs=1e-5)


def test_question_name_takes_precedence_over_the_model(client):
    reply = decide(client, choice(*TASKS["topics"], name="topics"), model="films").json()
    assert reply["diagnostics"][0]["task"] == "topics"


def test_subset_of_labels_is_renormalized_in_any_order(client, probabilities):
    every = probabilities("topics")
    total = every["company"] + every["world"]
    expected = {name: every[name] / total for name in ("company", "world")}
    for values in (("company", "world"), ("world", "company")):
        answer = decide(client, choice(*values, name="topics")).json()["answers"][0]
        assert [item["value"] for item in answer["probabilities"]] == [*values]
        assert by_value(answer) == pytest.approx(expected, abs=1e-5)


def test_boolean_choice_uses_yes_and_no_labels(client, probabilities):
    answer = decide(client, choice(True, False, name="flags")).json()["answers"][0]
    yes = probabilities("flags")["yes"]
    assert by_value(answer) == pytest.approx({True: yes, False: 1 - yes}, abs=1e-5)
    assert answer["choice"] is (yes > 0.5)


def test_predicate_is_the_probability_of_yes(client, probabilities):
    question = {"type": "predicate", "name": "flags", "instructions": "Is it so?"}
    expected = pytest.approx(probabilities("flags")["yes"], abs=1e-5)
    assert decide(client, question).json()["answers"][0]["probability"] == expected
    assert ask(client, flags={"type": "noul"}).json()["answers"]["flags"]["noul"] == expected


@pytest.mark.parametrize(
    ("task", "question", "label"),
    [
        ("spam", {"instructions": "?"}, "spam"),  # the label has the name of the task
        ("films", {"instructions": "negative"}, "negative"),
        ("films", {"criteria": {"true": "positive"}}, "positive"),
        ("films", {"criteria": {"false": "positive"}}, "negative"),
    ],
)
def test_label_that_means_true_can_be_named(client, probabilities, task, question, label):
    reply = ask(client, task, q={"type": "noul", **question}).json()
    assert reply["answers"]["q"]["noul"] == pytest.approx(probabilities(task)[label], abs=1e-5)


def test_score_is_the_expected_level(client, probabilities):
    one, two, three = probabilities("stars").values()
    levels = [{"label": label} for label in ("bad", "fair", "good")]  # by the numbers in ascending order
    question = {"type": "score", "name": "stars", "instructions": "How good?", "levels": levels}
    reply = decide(client, question).json()
    answer = reply["answers"][0]
    assert answer["score"] == pytest.approx(two + 2 * three, abs=1e-5)
    assert [item["probability"] for item in answer["probabilities"]] == pytest.approx(
        [one, two, three], abs=1e-5
    )
    expected_value = pytest.approx(one + 2 * two + 3 * three, abs=1e-5)
    assert reply["diagnostics"][0]["expected_value"] == expected_value
    systemone = ask(client, stars={"type": "score", "criteria": ["3", "1"]}).json()["answers"]["stars"]
    assert systemone["legend"] == {"0": "3", "1": "1"}
    assert systemone["score"] == pytest.approx(one / (one + three), abs=1e-5)


def test_many_questions_run_in_one_batch(own_service):
    client = client_of(own_service)
    names = ["topics", "flags", "stars", "films"]
    assert decide(client, *(choice(*TASKS[name], name=name) for name in names)).status_code == 200
    metrics = client.get("/metrics").text
    assert 'i2cl_batch_tasks_bucket{le="2.0"} 0.0' in metrics
    assert "i2cl_batch_rows_sum 4.0" in metrics


def test_questions_for_the_same_task_share_a_row(own_service):
    client = client_of(own_service)
    decide(client, choice("world", "sports"), choice("world", "company"), model="topics")
    assert "i2cl_batch_rows_sum 1.0" in client.get("/metrics").text


def test_unknown_options_are_answered_zero_shot_by_the_base_model(client, service):
    reply = decide(client, choice("warm", "cold")).json()
    assert reply["diagnostics"][0]["answered_by"] == "zero_shot"
    assert reply["diagnostics"][0]["task"] is None
    task = Task("zero-shot", ("warm", "cold"), Template("{text}\nAnswer: {label}"))
    scores = LabelScorer(service.decoder, task).scores([f"{TEXT}\n\nWhich one?"])[0]
    expected = dict(zip(task.labels, scores.softmax(-1).tolist(), strict=True))
    assert by_value(reply["answers"][0]) == pytest.approx(expected, abs=1e-5)
    assert reply["diagnostics"][0]["label_mass"] == pytest.approx(float(scores.exp().sum()), rel=1e-4)


def test_order_of_options_does_not_change_zero_shot_answers(client):
    options = ["warm", "cold", "long"]
    described = [{"value": value, "description": f"it is {value}"} for value in options]
    first, second = (
        by_value(decide(client, choice(choices=choices)).json()["answers"][0])
        for choices in (described, described[::-1])
    )
    assert first == pytest.approx(second, abs=1e-6)


def test_learned_only_refuses_zero_shot_answers(opened_learned_only):
    reply = decide(opened_learned_only, choice("warm", "cold", name="new"))
    assert error_of(reply) == (400, "no_task")
    assert decide(opened_learned_only, choice("yes", "no", name="flags")).status_code == 200


@pytest.fixture
def opened_learned_only(open_service, make_client, injections):
    service = open_service(learned_only=True)
    service.tasks.put("flags", injections["flags"])
    return make_client(service)


def test_label_mass_is_that_of_the_library(client, service, injections):
    reply = decide(client, choice(*TASKS["flags"], name="flags")).json()
    expected = injections["flags"].label_log_mass(service.decoder, [TEXT]).exp()
    torch.testing.assert_close(
        torch.tensor([reply["diagnostics"][0]["label_mass"]]), expected, rtol=1e-4, atol=1e-7
    )


def test_label_mass_is_null_for_word_level_scoring(own_service):
    task = Task("words", ("good film", "bad film"), Template("{text}\nLabel: {label}"))
    injection = random_injection(own_service.decoder, task, 1, fields={"scoring": "words"})
    own_service.tasks.put("words", injection)
    reply = decide(client_of(own_service), choice(*task.labels, name="words"))
    assert reply.json()["diagnostics"][0]["label_mass"] is None


def test_state_and_message_parts_are_rendered_as_text(client):
    question = choice(*TASKS["topics"], name="topics")
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {"b": 1}}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    expected = decide(client, question, text='a\n{"b": 1}\n\nc').json()["answers"]
    assert decide(client, question, text=messages).json()["answers"] == expected
    topics = {"type": "choice", "criteria": dict.fromkeys(TASKS["topics"])}
    answers = [ask(client, state=state, topics=topics).json()["answers"] for state in ({"b": 1}, '{"b": 1}')]
    assert answers[0] == answers[1]


PREDICATE = {"type": "predicate", "name": "flags", "instructions": "?"}
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}]
INVALID_DECISIONS = [
    ({"model": "none", "questions": [choice("a", "b")]}, 404, "there is no task 'none'"),
    ({"questions": [choice("world", "art", name="topics")]}, 400, "task 'topics' has no label 'art'"),
    ({"questions": [choice("world")]}, 400, "at least 2 items"),
    ({"questions": [choice("world", "world")]}, 400, "an option is given twice"),
    ({"questions": [choice(True, "yes", name="flags")]}, 400, "two options are the same label"),
    ({"questions": []}, 400, "questions"),
    ({"questions": [PREDICATE] * 401}, 400, "400"),
    ({"questions": [PREDICATE | {"name": "topics"}]}, 400, "a predicate needs two"),
    ({"questions": [PREDICATE | {"name": "films"}]}, 400, "unclear which label of task 'films' means true"),
    ({"questions": [{"type": "menu"}]}, 400, "questions.0"),
    ({"questions": [PREDICATE | {"more": 1}]}, 400, "more' is not supported"),
    ({"stream": True}, 400, "'stream' is not supported"),
    ({"files": []}, 400, "'files' is not supported"),
    ({"input": IMAGE}, 400, "images are not supported: send text"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input of type 'function_call' is not supp"),
    ({"input": [{"role": "assistant", "content": "a"}]}, 400, "role 'assistant' are not supported"),
    ({"input": "  "}, 400, "the text is empty"),
    ({"input": "long " * 3000}, 413, "shorten it"),
    ({"questions": [choice("  ", "a", name="new")]}, 400, "label word"),
]


@pytest.mark.parametrize(
    ("change", "status", "message"), INVALID_DECISIONS, ids=range(len(INVALID_DECISIONS))
)
def test_invalid_decisions_have_the_error_shape_of_openai(client, change, status, message):
    body = {"model": "tiny-llama", "input": TEXT, "questions": [PREDICATE]} | change
    reply = client.post(DECISIONS, json=body)
    error = reply.json()["error"]
    assert reply.status_code == status, reply.text
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error.keys() == {"message", "type", "param", "code", "hint"}
    assert error["type"] == "invalid_request_error"


INVALID_SYSTEMONE = [
    ({"model": "none", "questions": {"q": {"type": "noul"}}}, 404, "NotFoundError"),
    ({"questions": {"q": {"type": "menu"}}}, 400, "BadRequestError"),
    ({"questions": {"q": {"type": "noul", "more": 1}}}, 400, "BadRequestError"),
    ({"questions": {"q": {"type": "choice"}}}, 400, "BadRequestError"),
    ({"questions": {"q": {"type": "score", "criteria": ["a"]}}}, 400, "BadRequestError"),
    ({"questions": {"topics": {"type": "choice", "criteria": {"art": None}}}}, 400, "BadRequestError"),
    ({"questions": {"": {"type": "noul"}}}, 400, "BadRequestError"),
    ({"questions": {}}, 400, "BadRequestError"),
    ({"images": ["https://example.org/a.png"]}, 400, "BadRequestError"),
    ({"chat_template_kwargs": {"a": 1}}, 400, "BadRequestError"),
    ({"stream": True}, 400, "BadRequestError"),
]


@pytest.mark.parametrize(("change", "status", "kind"), INVALID_SYSTEMONE, ids=range(len(INVALID_SYSTEMONE)))
def test_invalid_systemone_requests_have_the_error_shape_of_vllm(client, change, status, kind):
    reply = client.post(SYSTEMONE, json={"state": TEXT, "questions": {"flags": {"type": "noul"}}} | change)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, status, kind), reply.text
    assert error.keys() == {"message", "type", "param", "code"}
