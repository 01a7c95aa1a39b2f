"""`i2cl demo`: presets of `i2cl eval`."""

from functools import partial

from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.evaluate import show
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt

BUNDLED = "zero_shot,few_shot_uncached,few_shot,i2cl,anchored"
REAL = "zero_shot,zero_shot+label_prior,few_shot,few_shot+label_prior,i2cl,anchored,anchored+label_prior"
WITHOUT_LLM = "sentence_embeddings"  # added to the table if its encoder is installed
FAST = {"optimizer": "lbfgs", "passes": 20}  # I2CL's recipe on the real model: as expensive as `anchored`


@options.expanded
def demo(
    limit: int | None = opt(None, "Queries per task; default: 100, or 60 with --real.", min=1),
    seed: options.Seed = 0,
    real: bool = opt(False, "Use SmolLM2 on support tickets instead (a few minutes).", "--real"),
    json: options.Json = False,
) -> None:
    """Compare five methods on the bundled model, offline.

    Takes about a minute; with --real, a few minutes.
    """
    load.libraries()
    from i2cl.core.encoder_bias import local_encoder
    from i2cl.experiments.evaluation import sweep
    from i2cl.methods import make_methods
    from i2cl.models.loading import REFERENCE, SMOLLM2
    from i2cl.tasks.generated import DEMO_TASKS

    model, names = (SMOLLM2, ["tickets"]) if real else (REFERENCE, DEMO_TASKS)
    tasks = [load.task(name, TaskOptions()) for name in names]
    limit = limit or (60 if real else 100)
    what = "unseen by the bundled model in training. Takes about a minute."
    if real:
        what = "support tickets on SmolLM2-135M-Instruct. Takes a few minutes."
    if not json:
        console.say(f"{tasks[0].shots} labelled examples per class, {limit} queries per task, {what}\n")
    source = partial(load.decoder, model, ModelOptions(device="cpu"))
    methods = make_methods(load.split(REAL if real else BUNDLED), recipe=FAST if real else {})
    if encoder := local_encoder() if real else None:
        methods += make_methods([WITHOUT_LLM], {"encoder": encoder})
    with console.progress(len(tasks) * len(methods), "evaluating") as bar:
        runs = sweep(source, tasks, methods, [seed], limit=limit, workers=1, on_run=bar.run)
    show(runs, "", as_json=json, brief=True)
    if json:
        return
    console.say(
        "\ni2cl and anchored predict at zero-shot cost and store one vector per attention and MLP output; "
        "few_shot stores a key-value cache. label_prior used 64 unlabelled texts."
        if real
        else "\ni2cl and anchored (the default of `i2cl fit`) predict at zero-shot cost: no demonstrations "
        "in the prompt, and no key-value cache."
    )
    if encoder:
        console.say(
            f"{WITHOUT_LLM} uses no LLM but an encoder of 22 million parameters: it is better on topics such "
            "as these tickets, and much worse on sentiment and question types (docs/results.md)."
        )
