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
    said += [injection.encoder_bias.encoder] if injection.encoder_bias is not None else []
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    encoder = injection.encoder_bias
    said_by_encoder = None if encoder is None else encoder.weights
    more = [one for one in (injection.word_weights, said_by_encoder) if one is not None]
    for tensor in (injection.context.values, injection.coefficients, *more):
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
