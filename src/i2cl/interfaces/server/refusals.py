"""What the server refuses: a status, a word for programs, a sentence and its cure for people."""

import errno
import os
import re

from i2cl.errors import I2CLError
from i2cl.models.encoding import TooLongError
from i2cl.storage.atomic import WriteError, system_cause

# A message up to its last colon, and the cure behind it, whose quotations may have colons of their own.
CURE = re.compile(r".*?: ((?:(?<!\w)'[^']*'(?!\w)|(?!: ).)*+)", re.DOTALL)

# Options of the command line that a cure names: over HTTP they are fields.
OPTION = re.compile(r"\(--(labels|shots|chat)\)")

# Characters of a message beyond which quotations are not looked for, which takes time by their square.
LONG = 2000


class RefusalError(I2CLError):
    """A request that is not done, and why: a ``status`` of HTTP, a ``code`` of one word for programs,
    ``headers`` of the answer, and what is wrong with ``rows``, one by one, where that is known.
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
        """An error as a refusal: of an unexpected one the kind alone, as its words may hold a user's text."""
        if isinstance(error, RefusalError):
            return error
        if isinstance(error, WriteError | OSError):
            return _fault(error)
        if isinstance(error, TooLongError):
            return cls(413, "text_too_long", str(error))
        if isinstance(error, I2CLError):
            return cls(422, "bad_input", str(error))
        return cls(500, "internal", f"the server failed with a {type(error).__name__}: please report it")

    def at(self, place: str) -> "RefusalError":
        """The same of some place in a file."""
        return RefusalError(self.status, self.code, f"{place}: {self}", headers=self.headers)

    def body(self) -> dict[str, object]:
        """As OpenAI's clients and people read it."""
        message = str(self)
        quoted = CURE.fullmatch(message) if len(message) <= LONG else None
        cure = quoted[1] if quoted else message.rpartition(": ")[2][:LONG]
        problem: dict[str, object] = {
            "message": message,
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "code": self.code,
            "cure": cure if cure != message else "see /openapi.json",
        }
        return {"error": problem if self.rows is None else problem | {"rows": self.rows}}


def stopping() -> RefusalError:
    """No new work is taken."""
    message = "this server stops and takes nothing new: send it again"
    return RefusalError(503, "stopping", message, headers={"Retry-After": "5"})


def busy(status: int, why: str, seconds: int = 5) -> RefusalError:
    """There is no room now, and may be soon."""
    headers = {"Retry-After": str(seconds)}
    return RefusalError(status, "busy", f"{why}: send it again in {seconds} s", headers=headers)


def _fault(error: Exception) -> RefusalError:
    """The server's disk refuses: the system's words without the path, which is nobody's business."""
    if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
        return RefusalError(507, "disk_full", "the server's disk is full: send it again when it has room")
    cause = error.__context__ if isinstance(error, WriteError) else error
    words = system_cause(cause) if isinstance(cause, Exception) else None
    return RefusalError(500, "disk", f"the server's disk refuses ({words or 'unknown'}): tell its operator")
