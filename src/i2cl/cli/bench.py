"""`i2cl bench`."""

from dataclasses import asdict
from typing import Annotated

import typer

from i2cl.cli import console, load, options

PREFIX_TOKENS = (100, 500)
PREFIX_TASKS = (1, 10)


def bench(
    model: options.Model,
    queries: Annotated[int, typer.Option(min=1, help="Texts to classify.")] = 200,
    pairs: Annotated[int, typer.Option(min=1, help="Paired runs of every comparison.")] = 5,
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    offload_folder: options.OffloadFolder = None,
    quantization: options.Quantization = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
    seed: options.NoSeed = 0,
    json: options.Json = False,
) -> None:
    """Time fit and predict on made-up texts, against the plain model and few-shot; with peak memory."""
    from i2cl.benchmark import measures
    from i2cl.benchmark.prefixed import against_prefix
    from i2cl.benchmark.workload import Workload

    decoder = load.decoder(
        model,
        load.ModelOptions(
            device, dtype, device_map, revision, trust_remote_code, offload_folder, quantization
        ),
    )
    work = Workload.make(decoder, queries, seed=seed)
    limit = (decoder.max_length or 10**9) - max(map(len, work.queries))
    with console.progress(6, "timing") as bar:
        rows = []
        for step in measures.steps(work, pairs):
            rows += step
            bar.advance()
        fitting = [tokens for tokens in PREFIX_TOKENS if tokens <= limit]
        against = [asdict(row) for row in against_prefix(work, fitting, PREFIX_TASKS)]
        bar.advance()
    if json:
        console.print_json({"rows": [asdict(row) for row in rows], "against_cached_prefix": against})
        return
    console.print_table(
        f"{model}: {queries} texts with the lengths of SST-2's, medians of {pairs} paired runs",
        [
            {
                "what": row.name,
                "measured": f"{row.value:.3g} {row.unit}",
                "peak memory": _megabytes(row.detail.get("peak_memory_bytes")),
            }
            for row in rows
        ],
    )
    if against:
        console.print_table(
            "I2CL against few-shot with its demonstrations cached", [_served(row) for row in against]
        )


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f} MB"


def _kilobytes(size: float) -> str:
    return f"{size / 1e3:,.0f} kB"


def _served(row: dict[str, float]) -> dict[str, object]:
    return {
        "demonstration tokens": row["demonstration_tokens"],
        "tasks": row["tasks"],
        "I2CL queries/s": f"{row['i2cl_queries_per_second']:.0f}",
        "few-shot queries/s": f"{row['few_shot_queries_per_second']:.0f}",
        "I2CL cache": _kilobytes(row["i2cl_bytes"]),
        "few-shot cache": _kilobytes(row["few_shot_bytes"]),
        "first use": f"{1000 * row['few_shot_first_use_seconds']:.1f} ms",
    }
