"""Export a task as a standard transformers text classifier: raw text in, label and probability out.

Label scores are linear in the last hidden state. So a task is exactly a ``*ForSequenceClassification`` model:
the injection is folded into its biases, and each label's row of the LM head, divided by the temperature, is a
row of ``score.weight``. The prompt template goes into the tokenizer: a post-processor adds the token ids
before and after the text (https://huggingface.co/docs/tokenizers/api/post-processors).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pydantic
import torch
from jaxtyping import Float
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_problem
from i2cl.export.checkpoint import require_base_of, source_of, write_shards
from i2cl.export.folding import Folding, skeleton
from i2cl.export.golden import TOLERANCES
from i2cl.export.greedy import TEXTS
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Encoder, LabelTokens, label_tokens
from i2cl.models.precision import dtype_name
from i2cl.storage.atomic import new_folder, public_name, require_writable
from i2cl.storage.card import CARD, classifier_card
from i2cl.tasks import Template
from i2cl.version import __version__

CHECK = "i2cl_classifier.json"  # expected answers, which `verify_classifier` compares with
MIN_SIGNAL_TO_NOISE = 100.0  # of a constant direction, below which rounding would move label scores
CAUSAL_LM = "export it as a language model instead (--to hf)"
# Texts whose token ids decide whether the tokenizer holds the template exactly.
PROBES = (
    *TEXTS,
    *("I was charged twice.", "why?", "No!", "42", "3.5 %", "a", "Z", "(see above)", '"quoted"', "it's"),
    *("two  spaces", "line one\nline two", "tab\there", "ends with a colon:", "ellipsis...", "naïve café"),
    *(
        ": x",
        "::",
        ".5 litres",
        "...so",
        "- item",
        "* star",
        "/path/to",
        "' quoted",
        "\n\nlate start",
        "  spaced",
    ),
    *("Привет", "你好。", "مرحبا", "🙂", "x" * 40, "e-mail: a@b.org", "#tag @name", "[1] note", "$5", "-"),
)
TRAILING = ("trailing space ", "trailing newline\n", "trailing spaces  ")


class ClassifierCheck(pydantic.BaseModel):
    """Answers of the injected model, which the exported classifier has to repeat."""

    format_version: int = 1
    i2cl: str = __version__  #: version that wrote it
    labels: list[str]  #: label words, in the order of the classes
    texts: list[str]  #: raw texts
    ids: list[list[int]]  #: token ids of their prompts
    probabilities: list[list[float]]  #: of each label for each text
    tolerance: float  #: largest difference of a probability that is accepted
    left_padding: bool = True  #: whether the model type also answers so in batches padded on the left

    @classmethod
    def from_export(cls, folder: str | Path) -> "ClassifierCheck":
        """Read it from an export. Raises I2CLError if there is none, or a damaged one."""
        path = Path(folder) / CHECK
        if not path.is_file():
            raise I2CLError(f"{str(folder)!r} has no {CHECK}: give a folder that `i2cl export` made")
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (pydantic.ValidationError, UnicodeDecodeError) as error:
            raise I2CLError(
                f"{str(path)!r} cannot be read ({first_problem(error)}): export it again"
            ) from None


@dataclass(frozen=True)
class TemplateTokenizer:
    """A tokenizer that adds a prompt template to each text, with the ids of the prompt for all `PROBES`.

    Attributes:
        tokenizer: encodes a raw text to the ids of its prompt.
        trailing: whether that also holds for texts that end in whitespace.
    """

    tokenizer: PreTrainedTokenizerFast
    trailing: bool


def export_classifier(
    source: Decoder | str | Path,
    injection: Injection,
    output: str | Path,
    *,
    decoder: Callable[[], Decoder] | None = None,
    revision: str | None = None,
    force: bool = False,
    max_shard_size: int | str = "5GB",
) -> TemplateTokenizer:
    """Write a task as a transformers text classifier.

    Args:
        source: the base model: a decoder in memory, or the name of one.
        injection: fitted task, injected at all positions into the residual writers.
        output: a folder that is new or empty; it appears when it is complete.
        decoder: loads the base model, to store answers that `verify_classifier` compares with; None for none.
        revision: of a hub id.
        force: accept other weights of the same shape than those the injection was made on.
        max_shard_size: maximum size of a file, such as ``"5GB"``.

    Returns:
        The tokenizer with the template.

    Raises:
        I2CLError: if the model type or the injection cannot become a classifier, saying why and what to do
            instead; if the folder cannot be used; or if the injection was made on another model.
    """
    path = Path(output)
    require_writable(path, frozenset())
    base = source_of(source, revision)
    encoder = Encoder.of(base.tokenizer)
    labels = linear_labels(injection, encoder)
    folding = Folding(base.config, base.tensors, injection)
    empty, score = classifier_skeleton(folding, len(labels.ids))
    require_base_of(injection, source, base, folding, force=force)
    made = template_tokenizer(base.tokenizer, encoder, injection.task.template, labels.line)
    if made is None:
        raise I2CLError(f"the tokenizer cannot hold this prompt template exactly: {CAUSAL_LM}")
    weight = label_rows(folding, injection, labels, empty)
    config = _config(empty.config, injection, made, base.tokenizer)
    check = None if decoder is None else _answers(decoder(), injection, folding.dtype)
    with new_folder(path, frozenset()) as fresh:
        names = {name: name for name in empty.state_dict() if name != score}
        shapes = {name: folding.shapes[name] for name in names} | {score: weight.shape}

        def tensor(name: str) -> Tensor:
            return weight.to(folding.dtype) if name == score else folding.tensor(name)

        write_shards(fresh, shapes, tensor, folding.dtype, max_shard_size)
        config.architectures = [type(empty).__name__]
        config.dtype = folding.dtype
        config.save_pretrained(fresh)
        made.tokenizer.save_pretrained(fresh)
        if check is not None:
            check = checked(fresh, check)
        base_name = public_name(injection.base.name)
        card = classifier_card(
            injection.description()
            | {"base_model": {**injection.description()["base_model"], "name": base_name}},
            path.resolve().name,
            trailing=made.trailing,
            left_padding=check is None or check.left_padding,
        )
        (fresh / CARD).write_text(card, encoding="utf-8")
    return made


def linear_labels(injection: Injection, encoder: Encoder) -> LabelTokens:
    """Return the label tokens of an injection whose label scores are linear in the last hidden state.

    Raises I2CLError where labels are scored as full sequences.
    """
    task = injection.task
    labels = label_tokens(encoder, task.template, task.labels, injection.scoring)
    if labels.full:
        what = "labels that share their first token are scored as full sequences, which no linear head can do"
        raise I2CLError(f"{what}: refit with scoring='words' in Python, or {CAUSAL_LM}")
    return labels if injection.word_weights is None else labels.weighted(injection.word_weights)


def classifier_skeleton(folding: Folding, labels: int) -> tuple[PreTrainedModel, str]:
    """Return the classifier without memory for its weights, and the name of its score weights.

    Raises I2CLError if transformers has no sequence classifier of the model type, or one whose head is not a
    single linear map without bias.
    """
    config = type(folding.config).from_dict(folding.config.to_dict() | {"num_labels": labels})
    kind = config.model_type
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise I2CLError(f"transformers has no sequence classifier of the type {kind!r}: {CAUSAL_LM}")
    with torch.device("meta"):
        empty = cast("PreTrainedModel", AutoModelForSequenceClassification.from_config(config))
    state = empty.state_dict()
    own = [name for name in state if name not in folding.shapes]
    if len(own) != 1 or state[own[0]].shape[:1] != (labels,):
        raise I2CLError(f"the head of {type(empty).__name__} is not a linear map without bias: {CAUSAL_LM}")
    return empty, own[0]


def label_rows(
    folding: Folding, injection: Injection, labels: LabelTokens, empty: PreTrainedModel
) -> Float[Tensor, "labels d"]:
    """Return the score weights: rows of the LM head for the labels, divided by the temperature, in float32.

    Raises I2CLError if the labels have offsets, such as a label prior, and the final norm cannot hold them.
    """
    causal = skeleton(folding.config)
    head = next(name for name, one in causal.named_modules() if one is causal.get_output_embeddings())
    weight = f"{head}.weight"
    rows = folding.tensor(causal.all_tied_weights_keys.get(weight, weight))[list(labels.read)].float().cpu()
    rows = rows * _logit_scale(folding.config)
    offsets = torch.zeros(len(labels.read))
    if f"{head}.bias" in folding.shapes:
        offsets = folding.tensor(f"{head}.bias")[list(labels.read)].float().cpu()
    mixed, shift = labels.mean(rows.T).T, labels.mean(offsets)
    if injection.label_bias is not None:
        shift = shift + torch.tensor(injection.label_bias)
    shift = shift - shift.mean()  # a softmax ignores what all labels share
    if shift.abs().max() > 0:
        mixed = mixed + shift[:, None] * constant_direction(folding, empty)
    return mixed / injection.temperature


def _logit_scale(config: PreTrainedConfig) -> float:
    """Factor between the LM head's output and the logits."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )


def constant_direction(folding: Folding, empty: PreTrainedModel) -> Float[Tensor, " d"]:
    """Return a vector whose product with every last hidden state is one.

    The output of a final layer norm is ``w * n + b``, where the entries of ``n`` sum to zero. So ``1 / w``
    times it is the sum of ``b / w``, whatever the text. An RMS norm has no such direction.
    """
    norms = [name for name, module in empty.base_model.named_modules() if type(module) is torch.nn.LayerNorm]
    blocks = ARCHITECTURES[folding.source_config.model_type].layers
    final = [name for name in norms if not name.startswith(f"{blocks}.")][-1:]
    for name in final:
        scale = folding.tensor(f"{empty.base_model_prefix}.{name}.weight").double().cpu()
        bias_name = f"{empty.base_model_prefix}.{name}.bias"
        bias = folding.tensor(bias_name).double().cpu() if bias_name in folding.shapes else scale * 0
        total = (bias / scale).sum()
        # rounding of the d terms, which have to cancel but for this sum
        noise = len(scale) ** 0.5 * torch.finfo(folding.dtype).eps
        if scale.abs().min() > 0 and total.abs() > MIN_SIGNAL_TO_NOISE * noise:
            return (1 / scale / total).float()
    what = "labels have a prior or offsets, and the head of a classifier has no bias to hold them"
    raise I2CLError(f"{what}: leave the prior out with --drop-prior, or {CAUSAL_LM}")


def template_tokenizer(
    tokenizer: PreTrainedTokenizerBase, encoder: Encoder, template: Template, line: str
) -> TemplateTokenizer | None:
    """Put a template into a tokenizer; None if no form gives the ids of the prompt for all `PROBES`.

    Tries to encode the text alone, then with the whitespace of the template around it, between the ids of the
    rest of the template.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None

    def prompts(texts: Sequence[str]) -> list[Ids]:
        return encoder([template.query(encoder.literal(text)) + line for text in texts])

    def equal(made: PreTrainedTokenizerFast, texts: Sequence[str]) -> bool:
        return [tuple(ids) for ids in made(list(texts))["input_ids"]] == prompts(texts)

    ending = template.middle + line
    # most tokenizers join a space to the next word
    leads = (template.head[len(template.head.rstrip()) :], "")
    tails = ("", ending[: len(ending) - len(ending.lstrip())])
    for lead, tail in dict.fromkeys((lead, tail) for tail in tails for lead in leads):
        inner = _with_whitespace(backend, lead, tail)
        made = _with_ids(inner, prompts(PROBES[:1])[0], PROBES[0])
        if made is not None and equal(fast := _fast(made, tokenizer), PROBES):
            return TemplateTokenizer(fast, trailing=equal(fast, TRAILING))
    return None


def _with_whitespace(backend: Tokenizer, lead: str, tail: str) -> Tokenizer:
    """A copy of a tokenizer that puts whitespace before and after each text, and knows no special tokens."""
    made = Tokenizer.from_str(backend.to_str())
    made.no_padding()
    made.no_truncation()
    made.encode_special_tokens = True
    steps = [made.normalizer] if made.normalizer is not None else []
    if tail:
        steps.insert(0, normalizers.Replace(Regex(r"\z"), tail))
    if lead:
        steps.insert(0, normalizers.Prepend(lead))
    if steps:
        made.normalizer = normalizers.Sequence(steps)
    return made


def _with_ids(inner: Tokenizer, prompt: Ids, text: str) -> Tokenizer | None:
    """The tokenizer with the prompt's ids around those of the text; None if these are not part of them."""
    ids = tuple(inner.encode(text, add_special_tokens=False).ids)
    starts = range(len(prompt) - len(ids) + 1)
    start = next((one for one in starts if prompt[one : one + len(ids)] == ids), None)
    if start is None:
        return None
    before, after = prompt[:start], prompt[start + len(ids) :]
    parts, special = ["$A:0"], []
    for name, piece in (("i2cl_before", before), ("i2cl_after", after)):
        if piece:
            tokens = [inner.id_to_token(one) for one in piece]
            special.append({"id": name, "ids": list(piece), "tokens": tokens})
            parts.insert(0 if name == "i2cl_before" else len(parts), f"{name}:0")
    inner.post_processor = TemplateProcessing(single=" ".join(parts), special_tokens=special)
    return inner


def _fast(backend: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers, with the special tokens of the base's."""
    known = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        padding_side="right",
        truncation_side="right",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **known,
    )


def _config(
    config: PreTrainedConfig, injection: Injection, made: TemplateTokenizer, base: PreTrainedTokenizerBase
) -> Any:
    """Config of the classifier; its tokenizer gets a padding token."""
    tokenizer: Any = made.tokenizer
    length = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, length)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = base.eos_token or base.unk_token or base.bos_token
    words = injection.task.labels
    fields: dict[str, Any] = {
        "id2label": dict(enumerate(words)),
        "label2id": {word: place for place, word in enumerate(words)},
        "problem_type": "single_label_classification",
        "pad_token_id": tokenizer.pad_token_id,
    }
    return type(config).from_dict(config.to_dict() | fields)


def _answers(decoder: Decoder, injection: Injection, dtype: torch.dtype) -> ClassifierCheck:
    """Run the injected model on `TEXTS`."""
    questions = injection.questions(decoder)
    scores = injection.scores(decoder, TEXTS, force=True)
    name = dtype_name(dtype)
    return ClassifierCheck(
        labels=list(injection.task.labels),
        texts=list(TEXTS),
        ids=[list(ids) for ids in questions.queries(TEXTS)],
        probabilities=scores.double().softmax(-1).tolist(),
        tolerance=TOLERANCES.get(name, max(TOLERANCES.values())),
    )


@dataclass(frozen=True)
class ClassifierVerification:
    """How an exported classifier compares with the injected model.

    Attributes:
        labels: expected and found label of each text.
        worst: largest difference of a probability.
        tolerance: that is accepted.
        retokenized: texts whose token ids differ.
    """

    labels: tuple[tuple[str, str], ...]
    worst: float
    tolerance: float
    retokenized: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether labels and token ids agree and no probability differs by more than the tolerance."""
        same = all(one == other for one, other in self.labels) and not self.retokenized
        return same and self.worst <= self.tolerance


def verify_classifier(
    folder: str | Path, *, device: str | None = None, tolerance: float | None = None
) -> ClassifierVerification:
    """Compare a classifier with the answers stored in it, through transformers' pipeline.

    Texts run in one batch, padded on the right and, where the model type allows it, then on the left; the
    worse outcome counts. Raises I2CLError if the folder is not such an export.
    """
    check = ClassifierCheck.from_export(folder)
    run = _pipeline(folder, device)
    sides = ("right", "left") if check.left_padding else ("right",)
    outcomes = [_compare(run, check, side, tolerance) for side in sides]
    return max(outcomes, key=lambda outcome: (not outcome.passed, outcome.worst))


def _pipeline(folder: str | Path, device: str | None = None) -> Any:
    from transformers import pipeline

    return pipeline("text-classification", model=str(folder), device=device or "cpu", dtype=torch.float32)


def _compare(
    run: Any, check: ClassifierCheck, padding_side: str, tolerance: float | None = None
) -> ClassifierVerification:
    """Run the texts of a check in one batch."""
    run.tokenizer.padding_side = padding_side
    ids = [list(one) for one in run.tokenizer(check.texts)["input_ids"]]
    answers = run(check.texts, top_k=None, batch_size=len(check.texts), function_to_apply="softmax")
    found = torch.tensor([[_score_of(answer, word) for word in check.labels] for answer in answers])
    expected = torch.tensor(check.probabilities)
    worst = float((found - expected).abs().max().nan_to_num(math.inf))
    encoded = zip(check.texts, check.ids, ids, strict=True)
    best, answered = ([check.labels[at] for at in one.argmax(-1)] for one in (expected, found))
    return ClassifierVerification(
        labels=tuple(zip(best, answered, strict=True)),
        worst=worst,
        tolerance=check.tolerance if tolerance is None else tolerance,
        retokenized=tuple(text for text, mine, theirs in encoded if mine != theirs),
    )


def _score_of(answer: Sequence[Mapping[str, Any]], label: str) -> float:
    return next((float(one["score"]) for one in answer if one["label"] == label), math.nan)


def checked(folder: Path, check: ClassifierCheck) -> ClassifierCheck:
    """Store a check in a written classifier, with whether it also holds for batches padded on the left.

    Some model types count positions from the padding. Raises I2CLError if the classifier differs from the
    injected model in batches padded on the right.
    """
    run = _pipeline(folder)
    outcome = _compare(run, check, "right")
    if not outcome.passed:
        raise I2CLError(
            f"the classifier differs from the injected model by {outcome.worst:.1e} in a probability "
            f"(tolerance {check.tolerance:.0e}), so it was not written: {CAUSAL_LM}"
        )
    check = check.model_copy(update={"left_padding": _compare(run, check, "left").passed})
    (folder / CHECK).write_text(check.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return check


def is_classifier(folder: str | Path) -> bool:
    """Whether a folder is an exported classifier."""
    return (Path(folder) / CHECK).is_file()
