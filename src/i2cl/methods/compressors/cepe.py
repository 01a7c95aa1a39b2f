"""CEPE: demonstrations read in parallel by a small encoder, which the decoder attends to in further layers.

Source: Yen, Gao and Chen 2024, https://arxiv.org/abs/2402.16617, and the released checkpoints.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaModel

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.compressors.base import Compressor, bare, beside, bundled, exchanges, once, require_type
from i2cl.methods.prompts import PromptPredictor, shared_ids
from i2cl.models.batching import Batch, Ids, budget_chunks, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.encoding import TruncationWarning
from i2cl.models.scoring import Progress, Questions
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

CHUNK = 256  # tokens of a chunk, at most


class CEPEConfig(Settings):
    """So many demonstrations stand ``in_decoder``, as text (2 in the release), the others are chunks."""

    in_decoder: int = Field(0, ge=0)


@dataclass(frozen=True)
class CrossLayer:
    """What a layer attends to states with: its norm, and the four projections of its attention."""

    norm: Float[Tensor, " d"]
    q: Float[Tensor, "heads_and_size d"]
    k: Float[Tensor, "kv_width width"]
    v: Float[Tensor, "kv_width width"]
    o: Float[Tensor, "d heads_and_size"]


class CrossAttention(Edit):
    """Adds to what a layer's attention writes the cross-attention of the stream behind it to some states.
    The keys and values of all layers are made at once, so that a batch costs only the attention itself.
    """

    sees_input = True

    def __init__(
        self, layers: Mapping[int, CrossLayer], states: Float[Tensor, "tokens width"], heads: int, eps: float
    ) -> None:
        self.layers = layers if len(states) else {}
        self.heads, self.eps = heads, eps
        self._read = {
            number: [self._split(linear(states, weight)[None], cross) for weight in (cross.k, cross.v)]
            for number, cross in self.layers.items()
        }
        self._residual = states

    def enter(self, _layer: int, residual: States) -> None:
        """Remember the stream: attention adds to it."""
        self._residual = residual

    def output(self, layer: int, index: int, output: States, _batch: Batch) -> States | None:
        """Attention's own output and the cross-attention of their sum; nothing else of the MLP's."""
        cross = self.layers.get(layer)
        if index == 1 or cross is None:
            return None
        stream, where = self._residual.to(output.device) + output, output.device
        normed = rms_norm(stream, (stream.shape[-1],), cross.norm.to(where), self.eps)
        queries = self._split(linear(normed, cross.q.to(where)), cross)
        keys, values = (one.to(where).expand(len(stream), -1, -1, -1) for one in self._read[layer])
        attention = scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        written: Tensor = linear(attention.transpose(1, 2).flatten(2), cross.o.to(where))
        return output + written

    def _split(self, wide: Float[Tensor, "lines tokens wide"], cross: CrossLayer) -> Tensor:
        """By heads: (lines, heads, tokens, size)."""
        heads: Tensor = wide.unflatten(-1, (-1, len(cross.q) // self.heads)).transpose(1, 2)
        return heads


@dataclass(frozen=True)
class ContextEncoder:
    """A bidirectional encoder and the decoder's layers that read it; ``budget`` is in padded tokens."""

    encoder: LlamaModel
    layers: Mapping[int, CrossLayer]
    heads: int
    eps: float
    budget: int

    def states(self, chunks: Sequence[Ids]) -> Float[Tensor, "tokens width"]:
        """The encoder's output behind its final norm: each chunk by itself, one behind the other."""
        states: dict[int, Tensor] = {}
        for rows in budget_chunks(chunks, self.budget):
            batch = make_batch([chunks[row] for row in rows], self.encoder.device)
            places = torch.arange(batch.input_ids.shape[1], device=self.encoder.device)
            real = (places <= batch.last[:, None])[:, None, None]  # every token sees all of its chunk
            mask = real.expand(-1, 1, len(places), -1)
            output = self.encoder(input_ids=batch.input_ids, attention_mask=mask, use_cache=False)
            each = zip(rows, output.last_hidden_state, strict=True)
            states |= {row: one[: len(chunks[row])] for row, one in each}
        none = torch.empty(0, self.encoder.config.hidden_size, device=self.encoder.device)
        return torch.cat([none.to(self.encoder.dtype), *(states[row] for row in range(len(chunks)))])

    def edit(self, states: Float[Tensor, "tokens width"]) -> CrossAttention:
        """Lets the decoder attend to the states."""
        return CrossAttention(self.layers, states, self.heads, self.eps)


@dataclass(frozen=True)
class CrossPredictor:
    """Scores label words behind a prompt whose tokens attend to the states of demonstrations too."""

    prompt: PromptPredictor
    encoder: ContextEncoder
    states: Float[Tensor, "tokens width"]
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word."""
        with torch.no_grad():
            edit = self.encoder.edit(self.states)
        return replace(self.prompt, edit=edit).scores(texts, progress)


@dataclass(frozen=True)
class CEPE(Method):
    """Encodes each demonstration by itself once; queries attend to all of their states."""

    name: ClassVar[str] = "cepe"
    summary: ClassVar[str] = "demonstrations read by a small encoder, attended to in further layers"
    row: ClassVar[str] = "CEPE"
    needs: ClassVar[str] = "demonstrations, a CEPE model as MODEL (1.8B more: 20,000 steps of 128 sequences)"
    formula: ClassVar[str] = "2(M/K)DL"
    settings = (CEPEConfig,)
    config: CEPEConfig = field(default_factory=CEPEConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> CrossPredictor:
        """Raises I2CLError if MODEL is no CEPE model, or what stands before queries exceeds the context."""
        encoder = context_encoder(decoder)
        first = demonstrations[: self.config.in_decoder]
        chunks = _ends(bare(decoder, exchanges(decoder, task, demonstrations)[len(first) :]), task)
        shown = tuple((decoder.encoder.literal(one.text), task.labels[one.label]) for one in first)
        questions = Questions(decoder, task)
        with torch.no_grad():
            states = encoder.states(chunks)
            edit = encoder.edit(states)
            prefix = decoder.prefix(shared_ids(questions, shown), edit=edit) if shown else None
        prompt = PromptPredictor(questions, shown, prefix)
        return CrossPredictor(prompt, encoder, states, Cost.of(states, prefix))


def _ends(chunks: Sequence[Ids], task: Task) -> list[Ids]:
    """The last tokens of each chunk, as many as the encoder reads."""
    cut = sum(len(ids) > CHUNK for ids in chunks)
    if cut:
        message = f"{task.name}: {cut} of {len(chunks)} demonstrations were cut to their last {CHUNK} tokens"
        warnings.warn(message, TruncationWarning, stacklevel=3)
    return [ids[-CHUNK:] for ids in chunks]


def context_encoder(decoder: Decoder) -> ContextEncoder:
    """The encoder beside a model, loaded once; raises I2CLError if there is none, or it does not fit."""
    require_type(decoder, CEPE.name, {"llama"})
    return once(decoder, CEPE.name, lambda: _loaded(decoder))


def _loaded(decoder: Decoder) -> ContextEncoder:
    wanted = lambda name: name.startswith("encoder.") or ".cross_attn." in name  # noqa: E731
    cure = "give a CEPE model as MODEL, such as hyen/CEPE-LLaMA-2-7B"
    compressor = bundled(decoder, CEPE.name) or beside(decoder, CEPE.name, wanted, cure)
    count, fields = map(compressor.settings.get, ("num_cross_attn_layers", "encoder_config"))
    if not isinstance(count, int) or not 0 < count <= decoder.layers or not isinstance(fields, dict):
        what = f"no encoder_config, or no num_cross_attn_layers from 1 to {decoder.layers}"
        raise I2CLError(f"the config.json of {decoder.name!r} tells {what}: download it again")
    encoder = LlamaModel(LlamaConfig.from_dict({**fields, "attn_implementation": "sdpa"}))
    state = encoder.state_dict().items()
    encoder.load_state_dict({name: compressor.tensor(f"encoder.{name}", *one.shape) for name, one in state})
    encoder = encoder.eval().requires_grad_(False).to(decoder.device, decoder.model.dtype)
    last, width = range(decoder.layers - count, decoder.layers), encoder.config.hidden_size
    layers = {number: _layer(decoder, compressor, number, width) for number in last}
    config: Any = decoder.model.config
    heads, eps = config.num_attention_heads, config.rms_norm_eps
    return ContextEncoder(encoder, layers, heads, eps, decoder.token_budget)


def _layer(decoder: Decoder, compressor: Compressor, number: int, width: int) -> CrossLayer:
    config: Any = decoder.model.config
    head_dim = getattr(config, "head_dim", None) or decoder.d_model // config.num_attention_heads
    wide, narrow = head_dim * config.num_attention_heads, head_dim * config.num_key_value_heads
    shapes = {
        "layernorm": (decoder.d_model,),
        "q_proj": (wide, decoder.d_model),
        "k_proj": (narrow, width),
        "v_proj": (narrow, width),
        "o_proj": (decoder.d_model, wide),
    }
    start = f"model.layers.{number}.cross_attn"
    tensors = [compressor.tensor(f"{start}.{name}.weight", *shape) for name, shape in shapes.items()]
    return CrossLayer(*(one.to(decoder.device, decoder.model.dtype) for one in tensors))
