"""A folder of tasks: artefacts by the SHA-256 of their files, names that stand for one of them each.

    DIR/artefacts/DIGEST/   injection.json, injection.safetensors, README.md
    DIR/names/HASH.json     a name, and the digest that it stands for now

A task is on the disk, synced, before it is told to be there, all of it or nothing. What is used is loaded;
what was not used for longest leaves the model's device, and comes back when it is asked for.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from i2cl.core.artefact import FILES
from i2cl.core.encoder_bias import absolute
from i2cl.core.injection import Injection
from i2cl.errors import HALF_PAIR, I2CLError
from i2cl.injections.pool import InjectionPool, Loaded, TaskQuery
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.server.uploads import require_moderate
from i2cl.storage.atomic import replaced_file, synced

LONGEST_NAME = 128

_log = logging.getLogger("i2cl.server")


@dataclass(frozen=True)
class Entry:
    """What a name stands for."""

    name: str  # as users say it
    digest: str  # SHA-256 of the artefact's files
    created: int  # seconds since 1970
    labels: tuple[str, ...]  # in the order of probabilities


class TaskStore:
    """Named artefacts on the disk, and those of them that are loaded."""

    def __init__(
        self,
        root: Path,
        pool: InjectionPool,
        *,
        most_resident: int,
        read_only: bool,
        encoders: Sequence[str] = (),
    ) -> None:
        """Open a folder, or make it; one process may write to it at a time.

        ``pool``: of the model, and empty; ``most_resident``: tasks on the model's device at once;
        ``read_only``: never write; names are those that another process has given by now; ``encoders``: the
        sentence encoders that tasks may take. Raises I2CLError if it cannot be written, or is not there
        and must not be.
        """
        self.encoders = tuple(encoders)
        self.pool = pool  # those that are loaded, by digest
        self.read_only = read_only  # whether nothing may be changed
        self._artefacts, self._names = root / "artefacts", root / "names"
        self._most = most_resident
        self._used: OrderedDict[str, None] = OrderedDict()
        self._loading = threading.Lock()
        self._writing = threading.RLock()
        self._kept: Counter[str] = Counter()
        self.keeps_all = False  # whether every version stays, since not all that may need one could be read
        # tells digests that are to stay though no name stands for them
        self.needed: Callable[[], AbstractSet[str]] = frozenset
        if not read_only:
            for folder in (self._artefacts, self._names):
                folder.mkdir(parents=True, exist_ok=True)
                for left in folder.glob(".*"):  # by a kill
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        elif not self._names.is_dir():
            raise I2CLError(f"{str(root)!r} holds no tasks: name a folder that `i2cl serve` has written")
        self._named = {} if read_only else {entry.name: entry for entry in self._stored_entries()}

    def entry(self, name: str) -> Entry:
        """What a name stands for now. Raises RefusalError: 404 if there is none."""
        try:
            return _read(self._alias(name)) if self.read_only else self._named[name]
        except (OSError, LookupError, TypeError, ValueError):
            message = f"no task {name!r} is here: GET /v1/models lists those that are"
            raise RefusalError(404, "unknown_task", message) from None

    def entries(self) -> list[Entry]:
        """All of them, by name."""
        entries = self._stored_entries() if self.read_only else list(self._named.values())
        return sorted(entries, key=lambda entry: entry.name)

    def put(self, name: str, injection: Injection) -> Entry:
        """Give a name to an artefact, which replaces what had it. It is on the disk when this returns. Raises
        RefusalError: 422 on a name or artefact that cannot be used, 403 where nothing is written; OSError if
        it cannot be written; or a `WriteError`.
        """
        require_name(name)
        self.require_writable()
        self.loaded(injection)
        with self._writing:
            digest = self._stored(injection)
            entry = Entry(name, digest, int(time.time()), injection.task.labels)
            before = self._named.get(name)
            replaced_file(self._alias(name), json.dumps(asdict(entry)) + "\n")
            self._named[name] = entry
            if before is not None and before.digest != digest:
                self._sweep(before.digest)
        return entry

    def delete(self, name: str) -> None:
        """Take a name away; what was asked of its task before is answered. Raises RefusalError: 404 if there
        is none, 403 where nothing is written; OSError if it cannot be.
        """
        self.require_writable()
        with self._writing:
            digest = self.entry(name).digest
            self._alias(name).unlink()
            synced(self._names)
            self._named.pop(name)
            self._sweep(digest)

    def loaded(self, injection: Injection) -> Loaded:
        """An injection as this model would use it; a 422 if it cannot be used."""
        try:
            injection = self._with_encoder(injection)
            require_moderate(injection, self.pool.decoder)
            return InjectionPool(self.pool.decoder, {"": injection}).task("")
        except RefusalError:
            raise
        except I2CLError as error:
            raise RefusalError(422, "bad_artefact", str(error)) from None

    def _with_encoder(self, injection: Injection) -> Injection:
        """By whichever of this server's encoders gives the vectors of the fit: names differ by machine."""
        bias, device = injection.encoder_bias, str(self.pool.decoder.device)
        if bias is None or absolute(bias.encoder) in self.encoders:
            return injection
        for name in self.encoders:
            if bias.is_of(name, device):
                return replace(injection, encoder_bias=replace(bias, encoder=name))
        self.require_encoder(bias.encoder)
        return injection

    def require_encoder(self, name: str) -> None:
        """Refuse a sentence encoder that this server was not started with: loading one may download it.
        Raises I2CLError with those that it has.
        """
        if absolute(name) not in self.encoders:
            cure = "its operator starts it with --encoder; or fit the task without one"
            had = ", ".join(map(repr, self.encoders)) or "none"
            raise I2CLError(f"the sentence encoder {name!r} is none of this server's ({had}): {cure}")

    def injection(self, digest: str) -> Injection:
        """An artefact, held against its digest. Raises RefusalError: 404 if it is gone, 500 if damaged."""
        folder = self._artefacts / digest
        if not folder.is_dir():
            message = "this version of the task is gone: fit or upload it again"
            raise RefusalError(404, "unknown_task", message)
        if content_digest(folder) != digest:
            message = f"version {digest} is damaged on the server's disk: upload it again"
            raise RefusalError(500, "damaged", message)
        return Injection.from_pretrained(folder)

    def queries(self, name: str, texts: Sequence[str]) -> tuple[Entry, list[TaskQuery]]:
        """Texts, to be asked of the version that a name stands for now; raises as `entry`, `of_version`."""
        while True:
            entry = self.entry(name)
            try:
                return entry, self.of_version(entry.digest, texts)
            except RefusalError:
                if self.entry(name).digest == entry.digest:  # else it was replaced between two looks
                    raise

    def of_version(self, digest: str, texts: Sequence[str]) -> list[TaskQuery]:
        """Texts, to be asked of one version. Raises RefusalError: 404 if it is gone, 500 if it cannot be
        used; I2CLError on an empty text; a `TooLongError` on one that exceeds the context.
        """
        with self._loading:
            if digest not in self._used:
                self._load(digest)
            self._used[digest] = None
            self._used.move_to_end(digest)
            while len(self._used) > self._most:
                self.pool.drop(self._used.popitem(last=False)[0])
            task = self.pool.task(digest)
        return task.queries(texts, cut=False)

    def _load(self, digest: str) -> None:
        try:
            self.pool.load(digest, self._with_encoder(self.injection(digest)))
        except (RefusalError, OSError) as error:
            raise RefusalError.of(error) from None
        except I2CLError as error:  # of another model, of a later i2cl, or its encoder is not here
            _log.warning("version %s cannot be used: %s", digest, error)
            message = f"version {digest} cannot be used by this server: fit it again, or ask its operator"
            raise RefusalError(500, "unusable", message) from None

    @contextmanager
    def kept(self, names: Iterable[str]) -> Iterator[dict[str, str]]:
        """The versions that names stand for now, which stay while the block runs; 404 if there is none."""
        with self._writing:
            digests = {name: self.entry(name).digest for name in names}
            self._kept.update(digests.values())
        try:
            yield digests
        finally:
            with self._writing:
                self._kept -= Counter(digests.values())
                for digest in {*digests.values()}:
                    self._sweep(digest)

    def sweep(self) -> None:
        """Remove versions that no name stands for and nobody needs."""
        known = self._live()
        for folder in self._artefacts.iterdir():
            if folder.name not in known:
                self._sweep(folder.name)

    def require_writable(self) -> None:
        """Go on only where tasks may be changed. Raises RefusalError: 403 otherwise."""
        if self.read_only:
            raise RefusalError(403, "read_only", "this server only reads: send it to the one that writes")

    def _alias(self, name: str) -> Path:
        return self._names / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def _stored_entries(self) -> list[Entry]:
        entries = []
        for path in self._names.glob("*.json"):
            try:
                entries.append(_read(path))
            except FileNotFoundError:  # deleted just now
                continue
            except (OSError, LookupError, TypeError, ValueError) as error:
                self.keeps_all = True
                _log.warning("names/%s stays as it is: %s when it was read", path.name, type(error).__name__)
        return entries

    def _live(self) -> set[str]:
        """Digests that a name stands for, or that somebody needs."""
        return {entry.digest for entry in self._named.values()} | {*self._kept} | self.needed()

    def _stored(self, injection: Injection) -> str:
        with tempfile.TemporaryDirectory(dir=self._artefacts, prefix=".") as scratch:
            fresh = Path(scratch) / "artefact"
            injection.save_pretrained(fresh)
            digest = content_digest(fresh)
            if not (self._artefacts / digest).is_dir():
                fresh.rename(self._artefacts / digest)
                synced(self._artefacts)
        return digest

    def _sweep(self, digest: str) -> None:
        """Remove a version, unless a name stands for it or somebody needs it."""
        with self._writing:
            if self.keeps_all or digest in self._live():
                return
            with self._loading:
                if digest in self._used:
                    del self._used[digest]
                    self.pool.drop(digest)
                shutil.rmtree(self._artefacts / digest, ignore_errors=True)


def _read(path: Path) -> Entry:
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Entry(**fields | {"labels": tuple(fields["labels"])})


def content_digest(folder: Path) -> str:
    """SHA-256 of an artefact's files, the card aside, each with its name."""
    sha = hashlib.sha256()
    for name in sorted(FILES):
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        sha.update(name.encode() + hashlib.sha256(content).digest())
    return sha.hexdigest()


def require_name(name: str) -> None:
    """Refuse what cannot stand in an address or a table. Raises RefusalError: 422, saying why."""
    if (
        not 0 < len(name) <= LONGEST_NAME
        or name != name.strip()
        or {".", ".."} & {*name.split("/")}  # clients resolve these in an address: they mean another task
        or HALF_PAIR.search(name)
        or not name.isprintable()
    ):
        cure = f"give 1 to {LONGEST_NAME} characters that can be printed, without spaces around them"
        message = f"a task cannot be called {name!a}: {cure}, and nothing like '../'"
        raise RefusalError(422, "bad_name", message)
