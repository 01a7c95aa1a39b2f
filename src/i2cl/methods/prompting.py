"""Prompting: zero-shot and few-shot, and few-shot with a cache pruned to label anchors."""

import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.context import require_labels
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, LabelScores, Method
from i2cl.models.batching import Ids, common_prefix
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.encoding import TruncationWarning
from i2cl.models.label_tokens import Scoring
from i2cl.models.prefix import Prefix, uses_alibi
from i2cl.models.scoring import (
    LabelScorer,
    Progress,
    next_token_log_probabilities,
    require_finite,
    score,
    stack_rows,
)
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

Pairs = tuple[tuple[str, str], ...]  # (text, label word) of each demonstration, in the order of the prompt


@dataclass(frozen=True)
class PromptPredictor:
    """Scores label words after a prompt.

    Attributes:
        scorer: encodes queries and labels of the task.
        shown: demonstrations that precede every query.
        prefix: cached keys and values of these demonstrations, or None to run them with every query.
        edit: edit of the activations.
        injection: the injection that the edit is of, if any.
        cost: storage and data that the predictor needs.
    """

    scorer: LabelScorer
    shown: Pairs = ()
    prefix: Prefix | None = None
    edit: Edit | None = None
    injection: Injection | None = None
    cost: Cost = field(default_factory=Cost)

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the log-probability of each label word."""
        decoder, labels = self.scorer.decoder, self.scorer.labels
        scores = torch.empty(len(texts), len(labels.sequences))
        for rows, queries, prefix in self.split_by_cache(texts):
            scores[rows] = score(decoder, queries, labels, edit=self.edit, prefix=prefix, progress=progress)
        require_finite(scores, decoder)
        return scores

    def next_token_log_probs(self, texts: Sequence[str]) -> Float[Tensor, "texts vocab"]:
        """Return the log-probability of every token as the next one after each prompt."""
        decoder, edit = self.scorer.decoder, self.edit
        return stack_rows(
            (rows, next_token_log_probabilities(decoder, queries, edit=edit, prefix=prefix))
            for rows, queries, prefix in self.split_by_cache(texts)
        )

    def split_by_cache(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[Ids], Prefix | None]]:
        """Yield (rows, queries, prefix) of the prompts that can use the cache, then of the others.

        A prompt cannot use the cache if the tokenizer merges its text with the last token of the prefix.
        """
        prompts = encode_prompts(self.scorer, self.shown, texts)
        prefix_ids = self.prefix.ids if self.prefix else ()
        start = len(prefix_ids)
        cached = [row for row, ids in enumerate(prompts) if ids[:start] == prefix_ids and len(ids) > start]
        uncached = sorted(set(range(len(prompts))) - set(cached))
        if cached:
            yield cached, [prompts[row][start:] for row in cached], self.prefix
        if uncached:
            yield uncached, [prompts[row] for row in uncached], None


def few_shot_predictor(
    scorer: LabelScorer, demonstrations: Examples, *, cached: bool = True
) -> PromptPredictor:
    """Return a predictor that puts the demonstrations before every query.

    Args:
        scorer: encodes queries and labels of the task.
        demonstrations: labelled examples.
        cached: run the demonstrations once and cache their keys and values.

    Raises:
        I2CLError: as `fit_to_context`.
    """
    shown = fit_to_context(scorer, demonstrations)
    ids = common_prefix_ids(scorer, shown)
    if not cached or not ids:
        return PromptPredictor(scorer, shown)
    prefix = scorer.decoder.prefix(ids)
    return PromptPredictor(scorer, shown, prefix, cost=Cost.of(prefix))


def fit_to_context(scorer: LabelScorer, demonstrations: Examples) -> Pairs:
    """Return as many demonstrations per class as fit into the context together with a query.

    Room is reserved for a query as long as the longest demonstration. Warns (`TruncationWarning`) if some are
    left out.

    Raises:
        I2CLError: if not even one per class fits, or a text or label is invalid.
    """
    require_labels(scorer.task, demonstrations)
    task, encoder, limit = scorer.task, scorer.decoder.encoder, scorer.decoder.max_length
    ranks: defaultdict[int, Iterator[int]] = defaultdict(partial(count, 1))  # next rank within each label
    pairs = [(encoder.escape(example.text), task.labels[example.label]) for example in demonstrations]
    ranked = [(next(ranks[example.label]), pair) for example, pair in zip(demonstrations, pairs, strict=True)]
    max_per_class = max((rank for rank, _ in ranked), default=0)
    longest_text = max((text for text, _ in pairs), key=len, default="")

    def take(per_class: int) -> Pairs:
        return tuple(pair for rank, pair in ranked if rank <= per_class)

    def tokens_needed(per_class: int) -> int:
        prompt = task.template.prompt(take(per_class), longest_text)
        return len(encoder([prompt])[0]) + scorer.labels.tokens_after_query

    if limit is None or tokens_needed(max_per_class) <= limit:
        return take(max_per_class)
    fits = bisect_right(range(1, max_per_class + 1), limit, key=tokens_needed)
    if fits == 0:
        raise I2CLError(
            f"one demonstration per class and a query need {tokens_needed(1)} tokens, but the context holds "
            f"{limit}: use shorter demonstrations or a model with a longer context"
        )
    message = (
        f"{task.name}: {max_per_class} demonstrations per class and a query need "
        f"{tokens_needed(max_per_class)} tokens, but the context holds {limit}; showing {fits} per class"
    )
    warnings.warn(message, TruncationWarning, stacklevel=3)
    return take(fits)


def encode_prompts(scorer: LabelScorer, shown: Pairs, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of the demonstrations followed by each text; raises I2CLError if too long."""
    return scorer.queries(texts, partial(scorer.task.template.prompt, shown))


def common_prefix_ids(scorer: LabelScorer, shown: Pairs) -> Ids:
    """Return the tokens that all prompts start with; raises I2CLError as `encode_prompts`."""
    return common_prefix(encode_prompts(scorer, shown, ["a", "7"]))


class ScoringConfig(Settings):
    """Label scoring; see `i2cl.models.label_tokens.Scoring`."""

    scoring: Scoring = "auto"


@dataclass(frozen=True)
class ZeroShot(Method):
    """Scores label words after the query, without demonstrations."""

    name = "zero_shot"
    summary = "the query alone"
    is_stochastic = False
    needs = "nothing"
    settings = (ScoringConfig,)
    config: ScoringConfig = field(default_factory=ScoringConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Return a predictor for the task; nothing is fitted."""
        return PromptPredictor(LabelScorer(decoder, task, self.config.scoring))


@dataclass(frozen=True)
class FewShot(Method):
    """In-context learning; keys and values of the demonstrations are computed once per task.

    Source: Brown et al. 2020, https://arxiv.org/abs/2005.14165.
    """

    name = "few_shot"
    summary = "demonstrations before the query, their keys and values cached once"
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

    name = "few_shot_uncached"
    summary = "demonstrations before the query, run again with every query"
    cache: ClassVar[bool] = False


@dataclass(frozen=True)
class LabelAnchor(Method):
    """Few-shot whose cache keeps only template, separator and label tokens, at their original positions.

    Source: paper, "Label-anchor" and its appendix; Wang et al. 2023, https://arxiv.org/abs/2305.14160.
    """

    name = "label_anchor"
    summary = "few-shot whose cache keeps only template, newline and label tokens"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Run the demonstrations once and prune their cache to the anchors.

        Raises:
            I2CLError: if the context cannot hold one demonstration per class, the tokenizer does not report
                character offsets, or the model caches more than keys and values or has ALiBi.
        """
        scorer = LabelScorer(decoder, task)
        shown = fit_to_context(scorer, demonstrations)
        ids = common_prefix_ids(scorer, shown)
        config = decoder.model.config
        if not decoder.can_split or uses_alibi(config):
            reason = "has ALiBi" if decoder.can_split else "caches more than keys and values"
            raise I2CLError(
                f"label_anchor does not support {config.model_type!r}, which {reason}: use few_shot"
            )
        if not ids:
            return PromptPredictor(scorer, shown)
        prefix = decoder.prefix(ids, whole=True).prune(anchor_indices(decoder, task, shown, len(ids)))
        return PromptPredictor(scorer, shown, prefix, cost=Cost.of(prefix))


def anchor_indices(decoder: Decoder, task: Task, shown: Pairs, count: int) -> tuple[int, ...]:
    """Return the indices of the first ``count`` tokens that are not entirely text of a demonstration.

    Raises:
        I2CLError: if the tokenizer does not report character offsets.
    """
    if not decoder.tokenizer.is_fast:
        raise I2CLError("label_anchor needs a fast tokenizer: use a model with a tokenizer.json")
    template = task.template
    prompt, texts = template.opening, []
    for text, word in shown:
        start = len(prompt) + len(template.head)
        texts.append((start, start + len(text)))
        prompt += template.exchange(text, word)
    prompt += template.head
    is_text = [
        any(start <= token_start and token_end <= end for start, end in texts)
        for token_start, token_end in decoder.encoder.spans(prompt)
    ]
    leading = len(decoder.encoder.leading_ids)
    return tuple(index for index in range(count) if index < leading or not is_text[index - leading])
