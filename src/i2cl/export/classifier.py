"""Export a task as a standard transformers text classifier: raw text in, label and probability out.

Label scores are linear in the last hidden state. So a task is exactly a ``*ForSequenceClassification`` model:
the injection is folded into its biases, and each label's row of the LM head, divided by the temperature, is a
row of ``score.weight``. The prompt template goes into the tokenizer: a post-processor adds the token ids
before and after the text (https://huggingface.co/docs/tokenizers/api/post-processors).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export.checkpoint import open_base, write_shards
from i2cl.export.folding import Folding, label_tokens_of, skeleton
from i2cl.export.golden import TEXTS, Golden
from i2cl.export.verify import load_pipeline, run_pipeline
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Encoder, LabelTokens
from i2cl.storage.atomic import new_folder, public_name, require_writable
from i2cl.storage.card import CARD, classifier_card
from i2cl.tasks import Template

USE_CAUSAL_LM = "export it as a language model instead (--to causal-lm)"
DROP_PRIOR = f"leave the prior out with --drop-prior, or {USE_CAUSAL_LM}"
CHECKED_TEXTS = 6  # golden texts that an export is compared with before it is written
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


@dataclass(frozen=True)
class TemplateTokenizer:
    """A tokenizer that adds a prompt template to each text, with the ids of the prompt for all `PROBES`.

    Attributes:
        tokenizer: encodes a raw text to the ids of its prompt.
        trailing: whether that also holds for texts that end in whitespace.
    """

    tokenizer: PreTrainedTokenizerFast
    trailing: bool


@dataclass
class Head:
    """The classification head of an export.

    Attributes:
        config: of the classifier.
        model: the classifier without memory for its weights.
        tensors: of the classifier that are not tensors of the folded model, in float32.
    """

    config: PreTrainedConfig
    model: PreTrainedModel
    tensors: dict[str, Tensor] = field(default_factory=dict)


def export_classifier(
    source: Decoder | str | Path,
    injection: Injection,
    output: str | Path,
    *,
    golden: Callable[[], Golden] | None = None,
    revision: str | None = None,
    force: bool = False,
    max_shard_size: int | str = "5GB",
) -> TemplateTokenizer:
    """Write a task as a transformers text classifier.

    Args:
        source: the base model: a decoder, or the name of one.
        injection: fitted task, injected at all positions into the residual writers.
        output: a folder that is new or empty; it appears when it is complete.
        golden: returns golden answers (`make_golden`); called once it is known that the task can be exported.
            The classifier is compared with some of them before it is written.
        revision: of a hub id.
        force: accept other weights of the same shape than those the injection was fitted on.
        max_shard_size: maximum size of a file, such as ``"5GB"``.

    Returns:
        The tokenizer with the template.

    Raises:
        I2CLError: if the task cannot become a classifier, with the reason and an alternative; if the folder
            cannot be used; or if the injection was fitted on another model.
    """
    path = Path(output)
    require_writable(path, frozenset())
    base = open_base(source, revision)
    labels = label_tokens_of(injection, base.tokenizer)
    if labels.full:
        what = "labels that share their first token are scored as full sequences, unlike a linear head"
        raise I2CLError(f"{what}: refit with scoring='words' in Python, or {USE_CAUSAL_LM}")
    folding = Folding(base.config, base.weights, injection)
    head = classification_head(folding, injection, labels)
    base.require_base_of(injection, folding, force=force)
    made = template_tokenizer(base.tokenizer, injection.task.template, labels.line)
    if made is None:
        raise I2CLError(f"the tokenizer cannot hold this prompt template exactly: {USE_CAUSAL_LM}")
    config = _classifier_config(head.config, injection, made, base.tokenizer)
    answers = golden() if golden is not None else None
    with new_folder(path, frozenset()) as fresh:
        shapes = {name: tensor.shape for name, tensor in head.model.state_dict().items()}

        def tensor(name: str) -> Tensor:
            return head.tensors[name].to(folding.dtype) if name in head.tensors else folding.tensor(name)

        write_shards(fresh, shapes, tensor, folding.dtype, max_shard_size)
        config.architectures = [type(head.model).__name__]
        config.dtype = folding.dtype
        config.save_pretrained(fresh)
        made.tokenizer.save_pretrained(fresh)
        if answers is not None:
            answers = _checked(fresh, answers.of_export("classifier", folding.dtype))
            answers.write(fresh)
        notes = []
        if not made.trailing:
            notes += ["Remove whitespace at the end of texts: it is encoded differently than by i2cl."]
        if answers is not None and not answers.left_padding:
            notes += ["Pad batches on the right, as its tokenizer does: this model type counts padding."]
        if len(head.tensors) > 1:
            notes += ["Run it in float32 or bfloat16: float16 overflows in its last layer."]
        description = injection.description()
        description["base_model"] = {
            **description["base_model"],
            "name": public_name(injection.base.name),
        }
        card = classifier_card(description, path.resolve().name, notes)
        (fresh / CARD).write_text(card, encoding="utf-8")
    return made


def _checked(folder: Path, golden: Golden) -> Golden:
    """Return golden answers with whether they hold for batches padded on the left.

    Some model types count positions from the padding. Raises I2CLError if the classifier differs from the
    injected model in batches padded on the right.
    """
    classify, some = load_pipeline(folder), golden.first(CHECKED_TEXTS)
    outcome = run_pipeline(classify, some, "right")
    if not outcome.passed:
        raise I2CLError(
            f"the classifier differs from the injected model by {outcome.worst:.1e} in a probability "
            f"(tolerance {golden.tolerance:.0e}), so it was not written: {USE_CAUSAL_LM}"
        )
    return golden.model_copy(update={"left_padding": run_pipeline(classify, some, "left").passed})


def classification_head(folding: Folding, injection: Injection, labels: LabelTokens) -> Head:
    """Turn the LM head's rows of the labels into a classification head.

    Raises I2CLError if transformers has no sequence classifier of the model type, or if the head cannot hold
    the label prior.
    """
    head = _empty_head(folding.config, len(labels.ids))
    score = _score_name(head.model, folding)
    rows, offsets = label_rows(folding, injection, labels)
    if offsets.abs().max() > 0:
        direction = constant_direction(folding, head.model)
        if direction is None:
            return add_prior_layer(folding, rows, offsets)
        rows = rows + offsets[:, None] * direction
    head.tensors[score] = rows
    return head


def _empty_head(config: PreTrainedConfig, labels: int, extra_layers: int = 0) -> Head:
    fields = {"num_labels": labels, "num_hidden_layers": config.num_hidden_layers + extra_layers}
    config = type(config).from_dict(config.to_dict() | fields)
    kind = config.model_type
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise I2CLError(f"transformers has no sequence classifier of the type {kind!r}: {USE_CAUSAL_LM}")
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    return Head(config, cast("PreTrainedModel", model))


def _score_name(model: PreTrainedModel, folding: Folding) -> str:
    """Return the name of the score weights. Raises I2CLError if the head is not a linear map without bias."""
    state = model.state_dict()
    own = [name for name in state if name not in folding.shapes]
    if len(own) != 1 or state[own[0]].shape[:1] != (model.config.num_labels,):
        what = f"the head of {type(model).__name__} is not a linear map without bias"
        raise I2CLError(f"{what}: {USE_CAUSAL_LM}")
    return own[0]


def label_rows(
    folding: Folding, injection: Injection, labels: LabelTokens
) -> tuple[Float[Tensor, "labels d"], Float[Tensor, " labels"]]:
    """Return weights and offsets of the label scores, divided by the temperature, in float32.

    Offsets come from a label prior or from biases of the LM head; they sum to zero, since a softmax ignores
    what all labels share.
    """
    causal = skeleton(folding.config)
    name = next(name for name, one in causal.named_modules() if one is causal.get_output_embeddings())
    weight = f"{name}.weight"
    read = list(labels.read)
    rows = folding.tensor(causal.all_tied_weights_keys.get(weight, weight))[read].float().cpu()
    offsets = torch.zeros(len(read))
    if f"{name}.bias" in folding.shapes:
        offsets = folding.tensor(f"{name}.bias")[read].float().cpu()
    rows, offsets = labels.mean(rows.T * _logit_scale(folding.config)).T, labels.mean(offsets)
    if injection.label_bias is not None:
        offsets = offsets + torch.tensor(injection.label_bias)
    return rows / injection.temperature, (offsets - offsets.mean()) / injection.temperature


def _logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor between the LM head's output and the logits."""
    scale, divisor = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    return float(scale) / float(divisor)


def constant_direction(folding: Folding, model: PreTrainedModel) -> Float[Tensor, " d"] | None:
    """Return a vector whose product with every last hidden state is one, or None.

    The output of a final LayerNorm is ``w * n + b``, where the entries of ``n`` sum to zero. So its product
    with ``1 / w`` is the sum of ``b / w``, whatever the text. An RMSNorm has no such direction.
    """
    norms = [name for name, module in model.base_model.named_modules() if type(module) is torch.nn.LayerNorm]
    blocks = ARCHITECTURES[folding.source_config.model_type].layers
    for name in [name for name in norms if not name.startswith(f"{blocks}.")][-1:]:
        scale = folding.tensor(f"{model.base_model_prefix}.{name}.weight").double().cpu()
        bias_name = f"{model.base_model_prefix}.{name}.bias"
        bias = folding.tensor(bias_name).double().cpu() if bias_name in folding.shapes else scale * 0
        total = (bias / scale).sum()
        # rounding error of d terms that cancel except for this sum
        noise = len(scale) ** 0.5 * torch.finfo(folding.dtype).eps
        if scale.abs().min() > 0 and total.abs() > MIN_SIGNAL_TO_NOISE * noise:
            return (1 / scale / total).float()
    return None


def add_prior_layer(
    folding: Folding, rows: Float[Tensor, "labels d"], offsets: Float[Tensor, " labels"]
) -> Head:
    """Return a head with offsets for a Llama, whose RMSNorm has no constant direction.

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
        what = "labels have a prior or offsets, and this model's classification head cannot hold them"
        raise I2CLError(f"{what}: {DROP_PRIOR}")
    head = _empty_head(config, count, extra_layers=1)
    layer = f"model.layers.{config.num_hidden_layers}"
    shapes = {name: tensor.shape for name, tensor in head.model.state_dict().items()}
    new = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in folding.shapes}
    new["model.norm.weight"] = torch.ones(width)
    new[f"{layer}.input_layernorm.weight"] = torch.ones(width)
    new[f"{layer}.post_attention_layernorm.weight"] = folding.tensor("model.norm.weight").float().cpu()
    new[f"{layer}.mlp.gate_proj.bias"][:count] = GATE
    new[f"{layer}.mlp.up_proj.weight"][:count] = rows - rows.mean(0)  # small scores are more accurate
    new[f"{layer}.mlp.down_proj.weight"][range(count), range(count)] = SCORE_SCALE / GATE
    new[f"{layer}.mlp.down_proj.bias"][count] = SCORE_SCALE * CONSTANT
    root = width**0.5
    new["score.weight"][range(count), range(count)] = CONSTANT / root
    new["score.weight"][:, count] = offsets / root
    head.tensors = new
    return head


def template_tokenizer(
    tokenizer: PreTrainedTokenizerBase, template: Template, line: str = ""
) -> TemplateTokenizer | None:
    """Put a prompt template into a tokenizer; None if no form gives the ids of the prompt for all `PROBES`.

    Tries to encode the text alone, then with the template's whitespace around it, between the ids of the rest
    of the template.

    Args:
        tokenizer: of the base model.
        template: of the task.
        line: what the prompts have after the template's query (`LabelTokens.line`).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    encoder = Encoder.of(tokenizer)

    def prompts(texts: Sequence[str]) -> list[Ids]:
        return encoder([template.query(encoder.literal(text)) + line for text in texts])

    def is_exact(made: PreTrainedTokenizerFast, texts: Sequence[str]) -> bool:
        return [tuple(ids) for ids in made(list(texts))["input_ids"]] == prompts(texts)

    for inner in _inner_tokenizers(backend, template.head, template.middle + line):
        made = _with_ids(inner, prompts(PROBES[:1])[0], PROBES[0])
        if made is not None and is_exact(fast := _fast(made, tokenizer), PROBES):
            return TemplateTokenizer(fast, trailing=is_exact(fast, TRAILING))
    return None


def _inner_tokenizers(backend: Tokenizer, before: str, after: str) -> Iterator[Tokenizer]:
    """Yield copies that put whitespace of the template around each text and know no special tokens."""
    leading = before[len(before.rstrip()) :]
    trailing = after[: len(after) - len(after.lstrip())]
    # first with a leading space, which most tokenizers join to the next word
    for lead, tail in dict.fromkeys((lead, tail) for tail in ("", trailing) for lead in (leading, "")):
        made = Tokenizer.from_str(backend.to_str())
        made.no_padding()
        made.no_truncation()
        made.encode_special_tokens = True
        steps: list[normalizers.Normalizer] = [normalizers.Prepend(lead)] if lead else []
        steps += [normalizers.Replace(Regex(r"\z"), tail)] if tail else []
        steps += [made.normalizer] if made.normalizer is not None else []
        if steps:
            made.normalizer = normalizers.Sequence(steps)
        yield made


def _with_ids(inner: Tokenizer, prompt: Ids, text: str) -> Tokenizer | None:
    """Add the prompt's ids around those of the text; None if the text's ids are not part of the prompt's."""
    ids = tuple(inner.encode(text, add_special_tokens=False).ids)
    starts = range(len(prompt) - len(ids) + 1)
    start = next((one for one in starts if prompt[one : one + len(ids)] == ids), None)
    if start is None:
        return None
    parts, special = ["$A:0"], []
    for name, piece in (("i2cl_before", prompt[:start]), ("i2cl_after", prompt[start + len(ids) :])):
        if piece:
            tokens = [inner.id_to_token(one) for one in piece]
            special.append({"id": name, "ids": list(piece), "tokens": tokens})
            parts.insert(0 if name == "i2cl_before" else len(parts), f"{name}:0")
    inner.post_processor = TemplateProcessing(single=" ".join(parts), special_tokens=special)
    return inner


def _fast(backend: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers, with the special tokens of the base model's."""
    named = tokenizer.special_tokens_map.items()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        padding_side="right",
        truncation_side="right",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **{name: str(token) for name, token in named if isinstance(token, str)},
    )


def _classifier_config(
    config: PreTrainedConfig, injection: Injection, made: TemplateTokenizer, base: PreTrainedTokenizerBase
) -> Any:
    """Return the config with labels and a padding token, which the tokenizer gets too."""
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
