"""Errors over HTTP: a status, a code for programs, and a message with a hint for people."""

import errno
import os
import re

from i2cl.errors import I2CLError
from i2cl.models.encoding import TooLongError
from i2cl.storage.atomic import WriteError, system_cause

# A message up to its last colon, and the hint after it, which may quote text with colons.
HINT = re.compile(r".*?: ((?:(?<!\w)'[^']*'(?!\w)|(?!: ).)*+)", re.DOTALL)

# Command-line options named in a hint: over HTTP they are fields.
OPTION = re.compile(r"\(--(labels|shots|chat)\)")

# Longest message that is searched for quotations, which takes quadratic time; also the longest hint.
MAX_SEARCHED = 2000


class RefusalError(I2CLError):
    """Error of a request.

    Attributes:
        status: HTTP status.
        code: one word for programs.
        headers: headers of the response.
        rows: what is wrong with each invalid row, if known.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: dict[str, str] | None = None,
        rows: list[str] | None = None,
    ) -> None:
        super().__init__(OPTION.sub(r"(\1)", message))
        self.status, self.code = status, code
        self.headers, self.rows = headers or {}, rows

    @classmethod
    def of(cls, error: Exception) -> "RefusalError":
        """Convert any error. Of an unexpected one only the type is kept: its message may quote a text."""
        if isinstance(error, RefusalError):
            return error
        if isinstance(error, WriteError | OSError):
            return _storage_error(error)
        if isinstance(error, TooLongError):
            return cls(413, "text_too_long", str(error))
        if isinstance(error, I2CLError):
            return cls(422, "bad_input", str(error))
        return cls(500, "internal", f"the server failed with a {type(error).__name__}: please report it")

    def at(self, place: str) -> "RefusalError":
        """Return the same error with a place in a file in front of its message."""
        return RefusalError(self.status, self.code, f"{place}: {self}", headers=self.headers)

    def body(self) -> dict[str, object]:
        """Return the JSON of the response, in the shape that OpenAI's clients expect."""
        message = str(self)
        match = HINT.fullmatch(message) if len(message) <= MAX_SEARCHED else None
        hint = match[1] if match else message.rpartition(": ")[2][:MAX_SEARCHED]
        problem: dict[str, object] = {
            "message": message,
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "code": self.code,
            "cure": hint if hint != message else "see /openapi.json",
        }
        return {"error": problem if self.rows is None else problem | {"rows": self.rows}}


def stopping() -> RefusalError:
    """Return the error for new work during shutdown."""
    message = "the server is shutting down: retry in a few seconds"
    return RefusalError(503, "stopping", message, headers={"Retry-After": "5"})


def model_failed() -> RefusalError:
    """Return the error for all work after the model thread has died."""
    message = "the model thread has stopped after an internal error: retry once the server has been restarted"
    return RefusalError(503, "model_failed", message, headers={"Retry-After": "30"})


def deadline_passed() -> RefusalError:
    """Return the error for a request that did not start in time."""
    message = "the deadline of the request has passed before it started: retry later"
    return RefusalError(504, "deadline", message)


def busy(status: int, why: str, seconds: int = 5) -> RefusalError:
    """Return the error for a lack of room that is expected to pass."""
    headers = {"Retry-After": str(seconds)}
    return RefusalError(status, "busy", f"{why}: retry in {seconds} s", headers=headers)


def _storage_error(error: Exception) -> RefusalError:
    """Convert an error of the disk or the database, without paths."""
    if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
        return RefusalError(507, "disk_full", "the server's disk is full: retry when it has room")
    cause = error.__context__ if isinstance(error, WriteError) else error
    words = system_cause(cause) if isinstance(cause, Exception) else None
    reason = words or type(error).__name__
    return RefusalError(500, "disk", f"storage error on the server ({reason}): contact its operator")
