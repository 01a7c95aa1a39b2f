"""AutoCompressor: demonstrations compressed into summary vectors by a language model trained to do so.

Source: Chevalier et al. 2023, https://arxiv.org/abs/2305.14788, and the released checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.methods.base import Method
from i2cl.methods.compressors.base import (
    Compressor,
    SoftPromptPredictor,
    cast,
    encode_without_special_tokens,
    exchanges,
    hidden_states,
    require_model_type,
    soft_prompt_prefix,
)
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

SUMMARY = "embed_summary.weight"
HAS_POSITIONS = {"llama": True, "opt": False}
"""Whether summary vectors have positions. OPT gives all of them the position before the first token."""


class AutoCompressorConfig(Settings):
    """``segment`` is the maximum number of tokens of a segment (2,048 in the release)."""

    segment: int = Field(2048, ge=1)


@dataclass(frozen=True)
class Summarizer:
    """A language model with summary embeddings.

    Attributes:
        decoder: the language model.
        embeddings: input embeddings of the m summary tokens.
        accumulate: whether a segment sees the summaries of all earlier segments, or only of the last one.
    """

    decoder: Decoder
    embeddings: Float[Tensor, "m d"]
    accumulate: bool

    @property
    def has_positions(self) -> bool:
        """Whether summary vectors have separate positions."""
        return HAS_POSITIONS[self.decoder.model.config.model_type]

    def positions(self, vectors_before: int, tokens: int, vectors_after: int) -> list[int] | None:
        """Return the positions of vectors, tokens and vectors; None if they count from 0."""
        if self.has_positions:
            return None
        return [-1] * vectors_before + list(range(tokens)) + [-1] * vectors_after

    def summaries(self, segments: Sequence[Ids]) -> Float[Tensor, "vectors d"]:
        """Return the summary vectors of segments, in order."""
        soft_prompt = self.embeddings[:0]
        for ids in segments:
            inputs = torch.cat([soft_prompt, self.decoder.embed(ids), self.embeddings])
            positions = self.positions(len(soft_prompt), len(ids), len(self.embeddings))
            summary = hidden_states(self.decoder, inputs, positions)[-len(self.embeddings) :]
            soft_prompt = torch.cat([soft_prompt, summary]) if self.accumulate else summary
        return soft_prompt

    def predictor(self, task: Task, soft_prompt: Float[Tensor, "vectors d"]) -> SoftPromptPredictor:
        """Return a predictor that puts summary vectors before each query."""
        prefix = soft_prompt_prefix(self.decoder, soft_prompt, self.positions(len(soft_prompt), 0, 0))
        return SoftPromptPredictor.of(self.decoder, task, prefix)

    def segments(self, shown: Sequence[Ids], front: Ids, max_tokens: int) -> list[Ids]:
        """Pack demonstrations into as few segments as possible, in order, without splitting any.

        Args:
            shown: token ids of each demonstration.
            front: tokens before the first demonstration.
            max_tokens: maximum length of a segment.

        Raises:
            I2CLError: if a demonstration is too long, or all of them are.
        """
        segments = [front]
        for number, ids in enumerate(shown, 1):
            if len(segments[-1]) + len(ids) <= self._capacity(len(segments), max_tokens):
                segments[-1] += ids
                continue
            segment = len(segments) + (segments != [front])  # the segment that it would start
            capacity = max(0, self._capacity(segment, max_tokens))
            if segments == [front] or len(ids) > capacity:
                raise I2CLError(
                    f"demonstration {number} takes {len(ids)} tokens, and a segment after "
                    f"{self._summary_length(segment - 1)} summary vectors holds {capacity}: use shorter or "
                    "fewer demonstrations"
                )
            segments.append(ids)
        return segments

    def _summary_length(self, segments: int) -> int:
        """Return the number of summary vectors that follow the given number of segments."""
        return len(self.embeddings) * (segments if self.accumulate else min(segments, 1))

    def _capacity(self, segment: int, max_tokens: int) -> int:
        """Return the tokens that fit between the earlier summaries and the summary of a segment."""
        limit = self.decoder.max_length
        vectors = self._summary_length(segment - 1) + len(self.embeddings) if self.has_positions else 0
        return max_tokens if limit is None else min(max_tokens, limit - vectors)


@dataclass(frozen=True)
class AutoCompressor(Method):
    """Summarizes the demonstrations segment by segment and caches keys and values of the summaries."""

    name = "autocompressor"
    summary = "demonstrations as summary vectors of a model trained to write them"
    needs = "demonstrations, an AutoCompressor as MODEL (a whole model, 7B: trained on 15B tokens)"
    settings = (AutoCompressorConfig,)
    config: AutoCompressorConfig = field(default_factory=AutoCompressorConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> SoftPromptPredictor:
        """Summarize the demonstrations.

        Raises:
            I2CLError: if the model is not an AutoCompressor, or the demonstrations are too long.
        """
        model = summarizer(decoder)
        texts = exchanges(decoder, task, demonstrations)
        texts[0] = task.template.opening + texts[0]
        ids = encode_without_special_tokens(decoder, texts)
        with torch.no_grad():
            segments = model.segments(ids, decoder.encoder.leading_ids, self.config.segment)
            return model.predictor(task, model.summaries(segments))


def summarizer(decoder: Decoder) -> Summarizer:
    """Return a model with its summary embeddings.

    Raises:
        I2CLError: if the model is not an AutoCompressor, or the embeddings have the wrong shape.
    """
    require_model_type(decoder, AutoCompressor.name, HAS_POSITIONS)
    hint = "give an AutoCompressor as MODEL, such as princeton-nlp/AutoCompressor-Llama-2-7b-6k"
    compressor = Compressor.of_checkpoint(decoder, AutoCompressor.name, lambda name: name == SUMMARY, hint)
    config, width = decoder.model.config, decoder.embed((0,)).shape[1]
    embeddings = compressor.tensor(SUMMARY, getattr(config, "summary_length", -1), width)
    return Summarizer(decoder, cast(decoder, embeddings), bool(getattr(config, "accumulate_summary", True)))
