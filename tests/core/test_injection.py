import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import listed
from fitting import TASKS, decoder_of, linear_edit, raises, random_injection
from i2cl import Decoder, Example, ExtractConfig, Injection, InjectionPool, Task, Template
from i2cl.models import decoder as decoder_module
from i2cl.models.batching import make_batch
from i2cl.models.label_tokens import find_label_tokens
from i2cl.models.scoring import next_token_log_probabilities, score
from i2cl.storage.layout import CARD, DESCRIPTION, TENSORS
from tiny import tiny_model, tiny_tokenizer

TEMPLATE = Template("Review: {text}\nSentiment:{label}", separator="\n\n")
ROWS = {"train": (Example("secret", 0),), "title": "Films"}
TASK = Task("Größe ☃", ("positive", "negative"), TEMPLATE, **ROWS)
TEXTS = ["a warm film", "dull"]
OTHER_SIZES = [("gemma2", {}, "layers 2 and not 3"), ("llama", {"hidden_size": 64}, "d_model 32 and not 64")]


def make_injection(case="llama", *, sublayers="both", base=None, **fields):
    fields = {"settings": {"epochs": 3, "layers": [0, 1]}, "history": (1.5, 0.1 + 0.2), "seed": 3} | fields
    extraction = ExtractConfig(sublayers=sublayers, separator=False)
    given = {"extraction": extraction, "base": base, "fields": fields}
    return random_injection(decoder_of(case), TASK.without_data(), **given)


@pytest.fixture
def saved(tmp_path):
    make_injection().save_pretrained(tmp_path / "out")
    return tmp_path / "out"


def described(folder):
    return json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))


def describe(folder, **changes):
    (folder / DESCRIPTION).write_text(json.dumps(described(folder) | changes), encoding="utf-8")


# At work


@pytest.mark.parametrize("sublayers", ["both", "mha", "hidden"])
@pytest.mark.parametrize("positions", ["all", "first", "last", "random"])
def test_scores_match_a_linear_edit(sublayers, positions):
    decoder, injection = decoder_of("llama"), make_injection(sublayers=sublayers, positions=positions)
    labels = find_label_tokens(decoder.encoder, TASK.template, TASK.labels)
    record = {"hook_point": "hidden" if sublayers == "hidden" else "sublayers", "positions": positions}
    edit = linear_edit(injection.context, injection.coefficients, seed=injection.seed, **record)
    for text, result in zip(TEXTS, injection.log_probs(decoder, TEXTS), strict=True):
        ids = tuple(tiny_tokenizer()(TASK.template.query(text))["input_ids"])
        batch = make_batch([ids], torch.device("cpu"))
        with torch.no_grad():
            logits = decoder.forward(batch, edit=edit)[0, 0].log_softmax(-1)
        among = logits[list(labels.representatives)].log_softmax(-1)
        assert torch.allclose(result, among, atol=2e-5)
        own = score(decoder, [ids], labels, edit=injection.edit())[0]
        assert torch.allclose(own.log_softmax(-1), result, atol=2e-5)


def test_predictions_are_label_words_and_full_sequences_can_be_requested():
    decoder, injection, done = decoder_of("llama"), make_injection(), []
    best = injection.log_probs(decoder, TEXTS).argmax(-1).tolist()
    assert injection.predict(decoder, TEXTS) == [TASK.labels[row] for row in best]
    assert injection.predict(decoder, []) == []
    whole = injection.log_probs(decoder, TEXTS, scoring="sequence", progress=done.append)
    asked = injection.scorer(decoder, "sequence")
    wanted = asked.scores(TEXTS, edit=injection.edit()).log_softmax(-1)
    torch.testing.assert_close(whole, wanted)
    assert not torch.allclose(whole, injection.log_probs(decoder, TEXTS))
    assert sum(done) == pytest.approx(2)


@pytest.mark.parametrize("ask", ["log_probs", "predict"])
def test_another_model_of_the_same_shape_is_accepted_with_force(ask):
    other = Decoder(tiny_model("llama", seed=1), tiny_tokenizer(), name="other")
    raises(r"made on 'llama', not 'other' \(weights .*--force", getattr(make_injection(), ask), other, TEXTS)
    assert len(getattr(make_injection(), ask)(other, TEXTS, force=True)) == len(TEXTS)


@pytest.mark.parametrize("wrong", ["llama", None])
def test_other_types_of_decoder_are_refused(wrong):
    raises(
        f"decoder must be of type Decoder, not {type(wrong).__name__}", make_injection().require_base, wrong
    )


def test_repr_omits_the_tensors_of_the_edit():
    assert "tensor" not in repr(make_injection())


def test_model_is_fingerprinted_once(monkeypatch):
    decoder, injection = Decoder(tiny_model("llama"), tiny_tokenizer()), make_injection()
    read = Mock(wraps=decoder_module.weights_fingerprint)
    monkeypatch.setattr(decoder_module, "weights_fingerprint", read)
    for _ in range(3):
        injection.log_probs(decoder, TEXTS)
    assert read.call_count == 1


# Which model it belongs to


def test_changed_configuration_or_tokenizer_is_named():
    make_injection().require_base(decoder_of("llama"))
    make_injection().require_base(
        Decoder(tiny_model("llama", dtype=torch.bfloat16), tiny_tokenizer(), name="copy")
    )
    other = Decoder(tiny_model("llama", rms_norm_eps=1e-5), tiny_tokenizer())
    raises(r"\(config.rms_norm_eps 1e-06 and not 1e-05\): .*--force", make_injection().require_base, other)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    other = Decoder(tiny_model("llama"), tokenizer)
    raises(r"\(tokenizer '\w+' and not '\w+'\)", make_injection().require_base, other)


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize(("case", "overrides", "named"), OTHER_SIZES)
def test_model_of_another_shape_is_refused_even_with_force(case, overrides, named, force):
    assert "--force" not in raises(
        named, make_injection().require_base, decoder_of(case, **overrides), force=force
    )


# Saved and loaded


@pytest.mark.parametrize("sublayers", ["both", "mha", "mlp", "hidden"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
def test_roundtrip_is_exact(tmp_path, case, sublayers):
    injection = make_injection(case, sublayers=sublayers, positions="random")
    injection.save_pretrained(tmp_path / "out")
    loaded = Injection.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.context, injection.context)
    assert torch.equal(loaded.coefficients, injection.coefficients)
    for field in ("task", "base", "positions", "seed", "settings", "history"):
        assert getattr(loaded, field) == getattr(injection, field)
    assert loaded.extraction == injection.extraction
    assert loaded.demonstrations == 7
    loaded.require_base(decoder_of(case))
    scores = [artefact.log_probs(decoder_of(case), TEXTS) for artefact in (injection, loaded)]
    assert torch.equal(*scores)


def test_temperature_and_label_bias_are_saved_unless_neutral(saved, tmp_path):
    assert Injection.from_pretrained(saved).temperature == 1
    assert not {"temperature", "label_bias"} & set(described(saved))
    assert "label_bias" not in (saved / CARD).read_text(encoding="utf-8")
    make_injection(temperature=1.0).save_pretrained(tmp_path / "one" / saved.name)
    for name in (DESCRIPTION, TENSORS, CARD):
        assert (tmp_path / "one" / saved.name / name).read_bytes() == (saved / name).read_bytes()
    injection = make_injection(temperature=2.25, bias=(0.1 + 0.2, -1.5))
    injection.save_pretrained(tmp_path / "new")
    record = {"temperature": 2.25, "label_bias": [0.1 + 0.2, -1.5]}
    assert described(tmp_path / "new") == described(saved) | record
    loaded = Injection.from_pretrained(tmp_path / "new")
    assert (loaded.temperature, loaded.label_bias) == (2.25, injection.label_bias)
    assert torch.equal(*(one.log_probs(decoder_of("llama"), TEXTS) for one in (loaded, injection)))
    card = " ".join((tmp_path / "new" / CARD).read_text(encoding="utf-8").split())
    assert "are divided by the `temperature`, 2.25. This does not change predicted labels" in card
    assert "`label_bias` is added to the log-probabilities over the labels" in card


def test_word_weights_are_saved(saved, tmp_path):
    plain = make_injection(scoring="words")
    sizes = plain.scorer(decoder_of("llama")).labels.word_weights.shape
    weighted = plain.with_head(word_weights=torch.randn(sizes).T.contiguous().T)
    weighted.save_pretrained(tmp_path / "new")
    record = {"word_weights": True, "scoring": "words"}
    assert described(tmp_path / "new") == described(saved) | record
    loaded = Injection.from_pretrained(tmp_path / "new")
    assert torch.equal(loaded.word_weights, weighted.word_weights)
    scores = [one.log_probs(decoder_of("llama"), TEXTS) for one in (loaded, weighted, plain)]
    torch.testing.assert_close(*scores[:2])  # to rounding: their strides differ
    assert not torch.allclose(*scores[1:])
    assert Injection.from_pretrained(saved).word_weights is None
    raises(
        "with scoring 'sequence' and 2 labels", make_injection, scoring="sequence", word_weights=torch.eye(2)
    )
    raises(r"\(5, 5\) with scoring 'words' and 2", make_injection, scoring="words", word_weights=torch.eye(5))
    other = weighted.with_head(word_weights=torch.ones(99, 2))
    raises("word weights have .*fit it again", other.log_probs, decoder_of("llama"), TEXTS)
    card = " ".join((tmp_path / "new" / CARD).read_text(encoding="utf-8").split())
    assert "with a learned weight for each token (`word_weights`)" in card
    tensors = load_file(tmp_path / "new" / TENSORS)
    del tensors["word_weights"]
    save_file(tensors, tmp_path / "new" / TENSORS)
    raises("damaged or missing .'word_weights'", Injection.from_pretrained, tmp_path / "new")


@pytest.mark.parametrize(
    ("prior", "message"),
    [(None, "equally frequent."), ([0.75, 0.25], "as frequent as positive 0.75, negative 0.25.")],
)
def test_card_states_the_assumption_of_a_label_bias(tmp_path, prior, message):
    settings = {"label_prior": {"texts": 64, "prior": prior}}
    make_injection(bias=(0.5, -0.5), settings=settings).save_pretrained(tmp_path / "out")
    message = f"Measured on 64 unlabelled texts, assuming that classes are {message}"
    assert message in " ".join((tmp_path / "out" / CARD).read_text(encoding="utf-8").split())


def test_description_is_readable_and_contains_no_demonstrations(saved, tmp_path):
    text = (saved / DESCRIPTION).read_text(encoding="utf-8")
    assert "Größe ☃" in text
    assert len(text.splitlines()) > 20
    value = described(saved)
    assert (value["format_version"], value["base_model"]["name"]) == (1, "llama")
    assert (value["task"]["labels"], value["task"]["separator"]) == (["positive", "negative"], "\n\n")
    assert value["history"] == [1.5, 0.1 + 0.2]
    assert listed(saved) == sorted([DESCRIPTION, TENSORS, CARD])
    replace(make_injection(), task=TASK).save_pretrained(tmp_path / "out")
    assert b"secret" not in b"".join(entry.read_bytes() for entry in (tmp_path / "out").iterdir())


def test_tensor_views_are_saved(tmp_path):
    injection = make_injection()
    values, coefficients = injection.context, injection.coefficients
    context = values.transpose(0, 2).contiguous().transpose(0, 2)
    turned = replace(injection, context=context, coefficients=coefficients[:1, :1].expand_as(coefficients))
    turned.save_pretrained(tmp_path / "out")
    loaded = Injection.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.context, values)
    assert torch.equal(loaded.coefficients, turned.coefficients)


# Artefacts that are not right


@pytest.mark.parametrize("end", [0, 5, 100, -1, None])
def test_truncated_or_missing_tensors_are_refused(saved, end):
    path = saved / TENSORS
    path.unlink() if end is None else path.write_bytes(path.read_bytes()[:end])
    raises(r"injection.safetensors is damaged or missing", Injection.from_pretrained, saved)
    save_file({"context_vector": torch.zeros(2, 2, 32)}, path)
    raises(r"damaged or missing \('coefficients'\)", Injection.from_pretrained, saved)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"format_version": 1}'])
def test_malformed_description_is_refused(saved, content):
    (saved / DESCRIPTION).write_bytes(content)
    raises(r"injection.json cannot be read", Injection.from_pretrained, saved)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format_version": 2, "later": 1}, "format_version=2: this i2cl reads version 1"),
        ({"later": 1}, "later=1: unknown field"),
        ({"positions": "middle"}, "positions='middle': "),
        ({"extraction": {"sublayers": "all"}}, "extraction: option sublayers='all': "),
        ({"history": ["low"]}, "history.0='low': "),
        ({"base_model": {"name": "x"}}, "base_model entry is malformed"),
        ({"label_bias": [0.5]}, "not one finite number for each of 2 labels"),
        ({"label_bias": [0.5, float("nan")]}, "not one finite number for each of 2 labels"),
        ({"label_bias": ["low", 0.5]}, "label_bias.0='low': "),
        ({"temperature": 0.0}, "temperature 0.0 is not a number from 0.001 to 1000: change it"),
        ({"temperature": float("nan")}, "temperature nan is not a number from 0.001 to 1000"),
        ({"temperature": "warm"}, "temperature='warm': "),
        ({"task": {"name": "x"}}, "labels: Field required"),
        ({"task": {"name": "x", "labels": ["a", "b"], "template": "no fields"}}, "template 'no fields'"),
    ],
)
def test_invalid_field_is_named(saved, changes, named):
    describe(saved, **changes)
    raises(named, Injection.from_pretrained, saved)


@pytest.mark.parametrize("changes", [{"layers": 3}, {"d_model": 16}, {}])
def test_shapes_that_do_not_match_the_description_are_refused(saved, changes):
    described_so = {"base_model": described(saved)["base_model"] | changes}
    describe(saved, **(described_so if changes else {"extraction": {"sublayers": "hidden"}}))
    message = "" if changes else r"2, 1, 32\) and \(2, 1, 2\) are described"
    raises(r"holds shapes \(2, 2, 32\) and \(2, 2, 2\), but \(" + message, Injection.from_pretrained, saved)


@pytest.mark.parametrize("name", ["context_vector", "coefficients"])
@pytest.mark.parametrize("change", [lambda value: value.int(), lambda value: value / 0])
def test_tensors_that_are_not_finite_are_named(saved, name, change):
    tensors = load_file(saved / TENSORS)
    save_file(tensors | {name: change(tensors[name])}, saved / TENSORS)
    message = rf"{name} in injection.safetensors is not finite.*fit it again"
    raises(message, Injection.from_pretrained, saved)


# The hub


def test_name_that_is_not_a_folder_is_downloaded(saved, monkeypatch):
    download = Mock(return_value=str(saved))
    monkeypatch.setattr("i2cl.storage.hub.snapshot_download", download)
    result = Injection.from_pretrained("somebody/films", revision="v1")
    assert torch.equal(result.coefficients, make_injection().coefficients)
    Injection.from_pretrained(saved)
    raises("is a folder and has no revision", Injection.from_pretrained, saved, revision="v1")
    download.assert_called_once_with("somebody/films", revision="v1", allow_patterns=[DESCRIPTION, TENSORS])


def test_repository_or_path_without_an_injection_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("i2cl.storage.hub.snapshot_download", lambda *_, **__: str(tmp_path))
        raises("'somebody/films' is not an injection", Injection.from_pretrained, "somebody/films")
    raises("no such folder", Injection.from_pretrained, Path("/no/such/folder/anywhere"))


FORMS = [
    {},
    {"bias": (0.5, -0.5)},
    {"temperature": 2.5},
    {"temperature": 0.3, "bias": (0.5, -0.5)},
    {"scoring": "sequence"},
    {"scoring": "words"},
]


@pytest.mark.parametrize("fields", FORMS)
def test_scores_are_normalized_float32_log_probabilities(fields):
    decoder, task = decoder_of("llama"), TASKS[0]
    injection = random_injection(decoder, task, 0, fields=fields)
    pooled = InjectionPool(decoder, {"films": injection}).log_probs(TEXTS, ["films"] * len(TEXTS))
    for scores in (injection.log_probs(decoder, TEXTS), torch.stack(pooled)):
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.exp().sum(-1), torch.ones(len(TEXTS)), atol=1e-5, rtol=0)


def test_label_log_mass_is_the_log_probability_of_any_label():
    decoder, task = decoder_of("llama"), TASKS[0]
    injection = random_injection(decoder, task, 0)
    asked = injection.scorer(decoder)
    wide = next_token_log_probabilities(decoder, asked.queries(TEXTS), edit=injection.edit())
    wanted = wide[:, list(asked.labels.representatives)].logsumexp(-1)
    torch.testing.assert_close(injection.label_log_mass(decoder, TEXTS), wanted)
    biased = injection.with_head(bias=(3.0, 0.0), temperature=2.0)
    torch.testing.assert_close(biased.label_log_mass(decoder, TEXTS), wanted)
    words = injection.with_head(scoring="words")
    raises("not defined for scoring='words'", words.label_log_mass, decoder, TEXTS)
