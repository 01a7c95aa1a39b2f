"""What is asked of the engine about one text: every edge of the labels' trie, in few prompts.

It imports nothing of vLLM, so that all of it is tested where there is none.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from i2cl.errors import I2CLError
from i2cl.models.batching import Ids

MOST_TOKENS = 128  # that vLLM tells log-probabilities of behind one prompt

# Tokens of a prompt that may be told in any case, each a row as wide as the vocabulary for a moment.
ROWS = 256

SHARE = 4  # one of so many parts of vLLM's batch is the most that all of `classify` has in the engine at once
Edge = tuple[Ids, int]  # a token of a label, and what stands between the query and it


class InterruptedRequestError(I2CLError):
    """Raised if the engine ended a request before it was answered, as it does when it is put to sleep."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the edges whose log-probabilities are wanted."""

    query: Ids  # what the prompt begins with
    before: Ids  # what it ends with: how a label begins
    tokens: tuple[int, ...]  # wanted behind it
    along: bool = False  # whether the edges of ``before`` are wanted too

    @property
    def ids(self) -> Ids:
        """The whole of it."""
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
        if self.along:
            tail = output.prompt_logprobs[len(self.query) :]
            for place, token in enumerate(self.before):
                values[self.before[:place], token] = tail[place][token].logprob
        return values


@dataclass(frozen=True)
class Reach:
    """What an engine's batches and cache are like."""

    block: int  # tokens of a block that prompts of one beginning share; 0: they share none
    # longest prompt whose own tokens are told: vLLM keeps memory for a row for each of its sequences
    rows: int
    prompts: int  # that all of `classify` may have in the engine
    tokens: int  # of these prompts

    @classmethod
    def of(cls, config: Any) -> "Reach":
        """That of an engine, from its ``VllmConfig``."""
        cache, scheduler = config.cache_config, config.scheduler_config
        return cls(
            block=cache.block_size if cache.enable_prefix_caching else 0,
            rows=0 if cache.kv_sharing_fast_prefill else max(ROWS, scheduler.max_num_seqs),
            prompts=max(1, scheduler.max_num_seqs // SHARE),
            tokens=max(1, scheduler.max_num_batched_tokens // SHARE),
        )


@dataclass(frozen=True)
class LabelPrompts:
    """Labels as token sequences, none of which is how another one begins."""

    labels: tuple[Ids, ...]  # of a task

    @cached_property
    def _behind(self) -> dict[Ids, tuple[int, ...]]:
        """The tokens behind each way in which a label begins."""
        return _grouped([(ids[:place], token) for ids in self.labels for place, token in enumerate(ids)])

    @cached_property
    def _last(self) -> dict[Ids, tuple[int, ...]]:
        """The same of labels' last tokens alone."""
        return _grouped([(ids[:-1], ids[-1]) for ids in self.labels])

    def prompts(self, query: Ids, reach: Reach) -> list[Prompt]:
        """What tells every edge behind a query, in the one of two ways in which the engine reads less.

        A prompt for every beginning tells what stands behind that, and the cache shares whole blocks of the
        query. A prompt for every label's last token tells all that is before it too, and shares nothing.
        """
        size = len(query)
        shared = size // reach.block * reach.block if reach.block else 0
        by_beginning = shared + sum(size + len(before) - shared for before in self._behind)
        by_label = sum(size + len(before) for before in self._last)
        along = by_label < by_beginning and size + max(map(len, self._last)) <= reach.rows
        return [
            Prompt(query, before, tokens[start : start + MOST_TOKENS], along and bool(before) and not start)
            for before, tokens in (self._last if along else self._behind).items()
            for start in range(0, len(tokens), MOST_TOKENS)
        ]


def _grouped(edges: Sequence[Edge]) -> dict[Ids, tuple[int, ...]]:
    groups: dict[Ids, dict[int, None]] = {}
    for before, token in edges:
        groups.setdefault(before, {})[token] = None
    return {before: tuple(tokens) for before, tokens in groups.items()}


class Share:
    """Lets prompts of `classify` into the engine, first come, first served, up to their share of a batch.

    Whoever asks for one prompt at a time takes turns with all others who do. A prompt beyond the whole share
    runs alone.
    """

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._prompts = self._tokens = 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    async def enter(self, tokens: int) -> None:
        """Wait until there is room for a prompt of so many tokens."""
        async with self._turn:
            while self._prompts and not (
                self._prompts < self.reach.prompts and self._tokens + tokens <= self.reach.tokens
            ):
                self._left.clear()
                await self._left.wait()
            self._prompts += 1
            self._tokens += tokens

    def leave(self, tokens: int) -> None:
        """The prompt is answered."""
        self._prompts -= 1
        self._tokens -= tokens
        self._left.set()
