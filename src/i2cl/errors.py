"""`I2CLError`, and helpers that several packages use to write its messages."""

import difflib
import re
from collections.abc import Iterable
from importlib.util import find_spec

# Names on PyPI that differ from the name of the module.
_DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "sentence_transformers": "sentence-transformers",
    "sklearn": "scikit-learn",
}

_MAX_VALUE_CHARACTERS = 60
OUT_OF_MEMORY = "out of memory: take a smaller model, --dtype bfloat16, or fewer or shorter texts"

_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU and MPS
    "can't allocate memory",  # the CPU's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

# Half of a UTF-16 surrogate pair, which UTF-8 cannot encode. Python uses them to represent file names that
# are not UTF-8.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class I2CLError(ValueError):
    """Raised for bad input or an unsupported request.

    The message is one line: what is wrong, then what to do. The command line prints it without a traceback
    and exits with code 2.

    Args:
        message: what is wrong, possibly followed by what to do.
        hint: what to do, which ends the text of the error after a colon. Programs that show errors can show
            it separately.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}: {hint}")
        self.message, self.hint = message, hint


class MemoryLimitError(I2CLError):
    """A single query, or a step that cannot be split, does not fit into memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that an accelerator or the CPU ran out of memory.

    Most backends raise a plain RuntimeError, so this checks the message. If accelerate is installed, also
    calls its ``should_reduce_batch_size``, which covers more devices. Does not import torch.
    """
    if isinstance(error, MemoryLimitError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ == "OutOfMemoryError" or any(
        part in str(error) for part in _OUT_OF_MEMORY_MESSAGES
    ):
        return True
    if find_spec("accelerate") is None:
        return False
    from accelerate.utils.memory import should_reduce_batch_size

    return bool(should_reduce_batch_size(error))


def failure_reason(error: Exception) -> str | None:
    """Return why some work failed, in one line, if other work can go on; None for an error of the code."""
    if isinstance(error, I2CLError):
        return str(error)
    return OUT_OF_MEMORY if is_out_of_memory(error) else None


def require_utf8(text: str, name: str) -> None:
    """Raise I2CLError if a text cannot be encoded as UTF-8. ``name`` describes the text in the message."""
    if LONE_SURROGATE.search(text):
        raise I2CLError(f"{name} {text!a} contains a lone surrogate or is not UTF-8: rename it or correct it")


def require_type(name: str, value: object, kind: type, hint: str) -> None:
    """Raise I2CLError if an argument is not an instance of ``kind``; ``hint`` says what to pass."""
    if not isinstance(value, kind):
        raise I2CLError(f"{name} must be of type {kind.__name__}, not {type(value).__name__}: {hint}")


def require_packages(what: str, extra: str, *modules: str, instead: str = "") -> None:
    """Raise I2CLError, with the command that installs them, if packages of an optional extra are missing.

    Args:
        what: the feature that needs the packages, such as "a GGUF file".
        extra: name of the extra in pyproject.toml.
        modules: the modules to look for; none of them is imported.
        instead: an alternative to installing them, such as "give a folder".
    """
    # A folder of that name in the working directory also has a spec, but no origin.
    missing = [
        _DISTRIBUTIONS.get(name, name) for name in modules if getattr(find_spec(name), "origin", None) is None
    ]
    if missing:
        packages = ("package " if len(missing) == 1 else "packages ") + " and ".join(missing)
        alternative = f", or {instead}" if instead else ""
        raise I2CLError(f"{what} needs the {packages}: pip install 'i2cl[{extra}]'{alternative}")


def first_problem(error: Exception) -> str:
    """Return the first error of a pydantic ValidationError as ``field: message``, or ``str(error)``.

    Short values are included: ``extraction.shots='many': Input should be ...``.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False)[0]
    field = ".".join(map(str, problem["loc"]))
    value = repr(problem["input"])
    if isinstance(problem["input"], str | int | float) and len(value) <= _MAX_VALUE_CHARACTERS:
        field += f"={value}" if field else ""
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown field, remove it or correct its name"
    return f"{field}: {message}" if field else message


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a final colon, or its type if it is empty."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":") if lines else type(error).__name__


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ``did you mean 'a' or 'b'? `` with the closest names, ignoring case; "" if none is close."""
    by_folded_name = {candidate.casefold(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.casefold(), by_folded_name, n=limit)
    return (
        f"did you mean {' or '.join(repr(by_folded_name[match]) for match in matches)}? " if matches else ""
    )
