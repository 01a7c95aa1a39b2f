"""The loss of calibration, for one run or for several runs that take their steps together.

Source: paper, subsection "Noisy Self-calibration".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.core.context import ContextVector, require_demonstrations
from i2cl.core.edits import LinearEdit, NoisyEdit, PlacedEdit, RowsEdit, draw_from, draw_together
from i2cl.core.recipe import CalibrationConfig
from i2cl.core.weights import example_weights
from i2cl.errors import I2CLError
from i2cl.models.batching import Batch, Ids, packing_pays, shared_front
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import LabelLikelihood
from i2cl.tasks import Example


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """Inputs of one calibration; see `i2cl.core.calibration.calibrate`."""

    scorer: LabelScorer
    demonstrations: tuple[Example, ...]
    context: ContextVector
    seed: int
    start: Float[Tensor, "layers sites 2"] | None = None
    batches: Sequence[Sequence[int]] | None = None
    prompt: Callable[[str], str] | None = None

    @cached_property
    def whole(self) -> list[Ids]:
        """Token ids of each demonstration's query."""
        return self.scorer.queries([example.text for example in self.demonstrations], self.prompt)

    @cached_property
    def shared(self) -> Ids:
        """Tokens that a prompt with demonstrations has in front of every query."""
        return shared_front(self.whole) if self.prompt else ()

    @cached_property
    def queries(self) -> list[Ids]:
        """Token ids of each query after the shared ones."""
        return [ids[len(self.shared) :] for ids in self.whole]

    def require_fit(self, config: CalibrationConfig) -> None:
        """Raise I2CLError if the inputs do not fit together; see `i2cl.core.calibration.calibrate`."""
        require_demonstrations(self.scorer.task, self.demonstrations)
        self.context.require_base(self.scorer.decoder)
        shape = (*self.context.values.shape[:2], 2)
        if self.start is not None and config.formula != "linear":
            raise I2CLError(
                f"start coefficients are linear, but formula={config.formula!r}: use formula='linear'"
            )
        if self.start is not None and self.start.shape != shape:
            raise I2CLError(
                f"start coefficients have shape {tuple(self.start.shape)}, but {shape} is needed: use those "
                "of an injection into this model"
            )
        count = len(self.demonstrations)
        if self.batches is not None and config.optimizer == "lbfgs":
            raise I2CLError(
                "optimizer='lbfgs' reads all demonstrations at once: leave out batches, or use adamw"
            )
        if not all(rows and set(rows) <= set(range(count)) for rows in self.batches or ()):
            raise I2CLError(f"batches must hold demonstration indices from 0 to {count - 1}")

    def kind(self, place: int, config: CalibrationConfig) -> tuple[object, ...]:
        """Return a key that runs must share to be fitted together."""
        alone = config.optimizer == "lbfgs" or self.batches is not None or self.prompt is not None
        drawn = self.seed if config.positions == "random" else 0
        kind = len(self.demonstrations), self.context.config.writers, drawn
        return (*kind, place) if alone else kind

    @property
    def longest(self) -> int:
        """Number of tokens of the longest query with its target."""
        targets = (self.scorer.labels.target(example.label) for example in self.demonstrations)
        return max(len(query) + len(target) for query, target in zip(self.whole, targets, strict=True))


class Coefficients:
    """Trained scalars of one or more runs, in the form of their formula and as linear coefficients."""

    def __init__(
        self,
        config: CalibrationConfig,
        active: Bool[Tensor, "layers sites"],
        starts: Sequence[Float[Tensor, "layers sites 2"] | None],
        device: torch.device,
    ) -> None:
        self.formula = config.formula
        self.active = active
        fixed = torch.tensor([0.0, 1.0]).expand(*active.shape, 2)
        first = torch.tensor([config.init_lambda, 1.0 if config.formula == "add" else config.init_beta])
        values = torch.stack([first.expand_as(fixed) if one is None else one.float().cpu() for one in starts])
        self.base = torch.where(active[..., None], values, fixed).to(device)
        trained = active[..., None] & torch.tensor([True, config.formula != "add"])
        self.trained = trained.expand_as(self.base).contiguous().to(device)
        self.free = torch.nn.Parameter(self.base[self.trained].clone())

    def linear(self) -> Float[Tensor, "runs layers sites 2"]:
        """Return (lambda, beta) such that every formula becomes ``lambda v + beta a``."""
        amount, scale = self.base.masked_scatter(self.trained, self.free).unbind(-1)
        if self.formula == "add":
            amount = amount.relu()
        elif self.formula == "balance":
            scale = scale.relu()
            amount, scale = amount * scale, (1 - amount) * scale
        return torch.stack([amount, scale], dim=-1)


class CalibrationLoss:
    """Cross-entropy of each run's gold labels under its injection and noise."""

    def __init__(
        self, group: Sequence[CalibrationRun], config: CalibrationConfig, coefficients: Coefficients
    ) -> None:
        decoder = self.decoder = group[0].scorer.decoder
        self.config = config
        self.coefficients = coefficients
        self.shared = group[0].shared
        self.likelihood = LabelLikelihood(
            decoder,
            [query for run in group for query in run.queries],
            [run.scorer.labels for run in group for _ in run.queries],
            [example.label for run in group for example in run.demonstrations],
            among_labels=config.loss == "labels",
        )
        self.weights = example_weights([example for run in group for example in run.demonstrations])
        self.owners = [place for place, run in enumerate(group) for _ in run.queries]
        self.vectors = torch.stack([run.context.values for run in group]).to(decoder.device)
        self.site = group[0].context.config.site
        self.seed = group[0].seed
        self.generators = [torch.Generator(decoder.device).manual_seed(run.seed) for run in group]

    def __call__(self, chosen: Sequence[int]) -> Float[Tensor, " runs"]:
        """Compute the mean loss of each run over its share of the chosen demonstrations, in nats."""
        likelihoods = self.likelihood(chosen, self._log_likelihoods, reserve=len(self.shared))
        if self.weights is not None:
            likelihoods = likelihoods * self.weights[list(chosen)].to(likelihoods)
        return -likelihoods.view(len(self.vectors), -1).mean(-1)

    def _log_likelihoods(self, rows: Sequence[int]) -> Float[Tensor, " rows"]:
        """Compute the log-probabilities of the gold labels of rows that may share a batch."""
        batch = self._batch(rows)
        edit = NoisyEdit(
            self._injection(rows),
            active=self.coefficients.active,
            scale=self.config.noise,
            place=self.config.noise_place,
            writer_scale=self.decoder.writer_scale,
            draw=self._draw(batch, rows),
        )
        prefix = self.decoder.prefix(self.shared, edit=edit) if self.shared else None
        return self.likelihood.of_rows(rows, batch, edit, prefix)

    def mean(self, chosen: Sequence[int]) -> Tensor:
        """Compute the loss of a single run deterministically: each part always draws the same noise."""
        self.generators[0].manual_seed(self.seed + chosen[0])
        return self(chosen)[0]

    def _draw(self, batch: Batch, rows: Sequence[int]) -> Callable[[Tensor], Tensor]:
        if len(self.generators) == 1 or not self.config.noise:
            return draw_from(self.generators[0])
        runs = {owner: list(part) for owner, part in groupby(rows, self.owners.__getitem__)}
        alone = [self._batch(part) for part in runs.values()]
        return draw_together([self.generators[owner] for owner in runs], alone, batch, self._lengths(rows))

    def _injection(self, rows: Sequence[int]) -> PlacedEdit:
        linear = self.coefficients.linear()
        where = self.site, self.config.positions, self.seed
        if len(linear) == 1:
            return LinearEdit(self.vectors[0], linear[0], *where)
        amount, keep = linear.unbind(-1)
        owners = torch.tensor([self.owners[row] for row in rows], device=self.decoder.device)
        return RowsEdit(amount[..., None] * self.vectors, keep, owners, *where)

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        return [self.likelihood.lengths[row] for row in rows]

    def _batch(self, rows: Sequence[int]) -> Batch:
        """Make a batch, packed into one row if the model allows it, there is no prefix, and it saves work."""
        packs = self.decoder.architecture.packs and not self.shared
        packed = packs and packing_pays(self._lengths(rows), self.decoder.d_model)
        return self.likelihood.batch(rows, packed=packed)
