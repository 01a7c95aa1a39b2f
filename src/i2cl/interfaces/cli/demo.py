"""`i2cl demo`."""

from functools import partial
from typing import Annotated

import typer

from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.evaluate import show
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions

BUNDLED = ("zero_shot", "few_shot_uncached", "few_shot", "i2cl", "anchored")
REAL = (
    "zero_shot",
    "zero_shot+label_prior",
    "few_shot",
    "few_shot+label_prior",
    "i2cl",
    "anchored",
    "anchored+label_prior",
)
REAL_LIMIT = 60
WITHOUT_LLM = "sentence_embeddings"
"""Shown beside them where its encoder is installed."""

PASSES = 20
"""Of I2CL's fast recipe on the real model: about the work of `anchored`."""


def demo(
    limit: Annotated[
        int | None, typer.Option(min=1, help="Queries per task; default: 100, of the real model 60.")
    ] = None,
    seed: options.Seed = 0,
    real: Annotated[
        bool, typer.Option("--real", help="SmolLM2 on support tickets, some minutes, instead.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show that the software works: five methods on the bundled model, offline.

    A minute; with --real, support tickets on SmolLM2-135M, some minutes.
    """
    load.libraries()
    from i2cl.experiments.evaluation import sweep
    from i2cl.methods import make_methods
    from i2cl.methods.embeddings import local_encoder
    from i2cl.models.loading import REFERENCE, SMOLLM2
    from i2cl.tasks.reference import DEMO_TASKS

    model, names = (SMOLLM2, ("tickets",)) if real else (REFERENCE, DEMO_TASKS)
    tasks = load.tasks(",".join(names), model, TaskOptions())
    limit = limit or (REAL_LIMIT if real else 100)
    if not json:
        console.say(
            f"{tasks[0].shots} labelled examples per class, {limit} queries per task, {_where(real)}\n"
        )
    source = partial(load.decoder, model, ModelOptions(device="cpu"))
    fast = {"optimizer": "lbfgs", "passes": PASSES} if real else {}
    encoder = local_encoder() if real else None
    methods = make_methods(REAL if real else BUNDLED, recipe=fast)
    if encoder:
        methods += make_methods([WITHOUT_LLM], {"encoder": encoder})
    with console.progress(len(tasks) * len(methods), "evaluating") as bar:
        runs = sweep(source, tasks, methods, [seed], limit=limit, workers=1, watch=bar.run)
    show(runs, "", as_json=json, brief=True)
    if not json and not real:
        console.say(
            "\nI2CL and anchored (what `i2cl fit` does) answer at zero-shot cost: no demonstration is read "
            "at query time, and no key-value cache is kept."
        )
    elif not json:
        console.say(
            "\nI2CL and anchored answer at zero-shot cost and keep one vector a residual writer; few-shot "
            "keeps a key-value cache. label_prior looked at 64 texts without their labels."
        )
    if encoder and not json:
        console.say(
            f"{WITHOUT_LLM} has no LLM, but a second model of 22 million parameters: ahead on topics such as "
            "these tickets, far behind on sentiment and kinds of question (docs/results.md)."
        )


def _where(real: bool) -> str:
    if real:
        return "support tickets for SmolLM2-135M-Instruct. Takes some minutes."
    return "in word combinations that the bundled model never saw. Takes about a minute."
