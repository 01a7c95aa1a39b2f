"""Few-shot in-context learning: demonstrations before the query, run once per task or with every query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.batching import Ids
from i2cl.decoder import Decoder, Prefix
from i2cl.scoring import Progress, encode_queries, label_tokens, score
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class FewShot:
    """In-context learning with the demonstrations' keys and values cached once per task."""

    name: ClassVar[str] = "few_shot"
    summary: ClassVar[str] = "demonstrations before the query, their keys and values cached once"
    row: ClassVar[str] = "Few-shot (ICL)"
    needs: ClassVar[str] = "demonstrations"
    cache: ClassVar[bool] = True

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """None."""
        return {}

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> Self:
        """There is nothing to set."""
        return cls()

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> "FewShotPredictor":
        """Run the demonstrations once, if they are to be cached.

        Raises:
            I2CLError: if they do not fit into the context, naming tokens needed and available.
        """
        shown = tuple((example.text, task.labels[example.label]) for example in demonstrations)
        labels = label_tokens(decoder, task.template, task.labels)
        probes = encode_queries(decoder, lambda text: task.template.prompt(shown, text), ["a", "7"], labels)
        shared = tuple(
            one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*probes, strict=False))
        )
        prefix = decoder.prefix(shared) if self.cache and shared else None
        return FewShotPredictor(decoder, task, shown, prefix)


@dataclass(frozen=True)
class FewShotUncached(FewShot):
    """In-context learning that runs the demonstrations again with every query."""

    name: ClassVar[str] = "few_shot_uncached"
    summary: ClassVar[str] = "demonstrations before the query, run again with every query"
    cache: ClassVar[bool] = False


@dataclass(frozen=True)
class FewShotPredictor:
    """The plain model behind demonstrations."""

    decoder: Decoder
    task: Task
    shown: tuple[tuple[str, str], ...]
    prefix: Prefix | None
    trainable_parameters: int = 0

    @property
    def cached_values(self) -> int:
        """Keys and values of the demonstrations (paper: 2MDL, less under grouped-query attention)."""
        return self.prefix.values if self.prefix else 0

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word after demonstrations and query."""
        labels = label_tokens(self.decoder, self.task.template, self.task.labels)
        prompts = encode_queries(
            self.decoder, lambda text: self.task.template.prompt(self.shown, text), texts, labels
        )
        if self.prefix is None:
            return score(self.decoder, prompts, labels, progress=progress)
        return self._cached_scores(prompts, labels, self.prefix, progress)

    def _cached_scores(
        self, prompts: list[Ids], labels: Any, prefix: Prefix, progress: Progress | None
    ) -> Float[Tensor, "texts labels"]:
        """Prompts whose text merges with the prefix's last token run whole; the others reuse the cache."""
        start = len(prefix.ids)
        fits = [row for row, ids in enumerate(prompts) if ids[:start] == prefix.ids and len(ids) > start]
        whole = sorted(set(range(len(prompts))) - set(fits))
        scores = torch.empty(len(prompts), len(labels.ids))
        queries = [prompts[row][start:] for row in fits]
        scores[fits] = score(self.decoder, queries, labels, prefix=prefix, progress=progress)
        if whole:
            scores[whole] = score(self.decoder, [prompts[row] for row in whole], labels, progress=progress)
        return scores
