"""CEPE: a small encoder reads demonstrations in parallel; the decoder attends to its states.

Source: Yen, Gao and Chen 2024, https://arxiv.org/abs/2402.16617, and the released checkpoints.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaModel

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.compressors.base import (
    Compressor,
    cast,
    encode_without_special_tokens,
    exchanges,
    require_model_type,
)
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.batching import Batch, Ids, budget_chunks, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.encoding import TruncationWarning
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task

MAX_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class CrossLayer:
    """Weights of one cross-attention layer: its norm and four projections."""

    norm: Float[Tensor, " d"]
    q: Float[Tensor, "heads_and_size d"]
    k: Float[Tensor, "kv_width width"]
    v: Float[Tensor, "kv_width width"]
    o: Float[Tensor, "d heads_and_size"]


class CrossAttention(Edit):
    """Adds cross-attention to encoder states after the self-attention of each layer.

    Keys and values are recomputed for every batch: storing them for all layers would take far more memory
    than the states.
    """

    sees_input = True

    def __init__(
        self, layers: Mapping[int, CrossLayer], states: Float[Tensor, "tokens width"], heads: int, eps: float
    ) -> None:
        self.layers = layers
        self.states = states
        self.heads, self.eps = heads, eps
        self._residual = states  # replaced in every layer

    def enter(self, _layer: int, residual: States) -> None:
        """Store the residual stream that the self-attention's output will be added to."""
        self._residual = residual

    def output(self, layer: int, index: int, output: States, _batch: Batch) -> States | None:
        """Add cross-attention to the output of self-attention; the MLP's output is unchanged."""
        cross = self.layers.get(layer)
        if index == 1 or cross is None:
            return None
        device = output.device
        residual = self._residual.to(device) + output
        normed = rms_norm(residual, (residual.shape[-1],), cross.norm.to(device), self.eps)
        queries = self._split_heads(linear(normed, cross.q.to(device)), cross)
        keys, values = (
            self._split_heads(linear(self.states, weight)[None], cross).to(device)
            for weight in (cross.k, cross.v)
        )
        attention = scaled_dot_product_attention(
            queries,
            keys.expand(len(residual), -1, -1, -1),
            values.expand(len(residual), -1, -1, -1),
            enable_gqa=True,
        )
        added: Tensor = linear(attention.transpose(1, 2).flatten(2), cross.o.to(device))
        return output + added

    def _split_heads(self, projected: Float[Tensor, "lines tokens width"], cross: CrossLayer) -> Tensor:
        """Reshape to (lines, heads, tokens, head width)."""
        heads: Tensor = projected.unflatten(-1, (-1, len(cross.q) // self.heads)).transpose(1, 2)
        return heads


@dataclass(frozen=True)
class ContextEncoder:
    """A bidirectional encoder, and the decoder's cross-attention layers.

    Attributes:
        encoder: the encoder.
        layers: cross-attention weights by decoder layer.
        heads: number of attention heads of the decoder.
        eps: epsilon of the RMS norm.
        budget: maximum number of padded tokens in a batch.
    """

    encoder: LlamaModel
    layers: Mapping[int, CrossLayer]
    heads: int
    eps: float
    budget: int

    def states(self, chunks: Sequence[Ids]) -> Float[Tensor, "tokens width"]:
        """Return the last hidden states of all chunks, encoded separately and concatenated."""
        states: dict[int, Tensor] = {}
        for rows in budget_chunks(chunks, self.budget):
            batch = make_batch([chunks[row] for row in rows], self.encoder.device)
            positions = torch.arange(batch.input_ids.shape[1], device=self.encoder.device)
            is_token = (positions <= batch.last[:, None])[:, None, None]
            mask = is_token.expand(-1, 1, len(positions), -1)  # bidirectional within a chunk
            output = self.encoder(input_ids=batch.input_ids, attention_mask=mask, use_cache=False)
            for row, hidden in zip(rows, output.last_hidden_state, strict=True):
                states[row] = hidden[: len(chunks[row])]
        return torch.cat([states[row] for row in range(len(chunks))])


@dataclass(frozen=True)
class CEPE(Method):
    """Encodes each demonstration separately, once per task; queries attend to all of their states."""

    name = "cepe"
    summary = "demonstrations encoded by a small encoder, read by cross-attention"
    needs = "demonstrations, a CEPE model as MODEL (1.8B more: 20,000 steps of 128 sequences)"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Encode the demonstrations. Raises I2CLError if the model is not a CEPE model."""
        encoder = context_encoder(decoder)
        texts = exchanges(decoder, task, demonstrations)
        chunks = _truncate(encode_without_special_tokens(decoder, texts), task)
        with torch.no_grad():
            edit = CrossAttention(encoder.layers, encoder.states(chunks), encoder.heads, encoder.eps)
        return PromptPredictor(LabelScorer(decoder, task), edit=edit, cost=Cost.of(edit.states))


def _truncate(chunks: Sequence[Ids], task: Task) -> list[Ids]:
    """Keep the last tokens of each chunk, with a warning if any is too long."""
    count = sum(len(ids) > MAX_CHUNK_TOKENS for ids in chunks)
    if count:
        demonstrations = f"{count} of {len(chunks)} demonstrations"
        message = f"{task.name}: {demonstrations} were cut to their last {MAX_CHUNK_TOKENS} tokens"
        warnings.warn(message, TruncationWarning, stacklevel=3)
    return [ids[-MAX_CHUNK_TOKENS:] for ids in chunks]


# Encoders by model, device and dtype. They must not reference the model, which would then never be freed.
_ENCODERS: WeakKeyDictionary[nn.Module, dict[tuple[torch.device, torch.dtype], ContextEncoder]]
_ENCODERS = WeakKeyDictionary()


def context_encoder(decoder: Decoder) -> ContextEncoder:
    """Return the encoder of a model, loaded once.

    Raises:
        I2CLError: if the model is not a CEPE model, or its tensors are missing or have the wrong shape.
    """
    encoders, key = _ENCODERS.setdefault(decoder.model, {}), (decoder.device, decoder.model.dtype)
    if key not in encoders:
        encoders[key] = _load(decoder)
    return encoders[key]


def _load(decoder: Decoder) -> ContextEncoder:
    require_model_type(decoder, CEPE.name, {"llama"})
    compressor = Compressor.of_checkpoint(
        decoder,
        CEPE.name,
        lambda name: name.startswith("encoder.") or ".cross_attn." in name,
        "give a CEPE model as MODEL, such as hyen/CEPE-LLaMA-2-7B",
    )
    config: Any = decoder.model.config
    count, fields = (getattr(config, name, None) for name in ("num_cross_attn_layers", "encoder_config"))
    if not isinstance(count, int) or not 0 < count <= decoder.layers or not isinstance(fields, dict):
        raise I2CLError(
            f"the config.json of {decoder.name!r} has no encoder_config, or no num_cross_attn_layers from 1 "
            f"to {decoder.layers}: download it again"
        )
    encoder = LlamaModel(LlamaConfig.from_dict({**fields, "attn_implementation": "sdpa"}))
    state = encoder.state_dict().items()
    encoder.load_state_dict(
        {name: compressor.tensor(f"encoder.{name}", *value.shape) for name, value in state}
    )
    encoder = encoder.eval().requires_grad_(False).to(decoder.device, decoder.model.dtype)
    head_width = getattr(config, "head_dim", None) or decoder.d_model // config.num_attention_heads
    query_width, key_width = (
        head_width * count for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    shapes = {
        "layernorm": (decoder.d_model,),
        "q_proj": (query_width, decoder.d_model),
        "k_proj": (key_width, encoder.config.hidden_size),
        "v_proj": (key_width, encoder.config.hidden_size),
        "o_proj": (decoder.d_model, query_width),
    }

    def load_layer(layer: int) -> CrossLayer:
        module = f"model.layers.{layer}.cross_attn"
        tensors = (compressor.tensor(f"{module}.{name}.weight", *shape) for name, shape in shapes.items())
        return CrossLayer(*(cast(decoder, tensor) for tensor in tensors))

    layers = {layer: load_layer(layer) for layer in range(decoder.layers - count, decoder.layers)}
    heads, eps = config.num_attention_heads, config.rms_norm_eps
    return ContextEncoder(encoder, layers, heads, eps, decoder.token_budget)
