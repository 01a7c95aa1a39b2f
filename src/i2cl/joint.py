"""Many calibrations at once: their steps share batches, each row under its own run's coefficients.

A step of one run is two short queries, which leaves most of a processor idle. Runs that have as many
demonstrations take the same number of steps, so they take them together.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.batching import Ids
from i2cl.calibration import Coefficients, packed_if_it_pays
from i2cl.context import ContextVector, Writers, require_demonstrations
from i2cl.decoder import Decoder
from i2cl.edits import NoisyEdit
from i2cl.errors import I2CLError
from i2cl.injection import Injection
from i2cl.memory import MemoryWarning, is_out_of_memory
from i2cl.recipe import CalibrationConfig
from i2cl.rows import RowsEdit
from i2cl.scoring import Scoring, encode_queries, label_tokens, sequence_log_probabilities
from i2cl.tasks import Example, Task
from i2cl.training import StepProgress, train_together


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
    """What `i2cl.calibrate` makes of each task, its demonstrations and its context vector, in less time.

    Batches and rates are those of each run by itself. Without noise the coefficients are too, to
    rounding; with noise each row has a draw of its own, from one generator for all runs that go
    together, so it depends on what is calibrated beside it. How many go together is up to the decoder's
    token budget, and halved where memory runs out. A run that diverges ends all.

    Args:
        decoder: the frozen model.
        tasks: of each run; the same one may be there with several seeds or demonstrations.
        demonstrations: of each run.
        contexts: the context vector of each run.
        config: recipe and ablation switches of all of them; its optimiser is to be AdamW.
        seeds: of each run's batches, and of ``positions="random"``; default: 0.
        scoring: predict each label's first token or its whole sequence; see `i2cl.scoring`.
        progress: called after each epoch, with the steps of the runs that go together.

    Raises:
        I2CLError: as `i2cl.calibrate`; for another optimiser, or lists of different lengths.
    """
    config = config or CalibrationConfig()
    seeds = [0] * len(tasks) if seeds is None else seeds
    lengths = [len(tasks), len(demonstrations), len(contexts), len(seeds)]
    if len(set(lengths)) > 1:
        raise I2CLError(
            f"{lengths} tasks, sets of demonstrations, context vectors and seeds: give every run its own"
        )
    if config.optimizer != "adamw":
        raise I2CLError(f"optimizer={config.optimizer!r} fits one run at a time: use calibrate, or adamw")
    runs = [
        _Run.of(decoder, *each, scoring) for each in zip(tasks, demonstrations, contexts, seeds, strict=True)
    ]
    found: dict[int, Injection] = {}
    waiting = _groups(runs, config, decoder.token_budget)
    while waiting:
        places = waiting.pop(0)
        made = _fit_or_none(decoder, [runs[place] for place in places], config, scoring, progress)
        if made is None:
            waiting[:0] = _halves(places)
        else:
            found |= dict(zip(places, made, strict=True))
    return [found[place] for place in range(len(runs))]


@dataclass(frozen=True)
class _Run:
    """What one calibration needs."""

    task: Task
    context: ContextVector
    seed: int
    queries: list[Ids]
    targets: list[Ids]

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        task: Task,
        demonstrations: Sequence[Example],
        context: ContextVector,
        seed: int,
        scoring: Scoring,
    ) -> "_Run":
        require_demonstrations(task, demonstrations)
        context.require_sizes(decoder)
        labels = label_tokens(decoder, task.template, task.labels, scoring)
        texts = [example.text for example in demonstrations]
        queries = encode_queries(decoder, task.template.query, texts, labels)
        return cls(task, context, seed, queries, [labels.target(example.label) for example in demonstrations])

    def kind(self, config: CalibrationConfig) -> tuple[int, Writers, int]:
        """What has to agree for runs to go together."""
        drawn = self.seed if config.positions == "random" else 0
        return len(self.queries), self.context.config.writers, drawn

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return max(len(query) + len(target) for query, target in zip(self.queries, self.targets, strict=True))


def _groups(runs: Sequence[_Run], config: CalibrationConfig, budget: int) -> list[list[int]]:
    """Places of the runs that go together: of one kind, and as many as the budget has room for."""
    kinds = defaultdict(list)
    for place, run in enumerate(runs):
        kinds[run.kind(config)].append(place)
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
    warnings.warn(message, MemoryWarning, stacklevel=3)
    return [places[:half], places[half:]]


def _fit_or_none(
    decoder: Decoder,
    group: Sequence[_Run],
    config: CalibrationConfig,
    scoring: Scoring,
    progress: StepProgress | None,
) -> list[Injection] | None:
    """What `_fit` makes, or None where memory ran out; what the error held on to is free by then."""
    try:
        return _fit(decoder, group, config, scoring, progress)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def _fit(
    decoder: Decoder,
    group: Sequence[_Run],
    config: CalibrationConfig,
    scoring: Scoring,
    progress: StepProgress | None,
) -> list[Injection]:
    active = config.active(decoder.layers, group[0].context.config.writers)
    coefficients = Coefficients(config, active, None, decoder.device, runs=(len(group),))
    count = len(group[0].queries)
    steps = zip(*(config.batches(count, one.seed) for one in group), strict=True)
    batches = [[place * count + row for place, rows in enumerate(step) for row in rows] for step in steps]
    losses = _Losses(decoder, group, config, coefficients)
    with decoder.frozen():
        histories = train_together(
            [coefficients.free], losses, batches, config, progress, decoder.model.dtype
        )
    return [
        Injection(
            context=one.context,
            coefficients=pairs.clone(),
            task=one.task.without_data(),
            base=decoder.base,
            positions=config.positions,
            scoring=scoring,
            seed=one.seed,
            settings=config.model_dump(mode="json") | {"together": len(group)},
            history=history,
        )
        for one, pairs, history in zip(
            group, coefficients.linear().detach().cpu(), histories or [()] * len(group), strict=True
        )
    ]


class _Losses:
    """Cross-entropy of the labels of each run, under its own injection and noise."""

    def __init__(
        self,
        decoder: Decoder,
        group: Sequence[_Run],
        config: CalibrationConfig,
        coefficients: Coefficients,
    ) -> None:
        self.decoder = decoder
        self.config = config
        self.coefficients = coefficients
        self.queries = [query for one in group for query in one.queries]
        self.targets = [target for one in group for target in one.targets]
        self.owners = [place for place, one in enumerate(group) for _ in one.queries]
        self.vectors = torch.stack([one.context.values for one in group]).to(decoder.device)
        self.site = group[0].context.config.site
        self.seed = group[0].seed
        self.generator = torch.Generator(decoder.device).manual_seed(self.seed)

    def __call__(self, chosen: Sequence[int]) -> Float[Tensor, " runs"]:
        targets = [self.targets[row] for row in chosen]
        queries = [self.queries[row] for row in chosen]
        batch = packed_if_it_pays(self.decoder, queries, targets)
        amount, keep = self.coefficients.linear().unbind(-1)
        rows = RowsEdit(
            amount[..., None] * self.vectors,
            keep,
            torch.tensor([self.owners[row] for row in chosen], device=self.decoder.device),
            site=self.site,
            positions=self.config.positions,
            seed=self.seed,
        )
        edit = NoisyEdit(
            rows,
            active=self.coefficients.active,
            scale=self.config.noise,
            place=self.config.noise_place,
            writer_scale=self.decoder.writer_scale,
            generator=self.generator,
        )
        found = sequence_log_probabilities(self.decoder, batch, targets, edit)
        return -found.view(len(self.vectors), -1).mean(-1)
