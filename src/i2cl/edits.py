"""What may change a decoder's layers, and the change that injects a context vector into all of them.

Source: paper, section "Context Injection".
"""

import random
from functools import cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
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

    def enter(self, layer: int, residual: Float[Tensor, "lines tokens d"]) -> None:
        """Look at the residual stream that enters a block."""

    def output(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], batch: Batch
    ) -> Float[Tensor, "lines tokens d"] | None:
        """Return what replaces ``output`` (never edit in place), or None to leave it."""
        raise NotImplementedError


class Keep(Edit):
    """Copies what is put out at one token of each row, in the order of the sites, and changes nothing.

    Attributes:
        kept: one (batch x d) tensor a site.
    """

    def __init__(self, site: Site, at: Int[Tensor, " batch"]) -> None:
        self.site = site
        self.at = at
        self.kept: list[Tensor] = []

    def output(
        self, _layer: int, _index: int, output: Float[Tensor, "lines tokens d"], _batch: Batch
    ) -> None:
        """Copy it."""
        row = torch.arange(len(output), device=output.device)
        self.kept.append(output[row, self.at.to(output.device)])  # a copy, also where the block adds in place


class PlacedEdit(Edit):
    """Replaces outputs at every token or at one. Subclasses override `injected`.

    Attributes:
        positions: tokens of the query that are injected: all, its first, its last, or a random one,
            drawn once per query from ``seed`` and its tokens so that batching cannot change it.
    """

    def __init__(self, site: Site, positions: Positions, seed: int) -> None:
        self.site = site
        self.positions = positions
        self.seed = seed

    def injected(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], batch: Batch
    ) -> Float[Tensor, "lines tokens d"]:
        """What replaces ``output`` at an injected token."""
        raise NotImplementedError

    def output(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], batch: Batch
    ) -> Float[Tensor, "lines tokens d"]:
        """What `injected` says, where the token is injected; what was there, elsewhere."""
        injected = self.injected(layer, index, output, batch)
        if self.positions == "all":
            return injected
        return torch.where(self._chosen(batch).to(output.device), injected, output)

    def _chosen(self, batch: Batch) -> Bool[Tensor, "lines tokens 1"]:
        place = batch.last
        if self.positions == "first":
            place = batch.first
        elif self.positions == "random":
            place = batch.first + self._drawn(batch)
        tokens = torch.arange(batch.input_ids.shape[1], device=place.device)
        chosen: Tensor = tokens == place[:, None]
        if batch.packed:
            chosen = chosen.any(0, keepdim=True)
        return chosen[..., None]

    def _drawn(self, batch: Batch) -> Int[Tensor, " batch"]:
        lines = batch.input_ids.tolist()
        spans = enumerate(zip(batch.first.tolist(), batch.last.tolist(), strict=True))
        queries = [lines[0 if batch.packed else row][first : last + 1] for row, (first, last) in spans]
        drawn = [random.Random(f"{self.seed} {ids}").randrange(len(ids)) for ids in queries]
        return torch.tensor(drawn, device=batch.last.device)


class LinearEdit(PlacedEdit):
    """Writes ``lambda * v + beta * a`` instead of ``a``.

    Coefficients act in float32 also on a model in lower precision, where a beta of 1.003 would be 1.

    Attributes:
        values: context vector.
        coefficients: axes [layer, (mha, mlp), (lambda, beta)]; gradients flow to them if they are on.
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
        super().__init__(site, positions, seed)
        self.values = values
        self.coefficients = coefficients
        self._pairs = coefficients.flatten(0, 1).unbind()
        self._fixed: dict[tuple[int, int], tuple[Tensor, float]] = {}

    def injected(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], _batch: Batch | None = None
    ) -> Float[Tensor, "lines tokens d"]:
        """The linear combination."""
        if not self.coefficients.requires_grad:
            scaled, beta = self._ready(layer, index, output)
            added = torch.add(scaled, output, alpha=beta)  # one operation is all an injection costs
            return added.to(output.dtype)
        amount, keep = self._pair(layer, index).to(output.device)
        vector = amount * self.values[layer, index].to(output.device)
        mixed: Tensor = torch.addcmul(vector, keep, output)
        return mixed.to(output.dtype)

    def _pair(self, layer: int, index: int) -> Float[Tensor, "2"]:
        return self._pairs[layer * self.values.shape[1] + index]

    def _ready(self, layer: int, index: int, output: Tensor) -> tuple[Float[Tensor, " d"], float]:
        if (layer, index) not in self._fixed:
            amount, keep = self._pair(layer, index).tolist()
            dtype = output.dtype if _keeps_alpha(output.device, output.dtype) else torch.float32
            scaled = amount * self.values[layer, index]
            self._fixed[layer, index] = scaled.to(output.device, dtype), keep
        return self._fixed[layer, index]


@cache
def _keeps_alpha(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.add`` uses alpha unrounded: CPU kernels round it to a lower precision first."""
    one = torch.ones(1, device=device, dtype=dtype)
    return bool(torch.add(-one, one, alpha=1.0001) != 0)


class NoisyEdit(Edit):
    """An injection with Gaussian noise, for calibration (paper, "Noisy Self-calibration").

    The noise has ``scale`` times the L2 norm of what it is added to, taken as a constant: of the
    residual stream after attention and after MLP (``place="residual"``, the paper's text), or of each
    writer's output (``place="writer"``, the released code). Sites that are not ``active`` get neither
    injection nor noise.

    Attributes:
        injection: the edit that noise is added to.
    """

    def __init__(
        self,
        injection: PlacedEdit,
        *,
        active: Bool[Tensor, "layers sites"],
        scale: float,
        place: Literal["residual", "writer"],
        writer_scale: float,
        generator: torch.Generator,
    ) -> None:
        self.injection = injection
        self.site = injection.site
        self.active = active.tolist()
        self.scale = scale
        self.sees_input = place == "residual" and self.site == "writers" and scale > 0
        self.writer_scale = writer_scale
        self.generator = generator
        self.residual: Tensor | None = None

    def enter(self, _layer: int, residual: Float[Tensor, "lines tokens d"]) -> None:
        """Remember the stream: the norm after each writer is that of stream plus output."""
        self.residual = residual.detach()

    def output(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], batch: Batch
    ) -> Float[Tensor, "lines tokens d"]:
        """The linear combination plus noise."""
        active = self.active[layer][index]
        injected = self.injection.output(layer, index, output, batch) if active else output
        if not self.scale:
            return injected
        if self.residual is None:
            return injected + self._noise(injected.detach()) if active else injected
        stream = self.residual.to(injected.device).add(injected.detach(), alpha=self.writer_scale)
        if not active:
            self.residual = stream
            return injected
        noise = self._noise(stream)
        self.residual = stream + noise
        return torch.add(injected, noise, alpha=1 / self.writer_scale)

    def _noise(self, signal: Float[Tensor, "lines tokens d"]) -> Float[Tensor, "lines tokens d"]:
        size = self.scale * torch.linalg.vector_norm(signal, dim=-1, keepdim=True, dtype=torch.float32)
        device = self.generator.device
        drawn = torch.randn(signal.shape, generator=self.generator, device=device, dtype=signal.dtype)
        return drawn.to(signal.device).mul_(size.to(signal.dtype))  # the norm itself can exceed float16
