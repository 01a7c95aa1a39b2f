"""Plan a fit from its size and the free memory: choose the solver and estimate the cost.

The Gauss-Newton solver needs one kernel row, and one backward pass over its example, for every pair of an
example and a wrong label. Its cost grows with the number of labels and its memory with the number of rows.
The AdamW solver takes a fixed number of small batches, whatever the number of labels.
"""

import math
from dataclasses import dataclass
from typing import Literal

from i2cl.errors import I2CLError
from i2cl.models.training import TrainConfig

Solver = Literal["auto", "gauss_newton", "adamw"]

MAX_EXAMPLES = 16_384  # one pass over more would take hours
MAX_LABELS = 4096
MAX_KERNEL_PAIRS = 512  # examples times wrong labels; beyond, AdamW is more accurate (docs/log.md)
MAX_WORD_KERNEL_PAIRS = 2048  # the same for word-level scoring, where AdamW takes three times as long
MAX_REQUESTED_PAIRS = 4096  # for solver="gauss_newton"
MAX_UNIT_EXAMPLES = 256  # AdamW estimates the unit of each sublayer on up to this many examples
JACOBIAN_COPIES = 1.5  # peak memory of the Jacobian, relative to its size
ADAMW_COPIES = 5  # parameter vectors that AdamW holds: values, gradient, two moments, one temporary
SOLVER_MATRICES = 5  # square float64 matrices of the Newton solver
FREE_MEMORY_SHARE = 0.25  # default memory limit of a fit, relative to the free memory

# Cost of passes over the examples, in units of one inference pass.
TRAINING_FORWARD = 1.5
BACKWARD = 1.3
# A later step differentiates only the examples that are not fitted yet: share of the first step's cost.
LATER_STEP = 0.6
LATER_WORD_STEP = 0.87  # the same for word-level scoring, which fits most examples later
RETRIES = 2  # inference passes of a later step, which may be tried again with more damping

ADAMW = TrainConfig(epochs=5, batch_size=8, lr=1e-3, lr_final=0.0, warmup=0.05, weight_decay=0.0)
ADAMW_WORDS = ADAMW.model_copy(update={"epochs": 8, "batch_size": 16})  # word-level scoring
MIN_ADAMW_STEPS = 240  # fits of few examples reach it by smaller batches, then by more epochs
MAX_EPOCHS_BY_BATCH = 10  # epochs up to which batches are made smaller instead
MIN_BATCH_SIZE = 4
MAX_VISITS = 12_800  # examples of all epochs together, unless a single epoch has more


@dataclass(frozen=True)
class FitSize:
    """Dimensions of a fit that determine its cost.

    Attributes:
        examples: number of demonstrations.
        labels: number of labels.
        parameters: number of fitted values.
        word_level: whether labels are scored by their words.
    """

    examples: int
    labels: int
    parameters: int
    word_level: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of an example and a wrong label: rows and columns of the Gauss-Newton kernel."""
        return self.examples * (self.labels - 1)

    @property
    def kernel_bytes(self) -> int:
        """Memory of the Gauss-Newton solver beyond the model."""
        jacobian = JACOBIAN_COPIES * 4 * self.pairs * self.parameters
        return int(jacobian) + SOLVER_MATRICES * 8 * self.pairs**2

    @property
    def adamw_bytes(self) -> int:
        """Memory of the AdamW solver beyond the model."""
        return 4 * self.parameters * (min(self.examples, MAX_UNIT_EXAMPLES) + ADAMW_COPIES)


@dataclass(frozen=True)
class FitPlan:
    """How a fit will be solved.

    Attributes:
        solver: ``"gauss_newton"`` or ``"adamw"``.
        passes: expected cost, in inference passes over the examples.
        batch_size: examples per step, or None for as many as a batch holds.
        warning: why the solver is not the usual one for this size, or "".
    """

    solver: Literal["gauss_newton", "adamw"]
    passes: float
    batch_size: int | None = None
    warning: str = ""


def plan_fit(size: FitSize, memory: float, solver: Solver = "auto", steps: int = 4) -> FitPlan:
    """Choose the solver of a fit and estimate its cost.

    Args:
        size: of the fit.
        memory: memory limit in bytes, beyond the model.
        solver: the requested solver.
        steps: maximum number of Gauss-Newton steps.

    Raises:
        I2CLError: if the fit is too large for the requested solver, or for the memory.
    """
    usual_limit = MAX_WORD_KERNEL_PAIRS if size.word_level else MAX_KERNEL_PAIRS
    limit = MAX_REQUESTED_PAIRS if solver == "gauss_newton" else usual_limit
    needed = f"the Gauss-Newton solver needs {size.kernel_bytes / 1e9:.3g} GB"
    available = f"{memory / 1e9:.3g} GB may be used"
    if solver != "adamw" and size.pairs <= limit and size.kernel_bytes <= memory:
        return _gauss_newton(size, steps)
    if solver == "gauss_newton":
        hint = "leave out solver='gauss_newton', or give fewer examples of each class (--shots)"
        if size.pairs > limit:
            count = f"{size.pairs} pairs of an example and a wrong label"
            raise I2CLError(f"solver='gauss_newton' takes up to {limit} pairs, not {count}: {hint}")
        raise I2CLError(f"{needed}, but {available}: raise the limit (--memory), or {hint}")
    if size.adamw_bytes > memory:
        needed = f"a fit of this model needs {size.adamw_bytes / 1e9:.3g} GB beside it"
        raise I2CLError(f"{needed}, but {available}: raise the limit (--memory)")
    fallback = solver == "auto" and size.pairs <= limit
    return _adamw(size, f"{needed}, but {available}: using AdamW, which needs less" if fallback else "")


def _gauss_newton(size: FitSize, steps: int) -> FitPlan:
    linearization = TRAINING_FORWARD + BACKWARD * (size.labels - 1)
    first_step = linearization + 1
    if steps <= 1:
        return FitPlan("gauss_newton", first_step + TRAINING_FORWARD)
    share = LATER_WORD_STEP if size.word_level else LATER_STEP
    later_steps = (steps - 1) * (share * linearization + RETRIES)
    return FitPlan("gauss_newton", first_step + later_steps + TRAINING_FORWARD)


def _adamw(size: FitSize, warning: str) -> FitPlan:
    schedule = adamw_schedule(size.examples, word_level=size.word_level)
    epoch = TRAINING_FORWARD + BACKWARD
    return FitPlan("adamw", (schedule.epochs + 1) * epoch, schedule.batch_size, warning)


def adamw_schedule(examples: int, *, word_level: bool = False) -> TrainConfig:
    """Return epochs, batch size and learning rates for a number of examples.

    ``word_level``: whether scoring is word-level, which fits word weights too.
    """
    default = ADAMW_WORDS if word_level else ADAMW
    batch_size = default.batch_size
    if not word_level:
        small_batch = math.ceil(examples * MAX_EPOCHS_BY_BATCH / MIN_ADAMW_STEPS)
        batch_size = min(max(small_batch, MIN_BATCH_SIZE), batch_size)
    min_epochs = math.ceil(MIN_ADAMW_STEPS / math.ceil(examples / batch_size))
    epochs = max(min_epochs, min(default.epochs, math.ceil(MAX_VISITS / examples)))
    return default.model_copy(update={"batch_size": batch_size, "epochs": epochs})


def check_fit_size(examples: int, labels: int) -> None:
    """Raise I2CLError for more than `MAX_EXAMPLES` examples or `MAX_LABELS` labels."""
    if labels > MAX_LABELS:
        raise I2CLError(
            f"anchored calibration takes up to {MAX_LABELS} labels, not {labels}: use sentence_embeddings"
        )
    if examples > MAX_EXAMPLES:
        raise I2CLError(
            f"anchored calibration takes up to {MAX_EXAMPLES} examples, not {examples}: give fewer of each "
            "class (--shots)"
        )
