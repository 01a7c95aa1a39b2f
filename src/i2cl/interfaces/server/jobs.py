"""Long work: fits and files of texts, queued, told of, cancelled, and gone on with after a kill.

    DIR/jobs/ID/    job.json, what is to be done; input.*, events.jsonl, and what comes out

A job is on the disk before it is acknowledged, and so is a cancel (the file `CANCELLED`). Its events are:
queued, what the work tells, and one of done, failed and cancelled at the end. A job without such an end is
taken up again when the server starts. A folder that cannot be read as a job is left as it is.
"""

import json
import logging
import math
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pydantic

from i2cl.interfaces.server.batcher import FitStoppedError
from i2cl.interfaces.server.refusals import RefusalError, stopping
from i2cl.storage.atomic import synced
from i2cl.storage.journal import Journal, readable_lines

Kind = Literal["fit", "batch"]
ENDS = ("done", "failed", "cancelled")
TOLD = ("queued", "started", "resumed", *ENDS)  # events that are on the disk
MOST_QUEUED = 100  # jobs of a kind that may wait
MOST_OWN = 10  # of those, the ones of a token that only reads
MOST_KEPT = 1000  # jobs whose end is told of; the oldest of more are removed when the server starts
MOST_SHOWN = 100  # events of a job that are in memory alone
CANCELLED = "cancelled"

_log = logging.getLogger("i2cl.server")


class Head(pydantic.BaseModel):
    """What ``job.json`` holds."""

    kind: Kind
    created: float
    request: dict[str, Any]
    owner: str | None = None


@dataclass(eq=False)
class Job:
    """One piece of long work."""

    folder: Path  # of its files; its name is the job's id
    kind: Kind  # what is done
    request: dict[str, Any]  # what is to be done, JSON-able, as the kind knows it
    created: float  # seconds since 1970
    # what has happened by now, each with its name under ``event``, and under ``at`` a time that no other one
    # has. Of those that are not on the disk these are the last `MOST_SHOWN`, and only the last one has a map
    # of the model
    events: list[dict[str, Any]] = field(default_factory=list)
    cancelled: bool = False  # whether it is to end
    # the reading token that sent it, if one did; see `i2cl.interfaces.server.guard.Access.reader`
    owner: str | None = None

    @classmethod
    def stored(cls, folder: Path) -> "Job":
        """A folder's job; unreadable events are left out. Raises OSError or ValueError if there is none."""
        head = Head.model_validate_json((folder / "job.json").read_bytes())
        job = cls(folder, **dict(head), cancelled=(folder / CANCELLED).exists())
        for event in readable_lines(folder / "events.jsonl"):
            at = event.get("at")
            if event.get("event") in TOLD and isinstance(at, float | int) and math.isfinite(at):
                job.events.append(event | {"at": max(at, job.soonest)})
        if not job.events:
            job.events.append({"event": "queued", "at": head.created})
        return job

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
        record = {"event": event, "at": self._now(), **what}
        with Journal.opened(self.folder / "events.jsonl") as journal:
            journal.append(json.dumps(record).encode() + b"\n")
        self.events = [*self.events, record]

    def show(self, event: str, **what: Any) -> None:
        """Add an event that need not outlive this process, nor the many that come after it."""
        shown = [one["at"] for one in self.events if one["event"] not in TOLD]
        gone = shown[: max(0, len(shown) + 1 - MOST_SHOWN)]
        kept = [one for one in self.events if one["at"] not in gone]
        for place, one in enumerate(kept):
            if one["event"] not in TOLD:
                kept[place] = {name: one[name] for name in one if name not in {"coefficients", "sizes"}}
        self.events = [*kept, {"event": event, "at": self._now(), **what}]

    @property
    def soonest(self) -> float:
        """The earliest time that the next event may have."""
        return round(self.events[-1]["at"] + 0.001, 3) if self.events else 0.0

    def _now(self) -> float:
        return max(round(time.time(), 3), self.soonest)  # a clock may be set back

    def require_wanted(self) -> None:
        """Go on only if it is not cancelled. Raises FitStoppedError if it is."""
        if self.cancelled:
            raise FitStoppedError

    def described(self) -> dict[str, Any]:
        """As JSON has it: what it is, where it stands, and its last event."""
        first = {"id": self.id, "object": "job", "kind": self.kind, "created": int(self.created)}
        shown = {name: value for name, value in self.request.items() if name in {"name", "rows", "tasks"}}
        return {**first, "status": self.status, **shown, "last": self.events[-1]}


class Jobs:
    """All jobs of a server. Of each kind one runs at a time, in the order they came."""

    def __init__(self, root: Path, workers: Mapping[Kind, Callable[[Job], dict[str, Any]]]) -> None:
        """Take up what an earlier process left in a folder.

        ``workers``: each does the jobs of a kind from where they stood, and returns what their end tells.
        """
        self._root, self._workers = root, workers
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[Kind, deque[Job]] = {kind: deque() for kind in workers}
        self._changed = threading.Condition()
        self._stops = False
        self.whole = True  # whether every folder could be read
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".*"):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        self._read()
        thread = partial(threading.Thread, target=self._loop, daemon=True)
        self._threads = [thread(args=(kind,), name=f"{kind} jobs") for kind in workers]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def require_room(self, kind: Kind, owner: str | None = None) -> None:
        """Refuse another job: 429 if too many wait, 503 if nothing new is taken."""
        with self._changed:
            if self._stops:
                raise stopping()
            waiting = self._waiting[kind]
            mine = [job for job in waiting if job.owner == owner]
            if len(waiting) >= MOST_QUEUED or (owner is not None and len(mine) >= MOST_OWN):
                message = f"{len(waiting)} jobs wait already, {len(mine)} of them yours: send it again later"
                raise RefusalError(429, "busy", message, headers={"Retry-After": "60"})

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for files of a job to be, gone with the block. Raises OSError if it cannot be made."""
        with tempfile.TemporaryDirectory(dir=self._root, prefix=".") as folder:
            yield Path(folder)

    def add(
        self,
        kind: Kind,
        request: Mapping[str, Any],
        files: Mapping[str, bytes | Path],
        owner: str | None = None,
    ) -> Job:
        """Queue a job, which is on the disk when this returns, with its ``files``: a path, which is in a
        `scratch` folder, is moved. Raises RefusalError, see `require_room`; OSError if it cannot be written.
        """
        self.require_room(kind, owner)
        folder = self._root / f"{kind}-{secrets.token_hex(8)}"
        created = round(time.time(), 3)
        head = Head(kind=kind, created=created, request=dict(request), owner=owner)
        queued = {"event": "queued", "at": created}
        with self.scratch() as scratch:
            fresh = scratch / "job"
            fresh.mkdir()
            (fresh / "job.json").write_text(head.model_dump_json(), encoding="utf-8")
            (fresh / "events.jsonl").write_text(json.dumps(queued) + "\n", encoding="utf-8")
            for name, content in files.items():
                if isinstance(content, Path):
                    content.rename(fresh / name)
                else:
                    (fresh / name).write_bytes(content)
            synced(*fresh.iterdir(), fresh)
            fresh.rename(folder)
            synced(self._root)
        job = Job(folder, kind, dict(request), created, [queued], owner=owner)
        with self._changed:
            self._jobs[job.id] = job
            self._waiting[kind].append(job)
            self._changed.notify_all()
        return job

    def get(self, identity: str) -> Job:
        """A job by its id. Raises RefusalError: 404 if there is none."""
        if (job := self._jobs.get(identity)) is None:
            raise unknown_job(identity)
        return job

    def all(self) -> list[Job]:
        """Jobs, the newest first."""
        return sorted(self._jobs.values(), key=lambda job: -job.created)

    def cancel(self, job: Job) -> None:
        """End a job that waits or runs, remove what one that has ended left. Raises OSError if it cannot."""
        with self._changed:
            if job.ended:
                gone = job.folder.with_name(f".{job.id}")  # whole or not at all, whatever ends the process
                if self._jobs.pop(job.id, None) is not None:
                    job.folder.rename(gone)
                    shutil.rmtree(gone, ignore_errors=True)
                return
            (job.folder / CANCELLED).touch()
            synced(job.folder)
            job.cancelled = True
            if job in self._waiting[job.kind]:
                self._end(job, "cancelled")
                self._waiting[job.kind].remove(job)

    def close(self) -> None:
        """Begin nothing new; what runs ends when its work notices that the server stops."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        for folder in self._root.iterdir():
            try:
                job = Job.stored(folder)
            except (OSError, ValueError) as error:
                self.whole = False
                _log.warning("jobs/%s stays as it is: %s when it was read", folder.name, type(error).__name__)
                continue
            self._jobs[job.id] = job
        for job in self.all()[::-1]:
            if job.cancelled and not job.ended:
                with suppress(OSError):  # on a full disk it ends when its turn comes
                    self._end(job, "cancelled")
            if not job.ended:
                self._waiting[job.kind].append(job)
        for job in [job for job in self.all() if job.ended][MOST_KEPT:]:
            self.cancel(job)

    def _loop(self, kind: Kind) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting[kind] or self._stops)
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
        except Exception as error:  # noqa: BLE001 - the other jobs go on
            refusal = RefusalError.of(error)
            if refusal.code not in {"stopping", "model_failed"}:  # the next start takes it up again
                self._end(job, "failed", **refusal.body())

    @staticmethod
    def _end(job: Job, event: str, **what: Any) -> None:
        job.tell(event, **what)
        for path in job.folder.glob("input.*"):  # examples and texts are not kept
            path.unlink()


def unknown_job(identity: str) -> RefusalError:
    """There is none of that name, for who asks."""
    return RefusalError(404, "unknown_job", f"no job {identity!r} is here: POST /v1/tasks or /v1/batches")
