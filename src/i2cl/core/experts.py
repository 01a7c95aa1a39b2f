"""Experts: small classifiers whose label probabilities are pooled with the LLM's.

Beyond the paper. Text experts see the text alone; `StatesExpert` sees hidden states of the LLM. The LLM and
the experts of an `i2cl.core.injection.LabelHead` are combined by a log-linear pool,

    log p(label) = sum over members of weight * log p_member(label), normalized,

which is a product of experts with fitted exponents (Genest and Zidek 1986,
https://doi.org/10.1214/ss/1177013825). In a multi-label task every label is a classification with two
answers, so the weights multiply log-odds. `i2cl.injections.ensemble` fits the weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from i2cl.core.multi_label import indicators
from i2cl.core.ngrams import HASH_BUCKETS, count_ngrams
from i2cl.encoders import (
    MIN_PROBE_COSINE,
    EmbeddingsConfig,
    absolute,
    embed,
    frozen_encoder,
    probe,
)
from i2cl.errors import I2CLError, require_packages
from i2cl.models.scoring import Progress, require_texts
from i2cl.tasks import Examples, Task

LLM = "llm"  # name of the LLM among the members of an ensemble
TFIDF_C = 10.0  # scikit-learn's C
STATES_C = 0.1


@dataclass(frozen=True, eq=False)
class Expert(ABC):
    """Logistic regression on features of a query; in a multi-label task, one per label.

    Attributes:
        weights: log-odds of each label per feature; the last column is the intercept.
        fit_seconds: duration of the fit; 0 if the expert was loaded.
        name: name of the member.
        tensor_names: names of its tensors in an artefact.
    """

    weights: Float[Tensor, "labels inputs"]
    fit_seconds: float = field(default=0.0, kw_only=True)

    name: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return all stored tensors, by `tensor_names`."""


class TextExpert(Expert):
    """An expert on features of the text alone."""

    @abstractmethod
    def scores(
        self, texts: Sequence[str], device: str, progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Compute the score of each label, in float32.

        In a multi-label task, scores are log-odds; else log-probabilities, up to a constant per text.
        ``progress`` is called as texts finish. Raises I2CLError on an empty text, or if a package or the
        encoder of the fit is missing.
        """


@dataclass(frozen=True, eq=False)
class StatesExpert(Expert):
    """Logistic regression on a hidden state of the edited LLM, from the pass that scores the labels.

    The state is the query's mean where it enters a block (`i2cl.models.edits.RecordMean`), standardized.

    Attributes:
        layer: index of the block.
    """

    layer: int

    name = "states"
    tensor_names = ("states_weights",)

    @classmethod
    def fit(
        cls, states: Float[Tensor, "texts d"], layer: int, task: Task, demonstrations: Examples
    ) -> "StatesExpert":
        """Fit the classifier to the states of the demonstrations, with their weights."""
        deviation, mean = torch.std_mean(states.double(), 0, correction=0)
        deviation = deviation.where(deviation > 0, 1.0)
        standardized = ((states - mean) / deviation).numpy()
        *slopes, intercepts = fit_regression(standardized, task, demonstrations, STATES_C).double().T
        factors = torch.stack(slopes) / deviation[:, None]
        return cls(torch.cat([factors.T, (intercepts - mean @ factors)[:, None]], 1).float(), layer)

    def scores(self, states: Float[Tensor, "*texts d"]) -> Float[Tensor, "*texts labels"]:
        """Compute the score of each label: log-probabilities up to a constant per text."""
        return regression_scores(self.weights, states)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights."""
        return dict(zip(self.tensor_names, (self.weights,), strict=True))


@dataclass(frozen=True, eq=False)
class EmbeddingsExpert(TextExpert):
    """Logistic regression on unit-length embeddings of a frozen sentence encoder.

    Source: Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084, and their library, https://sbert.net.

    Attributes:
        encoder: ``minilm``, a folder of sentence-transformers, or a hub id.
        probe: embedding of `i2cl.encoders.PROBE` at the fit.
    """

    encoder: str
    probe: Float[Tensor, " d"]

    name = "embeddings"
    tensor_names = ("embeddings_weights", "embeddings_probe")

    def __post_init__(self) -> None:
        weights, embedding = self.weights.float(), self.probe.float()
        shapes_fit = (weights.ndim, embedding.ndim) == (2, 1) and weights.shape[1] == len(embedding) + 1
        if not shapes_fit or not 0.99 < float(embedding.norm()) < 1.01:
            raise I2CLError("the stored sentence-encoder weights are damaged: copy or fit it again")
        vars(self).update(weights=weights, probe=embedding)  # the dataclass is frozen

    @classmethod
    def fit(
        cls,
        config: EmbeddingsConfig,
        task: Task,
        demonstrations: Examples,
        device: str,
        progress: Progress | None = None,
    ) -> Self:
        """Embed the demonstrations and fit the classifier, with the demonstrations' weights.

        ``progress`` is called as texts are embedded. Raises I2CLError if the extra or the encoder is missing,
        or a text is empty.
        """
        require_packages("a sentence encoder", "embeddings", "sentence_transformers")
        texts = [example.text for example in demonstrations]
        vectors = embed(frozen_encoder(config.encoder, device), texts, progress)
        weights = fit_regression(vectors, task, demonstrations, config.embeddings_c)
        return cls(weights, absolute(config.encoder), probe(config.encoder, device))

    def is_of(self, encoder: str, device: str) -> bool:
        """Return whether an encoder yields the embeddings of the fit. Raises I2CLError if it is missing."""
        embedding = probe(encoder, device)
        return embedding.shape == self.probe.shape and float(embedding @ self.probe) >= MIN_PROBE_COSINE

    def require_encoder(self, device: str) -> None:
        """Load the encoder. Raises I2CLError if it is missing, or is not the encoder of the fit."""
        require_packages("this injection's sentence encoder", "embeddings", "sentence_transformers")
        try:
            is_same = self.is_of(self.encoder, device)
        except I2CLError as error:
            raise I2CLError(f"{error} (or give its new location with --encoder or encoder=)") from None
        if not is_same:
            hint = "give the encoder of the fit with --encoder or encoder=, or fit it again"
            raise I2CLError(f"the encoder {self.encoder!r} yields other embeddings than at the fit: {hint}")

    def scores(
        self, texts: Sequence[str], device: str, progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Compute the score of each label; see `TextExpert.scores`."""
        self.require_encoder(device)
        if not texts:
            return self.weights.new_empty(0, len(self.weights))
        vectors = torch.from_numpy(embed(frozen_encoder(self.encoder, device), texts, progress))
        return regression_scores(self.weights, vectors)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and the probe."""
        return dict(zip(self.tensor_names, (self.weights, self.probe), strict=True))


@dataclass(frozen=True, eq=False)
class TfidfExpert(TextExpert):
    """Logistic regression on TF-IDF features of character n-grams.

    Equals scikit-learn's ``TfidfVectorizer(analyzer="char_wb", sublinear_tf=True)`` up to hash collisions.

    Attributes:
        buckets: hashes of the n-grams of the demonstrations, ascending.
        idf: inverse document frequency of each bucket.
    """

    buckets: Int[Tensor, " buckets"]
    idf: Float[Tensor, " buckets"]

    name = "tfidf"
    tensor_names = ("tfidf_weights", "tfidf_buckets", "tfidf_idf")

    def __post_init__(self) -> None:
        buckets = self.buckets
        ascending = bool((buckets[1:] > buckets[:-1]).all()) and not (buckets < 0).any()
        if not (ascending and len(buckets) == len(self.idf) == self.weights.shape[1] - 1):
            raise I2CLError("the stored TF-IDF weights are damaged: copy or fit it again")

    @classmethod
    def fit(cls, task: Task, demonstrations: Examples) -> Self:
        """Count the n-grams and fit the classifier, with the demonstrations' weights.

        Raises I2CLError on an empty text.
        """
        from scipy.sparse import csr_matrix
        from sklearn.feature_extraction.text import TfidfTransformer

        texts = [example.text for example in demonstrations]
        require_texts(texts)
        indices, data = zip(*count_ngrams(texts), strict=True)
        ends = np.cumsum([0, *map(len, indices)])
        shape = (len(texts), HASH_BUCKETS)
        counts = csr_matrix((np.concatenate(data), np.concatenate(indices), ends), shape)
        buckets = np.unique(counts.indices)
        tfidf = TfidfTransformer(sublinear_tf=True)
        features = tfidf.fit_transform(counts[:, buckets])
        weights = fit_regression(features, task, demonstrations, TFIDF_C)
        return cls(weights, torch.from_numpy(buckets.astype(np.int32)), torch.tensor(tfidf.idf_).float())

    def scores(
        self,
        texts: Sequence[str],
        device: str = "cpu",  # noqa: ARG002 - always the CPU
        progress: Progress | None = None,
    ) -> Float[Tensor, "texts labels"]:
        """Compute the score of each label; see `TextExpert.scores`."""
        require_texts(texts)
        known, idf, weights = self.buckets.numpy(), self.idf.numpy(), self.weights[:, :-1].double().numpy()
        scores = np.empty((len(texts), len(weights)))
        for row, (buckets, counts) in enumerate(count_ngrams(texts)):
            _, in_text, columns = np.intersect1d(buckets, known, assume_unique=True, return_indices=True)
            features = (1 + np.log(counts[in_text])) * idf[columns]
            norm = np.linalg.norm(features) or 1.0  # 0 if no n-gram is known
            scores[row] = weights[:, columns] @ (features / norm) + self.weights[:, -1].numpy()
        if progress is not None:
            progress(len(texts))
        return torch.from_numpy(scores).float()

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, hashes and document frequencies."""
        return dict(zip(self.tensor_names, (self.weights, self.buckets, self.idf), strict=True))


EXPERTS: dict[str, type[Expert]] = {
    expert.name: expert for expert in (StatesExpert, EmbeddingsExpert, TfidfExpert)
}


def stored_experts(
    weights: Mapping[str, float],
    encoder: str | None,
    states_layer: int | None,
    tensors: Mapping[str, Tensor],
) -> tuple[Expert, ...]:
    """Return the experts of a stored ensemble, besides the LLM.

    Args:
        weights: weights by name of the member.
        encoder: sentence encoder of the member ``"embeddings"``.
        states_layer: layer of the member ``"states"``.
        tensors: the experts' tensors by name.

    Raises:
        KeyError: if a tensor is missing.
        I2CLError: if an expert is unknown or damaged.
    """
    experts: list[Expert] = []
    for name in [name for name in weights if name != LLM]:
        if name == EmbeddingsExpert.name and encoder:
            regression, probe = (tensors[tensor] for tensor in EmbeddingsExpert.tensor_names)
            experts.append(EmbeddingsExpert(regression, encoder, probe))
        elif name == StatesExpert.name and states_layer is not None:
            experts.append(StatesExpert(tensors[StatesExpert.tensor_names[0]], states_layer))
        elif name == TfidfExpert.name:
            experts.append(TfidfExpert(*(tensors[tensor] for tensor in TfidfExpert.tensor_names)))
        else:
            raise I2CLError(f"unknown expert {name!r} in an ensemble: upgrade i2cl, or fit it again")
    return tuple(experts)


def pool(
    scores: Float[Tensor, "*queries members labels"], weights: Sequence[float]
) -> Float[Tensor, "*queries labels"]:
    """Return the weighted sum of the members' scores, in float64: the scores of a log-linear pool."""
    return (torch.tensor(weights, dtype=torch.float64)[:, None] * scores.double()).sum(-2)


def fit_regression(
    features: Any, task: Task, demonstrations: Examples, c: float
) -> Float[Tensor, "labels inputs"]:
    """Fit scikit-learn's logistic regression, and return weights with the intercept as last column.

    In a multi-label task there is one regression per label (one-vs-rest), with balanced class weights: only
    the LLM learns the frequency of a label, since a sum of log-odds would count it once per member.
    """
    from sklearn.linear_model import LogisticRegression

    sample_weights = [example.weight for example in demonstrations]
    if task.multi_label:
        gold = indicators(demonstrations, len(task.labels))
        rows = [_fit_label(features, has_label, sample_weights, c) for has_label in gold.T]
        return torch.from_numpy(np.stack(rows)).float()
    labels = [example.label for example in demonstrations]
    model = LogisticRegression(C=c, max_iter=10_000).fit(features, labels, sample_weight=sample_weights)
    fitted = torch.from_numpy(np.column_stack([model.coef_, model.intercept_])).float()
    if len(fitted) == 1:  # with two classes, scikit-learn has one row of log-odds
        fitted = torch.cat([-fitted / 2, fitted / 2])
    weights = torch.zeros(len(task.labels), fitted.shape[1])
    weights[:, -1] = -torch.inf  # labels without a demonstration
    weights[model.classes_.tolist()] = fitted
    return weights


def _fit_label(
    features: Any, gold: Bool[np.ndarray, " texts"], sample_weights: Sequence[float], c: float
) -> Float[np.ndarray, " inputs"]:
    """Fit the regression of one label of a multi-label task; zeros if every text or no text has the label."""
    from sklearn.linear_model import LogisticRegression

    if gold.all() or not gold.any():
        return np.zeros(features.shape[1] + 1)
    model = LogisticRegression(C=c, class_weight="balanced", max_iter=10_000)
    model.fit(features, gold, sample_weight=sample_weights)
    return np.append(model.coef_[0], model.intercept_)


def regression_scores(
    weights: Float[Tensor, "labels inputs"], features: Float[Tensor, "*texts features"]
) -> Float[Tensor, "*texts labels"]:
    """Return the label scores of a logistic regression, whose intercept is the last column."""
    return features @ weights[:, :-1].T + weights[:, -1]
