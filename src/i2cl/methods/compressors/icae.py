"""ICAE: demonstrations compressed into memory slots, written with an adapter and read without it.

Source: Ge et al. 2024, https://arxiv.org/abs/2307.06945, and the two releases of its checkpoints.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.methods.base import Method
from i2cl.methods.compressors.base import (
    MATCH_HINT,
    Compressor,
    NoCompressorError,
    SoftPromptPredictor,
    cast,
    exchanges,
    hidden_states,
    require_model_type,
    soft_prompt_prefix,
)
from i2cl.models.batching import Batch, Ids
from i2cl.models.checkpoint import checkpoint_folder, read_tensors
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States, add_to_outputs
from i2cl.models.encoding import TruncationWarning
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

VERSIONS: Mapping[str, Literal["1", "2"]] = {"llama": "1", "mistral": "2"}  # release by model type
MAX_CONTEXT_TOKENS = 512  # version 1
LORA_ALPHA = 32.0  # updates are scaled by alpha / rank
TOKENS_PER_SLOT = 4  # version 2 (approximately)
MEMORY = "memory_token_embed.weight"
SPECIAL_EMBEDDINGS = 3  # last rows of the memory embeddings; the last one marks a prompt
# Version 2: Mistral's token ids of "<s>[INST]" before the slots and of "[/INST]" after the query.
PROMPT_START, PROMPT_END = (1, 733, 16289, 28793), (733, 28748, 16289, 28793)
FILE_NAMES = ("icae.safetensors", "icae.pt")  # of a compressor in the model's folder
LORA_A_NAME = re.compile(r"icae\.base_model\.model\.(?P<module>.+)\.lora_A\.default\.weight")


class ICAEConfig(Settings):
    """The compressor's file."""

    # a file, or owner/repository/file on the hub. Default: icae.safetensors or icae.pt in the model's folder
    compressor: str | None = None


class ReplaceLastEmbedding(Edit):
    """Replaces the input embedding of each query's last token by a vector."""

    hook_point = "embeddings"

    def __init__(self, vector: Float[Tensor, " d"]) -> None:
        self.vector = vector

    def output(self, _layer: int, _index: int, output: States, batch: Batch) -> States:
        """Replace the embedding of the last tokens."""
        is_last: Bool[Tensor, "lines tokens"] = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        is_last[0 if batch.packed else torch.arange(len(is_last)), batch.last] = True
        return torch.where(is_last[..., None], self.vector, output)


@dataclass(frozen=True)
class AutoEncoder:
    """A frozen model with the compressor that makes it write memory slots.

    Attributes:
        decoder: the frozen model.
        memory: input embeddings of the memory tokens.
        prompt_mark: input embedding before a prompt ("ft" in the release).
        adapter: LoRA matrices A (rank x in) and B (out x rank) by module; B includes the scale.
        version: the release.
    """

    decoder: Decoder
    memory: Float[Tensor, "m d"]
    prompt_mark: Float[Tensor, "1 d"]
    adapter: Mapping[str, tuple[Tensor, Tensor]]
    version: Literal["1", "2"]

    @contextmanager
    def adapted(self) -> Iterator[None]:
        """Attach the adapter while the block runs."""
        model, pairs = self.decoder.model, self.adapter.items()
        modules = [(model.get_submodule(name), partial(_low_rank, *pair)) for name, pair in pairs]
        with self.decoder.frozen(), add_to_outputs(modules):
            yield

    def segments(self, context: Ids) -> list[Ids]:
        """Split a context into segments: one, truncated (version 1); or equal parts (version 2)."""
        if self.version == "1":
            if len(context) > MAX_CONTEXT_TOKENS:
                message = (
                    f"1 of 1 contexts was cut from {len(context)} to {MAX_CONTEXT_TOKENS} tokens, the "
                    "maximum of ICAE"
                )
                warnings.warn(message, TruncationWarning, stacklevel=3)
            return [context[:MAX_CONTEXT_TOKENS]]
        parts = math.ceil(len(context) / (TOKENS_PER_SLOT * len(self.memory)))
        size = math.ceil(len(context) / parts)
        return [context[start : start + size] for start in range(0, len(context), size)]

    def slots(self, segments: Sequence[Ids]) -> Float[Tensor, "slots d"]:
        """Return the memory slots of segments, in order. Raises I2CLError if a segment is too long."""
        longest, limit = max(map(len, segments)) + len(self.memory), self.decoder.max_length
        if limit is not None and longest > limit:
            raise I2CLError(
                f"a segment and its memory take {longest} positions, but the context holds {limit}: use "
                "fewer or shorter demonstrations"
            )
        with self.adapted():
            inputs = (torch.cat([self.decoder.embed(ids), self.memory]) for ids in segments)
            return torch.cat(
                [hidden_states(self.decoder, vectors)[-len(self.memory) :] for vectors in inputs]
            )


@dataclass(frozen=True)
class ICAE(Method):
    """Compresses the demonstrations into memory slots and caches the keys and values of the slots."""

    name = "icae"
    summary = "demonstrations as memory slots, written by the model with an adapter"
    needs = "demonstrations, a compressor for MODEL (adapter and memory, 0.15B to 0.2B numbers)"
    settings = (ICAEConfig,)
    config: ICAEConfig = field(default_factory=ICAEConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> SoftPromptPredictor:
        """Compress the demonstrations.

        Raises:
            I2CLError: if the model has no compressor, or the demonstrations are too long.
        """
        encoder = auto_encoder(decoder, self.config)
        text = task.template.opening + "".join(exchanges(decoder, task, demonstrations))
        with torch.no_grad():
            slots = encoder.slots(encoder.segments(decoder.encoder([text])[0]))
            return soft_prompt_predictor(encoder, task, slots)


def soft_prompt_predictor(
    encoder: AutoEncoder, task: Task, slots: Float[Tensor, "slots d"]
) -> SoftPromptPredictor:
    """Return a predictor that puts memory slots before each query, in the format of instruction tuning.

    Raises:
        I2CLError: if the slots fill the context.
    """
    decoder, edit = encoder.decoder, None
    suffix: Ids = PROMPT_END
    vectors = torch.cat([slots, encoder.prompt_mark])
    if encoder.version == "1":
        # version 1 ends a query with the mark, which replaces the embedding of a placeholder token
        suffix, edit = (0,), ReplaceLastEmbedding(encoder.prompt_mark[0])
    else:
        vectors = torch.cat([decoder.embed(PROMPT_START), vectors])
    if decoder.max_length is not None and len(vectors) + len(suffix) >= decoder.max_length:
        size = f"{len(vectors)} of {decoder.max_length} positions"
        raise I2CLError(f"the memory slots take {size}: use fewer demonstrations")
    return SoftPromptPredictor.of(decoder, task, soft_prompt_prefix(decoder, vectors), suffix, edit)


def auto_encoder(decoder: Decoder, config: ICAEConfig) -> AutoEncoder:
    """Return a model with its compressor.

    Raises:
        I2CLError: if the model has no compressor, or an incompatible one.
    """
    version = VERSIONS[require_model_type(decoder, ICAE.name, VERSIONS)]
    name = config.compressor or _find_file(decoder)
    compressor = Compressor(read_tensors(name, lambda key: key == MEMORY or ".lora_" in key))
    memory = compressor.tensor(MEMORY, -1, decoder.d_model)
    if len(memory) <= SPECIAL_EMBEDDINGS:
        raise I2CLError(f"{name!r} has only {len(memory)} memory embeddings: give another file")
    adapter = dict(_lora_matrices(decoder, compressor))
    if len(adapter) != 2 * decoder.layers:
        raise I2CLError(
            f"{name!r} adapts {len(adapter)} projections, but {decoder.name!r} has {2 * decoder.layers}: "
            f"{MATCH_HINT}"
        )
    memory = cast(decoder, memory)
    return AutoEncoder(decoder, memory[:-SPECIAL_EMBEDDINGS], memory[-1:], adapter, version)


def _find_file(decoder: Decoder) -> str:
    folder = checkpoint_folder(decoder.model)
    files = [folder / name for name in FILE_NAMES if (folder / name).is_file()] if folder else []
    if files:
        return str(files[0])
    raise NoCompressorError(
        f"icae needs a compressor for {decoder.name!r}: give --set compressor=FILE or owner/repository/file "
        f"of the hub, or put it into the model's folder as {FILE_NAMES[0]}"
    )


def _lora_matrices(decoder: Decoder, compressor: Compressor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield the name of each adapted module with its matrices A and B; B includes the scale."""
    for name in compressor.tensors:
        match = LORA_A_NAME.fullmatch(name)
        if match is None:
            continue
        try:
            module: Any = decoder.model.get_submodule(match["module"])
        except AttributeError:
            raise I2CLError(
                f"the compressor adapts {match['module']}, which {decoder.name!r} does not have: {MATCH_HINT}"
            ) from None
        lora_a = compressor.tensor(name, -1, module.in_features)
        rank = len(lora_a)
        lora_b = compressor.tensor(name.replace("lora_A", "lora_B"), module.out_features, rank)
        yield match["module"], (cast(decoder, lora_a), cast(decoder, lora_b) * (LORA_ALPHA / rank))


def _low_rank(lora_a: Tensor, lora_b: Tensor, states: Tensor) -> Tensor:
    """Return the LoRA update of a module's output."""
    inner = torch.nn.functional.linear(states, lora_a.to(states.device))
    return torch.nn.functional.linear(inner, lora_b.to(states.device))
