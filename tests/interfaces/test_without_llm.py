"""Tasks that are fitted without the LLM: nothing runs the model for them, and predictions do not load it."""

import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.preprocessing import MultiLabelBinarizer

from commands import run, write_csv
from fitting import raises, random_injection
from i2cl import (
    Decoder,
    Example,
    I2CLClassifier,
    Injection,
    InjectionPool,
    Task,
    Template,
    encoders,
    with_temperature,
)
from i2cl.core.experts import TfidfExpert
from i2cl.core.injection import LABEL_PRIOR
from i2cl.errors import I2CLError
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble, plain_injection
from i2cl.interfaces.cli import console
from tiny import tiny_folder

WORDS = ("refund", "delivery", "login")
PHRASES = ("money back please", "parcel is late", "cannot sign in")
ROWS = [(f"{number} {PHRASES[number % 3]}", WORDS[number % 3]) for number in range(60)]
TEXTS = ("I want my money back", "where is the parcel", "sign in fails")
TASK = Task(
    "tickets",
    WORDS,
    Template("Ticket: {text}\nTopic: {label}"),
    train=tuple(Example(text, WORDS.index(word)) for text, word in ROWS),
)


def fit_text_experts(decoder, task=TASK, experts=("tfidf",)):
    plain, config = plain_injection(decoder, task, task.train), EnsembleConfig(experts=experts)
    return fit_ensemble(plain, config, WeightPrior(0.4, 0.2), task.train, "cpu")


def refuse_to_load(*_, **__):
    raise AssertionError("the model is loaded")


@pytest.fixture
def no_forward(monkeypatch):
    """Fail if a model runs."""

    def forward(*_, **__):
        raise AssertionError("the model runs")

    monkeypatch.setattr(Decoder, "forward", forward)


@pytest.fixture
def no_model(monkeypatch, no_forward):
    """Fail if a model is loaded or runs."""
    monkeypatch.setattr(Decoder, "from_pretrained", refuse_to_load)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, labelled rows, texts, and a task that was fitted without the LLM."""
    folder = tmp_path_factory.mktemp("home")
    tiny_folder(folder / "model")
    write_csv(folder / "rows.csv", ["text", "label"], ROWS)
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    words = ["--experts", "tfidf", "--keep-examples", "--class-weight", "refund=2,delivery=1,login=1"]
    assert run("fit", folder / "model", folder / "rows.csv", "-o", folder / "task", *words) == 0
    return folder


def test_fit_does_not_run_the_model(call, home, tmp_path, no_forward):
    code, out, err = call(
        *["fit", home / "model", home / "rows.csv", "--experts", "tfidf", "-o", tmp_path / "task"]
    )
    assert code == 0, err
    assert "by tfidf without the LLM, 48 demonstrations" in out
    assert "significantly better than majority_class" in out
    assert re.search(r"Calibration: weights tfidf \d\.\d\d \(fitted on these rows\)", out)
    assert "expected time" not in out + err
    injection = Injection.from_pretrained(tmp_path / "task")
    assert injection.head.members == ("tfidf",)
    assert injection.head.expert_weights[0] == 0
    assert not injection.context.any()
    assert list(injection.evaluation["methods"]) == ["majority_class", "char_tfidf"]
    assert injection.evaluation["llm_gain"] == {}
    assert injection.metrics["accuracy"] == 1
    assert "--method" not in injection.command


def test_two_text_experts_are_pooled_and_evaluated(call, home, tmp_path, words_encoder, no_forward):
    words = ["--experts", "tfidf,embeddings", "--set", "encoder=words", "--json"]
    code, out, err = call("fit", home / "model", home / "rows.csv", "-o", tmp_path / "task", *words)
    assert code == 0, err
    record = json.loads(out)
    methods = ["majority_class", "char_tfidf", "sentence_embeddings", "ensemble"]
    assert list(record["evaluation"]["methods"]) == methods
    assert record["method"] is None
    llm, *others = record["ensemble"]["weights"].values()
    assert llm == 0
    assert all(weight > 0 for weight in others)


@pytest.mark.parametrize(("words", "texts"), [((), 48), (("--keep-back", "0"), 120)])
def test_texts_that_a_baseline_embeds_are_counted(
    call, home, tmp_path, words_encoder, monkeypatch, words, texts
):
    shown, describe = [], console.Bar.describe
    monkeypatch.setattr(console.Bar, "describe", lambda bar, what: shown.append(what) or describe(bar, what))
    monkeypatch.setattr(encoders, "local_encoder", lambda: "words")
    arguments = [home / "model", home / "rows.csv", "--experts", "tfidf", "-o", tmp_path / "task"]
    code, _, err = call("fit", *arguments, *words)
    assert code == 0, err
    assert f"evaluating sentence_embeddings, {texts} texts embedded" in shown


def test_cross_validation_does_not_run_the_model(call, tmp_path, home, no_forward):
    few = write_csv(tmp_path / "few.csv", ["text", "label"], ROWS[:15])
    code, out, err = call("fit", home / "model", few, "--experts", "tfidf", "-o", tmp_path / "task")
    assert code == 0, err
    assert "15 labelled rows by cross-validation" in out


def test_held_out_evaluation_does_not_fit_a_text_expert_again(call, home, tmp_path, monkeypatch):
    fits, fit = [], TfidfExpert.fit
    monkeypatch.setattr(TfidfExpert, "fit", lambda *given: fits.append(given) or fit(*given))
    words = ["--experts", "tfidf", "--json", "-o", tmp_path / "task"]
    code, out, err = call("fit", home / "model", home / "rows.csv", *words)
    assert code == 0, err
    assert len(fits) == 1
    assert json.loads(out)["evaluation"]["methods"]["char_tfidf"]["fit_seconds"] > 0


def test_predict_does_not_load_the_model(call, home, no_model):
    code, out, err = call("predict", home / "task", home / "texts.txt", "--device", "cpu")
    assert code == 0, err
    assert [line.split("\t")[0] for line in out.splitlines()[1:]] == list(WORDS)


@pytest.mark.parametrize("experts", ["tfidf", "embeddings", "embeddings,tfidf"])
def test_review_does_not_load_the_model(call, home, tmp_path, words_encoder, monkeypatch, experts):
    noisy = write_csv(tmp_path / "rows.csv", ["text", "label"], [*ROWS[:-1], (ROWS[-1][0], WORDS[0])])
    words = ["--experts", experts, "--set", "encoder=words", "--evaluate", "0", "-o", tmp_path / "task"]
    assert call("fit", home / "model", noisy, *words)[0] == 0
    monkeypatch.setattr(Decoder, "from_pretrained", refuse_to_load)
    advanced = []
    monkeypatch.setattr(console.Bar, "advance", lambda _, amount=1: advanced.append(amount))
    code, out, err = call("review", tmp_path / "task", noisy, "--json")
    assert code == 0, err
    issues = json.loads(out)["issues"]
    assert [(one["where"], one["label"], one["suggested"]) for one in issues] == [("row 61", *WORDS[::2])]
    assert sum(advanced) == ("embeddings" in experts) * len(ROWS), "each text is embedded once"


def test_suggest_does_not_load_the_model(call, home, tmp_path, words_encoder, no_forward, monkeypatch):
    words = ["--experts", "embeddings", "--set", "encoder=words", "--evaluate", "0", "-o", tmp_path / "task"]
    assert call("fit", home / "model", home / "rows.csv", *words)[0] == 0
    monkeypatch.setattr(Decoder, "from_pretrained", refuse_to_load)
    new = ["suggest", tmp_path / "task", home / "texts.txt", "-n", "3", "-o", tmp_path / "new.csv", "--json"]
    code, out, err = call(*new, "--labelled", home / "rows.csv")
    assert code == 0, err
    suggestions = json.loads(out)["suggestions"]
    assert {one["text"]: one["label"] for one in suggestions} == dict(zip(TEXTS, WORDS, strict=True))


def test_suggest_compares_texts_by_the_model_without_an_encoder(call, home, tmp_path, no_model):
    words = ["suggest", home / "task", home / "texts.txt", "-n", "1", "-o", tmp_path / "new.csv"]
    with pytest.raises(AssertionError, match="the model is loaded"):
        call(*words)


def test_predict_reports_a_device_that_does_not_exist(call, home, no_model):
    code, _, err = call("predict", home / "task", home / "texts.txt", "--device", "nonsense")
    assert (code, "cannot use device 'nonsense'" in err) == (2, True)


def test_python_needs_no_decoder(home):
    injection = Injection.from_pretrained(home / "task")
    assert injection.predict(None, TEXTS) == list(WORDS)
    decoder = Decoder.from_pretrained(str(home / "model"), device="cpu")
    assert torch.equal(injection.log_probs(decoder, TEXTS), injection.log_probs(None, TEXTS))
    with_llm = random_injection(decoder, TASK, 0)
    raises("uses the LLM, but decoder is None", with_llm.log_probs, None, TEXTS)
    raises("has no LLM part", injection.label_log_mass, decoder, TEXTS)


def test_same_answer_as_a_pool_with_the_llm_at_weight_zero(decoder):
    injection = fit_text_experts(decoder)
    scores = injection.scorer(decoder).scores(TEXTS)
    text_scores = injection.head.text_scores(TEXTS, decoder.device)
    pooled = injection.head.log_probs(scores, text_scores)
    torch.testing.assert_close(injection.log_probs(None, TEXTS), pooled)


def test_temperature_scales_the_weights_of_the_text_experts(decoder):
    injection = fit_text_experts(decoder)
    flat = with_temperature(injection, 2.0)
    assert flat.head.uses_llm is False
    halved = (injection.log_probs(None, TEXTS) / 2).log_softmax(-1)
    torch.testing.assert_close(flat.log_probs(None, TEXTS), halved)


def test_update_refits_the_text_experts(call, home, tmp_path, no_forward):
    more = write_csv(tmp_path / "more.csv", ["text", "label"], [("61 sign in broken", "login")])
    code, _, err = call("update", home / "task", more, "-o", tmp_path / "new", "--evaluate", "0")
    assert code == 0, err
    injection = Injection.from_pretrained(tmp_path / "new")
    assert injection.head.members == ("tfidf",)
    assert injection.demonstrations == 49
    assert injection.settings["class_weight"] == {"refund": 2, "delivery": 1, "login": 1}
    assert injection.command == "i2cl update task more.csv --output new --evaluate 0"


def test_update_renames_and_removes_class_weights(call, home, tmp_path, no_forward):
    changes = ["--rename", "refund=money", "--remove", "login"]
    code, _, err = call("update", home / "task", *changes, "-o", tmp_path / "new", "--evaluate", "0")
    assert code == 0, err
    injection = Injection.from_pretrained(tmp_path / "new")
    assert injection.task.labels == ("delivery", "money")
    assert injection.settings["class_weight"] == {"money": 2, "delivery": 1}


def test_update_reports_that_a_label_prior_is_left_out(call, home, tmp_path, no_forward):
    stored = Injection.from_pretrained(home / "task")
    settings = stored.settings | {LABEL_PRIOR: {"texts": 40, "prior": None}}
    stored.with_report(settings=settings).save_pretrained(tmp_path / "task")
    code, _, err = call("update", tmp_path / "task", "--remove", "login", "--evaluate", "0")
    assert (code, "the label prior is left out, because its unlabelled texts are not stored" in err) == (
        0,
        True,
    )


def test_update_reports_that_a_confidence_threshold_is_left_out(call, home, tmp_path, no_forward):
    stored = Injection.from_pretrained(home / "task")
    selection = {"target": 0.9, "threshold": 0.7, "coverage": 0.5, "accuracy": 1.0, "rows": 40}
    evaluation = stored.evaluation | {"selection": selection}
    stored.with_report(evaluation=evaluation).save_pretrained(tmp_path / "task")
    code, _, err = call("update", tmp_path / "task", "--remove", "login", "--evaluate", "0")
    assert code == 0
    assert "the confidence threshold is left out, because an update holds out no rows" in err
    assert "--target-accuracy 0.9" in err


def test_update_keeps_the_options_of_the_text_experts(call, home, tmp_path, words_encoder, no_forward):
    options = ["--experts", "embeddings", "--set", "encoder=words", "--set", "embeddings_c=0.5"]
    quick = ["--evaluate", "0", "-o"]
    arguments = [home / "model", home / "rows.csv", *options, "--keep-examples"]
    assert call("fit", *arguments, *quick, tmp_path / "first")[0] == 0
    assert call("update", tmp_path / "first", "--rename", "refund=money", *quick, tmp_path / "new")[0] == 0
    first, new = (Injection.from_pretrained(tmp_path / name) for name in ("first", "new"))
    assert new.settings["embeddings_c"] == 0.5
    torch.testing.assert_close(new.head.embeddings.weights, first.head.embeddings.weights)


def test_update_uses_an_encoder_that_was_moved(call, refused, home, tmp_path, words_encoder, monkeypatch):
    options = ["--experts", "embeddings", "--set", "encoder=words", "--keep-examples"]
    quick = ["--evaluate", "0", "-o", tmp_path / "task"]
    assert call("fit", home / "model", home / "rows.csv", *options, *quick)[0] == 0

    def find(name):
        if name == "words":
            raise I2CLError("encoder folder 'words' does not exist: give a folder")
        return name

    monkeypatch.setattr(encoders, "encoder_source", find)
    changes = ["update", tmp_path / "task", "--remove", "login", *quick]
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "from_pretrained", refuse_to_load)
        assert "encoder folder 'words' does not exist" in refused(*changes)
    code, _, err = call(*changes, "--encoder", tmp_path / "elsewhere")
    assert code == 0, err
    injection = Injection.from_pretrained(tmp_path / "task")
    assert injection.ensemble["encoder"] == str(tmp_path / "elsewhere")
    assert "--encoder elsewhere" in injection.command


def test_terminal_shows_the_progress_of_the_sentence_encoder(
    call, home, tmp_path, words_encoder, monkeypatch
):
    seen, advanced = io.StringIO(), []
    monkeypatch.setattr(console, "err", Console(file=seen, force_terminal=True, width=200))
    monkeypatch.setattr(console.Bar, "advance", lambda _, amount=1: advanced.append(amount))
    monkeypatch.setattr(encoders, "PROGRESS_TEXTS", 25)
    words = ["--experts", "embeddings", "--set", "encoder=words", "--evaluate", "0", "-o", tmp_path / "task"]
    code, _, err = call("fit", home / "model", home / "rows.csv", *words)
    assert code == 0, err
    assert "embedding texts" in seen.getvalue()
    assert advanced == [25, 25, 10]


@pytest.mark.parametrize("form", ["classifier", "causal-lm", "peft"])
def test_exports_are_refused_before_the_model_loads(refused, home, tmp_path, no_model, form):
    line = refused("export", home / "task", tmp_path / "export", "--to", form)
    assert "has no LLM part (--experts tfidf): fit it again with --experts llm" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "i2cl"], "method i2cl is for the LLM, which is not among the experts"),
        (["--memory", "1"], "memory is for the LLM, which is not among the experts"),
        (["--set", "steps=3"], "steps is for the LLM, which is not among the experts"),
        (["--unlabelled", "texts.txt"], "a label prior (--unlabelled) is for the LLM"),
        (["--compare", "char_tfidf"], "the table already has a row 'char_tfidf'"),
    ],
)
def test_options_of_the_llm_are_refused(refused, home, no_model, monkeypatch, words, message):
    monkeypatch.chdir(home)
    line = refused("fit", home / "model", home / "rows.csv", "--experts", "tfidf", "-o", home / "x", *words)
    assert message in line


def test_label_without_an_example_is_refused(decoder):
    plain = plain_injection(decoder, TASK, TASK.train)
    shown = [row for row in TASK.train if row.label]
    arguments = plain, EnsembleConfig(experts=("tfidf",)), WeightPrior(0.4, 0.2), shown, "cpu"
    raises("no example is labelled 'refund'", fit_ensemble, *arguments)


def test_pool_runs_only_the_queries_of_other_tasks(decoder, monkeypatch):
    without, with_llm = fit_text_experts(decoder), random_injection(decoder, TASK, 0)
    pool = InjectionPool(decoder, {"without": without, "with": with_llm})
    ids = [name for _ in TEXTS for name in ("without", "with")]
    queries = pool._queries([text for text in TEXTS for _ in range(2)], ids)
    rows, forward = [], Decoder.forward

    def count(self, batch, **options):
        rows.extend(batch.rows)
        return forward(self, batch, **options)

    monkeypatch.setattr(Decoder, "forward", count)
    scores = pool.score_rows(queries)
    assert len(rows) == len(TEXTS)
    assert [score.label_mass is None for score in scores] == [True, False] * len(TEXTS)
    torch.testing.assert_close(
        torch.stack([score.log_probs for score in scores[::2]]), without.log_probs(None, TEXTS)
    )


def test_pool_takes_texts_beyond_the_context_and_tasks_of_another_model(decoder, home, no_forward):
    assert decoder.max_length is not None
    pool = InjectionPool(decoder, {"task": Injection.from_pretrained(home / "task")})
    long = "parcel is late " * decoder.max_length
    (query,) = pool.task("task").queries([long], cut=False)
    assert query.tokens > decoder.max_length
    assert pool.predict([long], ["task"]) == ["delivery"]


def test_server_fits_and_serves_without_the_model(tmp_path, home, monkeypatch, no_forward):
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from starlette.testclient import TestClient

    from i2cl.interfaces.server.app import make_app
    from i2cl.interfaces.server.guard import Access
    from i2cl.interfaces.server.service import Service
    from processes import until

    service = Service(Decoder.from_pretrained(str(home / "model"), device="cpu"), tmp_path / "tasks")
    Injection.from_pretrained(home / "task").save_pretrained(tmp_path / "tasks" / "folder")
    try:
        hosts = frozenset({"127.0.0.1"})
        client = TestClient(make_app(service, Access({}, hosts)), base_url="http://127.0.0.1")
        body = {
            "name": "fitted",
            "template": TASK.template.format,
            "examples": [{"text": text, "label": word} for text, word in ROWS],
            "experts": ["tfidf"],
        }
        job = client.post("/v1/tasks", json=body).json()
        state = until(
            lambda: (
                (status := client.get(f"/v1/jobs/{job['id']}").json())["status"] in {"done", "failed"}
                and status
            )
        )
        assert state["status"] == "done", state
        for name in ("folder", "fitted"):
            reply = client.post("/v1/classify", json={"model": name, "input": list(TEXTS)})
            assert [one["label"] for one in reply.json()["data"]] == list(WORDS), reply.text
    finally:
        service.close()


def test_estimator_predicts_without_the_model(home, tmp_path, monkeypatch):
    texts, labels = zip(*ROWS, strict=True)
    classifier = I2CLClassifier(str(home / "model"), experts=["tfidf"], device="cpu").fit(texts, labels)
    assert classifier.report_ is None  # no texts are left over
    classifier.save_pretrained(tmp_path / "task")
    loaded = I2CLClassifier.from_pretrained(tmp_path / "task")
    assert loaded.experts == ["tfidf"]
    monkeypatch.setattr(I2CLClassifier, "_decoder", lambda _: pytest.fail("the model is loaded"))
    for each in (classifier, loaded):
        assert each.predict(TEXTS).tolist() == list(WORDS)
    assert np.allclose(classifier.predict_proba(TEXTS), loaded.predict_proba(TEXTS))


def test_multi_label_task_without_the_llm(call, home, tmp_path, no_forward):
    rows = [
        (f"{text} and {other}", f"{word};{another}")
        for text, word in ROWS[:12]
        for other, another in ROWS[:4]
    ]
    rows += [(text, word) for text, word in ROWS] + [(f"hello {number}", "") for number in range(10)]
    path = write_csv(tmp_path / "rows.csv", ["text", "label"], rows)
    words = ["--label-separator", ";", "--experts", "tfidf", "-o", tmp_path / "task"]
    code, _, err = call("fit", home / "model", path, *words)
    assert code == 0, err
    injection = Injection.from_pretrained(tmp_path / "task")
    assert list(injection.evaluation["methods"]) == ["label_frequency", "char_tfidf"]
    assert injection.evaluation["outcome"] == "better"
    assert injection.predict(None, ["money back please and parcel is late"]) == [("delivery", "refund")]
    gold = MultiLabelBinarizer().fit_transform([set(filter(None, word.split(";"))) for _, word in rows])
    estimator = I2CLClassifier(str(home / "model"), experts=["tfidf"], labels=sorted(WORDS), device="cpu")
    estimator.fit([text for text, _ in rows], gold)
    assert estimator.predict(["parcel is late"]).tolist() == [[1, 0, 0]]


def test_card_shows_how_to_predict_without_a_model(home):
    card = (home / "task" / "README.md").read_text(encoding="utf-8")
    assert "no language model runs" in card
    assert "injection.predict(None, [" in card
    assert "Decoder" not in card
    assert "base_model" not in card
    assert "weights tfidf" in card


def test_fit_names_the_option_that_leaves_out_a_useless_llm(call, home, tmp_path):
    code, out, err = call(
        *[
            "fit",
            home / "model",
            home / "rows.csv",
            "-o",
            tmp_path / "both",
            "--set",
            "steps=1",
            "--shots",
            "4",
        ]
    )
    assert code == 0, err
    assert "The LLM adds nothing significant to the other experts" in out
    (advice,) = re.findall(r"^Advice: (.*)$", out.replace("\n ", " "), re.MULTILINE)
    assert advice.count("--experts tfidf") == 1
