"""Labelling projects on the disk: texts, who is labelling them, their labels, and accuracies.

    DIR/.i2cl-server/labelling.sqlite3

Every change is one transaction, which is on the disk when the method returns. A text is leased to one person
at a time, so that several people can label a project without labelling a text twice.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from i2cl.errors import I2CLError
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.tasks.sample import text_key

LEASE_SECONDS = 600.0  # for which a text stays with the person who got it

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA foreign_keys = ON;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS projects (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    labels TEXT NOT NULL,  -- a JSON list
    template TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS texts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    project INTEGER NOT NULL REFERENCES projects ON DELETE CASCADE,
    text TEXT NOT NULL,
    digest BLOB NOT NULL,  -- equal for texts that differ in case and spaces only
    place INTEGER,  -- rank among the suggestions; NULL: not suggested
    proposal TEXT,  -- the most probable label
    confidence REAL,  -- its probability
    vector BLOB,  -- float32, see i2cl.labelling.text_vectors
    labeller TEXT,  -- who has the text until leased_until
    leased_until REAL NOT NULL DEFAULT 0,
    UNIQUE (project, digest)
);
CREATE TABLE IF NOT EXISTS answers (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    text_id INTEGER NOT NULL REFERENCES texts ON DELETE CASCADE,
    label TEXT,  -- NULL: skipped
    labeller TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_of_text ON answers (text_id);
CREATE TABLE IF NOT EXISTS rounds (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    project INTEGER NOT NULL REFERENCES projects ON DELETE CASCADE,
    answer INTEGER NOT NULL,  -- id of the last one that the round has seen
    labels INTEGER NOT NULL,
    classifier TEXT,  -- NULL: none, because fewer than two labels have a text
    accuracy REAL,  -- in a cross-validation; NULL: not measured
    low REAL,
    high REAL,
    issues TEXT NOT NULL,  -- a JSON list, see Issue
    created REAL NOT NULL
);
-- The last answer for each text: SQLite takes the other columns from the row with the maximum.
CREATE VIEW IF NOT EXISTS current AS SELECT text_id, label, max(id) AS id FROM answers GROUP BY text_id;
"""

_ANSWERS = "FROM texts LEFT JOIN current ON text_id = texts.id WHERE project = ?"
_UNANSWERED = f"{_ANSWERS} AND current.id IS NULL"
_RANDOM_ORDER = "texts.id * 2654435761 % 4294967296"  # the same in every query


@dataclass(frozen=True)
class Project:
    """A labelling project. Its name is also the name of the task that its labels are for."""

    id: int
    name: str
    labels: tuple[str, ...]
    template: str
    created: float  # seconds since 1970


@dataclass(frozen=True)
class LabelledText:
    """A text with its current label."""

    id: int
    text: str
    label: str


@dataclass(frozen=True)
class PoolText:
    """A text to choose from, or one that is labelled, with its vector if that is known."""

    id: int
    text: str
    vector: bytes | None  # float32
    label: str | None


@dataclass(frozen=True)
class Issue:
    """A labelled text whose label is probably wrong."""

    text: int
    label: str
    suggested: str
    probability: float  # of ``label``, by a fit that has not seen the text
    near_duplicates: tuple[int, ...] = ()  # texts that are nearly equal, and have another label


@dataclass(frozen=True)
class Round:
    """Result of one fit to the labels of a project.

    Attributes:
        answer: id of the last answer that the fit has seen.
        labels: number of labelled texts.
        classifier: what was fitted, such as ``"embeddings"``; None while fewer than two labels
            have a text.
        accuracy: in a cross-validation, with its 95 % interval; None if it was not measured.
    """

    answer: int
    labels: int
    classifier: str | None
    accuracy: tuple[float, float, float] | None


class LabellingStore:
    """All labelling projects of a server, in one SQLite database."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises I2CLError if it is damaged, OSError if it cannot be created."""
        path.touch(mode=0o600)  # other users of the machine cannot read the texts
        self.checked: set[int] = set()  # ids of projects whose vectors this process made or checked
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        try:
            self._connection.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            hint = "restore it from a backup, or remove it"
            raise I2CLError(f"{str(path)!r} cannot be used ({error})", hint) from None

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction, synced to the disk at the end."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    # Projects

    def project(self, name: str) -> Project:
        """Return a project. Raises RefusalError (404) if there is none."""
        if (project := self.find(name)) is None:
            message = f"there is no labelling project {name!r}"
            raise RefusalError(404, "unknown_project", message, "see GET /v1/labelling/projects")
        return project

    def find(self, name: str) -> Project | None:
        """Return a project, or None."""
        rows = self._rows("SELECT * FROM projects WHERE name = ?", name)
        return _project(rows[0]) if rows else None

    def projects(self) -> list[Project]:
        """Return all projects, by name."""
        return [_project(row) for row in self._rows("SELECT * FROM projects ORDER BY name")]

    def create(
        self, name: str, labels: Sequence[str], template: str, texts: Mapping[str, str | None]
    ) -> Project:
        """Create a project.

        Args:
            name: of the project, and of its task.
            labels: label words.
            template: of the task's prompt.
            texts: the texts with their labels, or None; of texts that differ in case and spaces only, the
                first is kept.

        Raises:
            RefusalError: 409 if there is a project of that name.
        """
        with self._transaction() as database:
            if self.find(name) is not None:
                hint = "continue it, delete it, or choose another name"
                raise RefusalError(409, "project_exists", f"there is a labelling project {name!r}", hint)
            database.execute(
                "INSERT INTO projects (name, labels, template, created) VALUES (?, ?, ?, ?)",
                (name, json.dumps(list(labels)), template, time.time()),
            )
            project = self.project(name)
            self._insert(project, texts, "import")
        return project

    def _insert(self, project: Project, texts: Mapping[str, str | None], labeller: str) -> None:
        """Add texts that the project does not have, and the labels that they come with."""
        for text, label in texts.items():
            added = self._connection.execute(
                "INSERT OR IGNORE INTO texts (project, text, digest) VALUES (?, ?, ?)",
                (project.id, text, _digest(text)),
            )
            if added.rowcount and label is not None:
                self._answer(added.lastrowid, label, labeller)

    def delete(self, name: str) -> None:
        """Remove a project with all its texts and labels, also from the free pages of the file and from the
        write-ahead log. Raises RefusalError (404) if there is none.
        """
        with self._lock:
            with self._transaction() as database:
                database.execute("DELETE FROM projects WHERE id = ?", (self.project(name).id,))
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # Labelling

    def lease(self, project: Project, labeller: str, count: int) -> list[dict[str, Any]]:
        """Return up to ``count`` texts to label, those that the labeller already has first.

        They stay with the labeller for `LEASE_SECONDS`. Each has an ``id``, a ``text``, its ``label`` (None),
        and the proposed label with its probability (``proposal``, ``confidence``), which are None before the
        first round.
        """
        now = time.time()
        with self._transaction() as database:
            rows = database.execute(
                f"SELECT texts.id {_UNANSWERED} AND (labeller = ? OR leased_until <= ?) "
                f"ORDER BY leased_until <= ?, place IS NULL, place, {_RANDOM_ORDER} LIMIT ?",
                (project.id, labeller, now, now, count),
            )
            ids = [row["id"] for row in rows.fetchall()]
            return [self._lease(text, labeller) for text in ids]

    def _lease(self, text: int, labeller: str) -> dict[str, Any]:
        """Lease a text to a labeller, and return it as JSON."""
        self._connection.execute(
            "UPDATE texts SET labeller = ?, leased_until = ? WHERE id = ?",
            (labeller, time.time() + LEASE_SECONDS, text),
        )
        (row,) = self._rows(
            "SELECT texts.id, text, label, proposal, confidence FROM texts "
            "LEFT JOIN current ON text_id = texts.id WHERE texts.id = ?",
            text,
        )
        return dict(row)

    def answer(
        self, project: Project, text: int, label: str | None, labeller: str, replaces: str | None = None
    ) -> None:
        """Save a label, or that a text was skipped.

        Args:
            project: the project.
            text: id of the text.
            label: the label; None to skip the text.
            labeller: who labelled it.
            replaces: the label that this one replaces or confirms.

        Raises:
            RefusalError: 422 for a label that the project does not have, 404 for an unknown text, 409 if
                another person is labelling the text, or has labelled it meanwhile.
        """
        if label is not None and label not in project.labels:
            message = f"label {label[:60]!r} is not one of {', '.join(project.labels)}"
            raise RefusalError(422, "unknown_label", message, "correct it", param="label")
        with self._transaction() as database:
            row = database.execute(
                "SELECT texts.labeller, leased_until, current.id, label FROM texts "
                "LEFT JOIN current ON text_id = texts.id WHERE texts.id = ? AND project = ?",
                (text, project.id),
            ).fetchone()
            if row is None:
                message = f"project {project.name!r} has no text {text}"
                raise RefusalError(404, "unknown_text", message, "get the next texts", param="text")
            if row["id"] is not None and replaces is None and row["label"] == label:
                return  # the request was repeated
            hint, message = "get the next texts", f"this text already has the label {row['label']!r}"
            if row["label"] != replaces:
                raise RefusalError(409, "labelled", message, hint)
            if row["id"] is None and row["labeller"] != labeller and row["leased_until"] > time.time():
                raise RefusalError(409, "leased", "another person is labelling this text", hint)
            self._answer(text, label, labeller)

    def _answer(self, text: int | None, label: str | None, labeller: str) -> None:
        self._connection.execute(
            "INSERT INTO answers (text_id, label, labeller, created) VALUES (?, ?, ?, ?)",
            (text, label, labeller, time.time()),
        )

    def correct(self, project: Project, text: str, label: str, labeller: str) -> None:
        """Add a text with its label, or replace its label. Raises RefusalError (422) for a label that the
        project does not have.
        """
        with self._transaction():
            self._insert(project, {text: None}, labeller)
            (row,) = self._rows(
                "SELECT texts.id, label FROM texts LEFT JOIN current ON text_id = texts.id "
                "WHERE project = ? AND digest = ?",
                project.id,
                _digest(text),
            )
        if row["label"] != label:
            self.answer(project, row["id"], label, labeller, row["label"])

    def undo(self, project: Project, labeller: str) -> dict[str, Any]:
        """Remove the last answer of a labeller, and return its text, which the labeller has again.

        A text whose label was changed has its previous label again.

        Raises RefusalError (409) if there is none.
        """
        with self._transaction() as database:
            row = database.execute(
                "SELECT current.id, texts.id AS text FROM current JOIN texts ON texts.id = current.text_id "
                "JOIN answers ON answers.id = current.id WHERE project = ? AND answers.labeller = ? "
                "ORDER BY current.id DESC LIMIT 1",
                (project.id, labeller),
            ).fetchone()
            if row is None:
                raise RefusalError(409, "nothing_to_undo", "you have labelled nothing yet", "label a text")
            database.execute("DELETE FROM answers WHERE id = ?", (row["id"],))
            return self._lease(row["text"], labeller)

    # Results

    def labelled(self, project: Project) -> list[LabelledText]:
        """Return the labelled texts, in the order in which they were added."""
        rows = self._rows(
            "SELECT texts.id, text, label FROM texts JOIN current ON text_id = texts.id "
            "WHERE project = ? AND label IS NOT NULL ORDER BY texts.id",
            project.id,
        )
        return [LabelledText(*row) for row in rows]

    def last_answer(self, project: Project) -> int:
        """Return the id of the last answer; 0 if there is none."""
        query = "SELECT max(answers.id) AS id FROM answers JOIN texts ON texts.id = text_id WHERE project = ?"
        return self._rows(query, project.id)[0]["id"] or 0

    def answers_since(self, project: Project, answer: int) -> int:
        """Return the number of labels that were given after an answer, without skipped texts."""
        query = (
            "SELECT count(*) AS n FROM answers JOIN texts ON texts.id = text_id "
            "WHERE project = ? AND label IS NOT NULL AND answers.id > ?"
        )
        return int(self._rows(query, project.id, answer)[0]["n"])

    def counts(self, project: Project) -> dict[str, int]:
        """Return the numbers of all, labelled and skipped texts, and of people who have texts now."""
        (row,) = self._rows(
            "SELECT count(*) AS texts, count(label) AS labelled, "
            "count(current.id) - count(label) AS skipped, count(DISTINCT CASE WHEN leased_until > ? AND "
            "current.id IS NULL THEN labeller END) AS labellers "
            "FROM texts LEFT JOIN current ON text_id = texts.id WHERE project = ?",
            time.time(),
            project.id,
        )
        return dict(row)

    def candidates(self, project: Project, limit: int) -> list[PoolText]:
        """Return up to ``limit`` unlabelled texts that are not leased: a fixed random sample."""
        query = (
            f"SELECT texts.id, text, vector, label {_UNANSWERED} AND leased_until <= ? "
            f"ORDER BY {_RANDOM_ORDER} LIMIT ?"
        )
        return [PoolText(*row) for row in self._rows(query, project.id, time.time(), limit)]

    def taken(self, project: Project) -> list[PoolText]:
        """Return the texts that have a label, or that a person is labelling."""
        query = (
            f"SELECT texts.id, text, vector, label {_ANSWERS} AND "
            "(label IS NOT NULL OR current.id IS NULL AND leased_until > ?) ORDER BY texts.id"
        )
        return [PoolText(*row) for row in self._rows(query, project.id, time.time())]

    def save_vectors(self, vectors: Iterable[tuple[int, bytes]]) -> None:
        """Keep vectors of texts, by the ids of the texts."""
        with self._transaction() as database:
            database.executemany("UPDATE texts SET vector = ?2 WHERE id = ?1", vectors)

    def delete_vectors(self, project: Project) -> None:
        """Delete the vectors of a project's texts, which another encoder made."""
        with self._transaction() as database:
            database.execute("UPDATE texts SET vector = NULL WHERE project = ?", (project.id,))

    def save_round(
        self,
        project: Project,
        result: Round,
        issues: Sequence[Issue],
        proposals: Sequence[tuple[int, str, float]],
    ) -> None:
        """Save the result of a fit; ``proposals``: ids of the texts to label next, best first, each with its
        most probable label and the probability.
        """
        accuracy = result.accuracy or (None, None, None)
        saved = json.dumps([vars(issue) for issue in issues])
        with self._transaction() as database:
            database.execute("UPDATE texts SET place = NULL WHERE project = ?", (project.id,))
            database.executemany(
                "UPDATE texts SET place = ?, proposal = ?, confidence = ? WHERE id = ?",
                [(place, label, chance, text) for place, (text, label, chance) in enumerate(proposals)],
            )
            database.execute(
                "INSERT INTO rounds "
                "(project, answer, labels, classifier, accuracy, low, high, issues, created) "
                "SELECT id, ?, ?, ?, ?, ?, ?, ?, ? FROM projects WHERE id = ?",  # none if it was deleted
                (result.answer, result.labels, result.classifier, *accuracy, saved, time.time(), project.id),
            )

    def rounds(self, project: Project) -> list[Round]:
        """Return the results of all fits, oldest first."""
        rows = self._rows("SELECT * FROM rounds WHERE project = ? ORDER BY id", project.id)
        results = []
        for row in rows:
            accuracy = None if row["accuracy"] is None else (row["accuracy"], row["low"], row["high"])
            results.append(Round(row["answer"], row["labels"], row["classifier"], accuracy))
        return results

    def issues(self, project: Project) -> list[dict[str, Any]]:
        """Return the probably wrong labels of the last fit, worst first, without those that were corrected or
        confirmed since. Near duplicates are given with their texts and labels.
        """
        last = self._rows(
            "SELECT answer, issues FROM rounds WHERE project = ? ORDER BY id DESC LIMIT 1", project.id
        )
        if not last:
            return []
        query = (
            "SELECT texts.id, text, label FROM texts JOIN current ON text_id = texts.id "
            "WHERE project = ? AND current.id <= ? AND label IS NOT NULL"
        )
        known = {row["id"]: dict(row) for row in self._rows(query, project.id, last[0]["answer"])}
        issues = [issue for issue in json.loads(last[0]["issues"]) if issue["text"] in known]
        for issue in issues:
            near = [known[text] for text in issue["near_duplicates"] if text in known]
            issue.update(known[issue["text"]], near_duplicates=near)
        return issues


def _project(row: sqlite3.Row) -> Project:
    return Project(row["id"], row["name"], tuple(json.loads(row["labels"])), row["template"], row["created"])


def _digest(text: str) -> bytes:
    return sha256(text_key(text).encode()).digest()
