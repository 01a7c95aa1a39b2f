"""The experiments that the package brings, and those that users write in files."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pydantic

from i2cl.errors import I2CLError, did_you_mean, first_problem
from i2cl.experiments.grid import Experiment
from i2cl.tasks.schema import parse_toml

_PAPER = """main peft efficiency shots robustness formation taskids transfer coefficients ablation-module
ablation-layer ablation-position ablation-noise ablation-formula synthetic over-icl"""
ORDER = tuple(_PAPER.split())  # the paper's experiments, in its order; what `all` means

_OTHERS = """real main-real skewed chat real-ablations anchored-ablations anchored-shots
curves curves-tickets anchored-unlabelled unlabelled many-labels"""
BROUGHT = (*_OTHERS.split(), *ORDER)  # all that the package brings


def load_experiment(name: str | Path) -> Experiment:
    """An experiment by name, or from a TOML file; raises I2CLError naming what to correct."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise I2CLError(f"no file {str(name)!r}: give an experiment's TOML file, or a name")
        return _parsed(path.read_bytes(), path.stem, str(path)).model_copy(update={"file": str(path)})
    if str(name) not in BROUGHT:
        known = f"known are all, {', '.join(BROUGHT)}, or a .toml file"
        raise I2CLError(f"unknown experiment {str(name)!r}: {did_you_mean(str(name), BROUGHT)}{known}")
    file = resources.files("i2cl.experiments") / "builtin" / f"{name}.toml"
    return _parsed(file.read_bytes(), str(name), f"builtin/{name}.toml")


def limited(experiments: Sequence[Experiment], tasks: Sequence[str]) -> list[Experiment]:
    """The same grids over these tasks of theirs; raises I2CLError on a task that none has."""
    known = dict.fromkeys(task for one in experiments if one.tasks != "all" for task in one.tasks)
    if all(one.tasks != "all" for one in experiments):
        require_known(tasks, list(known), "no chosen experiment")
    return [
        one.model_copy(update={"tasks": tuple(kept)})
        for one in experiments
        if (kept := tasks if one.tasks == "all" else [task for task in one.tasks if task in tasks])
    ]


def require_methods(experiments: Sequence[Experiment]) -> None:
    """Refuse the first row whose method or options do not exist (I2CLError), before anything is run."""
    from i2cl.methods import make_methods

    for one in experiments:
        for row in one.rows:
            try:
                make_methods([row.method], row.options)
            except I2CLError as error:
                raise I2CLError(f"experiment {one.name!r}, row {row.name!r}: {error}") from None


def require_known(tasks: Sequence[str], known: Sequence[str], nobody: str) -> None:
    """Refuse a task that is not known. Raises I2CLError naming the first."""
    for task in tasks:
        if task not in known:
            hint = did_you_mean(task, known)
            raise I2CLError(f"{nobody} has the task {task!r}: {hint}known are {', '.join(known)}")


def compared_with(experiments: Sequence[Experiment], row: str) -> list[Experiment]:
    """The same grids, tested against this row where they have it; raises I2CLError if none has."""
    names = list(dict.fromkeys(line.name for one in experiments for line in one.rows))
    if row not in names:
        cure = f"{did_you_mean(row, names)}known are {'; '.join(names)}"
        raise I2CLError(f"no experiment has a row {row!r}: {cure}")
    return [
        one.model_copy(update={"against": row}) if row in {line.name for line in one.rows} else one
        for one in experiments
    ]


def _parsed(content: bytes, name: str, where: str) -> Experiment:
    fields = parse_toml(content, where)
    try:
        return Experiment.model_validate({"name": name, **fields})
    except pydantic.ValidationError as error:
        raise I2CLError(f"{where}: {first_problem(error)}") from None
