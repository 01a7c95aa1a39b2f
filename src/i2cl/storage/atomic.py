"""Writing that leaves either everything or nothing, and names that may be published."""

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path

from i2cl.errors import I2CLError, require_whole

_TOLD_BY_RUST = re.compile(r"([^:]+) \(os error \d+\)")


class WriteError(I2CLError):
    """What is asked for cannot be written anywhere near: no more of it should be tried."""


@contextmanager
def write_errors(what: str, cure: str = "free space or choose another place") -> Iterator[None]:
    """Say in one line what could not be written.

    ``what``: such as ``to 'folder'``; ``cure``: what to do then. Raises WriteError in place of any error of
    the block that `system_cause` knows.
    """
    try:
        yield
    except Exception as error:
        cause = system_cause(error)
        if cause is None:
            raise
        raise WriteError(f"cannot write {what} ({cause}): {cure}") from None


def system_cause(error: Exception) -> str | None:
    """What the system refused, in its words; None for an error of another kind, or a reader that went away.

    Libraries in Rust (safetensors, tokenizers) tell it in the text of errors of their own.
    """
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError):
        return error.strerror or f"{error}; is the disk full?"  # NumPy says how much it wrote, and not why
    match = None if isinstance(error, I2CLError) else _TOLD_BY_RUST.search(str(error))
    return match and match[1].strip()


# Names of files in a folder that may be replaced; a function says so of the folder as it then is.
Owned = AbstractSet[str] | Callable[[Path], AbstractSet[str]]


def require_writable(path: Path, owned: Owned) -> None:
    """Fail early where `new_folder` would fail later. Raises I2CLError if the parent cannot be made or
    written, or ``path`` is a file or holds other files.
    """
    if path.exists() and not path.is_dir():
        raise I2CLError(f"{str(path)!r} is a file: give a folder")
    there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if others := sorted(there - (owned(path) if callable(owned) else owned)):
        raise I2CLError(f"{str(path)!r} holds other files ({others[0]}): choose an empty or new folder")
    _require_parent(path)


def require_new_file(path: Path) -> None:
    """Raise I2CLError where `new_file` would: the file is there, or its parent cannot be made or written."""
    if path.is_dir():
        raise I2CLError(f"{str(path)!r} is a folder: give the name of a new file")
    if path.exists():
        raise I2CLError(f"{str(path)!r} is there already: remove it, or choose another name")
    _require_parent(path)


def _require_parent(path: Path) -> None:
    require_whole(str(path.resolve()), "the path")  # safetensors writes to others, and reads none of them
    with write_errors(f"to {str(path.parent)!r}", "choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


@contextmanager
def new_folder(path: Path, owned: Owned) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends without an error.

    Of several writers each comes after another: the later replaces what the earlier wrote, or is refused.

    ``path``: where the folder goes; ``owned``: an existing folder is only replaced if it holds nothing else.
    Raises I2CLError if ``path`` holds something else or cannot be written.
    """
    path = path.resolve()
    require_writable(path, owned)
    with write_errors(repr(str(path))), _scratch(path) as scratch:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        follow_umask(fresh)
        synced(*(file for file in fresh.rglob("*") if file.is_file()), fresh)
        _replace(path, fresh, owned)
        synced(path.parent)


def _replace(path: Path, fresh: Path, owned: Owned) -> None:
    """Give a folder its name; what has it meanwhile goes, if it may, and comes back if this fails."""
    old = fresh
    try:
        for attempt in itertools.count():
            if path.is_dir():
                require_writable(path, owned)
                old = fresh.with_name(f"old-{attempt}")
                with suppress(FileNotFoundError):  # another writer has moved it
                    path.rename(old)
            try:
                fresh.rename(path)
            except OSError:
                if not path.is_dir():  # by another writer, this moment
                    raise
            else:
                return
    except BaseException:
        if old != fresh and old.is_dir():
            with suppress(OSError):  # there is another writer's folder
                old.rename(path)
        raise


def follow_umask(folder: Path) -> None:
    """Let others read files as they may the folder: safetensors makes them private. Raises OSError."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def public_name(name: str) -> str:
    """What others may read of a model's or file's name: the last part of a path; a hub id as it is."""
    path = Path(name)
    local = path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    return (path.name or path.resolve().name) if local else name


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file that gets the name ``path`` when the block ends without an error. Raises I2CLError if
    ``path`` is there already or cannot be written.
    """
    path = path.resolve()
    require_new_file(path)
    with write_errors(repr(str(path))), _scratch(path) as scratch:
        fresh = scratch / path.name
        yield fresh
        synced(fresh)
        try:
            path.hardlink_to(fresh)  # which, unlike a rename, replaces nothing
        except FileExistsError:
            require_new_file(path)
            raise
        except OSError:  # not every file system has hard links
            fresh.rename(path)
        synced(path.parent)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A folder beside ``path``, so that a rename suffices, for as long as the block runs."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name[:20]}-") as folder:
        yield Path(folder)


def synced(*paths: Path) -> None:
    """Return when files and folders, the names in them, are on the disk. Raises OSError if they cannot be."""
    windows = os.name == "nt"  # which syncs no folder, and no file that is open for reading alone
    for path in (one for one in paths if not (windows and one.is_dir())):
        handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replaced_file(path: Path, text: str) -> None:
    """Write a file that has its old or all of its new content, synced. Raises I2CLError if it cannot."""
    with write_errors(repr(str(path))), _scratch(path) as scratch:
        fresh = scratch / path.name
        fresh.write_text(text, encoding="utf-8")
        synced(fresh)
        fresh.replace(path)
        synced(path.parent)
