"""Noisy self-calibration: lambda and beta of every writer, fitted to the demonstrations' own labels.

Source: paper, subsection "Noisy Self-calibration". A step of one run is two short queries, which leaves
most of a processor idle, so runs that take the same number of steps take them together
(`calibrate_many`); `calibrate` is that of one.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.core.context import ContextVector, require_demonstrations
from i2cl.core.edits import Draw, LinearEdit, NoisyEdit, PlacedEdit, RowsEdit, draw_from
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.errors import I2CLError
from i2cl.models.batching import (
    Batch,
    Ids,
    MemoryWarning,
    budget_chunks,
    is_out_of_memory,
    packing_pays,
    shared_front,
)
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions, Scoring, labelled_batch, sequence_log_probabilities
from i2cl.models.training import StepProgress, minimize, train_together
from i2cl.tasks import Example, Task


def calibrate(
    decoder: Decoder,
    task: Task,
    demonstrations: Sequence[Example],
    context: ContextVector,
    config: CalibrationConfig | None = None,
    *,
    seed: int = 0,
    scoring: Scoring = "auto",
    start: Float[Tensor, "layers sites 2"] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    prompt: Callable[[str], str] | None = None,
    progress: StepProgress | None = None,
) -> Injection:
    """Fit lambda and beta on the demonstrations by cross-entropy of the label after its query.

    The loss is over the whole vocabulary. Repeatable bit for bit for one
    seed on one machine with one number of threads.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: the examples the context vector was made from, or others.
        context: what is injected.
        config: recipe and ablation switches.
        seed: of batches, noise and ``positions="random"``.
        scoring: predict each label's first token or its whole sequence; see `i2cl.models.scoring`.
        start: first coefficients, instead of the config's init values.
        batches: demonstration indices of every step, instead of random batches (one pass, in order).
        prompt: from a text to what precedes its label, instead of the template's query alone. The
            tokens that all of these share in front run once a step, under one draw of the noise.
        progress: called after each epoch.

    Raises:
        I2CLError: without demonstrations, on a context vector of another model, on sizes that do not fit,
            or on a loss that is not finite.
    """
    config = config or CalibrationConfig()
    questions = Questions(decoder, task, scoring)
    run = _Run(questions, tuple(demonstrations), context, seed, start, batches, prompt)
    return _fitted(decoder, [run], config, progress)[0]


def calibrate_many(
    decoder: Decoder,
    tasks: Sequence[Task],
    demonstrations: Sequence[Sequence[Example]],
    contexts: Sequence[ContextVector],
    config: CalibrationConfig | None = None,
    *,
    seeds: Sequence[int] | None = None,
    scoring: Scoring = "auto",
    progress: StepProgress | None = None,
) -> list[Injection]:
    """What `calibrate` makes of each task, its demonstrations and its context vector, in less time.

    Batches, rates and noise are those of each run by itself, so the coefficients are too, to rounding. As
    many go together as the token budget and the memory have room for; L-BFGS takes one at a time. A run
    that diverges ends all.

    Args:
        decoder: the frozen model.
        tasks: of each run; the same one may be there with several seeds or demonstrations.
        demonstrations: of each run.
        contexts: the context vector of each run.
        config: recipe and ablation switches of all of them.
        seeds: of each run's batches, noise and ``positions="random"``; default: 0.
        scoring: predict each label's first token or its whole sequence; see `i2cl.models.scoring`.
        progress: called after each epoch, with the steps of the runs that go together.

    Raises:
        I2CLError: as `calibrate`; for lists of different lengths.
    """
    seeds = [0] * len(tasks) if seeds is None else seeds
    lengths = [len(tasks), len(demonstrations), len(contexts), len(seeds)]
    if len(set(lengths)) > 1:
        raise I2CLError(
            f"{lengths} tasks, sets of demonstrations, context vectors and seeds: give every run its own"
        )
    runs = [
        _Run(Questions(decoder, task, scoring), tuple(shown), context, seed)
        for task, shown, context, seed in zip(tasks, demonstrations, contexts, seeds, strict=True)
    ]
    return _fitted(decoder, runs, config or CalibrationConfig(), progress)


@dataclass(frozen=True, eq=False)
class _Run:  # what one calibration needs; see `calibrate`
    questions: Questions
    demonstrations: tuple[Example, ...]
    context: ContextVector
    seed: int
    start: Float[Tensor, "layers sites 2"] | None = None
    batches: Sequence[Sequence[int]] | None = None
    prompt: Callable[[str], str] | None = None

    @cached_property
    def whole(self) -> list[Ids]:
        """Token ids of each demonstration's query."""
        return self.questions.queries([example.text for example in self.demonstrations], self.prompt)

    @cached_property
    def shared(self) -> Ids:
        """What a prompt with demonstrations has in front of every query."""
        return shared_front(self.whole) if self.prompt else ()

    @cached_property
    def queries(self) -> list[Ids]:
        """The rest of each query."""
        return [ids[len(self.shared) :] for ids in self.whole]

    @cached_property
    def targets(self) -> list[Ids]:
        """Label tokens behind each query."""
        return self.questions.targets(self.demonstrations)

    def require_fit(self, config: CalibrationConfig) -> None:
        """Refuse what cannot be calibrated, before any work.

        Raises:
            I2CLError: see `calibrate`.
        """
        require_demonstrations(self.questions.task, self.demonstrations)
        self.context.require_base(self.questions.decoder)
        shape = (*self.context.values.shape[:2], 2)
        if self.start is not None and config.formula != "linear":
            raise I2CLError(
                f"start coefficients are linear, but formula={config.formula!r}: use formula='linear'"
            )
        if self.start is not None and self.start.shape != shape:
            raise I2CLError(
                f"start coefficients have shape {tuple(self.start.shape)}, but {shape} is needed: "
                "take those of an injection into this model"
            )
        count = len(self.demonstrations)
        if self.batches is not None and config.optimizer == "lbfgs":
            raise I2CLError(
                "optimizer='lbfgs' takes all demonstrations at once: leave batches out, or use adamw"
            )
        if not all(rows and set(rows) <= set(range(count)) for rows in self.batches or ()):
            raise I2CLError(f"batches are to hold demonstration indices, each 0 to {count - 1}")

    def kind(self, place: int, config: CalibrationConfig) -> tuple[object, ...]:
        """What has to agree for runs to go together; their place, where nothing else may."""
        alone = config.optimizer == "lbfgs" or self.batches is not None or self.prompt is not None
        drawn = self.seed if config.positions == "random" else 0
        kind = len(self.demonstrations), self.context.config.writers, drawn
        return (*kind, place) if alone else kind

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return max(len(query) + len(target) for query, target in zip(self.whole, self.targets, strict=True))


def _fitted(
    decoder: Decoder, runs: Sequence[_Run], config: CalibrationConfig, progress: StepProgress | None
) -> list[Injection]:
    for run in runs:
        run.require_fit(config)
    found: dict[int, Injection] = {}
    waiting = _groups(runs, config, decoder.token_budget)
    while waiting:
        places = waiting.pop(0)
        made = _fit_or_none(decoder, [runs[place] for place in places], config, progress)
        if made is None:
            waiting[:0] = _halves(places)
        else:
            found |= dict(zip(places, made, strict=True))
    return [found[place] for place in range(len(runs))]


def _groups(runs: Sequence[_Run], config: CalibrationConfig, budget: int) -> list[list[int]]:
    """Places of the runs that go together: of one kind, and as many as the budget has room for."""
    kinds = defaultdict(list)
    for place, run in enumerate(runs):
        kinds[run.kind(place, config)].append(place)
    groups = []
    for places in kinds.values():
        longest = max(runs[place].longest for place in places)
        size = max(1, budget // (config.batch_size * longest))
        groups += [places[start : start + size] for start in range(0, len(places), size)]
    return groups


def _halves(places: list[int]) -> list[list[int]]:
    """Runs that did not fit into memory together, as two groups."""
    if len(places) == 1:
        raise I2CLError(
            "a step of one run does not fit into memory: use shorter texts, a smaller batch_size, or load "
            "the model in bfloat16"
        )
    half = (len(places) + 1) // 2
    message = f"out of memory with {len(places)} calibrations together; going on with {half}"
    warnings.warn(message, MemoryWarning, stacklevel=4)
    return [places[:half], places[half:]]


def _fit_or_none(
    decoder: Decoder, group: Sequence[_Run], config: CalibrationConfig, progress: StepProgress | None
) -> list[Injection] | None:
    """What `_fit` makes, or None where memory ran out; what the error held on to is free by then."""
    try:
        return _fit(decoder, group, config, progress)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def _fit(
    decoder: Decoder, group: Sequence[_Run], config: CalibrationConfig, progress: StepProgress | None
) -> list[Injection]:
    first = group[0]
    active = config.active(decoder.layers, first.context.config.writers)
    coefficients = Coefficients(config, active, [run.start for run in group], decoder.device)
    loss = _Loss(decoder, group, config, coefficients)
    free, dtype = [coefficients.free], decoder.model.dtype
    with decoder.frozen():
        if config.optimizer == "lbfgs":
            chunks = budget_chunks(first.whole, decoder.token_budget)
            histories: Sequence[tuple[float, ...]] = [
                minimize(free, loss.mean, chunks, config.passes, config.pull, progress, dtype)
            ]
        else:
            histories = train_together(free, loss, _steps(group, config), config, progress, dtype)
    found = coefficients.linear().detach().cpu()
    return [
        Injection(
            context=run.context,
            coefficients=pairs.clone(),
            task=run.questions.task.without_data(),
            base=decoder.base,
            positions=config.positions,
            scoring=run.questions.scoring,
            seed=run.seed,
            settings=config.model_dump(mode="json"),
            history=history,
        )
        for run, pairs, history in zip(group, found, histories or [()] * len(group), strict=True)
    ]


def _steps(group: Sequence[_Run], config: CalibrationConfig) -> list[list[int]]:
    """Demonstrations of every step, those of all runs counted on."""
    count = len(group[0].demonstrations)
    each = [run.batches or config.batches(count, run.seed) for run in group]
    return [
        [place * count + row for place, rows in enumerate(step) for row in rows]
        for step in zip(*each, strict=True)
    ]


class Coefficients:
    """The trained scalars of some runs in their formula's own form, and the linear form that is injected."""

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
        trained = active[..., None].repeat(1, 1, 2)
        if config.formula == "add":
            trained[..., 1] = False
        self.trained = trained.expand_as(self.base).contiguous().to(device)
        self.free = torch.nn.Parameter(self.base[self.trained].clone())

    def linear(self) -> Float[Tensor, "runs layers sites 2"]:
        """(lambda, beta) such that every formula reads ``lambda v + beta a``."""
        values = self.base.masked_scatter(self.trained, self.free)
        amount, scale = values.unbind(-1)
        if self.formula == "add":
            amount = amount.relu()
        elif self.formula == "balance":
            scale = scale.relu()
            amount, scale = amount * scale, (1 - amount) * scale
        return torch.stack([amount, scale], dim=-1)


class _Loss:
    """Cross-entropy of the labels of each run, under its own injection and its own noise."""

    def __init__(
        self, decoder: Decoder, group: Sequence[_Run], config: CalibrationConfig, coefficients: Coefficients
    ) -> None:
        self.decoder = decoder
        self.config = config
        self.coefficients = coefficients
        self.shared = group[0].shared
        self.queries = [query for run in group for query in run.queries]
        self.targets = [target for run in group for target in run.targets]
        self.owners = [place for place, run in enumerate(group) for _ in run.queries]
        self.vectors = torch.stack([run.context.values for run in group]).to(decoder.device)
        self.site = group[0].context.config.site
        self.seed = group[0].seed
        self.generators = [torch.Generator(decoder.device).manual_seed(run.seed) for run in group]

    def __call__(self, chosen: Sequence[int]) -> Float[Tensor, " runs"]:
        """Mean loss of each run over its own of these demonstrations, in nats."""
        parts = self.decoder.together([len(self.shared) + length for length in self._lengths(chosen)])
        found = torch.cat([self._learned([chosen[place] for place in part]) for part in parts])
        order = torch.tensor([place for part in parts for place in part], device=found.device).argsort()
        return -found[order].view(len(self.vectors), -1).mean(-1)

    def _learned(self, chosen: Sequence[int]) -> Float[Tensor, " chosen"]:
        """Log-probability of each one's target, in nats; of rows that may share a batch."""
        batch = self._batch(chosen)
        edit = NoisyEdit(
            self._injection(chosen),
            active=self.coefficients.active,
            scale=self.config.noise,
            place=self.config.noise_place,
            writer_scale=self.decoder.writer_scale,
            draw=self._draw(batch, chosen),
        )
        prefix = self.decoder.prefix(self.shared, edit=edit) if self.shared else None
        targets = [self.targets[row] for row in chosen]
        return sequence_log_probabilities(self.decoder, batch, targets, edit, prefix)

    def mean(self, chosen: Sequence[int]) -> Tensor:
        """That of the only run, whose value and gradients repeat: each part keeps its draw of the noise."""
        self.generators[0].manual_seed(self.seed + chosen[0])
        return self(chosen)[0]

    def _draw(self, batch: Batch, chosen: Sequence[int]) -> Callable[[Tensor], Tensor]:
        if len(self.generators) == 1 or not self.config.noise:
            return draw_from(self.generators[0])
        runs = {owner: list(rows) for owner, rows in groupby(chosen, self.owners.__getitem__)}
        alone = [self._batch(rows) for rows in runs.values()]
        return Draw([self.generators[owner] for owner in runs], alone, batch, self._lengths(chosen))

    def _injection(self, chosen: Sequence[int]) -> PlacedEdit:
        linear = self.coefficients.linear()
        where = self.site, self.config.positions, self.seed
        if len(linear) == 1:
            return LinearEdit(self.vectors[0], linear[0], *where)
        amount, keep = linear.unbind(-1)
        owners = torch.tensor([self.owners[row] for row in chosen], device=self.decoder.device)
        return RowsEdit(amount[..., None] * self.vectors, keep, owners, *where)

    def _lengths(self, chosen: Sequence[int]) -> list[int]:
        """Tokens of each query with all but the last of its target."""
        return [len(self.queries[row]) + len(self.targets[row]) - 1 for row in chosen]

    def _batch(self, chosen: Sequence[int]) -> Batch:
        """Queries with their targets, in one row where the model can do that and it saves work.

        Cached tokens in front of all of them rule out packing.
        """
        packs = self.decoder.architecture.packs and not self.shared
        packed = packs and packing_pays(self._lengths(chosen), self.decoder.d_model)
        queries, targets = ([rows[row] for row in chosen] for rows in (self.queries, self.targets))
        return labelled_batch(queries, targets, self.decoder.device, packed=packed)
