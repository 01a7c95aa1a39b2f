"""Zero-shot and few-shot prompting.

Source: Brown et al. 2020, https://arxiv.org/abs/2005.14165.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from i2cl.methods.base import Method, ScoringConfig
from i2cl.methods.prompts import PromptPredictor, few_shot_predictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class ZeroShot(Method):
    """Scores label words after the query, without demonstrations."""

    name: ClassVar[str] = "zero_shot"
    summary: ClassVar[str] = "the query alone"
    is_stochastic: ClassVar[bool] = False
    row: ClassVar[str] = "Zero-shot"
    needs: ClassVar[str] = "nothing"
    settings = (ScoringConfig,)
    config: ScoringConfig = field(default_factory=ScoringConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Return a predictor for the task; nothing is fitted."""
        return PromptPredictor(LabelScorer(decoder, task, self.config.scoring))


@dataclass(frozen=True)
class FewShot(Method):
    """In-context learning; keys and values of the demonstrations are computed once per task."""

    name: ClassVar[str] = "few_shot"
    summary: ClassVar[str] = "demonstrations before the query, their keys and values cached once"
    row: ClassVar[str] = "Few-shot (ICL)"
    formula: ClassVar[str] = "2MDL"
    cache: ClassVar[bool] = True
    settings = (ScoringConfig,)
    config: ScoringConfig = field(default_factory=ScoringConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Cache the demonstrations. Raises I2CLError if the context cannot hold one per class."""
        scorer = LabelScorer(decoder, task, self.config.scoring)
        return few_shot_predictor(scorer, demonstrations, cached=self.cache)


@dataclass(frozen=True)
class FewShotUncached(FewShot):
    """In-context learning that recomputes the demonstrations with every query."""

    name: ClassVar[str] = "few_shot_uncached"
    summary: ClassVar[str] = "demonstrations before the query, run again with every query"
    formula: ClassVar[str] = "0"
    cache: ClassVar[bool] = False
