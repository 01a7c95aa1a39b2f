"""Export a task as one GGUF file for llama.cpp: a folded Llama, written tensor by tensor.

llama.cpp's classes ``llama`` and ``granite`` load the biases of both sublayers if they are present, and
compute the same if granite's scales are 1 or absent
(https://github.com/ggml-org/llama.cpp/blob/master/src/models/granite.cpp). The file is declared as
``granite``: transformers loads a ``llama`` without its biases and without a warning, and refuses a
``granite``. llama.cpp rotates adjacent values of a head, transformers those half a head apart, so rows of
queries and keys are reordered, as llama.cpp's own converter does
(https://github.com/ggml-org/llama.cpp/blob/master/conversion/llama.py).
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, require_packages
from i2cl.export.causal_lm import usage
from i2cl.export.folding import Folding
from i2cl.export.golden import GOLDEN_KEY, make_golden
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import PromptEncoder
from i2cl.storage.atomic import new_file, public_name, require_new_file

# Names of ``gguf.GGMLQuantizationType``, by dtype.
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

ROTARY = "rope_freqs.weight"
ARCHITECTURE = "granite"  # llama.cpp's class that runs the file
USAGE_KEY = "i2cl.usage"  # metadata key of the usage text, in Markdown
USE_CLASSIFIER = "export with --to classifier or causal-lm"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names of pre-tokenizers (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp),
# by their steps in tokenizer.json: the regular expression of a split, or the type of the step.
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_WORDS + r"|\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORDS + r"|\p{N}" + _REST,): "qwen2",
    (_CASED + r"|\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),): "tekken",
}


def export_gguf(
    decoder: Decoder,
    injection: Injection,
    output: str | Path,
    *,
    golden: bool = True,
    force: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a GGUF file that makes llama.cpp compute what the injected model does.

    Its metadata hold the task's template and labels, how to score them (``i2cl.usage``), and the golden
    answers. Other arguments and errors: see `export_classifier`. ``output`` is a new file, and
    ``dtype`` is float32, float16 or bfloat16. Vectors are in float32.

    Raises:
        I2CLError: if the folded model is not a Llama that llama.cpp supports, its tokenizer cannot be
            converted, the file cannot be written, or the package gguf is not installed.
    """
    require_packages("GGUF", "gguf", "gguf")
    from gguf import GGUFWriter

    path = Path(output)
    require_new_file(path)
    folding = Folding(decoder, injection, dtype=dtype, force=force)
    file = GgufModel(folding, decoder.tokenizer)
    template = injection.task.template
    strings = {
        "i2cl.task": injection.task.name,
        "i2cl.template": template.opening + template.format,
        USAGE_KEY: usage(injection, folding.labels, path.name, "gguf"),
    }
    if golden:
        answers = make_golden(decoder, injection).of_export("gguf", folding.dtype)
        strings[GOLDEN_KEY] = answers.model_dump_json()
    with new_file(path) as fresh:
        writer = GGUFWriter(fresh, ARCHITECTURE)
        try:
            writer.add_finetune(injection.task.name)
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, public_name(injection.base.name))
            writer.add_array("i2cl.labels", list(injection.task.labels))
            for key, text in strings.items():
                writer.add_string(key, text)
            file.write(writer)
        finally:
            writer.close()


class GgufModel:
    """The fields and tensors of a GGUF file; each tensor is computed when it is written.

    Args:
        folding: the folded model; its dtype is that of the matrices.
        tokenizer: tokenizer of the base model.

    Attributes:
        fields: values by the names of methods of ``gguf.GGUFWriter``, without ``add_``.
        names: names of tensors in the folded model, by their names in the file.
        rotary: divisors of the rotary frequencies; None if these are the plain ones.

    Raises:
        I2CLError: if llama.cpp's Llama does not support something that the folded model has.
    """

    def __init__(self, folding: Folding, tokenizer: PreTrainedTokenizerBase) -> None:
        gguf: Any = importlib.import_module("gguf")
        if folding.dtype not in TYPES:
            raise I2CLError(f"a GGUF file does not hold {folding.dtype}: choose float32, float16 or bfloat16")
        config: Any = folding.config
        require_llama(config, folding.source_config.model_type)
        self.folding = folding
        self.rotary, scaling = _rotary(config)
        rope, kind = config.rope_parameters, TYPES[folding.dtype]
        long = rope["rope_type"] == "longrope"  # the file has its frequencies of short texts
        length = rope["original_max_position_embeddings"] if long else config.max_position_embeddings
        self.fields = tokenizer_fields(tokenizer, config.vocab_size) | {
            "file_type": gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"],
            "logit_scale": 1.0,
            "vocab_size": config.vocab_size,
            "context_length": int(length),
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "head_count": config.num_attention_heads,
            "head_count_kv": config.num_key_value_heads,
            "key_length": config.head_dim,
            "value_length": config.head_dim,
            "layer_norm_rms_eps": config.rms_norm_eps,
            "rope_dimension_count": config.head_dim,
            "rope_freq_base": rope["rope_theta"],
        }
        if scaling != 1.0:
            self.fields["rope_scaling_attn_factors"] = scaling
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        self.names = {
            table.get_name(name, try_suffixes=(".weight", ".bias")): name
            for name in folding.shapes
            # leave out the zero biases that only the config's switches added
            if not name.endswith(".bias") or name in folding.constants or folding.tensor(name).any()
        }

    def write(self, writer: Any) -> None:
        """Write everything to a ``gguf.GGUFWriter``. Raises I2CLError on a value beyond the dtype's range."""
        gguf: Any = importlib.import_module("gguf")
        for name, value in self.fields.items():
            getattr(writer, f"add_{name}")(value)
        shapes = {name: self.folding.shapes[folded] for name, folded in self.names.items()}
        if self.rotary is not None:
            shapes[ROTARY] = self.rotary.shape
        for name, shape in shapes.items():
            dtype = self._dtype(shape)
            kind, size = gguf.GGMLQuantizationType[TYPES[dtype]], shape.numel() * dtype.itemsize
            writer.add_tensor_info(name, tuple(shape), np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in shapes:
            tensor = self.tensor(name).contiguous()  # numpy has no bfloat16
            tensor = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            writer.write_tensor_data(tensor.numpy())

    def tensor(self, name: str) -> Tensor:
        """Compute one tensor by its name in the file."""
        if name == ROTARY and self.rotary is not None:
            return self.rotary
        folded = self.names[name]
        tensor = self.folding.tensor(folded, self._dtype(self.folding.shapes[folded])).cpu()
        if not tensor.isfinite().all():
            dtype = self.folding.dtype
            raise I2CLError(f"{folded} has values beyond the range of {dtype}: choose --dtype bfloat16")
        is_rotated = ".q_proj." in folded or ".k_proj." in folded
        return adjacent_pairs(tensor, self.folding.config.head_dim) if is_rotated else tensor

    def _dtype(self, shape: torch.Size) -> torch.dtype:
        # llama.cpp adds and multiplies vectors in float32
        return self.folding.dtype if len(shape) > 1 else torch.float32


def adjacent_pairs(rows: Float[Tensor, "rows ..."], head: int) -> Float[Tensor, "rows ..."]:
    """Reorder rows of queries or keys, or of their bias, so that rotary pairs are adjacent in each head."""
    halves = rows.reshape(-1, 2, head // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def require_llama(config: PreTrainedConfig, source: str) -> None:
    """Raise I2CLError unless the folded model, made from one of type ``source``, is a Llama of llama.cpp."""
    if config.model_type != "llama":
        problem = f"folds into a {config.model_type!r}, and only a 'llama' can be written as GGUF"
    elif config.hidden_act not in {"silu", "swish"}:
        problem = f"has the activation {config.hidden_act!r}, and llama.cpp's class with biases only has silu"
    else:
        return
    raise I2CLError(f"a {source!r} model {problem}: {USE_CLASSIFIER}")


def _rotary(config: Any) -> tuple[Float[Tensor, " pairs"] | None, float]:
    """Return divisors of the plain frequencies, as transformers has them for short texts, and the scaling."""
    rotary, head = LlamaRotaryEmbedding(config), config.head_dim
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head, 2).double() / head)
    scaled = rotary.inv_freq.double().cpu()
    if scaled.shape != plain.shape:
        problem = "its rotary embedding is partial, which llama.cpp's Llama does not support"
        raise I2CLError(f"{problem}: {USE_CLASSIFIER}")
    factors = plain / scaled
    return (None if (factors - 1).abs().max() < 1e-5 else factors.float()), float(rotary.attention_scaling)


def tokenizer_fields(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, Any]:
    """Convert a tokenizer to the vocabulary of a GGUF file.

    llama.cpp supports two kinds that Llamas use: byte-level BPE with a known pre-tokenizer, and
    SentencePiece's BPE with scores.

    Args:
        tokenizer: to convert.
        size: number of tokens, including unused ones: the number of rows of the embedding.

    Returns:
        The values by the names of methods of ``gguf.GGUFWriter``, without ``add_``.

    Raises:
        I2CLError: if llama.cpp has no such tokenizer. `verify_gguf` compares token ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model, front = state.get("model", {}), PromptEncoder.of(tokenizer).leading_ids
    if model.get("type") != "BPE":
        raise _refusal("the tokenizer is not BPE")
    if len(front) > 1:
        raise _refusal(f"the tokenizer adds {len(front)} tokens before a text")
    if any(token["lstrip"] or token["single_word"] for token in state["added_tokens"]):
        raise _refusal("the tokenizer has added tokens that depend on the text before them")
    tokens, kinds = _tokens(state, size)
    fields: dict[str, Any] = {"name": "i2cl", "token_list": tokens, "token_types": kinds}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    steps = _steps(state, "normalizer", "normalizers") + _steps(state, "pre_tokenizer", "pretokenizers")
    if model["byte_fallback"]:
        # SentencePiece merges the pair whose token has the highest score: minus the rank of its first merge
        ranks = {pair.replace(" ", ""): rank for rank, pair in reversed(list(enumerate(merges)))}
        fields |= {"tokenizer_model": "llama", "tokenizer_pre": "default"}
        fields["token_scores"] = [-float(ranks.get(token, len(ranks))) for token in tokens]
        fields["add_space_prefix"] = _adds_space(steps)
    else:
        fields |= {"tokenizer_model": "gpt2", "tokenizer_pre": _pre_tokenizer(steps), "token_merges": merges}
        fields["add_space_prefix"] = False
    for role in ("bos", "eos", "unk", "pad"):
        if (token := getattr(tokenizer, f"{role}_token_id", None)) is not None:
            fields[f"{role}_token_id"] = token
    fields |= {"bos_token_id": front[0]} if front else {}
    fields |= {"add_bos_token": bool(front), "add_eos_token": False}
    if template := getattr(tokenizer, "chat_template", None):
        fields["chat_template"] = template
    if any(token["rstrip"] for token in state["added_tokens"]):
        # llama.cpp drops whitespace after added tokens in models named after Phi-3
        fields["name"] = "i2cl phi-3"
    return fields


def _refusal(problem: str) -> I2CLError:
    return I2CLError(f"{problem}, which llama.cpp does not support: {USE_CLASSIFIER}")


def _tokens(state: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return text and kind of every row of the embedding; tokens without a row are left out."""
    from gguf import TokenType

    model = state["model"]
    texts = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(texts, TokenType.NORMAL)
    if model["byte_fallback"]:
        is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
        kinds |= {number: TokenType.BYTE for number, text in texts.items() if is_byte(text)}
    for added in state["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if (unknown := model["vocab"].get(model.get("unk_token"))) is not None:
        kinds[unknown] = TokenType.UNKNOWN
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    if len(set(tokens)) < size:
        raise _refusal("the tokenizer has two ids for one text")
    return tokens, [kinds.get(number, TokenType.UNUSED) for number in range(size)]


def _steps(state: dict[str, Any], part: str, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    whole = state[part]
    return [] if whole is None else list(whole[parts]) if whole["type"] == "Sequence" else [whole]


def _pre_tokenizer(steps: list[dict[str, Any]]) -> str:
    """Return llama.cpp's name of a pre-tokenizer. Raises I2CLError if it has none."""
    # a ByteLevel without its regular expression does not split
    split = [step for step in steps if step["type"] != "NFC" and step.get("use_regex", True)]
    key = tuple(step.get("pattern", {}).get("Regex", step["type"]) for step in split)
    if key not in PRE_TOKENIZERS or any(step.get("add_prefix_space") or step.get("invert") for step in split):
        raise _refusal("the tokenizer has an unknown normalizer or pre-tokenizer")
    return PRE_TOKENIZERS[key]


def _adds_space(steps: list[dict[str, Any]]) -> bool:
    """Return whether SentencePiece adds a space before a text. Raises I2CLError on another tokenizer."""
    if not steps or any(step["type"] not in {"Prepend", "Replace", "Metaspace"} for step in steps):
        raise _refusal("the tokenizer has SentencePiece's bytes, but is not SentencePiece")
    return any(step.get("prepend_scheme", "always") != "never" for step in steps if step["type"] != "Replace")
