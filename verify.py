"""Check an export in the program that runs it: transformers, PEFT, or a vLLM server."""

import json
import math
import os
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from transformers import AutoTokenizer

from i2cl.errors import I2CLError
from i2cl.export.golden import Golden, Verification, compare
from i2cl.export.peft import is_adapter, load_adapter
from i2cl.models.loading import load_model_and_tokenizer

KEY = "VLLM_API_KEY"  # environment variable with the server's API key, as vLLM's own server reads it
SERVER_TOLERANCE = 0.05  # servers run in lower precision
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
    if model is not None and not is_adapter(folder):
        raise I2CLError(f"{str(folder)!r} is not a PEFT adapter: leave out --model")
    if golden.form == "classifier":
        sides = ("right", "left") if golden.left_padding else ("right",)
        return verify_classifier(load_pipeline(folder, device), golden, sides, tolerance=tolerance)
    loaded: Any
    if is_adapter(folder):
        loaded = load_adapter(folder, model, device)
    else:
        loaded, _ = load_model_and_tokenizer(str(folder), dtype="float32", device=device)
    with torch.no_grad():
        rows = [torch.tensor([ids], device=loaded.device) for ids in golden.ids]
        logits = torch.stack([loaded(input_ids=row, use_cache=False).logits[0, -1].cpu() for row in rows])
    encoded = AutoTokenizer.from_pretrained(str(folder))(golden.prompts)["input_ids"]
    return compare(golden, golden.label_probabilities(logits.float()), tolerance=tolerance, ids=encoded)


def load_pipeline(folder: str | Path, device: str | torch.device | None = None) -> Any:
    """Load a classifier as transformers' pipeline, in float32."""
    from transformers import pipeline

    return pipeline("text-classification", model=str(folder), device=device or "cpu", dtype=torch.float32)


def verify_classifier(
    classify: Any, golden: Golden, sides: Sequence[str], *, tolerance: float | None = None
) -> Verification:
    """Classify the golden texts in transformers' pipeline, in batches padded on alternating sides."""
    found = torch.zeros(len(golden.texts), len(golden.labels))
    order = sorted(range(len(golden.texts)), key=lambda row: len(golden.ids[row]))
    options = {"top_k": None, "batch_size": BATCH_SIZE, "function_to_apply": "softmax"}
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        classify.tokenizer.padding_side = sides[start // BATCH_SIZE % len(sides)]
        for row, answer in zip(rows, classify([golden.texts[row] for row in rows], **options), strict=True):
            scores = {one["label"]: one["score"] for one in answer}
            found[row] = torch.tensor([scores.get(label, math.nan) for label in golden.labels])
    return compare(golden, found, tolerance=tolerance, ids=classify.tokenizer(golden.texts)["input_ids"])


def verify_server(
    golden: Golden,
    url: str,
    *,
    model: str | None = None,
    task: str | None = None,
    tolerance: float | None = None,
    timeout: float = 60.0,
) -> Verification:
    """Send the golden texts to a vLLM server and compare its answers.

    Source: https://docs.vllm.ai/en/latest/models/pooling_models/, Classification API.

    Args:
        golden: of the classifier that the server runs, or of any export of ``task``.
        url: of the server, with or without ``/v1``.
        model: the server's name of the classifier; default: the first that it lists.
        task: name of a task on a server of the base model with the vLLM plugin, instead of a classifier.
        tolerance: maximum difference of a probability; default: 0.05, which holds in lower precision.
        timeout: seconds to wait for an answer.

    Raises:
        I2CLError: if the server cannot be reached, refuses, or does not classify.
    """
    if not url.startswith(("http://", "https://")):
        raise I2CLError(f"{url!r} is not a server's URL: give one such as http://localhost:8000")
    if golden.form != "classifier" and task is None:
        hint = "export with --to classifier, or name a task of the vLLM plugin with --task"
        raise I2CLError(
            f"this export is a language model, and only servers that classify are checked: {hint}"
        )
    root = url.rstrip("/").removesuffix("/classify").removesuffix("/v1")
    path = "/classify" if task is None else "/v1/i2cl/classify"
    body = {"model": task or model or _first_model(root, timeout), "input": golden.texts}
    reply = _request(f"{root}{path}", body, timeout)
    try:
        answers = sorted(reply["data"], key=lambda answer: int(answer["index"]))
        found = torch.tensor([[float(value) for value in answer["probs"]] for answer in answers])
    except (KeyError, IndexError, TypeError, ValueError):
        raise I2CLError(f"{root}{path} returns no probabilities: does the server classify?") from None
    if found.shape != (shape := (len(golden.texts), len(golden.labels))):
        sizes = f"{tuple(found.shape)} probabilities instead of {shape}"
        raise I2CLError(f"{root}{path} returns {sizes}: does it run another model?")
    limit = max(SERVER_TOLERANCE, golden.tolerance) if tolerance is None else tolerance
    return compare(golden, found, tolerance=limit)


def _first_model(root: str, timeout: float) -> str:
    listed = _request(f"{root}/v1/models", None, timeout)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise I2CLError(f"{root}/v1/models lists no model: name it with --model-name") from None


def _request(url: str, body: dict[str, Any] | None, timeout: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data, headers)  # noqa: S310 - http or https
    try:
        with urlopen(request, timeout=timeout) as reply:  # noqa: S310
            return json.load(reply)
    except HTTPError as error:
        answer = " ".join(error.read().decode(errors="replace")[:200].split())
        raise I2CLError(f"{url} answers {error.code} ({answer})") from None
    except (OSError, HTTPException) as error:
        raise I2CLError(f"cannot reach {url} ({error}): is the server running?") from None
    except (ValueError, RecursionError):
        raise I2CLError(f"{url} does not return JSON: is it a vLLM server?") from None
