"""Persistent queue of long jobs (fits, files, labelling), with events, cancellation and crash recovery.

    DIR/.i2cl-server/jobs/ID/
        job.json                    request and events
        input.*, output.jsonl       see `i2cl.interfaces.server.fits` and `i2cl.interfaces.server.files`

A job is saved before it is acknowledged, and so is its cancellation. Its events are queued, started, progress
events, and finally done, failed or cancelled. A job without a final event runs again at the next start.
"""

import json
import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from i2cl.interfaces.server.batcher import FitStoppedError
from i2cl.interfaces.server.refusals import RefusalError, busy, stopping
from i2cl.storage.atomic import WriteError, sync_to_disk, write_text_atomic

Kind = Literal["fit", "batch", "labelling"]
RECORD, SAVED_FIELDS = "job.json", ("kind", "request", "created", "events", "cancelled", "owner")
FINAL_STATES = ("done", "failed", "cancelled")
PERSISTED_EVENTS = ("queued", "started", "resumed", *FINAL_STATES)
MAX_QUEUED = 100  # queued jobs of a kind
MAX_QUEUED_PER_READER = 10  # queued jobs of a kind and of one read token
MAX_FINISHED = 1000  # finished jobs that are kept; older ones are removed
MAX_BYTES_PER_READER = 4 * 2**30  # on the disk, of all jobs of one read token
MAX_PROGRESS_EVENTS = 100  # of a job, in memory
RESUMED_CODES = ("stopping", "model_failed")  # after these errors, the job continues at the next start

_log = logging.getLogger("i2cl.server")


@dataclass(eq=False)
class Job:
    """One fit, one file of texts, or one round of a labelling project."""

    folder: Path  # of its files; the name is the job's id
    kind: Kind
    request: dict[str, Any]  # JSON; its fields depend on the kind
    created: float  # seconds since 1970
    # Each event has a name (``event``) and a time (``at``), which is unique within the job. Only the last
    # `MAX_PROGRESS_EVENTS` progress events are kept.
    events: list[dict[str, Any]] = field(default_factory=list)
    cancelled: bool = False  # whether cancellation was requested
    owner: str | None = None  # id of the read token that sent it, see `guard.Access.authorize`

    @property
    def id(self) -> str:
        """The id in URLs."""
        return self.folder.name

    @property
    def status(self) -> str:
        """One of queued, running, done, failed and cancelled."""
        last = self.events[-1]["event"]
        return last if last in (*FINAL_STATES, "queued") else "running"

    @property
    def ended(self) -> bool:
        """Whether the job has finished."""
        return self.status in FINAL_STATES

    def make_event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Return an event that is later than all others, even if the clock was set back."""
        earliest = round(self.events[-1]["at"] + 0.001, 3) if self.events else 0.0
        return {"event": event, "at": max(round(time.time(), 3), earliest), **fields}

    def publish_progress(self, name: str, **fields: Any) -> None:
        """Append a progress event, and drop the oldest one above the limit. It is not saved."""
        events = self.events
        progress = [event for event in events if event["event"] not in PERSISTED_EVENTS]
        if len(progress) >= MAX_PROGRESS_EVENTS:
            events = [event for event in events if event is not progress[0]]
        self.events = [*events, self.make_event(name, **fields)]

    def raise_if_cancelled(self) -> None:
        """Raise FitStoppedError if the job was cancelled."""
        if self.cancelled:
            raise FitStoppedError

    def disk_bytes(self) -> int:
        """Return the bytes that the job takes on the disk, or may take until it ends."""
        if not self.ended:
            return int(self.request.get("bytes", 0))
        with suppress(OSError):
            return sum(path.stat().st_size for path in self.folder.iterdir())
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON: its status, and its last event."""
        described = {name: value for name, value in self.request.items() if name in {"name", "rows", "tasks"}}
        state = {"id": self.id, "object": "job", "kind": self.kind, "created": int(self.created)}
        return state | {"status": self.status, **described, "last": self.events[-1]}


class Jobs:
    """All jobs of a server. One job of each kind runs at a time, in the order of arrival."""

    def __init__(
        self,
        folder: Path,
        workers: Mapping[Kind, Callable[[Job], dict[str, Any]]],
        on_end: Callable[["Jobs", Job], None] | None = None,
    ) -> None:
        """Read the jobs of an earlier process.

        Args:
            folder: has a folder for each job.
            workers: functions that run a job of each kind, from where it stopped, and return the fields of
                its ``done`` event.
            on_end: called on the thread of a job that ran and has ended; its errors are logged.
        """
        self._root, self._workers, self._on_end = folder, workers, on_end
        self._jobs: dict[str, Job] = {}  # oldest first
        self._waiting: dict[Kind, deque[Job]] = {kind: deque() for kind in workers}
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self._closing = False
        self._root.mkdir(parents=True, exist_ok=True)
        self._load()
        thread = partial(threading.Thread, target=self._loop, daemon=True)
        self._threads = [thread(args=(kind,), name=f"{kind} jobs") for kind in workers]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def require_room(self, kind: Kind, owner: str | None = None, size: int = 0) -> None:
        """Raise RefusalError if another job of ``size`` bytes cannot be queued: 429 if the queue is full, 403
        if the disk quota of a read token is used up, 503 during shutdown.
        """
        with self._changed:
            if self._closing:
                raise stopping()
            waiting = self._waiting[kind]
            mine = [job for job in waiting if job.owner == owner]
            if len(waiting) >= MAX_QUEUED or (owner is not None and len(mine) >= MAX_QUEUED_PER_READER):
                raise busy(429, f"{len(waiting)} jobs are queued, {len(mine)} of them yours", 60)
            if owner is None:
                return
            jobs = [job for job in self._jobs.values() if job.owner == owner]
        used = sum(job.disk_bytes() for job in jobs)
        if used + size > MAX_BYTES_PER_READER:
            message = f"jobs of this token take {used / 1e9:.1f} GB, this one up to {size / 1e9:.1f} GB; "
            message += f"the limit of a read token is {MAX_BYTES_PER_READER / 1e9:.1f} GB"
            raise RefusalError(403, "quota", message, "download answers, then DELETE /v1/jobs/ID")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a temporary folder for files of a new job. Raises OSError if that fails."""
        with tempfile.TemporaryDirectory(dir=self._root, prefix=".") as folder:
            yield Path(folder)

    def add(
        self,
        kind: Kind,
        request: Mapping[str, Any],
        files: Mapping[str, bytes | Path],
        owner: str | None = None,
    ) -> Job:
        """Queue a job, which is on the disk when this returns.

        ``files``: contents by name; a file or folder in a `scratch` folder is moved. Raises RefusalError, see
        `require_room`; OSError or WriteError if it cannot be written.
        """
        self.require_room(kind, owner, int(request.get("bytes", 0)))
        folder = self._root / f"{kind}-{secrets.token_hex(8)}"
        job = Job(folder, kind, dict(request), round(time.time(), 3), owner=owner)
        job.events = [job.make_event("queued")]
        with self.scratch() as scratch:
            fresh = scratch / "job"
            fresh.mkdir()
            for name, content in files.items():
                if isinstance(content, Path):
                    content.rename(fresh / name)
                else:
                    (fresh / name).write_bytes(content)
            self._save(job, job.events, fresh)
            sync_to_disk(*fresh.rglob("*"), fresh)
            fresh.rename(folder)
            sync_to_disk(self._root)
        with self._changed:
            self._jobs[job.id] = job
            self._waiting[kind].append(job)
            self._changed.notify_all()
        return job

    def get(self, identity: str) -> Job:
        """Return a job by its id. Raises RefusalError (404) if there is none."""
        if (job := self._jobs.get(identity)) is None:
            raise unknown_job(identity)
        return job

    def all(self) -> list[Job]:
        """Return all jobs, newest first."""
        with self._changed:
            return [*self._jobs.values()][::-1]

    def page(self, owner: str | None, limit: int, after: str | None) -> tuple[list[Job], bool]:
        """Return up to ``limit`` jobs, newest first, and whether there are more.

        ``owner``: only jobs of this read token; ``after``: id of the last job of the previous page. Raises
        RefusalError (404) if that job is gone.
        """
        jobs = [job for job in self.all() if owner is None or job.owner == owner]
        if after is not None:
            ids = [job.id for job in jobs]
            if after not in ids:
                raise unknown_job(after)
            jobs = jobs[ids.index(after) + 1 :]
        return jobs[:limit], len(jobs) > limit

    def record_event(self, job: Job, event: str, **fields: Any) -> None:
        """Add an event to a job, and save it. Raises OSError or WriteError if that fails."""
        events = [*job.events, job.make_event(event, **fields)]
        self._save(job, events, job.folder)
        job.events = events

    def _save(self, job: Job, events: Sequence[dict[str, Any]], folder: Path) -> None:
        with self._saving:
            record = {name: getattr(job, name) for name in SAVED_FIELDS}
            record["events"] = [event for event in events if event["event"] in PERSISTED_EVENTS]
            write_text_atomic(folder / RECORD, json.dumps(record) + "\n")

    def cancel(self, job: Job) -> None:
        """Cancel a queued or running job; a finished one does not change. Raises OSError or WriteError if the
        cancellation cannot be saved.
        """
        with self._changed:
            if job.ended:
                return
            job.cancelled = True
            if queued := job in self._waiting[job.kind]:
                self._waiting[job.kind].remove(job)
            self._save(job, job.events, job.folder)
        if queued:
            self._end(job, "cancelled")

    def delete(self, job: Job) -> None:
        """Remove a finished job and its output. Raises RefusalError (409) if it has not finished, OSError if
        it cannot be removed.
        """
        if not job.ended:
            hint = f"cancel it first (POST /v1/jobs/{job.id}/cancel)"
            raise RefusalError(409, "not_finished", f"job {job.id!r} is {job.status}", hint)
        with self._changed, self.scratch() as scratch:
            job.folder.rename(scratch / "deleted")
            self._jobs.pop(job.id, None)

    def close(self) -> None:
        """Start no more jobs, and wait until running ones notice the shutdown."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _load(self) -> None:
        jobs = []
        for folder in self._root.iterdir():
            if folder.name.startswith("."):  # left by a killed process: not acknowledged yet, or deleted
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
                jobs.append(Job(folder, **{name: record[name] for name in SAVED_FIELDS}))
            except (OSError, LookupError, TypeError, ValueError) as error:
                _log.warning("job %s is ignored: %s cannot be read (%s)", folder.name, RECORD, error)
        self._jobs = {job.id: job for job in sorted(jobs, key=lambda job: (job.created, job.id))}
        for job in [job for job in self._jobs.values() if not job.ended]:
            if job.cancelled:
                self._end(job, "cancelled")
            else:
                self._waiting[job.kind].append(job)
        self._prune()

    def _loop(self, kind: Kind) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting[kind] or self._closing)
                if self._closing:
                    return
                job = self._waiting[kind].popleft()
            self._run(job)
            if job.ended and self._on_end is not None:
                try:
                    self._on_end(self, job)
                except Exception as error:  # noqa: BLE001 - must not stop the thread
                    _log.warning("no job follows job %s (%s)", job.id, error)

    def _run(self, job: Job) -> None:
        try:
            job.raise_if_cancelled()
            if job.kind != "labelling" and not any(job.folder.glob("input.*")):  # labelling has no files
                message = "the input was removed when the disk was full"
                raise RefusalError(500, "lost_input", message, "send it again")  # noqa: TRY301
            self.record_event(job, "started" if job.status == "queued" else "resumed")
            fields = self._workers[job.kind](job)
        except (FitStoppedError, CancelledError):
            if job.cancelled:
                self._end(job, "cancelled")
        except Exception as error:  # noqa: BLE001 - becomes the end of the job
            refusal = RefusalError.of(error)
            if refusal.code not in RESUMED_CODES:
                self._end(job, "failed", **refusal.body())
        else:
            self._end(job, "done", **fields)

    def _end(self, job: Job, event: str, **fields: Any) -> None:
        """Finish a job. On a full disk, remove its files to make room.

        If the end cannot be saved even then, the job ends in memory only. After a restart it fails, because
        its input is gone.
        """
        try:
            self.record_event(job, event, **fields)
        except (OSError, WriteError) as error:
            _remove(job, "input.*")
            try:
                self.record_event(job, event, **fields)
            except (OSError, WriteError):
                if event != "cancelled":
                    event, fields = "failed", RefusalError.of(error).body()
                _remove(job, "output.*")
                job.events = [*job.events, job.make_event(event, **fields)]
                _log.error("the end of job %s could not be saved (%s)", job.id, error)
        _remove(job, "input.*")  # do not keep texts and examples
        self._prune()

    def _prune(self) -> None:
        """Remove the oldest finished jobs beyond `MAX_FINISHED`."""
        finished = [job for job in self.all() if job.ended]
        for job in finished[MAX_FINISHED:]:
            with suppress(OSError):  # retried when the next job ends
                self.delete(job)


def _remove(job: Job, pattern: str) -> None:
    for path in job.folder.glob(pattern):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def unknown_job(identity: str) -> RefusalError:
    """Return the error for a job that does not exist, or that the caller may not see."""
    hint = "see GET /v1/jobs for your jobs"
    return RefusalError(404, "unknown_job", f"there is no job {identity!r}", hint)
