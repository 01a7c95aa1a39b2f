"""Print docs/architectures.md: what is known of each model type, and what was measured of it.

Usage: python scripts/architectures_table.py [--measure] > docs/architectures.md

With --measure the figures in docs/architectures.json are measured anew, on the tiny random models of
tests/tiny.py: seeded, on one thread, and rounded so that a second run changes no byte.
"""

import json
import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from i2cl import Decoder, Example, Injection, Task, Template
from i2cl.core.calibration import calibrate
from i2cl.core.context import extract
from i2cl.core.recipe import CalibrationConfig
from i2cl.export import export_causal_lm, fold, make_golden, verify
from i2cl.export.families import FAMILIES, REFUSED
from i2cl.models.architectures import ARCHITECTURES, Architecture
from i2cl.models.batching import make_batch

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "architectures.json"

HEAD = """# Model types

Printed by `python scripts/architectures_table.py`; `make docs-results` measures again.

## Supported

{count} model types. *Writers* are the two modules of a block that write to its residual stream. *Packs*:
several short queries share one row of a batch. *Fold*: how `i2cl export` puts an injection into the weights
([export](guide/export.md)). *In place* keeps the type; *as llama* writes a Llama that computes the same. It
is refused where the config has what Llama lacks: a sliding window shorter than the context, or rotary
embeddings on part of a head. `granitemoehybrid` is for its dense models with attention in every layer.

| model type | attention writer | MLP writer | packs | fold |
|---|---|---|---|---|"""

TEMPLATE = """
Other names for some of these, or models that also take images or sound and whose language model is of such
a type: its blocks are found inside ({wrappers}).

## Measured

Tiny random models (`tests/tiny.py`; width 32, two or three layers, float32). *Identity*: largest error of
`block_out - block_in = attention + MLP`, relative to the change. *Calibrate*: loss before and after
{epochs} epochs on {shots} demonstrations, in nats. *Fold*: largest difference of the folded model's logits
from the injected model's, relative to the largest logit, in float32 and stored in bfloat16. *Verify*: what
`i2cl verify` says of the export. An error is told as a bound: 1, 2 or 5 times a power of ten.

| model type | identity | calibrate | fold, float32 | fold, bfloat16 | verify |
|---|---|---|---|---|---|"""

REST = """
## Not supported

The other types that `AutoModelForCausalLM` of transformers {version} knows. A checkpoint whose config turns
off what the reason names may work with an `Architecture` of your own, if `i2cl check` accepts it.

| reason | model types |
|---|---|"""

WRAPPERS = "dots3_note fuyu gemma3 got_ocr2 gpt-sw3 llama4 moss_transcribe_diarize"
"""Types of the list whose language model is of a supported type."""

UNSUPPORTED = {
    "built on an encoder: tokens see what stands to their right, or the stream itself is normalised": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
    "decoder half of an encoder-decoder, whose blocks also attend to an encoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
        whisper""",
    "recurrent, state-space or convolution layers: not every layer has both writers": """
        bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax
        nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
        rwkv xlstm zamba zamba2""",
    "several residual streams that a block mixes": """
        deepseek_v4 gemma3n gemma3n_text hy_v4 qwen4_exp qwen4_exp_text""",
    "a block multiplies the stream itself by what it has learnt": """
        beam doge gemma4_unified gemma4_unified_assistant gemma4_unified_text zaya""",
    "a third module writes to the stream: per-layer embeddings, or cross-attention to an image": """
        gemma4 gemma4_assistant gemma4_text mllama""",
    "two attentions and several MLPs in one block": "longcat_flash",
    "the MLP's output is a sum of two modules, experts and a shared MLP": "granitemoe_swa granitemoeshared",
    "the scale of what a writer puts out is not one number of the config": "minicpm3",
    "a block adds a bias that no module puts out": "gpt_neox_japanese",
    "a convolution over earlier tokens stands between writer and stream": "inkling2_text inkling_text",
    "one stack of blocks runs several times for a token": "hrm_text",
    "the norm stands on the stream itself, behind the sum": "openai-gpt",
    "reversible blocks with two streams and hashed attention": "reformer",
    "its tokens attend in both directions within a prompt": "cpmant git",
    "bytes or codes of sound, not the tokens of a text prompt": "blt moshi musicgen musicgen_melody",
    "its language model is of a type of its own inside a model that sees images": "emu3 phi4_multimodal",
}
"""Why the other types of transformers' list are not in the table."""

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = (Example("a warm film", 0), Example("dull", 1), Example("a funny, warm and funny film", 0))
CONFIG = CalibrationConfig(epochs=20, batch_size=len(SHOTS), lr=0.05)
IDS = tuple((torch.arange(1, 25) * 7 % 300).tolist())


def folding(model_type: str) -> str:
    """How it is folded, in words."""
    if model_type in REFUSED:
        return f"no: {REFUSED[model_type]}"
    row = FAMILIES[model_type]
    if row.target:
        return f"as {row.target}"
    return "in place, both constants in one bias" if row.joint else "in place"


def bound(value: float) -> str:
    """The next larger of 1, 2 and 5 times a power of ten, at least 1e-6: rounding does not change it."""
    if not math.isfinite(value):
        return "not finite"
    steps = (digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5))
    step = next(step for step in steps if value <= step)
    return f"≤ {step:.0e}".replace("e-0", "e-")


def relative(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((one - two).abs().max() / two.abs().max())


def decoder_of(model_type: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """The tiny random model."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import tiny_model, tiny_tokenizer

    return Decoder(tiny_model(model_type, dtype=dtype), tiny_tokenizer(), name=f"tiny-{model_type}")


def fold_error(decoder: Decoder, injection: Injection) -> float:
    """Of the logits after every token of some prompt, in float32."""
    with torch.no_grad():
        result = fold(decoder, injection).float()(torch.tensor([IDS])).logits[0]
        whole = Decoder(decoder.model.float(), decoder.tokenizer)
        batch, at = make_batch([IDS], torch.device("cpu")), torch.arange(len(IDS))[None]
        return relative(result, whole.forward(batch, at=at, edit=injection.edit())[0])


def measured(model_type: str) -> dict[str, str]:
    """One row of figures, rounded."""
    torch.set_num_threads(1)
    decoder = decoder_of(model_type)
    injection = calibrate(decoder, TASK, SHOTS, extract(decoder, TASK, SHOTS), CONFIG)
    row = {
        "identity": bound(decoder.residual_identity.worst),
        "calibrate": f"{injection.history[0]:.1f} -> {injection.history[-1]:.1f}",
    }
    if model_type in REFUSED:
        return row | {"float32": "-", "bfloat16": "-", "verify": "-"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        export_causal_lm(decoder, injection, out, golden=lambda: make_golden(decoder, injection))
        holds = "holds" if verify(out, device="cpu").passed else "does not hold"
    return row | {
        "float32": bound(fold_error(decoder, injection)),
        "bfloat16": bound(fold_error(decoder_of(model_type, torch.bfloat16), injection)),
        "verify": holds,
    }


def line(row: Architecture) -> str:
    """A row of the first table."""
    packs = "yes" if row.packs else "no"
    kind = row.model_type
    return f"| {kind} | `{row.attention}` | `{row.mlp}` | {packs} | {folding(kind)} |"


def page() -> str:
    """The whole page."""
    figures: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    record = {"wrappers": ", ".join(WRAPPERS.split()), "epochs": CONFIG.epochs, "shots": len(SHOTS)}
    return "\n".join(
        [
            HEAD.format(count=len(ARCHITECTURES)),
            *(line(row) for row in ARCHITECTURES.values()),
            TEMPLATE.format(**record),
            *(f"| {kind} | {' | '.join(row.values())} |" for kind, row in figures["types"].items()),
            REST.format(version=figures["transformers"]),
            *(f"| {reason} | {' '.join(names.split())} |" for reason, names in UNSUPPORTED.items()),
            "",
        ]
    )


def measure() -> None:
    """Write the figures of all types."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    types = {name: measured(name) for name in ARCHITECTURES}
    record = {"transformers": transformers.__version__, "torch": torch.__version__, "types": types}
    MEASURED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    print(page(), end="")
