"""Open files, decompress them, and decode their text."""

import bz2
import codecs
import gzip
import io
import lzma
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from i2cl.errors import I2CLError, first_line

UTF_8, UTF_16, WINDOWS = "utf-8", "utf-16", "cp1252"
ENCODING_NAMES = {UTF_8: "UTF-8", UTF_16: "UTF-16", WINDOWS: "Windows-1252"}

_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSION_SUFFIXES = (*_OPENERS, ".zip")
_DECOMPRESSION_ERRORS = (EOFError, OSError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)

_CONTROL_BYTES = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")  # do not occur in text files


class ReadAsWarning(UserWarning):
    """Reports an assumption about a file, such as its encoding, or rows that were skipped."""


class RowError(I2CLError):
    """Raised for rows that cannot be used; the user has to correct the file.

    Attributes:
        why: what is wrong, and what to do.
        place: file and row; empty if the error concerns the whole file.
        rows: if the error summarizes several rows, the message of each (up to 1,000).
    """

    def __init__(self, why: str, place: str = "", rows: tuple[str, ...] = ()) -> None:
        super().__init__(f"{place}: {why}" if place else why)
        self.place, self.why, self.rows = place, why, rows


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises I2CLError if it is missing, a folder or unreadable."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise I2CLError(f"{path} does not exist: check the path") from error
    except IsADirectoryError as error:
        raise I2CLError(f"{path} is a folder: name a file in it") from error
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        cause = error.strerror if isinstance(error, OSError) else error
        raise I2CLError(f"{path} cannot be read ({cause}): check its name and permissions") from error


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, and decompress it if its suffix says that it is compressed.

    Raises:
        I2CLError: if the file cannot be opened.
        RowError: if it is a damaged or encrypted archive, or a zip archive of several files.
    """
    suffix = path.suffix.lower()
    with open_binary(path) as file, ExitStack() as stack:
        if suffix not in COMPRESSION_SUFFIXES:
            yield file
            return
        try:
            if suffix == ".zip":
                archive = stack.enter_context(zipfile.ZipFile(file))
                names = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
                if len(names) != 1:
                    raise RowError(f"{path} contains {len(names)} files: unpack it and give one of them")
                yield stack.enter_context(archive.open(names[0]))
            else:
                yield stack.enter_context(_OPENERS[suffix](file))
        except _DECOMPRESSION_ERRORS as error:
            raise RowError(
                f"{path} cannot be decompressed ({first_line(error)}): download or compress it again"
            ) from error


def detect_encoding(lines: Iterable[bytes]) -> str:
    """Return the encoding of a file, one of `ENCODING_NAMES`.

    A byte order mark decides. Without one, the first non-ASCII line decides: if it is not valid UTF-8, the
    file is assumed to be Windows-1252. A few words are not enough to detect other code pages.
    """
    for number, line in enumerate(lines):
        if number == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return UTF_16
        if number == 0 and line.startswith(codecs.BOM_UTF8):
            return UTF_8
        if not line.isascii():
            for encoding in (UTF_8,) if _CONTROL_BYTES.search(line) else (UTF_8, WINDOWS):
                with suppress(UnicodeDecodeError):
                    line.decode(encoding)
                    return encoding
            break
    return UTF_8


def decode_lines(file: IO[bytes], name: str, encoding: str = UTF_8) -> Iterator[str]:
    """Yield the lines of a file as text, without the byte order mark.

    Emits a `ReadAsWarning` if the encoding is not UTF-8. Raises RowError, naming the line and the first
    invalid byte, if the content is binary or not in the encoding.
    """
    if encoding == UTF_16:
        _warn_of_encoding(name, encoding)
        try:
            with io.TextIOWrapper(file, encoding, newline="\n") as text:
                yield from text
        except UnicodeDecodeError as error:
            raise RowError(f"{name} is not valid UTF-16 ({error.reason}): save the file as UTF-8") from error
        return
    offset = 0  # bytes before the line
    for number, line in enumerate(file, start=1):
        if number == 1:
            _warn_of_encoding(name, encoding)
        if b"\0" in line:
            raise RowError(
                f"{name} line {number} contains a null byte, so it is not a text file: save it as UTF-8 "
                "text, CSV or JSON Lines"
            )
        try:
            decoded = line.decode(encoding)
        except UnicodeDecodeError as error:
            byte = f"byte {offset + error.start} is 0x{line[error.start]:02x}"
            raise RowError(
                f"{name} line {number} is not {ENCODING_NAMES[encoding]} ({byte}): save the file as UTF-8"
            ) from error
        offset += len(line)
        yield decoded.removeprefix("\ufeff") if number == 1 else decoded


def _warn_of_encoding(name: str, encoding: str) -> None:
    if encoding != UTF_8:
        message = f"{name} is read as {ENCODING_NAMES[encoding]}: save it as UTF-8 if that is wrong"
        warnings.warn(message, ReadAsWarning, stacklevel=2)
