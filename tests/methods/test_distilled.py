"""Distilled calibration against its parts, put together by hand."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from i2cl import I2CLError, Injection, InjectionPool, Task, Template
from i2cl.core.read_out import head_states, read_out
from i2cl.methods import make_methods
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions
from i2cl.tasks import Example
from tiny import tiny_model, tiny_tokenizer

WORDS = ("good", "bad", "unsure")
KINDS = ("kind", "dull", "so so")
TRAIN = tuple(Example(f"{KINDS[row % 3]} film {row}", row % 3) for row in range(60))
FILMS = Task("films", WORDS, Template("Review: {text}\n{label}"), train=TRAIN)
TEXTS = ["a fine thing", "dull, dull", "no idea"]


def made():
    return Decoder(tiny_model("llama"), tiny_tokenizer(), name="llama")


def method(**options):
    return make_methods(["distilled"], {"steps": 2, "reach": 3.0, "read_out": 3.0} | options)[0]


def fair(scores):
    """Log-probabilities whose mean over the texts is divided out."""
    return (scores.log_softmax(-1) - scores.softmax(-1).mean(0).log()).log_softmax(-1)


def test_it_is_the_read_out_of_what_the_teacher_says():
    decoder, shown = made(), FILMS.sample(2, 0)
    texts = FILMS.unlabelled(40, shown, 0)
    found = method(unlabelled=40, orders=1).injection(decoder, FILMS, shown)
    (anchored,) = make_methods(["anchored"], {"steps": 2, "reach": 3.0})
    injection = anchored.injection(decoder, FILMS, shown)
    torch.testing.assert_close(found.context.values, injection.context.values)
    own = injection.scores(decoder, texts)
    bias = torch.tensor(found.label_bias)
    torch.testing.assert_close(bias, -own.softmax(-1).mean(0).log() + torch.log(torch.tensor(1 / 3)))
    few = make_methods(["few_shot"])[0].fit(decoder, FILMS, shown, 0).scores(texts)
    teacher = (0.5 * fair(few) + 0.5 * fair(own)).softmax(-1)
    left = anchored.left_out_scores(decoder, FILMS, shown, injection)
    queries = Questions(decoder, FILMS).queries([*(one.text for one in shown), *texts])
    expected = read_out(
        head_states(decoder, queries, edit=injection.edit()),
        torch.cat([(left.log_softmax(-1) + bias).log_softmax(-1), fair(own)]),
        torch.cat([one_hot(torch.tensor([one.label for one in shown]), 3), teacher]).double(),
        3.0,
    )
    torch.testing.assert_close(found.read_out, expected.rows, atol=1e-4, rtol=1e-4)
    told = {"unlabelled": 40, "orders": 1, "few_shot_share": 0.5, "read_out": 3.0, "read_out_reach": 3.0}
    assert told.items() <= found.settings.items()


def test_the_teacher_is_the_mean_of_several_orders_without_their_bias():
    decoder, shown = made(), FILMS.sample(2, 0)
    injected = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    asked = method(orders=2, few_shot_share=1.0)
    both = asked.teacher(decoder, FILMS, shown, 0, TEXTS, injected)
    first = method(orders=1, few_shot_share=1.0).teacher(decoder, FILMS, shown, 0, TEXTS, injected)
    (few,) = make_methods(["few_shot"])
    told = few.fit(decoder, FILMS, shown, 0).scores(TEXTS).double()
    torch.testing.assert_close(first, fair(told).softmax(-1))
    second = (2 * both.log() - first.log()).log_softmax(-1)
    assert (second - first.log()).abs().max() > 1e-4  # another order
    alone = method(few_shot_share=0.0).teacher(decoder, FILMS, shown, 0, TEXTS, injected)
    torch.testing.assert_close(alone, injected.softmax(-1))


def test_what_is_stored_and_served_is_what_was_fitted(tmp_path):
    decoder, shown = made(), FILMS.sample(2, 0)
    predictor = method().fit(decoder, FILMS, shown, 0)
    injection = method().injection(decoder, FILMS, shown)
    expected = predictor.scores(TEXTS).log_softmax(-1)
    assert predictor.cost.unlabelled == 54
    kept = injection.context.values.numel() + injection.read_out.numel() + len(FILMS.labels)
    assert predictor.cost.cached_values == kept
    injection.save_pretrained(tmp_path / "out")
    loaded = Injection.from_pretrained(tmp_path / "out")
    pool = InjectionPool(decoder, {"films": loaded})
    for scores in (loaded.scores(decoder, TEXTS), torch.stack(pool.scores(TEXTS, ["films"] * 3))):
        torch.testing.assert_close(scores.log_softmax(-1), expected, atol=1e-5, rtol=1e-5)


def test_given_texts_and_a_prior_are_what_is_used():
    decoder, shown = made(), FILMS.sample(2, 0)
    bare = replace(FILMS, train=shown)
    texts = [example.text for example in TRAIN[:40]]
    found = method().injection(decoder, bare, shown, texts=texts, prior=[0.6, 0.2, 0.2])
    assert found.settings["label_prior"] == {"texts": 40, "prior": [0.6, 0.2, 0.2]}
    plain = replace(found, label_bias=None, read_out=None).scores(decoder, texts)
    bias = torch.tensor([0.6, 0.2, 0.2]).log() - plain.softmax(-1).mean(0).log()
    torch.testing.assert_close(torch.tensor(found.label_bias), bias)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (replace(FILMS, labels=("good film", "good grief", "bad")), "share their first token"),
        (replace(FILMS, train=FILMS.sample(2, 0)), "needs training texts beside the demonstrations"),
    ],
    ids=["whole labels", "no texts"],
)
@pytest.mark.filterwarnings("ignore::i2cl.models.scoring.ScoringWarning")
def test_what_it_cannot_do_is_one_line(task, told):
    with pytest.raises(I2CLError, match=told):
        method().injection(made(), task, FILMS.sample(2, 0))
