"""Writing that leaves either everything or nothing."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from i2cl.errors import I2CLError


def require_writable(path: Path) -> None:
    """Fail early where ``path`` cannot be written later.

    Raises:
        I2CLError: if its parent cannot be made or written, or ``path`` is a file.
    """
    if path.is_file():
        raise I2CLError(f"{str(path)!r} is a file: give a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise I2CLError(
            f"cannot write to {str(path.parent)!r} ({error.strerror}): choose another folder"
        ) from None


@contextmanager
def new_folder(path: Path, marker: str) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends without an error.

    Args:
        path: where the folder goes.
        marker: a file name; an existing folder is only replaced if it holds such a file or nothing.

    Raises:
        I2CLError: if ``path`` holds something else or cannot be written.
    """
    require_writable(path)
    if path.is_dir() and any(path.iterdir()) and not (path / marker).is_file():
        raise I2CLError(f"{str(path)!r} exists and holds other files: choose an empty or new folder")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        yield fresh
        old = Path(scratch) / "old"
        if path.is_dir():
            path.rename(old)
        try:
            fresh.rename(path)
        except BaseException:
            if old.is_dir():
                old.rename(path)
            raise
