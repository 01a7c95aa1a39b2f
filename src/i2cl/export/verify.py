"""Check an export in transformers or PEFT."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from i2cl.errors import I2CLError
from i2cl.export.golden import Golden, Verification, compare
from i2cl.export.peft import load_adapter
from i2cl.models.loading import load_model_and_tokenizer

BATCH_SIZE = 5


def verify(
    folder: str | Path,
    *,
    model: str | None = None,
    device: str | torch.device | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Run an export with transformers, an adapter with PEFT, in float32 and compare its golden answers.

    A classifier runs in transformers' pipeline, in batches padded on the right and, if its model type allows
    it, on the left.

    Args:
        folder: a classifier, a language model, or a PEFT adapter.
        model: base model of an adapter; default: the one that its config names.
        device: see `i2cl.Decoder.from_pretrained`.
        tolerance: maximum difference of a probability; default: by the dtype of the export.

    Raises:
        I2CLError: if the folder is not an export or cannot be loaded.
    """
    golden = Golden.from_export(folder)
    if model is not None and golden.form != "peft":
        raise I2CLError(f"{str(folder)!r} is not a PEFT adapter: leave out --model")
    if golden.form == "classifier":
        sides = ("right", "left") if golden.left_padding else ("right",)
        return verify_classifier(
            make_pipeline(str(folder), device=device), golden, sides, tolerance=tolerance
        )
    loaded: Any
    if golden.form == "peft":
        loaded = load_adapter(folder, model, device)
    else:
        loaded, _ = load_model_and_tokenizer(str(folder), dtype="float32", device=device)
    with torch.no_grad():
        rows = [torch.tensor([ids], device=loaded.device) for ids in golden.ids]
        logits = torch.stack([loaded(input_ids=row, use_cache=False).logits[0, -1].cpu() for row in rows])
    encoded = AutoTokenizer.from_pretrained(str(folder))(golden.prompts)["input_ids"]
    found = golden.label_probabilities(logits[:, golden.label_tokens].float())
    return compare(golden, found, tolerance=tolerance, ids=encoded)


def make_pipeline(model: Any, tokenizer: Any = None, device: str | torch.device | None = None) -> Any:
    """Return transformers' pipeline of a classifier: a model, or a folder, which is loaded in float32."""
    from transformers import pipeline

    options: Any = {"device": device or "cpu", "dtype": torch.float32}
    return pipeline("text-classification", model=model, tokenizer=tokenizer, **options)


def verify_classifier(
    classify: Any, golden: Golden, sides: Sequence[str], *, tolerance: float | None = None
) -> Verification:
    """Classify the golden texts in transformers' pipeline, in batches padded on alternating sides."""
    probabilities = torch.zeros(len(golden.texts), len(golden.labels))
    order = sorted(range(len(golden.texts)), key=lambda row: len(golden.ids[row]))
    options: dict[str, Any] = {"top_k": None, "batch_size": BATCH_SIZE}
    if not golden.multi_label:  # the pipeline then applies a sigmoid
        options["function_to_apply"] = "softmax"
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        classify.tokenizer.padding_side = sides[start // BATCH_SIZE % len(sides)]
        for row, answer in zip(rows, classify([golden.texts[row] for row in rows], **options), strict=True):
            scores = {score["label"]: score["score"] for score in answer}
            probabilities[row] = torch.tensor([scores.get(label, math.nan) for label in golden.labels])
    return compare(
        golden, probabilities, tolerance=tolerance, ids=classify.tokenizer(golden.texts)["input_ids"]
    )
