"""Random models of known shapes, with the bundled tokenizer: speed does not depend on what weights say."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from i2cl import Decoder
from i2cl.models.loading import load_model_and_tokenizer

SHAPES: dict[str, PreTrainedConfig] = {
    # https://huggingface.co/openai-community/gpt2/blob/main/config.json, with a longer context
    "gpt2-small": GPT2Config(n_positions=4096),
    # https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json
    "llama-2-7b": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
    ),
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    ),
    "tiny": LlamaConfig(
        vocab_size=32000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
    ),
}


def random_decoder(shape: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A model of that shape with random weights, made where it is to run."""
    _, tokenizer = load_model_and_tokenizer("reference")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    return Decoder(model.eval(), tokenizer, name=f"random {shape}")
