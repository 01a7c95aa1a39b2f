"""TF-IDF and logistic regression: what labelled texts are worth without any language model.

Source: https://scikit-learn.org/stable/modules/feature_extraction.html#text-feature-extraction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import Field

from i2cl.errors import I2CLError, needs
from i2cl.methods.base import ClassifierPredictor, Method, head_cost, require_two_classes
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, require_texts
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task


class TfidfConfig(Settings):
    """Features are runs of at most ``tfidf_words`` words; ``tfidf_c`` is scikit-learn's ``C``."""

    tfidf_words: int = Field(2, ge=1)
    tfidf_c: float = Field(10.0, gt=0)


@dataclass(frozen=True)
class Tfidf(Method):
    """Words and pairs of words, weighted by how rare they are, then scikit-learn's logistic regression."""

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
        return ClassifierPredictor(_as_they_are, model, len(task.labels), cost)


def _as_they_are(texts: Sequence[str], _progress: Progress | None) -> Sequence[str]:
    require_texts(texts)
    return texts
