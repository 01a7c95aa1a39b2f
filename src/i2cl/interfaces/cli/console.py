"""What the command line prints: tables, progress bars, errors. Results go to stdout, the rest to stderr."""

import codecs
import io
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
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

FOLDED = 20  # characters up to which a cell stays in one line, where the terminal has room
GAP = 3  # characters between two columns
SPEED_PERIOD = 3600.0  # seconds that time left is estimated from: an epoch of a large model takes minutes
HEARTBEAT_S = 60.0  # time between two lines of progress where stderr is not a terminal
SHORT_S = 10.0  # the estimate of a shorter fit is not printed

# Of several processes that hold one model together, the first alone speaks and writes.
FIRST = os.environ.get("RANK", "0") == "0"
ESCAPED = "i2cl.escaped"  # name of the way in which streams treat what they cannot show

# Text stands as it is: emoji codes such as :joy: may be somebody's labels.
out = Console(highlight=False, emoji=False, quiet=not FIRST)
err = Console(stderr=True, highlight=False, emoji=False, quiet=not FIRST)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What an encoding cannot hold, as JSON escapes it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPED, _escaped)


def escape() -> None:
    """Let stdout and stderr escape what they cannot show, such as a label on a terminal of ASCII alone."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


_BARS: list["Bar"] = []  # those that are shown now: there is one place for them


def print_json(value: Any) -> None:
    """One JSON document on stdout, with null for what is not finite."""
    if not FIRST:
        return
    with write_errors("stdout"):
        json.dump(_finite(value), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
        sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(text: str, *, wrapped: bool = False) -> None:
    """Plain text on stdout; ``wrapped``: in lines that end between words where the terminal does."""
    with write_errors("stdout"):
        out.print(text, markup=False, soft_wrap=not wrapped)


def answer(record: Any, text: str, *, as_json: bool) -> None:
    """What a command found, on stdout: a record as JSON, or text for people."""
    if as_json:
        print_json(record)
    else:
        say(text)


def note(text: str) -> None:
    """One line on stderr that is no error."""
    err.print(text, markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """One line on stderr, whatever the message."""
    err.print(Text("error:", "bold red"), Text(" ".join(message.split())), soft_wrap=True)


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """A table whose columns are the keys of the first row; numbers stand to the right.

    On a narrow terminal columns move together, then cells go on below themselves, between words and behind a
    plus. Where that is not enough, lines are longer than the terminal is wide: nothing is ever cut off.
    """
    cells = [[name, *(str(row[name]) for row in rows)] for name in rows[0]]
    longest = sum(min(_line(texts), max(FOLDED, _word(texts))) for texts in cells)
    gap = GAP if longest + GAP * len(cells) <= out.width else GAP - 1
    if longest + gap * len(cells) > out.width:
        cells = [[text.replace("+", "+\n") for text in texts] for texts in cells]
    widths, least = list(map(_line, cells)), list(map(_word, cells))

    def room(column: int) -> tuple[bool, int]:
        return widths[column] > least[column], widths[column]

    while sum(widths) + gap * len(cells) > out.width and widths != least:
        widths[max(range(len(cells)), key=room)] -= 1
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = gap < GAP
    if (needed := sum(widths) + gap * len(cells)) > out.width:
        table.width = needed
    for (name, value), width in zip(rows[0].items(), widths, strict=True):
        number = isinstance(value, int | float) or str(value)[:1].isdigit()
        table.add_column(Text(name), justify="right" if number else "left", width=width)
    for row in islice(zip(*cells, strict=True), 1, None):  # the first are the names
        table.add_row(*map(Text, row))
    with write_errors("stdout"):
        out.print(table, crop=False)


def _line(texts: Sequence[str]) -> int:
    return max(len(line) for text in texts for line in (text.splitlines() or [""]))


def _word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


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
    if err.is_terminal or not FIRST or parent_process() is not None:
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
    """Say what the block is waiting for: in the current bar, alone on a terminal, or in a line a minute."""
    if _BARS:
        bar, before = _BARS[-1], _BARS[-1].what
        bar.describe(what)
        try:
            yield
        finally:
            bar.describe(before)
    elif parent_process() is not None:  # workers would write over each other
        yield
    elif err.is_terminal:
        with err.status(Text(what)):
            yield
    else:
        with progress(None, what):
            yield


def duration(seconds: float) -> str:
    """Seconds as words, such as "40 s" or "5 minutes"."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:,.0f} minutes"


class Bar:
    """One line of progress."""

    def __init__(self, shown: Progress, task: TaskID, what: str) -> None:
        self._shown = shown
        self._task = task
        self._started = time.perf_counter()
        self._first_step: float | None = None
        self.what = what  # description of the current work

    def advance(self, amount: float = 1) -> None:
        """Move on by some steps."""
        self._shown.advance(self._task, amount)

    def restart(self, total: float | None, what: str) -> None:
        """Begin the next stage of the work."""
        self._first_step = None
        self._shown.reset(self._task, total=total)
        self.describe(what)

    def expect(self, first_step: float) -> None:
        """Report the time left of a fit whose first step takes this share of it; see `epoch`."""
        self._first_step = first_step
        self._started = time.perf_counter()

    def epoch(self, step: int, steps: int, loss: float) -> None:
        """Move on to a step of a fit; after the first one, the time left is known."""
        self._shown.update(self._task, completed=step, total=steps)
        left = ""
        if self._first_step is not None and 0 < step < steps:
            done = self._first_step + (1 - self._first_step) * (step - 1) / (steps - 1)
            elapsed = time.perf_counter() - self._started
            seconds = elapsed / done - elapsed
            left = f", up to {duration(seconds)} left"
            if step == 1 and seconds > HEARTBEAT_S and not err.is_terminal:
                note(f"step 1 of {steps} after {duration(elapsed)}{left}")
        self.describe(f"calibrating, loss {loss:.3f}{left}")

    def status(self) -> str:
        """The description with what is done so far, for output that is not a terminal."""
        task = self._shown.tasks[0]
        steps = f", {task.completed:,.0f} of {task.total:,.0f}" if task.total and task.completed else ""
        return f"{self.what}{steps}: {duration(time.perf_counter() - self._started)} so far"

    def run(self, run: "Run") -> None:
        """Move on by one method that was fitted and scored."""
        self.advance()
        self.describe(f"{run.task} {run.method} seed {run.seed}: {run.accuracy:.2f}")

    def describe(self, what: str) -> None:
        """Change the description."""
        self.what = what
        self._shown.update(self._task, description=what)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show the package's own warnings once, each as one line on stderr, and no others."""
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
