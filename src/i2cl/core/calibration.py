"""Noisy self-calibration: lambda and beta of every writer, fitted to the demonstrations' own labels.

Source: paper, subsection "Noisy Self-calibration". A step of one run reads two short queries, which leaves
most of a processor idle. `calibrate_many` therefore lets several runs take their steps together; `calibrate`
fits a single one.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from i2cl.core.context import ContextVector
from i2cl.core.injection import Injection
from i2cl.core.loss import CalibrationLoss, CalibrationRun, Coefficients
from i2cl.core.recipe import CalibrationConfig
from i2cl.core.weights import apply_class_weight
from i2cl.errors import I2CLError, is_out_of_memory
from i2cl.models.batching import budget_chunks
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.memory import MemoryWarning
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import StepProgress, minimize, train
from i2cl.tasks import Examples, Task


def calibrate(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
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

    The loss is over the whole vocabulary, or among the task's labels (``loss`` of the config). Deterministic:
    one seed gives bit-identical results on one machine with one number of threads.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: the examples the context vector was made from, or others.
        context: what is injected.
        config: recipe and ablation switches.
        seed: of batches, noise and ``positions="random"``.
        scoring: predict each label's first token, or its full sequence. If the loss is among the labels, by
            first token or by words; see `i2cl.models.scoring.LabelScorer.for_fit`.
        start: initial coefficients, instead of the config's.
        batches: demonstration indices of every step, instead of random batches (one pass, in order).
        prompt: builds the text in front of a label, instead of the template's query. Tokens that all prompts
            start with run once per step, under one draw of the noise.
        progress: called after each epoch.

    Raises:
        I2CLError: without demonstrations, on a context vector of another model, on sizes that do not fit,
            or on a loss that is not finite.
    """
    config = config or CalibrationConfig()
    scorer = _questions(decoder, task, scoring, config)
    shown = apply_class_weight(demonstrations, task.labels, config.class_weight)
    run = CalibrationRun(scorer, shown, context, seed, start, batches, prompt)
    return _fit_all([run], config, progress)[0]


def calibrate_many(
    decoder: Decoder,
    tasks: Sequence[Task],
    demonstrations: Sequence[Examples],
    contexts: Sequence[ContextVector],
    config: CalibrationConfig | None = None,
    *,
    seeds: Sequence[int] | None = None,
    scoring: Scoring = "auto",
    progress: StepProgress | None = None,
) -> list[Injection]:
    """Run `calibrate` for several tasks, sets of demonstrations and context vectors, in less time.

    Each run has the batches, learning rates and noise that it would have separately, so the coefficients are
    the same to rounding. The token budget and the memory limit how many take their steps together; L-BFGS
    takes one at a time. If one run diverges, all end with its error.

    Args:
        decoder: the frozen model.
        tasks: of each run; one task may occur with several seeds or demonstrations.
        demonstrations: of each run.
        contexts: the context vector of each run.
        config: of all runs, as ``scoring`` is.
        seeds: of each run; default: 0 for all.
        scoring: see `calibrate`.
        progress: called after each epoch of each group of runs.

    Raises:
        I2CLError: as `calibrate`; for lists of different lengths.
    """
    seeds = [0] * len(tasks) if seeds is None else seeds
    lengths = [len(tasks), len(demonstrations), len(contexts), len(seeds)]
    if len(set(lengths)) > 1:
        counts = "{} tasks, {} sets of demonstrations, {} context vectors and {} seeds".format(*lengths)
        raise I2CLError(f"{counts}: give one of each for every run")
    config = config or CalibrationConfig()
    runs = [
        CalibrationRun(
            _questions(decoder, task, scoring, config),
            apply_class_weight(shown, task.labels, config.class_weight),
            context,
            seed,
        )
        for task, shown, context, seed in zip(tasks, demonstrations, contexts, seeds, strict=True)
    ]
    return _fit_all(runs, config, progress)


def _questions(decoder: Decoder, task: Task, scoring: Scoring, config: CalibrationConfig) -> LabelScorer:
    return (
        LabelScorer.for_fit(decoder, task, scoring)
        if config.loss == "labels"
        else LabelScorer(decoder, task, scoring)
    )


def _fit_all(
    runs: Sequence[CalibrationRun], config: CalibrationConfig, progress: StepProgress | None
) -> list[Injection]:
    for run in runs:
        run.require_fit(config)
    injections: dict[int, Injection] = {}
    waiting = _groups(runs, config)
    while waiting:
        places = waiting.pop(0)
        exceeded = False
        try:
            fitted = _fit([runs[one] for one in places], config, progress)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            exceeded = True
        if exceeded:
            waiting[:0] = _halves(places)  # outside except, where the traceback no longer holds memory
        else:
            injections |= zip(places, fitted, strict=True)
    return [injections[place] for place in range(len(runs))]


def _groups(runs: Sequence[CalibrationRun], config: CalibrationConfig) -> list[list[int]]:
    """Group the runs that can be fitted together, as many as the token budget allows."""
    kinds = defaultdict(list)
    for place, run in enumerate(runs):
        kinds[run.kind(place, config)].append(place)
    groups = []
    for places in kinds.values():
        longest = max(runs[place].longest for place in places)
        budget = runs[places[0]].scorer.decoder.training_budget
        size = max(1, budget // (config.batch_size * longest))
        groups += [places[start : start + size] for start in range(0, len(places), size)]
    return groups


def _halves(places: list[int]) -> list[list[int]]:
    if len(places) == 1:
        hint = "use shorter texts, a smaller batch_size, or load the model in bfloat16"
        raise I2CLError(f"a step of one run does not fit into memory: {hint}")
    half = (len(places) + 1) // 2
    message = f"out of memory with {len(places)} calibrations together; continuing with {half}"
    warnings.warn(message, MemoryWarning, stacklevel=4)
    return [places[:half], places[half:]]


def _fit(
    group: Sequence[CalibrationRun], config: CalibrationConfig, progress: StepProgress | None
) -> list[Injection]:
    first, decoder = group[0], group[0].scorer.decoder
    active = config.active(decoder.layers, first.context.config.writers)
    coefficients = Coefficients(config, active, [run.start for run in group], decoder.device)
    loss = CalibrationLoss(group, config, coefficients)
    free, dtype = [coefficients.free], decoder.model.dtype
    with decoder.frozen():
        if config.optimizer == "lbfgs":
            chunks = budget_chunks(first.whole, decoder.training_budget)
            histories: Sequence[tuple[float, ...]] = [
                minimize(free, loss.mean, chunks, config.passes, config.pull, progress, dtype)
            ]
        else:
            histories = train(free, loss, _steps(group, config), config, progress, dtype)
    values = coefficients.linear().detach().cpu()
    return [
        Injection(
            context=run.context,
            coefficients=pairs.clone(),
            task=run.scorer.task.without_data(),
            base=decoder.base,
            positions=config.positions,
            scoring=run.scorer.scoring,
            seed=run.seed,
            settings=config.model_dump(mode="json", exclude_none=True),
            history=history,
        )
        for run, pairs, history in zip(group, values, histories or [()] * len(group), strict=True)
    ]


def _steps(group: Sequence[CalibrationRun], config: CalibrationConfig) -> list[list[int]]:
    """Return the demonstrations of every step, numbered through all runs."""
    count = len(group[0].demonstrations)
    each = [config.batches(count, run.seed) if run.batches is None else run.batches for run in group]
    steps = zip(*each, strict=True)
    return [[place * count + row for place, rows in enumerate(step) for row in rows] for step in steps]
