"""Export a task as a standard transformers text classifier: raw text in, label and probability out.

Label scores are linear in the last hidden state. So a task is exactly a ``*ForSequenceClassification`` model:
the injection is folded into its biases, and each label's row of the LM head, divided by the temperature, is a
row of ``score.weight``. The prompt template goes into the tokenizer: a post-processor adds the token ids
before and after the text (https://huggingface.co/docs/tokenizers/api/post-processors).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

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

from i2cl.core.injection import DEFAULT_THRESHOLD, Injection
from i2cl.errors import I2CLError
from i2cl.export.folding import MAX_SHARD_SIZE, FoldedStructure, Folding, lm_head_name
from i2cl.export.golden import TEXTS, Golden, make_golden
from i2cl.export.verify import make_pipeline, verify_classifier
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import PromptEncoder
from i2cl.storage.atomic import new_folder, public_name, require_writable
from i2cl.storage.card import classifier_card
from i2cl.storage.layout import CARD
from i2cl.tasks import Template

USE_CAUSAL_LM = "export it as a language model instead (--to causal-lm)"
DROP_PRIOR = f"leave the prior out with --drop-prior, or {USE_CAUSAL_LM}"
CHECKED_TEXTS = 5  # golden texts that an export is compared with before it is written
MIN_SIGNAL_TO_NOISE = 100.0  # of a constant direction; below it, rounding would change label scores
# Scales of the layer that computes label scores with a prior (`add_prior_layer`), powers of two.
GATE, SCORE_SCALE, CONSTANT = 2.0**5, 2.0**28, 2.0**16
# Texts whose token ids show whether the tokenizer holds the template exactly.
_STARTS = ": x|::|.5 litres|...so|- item|* star|/path/to|' quoted|\n\nlate start|  spaced|-|[1] note|$5"
_ENDS = 'I was charged twice.|why?|No!|42|3.5 %|a|Z|(see above)|"quoted"|it\'s|ends with a colon:|ellipsis...'
_OTHER = (
    "two  spaces|line one\nline two|tab\there|naïve café|Привет|你好。|مرحبا|🙂|e-mail: a@b.org|#tag @name"
)
PROBES = (*TEXTS, *_STARTS.split("|"), *_ENDS.split("|"), *_OTHER.split("|"), "x" * 40)
TRAILING = ("trailing space ", "trailing newline\n", "trailing spaces  ")


def export_classifier(
    decoder: Decoder,
    injection: Injection,
    output: str | Path,
    *,
    golden: bool = True,
    force: bool = False,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write a task as a transformers text classifier.

    Args:
        decoder: the base model, which is not changed.
        injection: fitted task, which edits the sublayers at all positions.
        output: a folder that is new or empty; it appears when it is complete.
        golden: store golden answers for `verify`, and compare the classifier with some of them before it is
            written. They are computed in float32.
        force: accept other weights of the same shape than those the injection was fitted on.
        dtype: dtype of the weights; default: the base model's.

    Returns:
        Sentences on how to use it, which its README.md has too; none in most cases.

    Raises:
        I2CLError: if the task cannot be exported, with the reason and an alternative; if the folder cannot be
            used; or if the injection was fitted on another model.
    """
    path = Path(output)
    require_writable(path, frozenset())
    folding = Folding(decoder, injection, dtype=dtype, force=force, label_scores=False)
    model, tensors = add_classification_head(folding, injection)
    tokenizer = TemplateTokenizer(decoder.tokenizer, injection.task.template, folding.labels.query_suffix)
    _complete_config(model.config, injection, tokenizer.tokenizer, decoder.tokenizer)
    notes = []
    if not tokenizer.encodes(TRAILING):
        notes += ["Remove whitespace at the end of texts: it is encoded differently than by i2cl."]
    if len(tensors) > 1:
        notes += ["Run it in float32 or bfloat16: float16 overflows in its last layer."]
    if (thresholds := injection.llm_alone().head.thresholds) and set(thresholds) != {DEFAULT_THRESHOLD}:
        listed = ", ".join(
            f"{word} {threshold:.4g}"
            for word, threshold in zip(injection.task.labels, thresholds, strict=True)
        )
        notes += [f"Give a text every label whose probability reaches its threshold: {listed}."]
    answers = make_golden(decoder, injection).of_export("classifier", folding.dtype) if golden else None
    classifier = folding.build(AutoModelForSequenceClassification, model.config, tensors)
    if answers is not None:
        answers = _checked(make_pipeline(classifier.float(), tokenizer.tokenizer), answers)
        if not answers.left_padding:
            notes += ["Pad batches on the right, as its tokenizer does: this model type counts padding."]
    with new_folder(path, frozenset()) as fresh:
        classifier.to(folding.dtype).save_pretrained(fresh, max_shard_size=MAX_SHARD_SIZE)
        tokenizer.tokenizer.save_pretrained(fresh)
        if answers is not None:
            answers.write(fresh)
        description = injection.description()
        base = description["base_model"] | {"name": public_name(injection.base.name)}
        card = classifier_card(description | {"base_model": base}, path.resolve().name, notes)
        (fresh / CARD).write_text(card, encoding="utf-8")
    return notes


def _checked(classify: Any, golden: Golden) -> Golden:
    """Return golden answers with whether they hold for batches padded on the left.

    Some model types count positions from the padding. Raises I2CLError if the classifier differs from the
    injected model in a batch padded on the right.
    """
    golden_texts = golden.first(CHECKED_TEXTS)
    outcome = verify_classifier(classify, golden_texts, ["right"])
    if not outcome.passed:
        raise I2CLError(
            f"the classifier differs from the injected model by {outcome.worst:.1e} in a probability "
            f"(tolerance {golden.tolerance:.0e}), so it was not written: {USE_CAUSAL_LM}"
        )
    return golden.model_copy(
        update={"left_padding": verify_classifier(classify, golden_texts, ["left"]).passed}
    )


def add_classification_head(
    folding: Folding, injection: Injection
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Turn the LM head's rows of the labels into a classification head.

    Returns:
        The classifier on the meta device, and its tensors that the folded model does not have, in float32.

    Raises:
        I2CLError: if transformers has no sequence classifier of the model type whose head is a linear map
            without bias, or if the head cannot hold the label prior.
    """
    model, new = empty_classifier(folding, len(injection.task.labels))
    rows, offsets = label_rows(folding, injection)
    if offsets.abs().max() > 0:
        direction = constant_direction(folding, model)
        if direction is None:
            # small scores are more accurate; a softmax ignores what all labels share
            rows = rows if injection.task.multi_label else rows - rows.mean(0)
            return add_prior_layer(folding, rows, offsets)
        rows = rows + offsets[:, None] * direction
    return model, {new: rows}


def empty_classifier(structure: FoldedStructure, labels: int) -> tuple[PreTrainedModel, str]:
    """Return the classifier without memory for its weights, and the name of its head's weights.

    Raises I2CLError if transformers has no sequence classifier of the model type whose head is a linear map
    without bias.
    """
    model = _empty_classifier(structure.config, labels)
    new = {name: tensor for name, tensor in model.state_dict().items() if name not in structure.shapes}
    if len(new) != 1 or next(iter(new.values())).shape[:1] != (labels,):
        problem = f"the head of {type(model).__name__} is not a linear map without bias"
        raise I2CLError(f"{problem}: {USE_CAUSAL_LM}")
    return model, next(iter(new))


def _empty_classifier(config: PreTrainedConfig, labels: int, extra_layers: int = 0) -> PreTrainedModel:
    names = {index: f"LABEL_{index}" for index in range(labels)}  # transformers warns of num_labels alone
    fields = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    fields |= {"num_hidden_layers": config.num_hidden_layers + extra_layers}
    config = type(config).from_dict(config.to_dict() | fields)
    kind = config.model_type
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise I2CLError(f"transformers has no sequence classifier of the type {kind!r}: {USE_CAUSAL_LM}")
    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForSequenceClassification.from_config(config))


def label_rows(
    folding: Folding, injection: Injection
) -> tuple[Float[Tensor, "labels d"], Float[Tensor, " labels"]]:
    """Return weights and offsets of the label scores, divided by the temperature, in float32.

    Offsets come from a label prior, from the thresholds of a multi-label task, or from biases of the LM head.
    With one label per text they sum to zero, since a softmax ignores what all labels share.
    """
    head, labels = lm_head_name(folding.model), folding.labels
    read = list(labels.tokens)
    weight = f"{head}.weight"
    rows = folding.tensor(folding.model.all_tied_weights_keys.get(weight, weight))[read].float().cpu()
    offsets = torch.zeros(len(read))
    if f"{head}.bias" in folding.shapes:
        offsets = folding.tensor(f"{head}.bias")[read].float().cpu()
    # logits are the LM head's output times this factor
    scale, divisor = (getattr(folding.config, name, None) for name in ("logit_scale", "logits_scaling"))
    rows = rows * float(scale or 1.0) / float(divisor or 1.0)
    rows, offsets = labels.scores_from_tokens(rows.T).T, labels.scores_from_tokens(offsets)
    if injection.label_bias is not None:
        offsets = offsets + torch.tensor(injection.label_bias)
    if not injection.task.multi_label:
        offsets = offsets - offsets.mean()
    return rows / injection.temperature, offsets / injection.temperature


def constant_direction(folding: Folding, model: PreTrainedModel) -> Float[Tensor, " d"] | None:
    """Return a vector whose product with every last hidden state is one, or None.

    The output of a final LayerNorm is ``w * n + b``, where the entries of ``n`` sum to zero. So its product
    with ``1 / w`` is the sum of ``b / w``, whatever the text. An RMSNorm has no such direction.
    """
    norms = [name for name, module in model.named_modules() if type(module) is torch.nn.LayerNorm]
    blocks = ARCHITECTURES[folding.source_config.model_type].layers
    for name in [name for name in norms if f".{blocks}." not in name][-1:]:
        scale = folding.tensor(f"{name}.weight").double().cpu()
        bias = (
            folding.tensor(f"{name}.bias").double().cpu() if f"{name}.bias" in folding.shapes else 0 * scale
        )
        total = (bias / scale).sum()
        # rounding error of d terms that cancel except for this sum
        noise = len(scale) ** 0.5 * torch.finfo(folding.dtype).eps
        if scale.abs().min() > 0 and total.abs() > MIN_SIGNAL_TO_NOISE * noise:
            return (1 / scale / total).float()
    return None


def add_prior_layer(
    folding: Folding, rows: Float[Tensor, "labels d"], offsets: Float[Tensor, " labels"]
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a classifier with offsets for a Llama, whose RMSNorm has no constant direction.

    An extra layer computes the label scores: its MLP gets the normalized hidden state ``n``, its gate is
    constant, and it writes ``SCORE_SCALE * (rows @ n, CONSTANT)`` to the residual stream. The
    scale makes the rest of the stream negligible, and the constant dominates the scores, so that it alone
    determines the final RMSNorm. The normalized stream then holds the scores and a constant, which the score
    weights scale back. The relative error is about 1e-6 (see the tests).

    Raises I2CLError if the model is not a Llama in float32 or bfloat16, or has too many labels for its width.
    """
    config: Any = folding.config
    count, width = rows.shape
    room = min(config.intermediate_size, width - 1) if config.model_type == "llama" else 0
    if room < count or folding.dtype == torch.float16:
        problem = "labels have a prior or offsets, and this model's classification head cannot hold them"
        raise I2CLError(f"{problem}: {DROP_PRIOR}")
    model = _empty_classifier(config, count, extra_layers=1)
    layer = f"model.layers.{config.num_hidden_layers}"
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    new = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in folding.shapes}
    new["model.norm.weight"] = torch.ones(width)
    new[f"{layer}.input_layernorm.weight"] = torch.ones(width)
    new[f"{layer}.post_attention_layernorm.weight"] = folding.tensor("model.norm.weight").float().cpu()
    new[f"{layer}.mlp.gate_proj.bias"][:count] = GATE
    new[f"{layer}.mlp.up_proj.weight"][:count] = rows
    new[f"{layer}.mlp.down_proj.weight"][range(count), range(count)] = SCORE_SCALE / GATE
    new[f"{layer}.mlp.down_proj.bias"][count] = SCORE_SCALE * CONSTANT
    root = width**0.5
    new["score.weight"][range(count), range(count)] = CONSTANT / root
    new["score.weight"][:, count] = offsets / root
    return model, new


class TemplateTokenizer:
    """A tokenizer that adds a prompt template to each text.

    Tries to encode the text alone, then with the template's whitespace around it, between the ids of the rest
    of the template.

    Args:
        tokenizer: tokenizer of the base model.
        template: template of the task.
        line: what the prompts have after the template's query (`LabelTokens.query_suffix`).

    Attributes:
        tokenizer: the tokenizer with the template added.

    Raises:
        I2CLError: if no form gives the ids of the prompt for all `PROBES`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template, line: str = "") -> None:
        self._encoder, self._template, self._line = PromptEncoder.of(tokenizer), template, line
        base = getattr(tokenizer, "backend_tokenizer", None)
        (prompt,) = self._prompts(PROBES[:1])
        inner = () if base is None else _inner_tokenizers(base, template.head, template.middle + line)
        for backend in inner:
            with_template = _with_ids(backend, prompt, PROBES[0])
            if with_template is not None:
                self.tokenizer = _fast(with_template, tokenizer)
                if self.encodes(PROBES):
                    return
        raise I2CLError(f"the tokenizer cannot hold this prompt template exactly: {USE_CAUSAL_LM}")

    def encodes(self, texts: Sequence[str]) -> bool:
        """Return whether it encodes raw texts to the ids of their prompts."""
        return [tuple(ids) for ids in self.tokenizer(list(texts))["input_ids"]] == self._prompts(texts)

    def _prompts(self, texts: Sequence[str]) -> list[Ids]:
        query, escape = self._template.query, self._encoder.escape
        return self._encoder([query(escape(text)) + self._line for text in texts])


def _inner_tokenizers(backend: Tokenizer, before: str, after: str) -> Iterator[Tokenizer]:
    """Yield copies that put whitespace of the template around each text and know no special tokens."""
    leading = before[len(before.rstrip()) :]
    trailing = after[: len(after) - len(after.lstrip())]
    # first with a leading space, which most tokenizers join to the next word
    for lead, tail in dict.fromkeys((lead, tail) for tail in ("", trailing) for lead in (leading, "")):
        inner = Tokenizer.from_str(backend.to_str())
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        steps: list[normalizers.Normalizer] = [normalizers.Prepend(lead)] if lead else []
        steps += [normalizers.Replace(Regex(r"\z"), tail)] if tail else []
        steps += [inner.normalizer] if inner.normalizer is not None else []
        if steps:
            inner.normalizer = normalizers.Sequence(steps)
        yield inner


def _with_ids(inner: Tokenizer, prompt: Ids, text: str) -> Tokenizer | None:
    """Add the prompt's ids around those of the text; None if the text's ids are not part of the prompt's."""
    ids = tuple(inner.encode(text, add_special_tokens=False).ids)
    starts = range(len(prompt) - len(ids) + 1)
    start = next((start for start in starts if prompt[start : start + len(ids)] == ids), None)
    if start is None:
        return None
    pieces = {"i2cl_before": prompt[:start], "i2cl_after": prompt[start + len(ids) :]}
    special = [
        {"id": name, "ids": list(piece), "tokens": [inner.id_to_token(token) for token in piece]}
        for name, piece in pieces.items()
    ]
    inner.post_processor = TemplateProcessing(single="i2cl_before $A i2cl_after", special_tokens=special)
    return inner


def _fast(backend: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers, with the special tokens of the base model's."""
    special_tokens = tokenizer.special_tokens_map.items()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        padding_side="right",
        truncation_side="right",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **{name: str(token) for name, token in special_tokens if isinstance(token, str)},
    )


def _complete_config(
    config: Any, injection: Injection, tokenizer: Any, base: PreTrainedTokenizerBase
) -> None:
    """Add labels and padding token to the config, and padding token and context length to the tokenizer."""
    length = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, length)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = base.eos_token or base.unk_token or base.bos_token
    words = injection.task.labels
    config.id2label = dict(enumerate(words))
    config.label2id = {word: place for place, word in enumerate(words)}
    kind = "multi_label" if injection.task.multi_label else "single_label"
    config.problem_type = f"{kind}_classification"
    config.pad_token_id = tokenizer.pad_token_id
