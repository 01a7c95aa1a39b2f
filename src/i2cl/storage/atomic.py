"""Writing that leaves either everything or nothing, and names that may be published."""

import tempfile
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

from i2cl.errors import I2CLError


@contextmanager
def write_errors(what: str, cure: str = "choose another place") -> Iterator[None]:
    """Say in one line what could not be written.

    Args:
        what: such as ``to 'folder'``.
        cure: what to do then.

    Raises:
        I2CLError: in place of any OSError of the block.
    """
    try:
        yield
    except OSError as error:
        raise I2CLError(f"cannot write {what} ({error.strerror or error}): {cure}") from None


def require_writable(path: Path, owned: AbstractSet[str]) -> None:
    """Fail early where `new_folder` would fail later.

    Raises:
        I2CLError: if the parent cannot be made or written, or ``path`` is a file or holds other files.
    """
    if path.is_file():
        raise I2CLError(f"{str(path)!r} is a file: give a folder")
    others = sorted({entry.name for entry in path.iterdir()} - owned) if path.is_dir() else []
    if others:
        raise I2CLError(f"{str(path)!r} holds other files ({others[0]}): choose an empty or new folder")
    _require_parent(path)


def require_new_file(path: Path) -> None:
    """Fail early where `new_file` would fail later.

    Raises:
        I2CLError: if ``path`` is there already, or its parent cannot be made or written.
    """
    if path.is_dir():
        raise I2CLError(f"{str(path)!r} is a folder: give the name of a new file")
    if path.exists():
        raise I2CLError(f"{str(path)!r} is there already: remove it, or choose another name")
    _require_parent(path)


def _require_parent(path: Path) -> None:
    with write_errors(f"to {str(path.parent)!r}", "choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


@contextmanager
def new_folder(path: Path, owned: AbstractSet[str]) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends without an error.

    Args:
        path: where the folder goes.
        owned: names of files; an existing folder is only replaced if it holds nothing else.

    Raises:
        I2CLError: if ``path`` holds something else or cannot be written.
    """
    path = path.resolve()
    require_writable(path, owned)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        with write_errors(repr(str(path)), "free space or choose another place"):
            yield fresh
            follow_umask(fresh)
        old = Path(scratch) / "old"
        if path.is_dir():
            path.rename(old)
        try:
            fresh.rename(path)
        except BaseException:
            if old.is_dir():
                old.rename(path)
            raise


def follow_umask(folder: Path) -> None:
    """Let others read the files of a folder as they may the folder: safetensors makes them private.

    Raises:
        OSError: if it cannot be done.
    """
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
    """A temporary file that gets the name ``path`` when the block ends without an error.

    Raises:
        I2CLError: if ``path`` is there already or cannot be written.
    """
    path = path.resolve()
    require_new_file(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        fresh = Path(scratch) / path.name
        with write_errors(repr(str(path))):
            yield fresh
            fresh.rename(path)
