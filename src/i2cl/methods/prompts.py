"""Prompts with demonstrations and the predictor that scores label words behind them."""

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
from i2cl.errors import I2CLError
from i2cl.methods.base import Cost
from i2cl.models.batching import Ids, shared_front
from i2cl.models.edits import Edit
from i2cl.models.encoding import TruncationWarning
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import (
    Progress,
    Questions,
    in_order,
    next_token_log_probabilities,
    require_finite,
    score,
)
from i2cl.tasks import Examples

Shown = tuple[tuple[str, str], ...]  # demonstrations as (text, label word), in the order of a prompt


@dataclass(frozen=True)
class PromptPredictor:
    """Scores label words behind a prompt, under an edit or not; the prefix caches what stands in front."""

    questions: Questions
    shown: Shown = ()
    prefix: Prefix | None = None
    edit: Edit | None = None
    cost: Cost = field(default_factory=Cost)

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word."""
        decoder, labels = self.questions.decoder, self.questions.labels
        scores = torch.empty(len(texts), len(labels.ids))
        for rows, queries, prefix in self._parts(texts):
            scores[rows] = score(decoder, queries, labels, edit=self.edit, prefix=prefix, progress=progress)
        require_finite(scores, decoder)
        return scores

    def distributions(self, texts: Sequence[str]) -> Float[Tensor, "texts vocab"]:
        """Log-probability of every token behind each prompt."""
        decoder, edit = self.questions.decoder, self.edit
        return in_order(
            (rows, next_token_log_probabilities(decoder, queries, edit=edit, prefix=prefix))
            for rows, queries, prefix in self._parts(texts)
        )

    def _parts(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[Ids], Prefix | None]]:
        """Prompts whose text merges with the prefix's last token run whole; the others reuse the cache."""
        prompts = encode_prompts(self.questions, self.shown, texts)
        shared = self.prefix.ids if self.prefix else ()
        start = len(shared)
        fits = [row for row, ids in enumerate(prompts) if ids[:start] == shared and len(ids) > start]
        rest = sorted(set(range(len(prompts))) - set(fits))
        if fits:
            yield fits, [prompts[row][start:] for row in fits], self.prefix
        if rest:
            yield rest, [prompts[row] for row in rest], None


def few_shot_prompt(
    questions: Questions, demonstrations: Examples, *, cached: bool = True
) -> PromptPredictor:
    """The demonstrations in front of every query, run once if cached; raises I2CLError as `fitting`."""
    pairs = fitting(questions, demonstrations)
    ids = shared_ids(questions, pairs)
    if not cached or not ids:
        return PromptPredictor(questions, pairs)
    prefix = questions.decoder.prefix(ids)
    return PromptPredictor(questions, pairs, prefix, cost=Cost.of(prefix))


def fitting(questions: Questions, demonstrations: Examples) -> Shown:
    """Demonstrations for a prompt, as many per class as fit into the context with a query behind them.
    Room is kept for a query as long as the longest demonstration. Warns where fewer are shown. Raises
    I2CLError if not one per class fits, naming tokens needed and available; or a label or text that is none.
    """
    require_labels(questions.task, demonstrations)
    task, encoder, limit = questions.task, questions.decoder.encoder, questions.decoder.max_length
    ranks: defaultdict[int, Iterator[int]] = defaultdict(partial(count, 1))  # of each label's demonstrations
    pairs = [(encoder.literal(one.text), task.labels[one.label]) for one in demonstrations]
    ranked = [(next(ranks[one.label]), pair) for one, pair in zip(demonstrations, pairs, strict=True)]
    most = max((rank for rank, _ in ranked), default=0)
    longest = max((text for text, _ in pairs), key=len, default="")

    def first(per_class: int) -> Shown:
        return tuple(pair for rank, pair in ranked if rank <= per_class)

    def needed(per_class: int) -> int:
        prompt = task.template.prompt(first(per_class), longest)
        return len(encoder([prompt])[0]) + questions.labels.room

    if limit is None or needed(most) <= limit:
        return first(most)
    fits = bisect_right(range(1, most + 1), limit, key=needed)
    if fits == 0:
        sizes = f"need {needed(1)} tokens, but the context holds {limit}"
        cure = "use shorter demonstrations or a model with a longer context"
        raise I2CLError(f"one demonstration per class and a query {sizes}: {cure}")
    sizes = f"need {needed(most)} tokens, but the context holds {limit}; showing {fits} per class"
    message = f"{task.name}: {most} demonstrations per class and a query {sizes}"
    warnings.warn(message, TruncationWarning, stacklevel=3)
    return first(fits)


def encode_prompts(questions: Questions, demonstrations: Shown, texts: Sequence[str]) -> list[Ids]:
    """Token ids of demonstrations and query, for each text; raises I2CLError if they do not fit."""
    return questions.queries(texts, partial(questions.task.template.prompt, demonstrations))


def shared_ids(questions: Questions, demonstrations: Shown) -> Ids:
    """The tokens that prompts have in common; raises I2CLError as `encode_prompts` does."""
    return shared_front(encode_prompts(questions, demonstrations, ["a", "7"]))
