"""Golden answers of an export: sample texts, and the answers of the injected model.

An export stores them, so that any program that runs it can be checked against the injected model.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic
import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, first_problem
from i2cl.export.folding import require_exportable
from i2cl.models.decoder import Decoder
from i2cl.models.loading import gguf_reader, is_gguf
from i2cl.models.precision import dtype_name
from i2cl.version import __version__

GOLDEN = "i2cl_golden.json"
GOLDEN_KEY = "i2cl.golden"  # metadata key of a GGUF file, which holds the same JSON
# Maximum difference of a probability, by the dtype of the stored weights.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# Texts of several kinds and lengths: sentences, questions, complaints, news, reviews, notes.
TEXTS = (
    "the letter arrived on a quiet morning",
    "a small shop at the corner sells bread, paper and string",
    "it was not clear to anyone why the train had stopped",
    "Where do the herons of this lake spend the winter?",
    "How many steps are there from the harbour up to the lighthouse, and who has counted them?",
    "My order came a week late, the box was torn, and nobody answers my letters. I want my money back.",
    "The heating in our flat has been broken since Monday!",
    "Grain prices fell for the third day after rain in the east",
    "A slow, warm film that trusts its actors. I left the cinema smiling",
    "Good soup, friendly waiters, terrible chairs",
    "Please send the minutes of the last meeting to everyone on the list (see page 4)",
    'He said "later" and went back to sleep.',
)

Form = Literal["", "classifier", "causal-lm", "peft", "gguf"]


class Golden(pydantic.BaseModel):
    """Texts and the injected model's answers, computed in float32."""

    format_version: Literal[1] = 1
    i2cl: str = __version__  #: version that wrote it
    form: Form = ""  #: format of the export
    labels: list[str]  #: label words, in the order of the classes
    label_tokens: list[int]  #: token after the prompt whose log-probability scores each label
    label_bias: list[float] = []  #: label prior: added to the log-probabilities of the labels, in nats
    temperature: float = 1.0  #: divides the log-probabilities of the labels, after the label prior
    texts: list[str]  #: raw texts
    prompts: list[str]  #: texts in the prompt template
    ids: list[list[int]]  #: token ids of the prompts
    probabilities: list[list[float]]  #: probability of each label for each text
    tolerance: float = TOLERANCES["float32"]  #: maximum difference of a probability
    left_padding: bool = True  #: whether batches may be padded on the left
    multi_label: bool = False  #: whether each label has its own probability

    def of_export(self, form: Form, dtype: torch.dtype) -> "Golden":
        """Return a copy for an export of this form, whose weights are stored in this dtype."""
        tolerance = TOLERANCES.get(dtype_name(dtype), max(TOLERANCES.values()))
        return self.model_copy(update={"form": form, "tolerance": tolerance})

    def first(self, count: int) -> "Golden":
        """Return a copy with the first few texts only."""
        names = ("texts", "prompts", "ids", "probabilities")
        return self.model_copy(update={name: getattr(self, name)[:count] for name in names})

    def label_probabilities(self, logits: Float[Tensor, "texts labels"]) -> Float[Tensor, "texts labels"]:
        """Compute the label probabilities from the logits or log-probabilities of the label tokens."""
        return ((logits + torch.tensor(self.label_bias or 0.0)) / self.temperature).softmax(-1)

    def write(self, folder: Path) -> None:
        """Store it in the folder of an export."""
        (folder / GOLDEN).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_export(cls, export: str | Path) -> "Golden":
        """Read it from the folder or GGUF file of an export. Raises I2CLError if it is missing or damaged."""
        path = Path(export)
        text = None
        try:
            if is_gguf(path):
                field = gguf_reader(path, "export it again").get_field(GOLDEN_KEY)
                text = None if field is None else str(field.contents())
            elif (path / GOLDEN).is_file():
                text = (path / GOLDEN).read_text(encoding="utf-8")
            if text is None:
                hint = "give a folder or a GGUF file that `i2cl export` wrote"
                raise I2CLError(f"{str(export)!r} has no {GOLDEN}: {hint}")
            return cls.model_validate_json(text)
        except (pydantic.ValidationError, UnicodeDecodeError) as error:
            problem = f"the {GOLDEN} of {str(export)!r} cannot be read ({first_problem(error)})"
            raise I2CLError(f"{problem}: export it again") from None


def make_golden(decoder: Decoder, injection: Injection) -> Golden:
    """Run the injected model on some texts, in float32, without the text experts of an ensemble.

    A decoder in another dtype is copied to float32 first. Texts that do not fit into the context are left
    out.

    Raises:
        I2CLError: if the injection cannot be exported or does not fit the decoder, the model is quantized, or
            no text fits into the context.
    """
    labels = require_exportable(decoder, injection, multi_label=True)
    scorer = injection.scorer(decoder)
    prompts = [scorer.prompt(text) for text in TEXTS]
    ids = decoder.encoder(prompts)
    fitting = [row for row, query in enumerate(scorer.queries(TEXTS)) if query == ids[row]]
    if not fitting:
        raise I2CLError("no golden text fits into the context: leave them out with --no-golden")
    if decoder.model.dtype != torch.float32:
        model = copy.deepcopy(decoder.model).float()
        decoder = Decoder(model, decoder.tokenizer, architecture=decoder.architecture, name=decoder.name)
    texts = [TEXTS[row] for row in fitting]
    llm_alone = injection.llm_alone()
    log_probs = llm_alone.log_probs(decoder, texts, force=True)
    return Golden(
        labels=list(injection.task.labels),
        label_tokens=list(labels.representatives),
        label_bias=list(injection.label_bias or ()),
        temperature=injection.temperature,
        texts=texts,
        prompts=[prompts[row] for row in fitting],
        ids=[list(ids[row]) for row in fitting],
        probabilities=llm_alone.head.probabilities(log_probs.double()).tolist(),
        multi_label=injection.task.multi_label,
    )


@dataclass(frozen=True)
class Verification:
    """How a program that runs an export compares with the injected model.

    Attributes:
        labels: expected and actual label of each text.
        worst: largest difference of a probability; infinite if one is not a number.
        tolerance: maximum difference.
        retokenized: prompts to which the program's tokenizer gives other token ids.
    """

    labels: tuple[tuple[str, str], ...]
    worst: float
    tolerance: float
    retokenized: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether labels and token ids agree, and probabilities do within the tolerance."""
        same_labels = all(expected == actual for expected, actual in self.labels)
        return same_labels and not self.retokenized and self.worst <= self.tolerance


def compare(
    golden: Golden,
    probabilities: Float[Tensor, "texts labels"],
    *,
    tolerance: float | None = None,
    ids: Sequence[Sequence[int]] | None = None,
) -> Verification:
    """Compare the label probabilities of a program with the golden ones.

    Args:
        golden: expected answers.
        probabilities: probability of each label for each text, by the program.
        tolerance: maximum difference of a probability; default: the export's.
        ids: token ids of the prompts by the program's tokenizer, if it has one.
    """
    expected = torch.tensor(golden.probabilities)
    expected_labels, labels = (
        [golden.labels[label] for label in rows.argmax(-1)] for rows in (expected, probabilities)
    )
    encoded = zip(golden.prompts, golden.ids, ids or golden.ids, strict=True)
    return Verification(
        labels=tuple(zip(expected_labels, labels, strict=True)),
        worst=float((probabilities - expected).abs().max().nan_to_num(float("inf"))),
        tolerance=golden.tolerance if tolerance is None else tolerance,
        retokenized=tuple(prompt for prompt, golden_ids, own_ids in encoded if list(own_ids) != golden_ids),
    )
