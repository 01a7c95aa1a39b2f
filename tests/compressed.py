"""Tiny prompt compressors: what the released code made of some, and random ones for the shared tiny Llama."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel

from i2cl import Decoder, Example, Task, Template, make_methods
from tiny import VOCABULARY, tiny_model, tiny_tokenizer

PARITY = Path(__file__).parent / "data" / "parity"
FOLDER = PARITY / "compressors"
LOOSE = {"atol": 3e-4, "rtol": 0}
CLOSE = {"atol": 1e-4, "rtol": 0}


@dataclass(frozen=True)
class Golden:
    """A release in small: where its checkpoint is, and its inputs and outputs."""

    name: str
    record: dict
    tensors: dict

    def __getitem__(self, name):
        return self.tensors[name]

    @property
    def folder(self):
        return FOLDER / self.name

    @property
    def base(self):
        return self.folder / "base" if (self.folder / "base").is_dir() else self.folder

    @property
    def task(self):
        template = Template("Review: {text}\nSentiment: {label}", self.record["separator"])
        return Task("parity", tuple(self.record["labels"]), template)

    @property
    def shown(self):
        return [Example(**one) for one in self.record["demonstrations"]]

    @property
    def shown_ids(self):
        return [tuple(ids) for ids in self.record["demonstration_ids"]]

    @property
    def context(self):
        return sum(self.shown_ids, ())

    @property
    def queries(self):
        return [tuple(ids) for ids in self.record["query_ids"]]

    @property
    def labels(self):
        return [tuple(ids) for ids in self.record["label_ids"]]

    def expected(self, name):
        """Scores of the labels, of logits at each query's last token."""
        return self[name].log_softmax(-1)[:, [ids[0] for ids in self.labels]]

    def decoder(self, folder=None, **more):
        """Return a new decoder of the base model."""
        model = AutoModelForCausalLM.from_pretrained(folder or self.base, dtype=torch.float32, **more)
        return Decoder(model.eval(), AutoTokenizer.from_pretrained(PARITY))

    def fitted(self, decoder, method, task=None, shown=None, **options):
        (made,) = make_methods([method], options)
        return made.fit(decoder, task or self.task, self.shown if shown is None else shown, 0)


@cache
def golden(name):
    """One of them, read once."""
    record = json.loads((FOLDER / name / "golden.json").read_text(encoding="utf-8"))
    return Golden(name, record, load_file(FOLDER / name / "golden.safetensors"))


VECTORS = 3
ENCODER = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
ENCODER |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def with_compressor(name, folder):
    """The shared tiny Llama, from a folder where a random compressor for a method is beside it."""
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return 0.3 * torch.randn(shape, generator=generator)

    config, width = model.config, model.config.hidden_size
    if name == "autocompressor":
        config.summary_length, config.accumulate_summary = VECTORS, True
    if name == "cepe":
        encoder = LlamaModel(LlamaConfig(**ENCODER))
        config.num_cross_attn_layers, config.encoder_config = 1, encoder.config.to_dict()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if name == "autocompressor":
        add(folder, {"embed_summary.weight": drawn(VECTORS, width)})
    if name == "cepe":
        start = f"model.layers.{config.num_hidden_layers - 1}.cross_attn"
        narrow = config.num_key_value_heads * config.head_dim
        shapes = {"layernorm": (width,), "q_proj": (width, width), "o_proj": (width, width)}
        shapes |= {"k_proj": (narrow, ENCODER["hidden_size"]), "v_proj": (narrow, ENCODER["hidden_size"])}
        cross = {f"{start}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        own = {f"encoder.{name}": drawn(*one.shape) for name, one in encoder.state_dict().items()}
        add(folder, cross | own)
    if name == "icae":
        start = "icae.base_model.model.model.layers"
        pairs = {
            f"{start}.{layer}.self_attn.{part}.lora_{side}.default.weight": drawn(*shape)
            for layer in range(config.num_hidden_layers)
            for part, out in (("q_proj", width), ("v_proj", config.num_key_value_heads * config.head_dim))
            for side, shape in (("A", (2, width)), ("B", (out, 2)))
        }
        pairs["memory_token_embed.weight"] = drawn(VECTORS + 3, width)
        save_file(pairs, folder / "icae.safetensors")
    return Decoder.from_pretrained(str(folder), device="cpu")


def add(folder, tensors):
    """More tensors in a folder's file of weights."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})
