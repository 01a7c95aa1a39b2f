"""Check and time calibration and prediction with the shape of Llama-2-7B on one GPU.

python benchmarks/gpu.py -o results/gpu.json
"""

import argparse
import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import measures
from i2cl import CalibrationConfig, Decoder, calibrate, extract
from i2cl.core.edits import LinearEdit
from i2cl.models.memory import peak_memory
from measures import seconds
from workload import Workload, random_decoder


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Measure the operations per second of a large matrix product; a multiply-add counts as two."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.matmul(left, right)
    repeats = 20
    taken = seconds(lambda: [torch.matmul(left, right) for _ in range(repeats)], device)
    return 2 * size**3 * repeats / taken


def check(decoder: Decoder) -> dict[str, float]:
    """Return the relative error of an injected output in this precision against float64."""
    d = decoder.d_model
    output = torch.randn(1, 64, d, device=decoder.device, dtype=decoder.model.dtype)
    values = torch.randn(decoder.layers, 2, d)
    coefficients = torch.tensor([0.1, 1.003]).repeat(decoder.layers, 2, 1)
    batch: Any = None
    result = LinearEdit(values, coefficients).output(0, 0, output, batch).double().cpu()
    wanted = 0.1 * values[0, 0].double() + 1.003 * output.double().cpu()
    slope = (
        (result - 0.1 * values[0, 0].double()) * output.double().cpu()
    ).sum() / output.double().cpu().square().sum()
    return {
        "relative_error": ((result - wanted).norm() / wanted.norm()).item(),
        "beta_found": slope.item(),
        "beta_wanted": 1.003,
    }


def calibration(work: Workload, recipe: str, **changes: object) -> dict[str, Any]:
    """Time a calibration after a short warm-up, and return its time, loss and memory."""
    context = extract(work.decoder, work.task, work.demonstrations)
    run = partial(calibrate, work.decoder, work.task, work.demonstrations, context)
    run(CalibrationConfig.recipe(recipe, **{**changes, "epochs": 2, "passes": 2}))
    kept = []
    with peak_memory(work.decoder.device) as peak:
        taken = seconds(
            lambda: kept.append(run(CalibrationConfig.recipe(recipe, **changes))), work.decoder.device
        )
    history = kept[0].history
    return {
        "recipe": recipe,
        **changes,
        "seconds": taken,
        "passes": len(history),
        "first_loss": history[0],
        "last_loss": history[-1],
        "added_memory_bytes": peak.added,
    }


def prediction(work: Workload, rate: float) -> dict[str, Any]:
    """Measure the share of the matrix rate that prediction reaches, counting the matrices of all blocks."""
    injection = work.injection()
    injection.scores(work.decoder, work.texts)
    taken = seconds(lambda: injection.scores(work.decoder, work.texts), work.decoder.device)
    matrices = sum(
        parameter.numel()
        for block in work.decoder.blocks
        for parameter in block.parameters()
        if parameter.dim() > 1
    )
    tokens = sum(map(len, work.queries))
    return {
        "queries": len(work.texts),
        "tokens": tokens,
        "seconds": taken,
        "queries_per_second": len(work.texts) / taken,
        "share_of_matrix_rate": 2 * matrices * tokens / taken / rate,
    }


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--shape", default="llama-2-7b", help="of shapes.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=100, help="of the paper's recipe")
    parser.add_argument("--token-budget", type=int, default=32768)
    given = parser.parse_args()
    started = time.perf_counter()
    device = torch.device(given.device)
    decoder = random_decoder(given.shape, given.device, torch.bfloat16)
    decoder.token_budget = given.token_budget
    work = Workload.make(decoder, given.queries)
    rate = matrix_rate(device, torch.bfloat16, 8192 if device.type == "cuda" else 256)
    results = {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "shape": given.shape,
        "matrix_operations_per_second": rate,
        "check": check(decoder),
        "calibration": [
            calibration(work, "paper", epochs=given.epochs),
            calibration(work, "paper", epochs=given.epochs, batch_size=len(work.demonstrations)),
            calibration(work, "fast"),
        ],
        "prediction": prediction(work, rate),
        "injected_over_plain": asdict(measures.injected_over_plain(work, work.injection(), 21)),
        "mixed_over_one": asdict(measures.mixed_over_one(work, 21)),
    }
    results["seconds"] = time.perf_counter() - started
    text = json.dumps(results, indent=1)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
