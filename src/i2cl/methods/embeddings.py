"""Baselines without an LLM: logistic regression on TF-IDF or sentence embeddings, and SetFit.

They use only the decoder's device. Encoders truncate texts to their own context length.
"""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from i2cl.encoders import (
    EmbeddingsConfig,
    EncoderConfig,
    embed,
    frozen_encoder,
    load_encoder,
    regression,
)
from i2cl.errors import I2CLError, needs
from i2cl.methods.base import ClassifierPredictor, Cost, Method, head_cost, require_two_classes
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import require_texts
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task


class TfidfConfig(Settings):
    """Features are n-grams of up to ``tfidf_words`` words; ``tfidf_c`` is scikit-learn's ``C``."""

    tfidf_words: int = Field(2, ge=1)
    tfidf_c: float = Field(10.0, gt=0)


@dataclass(frozen=True)
class Tfidf(Method):
    """Logistic regression on TF-IDF features of words and word pairs.

    Source: https://scikit-learn.org/stable/modules/feature_extraction.html#text-feature-extraction.
    """

    name: ClassVar[str] = "tfidf"
    summary: ClassVar[str] = "logistic regression on TF-IDF features, without the model"
    needs: ClassVar[str] = "demonstrations, scikit-learn"
    formula: ClassVar[str] = "(words+1) per label"
    settings = (TfidfConfig,)
    config: TfidfConfig = field(default_factory=TfidfConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Fit the vectorizer and the classifier.

        Raises:
            I2CLError: if scikit-learn is not installed, there are fewer than two classes, a text is empty, or
                no demonstration contains a word.
        """
        needs(self.name, "sklearn", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        texts = [example.text for example in demonstrations]
        require_texts(texts)
        ngrams = (1, self.config.tfidf_words)
        vectorizer = TfidfVectorizer(ngram_range=ngrams, sublinear_tf=True, token_pattern=r"\w+")  # noqa: S106
        model = make_pipeline(vectorizer, LogisticRegression(C=self.config.tfidf_c, max_iter=10_000))
        if not any(map(vectorizer.build_analyzer(), texts)):
            raise I2CLError("no demonstration contains a word for tfidf: use a method that runs the model")
        model.fit(texts, [example.label for example in demonstrations])
        cost = head_cost(model[-1], vectorizer.idf_)
        return ClassifierPredictor(lambda texts, _: texts, model, len(task.labels), cost)


@dataclass(frozen=True)
class SentenceEmbeddings(Method):
    """Logistic regression on unit-length vectors of a frozen sentence encoder.

    Source: Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084, and their library, https://sbert.net.
    """

    name: ClassVar[str] = "sentence_embeddings"
    summary: ClassVar[str] = "logistic regression on sentence embeddings, without the model"
    needs: ClassVar[str] = "demonstrations, sentence-transformers, a second model"
    formula: ClassVar[str] = "(d+1) per label"
    settings = (EmbeddingsConfig,)
    config: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Embed the demonstrations and fit the classifier.

        Raises:
            I2CLError: if the extra is not installed, there are fewer than two classes, a text is empty, or
                the encoder cannot be loaded.
        """
        require_two_classes(self.name, task, demonstrations)
        head = regression(self.config, demonstrations, str(decoder.device))
        encoder = frozen_encoder(self.config.encoder, str(decoder.device))
        return ClassifierPredictor(partial(embed, encoder), head, len(task.labels), head_cost(head))


@dataclass(frozen=True)
class SetFit(Method):
    """Fine-tunes a sentence encoder on pairs of demonstrations, then fits a classifier on its vectors.

    Uses the defaults of the library ``setfit``. Source: Tunstall et al. 2022,
    https://arxiv.org/abs/2209.11055; https://huggingface.co/docs/setfit.
    """

    name: ClassVar[str] = "setfit"
    summary: ClassVar[str] = "sentence encoder fine-tuned on pairs of demonstrations, without the model"
    needs: ClassVar[str] = "demonstrations, the package setfit, a second model"
    formula: ClassVar[str] = "the encoder, (d+1) per label"
    settings = (EncoderConfig,)
    config: EncoderConfig = field(default_factory=EncoderConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Fine-tune the encoder and fit the classifier. Raises I2CLError as `SentenceEmbeddings.fit`."""
        needs(self.name, "embeddings", "setfit", "datasets", "accelerate", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        require_texts([example.text for example in demonstrations])
        encoder = load_encoder(self.config.encoder, str(decoder.device))
        head = _train(encoder, demonstrations, seed)
        encoder.to(decoder.device).eval()
        weights = list(encoder.parameters())
        cost = Cost.of(*weights, trained=sum(weight.numel() for weight in weights)) + head_cost(head)
        return ClassifierPredictor(partial(embed, encoder), head, len(task.labels), cost)


def _train(encoder: Any, demonstrations: Examples, seed: int) -> Any:
    """Fine-tune an encoder in place, and return a classifier fitted to its vectors."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments, logging
    from sklearn.linear_model import LogisticRegression
    from transformers import PrinterCallback, ProgressCallback

    logging.set_verbosity_warning()  # importing setfit sets it to info
    # SetFitModel.from_pretrained would unpickle the classifier of a folder, which can run code.
    model = SetFitModel(model_body=encoder, model_head=LogisticRegression())
    rows = Dataset.from_list([{"text": one.text, "label": one.label} for one in demonstrations])
    with _restore_random_state(), _hide_progress_bars(), tempfile.TemporaryDirectory() as folder:
        quiet = {"show_progress_bar": False, "report_to": "none", "logging_strategy": "no"}
        arguments = TrainingArguments(output_dir=folder, save_strategy="no", seed=seed, **quiet)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.st_trainer.args.dataloader_pin_memory = torch.cuda.is_available()  # warns without CUDA
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
    return model.model_head


@contextmanager
def _restore_random_state() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and torch, which setfit seeds."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - setfit seeds the global state
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Disable the progress bars of the library ``datasets`` while the block runs."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    enabled = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if enabled:
            enable_progress_bars()
