"""Train a small prompt compressor for the bundled model: ICAE, AutoCompressor or CEPE.

A document of the reference corpus (`i2cl.tasks.generated`) has 4 to 20 demonstrations of one task, which are
compressed, and queries, whose labels the loss is computed on. Four tasks and some word combinations are held
out. The decoder is frozen for icae and cepe; an AutoCompressor is a copy of the model that is trained.

    PYTHONPATH=src python scripts/train_compressor.py --kind icae
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from i2cl import Decoder, Example, Task, load_task
from i2cl.methods.compressors.autocompressor import SUMMARY, Summarizer
from i2cl.methods.compressors.base import BUNDLED, encode_without_special_tokens, exchanges
from i2cl.methods.compressors.cepe import ContextEncoder, CrossLayer
from i2cl.methods.compressors.icae import MEMORY, AutoEncoder, ICAEConfig, soft_prompt_predictor
from i2cl.models.batching import Ids, make_batch
from i2cl.models.edits import Edit
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import gold_log_probs
from i2cl.tasks.generated import TASKS
from reference_documents import sample_example

UNSEEN = ("mood-colour-1", "job-letter-2", "place-colour-2", "weather-letter-1")
DOCUMENTS, QUERIES, SHOTS = 12, 6, (4, 20)
VECTORS, RANK, ALPHA = 16, 16, 32.0
ENCODER = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
}
"""Fields of a CEPE checkpoint that describe its encoder."""
RATES = {"icae": 2e-3, "autocompressor": 1e-3, "cepe": 2e-3}
WARM_UP, MAX_GRADIENT_NORM = 100, 1.0
LOG_EVERY = 50

Behind = tuple[Prefix | None, Edit | None, Ids]
"""Prefix of the queries, edit of the model, and token ids after each query."""


class Learner(Decoder):
    """A decoder whose weights are trained."""

    def frozen(self) -> AbstractContextManager[None]:
        """Freeze nothing."""
        return nullcontext()


@dataclass(frozen=True)
class Compressor:
    """A compressor in training.

    Attributes:
        decoder: the model.
        parameters: parameters to train.
        front: compresses demonstrations to a prefix, an edit, and suffix tokens.
        tensors: returns the weights with the names of the released checkpoints.
        settings: fields of its configuration file.
    """

    decoder: Decoder
    parameters: list[nn.Parameter]
    front: Callable[[Task, list[Example]], Behind]
    tensors: Callable[[], Mapping[str, Tensor]]
    settings: Mapping[str, object]


def drawn(*shape: int, scale: float = 0.02) -> nn.Parameter:
    """Return a random normal parameter."""
    return nn.Parameter(torch.randn(shape) * scale)


def icae(decoder: Decoder) -> Compressor:
    """ICAE: LoRA on the query and value projections, and memory embeddings."""
    names = [
        name
        for name, _ in decoder.model.named_modules()
        if name.endswith(("self_attn.q_proj", "self_attn.v_proj"))
    ]
    d, scale = decoder.d_model, ALPHA / RANK
    pairs = {name: (drawn(RANK, d, scale=d**-0.5), nn.Parameter(torch.zeros(d, RANK))) for name in names}
    memory = drawn(VECTORS + 3, d, scale=float(decoder.embed((1, 2, 3)).std()))
    config = ICAEConfig()

    def front(task: Task, shown: list[Example]) -> Behind:
        scaled = {name: (first, second * scale) for name, (first, second) in pairs.items()}
        own = AutoEncoder(decoder, memory, scaled, "1")
        (context,) = decoder.encoder(["".join(exchanges(decoder, task, shown))])
        result = soft_prompt_predictor(own, task, own.slots(own.segments(context)), config)
        return result.prefix, result.edit, result.right

    def tensors() -> Mapping[str, Tensor]:
        start = "icae.base_model.model."
        both = {
            f"{start}{name}.lora_{side}.default.weight": one
            for name, pair in pairs.items()
            for side, one in zip("AB", pair, strict=True)
        }
        return both | {MEMORY: memory}

    flat = [one for pair in pairs.values() for one in pair]
    return Compressor(decoder, [*flat, memory], front, tensors, {})


def autocompressor(decoder: Decoder) -> Compressor:
    """AutoCompressor: a copy of the model, and summary embeddings."""
    own = Learner(copy.deepcopy(decoder.model), decoder.tokenizer)
    embeddings = drawn(VECTORS, own.d_model, scale=float(own.embed((1, 2, 3)).std()))
    summarizer = Summarizer(own, embeddings, accumulate=True)

    def front(task: Task, shown: list[Example]) -> Behind:
        ids = encode_without_special_tokens(own, exchanges(own, task, shown))
        segments = summarizer.segments(ids, own.encoder.front, 2048)
        return summarizer.predictor(task, summarizer.summaries(segments)).prefix, None, ()

    def tensors() -> Mapping[str, Tensor]:
        return dict(own.model.named_parameters()) | {SUMMARY: embeddings}  # a tied head is named once

    settings = {"summary_length": VECTORS, "accumulate_summary": True}
    return Compressor(own, [*own.model.parameters(), embeddings], front, tensors, settings)


def cepe(decoder: Decoder) -> Compressor:
    """CEPE: an encoder and cross-attention in every layer, initialized from the model with zero output."""
    config = decoder.model.config.to_dict() | {"max_position_embeddings": 256, "tie_word_embeddings": False}
    encoder = LlamaModel(LlamaConfig.from_dict(config))
    encoder.load_state_dict(decoder.model.model.state_dict())

    def copied(one: Tensor) -> nn.Parameter:
        return nn.Parameter(one.detach().clone())

    layers = {}
    for number, block in enumerate(decoder.model.model.layers):
        reads = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        layers[number] = CrossLayer(
            copied(block.input_layernorm.weight),
            *(copied(one.weight) for one in reads),
            nn.Parameter(torch.zeros_like(block.self_attn.o_proj.weight)),
        )
    own = ContextEncoder(
        encoder, layers, decoder.model.config.num_attention_heads, decoder.model.config.rms_norm_eps, 10**6
    )

    def front(task: Task, shown: list[Example]) -> Behind:
        ids = encode_without_special_tokens(decoder, exchanges(decoder, task, shown))
        return None, own.edit(own.states(ids)), ()

    def tensors() -> Mapping[str, Tensor]:
        result = {f"encoder.{name}": one for name, one in encoder.named_parameters()}
        for number, layer in layers.items():
            parts = {"layernorm": layer.norm, "q_proj": layer.q, "k_proj": layer.k, "v_proj": layer.v}
            for name, one in (parts | {"o_proj": layer.o}).items():
                result[f"model.layers.{number}.cross_attn.{name}.weight"] = one
        return result

    cross = [one for layer in layers.values() for one in vars(layer).values()]
    kept = {key: value for key, value in config.items() if key in ENCODER}
    settings = {"num_cross_attn_layers": len(layers), "encoder_config": kept}
    return Compressor(decoder, [*encoder.parameters(), *cross], front, tensors, settings)


KINDS = {"icae": icae, "autocompressor": autocompressor, "cepe": cepe}


def documents(seed: int) -> Iterator[tuple[str, list[Example], list[Example]]]:
    """Endless tasks, each with demonstrations and queries of training combinations."""
    rng = Random(seed)
    seen = [task for task in TASKS if task.name not in UNSEEN]
    while True:
        task = rng.choice(seen)
        rows = [Example(*sample_example(rng, task)) for _ in range(rng.randint(*SHOTS) + QUERIES)]
        yield task.name, rows[QUERIES:], rows[:QUERIES]


def train(made: Compressor, steps: int, rate: float, seed: int) -> float:
    """Take the steps; the mean loss of the last of them, in nats."""
    optimizer = torch.optim.AdamW(made.parameters, lr=rate, weight_decay=0.01)
    tasks = {task.name: load_task(task.name).without_data() for task in TASKS}
    labels = {name: LabelScorer(made.decoder, task).labels for name, task in tasks.items()}
    source, started, losses = documents(seed), time.monotonic(), []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            warm = min(1.0, step / WARM_UP)
            group["lr"] = rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(DOCUMENTS):
            name, shown, asked = next(source)
            task, decoder = tasks[name], made.decoder
            prefix, edit, right = made.front(task, shown)
            ids = [one + right for one in decoder.encoder([task.template.query(one.text) for one in asked])]
            result = gold_log_probs(
                decoder,
                make_batch(ids, decoder.device),
                labels[name],
                [one.label for one in asked],
                edit,
                prefix,
            )
            loss = -result.mean() / DOCUMENTS
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(made.parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        losses.append(total)
        if step % LOG_EVERY == 0 or step == steps:
            mean = sum(losses[-LOG_EVERY:]) / len(losses[-LOG_EVERY:])
            print(f"step {step}: loss {mean:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    return sum(losses[-LOG_EVERY:]) / len(losses[-LOG_EVERY:])


def main(arguments: list[str] | None = None) -> None:
    """Train the compressor and save it."""
    parser = argparse.ArgumentParser(description="Train a small prompt compressor for the bundled model.")
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(str(BUNDLED)))
    given = parser.parse_args(arguments)
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    base = Decoder.from_pretrained("reference", device="cpu", dtype="float32")
    started = time.monotonic()
    with base.frozen():
        made = KINDS[given.kind](base)
        for parameter in made.parameters:
            parameter.requires_grad_(True)
        loss = train(made, given.steps, RATES[given.kind], given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    kept = {name: one.detach().half().contiguous() for name, one in made.tensors().items()}
    save_file(kept, given.output / f"{given.kind}.safetensors")
    record = {
        "kind": given.kind,
        "base": base.base.weights,
        "tasks": [task.name for task in TASKS if task.name not in UNSEEN],
        "seed": given.seed,
        "steps": given.steps,
        "rows": given.steps * DOCUMENTS * (sum(SHOTS) // 2 + QUERIES),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "loss": round(loss, 4),
        "parameters": sum(one.numel() for one in kept.values()),
        "settings": dict(made.settings),
    }
    (given.output / f"{given.kind}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
