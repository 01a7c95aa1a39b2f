"""Atomic writes of files and folders, and names that are safe to publish."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path

from i2cl.errors import I2CLError, require_utf8

_RUST_OS_ERROR = re.compile(r"([^:]+) \(os error \d+\)")

# Names of files that may be replaced: a set, or a function from the existing folder to a set.
Owned = AbstractSet[str] | Callable[[Path], AbstractSet[str]]


class WriteError(I2CLError):
    """Raised if the operating system refuses a write; retrying will not help."""


@contextmanager
def write_errors(target: str, hint: str = "free space or choose another place") -> Iterator[None]:
    """Convert operating system errors of the block to a one-line WriteError.

    Args:
        target: what is written, such as ``to 'folder'``.
        hint: what the user can do.

    Raises:
        WriteError: instead of any error that `system_cause` recognizes.
    """
    try:
        yield
    except Exception as error:
        cause = system_cause(error)
        if cause is None:
            raise
        raise WriteError(f"cannot write {target} ({cause}): {hint}") from None


def system_cause(error: Exception) -> str | None:
    """Return the operating system's error message; None for a broken pipe and for other kinds of errors.

    Libraries in Rust (safetensors, tokenizers) raise their own errors with that message in the text.
    """
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError):
        # NumPy's error has only the number of bytes written, not the cause
        return error.strerror or f"{error}; is the disk full?"
    match = None if isinstance(error, I2CLError) else _RUST_OS_ERROR.search(str(error))
    return match and match[1].strip()


def require_writable(path: Path, owned: Owned) -> None:
    """Check early what `new_folder` requires.

    Raises:
        I2CLError: if ``path`` is a file or contains other files than ``owned``, or its parent cannot be
            created or written.
    """
    if path.exists() and not path.is_dir():
        raise I2CLError(f"{str(path)!r} is a file: give a folder")
    existing = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if others := sorted(existing - (owned(path) if callable(owned) else owned)):
        raise I2CLError(f"{str(path)!r} holds other files ({others[0]}): choose an empty or new folder")
    _require_parent(path)


def require_new_file(path: Path) -> None:
    """Check early what `new_file` requires.

    Raises:
        I2CLError: if ``path`` exists, or its parent cannot be created or written.
    """
    if path.is_dir():
        raise I2CLError(f"{str(path)!r} is a folder: give the name of a new file")
    if path.exists():
        raise I2CLError(f"{str(path)!r} already exists: remove it, or choose another name")
    _require_parent(path)


def _require_parent(path: Path) -> None:
    require_utf8(str(path.resolve()), "the path")  # safetensors writes to other paths but cannot read them
    with write_errors(f"to {str(path.parent)!r}", "choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


@contextmanager
def new_folder(path: Path, owned: Owned) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``path`` if the block ends without an error.

    Args:
        path: the final folder.
        owned: an existing folder is only replaced if it contains no other files.

    Raises:
        I2CLError: if ``path`` contains other files or cannot be written.
    """
    path = path.resolve()
    require_writable(path, owned)
    with _temporary_sibling(path) as scratch:
        new = scratch / "new"
        new.mkdir()
        yield new
        files = [file for file in new.rglob("*") if file.is_file()]
        for file in files:
            file.chmod(new.stat().st_mode & 0o666)  # safetensors makes them readable by the owner only
        sync_to_disk(*files, new)
        require_writable(path, owned)  # another process may have written to it in between
        backup = scratch / "old"
        try:
            if path.is_dir():
                path.rename(backup)
            new.rename(path)
        except BaseException:
            if backup.is_dir():
                with suppress(OSError):  # another process has created the folder
                    backup.rename(path)
            raise
        sync_to_disk(path.parent)


def public_name(name: str) -> str:
    """Return a model or file name for publication: the last part of a local path, a hub id unchanged."""
    path = Path(name)
    local = path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    return (path.name or path.resolve().name) if local else name


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to ``path`` if the block ends without an error.

    Raises:
        I2CLError: if ``path`` exists or cannot be written.
    """
    path = path.resolve()
    require_new_file(path)
    with _temporary_sibling(path) as scratch:
        new = scratch / path.name
        yield new
        sync_to_disk(new)
        try:
            path.hardlink_to(new)  # unlike a rename, never replaces an existing file
        except FileExistsError:
            require_new_file(path)
            raise
        except OSError:  # file system without hard links
            new.rename(path)
        sync_to_disk(path.parent)


@contextmanager
def _temporary_sibling(path: Path) -> Iterator[Path]:
    """Yield a temporary folder in the same parent, so that its content can be renamed to ``path``.

    Converts operating system errors of the block like `write_errors`.
    """
    with (
        write_errors(repr(str(path))),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name[:20]}-") as folder,
    ):
        yield Path(folder)


def sync_to_disk(*paths: Path) -> None:
    """Call fsync on files and folders (a folder's entries). Raises OSError on failure."""
    windows = os.name == "nt"  # Windows cannot sync folders, nor files opened for reading only
    for path in paths:
        if windows and path.is_dir():
            continue
        handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text_atomic(path: Path, text: str) -> None:
    """Create or replace a file atomically, and sync it to disk. Raises I2CLError if it cannot be written."""
    with _temporary_sibling(path) as scratch:
        new = scratch / path.name
        new.write_text(text, encoding="utf-8")
        sync_to_disk(new)
        new.replace(path)
        sync_to_disk(path.parent)
