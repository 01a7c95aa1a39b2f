"""Experiment definitions: a grid of methods, tasks and seeds, read from TOML.

The package includes a file for each table and figure of the paper (``builtin/*.toml``). Users write their own
in the same format.
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
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its first n multiples modulo 1 are evenly spread over [0, 1), for every n
DEFAULT_REFERENCE = "I2CL"
CELL_FIELDS = ("study", "method", "options", "demonstrations", "chat")  # fields that rows copy to their cells
MAX_SEEDS = 10_000  # a larger number is a typing mistake
_TableView = Literal["tasks", "average", "cost", "comparison", "confidence"]
_ScoreFigure = Literal["bars", "reliability", "risk-coverage", "efficiency", "shots", "matrix"]
_FitFigure = Literal["vectors", "coefficient-map", "class-vectors", "coefficients"]
View = Literal[_TableView, _ScoreFigure, _FitFigure]  # tables and figures; shots and matrix are both


class Frozen(BaseModel):
    """Base class of immutable models that reject unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Wording(Frozen):
    """Settings of a task that is a file: its template, and the path of its test rows."""

    template: str | None = None
    test: str | None = None


class Cell(Frozen):
    """One run of a grid, and its identity: equal cells have equal results up to rounding."""

    model: str  # name or path that the model is loaded from
    revision: str | None = None  # branch, tag or commit of a hub model
    dtype: str | None = None  # requested precision; None for the default
    task: str  # name or file
    # "method" fits a method; "move" injects what was fitted on the task sources[0]; "transfer" starts the
    # calibration from the related tasks in sources
    study: Study = "method"
    method: str = "i2cl"  # see `i2cl.methods.make_methods`
    options: dict[str, Value] = Field(default_factory=dict)  # options of the method
    shots: int | None = None  # demonstrations per class; None for the task's own number
    # drawn at random, or the worst of several draws (`i2cl.experiments.paper.worst_demonstrations`)
    demonstrations: Demonstrations = "random"
    sources: tuple[str, ...] = ()  # other tasks that the study uses
    seed: int = 0  # seed of the draw and of the fit
    limit: int | None = None  # maximum number of queries; None for all
    # classes with an even id are this many times as frequent as others, in queries and unlabelled texts
    skew: int = Field(1, ge=1)
    # whether prompts use the tokenizer's chat template and the task's instruction
    chat: bool = False
    # settings of the task and of the sources that are files, by name
    own: dict[str, Wording] = Field(default_factory=dict)

    @property
    def wording(self) -> Wording:
        """The grid's settings of the task."""
        return self.own.get(self.task, Wording())

    @property
    def key(self) -> str:
        """Name of the cell in a store: 16 hexadecimal digits of a hash of all non-default fields."""
        text = json.dumps(self.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class GridRow(Frozen):
    """One row of a table, or one line or group of bars of a figure.

    Fields without a comment are those of `Cell`. The studies ``move`` and ``transfer`` use I2CL with its
    default options and the task's own number of shots.
    """

    name: str  # shown in the report; the paper's name if the paper prints the row
    study: Study = "method"
    method: str = "i2cl"
    options: dict[str, Value] = Field(default_factory=dict)
    # demonstrations per class, several for a curve; empty for the task's own number
    shots: tuple[Annotated[int, Field(ge=1)], ...] = ()
    demonstrations: Demonstrations = "random"
    chat: bool = False
    seeds: int | None = Field(None, ge=1)  # maximum number of seeds: 1 for a deterministic method

    @model_validator(mode="after")
    def _studies_use_default_i2cl(self) -> Self:
        default = (self.method, self.options, self.shots, self.demonstrations) == ("i2cl", {}, (), "random")
        if self.study != "method" and not default:
            raise ValueError(
                f"row {self.name!r} has study={self.study}, which uses I2CL with its defaults: remove "
                "method, options, shots and demonstrations"
            )
        return self

    def cells(self, base: Cell, tasks: Sequence[str], max_shots: int | None) -> Iterator[Cell]:
        """Return the row's cells for one seed."""
        fields = {name: getattr(self, name) for name in CELL_FIELDS}
        curve = [shots for shots in self.shots if max_shots is None or shots <= max_shots]
        for task, shots in itertools.product(tasks, curve if self.shots else (None,)):
            others = tuple(other for other in tasks if other != task)
            moves: Sequence[tuple[str, ...]] = [(source,) for source in tasks]
            for sources in {"method": [()], "move": moves, "transfer": [others]}[self.study]:
                own = {name: wording for name, wording in base.own.items() if name in (task, *sources)}
                update = {"task": task, "shots": shots, "sources": sources, "own": own}
                yield base.model_copy(update=fields | update)

    def holds(self, cell: Cell) -> bool:
        """Whether a cell belongs to this row, whatever its model, task, seed and queries."""
        if self.method != cell.method:  # fast path
            return False
        same = all(getattr(self, name) == getattr(cell, name) for name in CELL_FIELDS)
        return same and cell.shots in (self.shots or (None,))


class Scale(Frozen):
    """Size of a run of an experiment."""

    seeds: int = Field(5, ge=1, le=MAX_SEEDS)  # number of seeds, starting at 0
    limit: int = Field(500, ge=1)  # maximum number of queries per task
    # number of tasks, spread evenly over their list; None for all
    tasks: int | None = Field(None, ge=1)
    shots: int | None = Field(None, ge=1)  # maximum demonstrations per class of a curve; None for all


def _default_reference(data: dict[str, Any]) -> str:
    names = [row.name for row in data.get("rows", ())]  # no rows if they are invalid, which pydantic reports
    return names[0] if names and DEFAULT_REFERENCE not in names else DEFAULT_REFERENCE


class Experiment(Frozen):
    """A table or figure: rows x tasks x seeds, and the views that a report shows."""

    name: str  # of the file
    file: str | None = None  # path of the file; None for a built-in experiment
    title: str  # heading in the report
    paper: str = "-"  # number of the table or figure in the paper, or "-"
    measures: str  # one sentence for the report: what is measured
    tasks: Literal["all"] | tuple[str, ...] = "all"  # names, or "all" for the model's tasks
    rows: tuple[GridRow, ...] = Field(min_length=1)  # what is compared
    # template and test rows of tasks that are files, by name
    own: dict[str, Wording] = Field(default_factory=dict)
    # name of the reference row of all tests; default: "I2CL" if there is such a row, else the first
    against: str = Field(default_factory=_default_reference)
    # see `Cell.skew`; all rows are run with each
    skews: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    views: tuple[View, ...] = ("tasks", "comparison")  # tables and figures of the report, in this order
    # name of the paper's tables with the same rows (`i2cl.experiments.report.printed`)
    printed: str | None = None
    full: Scale = Scale()  # the paper's scale
    quick: Scale = Scale(seeds=2, limit=100, tasks=5, shots=20)  # scale with --quick

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.tasks != "all" and (unknown := sorted(set(self.own) - set(self.tasks))):
            raise ValueError(f"own names {unknown[0]!r}, which is not one of the tasks: add it to tasks")
        if not self.tasks:
            raise ValueError('tasks is empty: name one, or leave it out for "all"')
        names = [row.name for row in self.rows]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two rows are named {duplicates[0]!r}: rename one")
        if self.against not in names:
            raise ValueError(f"against is {self.against!r}, which is not a row: use the name of a row")
        return self

    @property
    def command(self) -> str:
        """Command that runs it, without model, scale and store."""
        return f"i2cl experiment run {shlex.quote(self.file or self.name)}"

    def cells(self, base: Cell, tasks: Sequence[str], scale: Scale) -> Iterator[Cell]:
        """Return all cells, seed by seed, so that an interrupted run has complete tables of fewer seeds.

        Args:
            base: gives model, revision and dtype.
            tasks: names that ``tasks="all"`` stands for.
            scale: numbers of seeds, queries, tasks and shots.
        """
        chosen = spread(tasks if self.tasks == "all" else self.tasks, scale.tasks)
        for seed, skew in itertools.product(range(scale.seeds), self.skews):
            fields = {"seed": seed, "limit": scale.limit, "skew": skew, "own": self.own}
            common = base.model_copy(update=fields)
            for row in self.rows:
                if row.seeds is None or seed < row.seeds:
                    yield from row.cells(common, chosen, scale.shots)


def spread(names: Sequence[str], count: int | None) -> tuple[str, ...]:
    """Choose ``count`` names, spread evenly over the list; a smaller choice is a subset of a larger one."""
    total, steps = len(names), itertools.count()
    chosen: set[int] = set()
    while len(chosen) < (total if count is None else min(count, total)):
        chosen.add(int(total * (next(steps) * GOLDEN_RATIO % 1)))
    return tuple(names[index] for index in sorted(chosen))
