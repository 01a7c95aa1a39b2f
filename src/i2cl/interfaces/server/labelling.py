"""Rounds of a labelling project, as jobs: fit the labels so far, cross-validate, and choose texts to label.

Like other fits, a round runs on the model thread between requests. It reads its rows from the
`i2cl.interfaces.server.labelling_store`, so its job holds no texts, and it starts again after a kill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from i2cl.core.injection import Injection
from i2cl.experiments.evidence.fit_evaluation import refitting, typical_temperature
from i2cl.experiments.evidence.verdicts import Z, wilson
from i2cl.injections.temperature import likely_temperature
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.fits import SharedDecoder
from i2cl.interfaces.server.jobs import Job, Jobs
from i2cl.interfaces.server.labelling_store import (
    Issue,
    LabelledText,
    LabellingStore,
    PoolText,
    Project,
    Proposal,
    Round,
)
from i2cl.labelling.label_issues import review
from i2cl.labelling.suggestion import suggest, text_vectors
from i2cl.methods import Injector, make_injector
from i2cl.methods.cross_validation import cross_validate, cross_validation_error
from i2cl.methods.injecting import injection_predictor
from i2cl.models.decoder import Decoder
from i2cl.tasks import Example, Task, Template

LABELS_PER_ROUND = 10
MAX_CANDIDATES = 2000  # texts among which a round chooses: a random sample of larger projects
SUGGESTIONS = 30  # texts per round, so that people who are faster than the fits get some too
MIN_ROUNDS_TO_EXTRAPOLATE = 3


def latest_job(jobs: Jobs, project: Project) -> Job | None:
    """Return the last round of a project that was queued, or None."""
    wanted = {"name": project.name, "project": project.id}
    rounds = (job for job in jobs.all() if job.kind == "labelling" and job.request.items() >= wanted.items())
    return next(rounds, None)


def queue_round(jobs: Jobs, store: LabellingStore, project: Project) -> None:
    """Queue a round if there is none yet, or after `LABELS_PER_ROUND` labels since the last one."""
    last = latest_job(jobs, project)
    if last is not None and not last.ended:
        return
    rounds = store.rounds(project)
    if last is not None or rounds:
        known = max(last.request["answer"] if last else 0, rounds[-1].answer if rounds else 0)
        if store.answers_since(project, known) < LABELS_PER_ROUND:
            return
    answer = store.last_answer(project)
    jobs.add("labelling", {"name": project.name, "project": project.id, "answer": answer}, {})


def task_of(project: Project, rows: Sequence[LabelledText] = ()) -> Task:
    """Return the task of a project, with its labelled texts as training rows."""
    examples = tuple(Example(row.text, project.labels.index(row.label)) for row in rows)
    return Task(project.name, project.labels, Template(project.template), train=examples)


def run(job: Job, batcher: Batcher, store: LabellingStore) -> dict[str, Any]:
    """Run a round, and return the fields of its last event.

    While labels are missing, texts are chosen by the base model. Raises RefusalError (404) if the project was
    deleted; I2CLError if the labels cannot be fitted; FitStoppedError if the job is cancelled.
    """
    project = store.project(job.request["name"])
    decoder = SharedDecoder(batcher, job)
    answer, rows = store.last_answer(project), store.labelled(project)
    task = task_of(project, rows)
    missing = [label for label in task.labels if label not in {row.label for row in rows}]

    def work() -> dict[str, Any]:
        source: Task | Injection = task
        accuracy: tuple[float, float, float] | None = None
        issues: list[Issue] = []
        if not missing:
            job.publish_progress("fitting", labels=len(rows))
            source, accuracy, issues = _fit(decoder, task, rows)
        candidates = store.candidates(project, MAX_CANDIDATES)
        job.publish_progress("suggesting", texts=len(candidates))
        proposals = _choose(decoder, source, store, candidates, store.taken(project))
        store.save_round(project, Round(answer, len(rows), accuracy), issues, proposals)
        return {"labels": len(rows), "missing": missing, "accuracy": accuracy and accuracy[0]}

    fields: dict[str, Any] = batcher.run(work).result()
    return fields


def _fit(
    decoder: Decoder, task: Task, rows: Sequence[LabelledText]
) -> tuple[Injection, tuple[float, float, float] | None, list[Issue]]:
    """Fit all rows, and cross-validate the fit if each label has two texts.

    Returns:
        The fit, its accuracy with a 95 % interval (None without a cross-validation), and its label issues.
    """
    method: Injector = make_injector()
    injection = method.fit_injection(decoder, task, task.train)
    if cross_validation_error(task, task.train):
        temperature = typical_temperature(method, task, task.train) or injection.temperature
        return injection.with_head(temperature=temperature), None, []
    refit = refitting(method, injection)
    predictor = cross_validate(
        task, task.train, lambda rest: injection_predictor(refit(decoder, task, rest), decoder, task)
    )
    log_probs = predictor.log_probs([row.text for row in rows])
    gold = np.array([row.label for row in task.train])
    right = int((log_probs.argmax(-1).numpy() == gold).sum())
    temperature = likely_temperature(log_probs.numpy(), gold, *method.temperature_prior)
    calibrated = (log_probs / temperature).log_softmax(-1)
    issues = [
        Issue(
            rows[issue.row].id,
            issue.label,
            issue.suggested,
            issue.probability,
            tuple(rows[row].id for row in issue.near_duplicates),
        )
        for issue in review(decoder, task, task.train, log_probs=calibrated)
    ]
    accuracy = (right / len(rows), *wilson(right, len(rows)))
    return injection.with_head(temperature=temperature), accuracy, issues


def _choose(
    decoder: Decoder,
    source: Task | Injection,
    store: LabellingStore,
    candidates: Sequence[PoolText],
    taken: Sequence[PoolText],
) -> list[Proposal]:
    """Choose the texts to label next, and keep the vectors that were computed for it."""
    if not candidates:
        return []
    task = source.task if isinstance(source, Injection) else source
    pool = [*candidates, *taken]
    unknown = [one for one in pool if one.vector is None]
    saved: dict[int, bytes] = {}
    if unknown:
        fresh = text_vectors(decoder, task, [one.text for one in unknown])
        saved = {one.id: vector.tobytes() for one, vector in zip(unknown, fresh, strict=True)}
        store.save_vectors(saved.items())
    vectors = np.stack([np.frombuffer(one.vector or saved[one.id], np.float32) for one in pool])
    texts, given = [one.text for one in pool], [one.text for one in taken]
    size = min(SUGGESTIONS, len(candidates))
    chosen = suggest(decoder, source, texts, size, labelled=given, vectors=vectors)
    return [Proposal(pool[one.index].id, one.label, max(one.probabilities)) for one in chosen]


@dataclass(frozen=True)
class Gain:
    """Expected change of the accuracy by `LABELS_PER_ROUND` more labels, with its 95 % interval."""

    gain: float
    low: float
    high: float


def expected_gain(rounds: Sequence[Round]) -> Gain | None:
    """Extrapolate the accuracies of a project's rounds, linearly in the logarithm of the number of labels.

    The rounds are weighted by the binomial variance of their accuracies. The interval is approximate, because
    the rounds share rows. None with fewer than `MIN_ROUNDS_TO_EXTRAPOLATE` accuracies at different numbers of
    labels.
    """
    measured = {one.labels: one.accuracy for one in rounds if one.accuracy is not None}
    if len(measured) < MIN_ROUNDS_TO_EXTRAPOLATE:
        return None
    labels = np.array(list(measured), dtype=float)
    accuracies, low, high = np.array(list(measured.values())).T
    deviations = (high - low) / (2 * Z)
    (slope, _), covariance = np.polyfit(np.log(labels), accuracies, 1, w=1 / deviations, cov="unscaled")
    step = float(np.log1p(LABELS_PER_ROUND / labels.max()))
    margin = Z * float(np.sqrt(covariance[0, 0]))
    return Gain(step * float(slope), step * (float(slope) - margin), step * (float(slope) + margin))
