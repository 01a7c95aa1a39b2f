"""Read texts for `predict` in chunks, and identify an injection by a digest."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice

from i2cl.core.injection import Injection
from i2cl.tasks.formats import RowFormat
from i2cl.tasks.rows import Query, read_queries


def read_chunks(
    source: str,
    kind: RowFormat | None = None,
    column: str = "text",
    kept: tuple[str, ...] = (),
    *,
    size: int,
    start: int = 0,
    numbered: bool = False,
    skip_bad: bool = False,
) -> Iterator[list[Query]]:
    """Yield the texts of a file in chunks, see `i2cl.tasks.rows.read_queries`.

    Args:
        source: path of the file; ``-`` for stdin.
        kind: format of the file.
        column: name of the text column.
        kept: columns to repeat in the output.
        size: rows per chunk.
        start: number of rows to skip at the beginning; they are still read and checked.
        numbered: put the row number (from 1, without the header) before the kept columns.
        skip_bad: yield unusable rows too, with their error.
    """
    rows = enumerate(read_queries(source, kind, column, kept, skip=skip_bad), start=1)
    queries = (query._replace(kept=(number, *query.kept)) if numbered else query for number, query in rows)
    remaining = islice(queries, start, None)
    while chunk := list(islice(remaining, size)):
        yield chunk


def digest(injection: Injection) -> str:
    """Return the SHA-256 of everything that an injection's predictions depend on."""
    settings: list[object] = [injection.task.to_dict(), asdict(injection.base), injection.positions]
    settings += [injection.scoring, injection.context.config.hook_point, injection.seed, injection.label_bias]
    tensors = [injection.context.values, injection.coefficients]
    # Optional parts are appended only if present, so that digests of other injections do not change.
    if injection.ensemble is not None:
        settings.append(injection.ensemble.description())
        tensors += [tensor for expert in injection.ensemble.experts for tensor in expert.tensors().values()]
    elif injection.temperature != 1:
        settings.append(injection.temperature)
    if injection.head.thresholds is not None:
        settings.append(injection.head.thresholds)
    if injection.word_weights is not None:
        tensors.append(injection.word_weights)
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for tensor in tensors:
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
