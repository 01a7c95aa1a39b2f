"""Texts for `predict` in chunks, and a digest of everything that an artefact's answers depend on."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice

from i2cl.core.injection import Injection
from i2cl.tasks.formats import RowFormat
from i2cl.tasks.rows import Query, read_queries


def chunks(
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
    """Yield the texts of a file in chunks of ``size``, see `i2cl.tasks.rows.read_queries`.

    Args:
        source: the file; ``-`` is stdin.
        kind: its format.
        column: name of the text column.
        kept: columns to repeat beside the answer.
        size: rows per chunk.
        start: number of rows to leave out at the beginning; they are read and checked all the same.
        numbered: put the number of the row, from 1 without the header, before the kept columns.
        skip_bad: yield unusable rows too, with their error.
    """
    rows = enumerate(read_queries(source, kind, column, kept, skip=skip_bad), start=1)
    queries = (query._replace(kept=(number, *query.kept)) if numbered else query for number, query in rows)
    waiting = islice(queries, start, None)
    while chunk := list(islice(waiting, size)):
        yield chunk


def digest(injection: Injection) -> str:
    """Return the SHA-256 of everything that an injection's answers depend on."""
    said: list[object] = [injection.task.to_dict(), asdict(injection.base), injection.positions]
    said += [injection.scoring, injection.context.config.site, injection.seed, injection.label_bias]
    said += [injection.temperature] if injection.temperature != 1 else []  # other digests are as before
    said += [injection.encoder_bias.encoder] if injection.encoder_bias is not None else []
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    encoder = injection.encoder_bias
    said_by_encoder = None if encoder is None else encoder.weights
    more = [one for one in (injection.word_weights, said_by_encoder) if one is not None]
    for tensor in (injection.context.values, injection.coefficients, *more):
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
