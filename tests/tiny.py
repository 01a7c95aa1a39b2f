"""Tiny random models of every known model type, and a tokenizer to match, built in memory.

The weights are drawn large enough that every writer changes the residual stream and every token the
logits: with the usual initialisation a wrong hook could hide in rounding.
"""

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 300
WINDOW = 8
"""Tokens that a layer with a sliding window sees."""

_CORE = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_MODERN = _CORE | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_HEAD = _MODERN | {"head_dim": 8}
_GPT = _CORE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_MIXED = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": _CORE | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": _MODERN | {"logit_scale": 1.0},
    "cohere2": _HEAD | _MIXED | {"logit_scale": 1.0},
    "exaone4": _MODERN | _MIXED,
    "falcon": _CORE
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48}
    | {"max_position_embeddings": 1024},
    "gemma": _HEAD,
    "gemma2": _HEAD | _MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": _HEAD | _MIXED | {"query_pre_attn_scalar": 8},
    "glm": _HEAD,
    "glm4": _HEAD,
    "gpt2": _GPT,
    "gpt_neo": _CORE
    | {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "window_size": WINDOW}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 1024},
    "gpt_neox": {name: value for name, value in _MODERN.items() if name != "num_key_value_heads"},
    "gptj": _GPT | {"rotary_dim": 4},
    "granite": _MODERN
    | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.3}
    | {"logits_scaling": 2.0},
    "helium": _HEAD,
    "llama": _MODERN,
    "mistral": _HEAD | {"sliding_window": None},
    "mixtral": _MODERN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": _CORE | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    "nemotron": _HEAD,
    "olmo": _MODERN,
    "olmo2": _MODERN,
    "olmo3": _MODERN | _MIXED,
    "opt": _CORE
    | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32, "max_position_embeddings": 1024},
    "phi": _MODERN,
    "phi3": _MODERN,
    "qwen2": _MODERN,
    "qwen2_moe": _MODERN | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3": _HEAD,
    "qwen3_moe": _HEAD | _EXPERTS | {"num_experts": 4},
    "smollm3": _MODERN | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "stablelm": _MODERN,
    "starcoder2": _MODERN | {"sliding_window": None},
}

MODEL_TYPES = tuple(_CONFIGS)

CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in MODEL_TYPES} | {
    "cohere-qk_norm": ("cohere", {"use_qk_norm": True}),
    "falcon-alibi": ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-new_decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-sequential": ("falcon", {"parallel_attn": False, "multi_query": False}),
    "gemma2-softcapping": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 16}),
    "phi3-sliding": ("phi3", {"sliding_window": WINDOW}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2-sliding": ("starcoder2", {"sliding_window": WINDOW}),
}
"""Every model type plain, and the variants that change how a block adds or attends."""


def tiny_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A random model of width 32 in evaluation mode; ``overrides`` go into its config."""
    config = AutoConfig.for_model(model_type, **(_CONFIGS[model_type] | overrides))
    for name in list(config.to_dict()):
        if "dropout" in name or name.endswith("_pdrop"):
            setattr(config, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return redrawn(AutoModelForCausalLM.from_config(config)).to(dtype).eval()


def redrawn(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, its matrices drawn anew and its norms and biases moved off their defaults."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@cache
def _trained() -> str:
    sentences = [
        "Review: a warm and funny film\nSentiment: positive",
        "Review: a dull and lifeless film\nSentiment: negative",
        "Question: where is the longest river\nType: location",
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer.to_str()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text: `VOCABULARY` tokens, end of text 0, no padding token."""
    tokenizer = Tokenizer.from_str(_trained())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
