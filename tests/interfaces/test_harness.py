"""An injection under lm-evaluation-harness scores as it does here, and as its folded checkpoint does."""

import json
import sys
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install 'i2cl[harness]')")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from export.cases import TASK as FILMS, decoder_of, injection_for, stored
from fitting import injected, left_as_found, one_line
from i2cl import CalibrationConfig, Decoder, I2CLError, load_task, with_temperature
from i2cl.encoders import EncoderBias
from i2cl.export import export_causal_lm, fold
from i2cl.interfaces.harness import I2CLHarness, main
from i2cl.models.scoring import LabelScorer, score
from processes import finished

TEXTS = ["a warm and funny film", "dull", "where is the longest river of them all"]
MOOD = load_task("mood-colour-1")
ROWS = MOOD.test[:60]


@cache
def reference():
    return Decoder.from_pretrained("reference", device="cpu")


@cache
def mood():
    """Little calibrated, so that some answers are wrong."""
    config = CalibrationConfig.recipe("fast", passes=8)
    return injected(reference(), MOOD, MOOD.sample(2, seed=0), config)


def right():
    """Its answers to the rows, and the accuracy of them."""
    best = mood().log_probs(reference(), [row.text for row in ROWS]).argmax(-1).tolist()
    return best, sum(result == row.label for result, row in zip(best, ROWS, strict=True)) / len(ROWS)


def requests(kind, arguments):
    return [Instance(kind, {}, one, place) for place, one in enumerate(arguments)]


def task_folder(folder):
    """A task of the harness with the rows of a bundled one."""
    rows = [json.dumps({"text": row.text, "label": row.label}) for row in ROWS]
    (folder / "mood.jsonl").write_text("\n".join(rows))
    (folder / "mood.yaml").write_text(
        "task: mood\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/mood.jsonl}}, cache_dir: {folder}/cache}}\n"
        'doc_to_text: "{{text}}\\nAnswer:"\ndoc_to_target: label\n'
        f"doc_to_choice: {json.dumps(list(MOOD.labels))}\nmetric_list: [{{metric: acc}}]\n"
    )
    return folder


def likelihoods(harness, pairs):
    return harness.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)


def measured(model, folder):
    """Accuracy by the harness, and its answer to each row."""
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    result = simple_evaluate(model, tasks=["mood"], task_manager=tasks, bootstrap_iters=0)
    logs = sorted(result["samples"]["mood"], key=lambda sample: sample["doc_id"])
    best = [max(range(4), key=lambda place: log["filtered_resps"][place][0]) for log in logs]
    return result["results"]["mood"]["acc,none"], best


@pytest.mark.parametrize("case", ["llama", "gpt2", "opt", "falcon", "gemma2", "mistral-sliding"])
def test_log_likelihoods_are_scores_of_whole_sequences(case):
    decoder = decoder_of(case)
    injection = injection_for(decoder)
    scorer = LabelScorer(decoder, FILMS, "sequence")
    labels = scorer.labels
    assert any(len(ids) > 1 for ids in labels.ids)
    queries = scorer.queries(TEXTS)
    expected = score(decoder, queries, labels, edit=injection.edit())
    template = FILMS.template
    asked = product(map(template.query, TEXTS), map(template.continuation, FILMS.labels))
    result = likelihoods(I2CLHarness(injection, decoder, batch_size=4), list(asked))
    values = torch.tensor([value for value, _ in result]).view(len(TEXTS), -1)
    assert torch.allclose(values, expected, atol=1e-4)
    assert not torch.allclose(values, score(decoder, queries, labels), atol=1e-2)


def test_log_likelihoods_are_divided_by_the_temperature():
    decoder = decoder_of("llama")
    injection = injection_for(decoder)
    pairs = [("a film", " good"), ("a film", " bad"), ("dull", " good")]
    both = (injection, with_temperature(injection, 2.5))
    plain, warm = (likelihoods(I2CLHarness(one, decoder, batch_size=2), pairs) for one in both)
    assert warm == [(value / 2.5, greedy) for value, greedy in plain]


def test_generated_text_is_that_of_the_folded_model():
    decoder = decoder_of("llama")
    injection = injection_for(decoder)
    asked = [(text, {"max_gen_toks": 6, "until": ["<none>"]}) for text in TEXTS]  # padded on the left

    def generated(model):
        return model.generate_until(requests("generate_until", asked), disable_tqdm=True)

    result = generated(I2CLHarness(injection, decoder, batch_size=3))
    folded = HFLM(fold(decoder, injection), tokenizer=decoder.tokenizer, batch_size=3)
    assert result == generated(folded)
    assert result != generated(I2CLHarness(None, decoder, batch_size=3))


def test_accuracy_on_a_task_is_that_of_this_package_and_of_the_export(tmp_path):
    folder = task_folder(tmp_path)
    best, accuracy = right()
    assert 0.3 < accuracy < 1
    expected = (pytest.approx(accuracy), best)
    assert measured(I2CLHarness(mood(), reference(), batch_size=16), folder) == expected
    export_causal_lm(reference(), mood(), tmp_path / "plain")
    folded = HFLM(str(tmp_path / "plain"), device="cpu", dtype="float32", batch_size=16)
    assert measured(folded, folder) == expected


def test_the_command_line(tmp_path, monkeypatch):
    folder = task_folder(tmp_path)
    mood().save_pretrained(tmp_path / "injection")
    arguments = f"--model i2cl --model_args injection={tmp_path / 'injection'} --tasks mood --device cpu"
    paths = f"--include_path {folder} --output_path {tmp_path / 'results'} --batch_size 16"
    monkeypatch.setattr(sys, "argv", ["i2cl.interfaces.harness", *arguments.split(), *paths.split()])
    main()
    (result,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(result.read_text())["results"]["mood"]["acc,none"] == pytest.approx(right()[1])


def test_the_injection_names_its_model(tmp_path):
    mood().save_pretrained(tmp_path / "injection")
    harness = I2CLHarness(str(tmp_path / "injection"), device="cpu")
    assert harness._decoder.base == reference().base
    assert harness.max_length == reference().max_length


def test_pickle_weights_are_refused(tmp_path):
    decoder = decoder_of("llama")
    stored(decoder, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(decoder.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises((I2CLError, OSError), match="safetensors"):
        I2CLHarness(None, str(tmp_path), device="cpu")


def test_bad_input():
    decoder = decoder_of("llama")
    injection = injection_for(decoder)
    one_line("neither a model nor an injection", I2CLHarness)
    with pytest.raises(I2CLError, match="word-level scoring: evaluate it with `i2cl predict`"):
        I2CLHarness(injection.with_head(scoring="words"), decoder)
    with pytest.raises(I2CLError, match="positions='last': fit one with positions=all"):
        I2CLHarness(replace(injection, positions="last"), decoder)
    encoded = injection.with_head(
        encoder=EncoderBias("words", torch.ones(len(injection.task.labels), 25), torch.eye(24)[0])
    )
    one_line("does not support sentence encoders: fit with --method anchored", I2CLHarness, encoded, decoder)
    other = decoder_of("llama", rms_norm_eps=1e-3)
    other.model.lm_head.weight.data.add_(1)
    one_line(r"made on .* \(weights", I2CLHarness, injection, other)
    I2CLHarness(injection, other, force=True)


def test_the_command_line_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    folder = task_folder(tmp_path)
    arguments = f"--model i2cl --model_args injection={tmp_path}/cache --tasks mood --include_path {folder}"
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(sys, "argv", ["i2cl.interfaces.harness", *arguments.split()])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert capsys.readouterr().err.endswith("it has no injection.json (made by `i2cl fit`)\n")


def test_the_model_is_left_as_found():
    decoder = decoder_of("llama")
    decoder.model.train()
    next(decoder.model.parameters()).requires_grad_(False)
    decoder.tokenizer.padding_side = "right"
    assert decoder.tokenizer.pad_token is None
    with left_as_found(decoder.model):
        harness = I2CLHarness(injection_for(decoder), decoder, batch_size=2)
        likelihoods(harness, [("a film", " good")])
        harness.generate_until(requests("generate_until", [("a", {"max_gen_toks": 2})]), disable_tqdm=True)
        with pytest.raises(RuntimeError):
            harness._model_call(torch.tensor([1.5]))
    assert (decoder.tokenizer.padding_side, decoder.tokenizer.pad_token) == ("right", None)


def test_without_lm_eval_the_cure_is_named():
    message = "the harness needs the package lm_eval: pip install 'i2cl[harness]'"
    lacking = "import runpy, sys; sys.modules['lm_eval'] = None; "
    _, _, err = finished(f"{lacking}import i2cl.interfaces.harness")
    assert f"I2CLError: {message}" in err
    code, _, err = finished(f"{lacking}runpy.run_module('i2cl.interfaces.harness', run_name='__main__')")
    assert (code, err) == (2, f"error: {message}\n")
