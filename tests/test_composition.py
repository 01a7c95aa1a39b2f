"""Combined injections: what they write, what they fold to, and what cannot be combined."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from i2cl import combine
from i2cl.batching import make_batch
from i2cl.classes import ClassVectors
from i2cl.cli import main
from i2cl.context import ContextVector, ExtractConfig
from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.export import fold
from i2cl.injection import Injection
from i2cl.scoring import encode_queries, label_tokens, score
from i2cl.tasks import Example, Task, Template
from tiny import tiny_model, tiny_tokenizer

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
OTHER = replace(TASK, name="books", title="Books")
TEXTS = ["a warm film", "dull", "the best of the year"]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@cache
def decoder_of(case, **overrides):
    return Decoder(tiny_model(case, **overrides), tiny_tokenizer(), name=f"tiny-{case}")


def made(seed, case="llama", *, writers="both", task=TASK, base=None, **fields):
    decoder, generator = decoder_of(case), torch.Generator().manual_seed(seed)
    shape = (decoder.layers, 1 if writers == "hidden" else 2)
    context = ContextVector(
        torch.randn(*shape, decoder.d_model, generator=generator),
        ExtractConfig(writers=writers),
        demonstrations=seed + 1,
    )
    coefficients = torch.randn(*shape, 2, generator=generator) * 0.2 + torch.tensor([0.1, 1.0])
    fields = {"settings": {"epochs": 3}, "history": (1.5, 0.5), "seed": seed} | fields
    return Injection(context, coefficients, task, base or decoder.base, **fields)


def written(injection, output):
    """What it writes in place of an output, at every layer and site."""
    batch = make_batch([(1, 2, 3)], torch.device("cpu"))
    layers, sites, _ = injection.coefficients.shape
    edit = injection.edit()
    found = [edit.injected(layer, site, output, batch) for layer in range(layers) for site in range(sites)]
    return torch.stack(found)


# What it is


@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3], [1.0, 1.0, 1.0], [2.0, -1.0, 0.0], [1, 2, 3]])
@pytest.mark.parametrize("writers", ["both", "mha", "hidden"])
def test_changes_are_added(writers, weights):
    parts = [made(seed, writers=writers) for seed in range(3)]
    output = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(9))
    changes = [written(part, output) - output for part in parts]
    shares = [1 / 3] * 3 if weights is None else weights
    wanted = output + sum(share * change for share, change in zip(shares, changes, strict=True))
    torch.testing.assert_close(written(combine(parts, weights), output), wanted, **CLOSE)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_folded_weights_add_up_like_task_vectors(case):
    decoder, parts, weights = decoder_of(case), [made(seed, case) for seed in range(2)], [0.7, 0.5]
    none = replace(parts[0], coefficients=torch.tensor([0.0, 1.0]).expand_as(parts[0].coefficients))
    base = fold(decoder, none).state_dict()
    folded = [fold(decoder, part).state_dict() for part in parts]
    for name, value in fold(decoder, combine(parts, weights)).state_dict().items():
        pairs = zip(weights, folded, strict=True)
        wanted = base[name] + sum(weight * (one[name] - base[name]) for weight, one in pairs)
        torch.testing.assert_close(value, wanted, **CLOSE)


@pytest.mark.parametrize("writers", ["both", "hidden"])
def test_one_injection_stays_as_it_is_bit_for_bit(writers):
    one = made(1, writers=writers)
    for weights in (None, [1.0]):
        found = combine([one], weights)
        assert torch.equal(found.context.values, one.context.values)
        assert torch.equal(found.coefficients, one.coefficients)
        assert found.task == one.task


def test_a_change_and_its_opposite_leave_the_model_as_it_was():
    decoder, one = decoder_of("llama"), made(1)
    for parts, weights in (([one, one], [1.0, -1.0]), ([one], [0.0])):
        none = combine(parts, weights)
        torch.testing.assert_close(written(none, torch.ones(1, 3, 32)), torch.ones(4, 1, 3, 32))
        labels = label_tokens(decoder, TASK.template, TASK.labels)
        plain = score(decoder, encode_queries(decoder, TASK.template.query, TEXTS, labels), labels)
        torch.testing.assert_close(none.scores(decoder, TEXTS), plain, **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_order_and_brackets_do_not_matter(seed):
    a, b, c = (made(3 * seed + number) for number in range(3))
    output = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(seed))

    def same(one, other):
        torch.testing.assert_close(written(one, output), written(other, output), **CLOSE)

    same(combine([a, b, c]), combine([c, a, b]))
    same(combine([a, b, c]), combine([combine([a, b]), c], [2 / 3, 1 / 3]))
    same(combine([a, b], [1.0, 1.0]), combine([b, a], [1.0, 1.0]))
    same(combine([a, a]), a)


def test_parts_stay_as_they_are():
    parts = [made(0), made(1)]
    before = [(part.context.values.clone(), part.coefficients.clone()) for part in parts]
    combine(parts)
    for part, (values, coefficients) in zip(parts, before, strict=True):
        assert torch.equal(part.context.values, values)
        assert torch.equal(part.coefficients, coefficients)


def test_it_remembers_its_parts_and_is_saved(tmp_path):
    decoder, parts = decoder_of("llama"), [made(0), made(1, task=OTHER)]
    found = combine(parts, [0.25, 0.75])
    assert found.context.demonstrations == 1 + 2
    assert found.history == ()
    told = found.settings["combined"]
    assert [(part["task"], part["weight"]) for part in told] == [("films", 0.25), ("books", 0.75)]
    assert [(part["seed"], part["demonstrations"]) for part in told] == [(0, 1), (1, 2)]
    assert told[0]["calibration"] == {"epochs": 3}
    found.save_pretrained(tmp_path / "both")
    loaded = Injection.from_pretrained(tmp_path / "both")
    assert loaded.settings == found.settings
    assert torch.equal(loaded.scores(decoder, TEXTS), found.scores(decoder, TEXTS))


def test_class_vectors_are_summed_up_and_left_behind():
    one = made(0)
    vectors = torch.stack([one.context.values, one.context.values])
    classes = ClassVectors(vectors, torch.full((2, 2, 2), 0.5))
    assert combine([replace(one, classes=classes), made(1)]).classes is None


# Which task it answers


def test_one_name_stays_and_several_are_joined():
    assert combine([made(0), made(1)]).task == TASK
    joined = combine([made(0), made(1, task=OTHER), made(2)]).task
    assert (joined.name, joined.labels, joined.template) == ("films+books", TASK.labels, TASK.template)
    assert joined.title == ""
    turned = made(1, task=replace(OTHER, labels=TASK.labels[::-1]))
    assert combine([made(0), turned]).task.labels == TASK.labels


@pytest.mark.parametrize(
    "change",
    [{"labels": ("good", "bad")}, {"labels": ("positive", "mixed")}, {"template": Template.plain()}],
)
def test_other_labels_or_templates_need_a_choice(change):
    other = replace(OTHER, **change)
    parts = [made(0), made(1, task=other)]
    with pytest.raises(I2CLError, match="tasks 'films' and 'books' have different label words or templates"):
        combine(parts)
    chosen = replace(other, train=(Example("secret", 0),))
    assert combine(parts, task=chosen).task == other
    union = replace(TASK, name="union", labels=("positive", "negative", "good", "bad"))
    assert combine(parts, task=union).scores(decoder_of("llama"), TEXTS).shape == (3, 4)


# What cannot be combined


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"writers": "mha"}, "has writers 'mha', the first 'both'"),
        ({"positions": "last"}, "has positions 'last', the first 'all'"),
        ({"scoring": "full"}, "has scoring 'full', the first 'auto'"),
        ({"case": "gpt2"}, "was made on another model than the first .*model_type 'llama' and not 'gpt2'"),
        ({"base": replace(decoder_of("llama").base, weights="0" * 16)}, r"was made on another .*\(weights"),
    ],
)
def test_injections_that_differ(fields, message):
    with pytest.raises(I2CLError, match=rf"injection 2 \('films'\) {message}.*: fit both"):
        combine([made(0), made(1, **fields), made(2)])


def test_random_positions_need_one_seed():
    parts = [made(seed, positions="random") for seed in range(2)]
    with pytest.raises(I2CLError, match="has seed of random positions 1, the first 0"):
        combine(parts)
    assert combine([parts[0], replace(parts[1], seed=0)]).positions == "random"
    assert combine([made(seed, positions="last") for seed in range(2)]).positions == "last"


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [], [1.0, math.nan], [math.inf, 1.0]])
def test_weights_that_do_not_fit(weights):
    with pytest.raises(I2CLError, match=r"do not fit 2 injection\(s\): give one finite number each"):
        combine([made(0), made(1)], weights)


def test_nothing_to_combine():
    with pytest.raises(I2CLError, match="no injections were given"):
        combine([])


# On the command line


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run a command beside two saved injections; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    made(0).save_pretrained("films")
    made(1, task=OTHER).save_pretrained("books")
    made(2, task=replace(TASK, name="moods", labels=("glad", "sad"))).save_pretrained("moods")
    made(3, positions="last").save_pretrained("last")

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        told = capsys.readouterr()
        return stop.value.code, told.out, told.err

    return run


def test_the_command_saves_what_the_function_makes(call):
    code, out, err = call("combine", "films", "books", "-o", "both", "--weights", "1,-0.5")
    assert (code, err) == (0, "")
    assert out == (
        "Saved both: 1 x films, -0.5 x books; answers as films+books.\nNext: i2cl predict both FILE\n"
    )
    loaded, wanted = Injection.from_pretrained("both"), combine([made(0), made(1, task=OTHER)], [1.0, -0.5])
    assert torch.equal(loaded.context.values, wanted.context.values)
    assert torch.equal(loaded.coefficients, wanted.coefficients)
    assert (loaded.task, loaded.settings) == (wanted.task, wanted.settings)


def test_a_task_is_chosen_and_json_printed(call):
    code, out, _ = call("combine", "films", "moods", "-o", "both", "--task-from", "moods", "--json")
    record = json.loads(out)
    assert (code, record["task"], record["labels"]) == (0, "moods", ["glad", "sad"])
    assert [part["weight"] for part in record["combined"]] == [0.5, 0.5]
    assert Injection.from_pretrained("both").task.name == "moods"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["films", "moods"], "say which to answer with"),
        (["films", "last"], "injection 2 ('films') has positions 'last'"),
        (["films", "books", "--weights", "1"], "do not fit 2 injection(s)"),
        (["films", "books", "--weights", "a,b"], "--weights 'a,b' are not numbers"),
        (["films", "nowhere"], "no injection at 'nowhere'"),
        (["films", "books", "--task-from", "nowhere"], "no injection at 'nowhere'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("i2cl.hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    before = sorted(tmp_path.iterdir())
    code, out, err = call("combine", *arguments, "-o", "both")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_with_other_files_is_refused(call, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    code, _, err = call("combine", "films", "books", "-o", "mine")
    assert code == 2
    assert "holds other files (thesis.txt)" in err
