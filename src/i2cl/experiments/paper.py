"""Studies of the paper that are not a method with options: worst demonstrations, moved and transferred fits.

Its ablations are options of I2CL, its controls are in `i2cl.methods.i2cl_variants`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from i2cl.core.injection import Injection
from i2cl.injections.transfer import transfer
from i2cl.methods import Cost, Method, make_methods
from i2cl.methods.base import Predictor, count_correct
from i2cl.methods.injecting import injection_predictor
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task

GROUPS = 20  # draws of which "worst" demonstrations are the worst (paper, "Deficient ICL")
MAX_JUDGING_ROWS = 100  # held-out rows that few-shot scores each draw on; the paper gives no number


def worst_demonstrations(
    decoder: Decoder, task: Task, shots: int | None, seed: int
) -> tuple[Examples, Examples]:
    """Draw `GROUPS` groups of demonstrations, and return the one with the lowest few-shot accuracy.

    Returns:
        The group, and the held-out training rows that the accuracy was measured on.

    Raises:
        I2CLError: if no training rows are left to hold out.
    """
    groups = [task.sample(shots, 1_000_000 + GROUPS * seed + number) for number in range(GROUPS)]
    used = {example.text: example for group in groups for example in group}
    unused = sum(example.text not in used for example in task.train)
    judging_rows = task.held_out(max(1, min(MAX_JUDGING_ROWS, unused)), list(used.values()), seed)
    (few_shot,) = make_methods(["few_shot"])
    worst = min(
        groups, key=lambda group: count_correct(few_shot.fit(decoder, task, group, seed), judging_rows)
    )
    return worst, judging_rows


@dataclass(frozen=True)
class Move(Method):
    """Inject the vector and coefficients that were fitted on another task (paper, Figure 5)."""

    name = "move"
    summary = "vector and coefficients of another task"

    source: Injection

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:  # noqa: ARG002
        """Return a predictor with the source's injection; nothing is fitted."""
        return injection_predictor(self.source, decoder, task)


@dataclass(frozen=True, eq=False)
class Transfer(Method):
    """Calibrate from the average of related tasks (paper, Table 3).

    Attributes:
        first: the task's own injection, which is compared with the related ones; its fit is not timed.
        anchors: injections of other tasks.
        weights: weights of the related anchors by task; filled in by `fit`.
    """

    name = "transfer"
    summary = "calibration from the average of related tasks"

    first: Injection
    anchors: Sequence[Injection]
    weights: dict[str, float] = field(default_factory=dict)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Calibrate; see `i2cl.injections.transfer.transfer`."""
        result = transfer(decoder, task, demonstrations, self.anchors, seed=seed, first=self.first)
        self.weights.update({self.anchors[index].task.name: weight for index, weight in result.weights})
        injection = result.injection
        cost = Cost.of(injection.context, trained=injection.coefficients.numel())
        scorer = LabelScorer(decoder, task)
        return PromptPredictor(scorer, edit=injection.edit(), injection=injection, cost=cost)
