"""`i2cl demo`: presets of `i2cl eval`."""

from functools import partial

from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.evaluate import show
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt

BUNDLED = "zero_shot,few_shot_uncached,few_shot,i2cl,anchored"
REAL = "zero_shot,zero_shot+label_prior,few_shot,few_shot+label_prior,i2cl,anchored,anchored+label_prior"
WITHOUT_LLM = "sentence_embeddings"  # shown beside them where its encoder is installed
FAST = {"optimizer": "lbfgs", "passes": 20}  # I2CL's recipe on the real model: about the work of `anchored`


@options.expanded
def demo(
    limit: int | None = opt(None, "Queries per task; default: 100, of the real model 60.", min=1),
    seed: options.Seed = 0,
    real: bool = opt(False, "SmolLM2 on support tickets, some minutes, instead.", "--real"),
    json: options.Json = False,
) -> None:
    """Show that the software works: five methods on the bundled model, offline.

    A minute; with --real, support tickets on SmolLM2-135M, some minutes.
    """
    load.libraries()
    from i2cl.core.encoder_bias import local_encoder
    from i2cl.experiments.evaluation import sweep
    from i2cl.methods import make_methods
    from i2cl.models.loading import REFERENCE, SMOLLM2
    from i2cl.tasks.corpus import DEMO_TASKS

    model, names = (SMOLLM2, ["tickets"]) if real else (REFERENCE, DEMO_TASKS)
    tasks = [load.task(name, TaskOptions()) for name in names]
    limit = limit or (60 if real else 100)
    where = "in word combinations that the bundled model never saw. Takes about a minute."
    if real:
        where = "support tickets for SmolLM2-135M-Instruct. Takes some minutes."
    if not json:
        console.say(f"{tasks[0].shots} labelled examples per class, {limit} queries per task, {where}\n")
    source = partial(load.decoder, model, ModelOptions(device="cpu"))
    methods = make_methods(load.split(REAL if real else BUNDLED), recipe=FAST if real else {})
    if encoder := local_encoder() if real else None:
        methods += make_methods([WITHOUT_LLM], {"encoder": encoder})
    with console.progress(len(tasks) * len(methods), "evaluating") as bar:
        runs = sweep(source, tasks, methods, [seed], limit=limit, workers=1, watch=bar.run)
    show(runs, "", as_json=json, brief=True)
    if json:
        return
    console.say(
        "\nI2CL and anchored answer at zero-shot cost and keep one vector a residual writer; few-shot "
        "keeps a key-value cache. label_prior looked at 64 texts without their labels."
        if real
        else "\nI2CL and anchored (what `i2cl fit` does) answer at zero-shot cost: no demonstration is read "
        "at query time, and no key-value cache is kept."
    )
    if encoder:
        console.say(
            f"{WITHOUT_LLM} has no LLM, but a second model of 22 million parameters: ahead on topics such as "
            "these tickets, far behind on sentiment and kinds of question (docs/results.md)."
        )
