"""What may change a decoder's layers, and the change that injects a context vector into all of them.

Source: paper, section "Context Injection".
"""

import random
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.batching import Batch

Site = Literal["writers", "hidden"]
"""What is captured and edited: the two residual writers of a layer, or its block output."""

Positions = Literal["all", "first", "last", "random"]


class Edit:
    """Changes what a decoder's layers write. Subclasses override `output` and, if need be, `enter`.

    Attributes:
        site: the two residual writers (index 0 attention, 1 MLP), or the block output (index 0).
        sees_input: whether `enter` is to be called.
    """

    site: Site = "writers"
    sees_input: bool = False

    def enter(self, layer: int, residual: Float[Tensor, "batch tokens d"]) -> None:
        """Look at the residual stream that enters a block."""

    def output(
        self, layer: int, index: int, output: Float[Tensor, "batch tokens d"], batch: Batch
    ) -> Float[Tensor, "batch tokens d"] | None:
        """Return what replaces ``output`` (never edit in place), or None to leave it."""
        raise NotImplementedError


class LinearEdit(Edit):
    """Writes ``lambda * v + beta * a`` instead of ``a``, at every token or at one.

    The sum is taken in the coefficients' precision (float32) and rounded once to the model's: a beta
    of 1.003 would be 1 in bfloat16.

    Attributes:
        values: context vector.
        coefficients: axes [layer, (mha, mlp), (lambda, beta)].
        positions: tokens of the query that are injected: all, its first, its last, or a random one,
            drawn once per query from ``seed`` and its tokens so that batching cannot change it.
    """

    def __init__(
        self,
        values: Float[Tensor, "layers sites d"],
        coefficients: Float[Tensor, "layers sites 2"],
        *,
        site: Site = "writers",
        positions: Positions = "all",
        seed: int = 0,
    ) -> None:
        self.values = values
        self.coefficients = coefficients
        self.site = site
        self.positions = positions
        self.seed = seed

    def output(
        self, layer: int, index: int, output: Float[Tensor, "batch tokens d"], batch: Batch
    ) -> Float[Tensor, "batch tokens d"]:
        """The linear combination, where the token is injected; what was there, elsewhere."""
        amount, keep = self.coefficients[layer, index].to(output.device)
        vector = amount * self.values[layer, index].to(output.device)
        injected: Tensor = (keep * output.to(keep.dtype) + vector).to(output.dtype)
        if self.positions == "all":
            return injected
        return torch.where(self._chosen(batch).to(output.device), injected, output)

    def _chosen(self, batch: Batch) -> Bool[Tensor, "batch tokens 1"]:
        place = batch.last
        if self.positions == "first":
            place = torch.zeros_like(place)
        elif self.positions == "random":
            rows = zip(batch.input_ids.tolist(), batch.last.tolist(), strict=True)
            drawn = [self._draw(ids[: last + 1]) for ids, last in rows]
            place = torch.tensor(drawn, device=batch.last.device)
        tokens = torch.arange(batch.input_ids.shape[1], device=place.device)
        chosen: Tensor = tokens == place[:, None]
        return chosen[..., None]

    def _draw(self, ids: list[int]) -> int:
        return random.Random(f"{self.seed} {ids}").randrange(len(ids))


class NoisyEdit(LinearEdit):
    """A linear edit that also adds Gaussian noise, for calibration (paper, "Noisy Self-calibration").

    The noise has ``scale`` times the L2 norm of what it is added to, taken as a constant: of the
    residual stream after attention and after MLP (``place="residual"``, the paper's text), or of each
    writer's output (``place="writer"``, the released code). Sites that are not ``active`` get neither
    injection nor noise.
    """

    def __init__(
        self,
        values: Float[Tensor, "layers sites d"],
        coefficients: Float[Tensor, "layers sites 2"],
        *,
        site: Site,
        positions: Positions,
        seed: int,
        active: Bool[Tensor, "layers sites"],
        scale: float,
        place: Literal["residual", "writer"],
        writer_scale: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__(values, coefficients, site=site, positions=positions, seed=seed)
        self.active = active.tolist()
        self.scale = scale
        self.sees_input = place == "residual" and site == "writers" and scale > 0
        self.writer_scale = writer_scale
        self.generator = generator
        self.residual: Tensor | None = None

    def enter(self, _layer: int, residual: Float[Tensor, "batch tokens d"]) -> None:
        """Remember the stream: the norm after each writer is that of stream plus output."""
        self.residual = residual

    def output(
        self, layer: int, index: int, output: Float[Tensor, "batch tokens d"], batch: Batch
    ) -> Float[Tensor, "batch tokens d"]:
        """The linear combination plus noise."""
        active = self.active[layer][index]
        injected = super().output(layer, index, output, batch) if active else output
        if self.residual is None:
            return injected + self._noise(injected) if active and self.scale else injected
        stream = self.residual.to(injected.device) + self.writer_scale * injected
        noise = self._noise(stream) if active else torch.zeros_like(stream)
        self.residual = stream + noise
        return injected + noise / self.writer_scale

    def _noise(self, signal: Float[Tensor, "batch tokens d"]) -> Float[Tensor, "batch tokens d"]:
        size = self.scale * torch.linalg.vector_norm(
            signal.detach(), dim=-1, keepdim=True, dtype=torch.float32
        )
        device = self.generator.device
        drawn = torch.randn(signal.shape, generator=self.generator, device=device, dtype=signal.dtype)
        noise: Tensor = size.to(signal.dtype) * drawn.to(signal.device)  # the norm itself can exceed float16
        return noise
