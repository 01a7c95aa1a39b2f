"""Context vectorization: average what the sublayers write to the residual stream for demonstrations.

Source: paper, subsection "Context Vectorization".
"""

import random
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig, ExtractConfig
from i2cl.errors import LONE_SURROGATE, I2CLError, require_type
from i2cl.models.batching import Batch
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import require_decoder_and_task
from i2cl.tasks import Example, Examples, Task
from i2cl.tasks.task import group_by_label


def extract(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    config: ExtractConfig | None = None,
    *,
    seed: int = 0,
) -> Injection:
    """Run each demonstration separately and average the sublayers' outputs at its last token.

    Returns the vector as an injection with the paper's initial coefficients (0.1, 1), which `calibrate` fits.

    The mean is updated batch by batch, so memory does not grow with the number of demonstrations. Their order
    does not matter.

    Args:
        decoder: the model.
        task: gives template and label words.
        demonstrations: labelled examples.
        config: which sublayers and which token are captured.
        seed: seed of ``token="random"``.

    Raises:
        I2CLError: without demonstrations, if one has an unknown label or does not fit into the context, or if
            the model's blocks do not simply add their sublayers' outputs.
    """
    config = ExtractConfig.or_default(config)
    require_decoder_and_task(decoder, task)
    require_demonstrations(task, demonstrations)
    decoder.require_identity()
    builders = [
        partial(
            task.template.demonstration, label_word=task.labels[example.label], separator=config.separator
        )
        for example in demonstrations
    ]
    ids = sorted(
        decoder.encoder.encode(builders, [example.text for example in demonstrations], decoder.max_length)
    )
    if config.token == "random":
        rng = random.Random(seed)
        token_indices = [rng.randrange(len(row)) for row in ids]
    else:
        token_indices = [len(row) - 1 if config.token == "last" else 0 for row in ids]

    def capture(batch: Batch) -> Float[Tensor, "batch layers sublayers d"]:
        at = torch.tensor([token_indices[row] for row in batch.rows], device=batch.last.device)
        return decoder.capture(batch, at, hook_point=config.hook_point)

    mean, count = torch.zeros(()), 0
    for _, captured in decoder.run_batches(ids, capture):
        count += len(captured)
        mean = mean + (captured - mean).sum(0) / count
    recipe = CalibrationConfig()
    return Injection(
        context=mean,
        coefficients=recipe.start(recipe.active(decoder.layers, config.sublayers)),
        task=task.without_data(),
        base=decoder.base,
        seed=seed,
        extraction=config,
        demonstrations=len(demonstrations),
    )


def extract_classes(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    config: ExtractConfig | None = None,
    *,
    seed: int = 0,
) -> tuple[Injection, ...]:
    """Run `extract` for each class separately, in the order of the task's labels.

    Source: paper, appendix "Visualization of In-task Context Vectors". The mean of their vectors, weighted by
    their ``demonstrations``, is the context vector of the paper. Raises I2CLError if a class has no
    demonstration, and as `extract`.
    """
    require_decoder_and_task(decoder, task)
    require_demonstrations(task, demonstrations)
    groups = group_by_label(demonstrations, len(task.labels))
    for word, group in zip(task.labels, groups, strict=True):
        if not group:
            raise I2CLError(
                f"class {word!r} of task {task.name!r} has no demonstration: give at least one of each class"
            )
    return tuple(extract(decoder, task, group, config, seed=seed) for group in groups)


def require_demonstrations(task: Task, demonstrations: Examples) -> None:
    """Raise I2CLError without demonstrations, or as `require_labels`."""
    if not demonstrations:
        raise I2CLError("no demonstrations: give at least one")
    require_labels(task, demonstrations)


def require_two_classes(method: str, task: Task, demonstrations: Examples) -> None:
    """Raise I2CLError without demonstrations of at least two classes, or as `require_labels`."""
    require_demonstrations(task, demonstrations)
    if len({example.label for example in demonstrations}) < 2:
        raise I2CLError(f"{method} needs demonstrations of at least two classes: add some")


def require_labels(task: Task, demonstrations: Examples) -> None:
    """Raise I2CLError if a demonstration is not an `Example`, has an unknown label, or text that is not
    valid Unicode.
    """
    task.require_single_label("this method", "use the method anchored")
    for number, example in enumerate(demonstrations, start=1):
        require_type(f"demonstration {number}", example, Example, "give Example(text, label)")
        if not 0 <= example.label < len(task.labels):
            known = f"task {task.name!r} has labels 0 to {len(task.labels) - 1}"
            raise I2CLError(f"demonstration {number} has label {example.label}, {known}: correct it")
        if LONE_SURROGATE.search(example.text):
            raise I2CLError(f"demonstration {number} contains a lone surrogate: repair its text")
