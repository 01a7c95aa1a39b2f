"""Noisy self-calibration of the coefficients (paper, section "Noisy Self-calibration")."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, field_validator
from torch import Tensor

from i2cl.batching import Ids, shared_front
from i2cl.context import ContextVector, Writers, require_demonstrations
from i2cl.decoder import Decoder
from i2cl.edits import NoisyEdit, Positions
from i2cl.errors import I2CLError
from i2cl.injection import Injection
from i2cl.scoring import (
    Scoring,
    encode_queries,
    label_tokens,
    labelled_batch,
    sequence_log_probabilities,
)
from i2cl.tasks import Example, Task
from i2cl.training import StepProgress, TrainConfig, train

Formula = Literal["linear", "add", "balance"]

RELEASED: Mapping[str, object] = MappingProxyType(
    {"draw": "step", "lr_final": 0.0, "warmup": 0.05, "noise_place": "writer"}
)
"""Where the recipe of the paper's released code differs from its text."""


class CalibrationConfig(TrainConfig):
    """How coefficients are fitted. Defaults are the paper's text; `released` gives the released code's.

    Attributes:
        layers: all, a third of them, or a list of indices ("Target Layer" ablation).
        positions: query tokens that are injected ("Injection Position" ablation).
        formula: ``linear`` lambda v + beta a; ``add`` lambda v + a with lambda > 0; ``balance``
            (lambda v + (1 - lambda) a) beta with beta > 0 ("Injection Formula" ablation).
        noise: gamma, the noise's size relative to the L2 norm of what it is added to.
        noise_place: on the residual stream, or on each writer's output (released code).
        init_lambda: first value of lambda.
        init_beta: first value of beta.
    """

    layers: Literal["all", "early", "middle", "late"] | tuple[int, ...] = "all"
    positions: Positions = "all"
    formula: Formula = "linear"
    noise: float = Field(1e-3, ge=0)
    noise_place: Literal["residual", "writer"] = "residual"
    init_lambda: float = 0.1
    init_beta: float = 1.0

    @field_validator("layers", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """Accept ``"0,3,5"``, as the command line gives it."""
        if isinstance(value, str) and value.replace(",", "").replace(" ", "").isdigit():
            return tuple(int(part) for part in value.split(","))
        return value

    @classmethod
    def released(cls, **changes: object) -> "CalibrationConfig":
        """The recipe of the paper's released code, where it differs from the text."""
        return cls.model_validate({**RELEASED, **changes})

    def active(self, layers: int, writers: Writers) -> Bool[Tensor, "layers sites"]:
        """Which sites are trained; the others keep (0, 1).

        Raises:
            I2CLError: if a layer index does not exist, or the part chosen is empty.
        """
        third = layers // 3, 2 * layers // 3
        named = {
            "all": range(layers),
            "early": range(third[0]),
            "middle": range(*third),
            "late": range(third[1], layers),
        }
        chosen = list(named[self.layers] if isinstance(self.layers, str) else self.layers)
        if not chosen or not all(0 <= layer < layers for layer in chosen):
            raise I2CLError(
                f"layers={self.layers} names no layers of this model, which has {layers} (0 to {layers - 1})"
            )
        mask = torch.zeros(layers, 1 if writers == "hidden" else 2, dtype=torch.bool)
        sites = {"both": [0, 1], "mha": [0], "mlp": [1], "hidden": [0]}[writers]
        for site in sites:
            mask[chosen, site] = True
        return mask

    def parameters(self, layers: int, writers: Writers) -> int:
        """How many scalars are trained: two for each active site, one where beta is fixed."""
        return int(self.active(layers, writers).sum()) * (1 if self.formula == "add" else 2)


def calibrate(
    decoder: Decoder,
    task: Task,
    demonstrations: Sequence[Example],
    context: ContextVector,
    config: CalibrationConfig | None = None,
    *,
    seed: int = 0,
    scoring: Scoring = "auto",
    start: Float[Tensor, "layers sites 2"] | None = None,
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
        context: what is injected.
        config: recipe and ablation switches.
        seed: of batches, noise and ``positions="random"``.
        scoring: predict each label's first token or its whole sequence; see `i2cl.scoring`.
        start: first coefficients, instead of the config's init values.
        batches: demonstration indices of every step, instead of random batches (one pass, in order).
        prompt: from a text to what precedes its label, instead of the template's query alone. The
            tokens that all of these share in front run once a step, under one draw of the noise.
        progress: called after each epoch.

    Raises:
        I2CLError: without demonstrations, on sizes that do not fit, or on a loss that is not finite.
    """
    config = config or CalibrationConfig()
    require_demonstrations(task, demonstrations)
    context.require_sizes(decoder)
    labels = label_tokens(decoder, task.template, task.labels, scoring)
    texts = [example.text for example in demonstrations]
    queries = encode_queries(decoder, prompt or task.template.query, texts, labels)
    targets = [labels.target(example.label) for example in demonstrations]
    active = config.active(decoder.layers, context.config.writers)
    _require_start(start, active, config.formula)
    coefficients = Coefficients(config, active, start, decoder.device)
    if batches is None:
        batches = config.batches(len(queries), seed)
    elif not all(rows and set(rows) <= set(range(len(queries))) for rows in batches):
        raise I2CLError(f"batches are to hold demonstration indices, each 0 to {len(queries) - 1}")
    shared = shared_front(queries) if prompt else ()
    loss = _Loss(decoder, shared, queries, targets, context, config, coefficients, seed)
    with decoder.frozen():
        history = train([coefficients.free], loss, batches, config, progress)
    return Injection(
        context=context,
        coefficients=coefficients.linear().detach().cpu(),
        task=task.without_data(),
        base=decoder.base,
        positions=config.positions,
        scoring=scoring,
        seed=seed,
        settings=config.model_dump(mode="json"),
        history=history,
    )


def _require_start(start: Tensor | None, active: Tensor, formula: Formula) -> None:
    if start is not None and formula != "linear":
        raise I2CLError(f"start coefficients are linear, but formula={formula!r}: use formula='linear'")
    if start is not None and start.shape != (*active.shape, 2):
        raise I2CLError(
            f"start coefficients have shape {tuple(start.shape)}, but {(*active.shape, 2)} is needed: "
            "take those of an injection into this model"
        )


class Coefficients:
    """The trained scalars in their formula's own form, and the linear form that is injected."""

    def __init__(
        self,
        config: CalibrationConfig,
        active: Bool[Tensor, "layers sites"],
        start: Float[Tensor, "layers sites 2"] | None,
        device: torch.device,
    ) -> None:
        self.formula = config.formula
        self.active = active
        fixed = torch.tensor([0.0, 1.0]).expand(*active.shape, 2)
        init_beta = 1.0 if config.formula == "add" else config.init_beta
        first = torch.tensor([config.init_lambda, init_beta]).expand_as(fixed)
        values = first if start is None else start.float().cpu()
        self.base = torch.where(active[..., None], values, fixed).to(device)
        self.trained = active[..., None].repeat(1, 1, 2).to(device)
        if config.formula == "add":
            self.trained[..., 1] = False
        self.free = torch.nn.Parameter(self.base[self.trained].clone())

    def linear(self) -> Float[Tensor, "layers sites 2"]:
        """(lambda, beta) such that every formula reads ``lambda v + beta a``."""
        values = self.base.masked_scatter(self.trained, self.free)
        amount, scale = values.unbind(-1)
        if self.formula == "add":
            amount = amount.relu()
        elif self.formula == "balance":
            scale = scale.relu()
            amount, scale = amount * scale, (1 - amount) * scale
        return torch.stack([amount, scale], dim=-1)


class _Loss:
    """Cross-entropy of the labels under the injection and its noise."""

    def __init__(
        self,
        decoder: Decoder,
        shared: Ids,
        queries: Sequence[Ids],
        targets: Sequence[Ids],
        context: ContextVector,
        config: CalibrationConfig,
        coefficients: Coefficients,
        seed: int,
    ) -> None:
        self.decoder = decoder
        self.shared = shared
        self.queries = [ids[len(shared) :] for ids in queries]
        self.targets = targets
        self.coefficients = coefficients
        generator = torch.Generator(decoder.device).manual_seed(seed)
        self.noisy = partial(
            NoisyEdit,
            context.values.to(decoder.device),
            site=context.config.site,
            positions=config.positions,
            seed=seed,
            active=coefficients.active,
            scale=config.noise,
            place=config.noise_place,
            writer_scale=decoder.writer_scale,
            generator=generator,
        )

    def __call__(self, chosen: Sequence[int]) -> Tensor:
        targets = [self.targets[row] for row in chosen]
        batch = labelled_batch([self.queries[row] for row in chosen], targets, self.decoder.device)
        edit = self.noisy(coefficients=self.coefficients.linear())
        prefix = self.decoder.prefix(self.shared, edit=edit) if self.shared else None
        return -sequence_log_probabilities(self.decoder, batch, targets, edit, prefix).mean()
