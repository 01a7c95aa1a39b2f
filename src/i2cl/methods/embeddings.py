"""What a user would do without any LLM: logistic regression on TF-IDF or sentence embeddings, and SetFit.

None asks the decoder; encoders run where it does. An encoder cuts a text that exceeds its own context.
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

from i2cl.core.encoder_bias import (
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
        require_two_classes(self.name, task, demonstrations)
        head = regression(self.config, demonstrations, str(decoder.device))
        encoder = frozen_encoder(self.config.encoder, str(decoder.device))
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
