"""The command line `i2cl`. Commands import PyTorch only when they need it, so that `--help` is fast."""

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import typer
from typer import Option

from i2cl.errors import OUT_OF_MEMORY, I2CLError, is_out_of_memory
from i2cl.interfaces.cli import (
    console,
    demo,
    evaluate,
    experiment,
    export,
    fit,
    info,
    label,
    predict,
    serve,
    update,
)
from i2cl.storage.atomic import system_cause
from i2cl.version import __version__

NAME = "i2cl"
INTERRUPTED = 130
# Iterations that a thread of GNU OpenMP waits in a loop before it sleeps: some ten microseconds.
SPIN_COUNT = "10000"
KEPT_BYTES = 2**31 - 1  # blocks and free memory up to this size are kept; the largest value of a C int
_UsageError: Any = typer.BadParameter.__base__  # click's, or typer's own copy of it

app = typer.Typer(
    help="Classify text with a frozen LLM from a few labelled examples, without putting them in the prompt.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(experiment.app, name="experiment")
# Commands in the order of the help, each with an example that its help shows. Tests run them in this order.
_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "demo": (demo.demo, "i2cl demo"),
    "fit": (fit.fit, "i2cl fit reference mood-colour-1 -o mood --keep-examples"),
    "predict": (predict.predict, "i2cl predict mood texts.txt -o labels.csv"),
    "update": (update.update, "i2cl update mood --rename blue=navy -o marine"),
    "suggest": (label.suggest, "i2cl suggest mood texts.txt -n 2 -o to_label.csv"),
    "review": (label.review, "i2cl review mood labelled.csv"),
    "eval": (
        evaluate.evaluate,
        "i2cl eval reference mood-colour-1 --method zero_shot,anchored --seeds 2 --limit 50 --workers 1",
    ),
    "export": (export.export, "i2cl export mood classifier"),
    "verify": (export.verify, "i2cl verify classifier"),
    "push": (export.push, "i2cl push mood your-name/mood"),
    "serve": (serve.serve, "i2cl serve reference --tasks tasks"),
    "check": (info.check, "i2cl check reference"),
    "ls": (info.ls, "i2cl ls methods"),
    "cache": (info.cache, "i2cl cache"),
    "experiment ls": (experiment.ls, "i2cl experiment ls"),
    "experiment run": (
        experiment.run,
        "i2cl experiment run unlabelled --quick --tasks tickets --workers 1 --store results",
    ),
    "experiment pack": (experiment.pack, "i2cl experiment pack results packed"),
    "experiment unpack": (experiment.unpack, "i2cl experiment unpack packed unpacked"),
    "report": (experiment.report, "i2cl report results --experiments unlabelled"),
}
EXAMPLES = {name: example for name, (_, example) in _COMMANDS.items()}
for _name, (_command, _example) in _COMMANDS.items():
    _group = experiment.app if " " in _name else app
    _group.command(_name.split()[-1], epilog=f"Example: {_example}")(_command)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context, version: bool = Option(False, "--version", help="Print the version.")
) -> None:
    """Print the version, or the help if there is no command."""
    if version:
        console.say(__version__)
    elif context.invoked_subcommand is None:
        console.say(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with 0 (success), 1 (a check failed), 2 (invalid input) or 130 (interrupted)."""
    _limit_spinning()
    _keep_freed_memory()
    atexit.register(gc.freeze)  # else the exit searches all imported modules for garbage, for a second
    console.escape()
    code = _run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError:  # was reported before; without this, Python would flush again at exit and report it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _limit_spinning() -> None:
    """Let OpenMP's threads sleep after a short while instead of spinning until the others arrive.

    Spinning threads take the CPU from the threads they wait for, as soon as another process is busy. Sleeping
    at once costs 10 to 30 % on an idle machine (docs/performance.md). OpenMP reads the variable when PyTorch
    is imported. Does nothing if the user has chosen a policy.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def _keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning each large block to the system.

    It would otherwise map every output of more than 32 MB again, and the kernel would clear its pages, which
    takes a quarter of a forward pass of a model with 1.5 billion parameters (docs/performance.md). Worker
    processes read the variables when they start. Does nothing with another C library, or if the user has set
    one of the variables.

    Source: ``mallopt(3)``.
    """
    parameters = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
    if {*parameters, "GLIBC_TUNABLES"} & os.environ.keys() or sys.platform != "linux":
        return
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for variable, parameter in parameters.items():
            mallopt(parameter, KEPT_BYTES)
            os.environ[variable] = str(KEPT_BYTES)


def _run(arguments: list[str]) -> int:
    """Run a command, print its error on one line, and return the exit code."""
    try:
        with console.plain_warnings():
            code = int(app(arguments, prog_name=NAME, standalone_mode=False) or 0)
        if code != INTERRUPTED:
            return code
        message = "interrupted: no file was written"
    except (typer.Abort, KeyboardInterrupt) as error:
        code, message = INTERRUPTED, f"interrupted: {str(error) or 'no file was written'}"
    except I2CLError as error:
        code, message = 2, str(error)
    except OSError as error:  # not expected by any command, such as a missing temporary folder
        problem = f"use {str(error.filename)!r}" if error.filename else "continue"
        code = 2
        message = f"cannot {problem} ({system_cause(error)}): free space or choose another place or name"
    except _UsageError as error:
        problem = error.format_message().rstrip(".").replace(": Value error, ", ": ") or "no command is given"
        code, message = 2, f"{problem}: see {error.ctx.command_path if error.ctx else NAME} --help"
    except RuntimeError as error:  # batches that are too large are halved; this is raised for a single row
        if not is_out_of_memory(error):
            raise
        code, message = 2, OUT_OF_MEMORY
    console.print_error(message)
    return code
