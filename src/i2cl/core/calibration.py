"""Noisy self-calibration: lambda and beta of every sublayer, fitted to the demonstrations' own labels.

Source: paper, subsection "Noisy Self-calibration".
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.core.ablations import NoisyEdit, at_positions
from i2cl.core.context import require_demonstrations, require_two_classes
from i2cl.core.injection import Injection, LabelHead, Report
from i2cl.core.recipe import ACTIVE_SUBLAYERS, CalibrationConfig
from i2cl.core.weights import apply_class_weight, example_weights
from i2cl.errors import I2CLError, MemoryLimitError, is_out_of_memory, require_type
from i2cl.models.batching import Batch, budget_chunks, common_prefix, packing_pays
from i2cl.models.decoder import Decoder
from i2cl.models.edits import AffineEdit
from i2cl.models.label_tokens import Scoring
from i2cl.models.scoring import LabelScorer, require_decoder_and_task
from i2cl.models.training import LabelLikelihood, StepProgress, minimize_lbfgs, train
from i2cl.tasks import Examples, Task


def calibrate(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    extracted: Injection,
    config: CalibrationConfig | None = None,
    *,
    seed: int = 0,
    scoring: Scoring = "auto",
    start: Float[Tensor, "layers sublayers 2"] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    prompt: Callable[[str], str] | None = None,
    progress: StepProgress | None = None,
) -> Injection:
    """Fit lambda and beta on the demonstrations by cross-entropy of the label after its query.

    The loss is over the whole vocabulary, or among the task's labels (``loss`` of the config). Over the
    vocabulary, demonstrations of a single class are accepted: the fit then learns to give their label to
    every text. Deterministic: one seed gives bit-identical results on one machine with one number of threads.

    Args:
        decoder: the frozen model.
        task: gives template and label words.
        demonstrations: the examples that the vector was extracted from, or others.
        extracted: result of `extract`; its coefficients are ignored.
        config: recipe and ablation switches.
        seed: of batches, noise and ``positions="random"``.
        scoring: predict each label's first token, or its full sequence. If the loss is among the labels:
            first-token or word-level scoring; see `i2cl.models.scoring.LabelScorer.for_fit`.
        start: initial coefficients, instead of the config's.
        batches: demonstration indices of every step, instead of random batches (one pass, in order).
        prompt: builds the text in front of a label, instead of the template's query. Tokens that all prompts
            start with run once per step, under one draw of the noise.
        progress: called after each epoch.

    Raises:
        I2CLError: without demonstrations, or for a loss among the labels without two classes of them; on a
            context vector of another model, on sizes that do not fit, on a loss that is not finite, or if a
            step does not fit into memory.
    """
    config = CalibrationConfig.or_default(config)
    require_decoder_and_task(decoder, task)
    require_type("extracted", extracted, Injection, "pass the result of extract")
    make_scorer = LabelScorer.for_fit if config.loss == "labels" else LabelScorer
    scorer = make_scorer(decoder, task, scoring)
    if config.loss == "labels":
        require_two_classes("a loss among the labels", task, demonstrations)
    else:
        require_demonstrations(task, demonstrations)
    extracted.require_base(decoder)
    _require_options(config, extracted, start, batches, len(demonstrations))
    active = config.active(decoder.layers, extracted.extraction.sublayers)
    coefficients = Coefficients(config, active, start, decoder.device)
    weighted = apply_class_weight(demonstrations, task.labels, config.class_weight)
    loss = CalibrationLoss(scorer, weighted, extracted, coefficients, config, seed=seed, prompt=prompt)
    steps = config.batches(len(demonstrations), seed) if batches is None else batches
    history = _minimize(loss, steps, config, progress)
    return replace(
        extracted,
        coefficients=coefficients.linear().detach().cpu(),
        task=task.without_data(),
        positions=config.positions,
        seed=seed,
        head=LabelHead(scorer.scoring),
        report=Report(config.model_dump(mode="json", exclude_none=True), history),
    )


def _minimize(
    loss: "CalibrationLoss",
    steps: Sequence[Sequence[int]],
    config: CalibrationConfig,
    progress: StepProgress | None,
) -> tuple[float, ...]:
    """Fit the coefficients of a loss in place, and return its history."""
    decoder, parameter = loss.decoder, loss.coefficients.parameter
    dtype = decoder.model.dtype
    try:
        with decoder.frozen():
            if config.optimizer == "adamw":
                return train([parameter], loss, steps, config, progress, dtype)
            chunks = budget_chunks(loss.prompts, decoder.training_budget)
            fixed_loss = loss.with_fixed_noise
            return minimize_lbfgs(parameter, fixed_loss, chunks, config.passes, config.pull, progress, dtype)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        hint = "use shorter texts, a smaller batch_size, or load the model in bfloat16"
        raise MemoryLimitError(f"a step of calibration does not fit into memory: {hint}") from None


def _require_options(
    config: CalibrationConfig,
    extracted: Injection,
    start: Float[Tensor, "layers sublayers 2"] | None,
    batches: Sequence[Sequence[int]] | None,
    count: int,
) -> None:
    """Raise I2CLError if the arguments of `calibrate` do not fit together."""
    base = extracted.base
    layers, sublayers = base.layers, len(ACTIVE_SUBLAYERS[extracted.extraction.sublayers])
    context_shape, shape = (layers, sublayers, base.d_model), (layers, sublayers, 2)
    if extracted.context.shape != context_shape:
        sizes = f"(layers, sublayers, width) {tuple(extracted.context.shape)}"
        raise I2CLError(
            f"the context vector has {sizes}, the model needs {context_shape}: extract it on this model"
        )
    if start is not None and config.formula != "linear":
        raise I2CLError(
            f"start coefficients are linear, but formula={config.formula!r}: use formula='linear'"
        )
    if start is not None and start.shape != shape:
        raise I2CLError(
            f"start coefficients have shape {tuple(start.shape)}, but {shape} is needed: use the "
            "coefficients of an injection into this model"
        )
    if batches is not None and config.optimizer == "lbfgs":
        raise I2CLError("optimizer='lbfgs' reads all demonstrations at once: leave out batches, or use adamw")
    if not all(rows and set(rows) <= set(range(count)) for rows in batches or ()):
        raise I2CLError(f"batches must hold demonstration indices from 0 to {count - 1}")


class Coefficients:
    """The coefficients of a formula, some of them trained.

    Attributes:
        formula: how the coefficients combine vector and output.
        active: sublayers that are edited.
        base: all coefficients at the start.
        is_trained: which of them are trained.
        parameter: the trained ones.
    """

    def __init__(
        self,
        config: CalibrationConfig,
        active: Bool[Tensor, "layers sublayers"],
        start: Float[Tensor, "layers sublayers 2"] | None,
        device: torch.device,
    ) -> None:
        self.formula = config.formula
        self.active = active
        values = config.start(active)
        if start is not None:
            values = torch.where(active[..., None], start.float().cpu(), values)
        self.base = values.to(device)
        is_trained = active[..., None] & torch.tensor([True, config.formula != "add"])
        self.is_trained = is_trained.contiguous().to(device)
        self.parameter = torch.nn.Parameter(self.base[self.is_trained].clone())

    def linear(self) -> Float[Tensor, "layers sublayers 2"]:
        """Return the equivalent (lambda, beta) of the formula ``linear``, ``lambda v + beta a``."""
        strength, scale = self.base.masked_scatter(self.is_trained, self.parameter).unbind(-1)
        if self.formula == "add":
            strength = strength.relu()
        elif self.formula == "balance":
            scale = scale.relu()
            strength, scale = strength * scale, (1 - strength) * scale
        return torch.stack([strength, scale], dim=-1)


class CalibrationLoss:
    """Cross-entropy of the gold labels under the injection and its noise; see `calibrate`.

    Attributes:
        prompts: token ids of each demonstration's query.
        shared_ids: token ids that all prompts start with; empty without a custom ``prompt``.
    """

    def __init__(
        self,
        scorer: LabelScorer,
        demonstrations: Examples,
        extracted: Injection,
        coefficients: Coefficients,
        config: CalibrationConfig,
        *,
        seed: int = 0,
        prompt: Callable[[str], str] | None = None,
    ) -> None:
        decoder = self.decoder = scorer.decoder
        self.config = config
        self.coefficients = coefficients
        self.prompts = scorer.queries([example.text for example in demonstrations], prompt)
        self.shared_ids = common_prefix(self.prompts) if prompt else ()
        self.likelihood = LabelLikelihood(
            decoder,
            [ids[len(self.shared_ids) :] for ids in self.prompts],
            scorer.labels,
            [example.label for example in demonstrations],
            among_labels=config.loss == "labels",
        )
        self.example_weights = example_weights(demonstrations)
        self.context = extracted.context.to(decoder.device)
        self.hook_point = extracted.extraction.hook_point
        self.seed = seed
        self.generator = torch.Generator(decoder.device).manual_seed(seed)

    def __call__(self, chosen: Sequence[int]) -> Float[Tensor, ""]:
        """Compute the mean loss over the chosen demonstrations, in nats."""
        likelihoods = self._log_likelihoods(chosen)
        if self.example_weights is not None:
            likelihoods = likelihoods * self.example_weights[list(chosen)].to(likelihoods)
        return -likelihoods.mean()

    def with_fixed_noise(self, chosen: Sequence[int]) -> Float[Tensor, ""]:
        """Compute the loss with the same noise whenever the same demonstrations are chosen."""
        self.generator.manual_seed(self.seed + chosen[0])
        return self(chosen)

    def _log_likelihoods(self, rows: Sequence[int]) -> Float[Tensor, " rows"]:
        """Compute the log-probabilities of the gold labels of some rows."""
        edit = AffineEdit.linear(self.context, self.coefficients.linear(), self.hook_point)
        noisy = NoisyEdit(
            at_positions(edit, self.config.positions, self.seed),
            active=self.coefficients.active,
            scale=self.config.noise,
            place=self.config.noise_place,
            sublayer_scale=self.decoder.sublayer_scale,
            generator=self.generator,
        )
        batch = self._batch(rows)
        prefix = self.decoder.prefix(self.shared_ids, edit=noisy) if self.shared_ids else None
        return self.likelihood.log_probs(rows, batch, noisy, prefix)

    def _batch(self, rows: Sequence[int]) -> Batch:
        """Make a batch, packed into one row if the model supports it, no prefix is used and it saves work."""
        lengths = [self.likelihood.lengths[row] for row in rows]
        packs = self.decoder.architecture.packs and not self.shared_ids
        return self.likelihood.batch(rows, packed=packs and packing_pays(lengths, self.decoder.d_model))
