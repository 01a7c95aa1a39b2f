"""Noisy self-calibration of the coefficients (paper, section "Noisy Self-calibration")."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from i2cl.batching import Ids
from i2cl.context import ContextVector, Writers
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

Formula = Literal["linear", "add", "balance"]
StepProgress = Callable[[int, int, float], None]
"""Called after each epoch with steps done, steps in all and the epoch's mean loss in nats."""


RELEASED: Mapping[str, object] = MappingProxyType(
    {"draw": "step", "lr_final": 0.0, "warmup": 0.05, "noise_place": "writer"}
)
"""Where the recipe of the paper's released code differs from its text."""


class CalibrationConfig(BaseModel):
    """How coefficients are fitted. Defaults are the paper's text; `released` gives the released code's.

    Attributes:
        layers: all, a third of them, or a list of indices ("Target Layer" ablation).
        positions: query tokens that are injected ("Injection Position" ablation).
        formula: ``linear`` lambda v + beta a; ``add`` lambda v + a with lambda > 0; ``balance``
            (lambda v + (1 - lambda) a) beta with beta > 0 ("Injection Formula" ablation).
        epochs: passes over the demonstrations.
        batch_size: queries a step (the paper is silent; released code).
        draw: shuffle once an epoch, or draw each step's batch afresh (released code).
        lr: first learning rate of AdamW.
        lr_final: the rate that the cosine ends at.
        warmup: share of the steps over which the rate first rises from 0.
        weight_decay: of AdamW (the paper is silent; released code).
        noise: gamma, the noise's size relative to the L2 norm of what it is added to.
        noise_place: on the residual stream, or on each writer's output (released code).
        init_lambda: first value of lambda.
        init_beta: first value of beta.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Literal["all", "early", "middle", "late"] | tuple[int, ...] = "all"
    positions: Positions = "all"
    formula: Formula = "linear"
    epochs: int = Field(100, ge=0)
    batch_size: int = Field(2, ge=1)
    draw: Literal["epoch", "step"] = "epoch"
    lr: float = Field(1e-2, gt=0)
    lr_final: float = Field(1e-5, ge=0)
    warmup: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(1e-3, ge=0)
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

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at an optimiser step: warm-up if any, then a cosine over all steps."""
        rising = int(self.warmup * steps)
        if rising and step <= rising:
            return self.lr * step / rising
        return self.lr_final + (self.lr - self.lr_final) * (1 + math.cos(math.pi * step / steps)) / 2


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
        progress: called after each epoch.

    Raises:
        I2CLError: without demonstrations, on sizes that do not fit, or on a loss that is not finite.
    """
    config = config or CalibrationConfig()
    if not demonstrations:
        raise I2CLError("no demonstrations were given: calibration needs at least one")
    labels = label_tokens(decoder, task.template, task.labels, scoring)
    queries = encode_queries(
        decoder, task.template.query, [example.text for example in demonstrations], labels
    )
    targets = [labels.target(example.label) for example in demonstrations]
    coefficients = Coefficients(
        config, config.active(decoder.layers, context.config.writers), start, decoder.device
    )
    if batches is None:
        batches = list(_batches(config, len(queries), random.Random(seed)))
    run = _Run(decoder, queries, targets, context, config, coefficients, seed)
    history = run.train(batches, progress)
    return Injection(
        context=context,
        coefficients=coefficients.linear().detach().cpu(),
        task=task.without_data(),
        base=decoder.base,
        positions=config.positions,
        seed=seed,
        settings=config.model_dump(mode="json"),
        history=tuple(history),
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
        if start is not None and config.formula != "linear":
            raise I2CLError(
                f"start coefficients are linear, but formula={config.formula!r}: use formula='linear'"
            )
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


@dataclass
class _Run:
    """One calibration: everything that stays the same from step to step."""

    decoder: Decoder
    queries: Sequence[Ids]
    targets: Sequence[Ids]
    context: ContextVector
    config: CalibrationConfig
    coefficients: Coefficients
    seed: int

    def train(self, batches: Sequence[Sequence[int]], progress: StepProgress | None) -> list[float]:
        """Take one optimiser step per batch; mean loss of each epoch."""
        config, steps = self.config, len(batches)
        optimizer = torch.optim.AdamW(
            [self.coefficients.free], lr=config.lr, weight_decay=config.weight_decay
        )
        generator = torch.Generator(self.decoder.device).manual_seed(self.seed)
        values = self.context.values.to(self.decoder.device)
        per_epoch = max(1, steps // max(1, config.epochs))
        history: list[float] = []
        losses: list[Tensor] = []
        with self.decoder.frozen(), torch.enable_grad():
            for step, chosen in enumerate(batches):
                for group in optimizer.param_groups:
                    group["lr"] = config.rate(step, steps)
                loss = self._loss(chosen, values, generator)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                if len(losses) == per_epoch or step == steps - 1:
                    history.append(self._checked_mean(losses, step))
                    losses.clear()
                    if progress is not None:
                        progress(step + 1, steps, history[-1])
        return history

    def _loss(self, chosen: Sequence[int], values: Tensor, generator: torch.Generator) -> Tensor:
        config = self.config
        edit = NoisyEdit(
            values,
            self.coefficients.linear(),
            site=self.context.config.site,
            positions=config.positions,
            seed=self.seed,
            active=self.coefficients.active,
            scale=config.noise,
            place=config.noise_place,
            writer_scale=self.decoder.writer_scale,
            generator=generator,
        )
        targets = [self.targets[row] for row in chosen]
        batch = labelled_batch([self.queries[row] for row in chosen], targets, self.decoder.device)
        return -sequence_log_probabilities(self.decoder, batch, targets, edit).mean()

    @staticmethod
    def _checked_mean(losses: list[Tensor], step: int) -> float:
        mean = torch.stack(losses).mean().item()
        if not math.isfinite(mean):
            raise I2CLError(
                f"the calibration loss became {mean} by step {step + 1}: "
                "lower the noise or the learning rate, or load the model in float32"
            )
        return mean


def _batches(config: CalibrationConfig, count: int, picker: random.Random) -> Iterator[list[int]]:
    """Demonstration indices of every step."""
    order = list(range(count))
    for _ in range(config.epochs):
        if config.draw == "step":
            for _ in range(max(1, count // config.batch_size)):
                yield picker.sample(order, min(config.batch_size, count))
        else:
            picker.shuffle(order)
            for start in range(0, count, config.batch_size):
                yield order[start : start + config.batch_size]
