"""`i2cl report`."""

from pathlib import Path

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import opt


@options.expanded
def report(
    store: options.StoreFolder,
    names: str = opt("all", "Experiments or TOML files separated by commas, or 'all'.", "--experiments"),
    against: str | None = opt(None, "Reference row of the tests; default: the experiment's."),
    tasks: str | None = opt(None, "Tasks separated by commas; default: all."),
    out: Path | None = opt(None, "New folder; default: STORE/report.", "-o", "--out"),
    formats: str = opt("md,tex,csv,html", "Output formats separated by commas."),
    json: options.Json = False,
) -> None:
    """Write tables and figures of a store, with confidence intervals and tests.

    For the paper's models, the paper's numbers are shown next to the measured ones.
    """
    load.require_store(store)
    from i2cl.experiments.library import ORDER, check_tasks, compare_with, load_experiment, restrict_tasks
    from i2cl.experiments.report.document import build
    from i2cl.experiments.report.render import FORMATS, write
    from i2cl.experiments.store import Store

    wanted = load.split(formats)
    if not set(wanted) <= set(FORMATS):
        raise I2CLError(f"--formats {formats!r}: use one or more of {', '.join(FORMATS)}")
    opened = Store.open(store)
    chosen = [load_experiment(name) for name in (ORDER if names == "all" else load.split(names))]
    records = list(opened.records.values())
    if tasks is not None and tasks != "all":
        chosen = restrict_tasks(chosen, only := load.split(tasks))
        check_tasks(only, sorted({record.cell.task for record in records}), "no cell of this store")
        records = [one for one in records if one.cell.task in only]
        records = [one for one in records if one.cell.study != "move" or one.cell.sources[0] in only]
    if against is not None:
        chosen = compare_with(chosen, against)
    built = build(chosen, records, opened.vectors())
    written = [str(path) for path in write(built, out or store / "report", wanted)]
    console.answer(written, "\n".join(written), as_json=json)
