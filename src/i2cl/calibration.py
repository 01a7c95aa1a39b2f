"""Noisy self-calibration of the coefficients (paper, section "Noisy Self-calibration")."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.batching import Batch, Ids, budget_chunks, packing_pays, shared_front
from i2cl.classes import injected, require_vectors, settled
from i2cl.context import ContextVector, require_demonstrations
from i2cl.decoder import Decoder
from i2cl.edits import LinearEdit, NoisyEdit
from i2cl.errors import I2CLError
from i2cl.injection import Injection
from i2cl.recipe import CalibrationConfig, Formula
from i2cl.scoring import (
    Scoring,
    encode_queries,
    label_tokens,
    labelled_batch,
    sequence_log_probabilities,
)
from i2cl.tasks import Example, Task
from i2cl.training import StepProgress, minimize, train


def calibrate(
    decoder: Decoder,
    task: Task,
    demonstrations: Sequence[Example],
    context: ContextVector | Sequence[ContextVector],
    config: CalibrationConfig | None = None,
    *,
    seed: int = 0,
    scoring: Scoring = "auto",
    start: Float[Tensor, "layers sites scalars"] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    prompt: Callable[[str], str] | None = None,
    progress: StepProgress | None = None,
) -> Injection:
    """Fit lambda and beta on the demonstrations by cross-entropy of the label after its query.

    The loss is over the whole vocabulary. Repeatable bit for bit for one
    seed on one machine with one number of threads.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: the examples the context vector was made from, or others.
        context: what is injected: one vector, or one for each class (`i2cl.classes.extract_classes`).
            Then each class has a lambda of its own, and the mean of ``lambda_y v_y`` is injected.
        config: recipe and ablation switches.
        seed: of batches, noise and ``positions="random"``.
        scoring: predict each label's first token or its whole sequence; see `i2cl.scoring`.
        start: first coefficients, instead of the config's init values; the last axis ends in beta.
        batches: demonstration indices of every step, instead of random batches (one pass, in order).
        prompt: from a text to what precedes its label, instead of the template's query alone. The
            tokens that all of these share in front run once a step, under one draw of the noise.
        progress: called after each epoch.

    Raises:
        I2CLError: without demonstrations, on sizes that do not fit, or on a loss that is not finite.
    """
    config = config or CalibrationConfig()
    require_demonstrations(task, demonstrations)
    vectors = require_vectors(decoder, task, context)
    labels = label_tokens(decoder, task.template, task.labels, scoring)
    texts = [example.text for example in demonstrations]
    queries = encode_queries(decoder, prompt or task.template.query, texts, labels)
    targets = [labels.target(example.label) for example in demonstrations]
    active = config.active(decoder.layers, vectors[0].config.writers)
    _require_start(start, (*active.shape, len(vectors) + 1), config.formula)
    coefficients = Coefficients(config, active, start, decoder.device, len(vectors))
    if batches is not None:
        _require_batches(batches, len(queries), config)
    shared = shared_front(queries) if prompt else ()
    loss = _Loss(decoder, shared, queries, targets, vectors, config, coefficients, seed)
    dtype = decoder.model.dtype
    with decoder.frozen():
        if config.optimizer == "lbfgs":
            chunks = budget_chunks(queries, decoder.token_budget)
            history = minimize([coefficients.free], loss, chunks, config.passes, config.pull, progress, dtype)
        else:
            batches = batches or config.batches(len(queries), seed)
            history = train([coefficients.free], loss, batches, config, progress, dtype)
    whole, pairs, classes = settled(vectors, coefficients.linear().detach().cpu())
    return Injection(
        context=whole,
        coefficients=pairs,
        task=task.without_data(),
        base=decoder.base,
        positions=config.positions,
        scoring=scoring,
        seed=seed,
        settings=config.model_dump(mode="json"),
        history=history,
        classes=classes,
    )


def _require_batches(batches: Sequence[Sequence[int]], count: int, config: CalibrationConfig) -> None:
    if config.optimizer == "lbfgs":
        raise I2CLError("optimizer='lbfgs' takes all demonstrations at once: leave batches out, or use adamw")
    if not all(rows and set(rows) <= set(range(count)) for rows in batches):
        raise I2CLError(f"batches are to hold demonstration indices, each 0 to {count - 1}")


def _require_start(start: Tensor | None, shape: tuple[int, ...], formula: Formula) -> None:
    if start is not None and formula != "linear":
        raise I2CLError(f"start coefficients are linear, but formula={formula!r}: use formula='linear'")
    if start is not None and start.shape != shape:
        raise I2CLError(
            f"start coefficients have shape {tuple(start.shape)}, but {shape} is needed: "
            "take those of an injection into this model"
        )


class Coefficients:
    """The trained scalars in their formula's own form, and the linear form that is injected.

    Those of several runs of one config stand side by side, if a shape of runs is given.
    """

    def __init__(
        self,
        config: CalibrationConfig,
        active: Bool[Tensor, "layers sites"],
        start: Float[Tensor, "layers sites scalars"] | None,
        device: torch.device,
        vectors: int = 1,
        runs: tuple[int, ...] = (),
    ) -> None:
        self.formula = config.formula
        self.active = active
        fixed = torch.tensor([0.0] * vectors + [1.0]).expand(*active.shape, vectors + 1)
        init_beta = 1.0 if config.formula == "add" else config.init_beta
        first = torch.tensor([config.init_lambda] * vectors + [init_beta]).expand_as(fixed)
        values = first if start is None else start.float().cpu()
        self.base = torch.where(active[..., None], values, fixed).to(device)
        self.trained = active[..., None].repeat(1, 1, vectors + 1).to(device)
        if config.formula == "add":
            self.trained[..., -1] = False
        self.base, self.trained = (
            one.expand(*runs, *one.shape).contiguous() for one in (self.base, self.trained)
        )
        self.free = torch.nn.Parameter(self.base[self.trained].clone())

    def linear(self) -> Float[Tensor, "*runs layers sites scalars"]:
        """(lambda, beta) such that every formula reads ``lambda v + beta a``; a lambda for each vector."""
        values = self.base.masked_scatter(self.trained, self.free)
        amount, scale = values[..., :-1], values[..., -1:]
        if self.formula == "add":
            amount = amount.relu()
        elif self.formula == "balance":
            scale = scale.relu()
            amount, scale = amount * scale, (1 - amount.mean(-1, keepdim=True)) * scale
        return torch.cat([amount, scale], dim=-1)


class _Loss:
    """Cross-entropy of the labels under the injection and its noise."""

    def __init__(
        self,
        decoder: Decoder,
        shared: Ids,
        queries: Sequence[Ids],
        targets: Sequence[Ids],
        vectors: Sequence[ContextVector],
        config: CalibrationConfig,
        coefficients: Coefficients,
        seed: int,
    ) -> None:
        self.decoder = decoder
        self.shared = shared
        self.queries = [ids[len(shared) :] for ids in queries]
        self.targets = targets
        self.coefficients = coefficients
        self.generator = torch.Generator(decoder.device).manual_seed(seed)
        self.seed = seed
        self.repeats = config.optimizer == "lbfgs"
        self.vectors = torch.stack([vector.values for vector in vectors]).to(decoder.device)
        self.linear = partial(LinearEdit, site=vectors[0].config.site, positions=config.positions, seed=seed)
        self.noisy = partial(
            NoisyEdit,
            active=coefficients.active,
            scale=config.noise,
            place=config.noise_place,
            writer_scale=decoder.writer_scale,
            generator=self.generator,
        )

    def __call__(self, chosen: Sequence[int]) -> Tensor:
        if self.repeats:  # a line search compares losses, so each part keeps its draw of the noise
            self.generator.manual_seed(self.seed + chosen[0])
        targets = [self.targets[row] for row in chosen]
        queries = [self.queries[row] for row in chosen]
        batch = packed_if_it_pays(self.decoder, queries, targets, behind=self.shared)
        edit = self.noisy(self.linear(*injected(self.vectors, self.coefficients.linear())))
        prefix = self.decoder.prefix(self.shared, edit=edit) if self.shared else None
        return -sequence_log_probabilities(self.decoder, batch, targets, edit, prefix).mean()


def packed_if_it_pays(
    decoder: Decoder, queries: Sequence[Ids], targets: Sequence[Ids], *, behind: Ids = ()
) -> Batch:
    """Queries with their targets, in one row where the model can do that and it saves work.

    Args:
        decoder: the model.
        queries: token ids of each.
        targets: label tokens behind each.
        behind: cached tokens in front of all of them, which rule out packing.
    """
    lengths = [len(query) + len(target) - 1 for query, target in zip(queries, targets, strict=True)]
    packs = decoder.architecture.packs and not behind and packing_pays(lengths, decoder.d_model)
    return labelled_batch(queries, targets, decoder.device, packed=packs)
