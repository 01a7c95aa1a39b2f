"""ICAE: the demonstrations as memory slots that the model wrote with an adapter on, and reads without it.

Source: Ge et al. 2024, https://arxiv.org/abs/2307.06945, and the two releases of its checkpoints.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.compressors import base
from i2cl.methods.compressors.base import BehindVectors, Compressor
from i2cl.models.batching import Batch, Ids
from i2cl.models.checkpoint import folder_of, read_tensors
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States, add_to_outputs
from i2cl.models.encoding import TruncationWarning
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

VERSIONS = {"llama": "1", "mistral": "2"}  # the release that a model type belongs to
CUT = 512  # tokens of the context that version 1 reads
RATE = 4  # tokens to a memory slot that version 2 aims at
MEMORY = "memory_token_embed.weight"
AFTER_MEMORY = ("ae", "lm", "ft")  # further rows of the memory's embeddings, in this order
FILES = ("icae.safetensors", "icae.pt")  # what a compressor beside a model's weights is called
PAIR = re.compile(r"icae\.base_model\.model\.(?P<module>.+)\.lora_A\.default\.weight")


class ICAEConfig(Settings):
    """The compressor, and how it is used."""

    # its file, here or as owner/repository/file of the hub; default: icae.safetensors or icae.pt beside
    # MODEL's weights
    compressor: str | None = None
    version: Literal["auto", "1", "2"] = "auto"  # of the release; default: 1 for Llama, 2 for Mistral
    # what stands around a query: ``ft`` as after instruction tuning, ``lm`` one vector in front of it,
    # ``bare`` nothing
    form: Literal["ft", "lm", "bare"] = "ft"
    memory: int | None = Field(None, ge=1)  # slots of a segment; default: as the file has it
    alpha: float = Field(32.0, gt=0)  # of the adapter, which acts by alpha / rank
    # version 2, ``ft``: token ids in front of the slots, spaces between (default: Mistral's [INST])
    left: str = Field("1 733 16289 28793", pattern=r"^\d*( \d+)*$")
    right: str = Field("733 28748 16289 28793", pattern=r"^\d*( \d+)*$")  # the same, behind the query


class PutIn(Edit):
    """A vector in place of the input embedding of each query's last token."""

    site = "embeddings"

    def __init__(self, vector: Float[Tensor, " d"]) -> None:
        self.vector = vector

    def output(self, _layer: int, _index: int, output: States, batch: Batch) -> States:
        """The vector there, the tokens' own embeddings elsewhere."""
        here: Bool[Tensor, "lines tokens"] = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        here[0 if batch.packed else torch.arange(len(here)), batch.last] = True
        return torch.where(here[..., None], self.vector, output)


@dataclass(frozen=True)
class AutoEncoder:
    """A frozen model with what makes it write memory slots. ``embeddings`` are those of the memory, then of
    ae, lm and ft; the adapter has pairs (rank x in) and (out x rank) by module, the scale in the second.
    """

    decoder: Decoder
    embeddings: Float[Tensor, "m_and_3 d"]
    adapter: Mapping[str, tuple[Tensor, Tensor]]
    version: Literal["1", "2"]

    @property
    def memory(self) -> Float[Tensor, "m d"]:
        """Input embeddings of the memory."""
        return self.embeddings[: -len(AFTER_MEMORY)]

    def special(self, name: str) -> Float[Tensor, "1 d"]:
        """The input embedding ae, lm or ft."""
        place = len(self.memory) + AFTER_MEMORY.index(name)
        return self.embeddings[place : place + 1]

    @contextmanager
    def adapted(self) -> Iterator[None]:
        """The model with its adapter on while the block runs."""
        model, pairs = self.decoder.model, self.adapter.items()
        modules = [(model.get_submodule(name), partial(_low_rank, *pair)) for name, pair in pairs]
        with self.decoder.frozen(), add_to_outputs(modules):
            yield

    def segments(self, context: Ids) -> list[Ids]:
        """What is encoded apart: all at once, cut (version 1); or equal parts (version 2)."""
        if self.version == "1":
            if len(context) > CUT:
                message = f"1 of 1 contexts was cut from {len(context)} to {CUT} tokens, all that ICAE reads"
                warnings.warn(message, TruncationWarning, stacklevel=3)
            return [context[:CUT]]
        parts = math.ceil(len(context) / (RATE * len(self.memory)))
        size = math.ceil(len(context) / parts)
        return [context[start : start + size] for start in range(0, len(context), size)]

    def slots(self, segments: Sequence[Ids]) -> Float[Tensor, "slots d"]:
        """The memory slots of some segments, in order; raises I2CLError if one and its slots are too long."""
        longest, limit = max(map(len, segments)) + len(self.memory), self.decoder.max_length
        if limit is not None and longest > limit:
            sizes = f"{longest} places, and the context holds {limit}"
            raise I2CLError(f"a segment and its memory take {sizes}: use fewer or shorter demonstrations")
        with self.adapted():
            wholes = (torch.cat([self.decoder.embed(ids), self.memory]) for ids in segments)
            return torch.cat([self.decoder.read(whole)[-len(self.memory) :] for whole in wholes])


@dataclass(frozen=True)
class ICAE(Method):
    """Reads all demonstrations once with the adapter on and keeps the slots' keys and values."""

    name: ClassVar[str] = "icae"
    summary: ClassVar[str] = "demonstrations as memory slots, written by the model with an adapter on"
    row: ClassVar[str] = "ICAE"
    needs = "demonstrations, a compressor for MODEL (adapter and memory, 0.15B to 0.2B numbers)"
    formula: ClassVar[str] = "2(M/K)DL"
    settings = (ICAEConfig,)
    config: ICAEConfig = field(default_factory=ICAEConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> BehindVectors:
        """Write the slots, then run them. Raises I2CLError without a compressor, or on a full context."""
        encoder = auto_encoder(decoder, self.config)
        text = task.template.opening + "".join(base.exchanges(decoder, task, demonstrations))
        with torch.no_grad():
            slots = encoder.slots(encoder.segments(decoder.encoder([text])[0]))
            return behind_slots(encoder, task, slots, self.config)


def behind_slots(
    encoder: AutoEncoder, task: Task, slots: Float[Tensor, "slots d"], config: ICAEConfig
) -> BehindVectors:
    """A task whose queries stand behind memory slots; raises I2CLError if these do not fit the model."""
    decoder, edit = encoder.decoder, None
    right: Ids = ()
    parts = [slots] if config.form == "bare" else [slots, encoder.special(config.form)]
    if config.form == "ft" and encoder.version == "1":
        right, edit = (0,), PutIn(encoder.special("ft")[0])  # whatever token stands there
    elif config.form == "ft":
        left, right = (_ids(decoder, given) for given in (config.left, config.right))
        parts = [decoder.embed(left), *parts]
    whole = torch.cat(parts)
    if decoder.max_length is not None and len(whole) + len(right) >= decoder.max_length:
        cure = "use fewer demonstrations"
        raise I2CLError(f"the memory slots take {len(whole)} of {decoder.max_length} places: {cure}")
    prefix = decoder.prefix_of(whole)
    return BehindVectors(base.asked_behind(decoder, task), prefix, right, edit, Cost.of(prefix))


def auto_encoder(decoder: Decoder, config: ICAEConfig) -> AutoEncoder:
    """A model with a compressor of its own; raises I2CLError if none is given, or it does not fit."""
    base.require_type(decoder, ICAE.name, VERSIONS)
    ours = None if config.compressor else base.bundled(decoder, ICAE.name)
    name = "the bundled file" if ours else config.compressor or _beside(decoder)
    version: Any = VERSIONS[decoder.model.config.model_type] if config.version == "auto" else config.version
    compressor = ours or Compressor({}, read_tensors(name, lambda one: one == MEMORY or ".lora_" in one))
    rows = -1 if config.memory is None else config.memory + len(AFTER_MEMORY)
    memory = compressor.tensor(MEMORY, rows, decoder.d_model)
    if len(memory) <= len(AFTER_MEMORY):
        raise I2CLError(f"{name!r} holds {len(memory)} memory embeddings: give another file")
    adapter = dict(_pairs(decoder, compressor, config.alpha))
    if len(adapter) != 2 * decoder.layers:
        projections = f"{len(adapter)} projections, and {decoder.name!r} has {2 * decoder.layers}"
        raise I2CLError(f"{name!r} adapts {projections}: {base.TOGETHER}")
    return AutoEncoder(decoder, _like(decoder, memory), adapter, version)


def _beside(decoder: Decoder) -> str:
    folder = folder_of(decoder.model)
    files = [folder / name for name in FILES if (folder / name).is_file()] if folder else []
    if files:
        return str(files[0])
    raise base.NoCompressorError(
        f"icae needs a compressor for {decoder.name!r}: give --set compressor=FILE or owner/repository/file "
        f"of the hub, or put it beside the model's weights as {FILES[0]}"
    )


def _pairs(
    decoder: Decoder, compressor: Compressor, alpha: float
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    for name in compressor.tensors:
        match = PAIR.fullmatch(name)
        if match is None:
            continue
        try:
            module: Any = decoder.model.get_submodule(match["module"])
        except AttributeError:
            what = f"{match['module']}, which {decoder.name!r} has not"
            raise I2CLError(f"the compressor adapts {what}: {base.TOGETHER}") from None
        first = compressor.tensor(name, -1, module.in_features)
        rank = len(first)
        second = compressor.tensor(name.replace("lora_A", "lora_B"), module.out_features, rank)
        yield match["module"], (_like(decoder, first), _like(decoder, second) * (alpha / rank))


def _like(decoder: Decoder, tensor: Tensor) -> Tensor:
    return tensor.to(decoder.device, decoder.model.dtype)


def _low_rank(first: Tensor, second: Tensor, states: Tensor) -> Tensor:
    inner = torch.nn.functional.linear(states, first.to(states.device))
    return torch.nn.functional.linear(inner, second.to(states.device))


def _ids(decoder: Decoder, given: str) -> Ids:
    words: Any = decoder.model.get_input_embeddings()
    ids, size = tuple(map(int, given.split())), words.num_embeddings
    if any(one >= size for one in ids):
        what = f"token id {max(ids)} of the form is none of {decoder.name!r}, which has {size}"
        raise I2CLError(f"{what}: give left= and right= for this model, or form=lm")
    return ids
