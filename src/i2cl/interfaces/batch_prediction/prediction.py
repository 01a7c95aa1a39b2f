"""Texts for `predict`, chunk by chunk and in order, and what tells one artefact's answers from another's."""

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
    skip: int = 0,
    numbered: bool = False,
) -> Iterator[list[Query]]:
    """So many texts of a file at a time, see `i2cl.tasks.rows.read_queries`.
    The first ``skip`` are left out; they are read and checked all the same. If they are ``numbered``, the
    number of the row comes back before the columns that are kept: from 1, without the header.
    """
    rows = enumerate(read_queries(source, kind, column, kept), start=1)
    queries = (Query(text, (number, *cells) if numbered else cells) for number, (text, cells) in rows)
    waiting = islice(queries, skip, None)
    while chunk := list(islice(waiting, size)):
        yield chunk


def digest(injection: Injection) -> str:
    """SHA-256 of all that an injection's answers depend on."""
    said: list[object] = [injection.task.to_dict(), asdict(injection.base), injection.positions]
    said += [injection.scoring, injection.context.config.site, injection.seed, injection.label_bias]
    said += [injection.temperature] if injection.temperature != 1 else []  # other digests are as before
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    weights = [] if injection.word_weights is None else [injection.word_weights]
    for tensor in (injection.context.values, injection.coefficients, *weights):
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
