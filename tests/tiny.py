"""Tiny random models of every known model type, and a tokenizer to match, built in memory.

The weights are drawn large enough that every sublayer changes the residual stream and every token the
logits: with the usual initialisation a wrong hook could hide in rounding.
"""

import copy
from functools import cache
from itertools import product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 300
WINDOW = 8  # tokens that a layer with a sliding window sees

_CORE = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
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
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED = _ROUTED | {"n_group": 2, "topk_group": 1}
_LATENT = _MODERN | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
_LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
# Enough heads to avoid equal scores of two tokens; padding would decide which of the two is chosen.
_INDEXED = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": WINDOW}
_SPARSE_LATENT = _LATENT | _GROUPED | _INDEXED
_SPARSE = _HEAD | _WINDOWED | _EXPERTS
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_ROPE_LLAMA3 = _ROPE_YARN | {"rope_type": "llama3", "factor": 8.0}
_ROPE_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LIMIT = 24  # tokens beyond which `LONGROPE` turns positions by other angles
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 3.0, 6.0, 12.0]}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": LIMIT,
    "rope_parameters": _ROPE | _FACTORS | {"rope_type": "longrope"},
}
"""Config fields that turn a Phi-3 into one with a long context."""
_OLDER = _CORE | {"num_attention_heads": 4, "max_position_embeddings": 1024}

_ALIKE: tuple[tuple[dict[str, Any], str], ...] = (
    (_MODERN, "apertus arcee bitnet diffllama llama nanochat olmo olmo2 persimmon phi phi3 qwen2"),
    (_MODERN, "stablelm"),
    (_LATENT | _GROUPED, "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite"),
    (_SPARSE_LATENT, "axk2 deepseek_v32 glm_moe_dsa"),
    (_HEAD, "ernie4_5 gemma glm glm4 helium hunyuan_v1_dense internlm3 iquestcoder jais2"),
    (_HEAD, "ministral3 nemotron qwen3 seed_oss"),
    (_MODERN | _MIXED, "exaone4 olmo3"),
    (_GPT, "gpt2 gpt_bigcode"),
)
_CONFIGS = {name: config for config, names in _ALIKE for name in names.split()} | {
    "afmoe": _SPARSE | {"num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1},
    "aria_text": _MODERN | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "biogpt": _OLDER | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    "bloom": _CORE | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": _GPT | {"rotary_dim": 4},
    "cohere": _MODERN | {"logit_scale": 1.0},
    "cohere2": _HEAD | _MIXED | {"logit_scale": 1.0},
    "cohere2_moe": _HEAD
    | _WINDOWED
    | {"num_experts": 4, "num_experts_per_tok": 2, "logit_scale": 1.0, "first_k_dense_replace": 1},
    "cohere_compass_text": _MODERN
    | _WINDOWED
    | {"logit_scale": 1.0, "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "ctrl": _GPT | {"dff": 48},
    "cwm": _HEAD | _WINDOWED,
    "dbrx": _CORE
    | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024}
    | {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}}
    | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": _MODERN | _WINDOWED | _GROUPED,
    "dots3_note_text": _SPARSE_LATENT
    | _WINDOWED
    | {"layer_types": ["indexed_attention", "sliding_attention"], "head_dim": 12}
    | {"shared_experts_intermediate_size": 24}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 12, "swa_v_head_dim": 8}
    | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 8, "swa_qk_rope_head_dim": 4},
    "ernie4_5_moe": _MODERN
    | {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone_moe": _SPARSE | {"num_experts": 4, "num_shared_experts": 1, "n_group": 1},
    "falcon": _CORE
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48}
    | {"max_position_embeddings": 1024},
    "flex_olmo": _MODERN | {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": _SPARSE | {"num_experts": 4, "decoder_sparse_step": 2},
    "gemma2": _HEAD | _MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": _HEAD | _MIXED | {"query_pre_attn_scalar": 8},
    "glm4_moe": _HEAD | _GROUPED,
    "gpt_neo": _CORE
    | {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "window_size": WINDOW}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 1024},
    "gpt_neox": {name: value for name, value in _MODERN.items() if name != "num_key_value_heads"},
    "gpt_oss": _HEAD | _WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": _GPT | {"rotary_dim": 4},
    "granite": _MODERN
    | {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.3}
    | {"logits_scaling": 2.0},
    "granite_swa": _MODERN | _WINDOWED | {"residual_multiplier": 0.4},
    "granitemoe": _MODERN | {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.4},
    "granitemoehybrid": _MODERN
    | {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["full_attention"] * 2}
    | {"residual_multiplier": 0.4, "mamba_n_heads": 4, "position_embedding_type": "rope"},
    "hunyuan_v1_moe": _HEAD | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": _HEAD | _EXPERTS | {"num_experts": 4, "first_k_dense_replace": 1},
    "hyperclovax": _MODERN | {"residual_multiplier": 0.4, "use_post_norm": True},
    "jetmoe": _CORE
    | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    | {"kv_channels": 8, "num_local_experts": 4, "max_position_embeddings": 1024},
    "kolibri1": _SPARSE
    | {"num_experts": 4, "shared_expert_intermediate_size": 24, "n_group": 2, "topk_group": 1},
    "laguna": _SPARSE | {"num_experts": 4},
    "llama4_text": _HEAD
    | {"num_local_experts": 4, "intermediate_size_mlp": 48, "moe_layers": [1], "no_rope_layers": [1, 0]},
    "mellum": _SPARSE | {"num_experts": 4},
    "mimo_v2_flash": _SPARSE | {"n_routed_experts": 4},
    "minimax_m2": _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m3_vl_text": _HEAD
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}
    | {"dense_intermediate_size": 48, "shared_intermediate_size": 24, "rotary_dim": 4}
    | {"layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2, "index_head_dim": 8}
    | {"index_block_size": 2, "index_topk_blocks": 3},
    "ministral": _HEAD | _WINDOWED | {"layer_types": ["full_attention"] * 2},
    "mistral": _HEAD | {"sliding_window": None},
    "mixtral": _MODERN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "modernbert-decoder": _MODERN | _WINDOWED | {"pad_token_id": 0},
    "mpt": _CORE | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    "olmoe": _MODERN | {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": _CORE
    | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32, "max_position_embeddings": 1024},
    "phimoe": _MODERN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _MODERN | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": _HEAD | _EXPERTS | {"num_experts": 4},
    "smollm3": _MODERN | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "solar_open": _HEAD | _EXPERTS | {"n_routed_experts": 4},
    "starcoder2": _MODERN | {"sliding_window": None},
    "vaultgemma": _HEAD | _WINDOWED | {"query_pre_attn_scalar": 8},
    "xglm": _CORE
    | {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 1024},
    "youtu": _LATENT,
}

MODEL_TYPES = tuple(sorted(_CONFIGS))

PATHS = [
    *("afmoe", "bloom", "ctrl", "dbrx", "deepseek_v3", "falcon", "gemma2", "glm4", "gpt2", "gpt_neox"),
    *("gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "hyperclovax", "jetmoe", "llama"),
    *("llama4_text", "mixtral", "modernbert-decoder", "mpt", "opt", "xglm"),
]
"""One model type per row of the table, and unusual blocks: experts, latent attention, parallel sublayers."""

HALF = [*product(MODEL_TYPES, [torch.bfloat16]), *product(PATHS, [torch.float16])]
"""Model types in half precision: every one in the wider of the two, some in the other."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in MODEL_TYPES} | {
    "cohere-qk_norm": ("cohere", {"use_qk_norm": True}),
    "falcon-alibi": ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-new_decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-sequential": ("falcon", {"parallel_attn": False, "multi_query": False}),
    "gemma2-softcapping": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi_query": ("llama", {"num_key_value_heads": 1}),
    "llama-rope_llama3": ("llama", {"rope_parameters": _ROPE_LLAMA3}),
    "llama-rope_yarn": ("llama", {"rope_parameters": _ROPE_YARN}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "ministral-sliding": ("ministral", _WINDOWED),
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
    """Return a random model of width 32 in evaluation mode; ``overrides``: fields of its config."""
    key = repr((model_type, seed, dtype, sorted(overrides.items())))
    if key not in _MODELS:
        _MODELS[key] = _draw_model(model_type, seed, dtype, overrides)
    return copy.deepcopy(_MODELS[key])  # takes half as long as a new one


_MODELS: dict[str, PreTrainedModel] = {}


def _draw_model(model_type: str, seed: int, dtype: torch.dtype, overrides: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **(_CONFIGS[model_type] | overrides))
    for name in list(config.to_dict()):
        if "dropout" in name or name.endswith("_pdrop"):
            setattr(config, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return redrawn(AutoModelForCausalLM.from_config(config)).to(dtype).eval()


def redrawn(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model with random matrices, and norms and biases that differ from their defaults."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def byte_level(
    sentences, size, *steps, special=("<|endoftext|>",), normalizer=None, ignore_merges=False, use_regex=True
) -> Tokenizer:
    """Train a byte-level BPE with ``size`` tokens on sentences; ``steps`` split texts first."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": size, "special_tokens": list(special), "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


@cache
def _trained() -> str:
    sentences = [
        "Review: a warm and funny film\nSentiment: positive",
        "Review: a dull and lifeless film\nSentiment: negative",
        "Question: where is the longest river\nType: location",
    ]
    return byte_level(sentences, VOCABULARY).to_str()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that encodes any text: `VOCABULARY` tokens, end of text 0, no padding token."""
    tokenizer = Tokenizer.from_str(_trained())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def tiny_folder(folder, model_type="llama", **fields):
    """Save a tiny model with its tokenizer, and return the folder."""
    tiny_model(model_type, **fields).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
