"""Texts for `predict`, chunk by chunk and in order, and what tells one artefact's answers from another's."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.interfaces.batch_prediction.tables import NUMBER
from i2cl.tasks.formats import RowFormat
from i2cl.tasks.rows import Query, read_queries


@dataclass(frozen=True)
class Texts:
    """Chunks of a file's texts, see `i2cl.tasks.rows.read_queries`."""

    source: str  # path, or ``-`` for stdin
    kind: RowFormat | None = None  # the file's format
    column: str = "text"  # which column or key holds the text
    chunk: int = 512  # texts at a time
    skip: int = 0  # texts left out at the start; they are read and checked all the same
    kept: tuple[str, ...] = ()  # columns that come back with the answers
    numbered: bool = False  # whether the number of the row does too, before them: from 1, without the header

    def __post_init__(self) -> None:
        if self.numbered and NUMBER in self.kept:
            cure = "leave one out"
            raise I2CLError(f"--keep {NUMBER} and --row-number would both be called {NUMBER!r}: {cure}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of what comes back."""
        return (NUMBER, *self.kept) if self.numbered else self.kept

    def __iter__(self) -> Iterator[list[Query]]:
        rows = enumerate(read_queries(self.source, self.kind, self.column, self.kept), start=1)
        queries = (Query(text, (number, *kept) if self.numbered else kept) for number, (text, kept) in rows)
        waiting = islice(queries, self.skip, None)
        while chunk := list(islice(waiting, self.chunk)):
            yield chunk


def digest(injection: Injection) -> str:
    """SHA-256 of all that an injection's answers depend on."""
    said: list[object] = [injection.task.to_dict(), asdict(injection.base), injection.positions]
    said += [injection.scoring, injection.context.config.site, injection.seed, injection.label_bias]
    said += [injection.temperature] if injection.temperature != 1 else []  # other digests are as before
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for tensor in (injection.context.values, injection.coefficients):
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
