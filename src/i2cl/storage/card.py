"""The model card of an artefact: a README.md with the hub's metadata in front.

Source: https://huggingface.co/docs/hub/model-cards and
https://huggingface.co/docs/huggingface_hub/guides/model-cards.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from i2cl.storage import layout
from i2cl.storage.atomic import public_name
from i2cl.version import __version__

CARD = layout.CARD
BUNDLED = {"reference", "smollm2"}  # names of this package, which the hub may give to other models
TAGS = ["i2cl", "implicit-in-context-learning", "activation-steering", "few-shot"]
TASK_TYPE = "text-classification"
# Measured values of `Injection.metrics`, by what the hub calls them: type and name.
METRICS = {"accuracy": ("accuracy", "Accuracy"), "macro_f1": ("f1", "Macro-F1")}
# What has to be known of a method that `Injection.worth` compares with.
TOGETHER = "zero_shot+batch_calibration needs the whole batch: it subtracts the mean scores of the batch."
IMBALANCE = 1.5  # recall per label is reported if a label has this many times the rows of another
MAX_RECALLS = 20  # labels whose recall is reported, lowest first

# What `Injection.worth` was measured on, by its split.
SCORED = {
    "test": "test rows",
    "train": "training rows that are not demonstrations",
    "demonstrations": "labelled rows by cross-validation",
}

SHOWN = ("name", "labels", "template", "separator", "opening")  # what a card tells of a task
SET = ("extraction", "calibration", "positions", "scoring", "seed")  # and of its fit

TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ what }} for each layer and residual writer of {{ base }}, which then sorts a
text into {{ classes }} classes at the cost of a prompt without examples. Method:
[Implicit In-context Learning](https://arxiv.org/abs/2405.14660) (ICLR 2025){{ variant }}; made with i2cl
{{ version }}.

## Use

{{ python }}

{{ console }}
{% if local %}
The base model was in a local folder of this name: give the path of yours, and `--model PATH` to
`i2cl predict`.
{% endif %}
## Task

{{ task }}

## Base model

{{ base_model }}

An injection runs on this model alone: `require_base` compares the fingerprints of weights and tokenizer,
and the configuration that `injection.json` holds.

## Calibration

{{ demonstrations }} demonstrations, whose texts are not part of this repository. {{ loss }}

{{ settings }}

## Results

{{ results }}

## Make it again

{{ again }}
"""

EXPORT = """---
{{ card_data }}
---

# {{ title }}

{{ base }} with the task in its weights or in an adapter, by [Implicit In-context
Learning](https://arxiv.org/abs/2405.14660); made with i2cl {{ version }}. It sorts a text into {{ labels }}.

## Use

{{ usage }}
"""


def export_card(description: Mapping[str, Any], usage: str, library: str) -> str:
    """Return the README.md of an exported language model.

    Args:
        description: of the artefact, with the base model's public name.
        usage: how to run it, in Markdown.
        library: that loads it, by the hub's name.
    """
    task, base = description["task"], description["base_model"]["name"]
    data = _metadata({**description, "metrics": {}}, base)
    data.library_name, data.pipeline_tag = library, "text-generation"
    if data.base_model and library != "peft":
        data["base_model_relation"] = "finetune"
    return _filled(
        EXPORT,
        data,
        title=_md(f"{task['title'] or task['name']}, exported"),
        base=_inline(base),
        labels=", ".join(map(_inline, task["labels"])),
        usage=usage,
    )


CLASSIFIER = """---
{{ card_data }}
---

# {{ title }}

A text classifier: {{ base }}, which sorts a text into {{ labels }}. Its weights hold a task that
[i2cl](https://arxiv.org/abs/2405.14660) {{ version }} learned from a few labelled examples.

## Use

{{ python }}

{{ note }}
"""


def classifier_card(description: Mapping[str, Any], name: str, notes: Sequence[str] = ()) -> str:
    """Return the README.md of an exported text classifier.

    Args:
        description: of the artefact, with the base model's public name.
        name: folder or hub id that the classifier will be loaded from.
        notes: sentences on how to use it.
    """
    task, base = description["task"], description["base_model"]["name"]
    data = _metadata({**description, "metrics": {}}, base)
    data.library_name = "transformers"
    if data.base_model:
        data["base_model_relation"] = "finetune"
    code = f"""from transformers import pipeline

classify = pipeline("text-classification", model={json.dumps(name)})
print(classify(["a text to classify"], truncation=True))"""
    return _filled(
        CLASSIFIER,
        data,
        title=_md(f"{task['title'] or task['name']}, a text classifier"),
        base=_inline(base),
        labels=", ".join(map(_inline, task["labels"])),
        python=fenced(code, "python"),
        note="\n".join(notes),
    )


def model_card(description: Mapping[str, Any], name: str) -> str:
    """The text of a README.md.

    Paths are shortened to their last part, so that the card tells nothing about the machine it was made on.

    ``description``: of an artefact, as `i2cl.Injection.description` gives it; ``name``: hub id or folder that
    the artefact will be loaded from.
    """
    base, task, command = description["base_model"], description["task"], description.get("command")
    shown = public_name(base["name"])
    anchored = description["calibration"].get("method") == "anchored"
    call = "`i2cl.anchor`" if anchored else "`i2cl.extract` and `i2cl.calibrate`"
    made = f"Made in Python with {call} (seed {description['seed']}): no command does it."
    return _filled(
        TEMPLATE,
        _metadata(description, shown),
        title=_md(f"I2CL: {task['title'] or task['name']}"),
        what="A vector" if anchored else "A context vector and two coefficients",
        variant=", anchored: fitted around the plain model among the label words" if anchored else "",
        base=_inline(shown),
        classes=len(task["labels"]),
        python=_python(name, shown, base["revision"]),
        console=fenced(f"i2cl predict {shlex.quote(name)} texts.txt", "console"),
        local=shown != base["name"],
        task=_json({key: task[key] for key in SHOWN if key in task}),
        base_model=_json({key: base[key] for key in base if key != "config"} | {"name": shown}),
        demonstrations=description["demonstrations"],
        loss="\n\n".join(_calibrated(description)),
        settings=_json({key: description[key] for key in SET}),
        results="\n\n".join(_results(description)),
        again=fenced(command, "console") if command else made,
    )


def _filled(template: str, data: ModelCardData, **texts: Any) -> str:
    card = ModelCard.from_template(data, template_str=template, version=__version__, **texts)
    return f"{card}\n".encode(errors="backslashreplace").decode()  # of a folder whose name is not UTF-8


def _metadata(description: Mapping[str, Any], base: str) -> ModelCardData:
    task, metrics = description["task"], description.get("metrics", {})
    public = base not in BUNDLED and base == description["base_model"]["name"]
    try:
        validate_repo_id(base)
    except HFValidationError:
        public = False
    results = [
        EvalResult(
            task_type=TASK_TYPE,
            dataset_type=task["name"],
            dataset_name=task["title"] or task["name"],
            dataset_split=description.get("worth", {}).get("split", "test"),
            metric_type=kind,
            metric_name=called,
            metric_value=round(metrics[key], 4),
        )
        for key, (kind, called) in METRICS.items()
        if key in metrics
    ]
    return ModelCardData(
        base_model=base if public else None,
        base_model_relation="adapter" if public else None,
        library_name="i2cl",
        pipeline_tag=TASK_TYPE,
        tags=TAGS,
        model_name=f"i2cl-{task['name']}" if results else None,
        eval_results=results or None,
    )


def _python(name: str, base: str, revision: str | None) -> str:
    at = f", revision={json.dumps(revision)}" if revision else ""
    code = f"""from i2cl import Decoder, Injection

injection = Injection.from_pretrained({json.dumps(name)})
decoder = Decoder.from_pretrained({json.dumps(base)}{at})
injection.require_base(decoder)
print(injection.predict(decoder, ["a text to classify"]))"""
    return fenced(code, "python")


def _calibrated(description: Mapping[str, Any]) -> Iterator[str]:
    """Paragraphs on the loss, and on the temperature and the label bias where there are any."""
    if losses := description["loss"]:
        course = f"{losses[0]:.3f} -> {losses[-1]:.3f} nats"
        yield f"Calibration loss: {course}."
    else:
        yield "The coefficients were not calibrated."
    if description.get("word_weights"):
        yield "A label is scored by its words; the fit learned how much each counts (`word_weights`)."
    if "encoder" in description:
        encoder = _md(public_name(description["encoder"]))
        said = f"The sentence encoder {encoder} runs beside the model, on each text alone"
        yield f"{said}; its log-odds, `encoder_weights`, are added to the labels' log-probabilities."
        yield "What runs it: `pip install 'i2cl[embeddings]'`."
    if "temperature" in description:
        divided = "Log-probabilities among the labels are divided by the `temperature`"
        yield f"{divided}, {description['temperature']:g}; this changes no answer."
    if "label_bias" in description:
        prior = description["calibration"].get("label_prior")
        more = f" {_md(prior_words(description['task']['labels'], prior))}" if prior else ""
        yield f"`label_bias` is added to the log-probabilities among the labels.{more}"


def prior_words(labels: Sequence[str], prior: Mapping[str, Any]) -> str:
    """What a label prior was measured on and takes for granted, from what settings tell of it."""
    frequent = "equally frequent"
    if prior["prior"] is not None:
        shares = zip(labels, prior["prior"], strict=True)
        frequent = "as frequent as " + ", ".join(f"{word} {share:g}" for word, share in shares)
    return f"Measured on {prior['texts']} texts without labels; classes are taken to be {frequent}."


def confidence_words(temperature: float, scores: Mapping[str, float]) -> str:
    """The temperature, and the four metrics of `i2cl.experiments.confidence` at it."""
    names = {"log_loss": "log-loss", "brier": "Brier", "ece": "ECE", "aurc": "AURC"}
    numbers = ", ".join(f"{name} {scores[key]:.3f}" for key, name in names.items())
    return f"temperature {temperature:.2f} (fitted on these rows), {numbers}"


def recall_words(worth: Mapping[str, Any]) -> str:
    """Recall per label, lowest first; empty if labels are about equally frequent."""
    support = {label: rows for label, rows in worth["support"].items() if rows}
    if not support or max(support.values()) < IMBALANCE * min(support.values()):
        return ""
    lowest = sorted(support, key=lambda label: worth["recall"][label])[:MAX_RECALLS]
    shown = ", ".join(f"{label} {worth['recall'][label]:.2f} ({support[label]} rows)" for label in lowest)
    more = f" and {len(support) - MAX_RECALLS} more labels" if len(support) > MAX_RECALLS else ""
    return f"Recall per label: {shown}{more}"


def _confusion(worth: Mapping[str, Any]) -> str:
    """The confusion matrix as a Markdown table: true labels in rows, predicted ones in columns."""
    labels = [_md(label) for label in worth["support"]]
    lines = ["| true \\ predicted |" + "".join(f" {label} |" for label in labels)]
    lines += ["|---|" + "---:|" * len(labels)]
    for label, counts in zip(labels, worth["confusion"], strict=True):
        lines.append(f"| {label} |" + "".join(f" {count} |" for count in counts))
    return "\n".join(lines)


def selection_words(selection: Mapping[str, Any]) -> str:
    """The confidence threshold for a target accuracy, or how many rows it would take to find one."""
    target, rows = f"{100 * selection['target']:g} %", selection["rows"]
    if "threshold" in selection:
        return (
            f"{selection['threshold']:.6g} for {target} accuracy (at 90 % confidence from {rows} rows, where "
            f"{100 * selection['accuracy']:.1f} % of the answers above it are correct); "
            f"{100 * selection['coverage']:.0f} % of the texts reach it"
        )
    needed = selection["needed"]
    hint = (
        f"about {needed:,} rows would show one" if needed else "the most confident answers are less accurate"
    )
    return f"none for {target} accuracy from {rows} rows; {hint}"


def _results(description: Mapping[str, Any]) -> Iterator[str]:
    """Paragraphs on what was measured, with the verdict."""
    metrics, worth = description.get("metrics", {}), description.get("worth", {})
    figures = [f"{called} {metrics[key]:.3f}" for key, (_, called) in METRICS.items() if key in metrics]
    rows = f" on {metrics['n']} {SCORED[worth.get('split', 'test')]}" if "n" in metrics else ""
    if figures:
        yield f"{', '.join(figures)}{rows}."
    if not worth:
        if not metrics:
            yield "Not measured (`i2cl fit` does where labelled rows remain)."
        return
    yield f"Verdict: {worth['verdict']}."
    yield f"Accuracy on {worth['rows']} {SCORED[worth['split']]}:"
    ms = "milliseconds_per_query"  # which a server that does other work meanwhile does not measure
    lines = ["| method | accuracy | 95 % interval | macro-F1 | fit s | ms/query | bytes |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {name} | {one['accuracy']:.3f} | {one['low']:.3f} to {one['high']:.3f} "
        f"| {one['macro_f1']:.3f} | {one['fit_seconds']:.1f} | {f'{one[ms]:.2f}' if ms in one else ''} "
        f"| {one['cached_bytes']} |"
        for name, one in worth["methods"].items()
    ]
    lines += [f"| {name} | not run: {_md(why)} | | | | | |" for name, why in worth["not_run"].items()]
    yield "\n".join(lines)
    if any("batch_calibration" in name for name in worth["methods"]):
        yield TOGETHER
    if recall := recall_words(worth):
        yield f"{recall}."
    if len(worth["support"]) <= MAX_RECALLS:
        yield f"Confusion matrix:\n\n{_confusion(worth)}"
    yield f"Calibration: {confidence_words(description.get('temperature', 1.0), worth['confidence'])}."
    if worth.get("selection"):
        yield f"Confidence threshold: {selection_words(worth['selection'])}."


def _md(text: str) -> str:
    return re.sub(r"[\\`*_|\[\]<&]", r"\\\g<0>", " ".join(text.split()))


def _inline(text: str) -> str:
    return f"`{text.replace('`', ' ')}`"


def _json(value: Mapping[str, Any]) -> str:
    return fenced(json.dumps(value, indent=2, ensure_ascii=False), "json")


def fenced(text: str, language: str) -> str:
    """A code block, its fence longer than any in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}"
