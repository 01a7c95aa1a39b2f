"""Load experiments: built-in ones by name, and a user's own from TOML files."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pydantic

from i2cl.errors import I2CLError, did_you_mean, first_problem
from i2cl.experiments.grid import Experiment
from i2cl.tasks.schema import parse_toml

_PAPER = """main peft efficiency shots robustness formation taskids transfer coefficients ablation-module
ablation-layer ablation-position ablation-noise ablation-formula synthetic over-icl"""
ORDER = tuple(_PAPER.split())  # the paper's experiments, in its order; "all" on the command line

_OTHERS = """real main-real skewed chat real-ablations paper-ablations anchored-ablations anchored-shots
curves curves-tickets anchored-unlabelled unlabelled many-labels larger"""
BUILTIN = (*_OTHERS.split(), *ORDER)


def load_experiment(name: str | Path) -> Experiment:
    """Load a built-in experiment by name, or one from a TOML file.

    Raises I2CLError if it does not exist or is invalid.
    """
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise I2CLError(f"no file {str(name)!r}: give the TOML file of an experiment, or a name")
        return _parse(path.read_bytes(), path.stem, str(path)).model_copy(update={"file": str(path)})
    if str(name) not in BUILTIN:
        known = f"use all, one of {', '.join(BUILTIN)}, or a .toml file"
        raise I2CLError(f"unknown experiment {str(name)!r}: {did_you_mean(str(name), BUILTIN)}{known}")
    file = resources.files("i2cl.experiments") / "builtin" / f"{name}.toml"
    return _parse(file.read_bytes(), str(name), f"builtin/{name}.toml")


def restrict_tasks(experiments: Sequence[Experiment], tasks: Sequence[str]) -> list[Experiment]:
    """Restrict experiments to these tasks, and drop those that have none of them.

    Raises I2CLError if a task is in none of the experiments.
    """
    known = dict.fromkeys(
        task for experiment in experiments if experiment.tasks != "all" for task in experiment.tasks
    )
    if all(experiment.tasks != "all" for experiment in experiments):
        check_tasks(tasks, list(known), "no chosen experiment")
    return [
        experiment.model_copy(update={"tasks": tuple(kept)})
        for experiment in experiments
        if (
            kept := tasks
            if experiment.tasks == "all"
            else [task for task in experiment.tasks if task in tasks]
        )
    ]


def check_methods(experiments: Sequence[Experiment]) -> None:
    """Raise I2CLError for the first row whose method or options do not exist."""
    from i2cl.methods import make_methods

    for experiment in experiments:
        for row in experiment.rows:
            try:
                make_methods([row.method], row.options)
            except I2CLError as error:
                raise I2CLError(f"experiment {experiment.name!r}, row {row.name!r}: {error}") from None


def check_tasks(tasks: Sequence[str], known: Sequence[str], subject: str) -> None:
    """Raise I2CLError for the first unknown task; ``subject`` begins the message."""
    for task in tasks:
        if task not in known:
            hint = did_you_mean(task, known)
            raise I2CLError(f"{subject} has the task {task!r}: {hint}use one of {', '.join(known)}")


def compare_with(experiments: Sequence[Experiment], row: str) -> list[Experiment]:
    """Make ``row`` the reference of every experiment that has it. Raises I2CLError if none has."""
    names = list(dict.fromkeys(line.name for experiment in experiments for line in experiment.rows))
    if row not in names:
        hint = f"{did_you_mean(row, names)}use one of {'; '.join(names)}"
        raise I2CLError(f"no experiment has a row {row!r}: {hint}")
    return [
        experiment.model_copy(update={"against": row})
        if row in {line.name for line in experiment.rows}
        else experiment
        for experiment in experiments
    ]


def _parse(content: bytes, name: str, where: str) -> Experiment:
    fields = parse_toml(content, where)
    try:
        return Experiment.model_validate({"name": name, **fields})
    except pydantic.ValidationError as error:
        raise I2CLError(f"{where}: {first_problem(error)}") from None
