"""AutoCompressor: the demonstrations as summary vectors that a language model learnt to write and to read.

Source: Chevalier et al. 2023, https://arxiv.org/abs/2305.14788, and the released checkpoints.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.compressors import base
from i2cl.methods.compressors.base import BehindVectors
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.restore import lock_of
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

SUMMARY = "embed_summary.weight"
COUNTED = {"llama": True, "opt": False}
"""Whether vectors have positions: OPT gives all of them the row of its table before the first token's."""


class AutoCompressorConfig(Settings):
    """How demonstrations are cut: ``segment`` is the most tokens of a segment (2,048 in the release)."""

    segment: int = Field(2048, ge=1)


@dataclass(frozen=True)
class Summarizer:
    """A language model with its summary embeddings. ``embeddings`` has one for each summary vector; if it
    accumulates, a segment sees the summaries of all before it, else of the last alone.
    """

    decoder: Decoder
    embeddings: Float[Tensor, "m d"]
    accumulate: bool

    @property
    def counted(self) -> bool:
        """Whether vectors have positions."""
        return COUNTED[self.decoder.model.config.model_type]

    def positions(self, front: int, tokens: int, behind: int) -> list[int] | None:
        """Of vectors, tokens and vectors, where they do not count from 0."""
        return None if self.counted else [-1] * front + list(range(tokens)) + [-1] * behind

    def summaries(self, segments: Sequence[Ids]) -> Float[Tensor, "vectors d"]:
        """The vectors that stand for some segments, those of the first one first."""
        soft = self.embeddings[:0]
        for ids in segments:
            whole = torch.cat([soft, self.decoder.embed(ids), self.embeddings])
            positions = self.positions(len(soft), len(ids), len(self.embeddings))
            newest = self.decoder.read(whole, positions)[-len(self.embeddings) :]
            soft = torch.cat([soft, newest]) if self.accumulate else newest
        return soft

    def behind(self, task: Task, soft: Float[Tensor, "vectors d"]) -> BehindVectors:
        """A task whose queries stand behind some vectors; raises I2CLError as `label_tokens` does."""
        prefix = self.decoder.prefix_of(soft, self.positions(len(soft), 0, 0))
        return BehindVectors(base.asked_behind(self.decoder, task), prefix, cost=Cost.of(prefix))

    def segments(self, shown: Sequence[Ids], front: Ids, most: int) -> list[Ids]:
        """Demonstrations in few segments, in order, none cut; raises I2CLError if one or all are too long."""
        segments = [front]
        for number, ids in enumerate(shown, 1):
            if len(segments[-1]) + len(ids) <= self._fits(len(segments), most):
                segments[-1] += ids
                continue
            place = len(segments) + (segments != [front])  # of the segment that it would begin
            holds = max(0, self._fits(place, most))
            if segments == [front] or len(ids) > holds:
                segment = f"a segment behind {self._vectors(place - 1)} summary vectors holds {holds}"
                cure = "use shorter or fewer demonstrations"
                raise I2CLError(f"demonstration {number} takes {len(ids)} tokens, and {segment}: {cure}")
            segments.append(ids)
        return segments

    def _vectors(self, segments: int) -> int:
        return len(self.embeddings) * (segments if self.accumulate else min(segments, 1))

    def _fits(self, number: int, most: int) -> int:
        """Tokens of a segment, behind the summaries of those before it and in front of its own."""
        limit = self.decoder.max_length
        taken = self._vectors(number - 1) + len(self.embeddings) if self.counted else 0
        return most if limit is None else min(most, limit - taken)


@dataclass(frozen=True)
class AutoCompressor(Method):
    """Runs the demonstrations segment by segment and keeps the keys and values of their summaries."""

    name: ClassVar[str] = "autocompressor"
    summary: ClassVar[str] = "demonstrations as summary vectors of a model trained to write them"
    row: ClassVar[str] = "AutoComp."
    needs = "demonstrations, an AutoCompressor as MODEL (a whole model, 7B: trained on 15B tokens)"
    formula: ClassVar[str] = "2(M/K)DL"
    settings = (AutoCompressorConfig,)
    config: AutoCompressorConfig = field(default_factory=AutoCompressorConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> BehindVectors:
        """Raises I2CLError if MODEL is no AutoCompressor, or demonstrations exceed segment or context."""
        model = summarizer(decoder)
        texts = base.exchanges(decoder, task, demonstrations)
        texts[0] = task.template.opening + texts[0]
        with torch.no_grad():
            segments = model.segments(base.bare(decoder, texts), decoder.encoder.front, self.config.segment)
            return model.behind(task, model.summaries(segments))


def summarizer(decoder: Decoder) -> Summarizer:
    """The AutoCompressor that a model is; raises I2CLError if it is none, or its embeddings do not fit."""
    base.require_type(decoder, AutoCompressor.name, COUNTED)
    compressor = base.bundled(decoder, AutoCompressor.name)
    if compressor is not None:
        decoder = base.once(decoder, AutoCompressor.name, partial(_with_weights, decoder, compressor.tensors))
    cure = "give an AutoCompressor as MODEL, such as princeton-nlp/AutoCompressor-Llama-2-7b-6k"
    compressor = compressor or base.beside(decoder, AutoCompressor.name, lambda name: name == SUMMARY, cure)
    width = decoder.embed((0,)).shape[1]
    embeddings = compressor.tensor(SUMMARY, compressor.settings.get("summary_length", -1), width)
    kept = embeddings.to(decoder.device, decoder.model.dtype)
    return Summarizer(decoder, kept, bool(compressor.settings.get("accumulate_summary", True)))


def _with_weights(decoder: Decoder, tensors: Mapping[str, Tensor]) -> Decoder:
    """A copy of a model that learnt further: with these weights."""
    with lock_of(decoder.model):  # not with another thread's hooks on it
        model = copy.deepcopy(decoder.model)
    model.load_state_dict({name: one for name, one in tensors.items() if name != SUMMARY}, strict=False)
    return Decoder(model, decoder.tokenizer, name=decoder.name, token_budget=decoder.token_budget)
