"""Zip archives that somebody else made: checked before anything is written, unpacked once."""

import hashlib
import stat
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from filelock import FileLock
from huggingface_hub import cached_assets_path

from i2cl.errors import I2CLError
from i2cl.storage.atomic import new_folder, write_errors

MOST_BYTES = 2**30  # of all members together: more is no model that this package unpacks

# Ends of the names that are unpacked. Pickles, which can run code when loaded, are none.
KINDS = (".json", ".md", ".safetensors", ".txt")


def unpacked(archive: Path, name: str) -> Path:
    """A folder with the members of a zip archive; unpacked at the first call, taken from there later.

    It lies where the hub's client keeps the files of other libraries (``HF_ASSETS_CACHE``), under a name that
    changes with the archive's contents.

    ``archive``: the file; ``name``: what it holds, as a part of the folder's name. Raises I2CLError if it is
    no zip archive or a damaged one, or holds a member that leaves the folder, is of a kind that is not
    unpacked, or is too large; or if the folder cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = _checked(archive, opened.infolist())
            listed = "\n".join(f"{one.filename} {one.file_size} {one.CRC}" for one in members)
            place = f"{name}-{hashlib.sha256(listed.encode()).hexdigest()[:16]}"
            with write_errors("to the cache of the hub", "free space or set HF_ASSETS_CACHE"):
                parent = cached_assets_path("i2cl", namespace="archives", subfolder=place)
                with FileLock(parent / ".lock"):
                    folder = parent / "files"
                    if not folder.is_dir():
                        with new_folder(folder, frozenset()) as fresh:
                            opened.extractall(fresh, members)
                    return folder
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, FileNotFoundError) as error:
        what = f"{str(archive)!r} is no zip archive, or damaged ({error})"
        raise I2CLError(f"{what}: install or copy it again") from None


def _checked(archive: Path, members: Iterable[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    files = [member for member in members if not member.is_dir()]
    for member in files:
        path = PurePosixPath(member.filename)
        inside = not path.is_absolute() and ".." not in path.parts and not {"\\", ":"} & set(member.filename)
        if not inside or stat.S_ISLNK(member.external_attr >> 16) or member.flag_bits & 1:
            why = "leaves the folder, or is a link or encrypted"
        elif path.suffix not in KINDS:
            why = f"is none of {', '.join(KINDS)}"
        else:
            continue
        raise I2CLError(f"{str(archive)!r} is not unpacked: its member {member.filename!r} {why}")
    if sum(member.file_size for member in files) > MOST_BYTES:
        raise I2CLError(f"{str(archive)!r} is not unpacked: its members take more than {MOST_BYTES:,} bytes")
    return files
