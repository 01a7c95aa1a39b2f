"""Open files, detect their content by the first bytes, and decode text."""

import bz2
import codecs
import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, cast

from i2cl.errors import I2CLError, first_line

UTF_8, UTF_16, WINDOWS = "utf-8", "utf-16", "cp1252"

ENCODINGS = {UTF_8: "UTF-8", UTF_16: "UTF-16", WINDOWS: "Windows-1252"}  # names for messages

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip")
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
_ZIP = b"PK\x03\x04"
_PARQUET = b"PAR1"
_SAVE_AS_TABLE = "save it as .xlsx, Parquet or CSV"
# Unsupported formats by their first bytes: a description, and what to do.
_UNSUPPORTED = {
    b"\xd0\xcf\x11\xe0": ("an old Excel or Word file", _SAVE_AS_TABLE),
    b"ARROW1": ("an Arrow or Feather file", "write it as Parquet"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "decompress it, or use .gz"),
    b"7z\xbc\xaf": ("a 7z archive", "unpack it"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"%PDF": ("a PDF file", "copy its text into a CSV file"),
    b"\x89PNG": ("an image", "give a text file"),
    b"\xff\xd8\xff": ("an image", "give a text file"),
    b"\x93NUMPY": ("a NumPy array", "write it as CSV"),
    b"\x89HDF": ("an HDF5 file", "write it as Parquet or CSV"),
    b"\x80\x04\x95": ("a pickle", "write it as Parquet or CSV"),
    b"\x80\x05\x95": ("a pickle", "write it as Parquet or CSV"),
}
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")  # bytes that do not occur in text files
_DECOMPRESSION_ERRORS = (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)

MAX_PEEK = 8192  # bytes to check for null bytes, which indicate a binary file

Content = Literal["text", "Parquet", "Excel"]


class ReadAsWarning(UserWarning):
    """Reports an assumption about a file, such as its encoding, or rows that were skipped."""


class RowError(I2CLError):
    """Raised for rows that cannot be used; the user has to correct the file.

    Attributes:
        why: what is wrong, and what to do.
        place: file and row; empty if the error concerns the whole file.
    """

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{place}: {why}" if place else why)
        self.place, self.why = place, why


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


def format_suffix(source: str | Path) -> str:
    """Return the suffix that names the format, in lower case, without dot and compression suffix: "csv"."""
    suffixes = [suffix.lower() for suffix in Path(source).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1].removeprefix(".") if suffixes else ""


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], Content]]:
    """Open a file of rows and decompress it if needed. The content decides, not the file name.

    Yields:
        A binary file object, and the kind of its content.

    Raises:
        I2CLError: if the file cannot be opened.
        RowError: if it is an unsupported binary file or a damaged archive.
    """
    with open_binary(path) as raw:
        handle: Any = raw
        try:
            start = _first_bytes(handle)
            for magic, decompress in _DECOMPRESSORS.items():
                if start.startswith(magic):
                    handle = decompress(raw)
                    start = _first_bytes(handle)
                    break
            if start.startswith(_ZIP) and not _is_excel(handle, path):
                handle = _single_member(handle, path)
                start = _first_bytes(handle)
            yield cast("IO[bytes]", handle), _content(start, str(path))
        except _DECOMPRESSION_ERRORS as error:
            if handle is raw and not isinstance(error, zipfile.BadZipFile):
                raise
            raise RowError(
                f"{path} is a damaged archive ({first_line(error)}): download or compress it again"
            ) from error
        finally:
            if handle is not raw:
                handle.close()


def _first_bytes(handle: Any) -> bytes:
    return bytes(handle.peek(64)[:MAX_PEEK])


def _content(start: bytes, name: str) -> Content:
    """Determine the content of a file by its first bytes. Raises RowError if it is unsupported."""
    if start.startswith(_PARQUET):
        return "Parquet"
    if start.startswith(_ZIP):
        return "Excel"
    require_text(start, name)
    return "text"


def require_text(start: bytes, name: str) -> None:
    """Raise RowError if the first bytes belong to a binary file; name its format if it is known."""
    kinds = _UNSUPPORTED | dict.fromkeys(_DECOMPRESSORS, ("a compressed file", "decompress it first"))
    kinds |= {
        _ZIP: ("a zip archive or Excel file", "give its path instead of piping it"),
        _PARQUET: ("a Parquet file", "give its path instead of piping it"),
    }
    for magic, (kind, hint) in kinds.items():
        if start.startswith(magic):
            raise RowError(f"{name} is {kind}, not text: {hint}")
    if b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise RowError(
            f"{name} is a binary file (it contains null bytes): save it as UTF-8 text, CSV or JSON Lines"
        )


def _is_excel(handle: Any, path: Path) -> bool:
    names = _archive(handle, path).namelist()
    if "mimetype" in names:
        raise RowError(f"{path} is an OpenDocument file: {_SAVE_AS_TABLE}")
    if "word/document.xml" in names:
        raise RowError(f"{path} is a Word document: copy its text into a CSV file")
    return "xl/workbook.xml" in names


def _single_member(handle: Any, path: Path) -> Any:
    archive = _archive(handle, path)
    files = [
        member
        for member in archive.infolist()
        if not member.is_dir() and not member.filename.startswith("__MACOSX/")
    ]
    if len(files) != 1:
        raise RowError(f"{path} contains {len(files)} files: unpack it and give one of them")
    if files[0].flag_bits & 1:
        raise RowError(f"{path} is encrypted: unpack it first")
    return archive.open(files[0])


def _archive(handle: Any, path: Path) -> zipfile.ZipFile:
    if not handle.seekable():
        raise RowError(f"{path} is a zip archive in a pipe: give its path instead")
    return zipfile.ZipFile(handle)


def detect_encoding(lines: Iterable[bytes]) -> str:
    """Return the encoding of a file, one of `ENCODINGS`.

    A byte order mark decides. Without one, the first non-ASCII line decides: if it is not valid UTF-8, the
    file is assumed to be Windows-1252. A few words are not enough to detect other code pages.
    """
    for number, line in enumerate(lines):
        if number == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return UTF_16
        if number == 0 and line.startswith(codecs.BOM_UTF8):
            return UTF_8
        if not line.isascii():
            for name in (UTF_8,) if _CONTROL.search(line) else (UTF_8, WINDOWS):
                with suppress(UnicodeDecodeError):
                    line.decode(name)
                    return name
            break
    return UTF_8


def decode_lines(lines: Iterable[bytes], name: str, encoding: str = UTF_8) -> Iterator[str]:
    """Decode lines and remove the byte order mark.

    Raises RowError with the position of the first invalid byte, or the number of a line with a null byte.
    """
    if encoding == UTF_16:
        yield from _decode_utf_16(lines, name)
        return
    offset = 0  # bytes before the line
    for number, line in enumerate(lines, start=1):
        if b"\0" in line:
            raise RowError(
                f"{name} line {number} contains a null byte, so it is not a text file: save it as UTF-8 "
                "text, CSV or JSON Lines"
            )
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            byte = f"byte {offset + error.start} is 0x{line[error.start]:02x}"
            raise RowError(
                f"{name} line {number} is not {ENCODINGS[encoding]} ({byte}): save the file as UTF-8"
            ) from error
        offset += len(line)
        yield text.removeprefix("\ufeff") if number == 1 else text


def _decode_utf_16(lines: Iterable[bytes], name: str) -> Iterator[str]:
    # The input was split at bytes 0x0a, which may be half of a character: split the decoded text instead.
    rest = ""
    try:
        for text in codecs.iterdecode(lines, UTF_16):
            *complete, rest = (rest + text).split("\n")
            yield from (f"{line}\n" for line in complete)
    except UnicodeDecodeError as error:
        raise RowError(f"{name} is not valid UTF-16 ({error.reason}): save the file as UTF-8") from error
    if rest:
        yield rest
