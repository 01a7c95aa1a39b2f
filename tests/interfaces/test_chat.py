"""Chat models at every face: asked, stored, served and exported in the words of their chat template."""

import json

import pytest

from commands import jsonl, run
from i2cl import Decoder, I2CLClassifier, Injection, InjectionPool, Task
from i2cl.models.scoring import LabelScorer
from tiny import tiny_folder, tiny_model, tiny_tokenizer

CHAT = (
    "{% for one in messages %}<{{ one.role }}>\n{{ one.content }}</end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
ROWS = [(f"film {row} is {('bad', 'good')[row % 2]}", ("no", "yes")[row % 2]) for row in range(12)]
SAY = "Is it good?"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tiny_model("llama").save_pretrained(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "model")
    tiny_folder(folder / "plain")
    films = jsonl(folder / "films.jsonl", [{"text": text, "label": label} for text, label in ROWS])
    fit = ("fit", folder / "model", films, "-o", folder / "out", "--chat", "--shots", 2)
    assert run(*fit, "--instruction", SAY, "--set", "epochs=1", "--evaluate", 4) == 0
    return folder


def test_what_is_asked_is_what_the_chat_template_says(home):
    injection = Injection.from_pretrained(home / "out")
    decoder = Decoder.from_pretrained(str(home / "model"))
    messages = (("system", SAY), ("user", "fine"), ("assistant", "yes"))
    turns = [{"role": role, "content": content} for role, content in messages]
    tokenizer = decoder.tokenizer
    asked = tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    scorer = LabelScorer(decoder, injection.task)
    assert scorer.queries(["fine"])[0] == tuple(tokenizer(asked)["input_ids"])
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert injection.task.template.demonstration("fine", "yes") == whole
    alone = injection.log_probs(decoder, ["fine"])
    pool = InjectionPool(decoder, {"films": injection})
    assert pool.log_probs(["fine"], ["films"])[0].tolist() == pytest.approx(alone[0].tolist(), abs=1e-5)


def test_it_is_exported_verified_and_kept_as_a_chat(home):
    assert run("export", home / "out", "--to", "causal-lm", home / "folded") == 0
    assert run("verify", home / "folded") == 0
    assert any(SAY in path.read_text() for path in (home / "folded").glob("*golden*.json"))
    record = json.loads((home / "out" / "injection.json").read_text())["task"]
    assert record["opening"] == f"<system>\n{SAY}</end>\n"
    assert Task.from_dict(record).to_dict() == record


def test_the_classifier_asks_in_the_same_way(home):
    texts, labels = zip(*ROWS, strict=True)
    model = str(home / "model")
    one = I2CLClassifier(model, chat=True, instruction=SAY, settings={"epochs": 1}, evaluate=0)
    stored = Injection.from_pretrained(home / "out").task.template
    assert one.fit(list(texts), list(labels)).injection_.task.template == stored
    plain = I2CLClassifier(model, instruction=SAY, settings={"epochs": 1}, evaluate=0)
    assert plain.fit(list(texts), list(labels)).injection_.task.template.opening == f"{SAY}\n"


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        ("plain", ("--chat",), "has no chat template: leave out chat"),
        ("model", ("--chat", "--template", "{text} {label}"), "--chat and --template exclude each other"),
    ],
)
def test_what_cannot_be_is_one_line(home, refused, model, more, says):
    message = refused("fit", home / model, home / "films.jsonl", "-o", home / "none", "--shots", 2, *more)
    assert says in message
    assert not (home / "none").exists()


def test_eval_asks_with_an_instruction_or_as_a_chat(home):
    common = ("eval", home / "model", home / "films.jsonl", "--test", home / "films.jsonl", "--shots", 1)
    common += ("--method", "zero_shot", "--limit", 4, "--json")
    assert run(*common, "--chat") == 0
    assert run(*common, "--template", "{text} {label}", "--instruction", SAY) == 0
