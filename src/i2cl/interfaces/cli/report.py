"""`i2cl report`."""

from pathlib import Path

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import opt


@options.expanded
def report(
    store: options.StoreFolder,
    names: str = opt("all", "With commas between, TOML files, or all.", "--experiments"),
    against: str | None = opt(None, "Row that the others are tested against, instead of the grid's."),
    tasks: str | None = opt(None, "These alone, with commas between."),
    out: Path | None = opt(None, "New folder; default: STORE/report.", "-o", "--out"),
    formats: str = opt("md,tex,csv,html", "Some of md,tex,csv,html."),
    json: options.Json = False,
) -> None:
    """Make tables and figures of a store, with intervals and tests.

    Where the paper has the same cell, its printed number stands beside ours.
    """
    from i2cl.experiments.library import ORDER, compared_with, limited, load_experiment, require_known
    from i2cl.experiments.report.document import build
    from i2cl.experiments.report.render import FORMATS, write
    from i2cl.experiments.store import Store

    wanted = load.split(formats)
    if not set(wanted) <= set(FORMATS):
        raise I2CLError(f"--formats {formats!r}: known are {', '.join(FORMATS)}")
    opened = Store.open(store)
    chosen = [load_experiment(name) for name in (ORDER if names == "all" else load.split(names))]
    records = list(opened.records.values())
    if tasks is not None and tasks != "all":
        chosen = limited(chosen, only := load.split(tasks))
        require_known(only, sorted({record.cell.task for record in records}), "no cell of this store")
        named = [one for one in records if one.cell.task in only]
        records = [one for one in named if one.cell.study != "move" or one.cell.sources[0] in only]
    if against is not None:
        chosen = compared_with(chosen, against)
    built = build(chosen, records, opened.vectors())
    written = [str(path) for path in write(built, out or store / "report", wanted)]
    console.answer(written, "\n".join(written), as_json=json)
