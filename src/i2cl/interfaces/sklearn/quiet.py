"""Silence progress bars and deprecation warnings of other libraries, for notebooks."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

from transformers.utils import logging

F = TypeVar("F", bound=Callable[..., Any])

_LOCK = Lock()
_ACTIVE: list[ExitStack] = []  # one per running call; closing the first, which is popped last, restores all


def quiet_unless_verbose(method: F) -> F:
    """Decorate a method of an estimator: without ``verbose``, it runs in `quiet_libraries`."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.verbose:
            return method(self, *args, **kwargs)
        with quiet_libraries():
            return method(self, *args, **kwargs)

    return cast("F", run)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide transformers' progress bars and all FutureWarnings while the block runs.

    These settings are global, so concurrent calls share them: the first one changes them, the last one
    restores them.
    """
    with _LOCK:
        settings = ExitStack()
        if not _ACTIVE:
            settings.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", category=FutureWarning)
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                settings.callback(logging.enable_progress_bar)
        _ACTIVE.append(settings)
    try:
        yield
    finally:
        with _LOCK:
            _ACTIVE.pop().close()
