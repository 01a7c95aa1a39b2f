"""`i2cl demo`."""

from functools import partial

from i2cl.faces.cli import console, load, options
from i2cl.faces.cli.evaluate import show
from i2cl.faces.cli.options import ModelOptions, TaskOptions

DEMO_METHODS = ("zero_shot", "few_shot_uncached", "few_shot", "i2cl")


def demo(limit: options.Limit = 100, seed: options.Seed = 0, json: options.Json = False) -> None:
    """Show the bundled model gain three tasks: zero-shot, few-shot and I2CL side by side, offline."""
    from i2cl.experiments.sweep import sweep
    from i2cl.methods import make_methods
    from i2cl.tasks.reference import DEMO_TASKS

    tasks = load.tasks(",".join(DEMO_TASKS), "reference", TaskOptions())
    if not json:
        console.say(
            f"{tasks[0].shots} labelled examples per class, {limit} queries per task, in word combinations "
            "that the bundled model never saw. Takes about a minute.\n"
        )
    source = partial(load.decoder, "reference", ModelOptions(device="cpu"))
    methods = make_methods(DEMO_METHODS)
    with console.progress(len(tasks) * len(methods), "evaluating") as bar:
        runs = sweep(source, tasks, methods, [seed], limit=limit, workers=1, watch=bar.run)
    show(runs, "", as_json=json)
    if not json:
        console.say(
            "\nI2CL answers at zero-shot cost: no demonstration is read at query time, "
            "and no key-value cache is kept."
        )
