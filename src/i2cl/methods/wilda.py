"""WILDA: a LoRA adapter learns to say of a query alone what the model says behind demonstrations.

Source: Jukić and Šnajder 2025, https://arxiv.org/abs/2410.01508, and their released code,
https://github.com/josipjukic/wilda. Choices beyond them are in docs/reference/fidelity.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from i2cl.errors import needs
from i2cl.methods.adapters import (
    AdaptedDecoder,
    AdapterPredictor,
    Loss,
    has_transposed_weights,
    odd_linear_maps,
    train_adapter,
)
from i2cl.methods.base import Method
from i2cl.methods.prompts import few_shot_prompt, unlabelled_texts
from i2cl.models.batching import Batch
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions, labelled_batch, sequence_log_probabilities
from i2cl.models.training import TrainConfig
from i2cl.tasks import Example, Task
from i2cl.tasks.sampling import seeded


class WILDAConfig(TrainConfig):
    """Adapter, teacher and schedule; as in the released code where no more is said.

    Attributes:
        loss: what is learnt: the teacher's next token of the vocabulary, or its label among the labels.
        lora_rank: of the adapter, which is put on every linear map of every block.
        lora_alpha: its scale, times the rank.
        lora_dropout: while it is trained.
        unlabelled: texts without labels that the teacher answers, at most.
        orders: orders of the demonstrations that the teacher sees, one an epoch, in turn; the first is the
            given one.
        pseudo_labels: ``soft`` (the teacher's distribution: the paper) or ``hard`` (the most probable
            answer: the released code).
    """

    epochs: int = Field(5, ge=0)
    batch_size: int = Field(1, ge=1)
    lr: float = Field(1e-4, gt=0)
    lr_final: float = Field(1e-4, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    lora_rank: int = Field(8, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.1, ge=0, lt=1)
    unlabelled: int = Field(128, ge=1)
    orders: int = Field(5, ge=1)
    pseudo_labels: Literal["soft", "hard"] = "soft"


@dataclass(frozen=True)
class WILDA(Method):
    """Teacher and student are one model: behind the demonstrations without the adapter, or alone with it."""

    name: ClassVar[str] = "wilda"
    summary: ClassVar[str] = "low-rank changes that say of a query alone what few-shot says"
    needs: ClassVar[str] = "demonstrations, unlabelled texts, the package peft"
    formula: ClassVar[str] = "as trained"
    settings = (WILDAConfig,)

    training: WILDAConfig = field(default_factory=WILDAConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> AdapterPredictor:
        """Ask the teacher, then train the student.

        Raises:
            I2CLError: without the package peft, if no training text remains beside the demonstrations, if the
                context is too small, or on a loss that is not finite.
        """
        needs(self.name, "peft", "peft")
        from peft import LoraConfig

        training = self.training
        texts = unlabelled_texts(self.name, task, training.unlabelled, demonstrations, seed)
        batches = training.batches(len(texts), seed)
        steps = max(1, len(batches) // max(1, training.epochs))
        taught = self._taught(Questions(decoder, task), demonstrations, texts, seed)
        # A step is told its teacher with its texts: place in the list of all answers, order by order.
        turns = [
            [place + step // steps % len(taught) * len(texts) for place in batch]
            for step, batch in enumerate(batches)
        ]
        answers = taught.flatten(0, 1)

        def loss_on(wearing: AdaptedDecoder) -> Loss:
            student = Student(Questions(wearing, task), texts, among_labels=training.loss == "labels")

            def loss(chosen: Sequence[int]) -> Tensor:
                said = student([place % len(texts) for place in chosen])
                told = answers[list(chosen)].to(said.device)
                if training.pseudo_labels == "hard":
                    return nll_loss(said, told.argmax(-1))
                return kl_div(said, told, reduction="batchmean", log_target=True)

            return loss

        config = LoraConfig(
            r=training.lora_rank,
            lora_alpha=training.lora_alpha,
            lora_dropout=training.lora_dropout,
            target_modules="all-linear",
            exclude_modules=odd_linear_maps(decoder) or None,
            fan_in_fan_out=has_transposed_weights(decoder),
        )
        adapter = train_adapter(decoder, config, training, turns, loss_on, seed)
        return AdapterPredictor(decoder, task, adapter, unlabelled=len(texts))

    def _taught(
        self, questions: Questions, demonstrations: Sequence[Example], texts: Sequence[str], seed: int
    ) -> Float[Tensor, "orders texts answers"]:
        """Log-probabilities of the teacher, for each order of the demonstrations that is to be seen."""
        picker, found = seeded(f"wilda {seed}"), []
        for order in range(max(1, min(self.training.orders, self.training.epochs))):
            shown = picker.sample(demonstrations, len(demonstrations)) if order else demonstrations
            teacher = few_shot_prompt(questions, shown)
            if self.training.loss == "labels":
                found.append(teacher.scores(texts).log_softmax(-1))
            else:
                found.append(teacher.distributions(texts))
        return torch.stack(found)


class Student:
    """Log-probabilities behind queries alone: of every token, or of every label. Gradients flow."""

    def __init__(self, questions: Questions, texts: Sequence[str], *, among_labels: bool) -> None:
        self.decoder, self.labels = questions.decoder, questions.labels
        self.queries = questions.queries(texts)
        self.among_labels = among_labels

    def __call__(self, chosen: Sequence[int]) -> Float[Tensor, "chosen answers"]:
        """Those of the texts at these places, in nats."""
        whole = self.among_labels and self.labels.full
        ends = self.labels.ids if whole else ((0,),)
        asked = [(self.queries[place], end) for place in chosen for end in ends]

        def run(batch: Batch) -> Tensor:
            if not whole:
                return self.decoder.forward(batch)[:, 0].float()
            queries, targets = zip(*[asked[row] for row in batch.rows], strict=True)
            rows = labelled_batch(queries, targets, self.decoder.device)
            return sequence_log_probabilities(self.decoder, rows, targets)[:, None]

        found: dict[int, Tensor] = {}
        for batch, values in self.decoder.run_batches([ids + end[:-1] for ids, end in asked], run):
            found |= dict(zip(batch.rows, values, strict=True))
        said = torch.stack([found[row] for row in range(len(asked))])
        if whole:
            said = said.view(len(chosen), -1)
        elif self.among_labels:
            said = said[:, list(self.labels.first)]
        return said.log_softmax(-1)
