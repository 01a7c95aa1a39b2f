"""What an export must answer: a few prompts and the injected model's own values for them."""

from collections.abc import Sequence, Set as AbstractSet
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor
from transformers import GenerationConfig

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_problem
from i2cl.export import greedy
from i2cl.export.folding import at_temperature, require_plain, require_unquantized
from i2cl.export.greedy import TEXTS
from i2cl.export.upcast import Upcast
from i2cl.models.batching import Ids, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import edit_outputs
from i2cl.models.loading import gguf_reader, is_gguf
from i2cl.models.precision import dtype_name
from i2cl.models.scoring import score
from i2cl.storage.atomic import public_name
from i2cl.tasks.template import TEXT_FIELD
from i2cl.version import __version__

GOLDEN = "i2cl_golden.json"
GOLDEN_FIELD = "i2cl.golden"  # of a GGUF file, as JSON
FORMAT_VERSION = 1
TOP = 20  # how many of the largest logits are kept for each prompt
DIAGNOSED = 6  # how many prompts also say what the labels' probabilities are without some constants

# Largest relative difference of an export, by the dtype that its weights are stored in.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# Which writers' constants a runtime may have dropped.
DROPPED = {"attention": (0,), "mlp": (1,), "attention and mlp": (0, 1)}


class GoldenPrompt(pydantic.BaseModel):
    """One prompt and the injected model's next-token values, in float32."""

    text: str  #: the prompt
    ids: list[int]  #: its tokens
    labels: list[float]  #: log-probability of each label's first token, without a prior
    #: the same where the constants of some writers are left out, by `DROPPED`; of the first prompts alone
    dropped: dict[str, list[float]] = {}
    top_ids: list[int]  #: tokens of the largest logits
    top_logits: list[float]  #: those logits
    prediction: str  #: the most probable label, by whole sequences where these were scored, with the prior
    whole: list[float] = []  #: log-probability of each label's tokens; empty where first tokens decide
    query: str | None = None  #: what was encoded to ``ids``; None where it was cut
    greedy: list[int]  #: what plain greedy decoding answers with the prior, a label long


class Golden(pydantic.BaseModel):
    """What an export carries about itself."""

    format_version: int = FORMAT_VERSION  #: of this file
    i2cl: str = __version__  #: version that wrote it
    artefact: dict[str, Any]  #: task, base model and settings of the injection
    labels: list[str]  #: label words
    label_ids: list[int]  #: first token of each, or the token that stands for it
    label_texts: list[str]  #: that token as text
    sequences: list[list[int]] = []  #: tokens of each label, where whole sequences are scored; else empty
    sequence_texts: list[str] = []  #: those tokens as text
    label_bias: list[float] = []  #: added to each label's log-probability, in nats; empty without a prior
    prompts: list[GoldenPrompt]  #: what to ask, and what to answer
    model_type: str = ""  #: of the export
    dtype: str = "float32"  #: of its weights
    tolerance: float = TOLERANCES["float32"]  #: largest relative difference
    biases: dict[str, float] = {}  #: L2 norm of every bias that holds a part of the injection
    prompt: str  #: what every prompt is, ``{text}`` for the text
    tail: list[int]  #: tokens that end every prompt, whatever its text
    spoken: list[list[int]]  #: tokens of each label to its end, whichever of them are scored
    words: list[str]  #: those tokens as text, without what ends a text
    end: int | None  #: token that ends a text
    beams: int  #: with which transformers' `generate` compares whole labels; 0 where it cannot

    def of_export(self, model_type: str, dtype: torch.dtype, biases: dict[str, float]) -> "Golden":
        """The same, with what only the folded checkpoint knows (see the attributes)."""
        name = dtype_name(dtype)
        precision = {"dtype": name, "tolerance": TOLERANCES.get(name, max(TOLERANCES.values()))}
        return self.model_copy(update=precision | {"model_type": model_type, "biases": biases})

    @property
    def targets(self) -> list[list[int]]:
        """What an answer begins with that says a label: its whole sequence, or its first token."""
        return self.sequences or [[token] for token in self.label_ids]

    @property
    def greedy(self) -> list[bool]:
        """Whether plain greedy decoding of the injected model says the label expected, prompt by prompt."""
        return [self.said(prompt.greedy) == prompt.prediction for prompt in self.prompts]

    @property
    def forced(self) -> bool:
        """Whether a program has to be made to say a label, since the model does not say it by itself."""
        return not greedy.enough(self.greedy)

    @property
    def shortened(self) -> bool:
        """Whether an answer is one token that stands for a label, such as " account" for "account access"."""
        whole = self.sequences or (self.forced and self.artefact.get("scoring") != "words")
        return not whole and [text.strip() for text in self.label_texts] != self.labels

    @property
    def said_as(self) -> str:
        """What a right answer is, in words."""
        return "the token of the expected label" if self.shortened else "the expected label"

    @property
    def compared(self) -> bool:
        """Whether a generation config makes `generate` compare whole labels by beam search."""
        return self.forced and self.beams > 0

    @property
    def length(self) -> int:
        """Tokens that tell which label an answer says, at most."""
        return max(map(len, self.targets))

    @property
    def longest(self) -> int:
        """Tokens to generate: labels to their end where a program is made to say them."""
        return max(map(len, self.spoken)) if self.forced else self.length

    @property
    def grammar(self) -> str:
        """Of llama.cpp: one of the labels."""
        return greedy.grammar_of(self.words)

    @property
    def sequence_bias(self) -> dict[tuple[int, ...], float]:
        """What a generation config adds to logits for a label and its prior; empty where it needs nothing."""
        if self.compared:
            return greedy.compared_sequences(self.spoken, self.tail)
        if self.forced:
            return greedy.forced_sequences(self.spoken, self.label_bias, self.tail, self.end)
        pairs = zip(self.label_ids, self.label_bias, strict=bool(self.label_bias))
        return {(token,): value for token, value in pairs}

    def logit_bias(self, prior: Sequence[float]) -> dict[str, float]:
        """What servers are sent to add to logits: makes them say a label's scored tokens, and holds a prior.
        Where whole sequences are scored no token's logit holds a prior, and a grammar has to say how labels
        go on.
        """
        prior = () if self.sequences else prior
        if self.forced:
            return {str(token): value for token, value in greedy.forced_tokens(self.targets, prior).items()}
        return dict(zip(map(str, self.label_ids), prior, strict=True)) if prior else {}

    def said(self, tokens: Sequence[int]) -> str:
        """The label that an answer's tokens say; empty where they say none."""
        pairs = zip(self.targets, self.labels, strict=True)
        return next((label for target, label in pairs if list(tokens[: len(target)]) == target), "")

    def said_in(self, text: str, *, whole: bool) -> str:
        """The label that an answer's text says, empty where none: a whole word, or its first token."""
        place = greedy.label_in(text, self.words if whole else self.label_texts, whole=whole)
        return "" if place is None else self.labels[place]

    def require_bias_in(self, generation: GenerationConfig, where: str) -> None:
        """Refuse (I2CLError) a generation config that lost the label prior, or what makes it say a label."""
        what = None
        if not self.sequence_bias.items() <= greedy.biases_of(generation).items():
            what = "the label prior's sequence_bias" if self.label_bias else "the labels' sequence_bias"
        elif self.compared and not greedy.searches(generation, self.beams, self.spoken):
            what = "the beam search over whole labels"
        if what:
            cure = "copy generation_config.json, or export it again"
            raise I2CLError(f"the generation config of {where!r} lacks {what}: {cure}")

    def best(self, values: Sequence[float | None]) -> str:
        """The most probable label of some log-probabilities, with the prior; ``-`` where none was told."""
        bias = self.label_bias or [0.0] * len(self.labels)
        each = zip(values, bias, self.labels, strict=bool(values))
        scores = [(value + more, label) for value, more, label in each if value is not None]
        return max(scores, key=itemgetter(0))[1] if scores else "-"

    def write(self, folder: Path) -> None:
        """Store it in an export's folder."""
        (folder / GOLDEN).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def lost(self, there: AbstractSet[str]) -> list[str]:
        """Biases that hold a part of the injection and are not among those that are there and not zero."""
        return [name for name, norm in self.biases.items() if norm > 0 and name not in there]

    @classmethod
    def from_export(cls, export: str | Path) -> "Golden":
        """That of an export, a folder or a GGUF file. Raises I2CLError if it has none, or a damaged one."""
        path = Path(export)
        try:
            if is_gguf(path):
                field = gguf_reader(path, "export it again").get_field(GOLDEN_FIELD)
                text = None if field is None else str(field.contents())
            else:
                path /= GOLDEN
                text = path.read_text(encoding="utf-8") if path.is_file() else None
            if text is None:
                cure = "give a folder or a GGUF file made by `i2cl export`"
                raise I2CLError(f"{str(export)!r} has no {GOLDEN}: {cure}")
            golden = cls.model_validate_json(text)
        except (pydantic.ValidationError, UnicodeDecodeError) as error:
            what = f"{str(path)!r} cannot be read ({first_problem(error)})"
            raise I2CLError(f"{what}: export it again") from None
        if golden.format_version > FORMAT_VERSION:
            raise I2CLError(f"{str(path)!r} is of a newer version: upgrade i2cl")
        return golden


def make_golden(decoder: Decoder, injection: Injection, *, fold_temperature: bool = False) -> Golden:
    """Run the injected model on a few prompts, in float32.
    One in another dtype is not copied: its weights are brought to float32 one at a time. ``fold_temperature``
    is that of `export_hf`. Where labels are scored by their words, the values are those of the changed head
    (`i2cl.models.encoding.LabelTokens.at_first`). Raises I2CLError if the injection's task does not fit the
    decoder, or the model is quantized.
    """
    require_unquantized(decoder.model.config)
    require_plain(injection)
    if fold_temperature:
        head, temperature = decoder.model.get_output_embeddings(), injection.temperature
        with edit_outputs([(head, lambda logits: logits / temperature)]):
            return make_golden(decoder, at_temperature(injection))
    task = injection.task
    questions = injection.questions(decoder)
    labels, queries = questions.labels, questions.queries(TEXTS)
    texts = [questions.prompt(text) for text in TEXTS]
    each = zip(texts, queries, decoder.encoder(texts), strict=True)
    uncut = [text if ids == whole else None for text, ids, whole in each]
    first = list(labels.first)
    sequences = labels.ids if labels.full else ()
    scores: list[list[float]] = [[] for _ in queries]
    if sequences:
        with Upcast():
            scores = score(decoder, queries, labels, edit=injection.edit()).tolist()
    end = greedy.end_of(decoder)
    tail = greedy.shared_end(decoder.encoder([*texts, *map(questions.prompt, greedy.ENDS)]))
    spoken = [ids if ids[-1] != end else ids[:-1] for ids in labels.ids]  # without what ends a text
    described = injection.description()
    base = described["base_model"]
    made = Golden(
        artefact=described | {"base_model": base | {"name": public_name(base["name"])}},
        labels=list(task.labels),
        label_ids=first,
        label_texts=[decoder.tokenizer.decode([token]) for token in first],
        sequences=[list(ids) for ids in sequences],
        sequence_texts=[greedy.text_behind(decoder, queries[0], ids) for ids in sequences],
        label_bias=list(injection.label_bias or ()),
        prompts=[],
        prompt=questions.prompt(TEXT_FIELD),
        tail=list(tail),
        spoken=[list(ids) for ids in labels.ids],
        words=[greedy.text_behind(decoder, queries[0], ids) for ids in spoken],
        end=end,
        beams=greedy.beams_for(labels.ids, tail) if sequences else 0,
    )
    with edit_outputs([(decoder.model.get_output_embeddings(), labels.at_first)]):
        for place, (ids, text, values) in enumerate(zip(queries, uncut, scores, strict=True)):
            prompt = _prompt(decoder, injection, ids, made, values, diagnosed=place < DIAGNOSED)
            made.prompts.append(prompt.model_copy(update={"query": text}))
    return made


def _prompt(
    decoder: Decoder, injection: Injection, ids: Ids, golden: Golden, whole: list[float], *, diagnosed: bool
) -> GoldenPrompt:
    logits, labels = _logits(decoder, ids, injection), golden.label_ids
    values = logits.log_softmax(-1)[labels].tolist()
    top = logits.topk(min(TOP, len(logits)))
    dropped = {}
    for name, sites in DROPPED.items() if diagnosed else ():
        coefficients = injection.coefficients.clone()
        coefficients[:, list(sites), 0] = 0
        without = replace(injection, coefficients=coefficients)
        dropped[name] = _logits(decoder, ids, without).log_softmax(-1)[labels].tolist()
    return GoldenPrompt(
        text=decoder.tokenizer.decode(list(ids)),
        ids=list(ids),
        labels=values,
        dropped=dropped,
        top_ids=top.indices.tolist(),
        top_logits=top.values.tolist(),
        prediction=golden.best(whole or values),
        whole=whole,
        greedy=_greedy(decoder, ids, injection, golden, logits),
    )


def _greedy(decoder: Decoder, ids: Ids, injection: Injection, golden: Golden, logits: Tensor) -> list[int]:
    """The most probable token, and those behind it, from the logits of the first."""
    if golden.label_bias and not golden.sequences:
        logits = logits.clone()
        logits[golden.label_ids] += torch.tensor(golden.label_bias)
    tokens = [int(logits.argmax())]
    while len(tokens) < golden.length and tokens[-1] != golden.end:
        tokens.append(int(_logits(decoder, (*ids, *tokens), injection).argmax()))
    return tokens


def _logits(decoder: Decoder, ids: Ids, injection: Injection) -> Tensor:
    batch = make_batch([ids], decoder.device)
    with decoder.frozen(), torch.no_grad(), Upcast():
        return decoder.forward(batch, edit=injection.edit())[0, 0].float().cpu()
