"""The one exception a user is meant to read, and the sentences that many modules say with it."""

import difflib
import re
from collections.abc import Iterable
from importlib.util import find_spec

_PACKAGES = {
    "llama_cpp": "llama-cpp-python",
    "prometheus_client": "prometheus-client",
    "sentence_transformers": "sentence-transformers",
    "sklearn": "scikit-learn",
}
"""What a package is called where it is not called as it is imported."""

_LONGEST_VALUE = 60
OUT_OF_MEMORY = "out of memory: take a smaller model, --dtype bfloat16, or fewer or shorter texts"

_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU and MPS
    "can't allocate memory",  # the CPU's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which no UTF-8 can hold. Python puts some into file names that are not UTF-8."""


class I2CLError(ValueError):
    """Bad input or an impossible request, in one line that names the cure.

    The command line prints the message without a traceback and exits with code 2.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that an accelerator or the CPU ran out of memory.

    Most backends raise a plain RuntimeError, so its message decides. Where accelerate is installed, its
    ``should_reduce_batch_size`` is asked too, which knows further devices. Does not import torch.
    """
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


def require_whole(text: str, what: str) -> None:
    """Go on only if a text can be written as UTF-8; else raise I2CLError naming ``what`` it is."""
    if HALF_PAIR.search(text):
        raise I2CLError(
            f"{what} {text!a} holds half a surrogate pair or is not UTF-8: rename it or correct it"
        )


def needs(what: str, extra: str, *modules: str, instead: str = "") -> None:
    """Go on only if the packages of an extra are installed, which ``what`` takes, such as "a GGUF file".
    Raises I2CLError naming those that are lacking, the command that installs them and another way out, such
    as "give a folder". Modules are named as they are imported.
    """
    # A mere folder of that name has no origin.
    absent = (name for name in modules if getattr(find_spec(name), "origin", None) is None)
    if lacking := [_PACKAGES.get(name, name) for name in absent]:
        packages = ("package " if len(lacking) == 1 else "packages ") + " and ".join(lacking)
        other = f", or {instead}" if instead else ""
        raise I2CLError(f"{what} needs the {packages}: pip install 'i2cl[{extra}]'{other}")


def first_problem(error: Exception) -> str:
    """The first thing that pydantic found, as ``place: what is wrong``; any other error's own words.

    A short value is shown with its place: ``extraction.shots='many': Input should be ...``.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False)[0]
    place = ".".join(map(str, problem["loc"]))
    value = repr(problem["input"])
    if isinstance(problem["input"], str | int | float) and len(value) <= _LONGEST_VALUE:
        place += f"={value}" if place else ""
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def first_line(error: BaseException) -> str:
    """The first line of another library's error, without a colon at its end; its kind if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":") if lines else type(error).__name__


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """The closest known names in any case, as ``did you mean 'a' or 'b'? ``; nothing if none is close."""
    folded = {one.casefold(): one for one in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=most)
    return f"did you mean {' or '.join(repr(folded[one]) for one in close)}? " if close else ""
