"""The tasks of a server: folders written by `i2cl fit`, and artefacts fitted or uploaded over HTTP.

    DIR/NAME/                      a task folder, written by `i2cl fit ... -o DIR/NAME`
    DIR/.i2cl-server/              the server's own files
        tasks.json                 names of the tasks that came over HTTP
        artefacts/DIGEST/          their artefacts, by the SHA-256 of their files
        jobs/                      see `i2cl.interfaces.server.jobs`

Task folders are read-only for the server. Each request that names one looks it up again, so new, replaced and
removed folders are noticed. Names of tasks that came over HTTP take precedence.

A task that came over HTTP is synced to the disk before the request is acknowledged. Tasks are loaded onto the
model's device when they are used, and evicted in least-recently-used order.
"""

import json
import logging
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from i2cl.core.injection import Injection
from i2cl.encoders import absolute
from i2cl.errors import LONE_SURROGATE, I2CLError
from i2cl.injections.pool import InjectionPool, LoadedTask, TaskQuery
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.uploads import require_finite_in_use
from i2cl.storage.atomic import sync_to_disk, write_text_atomic
from i2cl.storage.layout import DESCRIPTION, FILES
from i2cl.tasks.labels import normalize_word

MAX_NAME_LENGTH = 128
STATE = ".i2cl-server"

_log = logging.getLogger("i2cl.server")


@dataclass(frozen=True)
class Entry:
    """A named task."""

    name: str
    digest: str  # SHA-256 of the artefact's files
    created: int  # seconds since 1970
    labels: tuple[str, ...]  # in the order of probabilities
    source: Literal["server", "folder"] = "server"  # "server": it came over HTTP
    thresholds: tuple[float, ...] | None = None  # of a multi-label task, in the order of labels


Signature = tuple[tuple[int, int, int], ...]  # of files: time, size and inode


class TaskStore:
    """Named tasks, some of them loaded onto the model's device."""

    def __init__(
        self,
        root: Path,
        pool: InjectionPool,
        *,
        max_resident_tasks: int,
        read_only: bool,
        encoders: Sequence[str] = (),
        reserved: Sequence[str] = (),
    ) -> None:
        """Open a folder of tasks, or create it. Only one process may write to it at a time.

        Args:
            root: the folder.
            pool: empty pool of the model.
            max_resident_tasks: maximum number of tasks on the model's device.
            read_only: never write, and take the names from the file that another process publishes.
            encoders: sentence encoders that tasks may use.
            reserved: names that no task may have.

        Raises:
            I2CLError: if the folder cannot be used, or has no tasks and ``read_only`` is set.
        """
        self.encoders = tuple(encoders)
        self.pool = pool
        self.read_only = read_only
        self._root, self._reserved = root, frozenset(reserved)
        self._artefacts, self._names_file = root / STATE / "artefacts", root / STATE / "tasks.json"
        self._max_resident = max_resident_tasks
        self._lock = threading.Lock()  # protects the fields below; held for microseconds
        self._last_used: OrderedDict[str, None] = OrderedDict()  # loaded digests, least recently used first
        self._loading: dict[str, threading.Lock] = {}  # by digests that are being loaded
        self._folders: dict[str, tuple[Signature, Entry | RefusalError]] = {}  # task folders, by name
        self._named: dict[str, Entry] = {}  # tasks that came over HTTP, by name
        self._names_signature: Signature = ()  # of the names file, if read-only
        self._writing = threading.RLock()
        if read_only:
            if not self._names_file.is_file() and not any(root.glob(f"*/{DESCRIPTION}")):
                hint = "name a folder of `i2cl serve`, or fit one with `i2cl fit ... -o FOLDER/NAME`"
                raise I2CLError(f"{str(root)!r} has no tasks: {hint}")
        else:
            self._open_for_writing()
        self._log_folders()

    def entry(self, name: str) -> Entry:
        """Return the task of a name. Raises RefusalError: 404 if there is none, 500 if it cannot be used."""
        if (entry := self.find(name)) is None:
            raise RefusalError(404, "unknown_task", f"there is no task {name!r}", "see GET /v1/models")
        return entry

    def find(self, name: str) -> Entry | None:
        """Return the task of a name, or None. Raises RefusalError (500) if it cannot be used."""
        entry = self._names().get(normalize_word(name)) or self._folder_entry(name)
        if isinstance(entry, RefusalError):
            raise entry
        return entry

    def entries(self) -> list[Entry]:
        """Return all usable tasks, by name."""
        named = self._names()
        folders = (self._folder_entry(path.name) for path in self._task_folders() if path.name not in named)
        entries = [*named.values(), *(entry for entry in folders if isinstance(entry, Entry))]
        return sorted(entries, key=lambda entry: entry.name)

    def put(self, name: str, injection: Injection) -> Entry:
        """Add an artefact under a name, replacing the previous one. It is synced to the disk on return.

        Raises RefusalError: 422 on an invalid name or artefact, 409 for the name of a task folder, 403 if the
        store is read-only; OSError or WriteError if it cannot be written.
        """
        name = normalize_word(name)
        self.require_name(name)
        self.prepare(injection)
        with self._writing:
            digest = self._store(injection)
            thresholds = injection.head.thresholds
            entry = Entry(name, digest, int(time.time()), injection.task.labels, thresholds=thresholds)
            before = self._named.get(name)
            self._save_names(self._named | {name: entry})
            if before is not None and before.digest != digest:
                self._release(before.digest)
        return entry

    def delete(self, name: str) -> None:
        """Remove a task that came over HTTP. Requests that are already queued are still answered.

        Raises RefusalError: 404 if there is none, 409 for a task folder, 403 if the store is read-only;
        OSError if it cannot be removed.
        """
        name = normalize_word(name)
        self.require_writable()
        with self._writing:
            entry = self.entry(name)
            if entry.source == "folder":
                raise _folder_conflict(name, "remove the folder")
            self._save_names({key: value for key, value in self._named.items() if key != name})
            self._release(entry.digest)

    def require_name(self, name: str) -> None:
        """Raise RefusalError if a new task cannot have a name: 422 if it is invalid, 409 if a task folder
        has it, 403 if the store is read-only.
        """
        self._require_valid(name)
        self.require_writable()
        if name not in self._named and self._folder_entry(name) is not None:
            raise _folder_conflict(name, "choose another name, or replace the folder")

    def _require_valid(self, name: str) -> None:
        """Raise RefusalError (422) for a name that cannot be used in a URL or a table, or is reserved."""
        if (
            not 0 < len(name) <= MAX_NAME_LENGTH
            or name != name.strip()
            or {".", ".."} & {*name.split("/")}  # clients resolve these in a URL
            or LONE_SURROGATE.search(name)
            or not name.isprintable()
        ):
            hint = f"use 1 to {MAX_NAME_LENGTH} printable characters, without spaces around them or '../'"
            raise RefusalError(422, "bad_name", f"invalid task name {name!a}", hint)
        if name in self._reserved:
            raise RefusalError(422, "bad_name", f"{name!r} is the name of the base model", "choose another")

    def prepare(self, injection: Injection) -> LoadedTask:
        """Prepare an injection for this model. Raises RefusalError (422) if it cannot be used."""
        try:
            injection = self._with_encoder(injection)
            require_finite_in_use(injection, self.pool.decoder)
            return InjectionPool(self.pool.decoder, {"": injection}).task("")
        except RefusalError:
            raise
        except I2CLError as error:
            raise RefusalError(422, "bad_artefact", error.message, error.hint) from None

    def _with_encoder(self, injection: Injection) -> Injection:
        """Use the enabled encoder whose vectors equal those of the fit: its path may differ by machine."""
        expert, device = injection.head.embeddings, str(self.pool.decoder.device)
        if expert is None or absolute(expert.encoder) in self.encoders:
            return injection
        for name in self.encoders:
            if expert.is_of(name, device):
                return injection.with_encoder(name)
        self.require_encoder(expert.encoder)
        return injection

    def require_encoder(self, name: str) -> None:
        """Raise I2CLError for a sentence encoder that is not enabled, because loading it may download it."""
        if absolute(name) not in self.encoders:
            enabled = ", ".join(map(repr, self.encoders)) or "none"
            hint = "start the server with --encoder, or fit the task without one"
            raise I2CLError(f"encoder {name!r} is not enabled on this server (enabled: {enabled}): {hint}")

    def injection(self, digest: str, copies: Path | None = None) -> Injection:
        """Read an artefact.

        Args:
            digest: the version.
            copies: folder that also has artefacts, see `copy`.

        Raises:
            RefusalError: 404 if it was removed, 500 if it is damaged.
        """
        # Copies first: another thread may be removing the artefact in the store.
        for folder in (*([] if copies is None else [copies]), self._artefacts):
            if (folder / digest).is_dir():
                if content_digest(folder / digest) != digest:
                    message = f"version {digest} is damaged on the server's disk"
                    raise RefusalError(500, "damaged", message, "upload it again")
                return Injection.from_pretrained(folder / digest)
        for name, (_, entry) in tuple(self._folders.items()):
            if isinstance(entry, Entry) and entry.digest == digest:
                with suppress(I2CLError):  # the folder is being replaced
                    injection = Injection.from_pretrained(self._root / name)
                    if content_digest(self._root / name) == digest:
                        return injection
        message = "this version of the task has been removed"
        raise RefusalError(404, "unknown_task", message, "fit or upload it again")

    def queries(self, name: str, texts: Sequence[str]) -> tuple[Entry, list[TaskQuery]]:
        """Encode texts for the current version of a task. Raises as `entry` and `queries_of_version`."""
        while True:
            entry = self.entry(name)
            try:
                return entry, self.queries_of_version(entry.digest, texts)
            except RefusalError:
                if self.entry(name).digest == entry.digest:  # otherwise retry: the task was replaced
                    raise

    def queries_of_version(
        self, digest: str, texts: Sequence[str], copies: Path | None = None
    ) -> list[TaskQuery]:
        """Encode texts for one version of a task, loading it if necessary; ``copies``: see `injection`.

        Raises RefusalError: 404 if it was removed, 500 if it cannot be used; I2CLError on an empty text;
        TooLongError on one that exceeds the context.
        """
        return self._task(digest, copies).queries(texts, cut=False)

    def _task(self, digest: str, copies: Path | None) -> LoadedTask:
        """Return a loaded task. A lock per digest keeps loading from blocking other tasks."""
        with self._lock:
            if digest in self._last_used:
                return self._touch(digest)
            loading = self._loading.setdefault(digest, threading.Lock())
        try:
            with loading:
                if digest not in self._last_used:  # else another thread has loaded it
                    self._load(digest, copies)
                with self._lock:
                    return self._touch(digest)
        finally:
            with self._lock:
                self._loading.pop(digest, None)

    def _touch(self, digest: str) -> LoadedTask:
        """Return a loaded task as the last used one, and drop those used least recently."""
        self._last_used[digest] = None
        self._last_used.move_to_end(digest)
        task = self.pool.task(digest)
        while len(self._last_used) > self._max_resident:
            self.pool.drop(self._last_used.popitem(last=False)[0])
        return task

    def _load(self, digest: str, copies: Path | None) -> None:
        try:
            self.pool.load(digest, self._with_encoder(self.injection(digest, copies)))
        except (RefusalError, OSError) as error:
            raise RefusalError.of(error) from None
        except I2CLError as error:  # another model or version of i2cl, or an encoder that is not enabled
            _log.warning("version %s cannot be used: %s", digest, error)
            message = f"version {digest} cannot be used by this server"
            raise RefusalError(500, "unusable", message, "fit it again, or contact its operator") from None

    def copy(self, name: str, folder: Path) -> Entry:
        """Copy the current version of a task to ``folder/DIGEST``, for a job that runs later.

        Raises RefusalError: 404 if there is no such task, 503 if its folder is being replaced; OSError if it
        cannot be copied.
        """
        with self._writing:
            entry = self.entry(name)
            source = self._root / entry.name if entry.source == "folder" else self._artefacts / entry.digest
            copied = folder / entry.digest
            copied.mkdir(parents=True, exist_ok=True)
            for file in FILES:
                shutil.copyfile(source / file, copied / file)
        if content_digest(copied) != entry.digest:
            raise RefusalError(503, "busy", f"task {entry.name!r} is being replaced", "retry")
        return entry

    def _release(self, digest: str) -> None:
        """Remove an artefact unless a name refers to it."""
        if any(entry.digest == digest for entry in self._named.values()):
            return
        folders = [entry for _, entry in tuple(self._folders.values()) if isinstance(entry, Entry)]
        with self._lock:
            if digest in self._last_used and not any(entry.digest == digest for entry in folders):
                del self._last_used[digest]
                self.pool.drop(digest)
        shutil.rmtree(self._artefacts / digest, ignore_errors=True)

    def require_writable(self) -> None:
        """Raise RefusalError (403) if the store is read-only."""
        if self.read_only:
            raise RefusalError(403, "read_only", "this server is read-only", "use the server that writes")

    def _open_for_writing(self) -> None:
        """Create the server's own folder, and read the names. Raises I2CLError if they are lost."""
        hint = f"restore it from a backup, or remove {self._names_file.parent}"
        if self._names_file.is_file():
            try:
                self._named = self._read_names()
            except (LookupError, TypeError, ValueError) as error:
                raise I2CLError(f"{str(self._names_file)!r} is damaged ({error}): {hint}") from None
        elif self._artefacts.is_dir() and any(self._artefacts.iterdir()):
            raise I2CLError(f"{str(self._names_file)!r} is missing: {hint}")
        self._artefacts.mkdir(parents=True, exist_ok=True)
        digests = {entry.digest for entry in self._named.values()}
        for folder in self._artefacts.iterdir():
            if folder.name not in digests:  # left by a killed process
                shutil.rmtree(folder)
        self._save_names(self._named)

    def _read_names(self) -> dict[str, Entry]:
        names = {}
        for record in json.loads(self._names_file.read_text(encoding="utf-8")):
            lists = {name: record[name] and tuple(record[name]) for name in ("labels", "thresholds")}
            names[record["name"]] = Entry(**record | lists)
        return names

    def _save_names(self, names: dict[str, Entry]) -> None:
        records = [asdict(entry) for entry in names.values()]
        write_text_atomic(self._names_file, json.dumps(records) + "\n")
        self._named = names

    def _names(self) -> dict[str, Entry]:
        """Return the tasks that came over HTTP. A read-only server reads the names again if they changed."""
        if self.read_only:
            try:
                signature = _signature(self._names_file)
                if signature != self._names_signature:
                    self._named, self._names_signature = self._read_names(), signature
            except FileNotFoundError:
                self._named = {}
            except (OSError, LookupError, TypeError, ValueError) as error:
                _log.warning("%s cannot be read: %s", self._names_file, error)
        return self._named

    def _store(self, injection: Injection) -> str:
        """Save an artefact, replacing a damaged one of the same digest, and return its digest."""
        with tempfile.TemporaryDirectory(dir=self._artefacts, prefix=".") as scratch:
            fresh = Path(scratch) / "artefact"
            injection.save_pretrained(fresh)
            digest = content_digest(fresh)
            place = self._artefacts / digest
            if place.is_dir() and content_digest(place) != digest:
                place.rename(fresh.with_name("damaged"))
            if not place.is_dir():
                fresh.rename(place)
                sync_to_disk(self._artefacts)
            return digest

    def _task_folders(self) -> list[Path]:
        found = self._root.glob(f"*/{DESCRIPTION}")
        return sorted(path.parent for path in found if not path.parent.name.startswith("."))

    def _folder_entry(self, name: str) -> Entry | RefusalError | None:
        """Return the task in a folder, the error if it cannot be used, or None if there is no such folder."""
        folder = self._root / name
        if name.startswith(".") or folder.parent != self._root or folder.name != name:
            return None
        try:
            signature = _signature(*(folder / file for file in sorted(FILES)))
        except (OSError, ValueError):  # ValueError: not a valid file name
            self._folders.pop(name, None)
            return None
        known = self._folders.get(name)
        if known is None or known[0] != signature:
            known = signature, self._read_folder(name)
            self._folders[name] = known
        return known[1]

    def _read_folder(self, name: str) -> Entry | RefusalError:
        folder = self._root / name
        try:
            self._require_valid(name)
            injection = Injection.from_pretrained(folder)
            self.prepare(injection)
            created = int((folder / DESCRIPTION).stat().st_mtime)
            labels, thresholds = injection.task.labels, injection.head.thresholds
            return Entry(name, content_digest(folder), created, labels, "folder", thresholds)
        except (I2CLError, OSError) as error:
            reason = RefusalError.of(error) if isinstance(error, OSError) else error
            _log.warning("task folder %s is not served: %s", folder, reason)
            words = str(reason).replace(f"{folder}/", "").replace(str(folder), name)
            return RefusalError(500, "unusable", f"task {name!r} cannot be used by this server: {words}")

    def _log_folders(self) -> None:
        """Log folders that are not served. `_read_folder` logs unusable task folders."""
        for path in sorted(self._root.iterdir()):
            if path.name.startswith(".") or not path.is_dir():
                continue
            if not all((path / name).is_file() for name in FILES):
                missing = " or ".join(sorted(name for name in FILES if not (path / name).is_file()))
                _log.warning("folder %s is not served: it is not a task, it has no %s", path, missing)
            elif path.name in self._names():
                hint = "delete that task, or rename the folder"
                _log.warning(
                    "task folder %s is not served: a task of this name came over HTTP; %s", path, hint
                )
            else:
                self._folder_entry(path.name)


def _folder_conflict(name: str, hint: str) -> RefusalError:
    message = f"task {name!r} is a folder that the server does not change"
    return RefusalError(409, "folder_task", message, hint)


def _signature(*paths: Path) -> Signature:
    """Return what changes when files are replaced: times, sizes, inodes. Raises OSError if one is missing."""
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in (path.stat() for path in paths))


def content_digest(folder: Path) -> str:
    """Return the SHA-256 of an artefact's files and their names, without the model card."""
    sha = sha256()
    for name in sorted(FILES):
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        sha.update(name.encode() + sha256(content).digest())
    return sha.hexdigest()
