"""Long work: fits and files of texts, queued, told of, cancelled, and gone on with after a kill.

    DIR/jobs/ID/    job.json, what is to be done; input.*, events.jsonl, and what comes out

A job is on the disk before it is acknowledged. Its events are: queued, what the work tells, and one of done,
failed and cancelled at the end. A job without such an end is taken up again when the server starts.
"""

import json
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from i2cl.errors import I2CLError
from i2cl.faces.server.batcher import FitStoppedError
from i2cl.faces.server.refusals import RefusalError, failed, stopping
from i2cl.storage.atomic import synced, write_errors
from i2cl.storage.journal import Journal, whole_lines

Kind = Literal["fit", "batch"]
ENDS = ("done", "failed", "cancelled")

MOST_QUEUED = 100
"""Jobs of a kind that may wait."""

MOST_KEPT = 1000
"""Jobs whose end is told of; the oldest of more are removed when the server starts."""


@dataclass(eq=False)
class Job:
    """One piece of long work.

    Attributes:
        folder: of its files; its name is the job's id.
        kind: what is done.
        told: what is to be done, JSON-able, as the kind knows it.
        created: seconds since 1970.
        events: what has happened by now, each with its name under ``event``.
        cancelled: whether it is to end.
    """

    folder: Path
    kind: Kind
    told: dict[str, Any]
    created: float
    events: list[dict[str, Any]] = field(default_factory=list)
    cancelled: bool = False

    @property
    def id(self) -> str:
        """Its name in addresses."""
        return self.folder.name

    @property
    def status(self) -> str:
        """queued, running, done, failed or cancelled."""
        last = self.events[-1]["event"]
        return last if last in (*ENDS, "queued") else "running"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.status in ENDS

    def tell(self, event: str, **what: Any) -> None:
        """Add an event, which is on the disk when this returns."""
        told = {"event": event, "at": round(time.time(), 3), **what}
        with Journal.opened(self.folder / "events.jsonl") as journal:
            journal.append(json.dumps(told).encode() + b"\n")
        self.events.append(told)

    def show(self, event: str, **what: Any) -> None:
        """Add an event that need not outlive this process."""
        self.events.append({"event": event, "at": round(time.time(), 3), **what})

    def require_wanted(self) -> None:
        """Go on only if it is not cancelled.

        Raises:
            FitStoppedError: otherwise.
        """
        if self.cancelled:
            raise FitStoppedError

    def described(self) -> dict[str, Any]:
        """As JSON has it: what it is, where it stands, and its last event."""
        first = {"id": self.id, "object": "job", "kind": self.kind, "created": int(self.created)}
        shown = {name: value for name, value in self.told.items() if name in {"name", "rows", "tasks"}}
        return {**first, "status": self.status, **shown, "last": self.events[-1]}


Worker = Callable[[Job], dict[str, Any]]
"""Does a job and returns what its end tells; begins where an earlier run of it stood."""


class Jobs:
    """All jobs of a server. Of each kind one runs at a time, in the order they came."""

    def __init__(self, root: Path, workers: Mapping[Kind, Worker]) -> None:
        """Take up what an earlier process left.

        Args:
            root: their folder, made if it is not there.
            workers: what does the jobs of each kind.
        """
        self._root = root
        self._workers = workers
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[Kind, deque[Job]] = {kind: deque() for kind in workers}
        self._changed = threading.Condition()
        self._stops = False
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".*"):
            shutil.rmtree(left)
        self._read()
        self._threads = [
            threading.Thread(target=self._loop, args=(kind,), name=f"{kind} jobs", daemon=True)
            for kind in workers
        ]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def add(self, kind: Kind, told: Mapping[str, Any], files: Mapping[str, bytes]) -> Job:
        """Queue a job, which is on the disk when this returns.

        Raises:
            RefusalError: 429 if too many wait, 503 if nothing new is taken.
            I2CLError: if it cannot be written.
        """
        with self._changed:
            if self._stops:
                raise stopping()
            if len(self._waiting[kind]) >= MOST_QUEUED:
                headers = {"Retry-After": "60"}
                message = f"{MOST_QUEUED} jobs wait already: send it again later"
                raise RefusalError(429, "busy", message, headers=headers)
        folder = self._root / f"{kind}-{secrets.token_hex(8)}"
        created = time.time()
        head = {"kind": kind, "created": created, "told": dict(told)}
        with (
            write_errors(repr(str(self._root))),
            tempfile.TemporaryDirectory(dir=self._root, prefix=".") as scratch,
        ):
            fresh = Path(scratch) / "job"
            fresh.mkdir()
            queued = json.dumps({"event": "queued", "at": round(created, 3)}).encode() + b"\n"
            for name, content in {
                **files,
                "job.json": json.dumps(head).encode(),
                "events.jsonl": queued,
            }.items():
                (fresh / name).write_bytes(content)
                synced(fresh / name)
            synced(fresh)
            fresh.rename(folder)
            synced(self._root)
        job = Job(folder, kind, dict(told), created, [json.loads(queued)])
        with self._changed:
            self._jobs[job.id] = job
            self._waiting[kind].append(job)
            self._changed.notify_all()
        return job

    def get(self, identity: str) -> Job:
        """A job by its id.

        Raises:
            RefusalError: 404 if there is none.
        """
        found = self._jobs.get(identity)
        if found is None:
            raise RefusalError(
                404, "unknown_job", f"no job {identity!r} is here: POST /v1/tasks or /v1/batches"
            )
        return found

    def all(self) -> list[Job]:
        """Jobs, the newest first."""
        return sorted(self._jobs.values(), key=lambda job: -job.created)

    def cancel(self, job: Job) -> None:
        """End a job that waits or runs; of one that has ended, remove what it left."""
        with self._changed:
            if job.ended:
                self._jobs.pop(job.id, None)
                shutil.rmtree(job.folder, ignore_errors=True)
                return
            job.cancelled = True
            if job in self._waiting[job.kind]:
                self._waiting[job.kind].remove(job)
                self._end(job, "cancelled")

    def close(self) -> None:
        """Begin nothing new; what runs ends when its work notices that the server stops."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _read(self) -> None:
        for folder in self._root.iterdir():
            try:
                head = json.loads((folder / "job.json").read_text(encoding="utf-8"))
                events = [json.loads(line) for line in whole_lines(folder / "events.jsonl")]
                job = Job(folder, head["kind"], head["told"], head["created"], events)
            except (OSError, ValueError, KeyError):  # a folder that is being removed, by a kill
                shutil.rmtree(folder, ignore_errors=True)
                continue
            self._jobs[job.id] = job
        for job in sorted(self._jobs.values(), key=lambda job: job.created):
            if not job.ended:
                self._waiting[job.kind].append(job)
        for job in [job for job in self.all() if job.ended][MOST_KEPT:]:
            self.cancel(job)

    def _loop(self, kind: Kind) -> None:
        while True:
            with self._changed:
                while not (self._waiting[kind] or self._stops):
                    self._changed.wait()
                if self._stops:
                    return
                job = self._waiting[kind].popleft()
            with suppress(OSError):  # a full disk takes no event: the job is taken up again at the next start
                self._do(job)

    def _do(self, job: Job) -> None:
        try:
            job.require_wanted()
            job.tell("started" if job.status == "queued" else "resumed")
            self._end(job, "done", **self._workers[job.kind](job))
        except (FitStoppedError, CancelledError):
            if job.cancelled:
                self._end(job, "cancelled")
        except RefusalError as refusal:
            if refusal.code != "stopping":
                self._end(job, "failed", **refusal.body())
        except I2CLError as error:
            self._end(job, "failed", **RefusalError.of(error).body())
        except Exception as error:  # noqa: BLE001 - the other jobs go on
            self._end(job, "failed", **failed(error).body())

    @staticmethod
    def _end(job: Job, event: str, **what: Any) -> None:
        job.tell(event, **what)
        for path in job.folder.glob("input.*"):  # examples and texts are not kept
            path.unlink()
