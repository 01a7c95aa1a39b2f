"""Every method on every task with every seed: what `i2cl eval` measures."""

from collections.abc import Callable, Sequence

from i2cl.errors import I2CLError
from i2cl.experiments.evaluation import Evaluation, NotRun, bottom
from i2cl.experiments.parallel import DecoderSource, run_jobs, suggested_workers
from i2cl.experiments.records import Run
from i2cl.methods import Method
from i2cl.models.decoder import Decoder
from i2cl.tasks import Task


def sweep(
    source: DecoderSource,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    seeds: Sequence[int],
    *,
    shots: int | None = None,
    limit: int | None = None,
    workers: int | None = None,
    skip: bool = False,
    word: Callable[[Task, Decoder], Task] | None = None,
    watch: Callable[[Run], None] | None = None,
    refused: Callable[[NotRun], None] | None = None,
) -> list[Run]:
    """Evaluate tasks x methods x seeds, in that order; seeds go together where a method gains by it.

    Methods that stand on the same fit, such as one with and without a label prior, share it. ``word`` gives a
    task other words once the model is there, such as those of its chat template. ``watch`` is called with
    each run as it ends, in any order; ``refused`` with each method that cannot be run, and the others go on;
    without it the first is raised. With ``skip``, methods that need another model are left out with a
    `SkippedWarning`.

    Raises:
        I2CLError: if rows are lacking, before the model is loaded; or if a method, or every one, cannot be
            fitted.
    """
    for task in tasks:
        task.sample(shots, seeds[0])
        task.queries(limit)
    decoder = source()
    if word is not None:
        tasks = [word(task, decoder) for task in tasks]
    fits: dict[Method, list[Method]] = {}
    for method in methods:
        fits.setdefault(bottom(method), []).append(method)
    jobs = [
        Evaluation(task, tuple(alike), group, shots, limit, skip, refused is not None)
        for task in tasks
        for fit, alike in fits.items()
        for group in ([tuple(seeds)] if fit.joint else [(seed,) for seed in seeds])
    ]
    runs: list[tuple[tuple[int, int, int], Run]] = []
    called = [method.called for method in methods]
    lacking: list[NotRun] = []
    for place, made in run_jobs(decoder, source, jobs, workers or suggested_workers(decoder, len(jobs))):
        at = place * len(tasks) // len(jobs)  # each task has as many jobs
        for run in made:
            if isinstance(run, NotRun):
                lacking.append(run)
                if refused is not None:
                    refused(run)
                continue
            runs.append(((at, called.index(run.method), seeds.index(run.seed)), run))
            if watch is not None:
                watch(run)
    if lacking and not runs:
        raise I2CLError(lacking[0].why)
    return [run for _, run in sorted(runs, key=lambda one: one[0])]
