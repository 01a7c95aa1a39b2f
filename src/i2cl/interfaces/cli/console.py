"""Terminal output: tables, progress bars, errors. Results go to stdout, everything else to stderr."""

import codecs
import io
import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from i2cl.storage.atomic import write_errors
from i2cl.tasks.files import ReadAsWarning

if TYPE_CHECKING:
    from i2cl.experiments.records import Run

MAX_TABLE_WIDTH = 10_000  # characters
SPEED_PERIOD = 3600.0  # seconds of progress that the estimated time left is based on
HEARTBEAT_S = 60.0  # time between two lines of progress where stderr is not a terminal
SHORT_S = 10.0  # the estimated time of a shorter fit is not printed

ESCAPED = "i2cl.escaped"  # name of the codec error handler

# emoji=False: codes such as :joy: may be labels
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: escape characters that cannot be encoded as JSON does."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPED, _escaped)


def escape() -> None:
    """Make stdout and stderr escape characters that they cannot encode, as on an ASCII terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


_BARS: list["Bar"] = []  # active progress bars; only the innermost one is visible


def print_json(value: Any) -> None:
    """Print a JSON document on stdout, with null for numbers that are not finite."""
    with write_errors("stdout"):
        json.dump(_finite(value), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
        sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(text: str, *, wrapped: bool = False) -> None:
    """Print plain text on stdout; ``wrapped`` breaks lines between words at the terminal's width."""
    with write_errors("stdout"):
        out.print(text, markup=False, soft_wrap=not wrapped)


def answer(record: Any, text: str, *, as_json: bool) -> None:
    """Print the result of a command on stdout: a record as JSON, or text."""
    if as_json:
        print_json(record)
    else:
        say(text)


def note(text: str) -> None:
    """Print an informational line on stderr."""
    err.print(text, markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error on stderr, on a single line."""
    err.print(Text("error:", "bold red"), Text(" ".join(message.split())), soft_wrap=True)


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table whose columns are the keys of the first row; numbers are aligned to the right.

    On a narrow terminal, the gaps between columns shrink first; then cells are folded, between words and
    after a plus. If that is not enough, lines exceed the terminal's width: no text is cut off.
    """
    unlimited = out.options.update(max_width=MAX_TABLE_WIDTH)
    table = _table(title, rows, fold="+")
    table.collapse_padding = out.measure(table, options=unlimited).maximum > out.width
    if out.measure(table, options=unlimited).maximum > out.width:
        table = _table(title, rows, fold="+\n")
        table.collapse_padding = True
        if (least := out.measure(table, options=out.options.update(max_width=1)).minimum) > out.width:
            table.width = least
    with write_errors("stdout"):
        out.print(table, crop=False)


def _table(title: str, rows: Sequence[Mapping[str, object]], fold: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        cells = [name, *(str(row[name]).replace("+", fold) for row in rows)]
        number = isinstance(value, int | float) or str(value)[:1].isdigit()
        longest = max(len(word) for cell in (*cells, "-") for word in cell.split())
        table.add_column(Text(name), justify="right" if number else "left", min_width=longest)
    for row in rows:
        table.add_row(*(Text(str(row[name]).replace("+", fold)) for name in rows[0]))
    return table


@contextmanager
def progress(total: float | None, what: str, *, shown: bool = True) -> Iterator["Bar"]:
    """Show progress on stderr while the block runs: a bar on a terminal, else a line every minute.

    Args:
        total: number of steps; None if unknown.
        what: description of the work.
        shown: False for a block that writes to stdout, which a bar would capture.
    """
    described = TextColumn("{task.description}", markup=False)
    columns = (described, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    options: Any = {"transient": True, "disable": not (shown and err.is_terminal)}
    with Progress(*columns, console=err, speed_estimate_period=SPEED_PERIOD, **options) as bars:
        bar = Bar(bars, bars.add_task(what, total=total), what)
        _BARS.append(bar)
        try:
            with _heartbeat(bar):
                yield bar
        finally:
            _BARS.remove(bar)


@contextmanager
def _heartbeat(bar: "Bar") -> Iterator[None]:
    """Print a line of progress every `HEARTBEAT_S` seconds where stderr is not a terminal."""
    if err.is_terminal or parent_process() is not None:
        yield
        return
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            if _BARS[-1:] == [bar]:
                note(bar.status())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show what the block waits for: in the current bar, as a status line, or as a line per minute."""
    if _BARS:
        bar, before = _BARS[-1], _BARS[-1].what
        bar.describe(what)
        try:
            yield
        finally:
            bar.describe(before)
    elif parent_process() is not None:  # worker processes would overwrite each other's lines
        yield
    elif err.is_terminal:
        with err.status(Text(what)):
            yield
    else:
        with progress(None, what):
            yield


def duration(seconds: float) -> str:
    """Format seconds, such as "40 s" or "5 minutes"."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:,.0f} minutes"


class Bar:
    """One line of progress."""

    def __init__(self, shown: Progress, task: TaskID, what: str) -> None:
        self._shown = shown
        self._task = task
        self._started = time.perf_counter()
        self.what = what  # description of the current work

    def advance(self, amount: float = 1) -> None:
        """Advance by a number of steps."""
        self._shown.advance(self._task, amount)

    def restart(self, total: float | None, what: str) -> None:
        """Begin the next stage of the work."""
        self._shown.reset(self._task, total=total)
        self.describe(what)

    def advance_stage(self, what: str, total: float, amount: float) -> None:
        """Advance within a stage of the work, which begins with the first call."""
        if self.what != what:
            self.restart(total, what)
        self.advance(amount)

    def epoch(self, step: int, steps: int, loss: float) -> None:
        """Show a step of a fit, and the time left if later steps take as long as those so far."""
        self._shown.update(self._task, completed=step, total=steps)
        seconds = (time.perf_counter() - self._started) * (steps - step) / max(1, step)
        left = f", up to {duration(seconds)} left" if 0 < step < steps else ""
        self.describe(f"calibrating, loss {loss:.3f}{left}")

    def status(self) -> str:
        """Return the description and the progress so far, for output that is not a terminal."""
        task = self._shown.tasks[0]
        steps = f", {task.completed:,.0f} of {task.total:,.0f}" if task.total and task.completed else ""
        return f"{self.what}{steps}: {duration(time.perf_counter() - self._started)} so far"

    def run(self, run: "Run") -> None:
        """Advance by one run, and show its accuracy."""
        self.advance()
        self.describe(f"{run.task} {run.method} seed {run.seed}: {run.accuracy:.2f}")

    def describe(self, what: str) -> None:
        """Change the description."""
        self.what = what
        self._shown.update(self._task, description=what)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each of the package's own warnings once, as a line on stderr, and hide all others."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_rest: Any, **_more: Any) -> None:
        text = str(message)
        if category.__module__.startswith("i2cl") and text not in seen:
            seen.add(text)
            word = Text("note:") if issubclass(category, ReadAsWarning) else Text("warning:", "yellow")
            err.print(word, Text(text), soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
