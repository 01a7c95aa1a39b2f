"""Prompts with demonstrations, and the predictor that scores label words after them."""

import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.context import require_labels
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost
from i2cl.models.batching import Ids, shared_front
from i2cl.models.edits import Edit
from i2cl.models.encoding import TruncationWarning
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import (
    LabelScorer,
    Progress,
    in_order,
    next_token_log_probabilities,
    require_finite,
    score,
)
from i2cl.tasks import Examples

Pairs = tuple[tuple[str, str], ...]  # (text, label word) of each demonstration, in the order of the prompt


@dataclass(frozen=True)
class PromptPredictor:
    """Scores label words after a prompt.

    Attributes:
        scorer: encodes queries and labels of the task.
        shown: demonstrations in front of every query.
        prefix: cached keys and values of these demonstrations, or None to run them with every query.
        edit: edit of the activations.
        injection: the injection that the edit is of, if any.
        cost: storage that it needs.
    """

    scorer: LabelScorer
    shown: Pairs = ()
    prefix: Prefix | None = None
    edit: Edit | None = None
    injection: Injection | None = None
    cost: Cost = field(default_factory=Cost)

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Return the log-probability of each label word."""
        decoder, labels = self.scorer.decoder, self.scorer.labels
        scores = torch.empty(len(texts), len(labels.ids))
        for rows, queries, prefix in self._split_by_cache(texts):
            scores[rows] = score(decoder, queries, labels, edit=self.edit, prefix=prefix, progress=progress)
        require_finite(scores, decoder)
        return scores

    def distributions(self, texts: Sequence[str]) -> Float[Tensor, "texts vocab"]:
        """Return the log-probability of every token as the next one after each prompt."""
        decoder, edit = self.scorer.decoder, self.edit
        return in_order(
            (rows, next_token_log_probabilities(decoder, queries, edit=edit, prefix=prefix))
            for rows, queries, prefix in self._split_by_cache(texts)
        )

    def _split_by_cache(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[Ids], Prefix | None]]:
        """Yield (rows, queries, prefix) of the prompts that can use the cache, then of the others.

        A prompt cannot use the cache if the tokenizer merges its text with the last token of the prefix.
        """
        prompts = encode_prompts(self.scorer, self.shown, texts)
        prefix_ids = self.prefix.ids if self.prefix else ()
        start = len(prefix_ids)
        fits = [row for row, ids in enumerate(prompts) if ids[:start] == prefix_ids and len(ids) > start]
        rest = sorted(set(range(len(prompts))) - set(fits))
        if fits:
            yield fits, [prompts[row][start:] for row in fits], self.prefix
        if rest:
            yield rest, [prompts[row] for row in rest], None


def few_shot_predictor(
    scorer: LabelScorer, demonstrations: Examples, *, cached: bool = True
) -> PromptPredictor:
    """Put the demonstrations in front of every query.

    Args:
        scorer: encodes queries and labels of the task.
        demonstrations: the labelled examples.
        cached: run the demonstrations once and cache their keys and values.

    Raises:
        I2CLError: as `fit_to_context`.
    """
    pairs = fit_to_context(scorer, demonstrations)
    ids = common_prefix_ids(scorer, pairs)
    if not cached or not ids:
        return PromptPredictor(scorer, pairs)
    prefix = scorer.decoder.prefix(ids)
    return PromptPredictor(scorer, pairs, prefix, cost=Cost.of(prefix))


def fit_to_context(scorer: LabelScorer, demonstrations: Examples) -> Pairs:
    """Return as many demonstrations per class as fit into the context together with a query.

    Room is reserved for a query as long as the longest demonstration. Warns (`TruncationWarning`) if some are
    left out.

    Raises:
        I2CLError: if not even one per class fits, or a text or label is invalid.
    """
    require_labels(scorer.task, demonstrations)
    task, encoder, limit = scorer.task, scorer.decoder.encoder, scorer.decoder.max_length
    ranks: defaultdict[int, Iterator[int]] = defaultdict(partial(count, 1))  # within each label
    pairs = [(encoder.literal(one.text), task.labels[one.label]) for one in demonstrations]
    ranked = [(next(ranks[one.label]), pair) for one, pair in zip(demonstrations, pairs, strict=True)]
    largest_class = max((rank for rank, _ in ranked), default=0)
    longest_text = max((text for text, _ in pairs), key=len, default="")

    def first(per_class: int) -> Pairs:
        return tuple(pair for rank, pair in ranked if rank <= per_class)

    def tokens_needed(per_class: int) -> int:
        prompt = task.template.prompt(first(per_class), longest_text)
        return len(encoder([prompt])[0]) + scorer.labels.room

    if limit is None or tokens_needed(largest_class) <= limit:
        return first(largest_class)
    fits = bisect_right(range(1, largest_class + 1), limit, key=tokens_needed)
    if fits == 0:
        raise I2CLError(
            f"one demonstration per class and a query need {tokens_needed(1)} tokens, but the context holds "
            f"{limit}: use shorter demonstrations or a model with a longer context"
        )
    message = (
        f"{task.name}: {largest_class} demonstrations per class and a query need "
        f"{tokens_needed(largest_class)} tokens, but the context holds {limit}; showing {fits} per class"
    )
    warnings.warn(message, TruncationWarning, stacklevel=3)
    return first(fits)


def encode_prompts(scorer: LabelScorer, demonstrations: Pairs, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of the demonstrations followed by each text; raises I2CLError if too long."""
    return scorer.queries(texts, partial(scorer.task.template.prompt, demonstrations))


def common_prefix_ids(scorer: LabelScorer, demonstrations: Pairs) -> Ids:
    """Return the tokens that all prompts start with; raises I2CLError as `encode_prompts`."""
    return shared_front(encode_prompts(scorer, demonstrations, ["a", "7"]))
