"""A folded Llama as one GGUF file, for llama.cpp and what is built on it, written tensor by tensor.

llama.cpp's classes ``llama`` and ``granite`` read the biases of both writers if they are there, and compute
the same where granite's scales are 1 or left out
(https://github.com/ggml-org/llama.cpp/blob/master/src/models/granite.cpp). The file is called the latter:
transformers takes a ``llama`` and drops the biases without a word, and refuses a ``granite``.
llama.cpp rotates neighbouring values of a head, where transformers rotates those half a head apart: rows of
queries and keys change places
(https://github.com/ggml-org/llama.cpp/blob/master/conversion/llama.py says the same for its own converter).
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
from i2cl.errors import I2CLError, needs
from i2cl.export.calls import usage
from i2cl.export.checkpoint import checked_golden, source_of
from i2cl.export.folding import Folding, require_named, require_unbiased
from i2cl.export.gguf_vocabulary import Vocabulary
from i2cl.export.golden import GOLDEN_FIELD, Golden
from i2cl.models.decoder import Decoder
from i2cl.storage.atomic import new_file, public_name, require_new_file

# Names of ``gguf.GGMLQuantizationType``, by dtype.
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

ROTARY = "rope_freqs.weight"
CLASS = "granite"  # which of llama.cpp's classes runs the file
USAGE_FIELD = "i2cl.usage"  # key of how the file is asked, in Markdown


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
    """Write a GGUF file that makes llama.cpp do what the injected model does.

    Memory holds little more than one tensor of a base model on disk. The file appears when it is complete.
    Beside the model it holds the task's template and labels, and the golden values where some are given.

    Args:
        source: the base model: a decoder in memory, or the name of one.
        injection: at all positions, into the residual writers.
        output: a file that is not there yet.
        golden: makes what `i2cl.export.verify_gguf` compares with (`i2cl.export.make_golden`).
        revision: of the hub id.
        force: accept other weights of the same shape than those the injection was made on.
        dtype: of the matrices: float32, float16 or bfloat16; default: the source's. Vectors are in float32.
        tokenizer: False leaves the tokenizer out; the file then takes token ids alone.

    Raises:
        I2CLError: if the folded model is no Llama that llama.cpp knows, its tokenizer cannot be carried,
            the file cannot be written, or the package gguf is not installed; and as
            `i2cl.export.export_hf` does.
    """
    needs("GGUF", "gguf", "gguf")
    import gguf as package

    path = Path(output)
    require_new_file(path)
    require_unbiased(injection)
    require_named(injection, named=golden is not None)
    base = source_of(source, revision)
    folding = Folding(base.config, base.tensors, injection, base.tokenizer)
    weights = Weights(package, folding, dtype or folding.dtype)
    vocabulary = Vocabulary.of(base.tokenizer, folding.config.vocab_size) if tokenizer else None
    expected = checked_golden(golden, injection, source, base, folding, force=force)
    with new_file(path) as fresh:
        writer = package.GGUFWriter(fresh, CLASS)
        try:
            _write_names(writer, injection, strips=vocabulary is not None and vocabulary.strips)
            kind = TYPES[weights.dtype]
            writer.add_file_type(package.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
            weights.write_config(writer)
            if vocabulary is None:
                writer.add_tokenizer_model("none")
            else:
                vocabulary.write(writer, package.TokenType)
            if expected is not None:
                norms = folding.bias_norms()
                biases = {name: norms[old] for name, old in weights.names.items() if old in norms}
                made = expected.of_export("llama", weights.dtype, biases)
                writer.add_string(GOLDEN_FIELD, made.model_dump_json())
                if vocabulary is not None:
                    writer.add_string(USAGE_FIELD, usage(made, path.name, "gguf"))
            weights.write(writer)
        finally:
            writer.close()


class Weights:
    """The tensors of a GGUF file, in its order, each made when it is written. Raises I2CLError if llama.cpp's
    Llama lacks something that the folded model does.
    """

    def __init__(self, package: Any, folding: Folding, dtype: torch.dtype) -> None:
        if dtype not in TYPES:
            raise I2CLError(f"a GGUF file does not hold {dtype}: choose float32, float16 or bfloat16")
        config: Any = folding.config
        _require_llama(config, folding.source_config.model_type)
        self.folding = folding  # what they are made from
        self.dtype = dtype  # of matrices
        self._package = package
        self.head: int = config.head_dim
        # divisors of the frequencies, None for those of the base; what cosine and sine are multiplied by
        self.rotary, self.scaling = _rotary(config, self.head)
        table = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        self.names = {  # in the folded model, by their name in the file
            table.get_name(name, try_suffixes=(".weight", ".bias")): name
            for name in folding.shapes
            # a bias of zeros came with the switches of the class
            if not name.endswith(".bias") or name in folding.constants or folding.tensor(name).any()
        }

    def write_config(self, writer: Any) -> None:
        """Sizes, and what positions mean."""
        config: Any = self.folding.config
        writer.add_logit_scale(1.0)
        writer.add_vocab_size(config.vocab_size)
        rope = config.rope_parameters  # the context is that of frequencies of short texts
        long = rope["rope_type"] == "longrope"
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
        """Finish the file: its head, then tensor by tensor. Raises I2CLError on a value beyond the dtype."""
        shapes = {name: self.folding.shapes[old] for name, old in self.names.items()}
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
        """One of them, by its name in the file."""
        if name == ROTARY and self.rotary is not None:
            return self.rotary
        old = self.names[name]
        tensor = self.folding.tensor(old, self._dtype(self.folding.shapes[old])).cpu()
        if not tensor.isfinite().all():
            raise I2CLError(f"{old} has values that {self.dtype} does not hold: choose --dtype bfloat16")
        return neighbours(tensor, self.head) if ".q_proj." in old or ".k_proj." in old else tensor

    def _dtype(self, shape: torch.Size) -> torch.dtype:
        # llama.cpp adds and multiplies vectors in float32
        return self.dtype if len(shape) > 1 else torch.float32


def neighbours(rows: Float[Tensor, "rows ..."], head: int) -> Float[Tensor, "rows ..."]:
    """Rows of queries or keys, or of their bias, so that rotary pairs lie side by side in each head."""
    halves = rows.reshape(-1, 2, head // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _require_llama(config: PreTrainedConfig, source: str) -> None:
    if config.model_type != "llama":
        what = f"folds into a {config.model_type!r}, and only a 'llama' is written as GGUF"
    elif config.hidden_act not in {"silu", "swish"}:
        only = "llama.cpp's classes with all biases have silu alone"
        what = f"has the activation {config.hidden_act!r}, {only}"
    else:
        return
    raise I2CLError(f"a {source!r} model {what}: export it with --to hf")


def _rotary(config: Any, head: int) -> tuple[Float[Tensor, " pairs"] | None, float]:
    """Divisors of the plain frequencies, as transformers has them for short texts, and the scale."""
    made = LlamaRotaryEmbedding(config)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head, 2).double() / head)
    scaled = made.inv_freq.double().cpu()
    if scaled.shape != plain.shape:
        what = "it rotates part of each head, which llama.cpp's Llama does not"
        raise I2CLError(f"{what}: export it with --to hf")
    factors = plain / scaled
    return (None if (factors - 1).abs().max() < 1e-5 else factors.float()), float(made.attention_scaling)


def _as_numpy(tensor: Tensor) -> "np.ndarray[Any, Any]":
    flat = tensor.contiguous()  # numpy knows no bfloat16
    return flat.view(torch.int16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()


def _write_names(writer: Any, injection: Injection, *, strips: bool) -> None:
    """Of the model and the task. llama.cpp drops blanks behind added tokens in models named after Phi-3."""
    writer.add_name("i2cl phi-3" if strips else "i2cl")
    writer.add_finetune(injection.task.name)
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, public_name(injection.base.name))
    writer.add_string("i2cl.task", injection.task.name)
    template = injection.task.template
    writer.add_string("i2cl.template", template.opening + template.format)
    writer.add_array("i2cl.labels", list(injection.task.labels))
