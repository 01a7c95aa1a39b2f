"""Routes of labelling projects, and of corrections of served answers. All need an admin token."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Query, Request, Response

from i2cl.errors import I2CLError
from i2cl.interfaces.server import labelling
from i2cl.interfaces.server.guard import policy
from i2cl.interfaces.server.labelling_store import LabellingStore, Project
from i2cl.interfaces.server.refusals import OPTION, RefusalError
from i2cl.interfaces.server.routes import schemas
from i2cl.interfaces.server.routes.management import jobs_of, queue_fit
from i2cl.interfaces.server.service import Service
from i2cl.models.encoding import TooLongError
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Task, Template
from i2cl.tasks.formats import preview
from i2cl.tasks.labels import LabelLookup, is_blank, name_labels, normalize_word
from i2cl.tasks.rows import Query as TextRow, read_queries

MAX_PROJECT_BODY = 64 * 2**20  # bytes of a file of texts
MAX_PROJECT_TEXTS = 100_000
ProjectQuery = Annotated[schemas.ProjectName, Query()]


def add_projects(app: FastAPI, service: Service) -> None:
    """Add the routes that create, describe, export and remove labelling projects."""

    @app.get("/v1/labelling/projects", summary="Labelling projects")
    @policy("admin")
    def projects() -> dict[str, Any]:
        store = store_of(service)
        return {"object": "list", "data": [_summary(store, project) for project in store.projects()]}

    @app.post("/v1/labelling/projects", status_code=201, summary="Create a labelling project")
    @policy("admin", schemas.JSON, max_body=MAX_PROJECT_BODY)
    async def create(body: schemas.NewProject) -> dict[str, Any]:
        store = store_of(service)
        project, left_out = await service.run_blocking(_create, service, store, body)
        labelling.queue_round(jobs_of(service), store, project)
        return _summary(store, project) | {"left_out": left_out}

    @app.get("/v1/labelling/export", summary="Labelled texts as CSV", response_class=Response)
    @policy("admin")
    def export(project: ProjectQuery) -> Response:
        chosen = store_of(service).project(project)
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(("text", "label"))
        writer.writerows((row.text, row.label) for row in store_of(service).labelled(chosen))
        disposition = f"attachment; filename*=UTF-8''{quote(chosen.name, safe='')}.csv"
        return Response(table.getvalue(), media_type="text/csv", headers={"Content-Disposition": disposition})

    @app.get("/v1/labelling/review", summary="Labels that are probably wrong, worst first")
    @policy("admin")
    def review(project: ProjectQuery) -> dict[str, Any]:
        store = store_of(service)
        return {"object": "list", "data": store.issues(store.project(project))}

    @app.get("/v1/labelling/projects/{name:path}", summary="State of a labelling project")
    @policy("admin")
    def state(name: str) -> dict[str, Any]:
        return _state(service, store_of(service).project(name))

    @app.delete("/v1/labelling/projects/{name:path}", summary="Remove a project with its texts and labels")
    @policy("admin")
    def delete(name: str) -> dict[str, Any]:
        project = store_of(service).project(name)
        if job := labelling.latest_job(jobs_of(service), project):
            jobs_of(service).cancel(job)
        store_of(service).delete(project.name)
        return {"id": project.name, "object": "labelling", "deleted": True}


def add_labelling(app: FastAPI, service: Service) -> None:
    """Add the routes for labelling texts, and for fitting the task to the labels."""

    @app.post("/v1/labelling/next", summary="Get texts to label")
    @policy("admin", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    def following(body: schemas.NextTexts) -> dict[str, Any]:
        store, jobs = store_of(service), jobs_of(service)
        project = store.project(body.project)
        labelling.queue_round(jobs, store, project)
        job = labelling.latest_job(jobs, project)
        if not store.rounds(project) and job is not None and not job.ended:
            return {"object": "list", "data": [], "waiting": True}
        texts = store.lease(project, body.labeller, body.count)
        return {"object": "list", "data": texts, "waiting": False}

    @app.post("/v1/labelling/answers", summary="Save a label, or skip a text")
    @policy("admin", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    def answer(body: schemas.LabelAnswer) -> dict[str, Any]:
        store = store_of(service)
        project = store.project(body.project)
        store.answer(project, body.text, body.label, body.labeller, body.replaces)
        labelling.queue_round(jobs_of(service), store, project)
        return _summary(store, project)

    @app.post("/v1/labelling/undo", summary="Take back your last answer")
    @policy("admin", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    def undo(body: schemas.Labeller) -> dict[str, Any]:
        store = store_of(service)
        return store.undo(store.project(body.project), body.labeller)

    @app.post(
        "/v1/labelling/finish",
        status_code=202,
        summary="Fit the task to all labels, and serve it",
        response_model=None,
    )
    @policy("admin", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    async def finish(body: schemas.Finish, request: Request) -> Response:
        store = store_of(service)
        options = _fit_options(store, body)
        return await service.run_blocking(queue_fit, service, request, options)

    @app.post("/v1/feedback", summary="Correct the answer of a task")
    @policy("admin", schemas.JSON, max_body=schemas.MAX_JSON_BODY)
    def feedback(body: schemas.Feedback) -> dict[str, Any]:
        store = store_of(service)
        service.tasks.queries(body.task, [body.text])  # raises on an unknown task or an invalid text
        project = _project_of_task(service, store, body.task)
        store.correct(project, body.text, body.label, body.labeller)
        labelling.queue_round(jobs_of(service), store, project)
        return _summary(store, project)


def store_of(service: Service) -> LabellingStore:
    """Return the labelling projects of a server. Raises RefusalError (403) if it is read-only."""
    service.tasks.require_writable()
    assert service.labelling is not None  # noqa: S101 - only read-only servers have none
    return service.labelling


def _summary(store: LabellingStore, project: Project) -> dict[str, Any]:
    """Return a project as JSON, with the numbers of its texts."""
    return {
        "id": project.name,
        "object": "labelling",
        "created": int(project.created),
        "labels": list(project.labels),
        **store.counts(project),
    }


def _state(service: Service, project: Project) -> dict[str, Any]:
    """Return everything about a project but its texts: counts, accuracies, last round and last fit."""
    store, job = store_of(service), labelling.latest_job(jobs_of(service), project)
    fits = (fit for fit in jobs_of(service).all() if fit.kind == "fit")
    fit = next((fit for fit in fits if fit.request["name"] == project.name), None)
    rounds = labelling.measured_rounds(store.rounds(project))
    counts = Counter(row.label for row in store.labelled(project))
    return _summary(store, project) | {
        "template": project.template,
        "labels_per_round": labelling.LABELS_PER_ROUND,
        "per_label": {label: counts[label] for label in project.labels},
        "classifier": rounds[-1].classifier if rounds else None,
        "rounds": [
            {"labels": fitted.labels}
            | dict(zip(("accuracy", "low", "high"), fitted.accuracy or (), strict=True))
            for fitted in rounds
        ],
        "next_round": labelling.typical_gain(rounds[-1]) if rounds else None,
        "issues": len(store.issues(project)),
        "job": job and job.to_json(),
        "fit": fit and fit.to_json(),
    }


def _create(
    service: Service, store: LabellingStore, body: schemas.NewProject
) -> tuple[Project, dict[str, int]]:
    """Read the texts of a new project, and create it.

    Returns:
        The project, and the numbers of texts that were left out, by reason.

    Raises:
        RefusalError: 409 if there is a project of that name, or as a fit of that name; 422 if the file cannot
            be read, or has a label that the project does not; 413 if there are too many texts.
        I2CLError: if the labels or the template are invalid.
    """
    name = normalize_word(body.name)
    service.tasks.require_name(name)
    task = Task(name, tuple(body.labels), Template(body.template))
    scorer = LabelScorer(service.decoder, task)
    rows = _read_rows(service, body)
    usable = [row for row in rows if row.error is None]
    if not usable:
        error = rows[0].error
        raise RefusalError(422, "bad_rows", f"no text can be used: {error and error.why}")
    if len(usable) > MAX_PROJECT_TEXTS:
        message = f"the file has {len(usable)} texts, but the limit is {MAX_PROJECT_TEXTS}"
        raise RefusalError(413, "too_many_texts", message, "take a sample")
    labels = _labels_of(usable, task.labels)
    texts = {text: labels[text] for text in _without_too_long(scorer, list(labels))}
    if not texts:
        raise RefusalError(413, "text_too_long", "every text exceeds the model's context", "shorten them")
    project = store.create(name, task.labels, body.template, texts)
    left_out = {
        "unusable": len(rows) - len(usable),
        "too_long": len(labels) - len(texts),
        "repeated": len(usable) - len(labels) + len(texts) - store.counts(project)["texts"],
    }
    return project, left_out


def _read_rows(service: Service, body: schemas.NewProject) -> list[TextRow]:
    """Read the texts of a new project; unusable rows have an error."""
    column, kept = body.text_column, () if body.label_column is None else (body.label_column,)
    if isinstance(body.texts, schemas.DataFile):
        suffix, name, content = body.texts.suffix, body.texts.name, body.texts.content
    else:
        suffix, name, column, kept = ".json", "texts", "text", ()
        content = json.dumps([{"text": text} for text in body.texts])
    with jobs_of(service).scratch() as folder:
        path = folder / f"texts{suffix}"
        path.write_text(content, encoding="utf-8")
        try:
            return list(read_queries(str(path), column=column, kept=kept, skip=True))
        except I2CLError as error:
            message = OPTION.sub("", str(error).replace(str(path), name))
            raise RefusalError(422, "bad_rows", message) from None


def _labels_of(rows: list[TextRow], labels: tuple[str, ...]) -> Mapping[str, str | None]:
    """Return the texts with their labels, None where the label column is empty or not given. Raises
    RefusalError (422) listing the rows with an unknown label.
    """
    cells = [cell for row in rows for cell in row.kept or (None,)]
    cells = [None if cell is None or is_blank(str(cell)) else cell for cell in cells]
    lookup = LabelLookup(labels, [cell for cell in cells if cell is not None])
    labels_by_text: dict[str, str | None] = {}
    unknown: set[str] = set()
    for row, cell in zip(rows, cells, strict=True):
        index = None if cell is None else lookup.find(cell)
        if cell is not None and index is None:
            unknown.add(preview(cell))
        labels_by_text[row.text] = labels_by_text.get(row.text) or (None if index is None else labels[index])
    if unknown:
        message = f"the file has labels that the project does not: {', '.join(sorted(unknown)[:5])}"
        raise RefusalError(422, "unknown_label", message, "add them to labels, or correct the file")
    return labels_by_text


def _without_too_long(scorer: LabelScorer, texts: list[str]) -> Iterator[str]:
    """Yield the texts that fit into the model's context."""
    try:
        scorer.queries(texts, cut=False)
    except TooLongError:
        if len(texts) > 1:
            half = len(texts) // 2
            yield from _without_too_long(scorer, texts[:half])
            yield from _without_too_long(scorer, texts[half:])
    else:
        yield from texts


def _fit_options(store: LabellingStore, body: schemas.Finish) -> schemas.Fit:
    """Return the fit of all labels of a project, or of two and more labels that have a text, if requested.

    Raises RefusalError (409) if another label has no text.
    """
    project = store.project(body.project)
    rows = store.labelled(project)
    used = {row.label for row in rows}
    labels = [label for label in project.labels if label in used]
    missing = [label for label in project.labels if label not in used]
    if missing and not (body.omit_empty_labels and len(labels) > 1):
        message = f"no text has the label {name_labels(missing)}"
        hint = "label one text of each"
        if len(labels) > 1:
            hint += ", or finish without them ('omit_empty_labels')"
        raise RefusalError(409, "label_missing", message, hint)
    return schemas.Fit(
        name=body.name or project.name,
        template=project.template,
        labels=labels,
        examples=[{"text": row.text, "label": row.label} for row in rows],
        shots=max(len(rows), 1),  # all rows, evaluated by cross-validation
    )


def _project_of_task(service: Service, store: LabellingStore, name: str) -> Project:
    """Return the project of a task, creating it if there is none. Raises I2CLError for a multi-label task."""
    if project := store.find(normalize_word(name)):
        return project
    entry = service.tasks.entry(name)
    task = service.tasks.injection(entry.digest).task
    task.require_single_label("feedback", "correct its rows in a file, and fit it again")
    return store.create(entry.name, entry.labels, task.template.format, {})
