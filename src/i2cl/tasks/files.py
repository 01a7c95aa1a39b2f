"""Open files, recognize what they contain, and decode their bytes."""

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

ENCODINGS = {UTF_8: "UTF-8", UTF_16: "UTF-16", WINDOWS: "Windows-1252"}  # what people call them

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip")
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}
_ZIP = b"PK\x03\x04"
_PARQUET = b"PAR1"
_TO_TABLE = "save it as .xlsx, Parquet or CSV"
# Other files by their first bytes: what they are, and what to do.
_BINARY = {
    b"\xd0\xcf\x11\xe0": ("an old Excel or Word file", _TO_TABLE),
    b"ARROW1": ("an Arrow or Feather file", "write it as Parquet"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "decompress it, or use .gz"),
    b"7z\xbc\xaf": ("a 7z archive", "unpack it"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"%PDF": ("a PDF file", "copy its text into a CSV file"),
    b"\x89PNG": ("an image", "name a file of texts"),
    b"\xff\xd8\xff": ("an image", "name a file of texts"),
    b"\x93NUMPY": ("a NumPy array", "write it as CSV"),
    b"\x89HDF": ("an HDF5 file", "write it as Parquet or CSV"),
    b"\x80\x04\x95": ("a pickle", "write it as Parquet or CSV"),
    b"\x80\x05\x95": ("a pickle", "write it as Parquet or CSV"),
}
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")  # bytes that no text file has
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)

MAX_PEEK = 8192  # bytes in which a null byte marks a binary file

Content = Literal["text", "Parquet", "Excel"]


class ReadAsWarning(UserWarning):
    """How a file was read, or which rows were left out: no error, but worth a note."""


class RowError(I2CLError):
    """Raised for rows that cannot be used: the file has to be repaired first.

    Attributes:
        why: what is wrong, and what to do.
        place: file and row, where it is about one row.
    """

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{place}: {why}" if place else why)
        self.place, self.why = place, why


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises I2CLError if it is missing, a folder or unreadable."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise I2CLError(f"{path} does not exist: check the path") from error
    except IsADirectoryError as error:
        raise I2CLError(f"{path} is a folder: name a file in it") from error
    except (OSError, ValueError) as error:  # ValueError: its name holds a null byte
        cause = error.strerror if isinstance(error, OSError) else error
        raise I2CLError(f"{path} cannot be read ({cause}): check its name and permissions") from error


def ending_of(source: str | Path) -> str:
    """Return the ending that says the format, in lower case and without that of a compression: "csv"."""
    suffixes = [suffix.lower() for suffix in Path(source).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1].removeprefix(".") if suffixes else ""


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], Content]]:
    """Open a file of rows, decompressed if need be, whatever its name.

    Yields:
        The bytes, and what they are.

    Raises:
        I2CLError: if the file cannot be opened.
        RowError: if it is a binary file that holds no table, or a damaged archive.
    """
    with opened(path) as raw:
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
        except _DAMAGED as error:
            if handle is raw and not isinstance(error, zipfile.BadZipFile):
                raise
            what = f"{path} is a damaged archive ({first_line(error)})"
            raise RowError(f"{what}: download or compress it again") from error
        finally:
            if handle is not raw:
                handle.close()


def _first_bytes(handle: Any) -> bytes:
    return bytes(handle.peek(64)[:MAX_PEEK])


def _content(start: bytes, where: str) -> Content:
    """Return what a file holds, by its first bytes. Raises RowError if that is no text and no table."""
    if start.startswith(_PARQUET):
        return "Parquet"
    if start.startswith(_ZIP):
        return "Excel"
    require_text(start, where)
    return "text"


def require_text(start: bytes, where: str) -> None:
    """Raise RowError naming the kind of file if the first bytes are those of a binary file."""
    kinds = _BINARY | dict.fromkeys(_DECOMPRESSORS, ("a compressed file", "decompress it first"))
    kinds |= {
        _ZIP: ("a zip archive or Excel file", "name it as a file"),
        _PARQUET: ("Parquet", "name it as a file"),
    }
    for magic, (what, cure) in kinds.items():
        if start.startswith(magic):
            raise RowError(f"{where} is {what}, not text: {cure}")
    if b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise RowError(
            f"{where} is a binary file (it holds null bytes): save it as UTF-8 text, CSV or JSON Lines"
        )


def _is_excel(handle: Any, path: Path) -> bool:
    names = _archive(handle, path).namelist()
    if "mimetype" in names:
        raise RowError(f"{path} is an OpenDocument file: {_TO_TABLE}")
    if "word/document.xml" in names:
        raise RowError(f"{path} is a Word document: copy its text into a CSV file")
    return "xl/workbook.xml" in names


def _single_member(handle: Any, path: Path) -> Any:
    archive = _archive(handle, path)
    files = [
        one for one in archive.infolist() if not one.is_dir() and not one.filename.startswith("__MACOSX/")
    ]
    if len(files) != 1 or files[0].flag_bits & 1:
        what = "is encrypted" if len(files) == 1 else f"holds {len(files)} files"
        raise RowError(f"{path} {what}: unpack it and name one")
    return archive.open(files[0])


def _archive(handle: Any, path: Path) -> zipfile.ZipFile:
    if not handle.seekable():
        raise RowError(f"{path} is a zip archive in a pipe: name it as a file")
    return zipfile.ZipFile(handle)


def encoding_of(lines: Iterable[bytes]) -> str:
    """Return the encoding of a file's lines, one of `ENCODINGS`.

    A byte order mark decides. Without one the first line that is not ASCII does: if it is not UTF-8, the file
    was written by a program for Windows. Other code pages cannot be told apart by a few words.
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


def decoded(lines: Iterable[bytes], where: str, encoding: str = UTF_8) -> Iterator[str]:
    """Decode lines, without their byte order mark.

    Raises RowError naming the first byte that is not of the encoding, or a line with a null byte.
    """
    if encoding == UTF_16:
        yield from _of_utf_16(lines, where)
        return
    before = 0
    for number, line in enumerate(lines, start=1):
        if b"\0" in line:
            what = f"{where} line {number} holds a null byte, so it is no text file"
            raise RowError(f"{what}: save it as UTF-8 text, CSV or JSON Lines")
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            byte = f"byte {before + error.start} is 0x{line[error.start]:02x}"
            what = f"{where} line {number} is not {ENCODINGS[encoding]} ({byte})"
            raise RowError(f"{what}: save the file as UTF-8") from error
        before += len(line)
        yield text.removeprefix("\ufeff") if number == 1 else text


def _of_utf_16(lines: Iterable[bytes], where: str) -> Iterator[str]:
    # Bytes were cut at 0x0a, which may be half a character: only decoded text knows its lines.
    waiting = ""
    try:
        for text in codecs.iterdecode(lines, UTF_16):
            *whole, waiting = (waiting + text).split("\n")
            yield from (f"{line}\n" for line in whole)
    except UnicodeDecodeError as error:
        raise RowError(f"{where} is not whole UTF-16 ({error.reason}): save the file as UTF-8") from error
    if waiting:
        yield waiting
