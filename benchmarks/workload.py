"""Workloads of the benchmarks: random models of known shapes, and random texts as long as a real task's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from i2cl.core.injection import Injection
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Example, Task, Template

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
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
    "llama-3-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ),
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
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

QUERY_TOKENS = (8, 16, 19, 23, 25, 29, 31, 34, 39, 43, 66)
"""Deciles of the token counts of SST-2's validation prompts under GPT-2's tokenizer (mean 29)."""

SHOT_TOKENS = (7, 8, 9, 11, 12, 14, 17, 20, 24, 30, 58)
"""The same for training prompts (mean 17), which include phrases."""

WORDS = "the film story night road house child river light was and of with one day old new long good slow"

TASK = Task("timing", ("positive", "negative"), Template("Review: {text}\nSentiment: {label}"))


def random_decoder(shape: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """Build a model with random weights on its device; speed does not depend on the weights."""
    _, tokenizer = load_model_and_tokenizer("reference")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    return Decoder(model.eval(), tokenizer, name=f"random {shape}")


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
        decoder: the model.
        task: two labels and a template.
        demonstrations: 5 per class by default.
        texts: texts to classify.
    """

    decoder: Decoder
    task: Task
    demonstrations: tuple[Example, ...]
    texts: tuple[str, ...]

    @classmethod
    def make(cls, decoder: Decoder, queries: int, shots: int = 5, seed: int = 0) -> "Workload":
        """Draw texts whose prompts have the lengths of SST-2's under this tokenizer."""
        picker = random.Random(seed)
        texts = _texts(decoder, queries, QUERY_TOKENS, picker)
        shown = _texts(decoder, 2 * shots, SHOT_TOKENS, picker)
        examples = tuple(Example(text, number % 2) for number, text in enumerate(shown))
        return cls(decoder, TASK, examples, tuple(texts))

    @property
    def labels(self) -> LabelTokens:
        """Tokens of the two labels."""
        return LabelScorer(self.decoder, self.task).labels

    @property
    def queries(self) -> list[Ids]:
        """Token ids of the prompts."""
        return LabelScorer(self.decoder, self.task).queries(self.texts)

    def injection(self, seed: int = 0) -> Injection:
        """Return a random injection, which is as expensive to apply as a fitted one."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.decoder.layers, 2, self.decoder.d_model)
        coefficients = torch.tensor([0.1, 0.9]).expand(self.decoder.layers, 2, 2).contiguous()
        context = 0.1 * torch.randn(shape, generator=generator)
        return Injection(context, coefficients, self.task, self.decoder.base, demonstrations=10)


def _texts(decoder: Decoder, count: int, deciles: Sequence[int], picker: random.Random) -> list[str]:
    front = len(decoder.encoder([TASK.template.query("")])[0])
    lengths = [_quantile(deciles, (row + 0.5) / count) - front for row in range(count)]
    picker.shuffle(lengths)
    return [_text(decoder, length, picker) for length in lengths]


def _quantile(deciles: Sequence[int], share: float) -> int:
    place = share * (len(deciles) - 1)
    low = int(place)
    return round(deciles[low] + (place - low) * (deciles[low + 1] - deciles[low]))


def _text(decoder: Decoder, tokens: int, picker: random.Random) -> str:
    text = picker.choice(WORDS.split())
    while len(decoder.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]) < tokens:
        text += " " + picker.choice(WORDS.split())
    return text
