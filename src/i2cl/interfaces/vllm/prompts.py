"""Prompts that score a text's labels: they cover every edge of the label trie with few prompt tokens.

Does not import vLLM, so it can be tested without it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from i2cl.errors import I2CLError
from i2cl.models.batching import Ids

MAX_LABEL_TOKENS = 128  # vLLM's limit on ``logprob_token_ids`` per prompt

# Prompt tokens that may always have log-probabilities. Each temporarily needs a row of vocabulary size.
MIN_PROMPT_LOGPROBS = 256

BATCH_FRACTION = 4  # `classify` may fill at most one BATCH_FRACTION-th of vLLM's batch
Edge = tuple[Ids, int]  # (label tokens so far, next label token)


class InterruptedRequestError(I2CLError):
    """Raised if the engine ended a request without answering it, for example when it is put to sleep."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the edges of the label trie that it scores."""

    query: Ids
    before: Ids  # label prefix, appended to the query
    tokens: tuple[int, ...]  # next tokens to score
    with_prefix: bool = False  # whether to score the tokens of ``before`` too

    @property
    def ids(self) -> Ids:
        """Token ids of the whole prompt."""
        return self.query + self.before

    def edges(self, output: Any) -> dict[Edge, float]:
        """Return log-probabilities by edge, from vLLM's ``RequestOutput``.

        Raises InterruptedRequestError if the engine did not answer.
        """
        if output.outputs[0].finish_reason in {"abort", "error"}:
            raise InterruptedRequestError(
                "the engine ended this request (it was paused, put to sleep or reset): retry once it runs"
            )
        values = {(self.before, token): one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        if self.with_prefix:
            tail = output.prompt_logprobs[len(self.query) :]
            for place, token in enumerate(self.before):
                values[self.before[:place], token] = tail[place][token].logprob
        return values


@dataclass(frozen=True)
class EngineLimits:
    """Batch and cache limits of an engine."""

    block: int  # tokens in a prefix-cache block; 0 without prefix caching
    # maximum length of a prompt with prompt log-probabilities (vLLM reserves a row for each sequence anyway)
    rows: int
    prompts: int  # maximum number of prompts that `classify` may have in the engine
    tokens: int  # maximum total number of tokens in these prompts

    @classmethod
    def of(cls, config: Any) -> "EngineLimits":
        """Derive the limits from a ``VllmConfig``."""
        cache, scheduler = config.cache_config, config.scheduler_config
        return cls(
            block=cache.block_size if cache.enable_prefix_caching else 0,
            rows=0 if cache.kv_sharing_fast_prefill else max(MIN_PROMPT_LOGPROBS, scheduler.max_num_seqs),
            prompts=max(1, scheduler.max_num_seqs // BATCH_FRACTION),
            tokens=max(1, scheduler.max_num_batched_tokens // BATCH_FRACTION),
        )


@dataclass(frozen=True)
class LabelPrompts:
    """Label token sequences of a task. No label is a prefix of another."""

    labels: tuple[Ids, ...]

    @cached_property
    def _next_tokens(self) -> dict[Ids, tuple[int, ...]]:
        """Next tokens of every label prefix."""
        return _grouped([(ids[:place], token) for ids in self.labels for place, token in enumerate(ids)])

    @cached_property
    def _last_tokens(self) -> dict[Ids, tuple[int, ...]]:
        """Last tokens of the labels, grouped by the prefix before them."""
        return _grouped([(ids[:-1], ids[-1]) for ids in self.labels])

    def prompts(self, query: Ids, limits: EngineLimits) -> list[Prompt]:
        """Return prompts that cover every edge of the label trie, in the way that processes fewer tokens.

        Either one prompt per label prefix, which shares the cached blocks of the query; or one prompt per
        full label with prompt log-probabilities, which vLLM computes without the prefix cache.
        """
        size = len(query)
        shared = size // limits.block * limits.block if limits.block else 0
        by_prefix = shared + sum(size + len(before) - shared for before in self._next_tokens)
        by_label = sum(size + len(before) for before in self._last_tokens)
        with_prefix = by_label < by_prefix and size + max(map(len, self._last_tokens)) <= limits.rows
        return [
            Prompt(
                query,
                before,
                tokens[start : start + MAX_LABEL_TOKENS],
                with_prefix and bool(before) and not start,
            )
            for before, tokens in (self._last_tokens if with_prefix else self._next_tokens).items()
            for start in range(0, len(tokens), MAX_LABEL_TOKENS)
        ]


def _grouped(edges: Sequence[Edge]) -> dict[Ids, tuple[int, ...]]:
    groups: dict[Ids, dict[int, None]] = {}
    for before, token in edges:
        groups.setdefault(before, {})[token] = None
    return {before: tuple(tokens) for before, tokens in groups.items()}


class PromptLimiter:
    """Limits the prompts that `classify` has in the engine, first come, first served.

    Requests that enter one prompt at a time take turns. A prompt above the token limit runs alone.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._prompts = self._tokens = 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    async def enter(self, tokens: int) -> None:
        """Wait until a prompt with this number of tokens fits."""
        async with self._turn:
            while self._prompts and not (
                self._prompts < self.limits.prompts and self._tokens + tokens <= self.limits.tokens
            ):
                self._left.clear()
                await self._left.wait()
            self._prompts += 1
            self._tokens += tokens

    def leave(self, tokens: int) -> None:
        """Release the capacity of a finished prompt."""
        self._prompts -= 1
        self._tokens -= tokens
        self._left.set()
