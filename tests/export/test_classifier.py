"""A task as a transformers text classifier: exact in batches, whatever the padding, and self-contained."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    configuration_utils,
    pipeline,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from commands import listed, run
from export.cases import FOLDED, HOW, SHARED, TASK, decoder_of, drawn, injection_for, saved
from fitting import raises
from i2cl import Decoder, Injection, Template, with_temperature
from i2cl.export import Golden, classifier, export_classifier, verify
from i2cl.export.classifier import PROBES, TRAILING, TemplateTokenizer
from i2cl.models.encoding import PromptEncoder
from tiny import CASES, byte_level, tiny_tokenizer

TEXTS = ["a warm and funny film", "dull.", "I left early, twice!", "naïve façade, 東京 🙂"]


def target(case):
    """Model type of the exported checkpoint."""
    return HOW[case].removeprefix("as ") if HOW[case].startswith("as ") else CASES[case][0]


CLASSIFIERS = [
    case
    for case in FOLDED
    if target(case) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and "modernbert" not in case
]
WITHOUT = [case for case in FOLDED if target(case) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
RIGHT_ONLY = {"biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo"}  # count positions from the padding
SPACED = replace(TASK, template=Template("Review: {text}\nSentiment: {label}"))


def exported(decoder, injection, folder):
    export_classifier(decoder, injection, folder)
    return pipeline("text-classification", model=str(folder), device="cpu", top_k=None)


def probabilities(classify, texts, labels, **options):
    answers = classify(texts, function_to_apply="softmax", **options)
    by_label = [{one["label"]: one["score"] for one in answer} for answer in answers]
    return torch.tensor([[one[label] for label in labels] for one in by_label])


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_every_classifier_model_type_matches_the_injected_model(case, tmp_path):
    decoder = decoder_of(case)
    injection = with_temperature(injection_for(decoder), 1.7)
    classify = exported(decoder, injection, tmp_path / "out")
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    sides = ("right",) if CASES[case][0] in RIGHT_ONLY else ("right", "left")
    assert Golden.from_export(tmp_path / "out").left_padding == (len(sides) == 2)
    for side in sides:
        classify.tokenizer.padding_side = side
        found = probabilities(classify, TEXTS, TASK.labels, batch_size=4)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", WITHOUT)
def test_model_types_without_a_classifier_in_transformers_are_refused(case, tmp_path):
    decoder = decoder_of(case)
    raises(
        "has no sequence classifier of the type .*--to causal-lm",
        *(export_classifier, decoder, injection_for(decoder), tmp_path / "out"),
    )
    assert listed(tmp_path) == []


@pytest.mark.parametrize("case", ["gpt2", "opt", "gpt_neox", "falcon"])
def test_a_layer_norm_holds_a_label_prior(case, tmp_path):
    decoder = decoder_of(case)
    injection = injection_for(decoder).with_head(bias=(1.5, -0.25), temperature=2.0)
    classify = exported(decoder, injection, tmp_path / "out")
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    torch.testing.assert_close(probabilities(classify, TEXTS, TASK.labels), expected, atol=1e-5, rtol=1e-4)


LLAMAS = [case for case in CLASSIFIERS if target(case) == "llama"]


@pytest.mark.parametrize("case", LLAMAS)
def test_an_extra_layer_of_a_llama_holds_a_label_prior(case, tmp_path):
    decoder = decoder_of(case)
    injection = injection_for(decoder).with_head(bias=(1.5, -0.25), temperature=2.0)
    classify = exported(decoder, injection, tmp_path / "out")
    assert classify.model.config.num_hidden_layers == decoder.layers + 1
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    found = probabilities(classify, TEXTS, TASK.labels, batch_size=4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert "float16 overflows" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_label_prior_holds_in_bfloat16(tmp_path):
    decoder = decoder_of("llama", torch.bfloat16)
    injection = injection_for(decoder).with_head(bias=(1.5, -0.25))
    exported(decoder, injection, tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype="bfloat16")
    classify = pipeline("text-classification", model, tokenizer=str(tmp_path / "out"), top_k=None)
    decoder.model.float()
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    found = probabilities(classify, TEXTS, TASK.labels)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)


@pytest.mark.parametrize(("case", "dtype"), [("smollm3", torch.float32), ("llama", torch.float16)])
def test_a_label_prior_that_cannot_be_exact_is_refused(case, dtype, tmp_path):
    decoder = decoder_of(case, dtype)
    injection = injection_for(decoder).with_head(bias=(1.5, -0.25))
    raises("--drop-prior.*--to causal-lm", export_classifier, decoder, injection, tmp_path / "out")
    assert listed(tmp_path) == []


def test_drop_prior_leaves_the_label_prior_out(tmp_path, stdout):
    base, artefact = saved(decoder_of("smollm3"), tmp_path)
    injection = Injection.from_pretrained(artefact).with_head(bias=(1.5, -0.25), temperature=2.0)
    injection.save_pretrained(tmp_path / "prior")
    stdout("export", tmp_path / "prior", tmp_path / "out", "--model", base, "--drop-prior")
    expected = injection.with_head(bias=None).log_probs(Decoder.from_pretrained(str(base)), TEXTS)
    classify = pipeline("text-classification", str(tmp_path / "out"), top_k=None)
    found = probabilities(classify, TEXTS, TASK.labels)
    torch.testing.assert_close(found, expected.softmax(-1).float(), atol=1e-5, rtol=1e-4)


def test_word_level_scoring_is_a_linear_head(tmp_path):
    decoder, injection = drawn("llama", SHARED)
    injection = injection.with_head(scoring="words")
    classify = exported(decoder, injection, tmp_path / "out")
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    torch.testing.assert_close(probabilities(classify, TEXTS, SHARED.labels), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("template", [TASK.template, SPACED.template, Template("{text}\n\nIs it {label}")])
def test_template_tokenizer_gives_the_token_ids_of_the_prompt(template):
    tokenizer = tiny_tokenizer()
    encoder = PromptEncoder.of(tokenizer)
    made = TemplateTokenizer(tokenizer, template)
    for text in (*PROBES, *(TRAILING if made.encodes(TRAILING) else ())):
        assert tuple(made.tokenizer(text)["input_ids"]) == encoder([template.query(text)])[0]


def test_the_template_is_exact_where_newlines_merge_with_punctuation():
    pattern = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, "isolated")
    merging = byte_level(["Review: dull.\nSentiment: bad."] * 3, 320, split, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<|endoftext|>")
    encoder = PromptEncoder.of(tokenizer)
    template = SPACED.template
    apart = encoder(["Review: dull."])[0] + encoder.plain_ids("\nSentiment:")
    ids = tuple(TemplateTokenizer(tokenizer, template).tokenizer("dull.")["input_ids"])
    assert ids == encoder([template.query("dull.")])[0]
    assert len(ids) < len(apart), "the full stop and the newline are one token"


def test_a_tokenizer_that_cannot_hold_the_template_is_refused(monkeypatch):
    monkeypatch.setattr(classifier, "_with_ids", lambda *_: None)
    raises("cannot hold this prompt template", TemplateTokenizer, tiny_tokenizer(), TASK.template)


def test_the_tokenizer_knows_the_context_length(tmp_path):
    decoder = decoder_of("gpt2")
    classify = exported(decoder, injection_for(decoder), tmp_path / "out")
    assert classify.tokenizer.model_max_length == decoder.max_length
    assert len(classify(["a warm film " * 2000], truncation=True)) == 1


def test_an_instruction_is_part_of_the_classifier(tmp_path):
    decoder = decoder_of("llama")
    injection = injection_for(decoder)
    template = injection.task.template.with_instruction("Judge the film.")
    injection = replace(injection, task=replace(injection.task, template=template))
    classify = exported(decoder, injection, tmp_path / "out")
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    torch.testing.assert_close(probabilities(classify, TEXTS, TASK.labels), expected, atol=1e-5, rtol=1e-4)


def test_truncation_keeps_the_end_of_the_template(tmp_path):
    decoder = decoder_of("llama")
    exported(decoder, injection_for(decoder), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("a warm film " * 400, truncation=True, max_length=40)["input_ids"]
    end = PromptEncoder.of(decoder.tokenizer).plain_ids("\nSentiment:")
    assert len(ids) == 40
    assert tuple(ids[-len(end) :]) == end


def test_control_tokens_in_a_text_stay_text(tmp_path):
    decoder = decoder_of("llama")
    exported(decoder, injection_for(decoder), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    special = decoder.tokenizer.eos_token
    assert decoder.tokenizer.eos_token_id not in tokenizer(f"a {special} film")["input_ids"]


def test_transformers_warns_of_nothing_during_an_export(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(configuration_utils.logger, "warning", lambda text, *_: warned.append(text))
    decoder, injection = drawn("llama", replace(TASK, labels=("positive", "negative", "neutral")))
    export_classifier(decoder, injection, tmp_path / "out", golden=False)
    assert warned == []


def test_the_config_names_labels_and_a_padding_token(tmp_path):
    decoder = decoder_of("gpt2")
    exported(decoder, injection_for(decoder), tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "positive", 1: "negative"}
    assert model.config.problem_type == "single_label_classification"
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    assert model.config.get_text_config().num_labels == 2


USE = """
import sys
sys.modules["i2cl"] = None  # as if not installed
from transformers import pipeline
for model in sys.argv[1:]:
    (answer,) = pipeline("text-classification", model=model)(["a warm film"])
    print(answer["label"])
"""


def in_hub_layout(folder, cache):
    """Store a folder as huggingface_hub's cache does: blobs, a snapshot of links to them, and a ref."""
    repo, commit = cache / "models--someone--films", "0" * 40
    snapshot = repo / "snapshots" / commit
    for made in (repo / "blobs", repo / "refs", snapshot):
        made.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repo / "blobs" / f"{number:040}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return "someone/films"


def test_the_classifier_runs_without_i2cl_from_a_folder_and_from_the_hub(tmp_path, stdout, monkeypatch):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    message = stdout("export", artefact, tmp_path / "out", "--model", base)
    assert "as a text classifier" in message
    hub_id = in_hub_layout(tmp_path / "out", tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = [sys.executable, "-c", USE, str(tmp_path / "out"), hub_id]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    injection = Injection.from_pretrained(artefact)
    decoder = Decoder.from_pretrained(str(base), device="cpu")
    assert result.stdout.split()[-2:] == 2 * injection.predict(decoder, ["a warm film"])


def trainer_of(folder, **options):
    """A Trainer of the classifier."""
    pytest.importorskip("accelerate", reason="accelerate is an extra")
    from transformers import Trainer, TrainingArguments  # seconds, which other workers save

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{**tokenizer(text), "labels": row % 2} for row, text in enumerate(TEXTS)]
    arguments = TrainingArguments(str(folder / "trained"), use_cpu=True, report_to=[], **options)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize("label_bias", [None, (1.5, -0.25)], ids=["plain", "label prior"])
def test_trainer_trains_the_classifier_further(label_bias, tmp_path):
    decoder = decoder_of("llama")
    injection = injection_for(decoder).with_head(bias=label_bias)
    exported(decoder, injection, tmp_path / "out")
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-4}
    trainer = trainer_of(tmp_path / "out", **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


def test_verify_checks_a_classifier(tmp_path, stdout):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    out = tmp_path / "out"
    stdout("export", artefact, out, "--model", base)
    record = json.loads(stdout("verify", out, "--json"))
    assert record["passed"]
    assert record["labels"]["of"] == record["labels"]["right"] == 2
    assert record["retokenized"] == []
    assert "Passed: 2 of 2 labels agree" in stdout("verify", out)


@pytest.mark.parametrize("factor", [-1, torch.nan])
def test_verify_fails_on_a_classifier_with_other_weights(tmp_path, stdout, factor):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    out = tmp_path / "out"
    stdout("export", artefact, out, "--model", base)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    with torch.no_grad():
        model.score.weight.mul_(factor)
    model.save_pretrained(out)
    assert not verify(out).passed
    assert run("verify", out) == 1


def test_a_classifier_that_differs_from_the_injected_model_is_not_written(tmp_path, monkeypatch):
    decoder, injection = drawn("llama")
    label_rows = classifier.label_rows
    monkeypatch.setattr(classifier, "label_rows", lambda *given: (-label_rows(*given)[0], torch.zeros(2)))
    raises("so it was not written", export_classifier, decoder, injection, tmp_path / "out")
    assert listed(tmp_path) == []


def test_bad_input_is_refused_before_anything_is_written(tmp_path, refused):
    base, artefact = saved(decoder_of("llama"), tmp_path)
    injection = Injection.from_pretrained(artefact)
    replace(injection, positions="last").save_pretrained(tmp_path / "last")
    before = listed(tmp_path)
    export = (tmp_path / "out", "--model", base, "--device", "cpu")
    assert "positions 'last'" in refused("export", tmp_path / "last", *export)
    other, task = saved(decoder_of("gemma2"), tmp_path / "other")
    message = refused("export", task, tmp_path / "out", "--model", other)
    assert "its blocks normalize the output of a sublayer" in message
    assert listed(tmp_path) == sorted([*before, "other"])
