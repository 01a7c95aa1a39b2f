"""Files as people have them: opened, and their bytes decoded as what they are."""

import codecs
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from i2cl.errors import I2CLError

UTF_8, UTF_16, WINDOWS = "utf-8", "utf-16", "cp1252"

ENCODINGS = {UTF_8: "UTF-8", UTF_16: "UTF-16", WINDOWS: "Windows-1252"}  # what people call them


class ReadAsWarning(UserWarning):
    """What a file is taken for, or what of it is left out: nothing is wrong, but somebody should know."""


class RowError(I2CLError):
    """Rows that cannot be used as they are: the file has to be repaired first; ``place``: of one row."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(f"{place}: {why}" if place else why)
        self.place, self.why = place, why


def opened(path: Path) -> IO[bytes]:
    """A file to be read; I2CLError when it is missing, a folder or unreadable."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise I2CLError(f"{path} does not exist: check the path") from error
    except IsADirectoryError as error:
        raise I2CLError(f"{path} is a folder: name a file in it") from error
    except (OSError, ValueError) as error:  # ValueError: its name holds a null byte
        cause = error.strerror if isinstance(error, OSError) else error
        raise I2CLError(f"{path} cannot be read ({cause}): check its name and permissions") from error


def encoding_of(lines: Iterable[bytes]) -> str:
    """How a file's lines are encoded: one of `ENCODINGS`.
    A byte order mark tells it. Without one the first line that is not ASCII does: what is no UTF-8 there was
    written by a program for Windows. No more is guessed: a few words are too little to tell code pages apart.
    """
    for number, line in enumerate(lines):
        if number == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return UTF_16
        if number == 0 and line.startswith(codecs.BOM_UTF8):
            return UTF_8
        if not line.isascii():
            for name in (UTF_8, WINDOWS):
                with suppress(UnicodeDecodeError):
                    line.decode(name)
                    return name
            break
    return UTF_8


def decoded(lines: Iterable[bytes], where: str, encoding: str = UTF_8) -> Iterator[str]:
    """Lines of text without their byte order mark; RowError naming the first byte that is none, or a line
    with a null byte, as binary files have.
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
