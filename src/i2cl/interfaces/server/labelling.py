"""Rounds of a labelling project, as jobs: fit a text classifier, and choose texts to label.

A text classifier is fitted in seconds, so that people need not wait; the LLM is fitted when they finish. Like
fits, a round runs on the model thread between requests. It reads its rows from the
`i2cl.interfaces.server.labelling_store`, so its job holds no texts, and it starts again after a kill.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from i2cl.core.experts import EmbeddingsExpert, TfidfExpert
from i2cl.experiments.evidence.verdicts import Z, wilson
from i2cl.injections.ensemble import EXPERT_PRIORS, likely_weights
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.fits import SharedDecoder
from i2cl.interfaces.server.jobs import Job, Jobs
from i2cl.interfaces.server.labelling_store import (
    Issue,
    LabelledText,
    LabellingStore,
    PoolText,
    Project,
    Round,
)
from i2cl.labelling.label_issues import Vector, fit_and_score, review
from i2cl.labelling.suggestion import choose_typical, text_vectors, zero_shot_log_probs
from i2cl.methods.cross_validation import fold_rows
from i2cl.models.decoder import Decoder
from i2cl.tasks import Example, Task, Template

LABELS_PER_ROUND = 10
MAX_CANDIDATES = 2000  # texts among which a round chooses: a random sample of larger projects
SUGGESTIONS = 30  # texts per round, so that people who are faster than the rounds get some too
FOLDS = 10  # of the cross-validation
TYPICAL_SLOPE, SLOPE_STD = 0.10, 0.15
"""Change of the accuracy in a round, divided by the change of the logarithm of the number of labels: mean and
standard deviation in simulations (docs/guide/label.md)."""
SAME_VECTOR = 0.99  # cosine; a text has another vector from another encoder

_queueing = threading.Lock()


def latest_job(jobs: Jobs, project: Project) -> Job | None:
    """Return the last round of a project that was queued, or None."""
    request = {"name": project.name, "project": project.id}
    rounds = (job for job in jobs.all() if job.kind == "labelling" and job.request.items() >= request.items())
    return next(rounds, None)


def queue_round(jobs: Jobs, store: LabellingStore, project: Project) -> None:
    """Queue a round if there is none yet, or after `LABELS_PER_ROUND` labels since the last one."""
    with _queueing:  # two requests at the same time queue one round
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


def queue_next_round(jobs: Jobs, job: Job, store: LabellingStore) -> None:
    """Queue the next round when one has ended, if enough labels were given in the meantime.

    Raises RefusalError, OSError or WriteError like `Jobs.add`.
    """
    if job.kind == "labelling":
        project = store.find(job.request["name"])
        if project is not None and project.id == job.request["project"]:
            queue_round(jobs, store, project)


def task_of(project: Project, rows: Sequence[LabelledText]) -> Task:
    """Return the task of the labels that have a text, with the labelled texts as training rows.

    As long as fewer than two labels have a text, the task has all labels and no rows.
    """
    used = {row.label for row in rows}
    labels = tuple(label for label in project.labels if label in used)
    if len(labels) < 2:
        return Task(project.name, project.labels, Template(project.template))
    examples = tuple(Example(row.text, labels.index(row.label)) for row in rows)
    return Task(project.name, labels, Template(project.template), train=examples)


def run(job: Job, batcher: Batcher, store: LabellingStore, encoder: str | None) -> dict[str, Any]:
    """Run a round, and return the fields of its last event.

    Args:
        job: the round.
        batcher: has the model.
        store: the projects.
        encoder: sentence encoder of the classifier; None for a classifier on character n-grams.

    Raises:
        RefusalError: 404 if the project was deleted.
        FitStoppedError: if the job is cancelled, or the server shuts down.
    """
    project = store.project(job.request["name"])
    decoder = SharedDecoder(batcher, job)

    def work() -> dict[str, Any]:
        answer, taken = store.last_answer(project), store.taken(project)
        candidates = store.candidates(project, MAX_CANDIDATES)
        rows = [LabelledText(entry.id, entry.text, entry.label) for entry in taken if entry.label is not None]
        task = task_of(project, rows)
        vectors = _vectors(job, decoder, task, store, project, [*taken, *candidates], encoder)
        texts = [candidate.text for candidate in candidates]
        chosen = _choose(texts, [entry.text for entry in taken], vectors)
        if task.train:
            embeddings = vectors if encoder else None
            expert = EmbeddingsExpert.name if encoder else TfidfExpert.name
            weight, accuracy, issues = _cross_validate(decoder, project, rows, embeddings, expert)
            result = Round(answer, len(rows), expert, accuracy)
            log_probs = fit_and_score(task, task.train, [texts[at] for at in chosen], embeddings)
            log_probs = (weight * log_probs).log_softmax(-1)
        else:
            result, issues = Round(answer, len(rows), None, None), list[Issue]()
            log_probs = zero_shot_log_probs(decoder, task, texts, chosen) if chosen else torch.empty(0)
        proposals = [
            (candidates[at].id, task.labels[int(row.argmax())], float(row.max().exp()))
            for at, row in zip(chosen, log_probs, strict=True)
        ]
        store.save_round(project, result, issues, proposals)
        used = {row.label for row in rows}
        missing = [label for label in project.labels if label not in used]
        return {"labels": len(rows), "missing": missing, "accuracy": result.accuracy and result.accuracy[0]}

    fields: dict[str, Any] = batcher.run(work).result()
    return fields


def _cross_validate(
    decoder: Decoder,
    project: Project,
    rows: Sequence[LabelledText],
    vectors: Mapping[str, Vector] | None,
    expert: str,
) -> tuple[float, tuple[float, float, float] | None, list[Issue]]:
    """Cross-validate a classifier on the labels that have two texts or more.

    Returns:
        The weight that calibrates its log-probabilities; its accuracy on all texts with a 95 % interval,
        where the only text of a label counts as wrong, or None if fewer than two labels have two texts; and
        labels that are probably wrong.
    """
    counts, labelled = Counter(row.label for row in rows), len(rows)
    rows = [row for row in rows if counts[row.label] > 1]
    task, prior = task_of(project, rows), EXPERT_PRIORS[expert]
    if not task.train:
        return prior.mean, None, []
    log_probs = torch.empty(len(rows), len(task.labels))  # of each row by a fit without its fold
    for fold in fold_rows(task, task.train, FOLDS):
        held_out = set(fold)
        other_rows = tuple(row for at, row in enumerate(task.train) if at not in held_out)
        log_probs[fold] = fit_and_score(task, other_rows, [rows[at].text for at in fold], vectors)
    gold = np.array([row.label for row in task.train])
    right = int((log_probs.argmax(-1).numpy() == gold).sum())
    (weight,) = likely_weights(log_probs[None].numpy(), gold, [prior])
    calibrated = (weight * log_probs).log_softmax(-1)
    issues = []
    for issue in review(decoder, task, task.train, log_probs=calibrated):
        near = tuple(rows[row].id for row in issue.near_duplicates)
        issues.append(Issue(rows[issue.row].id, issue.label, issue.suggested, issue.probability, near))
    return weight, (right / labelled, *wilson(right, labelled)), issues


def _choose(texts: Sequence[str], taken: Sequence[str], vectors: Mapping[str, Vector]) -> list[int]:
    """Return the indices of the texts to label next, best first."""
    if not texts:
        return []
    free = np.stack([vectors[text] for text in texts])
    covered = np.array([vectors[text] for text in taken]).reshape(len(taken), free.shape[1])
    return choose_typical(free, min(SUGGESTIONS, len(texts)), covered)


def _vectors(
    job: Job,
    decoder: Decoder,
    task: Task,
    store: LabellingStore,
    project: Project,
    pool: Sequence[PoolText],
    encoder: str | None,
) -> dict[str, Vector]:
    """Return the vector of each text, and save new ones.

    An earlier server may have made the stored vectors with another encoder: one of them is computed again,
    once, and if it differs, all are.
    """

    def embed(texts: Sequence[str]) -> Float[np.ndarray, "texts d"]:
        return text_vectors(decoder, task, texts, encoder, lambda _: decoder.pause())

    vectors = {
        entry.text: np.frombuffer(entry.vector, np.float32) for entry in pool if entry.vector is not None
    }
    if vectors and project.id not in store.checked:
        text, stored = next(iter(vectors.items()))
        (again,) = embed([text])
        if again.shape != stored.shape or again @ stored < SAME_VECTOR:
            store.delete_vectors(project)
            vectors = {}
    store.checked.add(project.id)
    unknown = [entry for entry in pool if entry.text not in vectors]
    if unknown:
        job.publish_progress("embedding", texts=len(unknown))
        fresh = embed([entry.text for entry in unknown])
        store.save_vectors((entry.id, vector.tobytes()) for entry, vector in zip(unknown, fresh, strict=True))
        vectors |= {entry.text: vector for entry, vector in zip(unknown, fresh, strict=True)}
    return vectors


def measured_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds that measured the accuracy of the latest classifier."""
    measured = [result for result in rounds if result.accuracy is not None]
    return [result for result in measured if result.classifier == measured[-1].classifier]


def typical_gain(last: Round) -> dict[str, float]:
    """Return how much `LABELS_PER_ROUND` more labels typically change the accuracy on new texts.

    It depends on the number of labels alone: how the accuracy of a project has changed so far does not
    improve the forecast (docs/guide/label.md). The last accuracy only limits what can be gained.

    Returns:
        The change, as a share, with the bounds of its 95 % interval (``gain``, ``low``, ``high``).
    """
    accuracy, low, _ = last.accuracy or (0.0, 0.0, 0.0)
    step, margin = math.log1p(LABELS_PER_ROUND / last.labels), Z * SLOPE_STD
    return {
        "gain": min(step * TYPICAL_SLOPE, 1 - accuracy),
        "low": step * (TYPICAL_SLOPE - margin),
        "high": min(step * (TYPICAL_SLOPE + margin), 1 - low),
    }
