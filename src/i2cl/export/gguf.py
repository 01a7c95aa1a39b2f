"""Export a task as one GGUF file for llama.cpp: a folded Llama, written tensor by tensor.

llama.cpp's classes ``llama`` and ``granite`` load the biases of both sublayers if they are present, and
compute the same if granite's scales are 1 or absent
(https://github.com/ggml-org/llama.cpp/blob/master/src/models/granite.cpp). The file is declared as
``granite``: transformers loads a ``llama`` without its biases and without a warning, and refuses a
``granite``. llama.cpp rotates adjacent values of a head, transformers those half a head apart, so rows of
queries and keys are reordered, as llama.cpp's own converter does
(https://github.com/ggml-org/llama.cpp/blob/master/conversion/llama.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, require_packages
from i2cl.export.causal_lm import usage
from i2cl.export.checkpoint import open_base
from i2cl.export.folding import Folding
from i2cl.export.gguf_vocabulary import Vocabulary
from i2cl.export.golden import GOLDEN_KEY, Golden
from i2cl.models.decoder import Decoder
from i2cl.storage.atomic import new_file, public_name, require_new_file

# Names of ``gguf.GGMLQuantizationType``, by dtype.
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

ROTARY = "rope_freqs.weight"
ARCHITECTURE = "granite"  # llama.cpp's class that runs the file
USAGE_KEY = "i2cl.usage"  # metadata key of the usage text, in Markdown


def export_gguf(
    source: Decoder | str | Path,
    injection: Injection,
    output: str | Path,
    *,
    golden: Callable[[], Golden] | None = None,
    revision: str | None = None,
    force: bool = False,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
) -> None:
    """Write a GGUF file that makes llama.cpp compute what the injected model does.

    Its metadata hold the task's template and labels, how to score them (``i2cl.usage``), and the golden
    answers. Weights of a checkpoint on disk are read tensor by tensor.

    Args:
        source: the base model: a decoder, or the name of one.
        injection: fitted task, injected at all positions into the residual writers.
        output: a new file; it appears when it is complete.
        golden: returns golden answers (`make_golden`); called once it is known that the model can be folded.
        revision: of a hub id.
        force: accept other weights of the same shape than those the injection was fitted on.
        dtype: of the matrices: float32, float16 or bfloat16; default: the source's. Vectors are in float32.
        tokenizer: whether to include the tokenizer; without it, the file takes token ids only.

    Raises:
        I2CLError: if the folded model is not a Llama that llama.cpp supports, its tokenizer cannot be
            converted, the file cannot be written, or the package gguf is not installed; and as
            `export_causal_lm`.
    """
    require_packages("GGUF", "gguf", "gguf")
    import gguf as package

    path = Path(output)
    require_new_file(path)
    base = open_base(source, revision)
    folding = Folding(base.config, base.weights, injection, base.tokenizer)
    weights = Weights(package, folding, dtype or folding.dtype)
    vocabulary = Vocabulary.of(base.tokenizer, folding.config.vocab_size) if tokenizer else None
    base.require_base_of(injection, folding, force=force)
    answers = golden() if golden is not None else None
    with new_file(path) as fresh:
        writer = package.GGUFWriter(fresh, ARCHITECTURE)
        try:
            # llama.cpp drops whitespace after added tokens in models named after Phi-3
            name = "i2cl phi-3" if vocabulary is not None and vocabulary.strips else "i2cl"
            _write_metadata(writer, name, injection)
            kind = TYPES[weights.dtype]
            writer.add_file_type(package.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
            weights.write_config(writer)
            if vocabulary is None:
                writer.add_tokenizer_model("none")
            else:
                vocabulary.write(writer, package.TokenType)
                writer.add_string(USAGE_KEY, usage(injection, base.tokenizer, path.name, "gguf"))
            if answers is not None:
                nonzero = set(folding.nonzero_biases())
                biases = [name for name, folded in weights.names.items() if folded in nonzero]
                made = answers.of_export("gguf", weights.dtype, biases)
                writer.add_string(GOLDEN_KEY, made.model_dump_json())
            weights.write(writer)
        finally:
            writer.close()


class Weights:
    """The tensors of a GGUF file, each computed when it is written.

    Args:
        package: the module gguf.
        folding: the folded model.
        dtype: of the matrices.

    Attributes:
        names: names in the folded model, by the names in the file.
        head: dimension of each attention head.
        rotary: divisors of the rotary frequencies; None if these are the plain ones.
        scaling: factor of the rotary cosine and sine.

    Raises:
        I2CLError: if llama.cpp's Llama does not support something that the folded model has.
    """

    def __init__(self, package: Any, folding: Folding, dtype: torch.dtype) -> None:
        if dtype not in TYPES:
            raise I2CLError(f"a GGUF file does not hold {dtype}: choose float32, float16 or bfloat16")
        config: Any = folding.config
        _require_llama(config, folding.source_config.model_type)
        self.folding = folding
        self.dtype = dtype
        self._package = package
        self.head: int = config.head_dim
        self.rotary, self.scaling = _rotary(config, self.head)
        table = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        self.names = {
            table.get_name(name, try_suffixes=(".weight", ".bias")): name
            for name in folding.shapes
            # leave out the zero biases that only the config's switches added
            if not name.endswith(".bias") or name in folding.constants or folding.tensor(name).any()
        }

    def write_config(self, writer: Any) -> None:
        """Write sizes and rotary settings."""
        config: Any = self.folding.config
        writer.add_logit_scale(1.0)
        writer.add_vocab_size(config.vocab_size)
        rope = config.rope_parameters
        long = rope["rope_type"] == "longrope"  # the file has its frequencies of short texts
        length = rope["original_max_position_embeddings"] if long else config.max_position_embeddings
        writer.add_context_length(int(length))
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(self.head)
        writer.add_value_length(self.head)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(self.head)
        writer.add_rope_freq_base(rope["rope_theta"])
        if self.scaling != 1.0:
            writer.add_rope_scaling_attn_factors(self.scaling)

    def write(self, writer: Any) -> None:
        """Write the file's header and all tensors. Raises I2CLError on a value beyond the dtype's range."""
        shapes = {name: self.folding.shapes[folded] for name, folded in self.names.items()}
        if self.rotary is not None:
            shapes[ROTARY] = self.rotary.shape
        for name, shape in shapes.items():
            dtype = self._dtype(shape)
            kind, size = self._package.GGMLQuantizationType[TYPES[dtype]], shape.numel() * dtype.itemsize
            writer.add_tensor_info(name, tuple(shape), np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in shapes:
            writer.write_tensor_data(_as_numpy(self.tensor(name)))

    def tensor(self, name: str) -> Tensor:
        """Compute one tensor by its name in the file."""
        if name == ROTARY and self.rotary is not None:
            return self.rotary
        folded = self.names[name]
        tensor = self.folding.tensor(folded, self._dtype(self.folding.shapes[folded])).cpu()
        if not tensor.isfinite().all():
            raise I2CLError(f"{folded} has values beyond the range of {self.dtype}: choose --dtype bfloat16")
        is_rotated = ".q_proj." in folded or ".k_proj." in folded
        return adjacent_pairs(tensor, self.head) if is_rotated else tensor

    def _dtype(self, shape: torch.Size) -> torch.dtype:
        # llama.cpp adds and multiplies vectors in float32
        return self.dtype if len(shape) > 1 else torch.float32


def adjacent_pairs(rows: Float[Tensor, "rows ..."], head: int) -> Float[Tensor, "rows ..."]:
    """Reorder rows of queries or keys, or of their bias, so that rotary pairs are adjacent in each head."""
    halves = rows.reshape(-1, 2, head // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _require_llama(config: PreTrainedConfig, source: str) -> None:
    if config.model_type != "llama":
        what = f"folds into a {config.model_type!r}, and only a 'llama' can be written as GGUF"
    elif config.hidden_act not in {"silu", "swish"}:
        what = f"has the activation {config.hidden_act!r}, and llama.cpp's class with biases only has silu"
    else:
        return
    raise I2CLError(f"a {source!r} model {what}: export with --to classifier or causal-lm")


def _rotary(config: Any, head: int) -> tuple[Float[Tensor, " pairs"] | None, float]:
    """Return divisors of the plain frequencies, as transformers has them for short texts, and the scaling."""
    made = LlamaRotaryEmbedding(config)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head, 2).double() / head)
    scaled = made.inv_freq.double().cpu()
    if scaled.shape != plain.shape:
        what = "its rotary embedding is partial, which llama.cpp's Llama does not support"
        raise I2CLError(f"{what}: export with --to classifier or causal-lm")
    factors = plain / scaled
    return (None if (factors - 1).abs().max() < 1e-5 else factors.float()), float(made.attention_scaling)


def _as_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    flat = tensor.contiguous()  # numpy has no bfloat16
    return flat.view(torch.int16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()


def _write_metadata(writer: Any, name: str, injection: Injection) -> None:
    writer.add_name(name)
    writer.add_finetune(injection.task.name)
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, public_name(injection.base.name))
    writer.add_string("i2cl.task", injection.task.name)
    template = injection.task.template
    writer.add_string("i2cl.template", template.opening + template.format)
    writer.add_array("i2cl.labels", list(injection.task.labels))
