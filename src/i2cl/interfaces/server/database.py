"""SQLite database of the server: names of tasks, and jobs with their events."""

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from i2cl.errors import I2CLError

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    name TEXT PRIMARY KEY, digest TEXT NOT NULL, created INTEGER NOT NULL, labels TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, created REAL NOT NULL, request TEXT NOT NULL, owner TEXT,
    cancelled INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, event TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of_job ON events (job);
"""


class Database:
    """One connection, shared by all threads. A transaction is on the disk when it returns.

    Every method raises OSError if the database cannot be read or written, such as on a full disk.
    """

    def __init__(self, path: Path) -> None:
        """Open a database, or create it. Raises I2CLError if it is damaged or of a later version."""
        self._lock = threading.RLock()
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            with _as_os_error():
                version = self._prepare()
        except sqlite3.DatabaseError as error:
            hint = "restore it from a backup, or move it away to start without its tasks and jobs"
            raise I2CLError(f"{str(path)!r} is damaged ({error}): {hint}") from None
        if version > VERSION:
            self.close()
            raise I2CLError(f"{str(path)!r} was written by a later version of i2cl: upgrade i2cl")

    def _prepare(self) -> int:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")  # a commit is synced
        execute("PRAGMA foreign_keys = ON")
        version = int(execute("PRAGMA user_version").fetchone()[0])
        if version <= VERSION:
            if (problem := execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(problem)
            self._connection.executescript(SCHEMA)
            execute(f"PRAGMA user_version = {VERSION}")
        return version

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the block together, or none of them if it raises."""
        with self._lock, _as_os_error():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def put_task(self, name: str, digest: str, created: int, labels: tuple[str, ...]) -> None:
        """Add a name, or replace it."""
        self._execute("REPLACE INTO tasks VALUES (?, ?, ?, ?)", name, digest, created, json.dumps(labels))

    def delete_task(self, name: str) -> None:
        """Remove a name."""
        self._execute("DELETE FROM tasks WHERE name = ?", name)

    def tasks(self) -> list[tuple[str, str, int, tuple[str, ...]]]:
        """Return the arguments of `put_task` for every name."""
        rows = self._execute("SELECT name, digest, created, labels FROM tasks")
        return [(name, digest, created, tuple(json.loads(labels))) for name, digest, created, labels in rows]

    def add_job(
        self, identity: str, kind: str, created: float, request: Mapping[str, Any], owner: str | None
    ) -> None:
        """Add a job."""
        values = (identity, kind, created, json.dumps(request), owner)
        self._execute("INSERT INTO jobs (id, kind, created, request, owner) VALUES (?, ?, ?, ?, ?)", *values)

    def add_event(self, identity: str, event: Mapping[str, Any]) -> None:
        """Add an event to a job."""
        self._execute("INSERT INTO events (job, event) VALUES (?, ?)", identity, json.dumps(event))

    def cancel_job(self, identity: str) -> None:
        """Mark a job as cancelled."""
        self._execute("UPDATE jobs SET cancelled = 1 WHERE id = ?", identity)

    def delete_job(self, identity: str) -> None:
        """Remove a job with its events."""
        self._execute("DELETE FROM jobs WHERE id = ?", identity)

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs with their events, oldest first."""
        columns = "id, kind, created, request, owner, cancelled"
        rows = self._execute(f"SELECT {columns} FROM jobs ORDER BY created, id")  # noqa: S608 - constant
        jobs = {row[0]: dict(zip(columns.split(", "), row, strict=True)) for row in rows}
        for job in jobs.values():
            job |= {"request": json.loads(job["request"]), "cancelled": bool(job["cancelled"]), "events": []}
        for identity, event in self._execute("SELECT job, event FROM events ORDER BY number"):
            jobs[identity]["events"].append(json.loads(event))
        return list(jobs.values())

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    def _execute(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, _as_os_error():
            return self._connection.execute(statement, values).fetchall()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise OSError for errors of the disk, as files do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number) if full else str(error)) from error
