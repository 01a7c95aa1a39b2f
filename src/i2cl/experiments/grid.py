"""Experiments as data: a table or figure of the paper is a grid of cells, written in TOML.

The package brings one file for each (``builtin/*.toml``); users write their own in the same format.
"""

import hashlib
import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Value = str | int | Annotated[float, Field(allow_inf_nan=False)] | bool
Study = Literal["method", "move", "transfer"]
Demonstrations = Literal["random", "worst"]
GOLDEN = (5**0.5 - 1) / 2  # its multiples fill [0, 1) evenly, however many are taken
DEFAULT_AGAINST = "I2CL"  # row that others are tested against where it is there and nobody says otherwise
SHARED = ("study", "method", "options", "demonstrations", "chat")  # fields of a row that are its cells' too
MOST_SEEDS = 10_000  # beyond which a number of seeds is a slip
_Tables = Literal["tasks", "average", "cost", "comparison", "confidence"]
_Scores = Literal["bars", "reliability", "risk-coverage", "efficiency", "shots", "matrix"]
_Fits = Literal["vectors", "coefficient-map", "class-vectors", "coefficients"]
View = Literal[_Tables, _Scores, _Fits]  # what a report shows; shots and matrix are tables too


class Frozen(BaseModel):
    """What cannot be changed, and takes no field that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Wording(Frozen):
    """What a grid says of a task: the template, and ``test``, a file with its test rows."""

    template: str | None = None
    test: str | None = None


class Cell(Frozen):
    """One thing to run, and its identity: equal cells have equal results up to rounding."""

    model: str  # as given at loading
    revision: str | None = None  # of a hub model, or None
    dtype: str | None = None  # as asked for, or None for the default
    task: str  # name, or file
    # ``method`` fits a method; ``move`` injects what was fitted on the task ``sources[0]``; ``transfer``
    # calibrates again from related ones of ``sources``
    study: Study = "method"
    method: str = "i2cl"  # name, see `i2cl.methods.make_methods`
    options: dict[str, Value] = Field(default_factory=dict)  # of the method
    shots: int | None = None  # demonstrations per class, None for the task's own
    # drawn at random, or the worst of several groups (see `i2cl.experiments.studies`)
    demonstrations: Demonstrations = "random"
    sources: tuple[str, ...] = ()  # other tasks that the study uses
    seed: int = 0  # of demonstrations and method
    limit: int | None = None  # queries of the task
    # how many times as frequent as the others classes with an even id are, among queries and unlabelled texts
    skew: int = Field(1, ge=1)
    # whether everything is asked in the tokenizer's chat template, after the task's instruction
    chat: bool = False
    # what the grid says of the task and the sources, by name
    own: dict[str, Wording] = Field(default_factory=dict)

    @property
    def wording(self) -> Wording:
        """What the grid says of the task."""
        return self.own.get(self.task, Wording())

    @property
    def key(self) -> str:
        """Name of the cell in a store: 16 hexadecimal digits of a hash of all that is not default."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class GridRow(Frozen):
    """One row of a table, or one line or group of bars of a figure.

    The others are those of a `Cell`. What is moved or transferred is plain I2CL, of the task's own shots.
    """

    name: str  # as shown; the paper's name where it prints the row
    study: Study = "method"
    method: str = "i2cl"
    options: dict[str, Value] = Field(default_factory=dict)
    # demonstrations per class, several for a curve; empty for the task's own
    shots: tuple[Annotated[int, Field(ge=1)], ...] = ()
    demonstrations: Demonstrations = "random"
    chat: bool = False
    seeds: int | None = Field(None, ge=1)  # at most so many: one for what no seed can change

    @model_validator(mode="after")
    def _plain_where_used(self) -> Self:
        plain = (self.method, self.options, self.shots, self.demonstrations) == ("i2cl", {}, (), "random")
        if self.study != "method" and not plain:
            cure = "leave out method, options, shots and demonstrations"
            raise ValueError(f"row {self.name!r} has study={self.study}, which takes plain I2CL: {cure}")
        return self

    def cells(self, base: Cell, tasks: Sequence[str], most_shots: int | None) -> Iterator[Cell]:
        """The row's cells for one seed."""
        fields = {name: getattr(self, name) for name in SHARED}
        curve = [shots for shots in self.shots if most_shots is None or shots <= most_shots]
        for task, shots in itertools.product(tasks, curve if self.shots else (None,)):
            others = tuple(other for other in tasks if other != task)
            moves: Sequence[tuple[str, ...]] = [(source,) for source in tasks]
            for sources in {"method": [()], "move": moves, "transfer": [others]}[self.study]:
                used = {name: wording for name, wording in base.own.items() if name in (task, *sources)}
                more = {"task": task, "shots": shots, "sources": sources, "own": used}
                yield base.model_copy(update=fields | more)

    def holds(self, cell: Cell) -> bool:
        """Whether a cell belongs to this row, whatever its model, task, seed and queries."""
        if self.method != cell.method:  # most often, and told fast
            return False
        same = all(getattr(self, name) == getattr(cell, name) for name in SHARED)
        return same and cell.shots in (self.shots or (None,))


class Scale(Frozen):
    """How much of an experiment is run."""

    seeds: int = Field(5, ge=1, le=MOST_SEEDS)  # counted from 0
    limit: int = Field(500, ge=1)  # queries per task
    # how many of the tasks, spread evenly over their list; None for all
    tasks: int | None = Field(None, ge=1)
    shots: int | None = Field(None, ge=1)  # the most demonstrations per class of a curve; None for all


def _against(given: dict[str, Any]) -> str:
    """The row that others are tested against where nobody says so; wrong rows are told as such."""
    names = [row.name for row in given.get("rows", ())]
    return names[0] if names and DEFAULT_AGAINST not in names else DEFAULT_AGAINST


class Experiment(Frozen):
    """A table or figure: rows x tasks x seeds, and how the report shows them."""

    name: str  # of the file
    file: str | None = None  # where it was read from, unless the package brings it
    title: str  # what it is about
    paper: str = "-"  # number of the table or figure in the paper, or "-"
    measures: str  # what is measured, in a sentence
    tasks: Literal["all"] | tuple[str, ...] = "all"  # names, or "all" for the tasks that belong to the model
    rows: tuple[GridRow, ...] = Field(min_length=1)  # what is compared
    # template and test rows of tasks, by name: files of rows have none by themselves
    own: dict[str, Wording] = Field(default_factory=dict)
    # name of the row that others are tested against; default: "I2CL", or else the first row
    against: str = Field(default_factory=_against)
    # see `Cell`; for each, all rows once
    skews: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    views: tuple[View, ...] = ("tasks", "comparison")  # what the report shows, in this order
    # name of the paper's printed tables to set beside (`i2cl.experiments.report.printed`)
    printed: str | None = None
    full: Scale = Scale()  # scale of the paper
    quick: Scale = Scale(seeds=2, limit=100, tasks=5, shots=20)  # scale under ``--quick``

    @model_validator(mode="after")
    def _rows_by_name(self) -> Self:
        if self.tasks != "all" and (strange := sorted(set(self.own) - set(self.tasks))):
            raise ValueError(f"own names {strange[0]!r}, which is none of the tasks: name one of them")
        if not self.tasks:
            raise ValueError('tasks is empty: name one, or leave it out for "all"')
        names = [row.name for row in self.rows]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two rows are called {twice[0]!r}: rename one")
        if self.against not in names:
            raise ValueError(f"against is {self.against!r}, which is none of the rows: name one of them")
        return self

    @property
    def command(self) -> str:
        """What runs it, but for model, scale and store."""
        return f"i2cl experiment run {shlex.quote(self.file or self.name)}"

    @property
    def timed(self) -> bool:
        """Whether it shows the seconds of single fits, so that no seeds may be fitted together."""
        return "cost" in self.views

    def cells(self, base: Cell, tasks: Sequence[str], scale: Scale) -> Iterator[Cell]:
        """All cells, seed by seed, so that an unfinished run holds whole tables of fewer seeds.
        ``base`` gives model, revision and dtype; ``tasks`` are what "all" means for this model.
        """
        chosen = spread(tasks if self.tasks == "all" else self.tasks, scale.tasks)
        for seed, skew in itertools.product(range(scale.seeds), self.skews):
            fields = {"seed": seed, "limit": scale.limit, "skew": skew, "own": self.own}
            common = base.model_copy(update=fields)
            for row in self.rows:
                if row.seeds is None or seed < row.seeds:
                    yield from row.cells(common, chosen, scale.shots)


def spread(names: Sequence[str], count: int | None) -> tuple[str, ...]:
    """So many of the names, evenly over the list; a smaller choice is part of every larger one."""
    total, steps = len(names), itertools.count()
    chosen: set[int] = set()
    while len(chosen) < (total if count is None else min(count, total)):
        chosen.add(int(total * (next(steps) * GOLDEN % 1)))
    return tuple(names[place] for place in sorted(chosen))
