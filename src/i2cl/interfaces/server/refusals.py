"""Errors over HTTP: a status, a code for programs, and a message with a hint for people."""

import errno
import os
import re
import sqlite3

from i2cl.errors import I2CLError
from i2cl.models.encoding import TooLongError
from i2cl.storage.atomic import WriteError, system_cause

# Command-line options that messages of the library mention; requests have fields of the same names instead.
OPTION = re.compile(r" \(--[a-z-]+\)")

DISK_FULL = {os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)}


class RefusalError(I2CLError):
    """Error of a request. Its text is ``message: hint``.

    Attributes:
        status: HTTP status.
        code: one word for programs.
        message: what is wrong.
        hint: what to do about it; None if the message says so, as some messages of the library do.
        param: the field of the request that is wrong, if known.
        headers: headers of the response.
        rows: what is wrong with each invalid row, if known.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        rows: list[str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status, self.code, self.param = status, code, param
        self.headers, self.rows = headers or {}, rows

    @classmethod
    def of(cls, error: Exception) -> "RefusalError":
        """Convert any error. Of an unexpected one only the type is kept: its message may quote a text."""
        if isinstance(error, RefusalError):
            return error
        if isinstance(error, WriteError | OSError | sqlite3.Error):
            return _storage_error(error)
        if isinstance(error, TooLongError):
            return cls(413, "text_too_long", error.message, error.hint)
        if isinstance(error, I2CLError):
            hint = None if error.hint is None else OPTION.sub("", error.hint)
            return cls(422, "bad_input", OPTION.sub("", error.message), hint)
        return cls(500, "internal", f"the server failed with a {type(error).__name__}", "please report it")

    def at(self, place: str) -> "RefusalError":
        """Return the same error with a place in a file in front of its message."""
        message = f"{place}: {self.message}"
        return RefusalError(self.status, self.code, message, self.hint, headers=self.headers)

    def body(self) -> dict[str, object]:
        """Return the JSON of the response, in the shape that OpenAI's clients expect."""
        problem: dict[str, object] = {
            "message": str(self),
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.param,
            "code": self.code,
            "hint": self.hint,
        }
        return {"error": problem if self.rows is None else problem | {"rows": self.rows}}


def stopping() -> RefusalError:
    """Return the error for new work during shutdown."""
    headers = {"Retry-After": "5"}
    return RefusalError(
        503, "stopping", "the server is shutting down", "retry in a few seconds", headers=headers
    )


def model_failed() -> RefusalError:
    """Return the error for all work after the model thread has died."""
    message = "the model thread has stopped after an internal error"
    hint = "retry once the server has been restarted"
    return RefusalError(503, "model_failed", message, hint, headers={"Retry-After": "30"})


def deadline_passed() -> RefusalError:
    """Return the error for a request that did not start in time."""
    message = "the deadline of the request has passed before it started"
    return RefusalError(504, "deadline", message, "retry later")


def busy(status: int, why: str, seconds: int = 5) -> RefusalError:
    """Return the error for a limit that is reached now, and probably no longer in ``seconds`` seconds."""
    headers = {"Retry-After": str(seconds)}
    return RefusalError(status, "busy", why, f"retry in {seconds} s", headers=headers)


def _storage_error(error: Exception) -> RefusalError:
    """Convert an error of the disk or the database, without paths."""
    cause = error.__context__ if isinstance(error, WriteError) else error
    reason = system_cause(cause) if isinstance(cause, Exception) else None
    if reason in DISK_FULL or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return RefusalError(507, "disk_full", "the server's disk is full", "retry when it has room")
    message = f"storage error on the server ({reason or type(error).__name__})"
    return RefusalError(500, "disk", message, "contact its operator")
