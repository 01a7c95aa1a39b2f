"""Classifiers without an LLM: the majority class, logistic regression on TF-IDF or embeddings, and SetFit.

They use only the decoder's device. Encoders truncate texts to their own context length. Two of them are also
experts of an ensemble (`i2cl.core.experts`).
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from i2cl.core.context import require_two_classes
from i2cl.core.experts import EmbeddingsExpert, TextExpert, TfidfExpert
from i2cl.encoders import EmbeddingsConfig, EncoderConfig, embed, load_sentence_transformer
from i2cl.errors import I2CLError, require_packages
from i2cl.methods.base import Cost, LabelScores, Method
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, require_texts
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class ClassifierPredictor:
    """A fitted scikit-learn classifier.

    Attributes:
        features: computes the classifier's input from texts.
        model: the classifier; its classes are label indices.
        labels: number of labels of the task.
        cost: storage that the predictor needs.
    """

    features: Callable[[Sequence[str], Progress | None], Float[np.ndarray, "texts _"] | Sequence[str]]
    model: Any
    labels: int
    cost: Cost

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return log-probabilities; minus infinity for labels without a demonstration."""
        require_texts(texts)
        features = self.features(texts, progress)
        scores = torch.full((len(features), self.labels), -torch.inf)
        if len(features):
            log_probs = torch.from_numpy(self.model.predict_log_proba(features))
            scores[:, self.model.classes_.tolist()] = log_probs.float()
        return scores


def regression_cost(head: Any, *stored: Float[np.ndarray, " numbers"]) -> Cost:
    """Return the cost of a fitted logistic regression, and of arrays stored with it."""
    weights, intercept, *rest = map(torch.from_numpy, (head.coef_, head.intercept_, *stored))
    return Cost.of(weights, intercept, *rest, trained=weights.numel() + intercept.numel())


@dataclass(frozen=True)
class MajorityPredictor:
    """The same log-probabilities for every text."""

    log_frequencies: Float[Tensor, " labels"]
    cost: Cost

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the log-frequency of each label; minus infinity for labels without a row."""
        require_texts(texts)
        if progress is not None:
            progress(len(texts))
        return self.log_frequencies.expand(len(texts), -1)


class MajorityClass(Method):
    """Predicts the label with the most training rows; ties go to the first label.

    Equivalent to scikit-learn's ``DummyClassifier(strategy="prior")``, fitted to all training rows, since
    demonstrations are balanced.
    """

    name = "majority_class"
    summary = "the most frequent label of the training rows, for every text"
    needs = "training rows"
    is_stochastic = False

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> MajorityPredictor:
        """Count the labels of the training rows, or of the demonstrations if the task has no rows."""
        rows = task.train or demonstrations
        counts = torch.bincount(torch.tensor([row.label for row in rows]), minlength=len(task.labels))
        return MajorityPredictor((counts / counts.sum()).log(), Cost())


class TfidfConfig(Settings):
    """Features are n-grams of up to ``tfidf_words`` words; ``tfidf_c`` is scikit-learn's ``C``."""

    tfidf_words: int = Field(2, ge=1)
    tfidf_c: float = Field(10.0, gt=0)


@dataclass(frozen=True)
class Tfidf(Method):
    """Logistic regression on TF-IDF features of words and word pairs.

    Source: https://scikit-learn.org/stable/modules/feature_extraction.html#text-feature-extraction.
    """

    name = "tfidf"
    summary = "logistic regression on TF-IDF features, without the model"
    needs = "demonstrations"
    settings = (TfidfConfig,)
    config: TfidfConfig = field(default_factory=TfidfConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Fit the vectorizer and the classifier.

        Raises:
            I2CLError: with fewer than two classes, on an empty text, or if no demonstration contains a word.
        """
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
        cost = regression_cost(model[-1], vectorizer.idf_)
        return ClassifierPredictor(lambda texts, _: texts, model, len(task.labels), cost)


@dataclass(frozen=True)
class ExpertPredictor:
    """A fitted text expert on a device."""

    expert: TextExpert
    device: str

    @property
    def cost(self) -> Cost:
        """Stored tensors; the weights are trained."""
        return Cost.of(*self.expert.tensors().values(), trained=self.expert.weights.numel())

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return log-probabilities; minus infinity for labels without a demonstration."""
        return self.expert.scores(texts, self.device, progress).log_softmax(-1)


@dataclass(frozen=True)
class CharTfidf(Method):
    """Logistic regression on TF-IDF features of character n-grams, which need no word boundaries."""

    name = "char_tfidf"
    summary = "logistic regression on TF-IDF features of character n-grams, without the model"
    needs = "demonstrations"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ExpertPredictor:
        """Fit the classifier. Raises I2CLError with fewer than two classes, or on an empty text."""
        require_two_classes(self.name, task, demonstrations)
        return ExpertPredictor(TfidfExpert.fit(task, demonstrations), str(decoder.device))


@dataclass(frozen=True)
class SentenceEmbeddings(Method):
    """Logistic regression on unit-length embeddings of a frozen sentence encoder.

    Source: Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084, and their library, https://sbert.net.

    Attributes:
        config: encoder and classifier.
        progress: called as a fit embeds demonstrations.
    """

    name = "sentence_embeddings"
    summary = "logistic regression on sentence embeddings, without the model"
    needs = "demonstrations, sentence-transformers, a second model"
    settings = (EmbeddingsConfig,)
    config: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ExpertPredictor:
        """Embed the demonstrations and fit the classifier.

        Raises:
            I2CLError: if the extra is not installed, there are fewer than two classes, a text is empty, or
                the encoder cannot be loaded.
        """
        require_two_classes(self.name, task, demonstrations)
        device = str(decoder.device)
        expert = EmbeddingsExpert.fit(self.config, task, demonstrations, device, self.progress)
        return ExpertPredictor(expert, device)


@dataclass(frozen=True)
class SetFit(Method):
    """Fine-tunes a sentence encoder on pairs of demonstrations, then fits a classifier on its vectors.

    Uses the defaults of the library ``setfit``. Source: Tunstall et al. 2022,
    https://arxiv.org/abs/2209.11055; https://huggingface.co/docs/setfit.
    """

    name = "setfit"
    summary = "sentence encoder fine-tuned on pairs of demonstrations, without the model"
    needs = "demonstrations, the package setfit, a second model"
    settings = (EncoderConfig,)
    config: EncoderConfig = field(default_factory=EncoderConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> ClassifierPredictor:
        """Fine-tune the encoder and fit the classifier. Raises I2CLError as `SentenceEmbeddings.fit`."""
        require_packages(self.name, "embeddings", "setfit", "datasets", "accelerate")
        require_two_classes(self.name, task, demonstrations)
        require_texts([example.text for example in demonstrations])
        encoder = load_sentence_transformer(self.config.encoder, str(decoder.device))
        from sklearn.linear_model import LogisticRegression

        targets = [example.label for example in demonstrations]
        head = train_setfit(
            encoder, LogisticRegression(), [example.text for example in demonstrations], targets, seed
        )
        encoder.to(decoder.device).eval()
        weights = list(encoder.parameters())
        cost = Cost.of(*weights, trained=sum(weight.numel() for weight in weights)) + regression_cost(head)
        return ClassifierPredictor(partial(embed, encoder), head, len(task.labels), cost)


def train_setfit(
    encoder: Any,
    head: Any,
    texts: Sequence[str],
    targets: Sequence[int] | Sequence[Sequence[int]],
    seed: int,
    strategy: str | None = None,
) -> Any:
    """Fine-tune an encoder in place, and return a classifier fitted to its vectors.

    Args:
        encoder: a ``SentenceTransformer``.
        head: the scikit-learn classifier.
        texts: training texts.
        targets: the label index of each text, or a list of zeros and ones for a multi-label task.
        seed: of the pairs and of the training.
        strategy: setfit's ``multi_target_strategy``, for a multi-label task.
    """
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments, logging
    from transformers import PrinterCallback, ProgressCallback

    logging.set_verbosity_warning()  # importing setfit sets it to info
    # SetFitModel.from_pretrained would unpickle the classifier of a folder, which can run code.
    model = SetFitModel(model_body=encoder, model_head=head, multi_target_strategy=strategy)
    rows = Dataset.from_dict({"text": list(texts), "label": list(targets)})
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
