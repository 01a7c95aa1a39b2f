"""Distilled calibration: an injection that also answers like few-shot prompts too long to be served.

Beyond the paper. Behind demonstrations a model knows more about some tasks than any vector tells it, and is
biased by their order and labels. Here few-shot prompts in several orders, each with its label prior divided
out, and the anchored injection with its own answer some texts without labels; their mean is the teacher. The
student is the injection with that label prior and a read-out of the last hidden state (`i2cl.core.read_out`),
fitted to the teacher's probabilities of the texts and to the demonstrations' labels, around scores that have
not seen those. What leave-one-out finds not worth it, it does not learn; it costs what zero-shot costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import one_hot

from i2cl.core.anchored import AnchoredConfig, anchor, left_out_scores, require_few
from i2cl.core.context import ExtractConfig, extract
from i2cl.core.injection import LABEL_PRIOR, Injection
from i2cl.core.read_out import head_states, read_out
from i2cl.errors import I2CLError
from i2cl.injections.label_prior import bias_towards, require_shares, with_prior_of
from i2cl.methods.base import BiasedPredictor, Cost, Method
from i2cl.methods.prompts import PromptPredictor, few_shot_prompt, unlabelled_texts
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions, Scoring, biased
from i2cl.models.training import StepProgress
from i2cl.tasks import Example, Task
from i2cl.tasks.sampling import seeded


class DistilledConfig(BaseModel):
    """The teacher.

    Attributes:
        unlabelled: texts that it answers, at most.
        orders: of the demonstrations in its few-shot prompts; the first is the given one.
        few_shot_share: of its mean, in log-probabilities; the rest is the anchored injection's.
        read_out: reach of the student's read-out, in nats; ``"loo"``: what leave-one-out says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unlabelled: int = Field(64, ge=1)
    orders: int = Field(3, ge=1)
    few_shot_share: float = Field(0.5, ge=0, le=1)
    read_out: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["loo"] = "loo"


@dataclass(frozen=True)
class Distilled(Method):
    """Anchored calibration, its label prior, and a read-out that learns from few-shot prompts as well."""

    name: ClassVar[str] = "distilled"
    summary: ClassVar[str] = (
        "anchored, its label prior, and a read-out taught by few-shot on unlabelled texts"
    )
    needs: ClassVar[str] = "demonstrations and unlabelled texts"
    formula: ClassVar[str] = "2DL + C(D + 2)"
    settings = (ExtractConfig, AnchoredConfig, DistilledConfig)

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    anchoring: AnchoredConfig = field(default_factory=AnchoredConfig)
    distilling: DistilledConfig = field(default_factory=DistilledConfig)

    @property
    def rounds(self) -> int:
        """How often progress is told, at most."""
        return self.anchoring.steps

    def injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Sequence[Example],
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
        *,
        texts: Sequence[str] = (),
        prior: Sequence[float] | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> Injection:
        """Fit all of it.

        Args:
            decoder: the frozen model.
            task: gives template, label words and, without ``texts``, training rows as such.
            demonstrations: labelled examples.
            seed: of the demonstrations' orders.
            progress: called after each step of the anchored injection.
            scoring: a label's first token.
            texts: without labels.
            prior: share of each label among such texts; default: all equal.
            watch: called with what comes next, behind the steps.

        Raises:
            I2CLError: on labels that share their first token, or without texts; see `i2cl.core.anchor`.
        """
        labels = Questions(decoder, task, scoring).labels
        if labels.full:
            raise I2CLError(
                f"distilled reads labels off one state, but labels of {task.name!r} share their first token: "
                "take other label words, or --method anchored"
            )
        shares = None if prior is None else require_shares(prior, task.labels)
        texts = texts or unlabelled_texts(self.name, task, self.distilling.unlabelled, demonstrations, seed)
        require_few(task, demonstrations)
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        told: Any = {"seed": seed, "scoring": scoring, "progress": progress}
        anchored = anchor(decoder, task, demonstrations, context, self.anchoring, **told)
        watch = watch or (lambda _: None)
        watch(f"scoring {len(texts)} unlabelled texts")
        scores = anchored.scores(decoder, texts)
        student = with_prior_of(anchored, scores, prior)
        bias = torch.tensor(student.label_bias)
        taught = biased(scores, bias).double()
        watch(f"asking the teacher, {self.distilling.orders} few-shot prompts")
        teacher = self.teacher(decoder, task, demonstrations, seed, texts, taught, shares)
        watch("fitting the read-out")
        left = left_out_scores(decoder, task, demonstrations, context, anchored)
        queries = student.questions(decoder).queries([*(one.text for one in demonstrations), *texts])
        gold = torch.tensor([example.label for example in demonstrations])
        reach = self.distilling.read_out
        found = read_out(
            head_states(decoder, queries, edit=student.edit()),
            torch.cat([biased(left, bias), taught.float()]),
            torch.cat([one_hot(gold, len(task.labels)).double(), teacher]),
            None if reach == "loo" else reach,
        )
        own = self.distilling.model_dump(mode="json") | {"method": self.name, "read_out_reach": found.reach}
        settings = student.settings | own
        return replace(student, read_out=found.rows, settings=settings)

    def teacher(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Sequence[Example],
        seed: int,
        texts: Sequence[str],
        injected: Float[Tensor, "texts labels"],
        prior: Float[Tensor, " labels"] | None = None,
    ) -> Float[Tensor, "texts labels"]:
        """Probabilities of the labels, each part of the mean with its label prior divided out.

        Args:
            decoder: the model.
            task: gives template and label words.
            demonstrations: in the first order.
            seed: of the others.
            texts: that it answers.
            injected: log-probabilities by the injection, with its prior.
            prior: see `injection`.
        """
        questions, config = Questions(decoder, task), self.distilling
        share = config.few_shot_share / config.orders
        total = (1 - config.few_shot_share) * injected
        for order in range(config.orders):
            shown = list(demonstrations)
            if order:
                seeded(f"order {order} {seed}").shuffle(shown)
            scores = few_shot_prompt(questions, shown).scores(texts)
            total = total + share * biased(scores, bias_towards(prior, scores)).double()
        return total.softmax(-1)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> BiasedPredictor:
        """Inject and read what `injection` finds.

        Raises:
            I2CLError: see `injection`.
        """
        found = self.injection(decoder, task, demonstrations, seed)
        rows, bias = found.read_out, torch.tensor(found.label_bias)
        values = found.context.values
        trained = values.numel() + (0 if rows is None else rows.numel())
        cost = Cost.of(values, rows, bias, trained=trained, unlabelled=found.settings[LABEL_PRIOR]["texts"])
        below = PromptPredictor(Questions(decoder, task, read_out=rows), edit=found.edit())
        return BiasedPredictor(below, bias, cost)
