"""Successors of I2CL against a short direct computation: learned and linear task vector, WILDA."""

from dataclasses import replace

import pytest
import torch

from fitting import fit, made
from i2cl import Decoder, Example, I2CLError, Task, Template, load_task
from i2cl.methods import adapters

FAMILIES = ("llama", "gpt2", "gptj", "gpt_neox", "qwen2")
WORDS = ("positive", "negative")
WHOLE = ("positive", "poor", "negative")
SHOWN = (("a warm film", 0), ("dull, dull, dull", 1), ("funny and kind all the way", 0), ("no", 1))
TEXTS = ["a lifeless film", "the best of the year, by far", "hm"]
CLOSE = {"atol": 2e-5, "rtol": 1e-5}

pytestmark = pytest.mark.filterwarnings("ignore:labels share their first token")


@pytest.fixture
def films():
    return films_in(WORDS)


@pytest.fixture
def demonstrations():
    return [Example(text, label) for text, label in SHOWN]


def films_in(words):
    adjectives = ("good", "bad", "fine", "poor")
    train = tuple(Example(f"film {number} is {adjectives[number % 4]}", number % 2) for number in range(40))
    return Task("films", words, Template("Review: {text}\nSentiment:{label}"), train=train, test=train[:4])


def ids(decoder, text):
    return torch.tensor([decoder.tokenizer(text)["input_ids"]])


def first_tokens(decoder, task):
    prompt = task.template.query("x")
    start = ids(decoder, prompt).shape[1]
    return [ids(decoder, prompt + task.template.continuation(word))[0, start].item() for word in task.labels]


def right(predictor):
    """Mean log-probability of the demonstrations' labels, among the vocabulary and among the labels."""
    scores = predictor.scores([text for text, _ in SHOWN])
    gold = torch.tensor([label for _, label in SHOWN])[:, None]
    return {
        "vocabulary": scores.gather(1, gold).mean(),
        "labels": scores.log_softmax(-1).gather(1, gold).mean(),
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_learned_task_vector_is_added_to_one_state(model_type, films, demonstrations):
    decoder = made(model_type)
    predictor = fit("learned_task_vector", decoder, films, demonstrations, epochs=2, lr=0.1)
    vector = predictor.edit.vector

    def add(_module, _args, output):
        first = (output[0] if isinstance(output, tuple) else output).clone()
        first[:, -1] += vector
        return (first, *output[1:]) if isinstance(output, tuple) else first

    handle = decoder.blocks[0].register_forward_hook(add)  # of two blocks: the second one's input
    with torch.no_grad():
        logits = [decoder.model(ids(decoder, films.template.query(text))).logits[0, -1] for text in TEXTS]
    handle.remove()
    expected = torch.stack(logits).log_softmax(-1)[:, first_tokens(decoder, films)]
    torch.testing.assert_close(predictor.scores(TEXTS), expected, **CLOSE)
    assert (predictor.cost.trained, predictor.cost.cached_values) == (decoder.d_model, decoder.d_model)
    untrained = fit("learned_task_vector", decoder, films, demonstrations, epochs=0)
    zero = fit("zero_shot", decoder, films, demonstrations)
    torch.testing.assert_close(untrained.scores(TEXTS), zero.scores(TEXTS), **CLOSE)
    assert not torch.allclose(predictor.scores(TEXTS), zero.scores(TEXTS), atol=0.1)


@pytest.mark.parametrize("words", [WORDS, WHOLE], ids=["first", "whole"])
@pytest.mark.parametrize("loss", ["vocabulary", "labels"])
def test_a_learned_task_vector_learns_the_demonstrations(loss, words, demonstrations):
    decoder, task = made("llama"), films_in(words)
    options = {"loss": loss, "lr": 0.05}
    before = right(fit("learned_task_vector", decoder, task, demonstrations, epochs=0, **options))
    after = right(fit("learned_task_vector", decoder, task, demonstrations, epochs=10, **options))
    assert after[loss] > before[loss] + 0.1


@pytest.mark.parametrize(("layer", "found"), [("middle", 1), (0, 0), (-1, 3), ("2", 2)])
def test_where_a_learned_task_vector_is_added(layer, found, films, demonstrations):
    decoder = made("llama", num_hidden_layers=4)
    predictor = fit("learned_task_vector", decoder, films, demonstrations, epochs=0, vector_layer=layer)
    assert predictor.edit.layer == found


def last_state(decoder, text):
    """What the LM head reads at the last token."""
    with torch.no_grad():
        return decoder.model(ids(decoder, text), output_hidden_states=True).hidden_states[-1][0, -1].double()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_linear_task_vector_is_ridge_regression(model_type, films, demonstrations):
    decoder = made(model_type)
    predictor = fit("linear_task_vector", decoder, films, demonstrations, seed=3, unlabelled=12, ridge=0.7)
    texts = films.unlabelled(12, demonstrations, 3)
    front = "".join(films.template.demonstration(text, WORDS[label]) for text, label in SHOWN)
    alone = torch.stack([last_state(decoder, films.template.query(text)) for text in texts])
    shown = torch.stack([last_state(decoder, front + films.template.query(text)) for text in texts])
    gram = alone.T @ alone + 0.7 * torch.eye(decoder.d_model)
    linear = torch.linalg.solve(gram, alone.T @ (shown - alone))
    head = decoder.model.get_output_embeddings()
    new = torch.stack([last_state(decoder, films.template.query(text)) for text in TEXTS])
    with torch.no_grad():
        expected = head((new + new @ linear).float()).log_softmax(-1)[:, first_tokens(decoder, films)]
    torch.testing.assert_close(predictor.scores(TEXTS), expected, atol=1e-3, rtol=1e-3)
    assert (predictor.cost.cached_values, predictor.cost.unlabelled) == (decoder.d_model**2, 12)
    assert (predictor.cost.trained, predictor.cost.held_out) == (0, 0)


@pytest.mark.parametrize("words", [WORDS, WHOLE], ids=["first", "whole"])
def test_without_a_penalty_a_linear_task_vector_is_few_shot_on_its_texts(words, demonstrations):
    decoder, task = made("qwen2"), films_in(words)
    predictor = fit("linear_task_vector", decoder, task, demonstrations, unlabelled=5, ridge=1e-9)
    texts = task.unlabelled(5, demonstrations, 0)
    few = fit("few_shot", decoder, task, demonstrations).scores(texts)
    zero = fit("zero_shot", decoder, task, demonstrations).scores(texts)
    if words == WORDS:  # of whole labels the map has seen the first token alone
        torch.testing.assert_close(predictor.scores(texts), few, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(predictor.scores(texts), zero, atol=0.1)


def divergence(teacher, student, texts, loss):
    """KL divergence of the student from the teacher, of what it learns."""
    told, said = (one.scores(texts).log_softmax(-1) for one in (teacher, student))
    if loss == "vocabulary":  # the label tokens and all others together
        told, said = (with_rest(one.scores(texts)) for one in (teacher, student))
    return (told.exp() * (told - said)).sum(-1).mean()


def with_rest(scores):
    rest = (1 - scores.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log()
    return torch.cat([scores, rest], -1)


@pytest.mark.parametrize(
    ("loss", "words"),  # of whole labels, what comes next in the vocabulary does not tell them apart
    [("vocabulary", WORDS), ("labels", WORDS), ("labels", WHOLE)],
    ids=["vocabulary", "first", "whole"],
)
def test_wilda_comes_to_say_what_few_shot_says(loss, words, demonstrations):
    pytest.importorskip("peft", reason="peft is an extra")
    decoder, task = made("llama"), films_in(words)
    options = {"loss": loss, "unlabelled": 20, "orders": 1, "batch_size": 4, "lora_dropout": 0.0}
    texts = task.unlabelled(20, demonstrations, 0)
    teacher = fit("few_shot", decoder, task, demonstrations)
    start = fit("wilda", decoder, task, demonstrations, epochs=0, **options)
    zero = fit("zero_shot", decoder, task, demonstrations)
    torch.testing.assert_close(start.scores(TEXTS), zero.scores(TEXTS), **CLOSE)
    student = fit("wilda", decoder, task, demonstrations, epochs=6, lr=5e-3, lr_final=5e-3, **options)
    far, near = (divergence(teacher, one, texts, loss) for one in (start, student))
    assert near < far / 3
    torch.testing.assert_close(zero.scores(TEXTS), start.scores(TEXTS), **CLOSE)  # the model is as it was
    assert student.cost.unlabelled == 20
    assert student.cost.trained == student.cost.cached_values > 0
    assert not any("lora" in key for key, _ in decoder.model.named_parameters())


@pytest.mark.parametrize("loss", ["vocabulary", "labels"])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_wilda_is_told_by_one_order_after_the_other(kind, loss, films, demonstrations, monkeypatch):
    pytest.importorskip("peft", reason="peft is an extra")
    decoder = made("llama")
    told = []

    def record(_parameters, loss, batches, *_more, **_options):
        told.extend(loss(chosen).item() for chosen in batches)

    monkeypatch.setattr(adapters, "train", record)
    options = {"epochs": 3, "orders": 2, "unlabelled": 6, "batch_size": 6, "loss": loss}
    fit("wilda", decoder, films, demonstrations, pseudo_labels=kind, lora_dropout=0.0, **options)

    def answers(predictor):
        texts = films.unlabelled(6, demonstrations, 0)
        if loss == "labels":
            return predictor.scores(texts).log_softmax(-1)
        return predictor.distributions(texts)

    student = answers(fit("zero_shot", decoder, films, demonstrations))
    teacher = answers(fit("few_shot", decoder, films, demonstrations))
    if kind == "hard":
        expected = -student.gather(1, teacher.argmax(-1, keepdim=True)).mean().item()
    else:
        expected = (teacher.exp() * (teacher - student)).sum(-1).mean().item()
    assert told[0] == pytest.approx(expected, rel=1e-4)
    assert told[2] == pytest.approx(told[0], rel=1e-4)
    if kind == "soft":
        assert abs(told[1] - told[0]) > 1e-3  # another order


@pytest.mark.parametrize("case", ["phimoe", "llama4_text"])
def test_wilda_leaves_out_routers_that_give_more_than_a_product(case, films, demonstrations):
    pytest.importorskip("peft", reason="peft is an extra")
    options = {"epochs": 1, "unlabelled": 1, "lora_dropout": 0.0}
    assert fit("wilda", made(case), films, demonstrations, **options).scores(TEXTS).isfinite().all()


def test_wilda_says_what_experts_in_one_tensor_need(films, demonstrations):
    pytest.importorskip("peft", reason="peft is an extra")
    with pytest.raises(I2CLError, match=r"PEFT cannot adapt this 'mixtral': .*; set lora_dropout=0$"):
        fit("wilda", made("mixtral"), films, demonstrations, epochs=0, unlabelled=1)


def test_wilda_adapts_every_linear_map_of_every_block(films, demonstrations):
    pytest.importorskip("peft", reason="peft is an extra")
    decoder = made("llama")
    predictor = fit("wilda", decoder, films, demonstrations, epochs=0, unlabelled=1)
    linear = [one for block in decoder.blocks for one in block.modules() if isinstance(one, torch.nn.Linear)]
    assert len(linear) == 7 * decoder.layers
    assert predictor.cost.trained == sum(8 * (one.in_features + one.out_features) for one in linear)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "learned_task_vector",
            {"loss": "labels", "epochs": 120, "lr": 0.1, "batch_size": 20, "vector_layer": 0},
        ),
        ("linear_task_vector", {"unlabelled": 64}),
        ("wilda", {"unlabelled": 32, "lr": 1e-3, "lr_final": 1e-3, "batch_size": 4, "epochs": 3}),
    ],
)
def test_the_bundled_model_learns_its_task(name, options):
    """From 0.33 at zero-shot, where few-shot has 1.0."""
    if name == "wilda":
        pytest.importorskip("peft", reason="peft is an extra")
    decoder, task = Decoder.from_pretrained("reference"), load_task("mood-colour-1")
    queries = task.queries(60)
    gold = torch.tensor([query.label for query in queries])
    found = fit(name, decoder, task, task.sample(5, 0), **options).scores([query.text for query in queries])
    assert (found.argmax(-1) == gold).float().mean() > 0.8


@pytest.mark.parametrize("name", ["linear_task_vector", "wilda"])
def test_without_further_texts_there_is_nothing_to_learn_from(name, films, demonstrations):
    pytest.importorskip("peft", reason="peft is an extra")
    few = replace(films, train=tuple(demonstrations))
    with pytest.raises(
        I2CLError, match=f"{name} needs training texts beside the demonstrations, .*: add some"
    ):
        fit(name, made("llama"), few, demonstrations)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vector_layer": 2}, "vector_layer=2: the model has 2 layers"),
        ({"vector_layer": "-3"}, "vector_layer=-3: the model has 2 layers"),
        ({"vector_layer": "first"}, "option vector_layer='first'"),
    ],
)
def test_a_layer_that_is_not_there(options, message, films, demonstrations):
    with pytest.raises(I2CLError, match=message):
        fit("learned_task_vector", made("llama"), films, demonstrations, **options)


def test_a_learned_task_vector_takes_demonstrations(films):
    with pytest.raises(I2CLError, match="no demonstrations were given"):
        fit("learned_task_vector", made("llama"), films, [])
