"""Print docs/architectures.md: the supported model types, and measurements on each.

Usage: python scripts/architectures_table.py [--measure] > docs/architectures.md

With --measure, docs/architectures.json is measured again on the tiny random models of tests/tiny.py. The
measurement is seeded, uses one thread, and is rounded, so a second run gives the same bytes.
"""

import json
import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from i2cl import Decoder, Example, I2CLError, Injection, Task, Template
from i2cl.core.calibration import calibrate
from i2cl.core.context import extract
from i2cl.core.recipe import CalibrationConfig
from i2cl.export import export_causal_lm, fold, verify
from i2cl.export.folding import PARALLEL_BLOCKS
from i2cl.models.architectures import ARCHITECTURES, Architecture
from i2cl.models.batching import make_batch

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "architectures.json"

HEAD = """# Model types

Printed by `python scripts/architectures_table.py`; `make docs-results` measures again.

## Supported

{count} model types. *Sublayers* are the attention and MLP modules whose outputs a block adds to the residual
stream. *Packs*: several short queries share a row of a batch. *Fold*: how `i2cl export` merges an injection
into the weights ([export](guide/export.md)). *In place* keeps the type; *as llama* writes an equivalent
Llama, and is not possible with features that Llama does not have: a sliding window shorter than the context,
or rotary embeddings on part of a head. `granitemoehybrid` is supported for dense models with attention in
every layer.

| model type | attention sublayer | MLP sublayer | packs | fold |
|---|---|---|---|---|"""

TEMPLATE = """
Aliases of these types, and multimodal models whose language model has one of these types: {wrappers}.

## Measured

Tiny random models (`tests/tiny.py`; width 32, two or three layers, float32). *Identity*: largest error of
`block_out - block_in = attention + MLP`, relative to the change. *Calibrate*: loss before and after
{epochs} epochs on {shots} demonstrations, in nats. *Fold*: largest difference of the folded model's logits
from the injected model's, relative to the largest logit, in float32 and stored in bfloat16. *Verify*: the
result of `i2cl verify` on the export. Errors are rounded up to 1, 2 or 5 times a power of ten.

| model type | identity | calibrate | fold, float32 | fold, bfloat16 | verify |
|---|---|---|---|---|---|"""

REST = """
## Not supported

The remaining types of `AutoModelForCausalLM` in transformers {version}. A checkpoint whose config disables
the feature in question may work with a custom `Architecture`, if `i2cl check` accepts it.

| reason | model types |
|---|---|"""

WRAPPERS = "dots3_note fuyu gemma3 got_ocr2 gpt-sw3 llama4 moss_transcribe_diarize"
"""Types whose language model has a supported type."""

UNSUPPORTED = {
    "encoder models: attention is bidirectional, or the residual stream itself is normalized": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
    "decoder of an encoder-decoder, with cross-attention to an encoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
        whisper""",
    "recurrent, state-space or convolution layers: not every layer has attention and an MLP": """
        bailing_hybrid bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax
        nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
        rwkv xlstm zamba zamba2""",
    "several residual streams, mixed by each block": """
        deepseek_v4 gemma3n gemma3n_text hy_v4 qwen4_exp qwen4_exp_text""",
    "blocks scale the residual stream with learned weights": """
        beam doge gemma4_unified gemma4_unified_assistant gemma4_unified_text zaya""",
    "a third module writes to the residual stream: per-layer embeddings, or cross-attention to an image": """
        gemma4 gemma4_assistant gemma4_text mllama""",
    "two attentions and several MLPs in one block": "longcat_flash",
    "the MLP output is the sum of two modules: experts and a shared MLP": "granitemoe_swa granitemoeshared",
    "the scale of a module's output is not a single number in the config": "minicpm3",
    "blocks add a bias that is not part of a module's output": "gpt_neox_japanese",
    "a convolution over earlier tokens between module and residual stream": "inkling2_text inkling_text",
    "the same blocks run several times per token": "hrm_text",
    "the residual stream is normalized after each sum": "openai-gpt",
    "reversible blocks with two streams and hashed attention": "reformer",
    "bidirectional attention within a prompt": "cpmant git",
    "bytes or audio codes instead of text tokens": "blt moshi musicgen musicgen_melody",
    "the language model inside a vision-language model has another model type": "emu3 phi4_multimodal",
}
"""Reasons for unsupported types of transformers."""

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = (Example("a warm film", 0), Example("dull", 1), Example("a funny, warm and funny film", 0))
CONFIG = CalibrationConfig(epochs=20, batch_size=len(SHOTS), lr=0.05)
IDS = tuple((torch.arange(1, 25) * 7 % 300).tolist())


def folding(decoder: Decoder, injection: Injection) -> str:
    """Describe how a model type is folded, or why it cannot be."""
    model_type = decoder.model.config.model_type
    try:
        folded_type = fold(decoder, injection).config.model_type
    except I2CLError as error:
        return f"no: {str(error).split(': ')[1].split('; ')[0]}"
    if folded_type != model_type:
        return f"as {folded_type}"
    return "in place, both vectors in one bias" if model_type in PARALLEL_BLOCKS else "in place"


def bound(value: float) -> str:
    """Round up to 1, 2 or 5 times a power of ten, at least 1e-6."""
    if not math.isfinite(value):
        return "not finite"
    steps = (digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5))
    step = next(step for step in steps if value <= step)
    return f"≤ {step:.0e}".replace("e-0", "e-")


def relative(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((one - two).abs().max() / two.abs().max())


def decoder_of(model_type: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the tiny random model of a type."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import tiny_model, tiny_tokenizer

    return Decoder(tiny_model(model_type, dtype=dtype), tiny_tokenizer(), name=f"tiny-{model_type}")


def fold_error(decoder: Decoder, injection: Injection) -> float:
    """Return the relative error of the folded model's logits after every token of a prompt, in float32."""
    with torch.no_grad():
        result = fold(decoder, injection).float()(torch.tensor([IDS])).logits[0]
        whole = Decoder(decoder.model.float(), decoder.tokenizer)
        batch, at = make_batch([IDS], torch.device("cpu")), torch.arange(len(IDS))[None]
        return relative(result, whole.forward(batch, at=at, edit=injection.edit())[0])


def measured(model_type: str) -> dict[str, str]:
    """Measure one model type."""
    torch.set_num_threads(1)
    decoder = decoder_of(model_type)
    injection = calibrate(decoder, TASK, SHOTS, extract(decoder, TASK, SHOTS), CONFIG)
    row = {
        "identity": bound(decoder.residual_identity.worst),
        "calibrate": f"{injection.history[0]:.1f} -> {injection.history[-1]:.1f}",
        "fold": folding(decoder, injection),
    }
    if row["fold"].startswith("no"):
        return row | {"float32": "-", "bfloat16": "-", "verify": "-"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        export_causal_lm(decoder, injection, out)
        holds = "holds" if verify(out, device="cpu").passed else "does not hold"
    return row | {
        "float32": bound(fold_error(decoder, injection)),
        "bfloat16": bound(fold_error(decoder_of(model_type, torch.bfloat16), injection)),
        "verify": holds,
    }


def line(row: Architecture, fold: str) -> str:
    """Format a row of the first table."""
    packs = "yes" if row.packs else "no"
    return f"| {row.model_type} | `{row.attention}` | `{row.mlp}` | {packs} | {fold} |"


def page() -> str:
    """Format the page."""
    figures: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    folds = {kind: row.pop("fold") for kind, row in figures["types"].items()}
    record = {"wrappers": ", ".join(WRAPPERS.split()), "epochs": CONFIG.epochs, "shots": len(SHOTS)}
    return "\n".join(
        [
            HEAD.format(count=len(ARCHITECTURES)),
            *(line(row, folds[kind]) for kind, row in ARCHITECTURES.items()),
            TEMPLATE.format(**record),
            *(f"| {kind} | {' | '.join(row.values())} |" for kind, row in figures["types"].items()),
            REST.format(version=figures["transformers"]),
            *(f"| {reason} | {' '.join(names.split())} |" for reason, names in UNSUPPORTED.items()),
            "",
        ]
    )


def measure() -> None:
    """Measure all types and write the results."""
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
