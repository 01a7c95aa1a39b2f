"""Edits of context injection: every sublayer outputs lambda v + beta a, plus noise during calibration.

Source: paper, subsections "Context Injection" and, for the noise, "Noisy Self-calibration".
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, islice
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from i2cl.models.batching import Batch
from i2cl.models.edits import Edit, Site, States

# Injected tokens of a query ("Injection Position" ablation).
Positions = Literal["all", "first", "last", "random"]


class PlacedEdit(Edit):
    """Replaces outputs at every token of a query, or at one. Subclasses override `injected`.

    Args:
        site: hook points.
        positions: injected tokens: all, the first, the last, or a random one, drawn once per query from
            ``seed`` and its token ids, so that batching does not matter.
        seed: of random positions.
    """

    site: Site

    def __init__(self, site: Site, positions: Positions, seed: int) -> None:
        self.site = site
        self.positions = positions
        self.everywhere = positions == "all"
        self.seed = seed
        self._batch: Batch | None = None  # the batch of `_mask`
        self._mask: Bool[Tensor, "lines tokens 1"] | None = None

    def injected(self, layer: int, index: int, output: States, batch: Batch) -> States:
        """Return what replaces ``output`` at injected tokens."""
        raise NotImplementedError

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States:
        """Replace the output at injected tokens only."""
        injected = self.injected(layer, index, output, batch)
        if self.positions == "all":
            return injected
        if self._mask is None or self._batch is not batch:  # once per pass
            self._batch, self._mask = batch, self._chosen(batch)
        return torch.where(self._mask.to(output.device), injected, output)

    def _chosen(self, batch: Batch) -> Bool[Tensor, "lines tokens 1"]:
        place = batch.last if self.positions == "last" else batch.first
        if self.positions == "random":
            place = place + self._drawn(batch)
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
    """Outputs ``lambda * v + beta * a`` instead of ``a``.

    Coefficients stay in float32 on models in lower precision, where a beta of 1.003 would round to 1.

    Attributes:
        values: the context vector.
        coefficients: axes [layer, site, (lambda, beta)]; gradients flow to them if enabled.
    """

    def __init__(
        self,
        values: Float[Tensor, "layers sites d"],
        coefficients: Float[Tensor, "layers sites 2"],
        site: Site = "writers",
        positions: Positions = "all",
        seed: int = 0,
    ) -> None:
        super().__init__(site, positions, seed)
        self.values = values
        self.coefficients = coefficients
        self._pairs = [sites.unbind() for sites in coefficients.unbind()]
        self._fixed: dict[tuple[int, int, torch.device, torch.dtype], tuple[Tensor, float]] = {}

    def injected(self, layer: int, index: int, output: States, _batch: Batch | None = None) -> States:
        """Return the linear combination."""
        if not self.coefficients.requires_grad:
            scaled, beta = self._ready(layer, index, output)
            return torch.add(scaled, output, alpha=beta).to(output.dtype)  # the only cost of an injection
        amount, keep = self._pairs[layer][index].to(output.device)
        vector = amount * self.values[layer, index].to(output.device)
        mixed: Tensor = torch.addcmul(vector, keep, output)
        return mixed.to(output.dtype)

    def _ready(self, layer: int, index: int, output: Tensor) -> tuple[Float[Tensor, " d"], float]:
        key = layer, index, output.device, output.dtype
        if (ready := self._fixed.get(key)) is not None:
            return ready
        amount, keep = self._pairs[layer][index].tolist()
        dtype = output.dtype if _keeps_alpha(output.device, output.dtype) else torch.float32
        ready = (amount * self.values[layer, index]).to(output.device, dtype), keep
        if not self.values.requires_grad:  # do not keep a graph beyond its pass
            self._fixed[key] = ready
        return ready


@cache
def _keeps_alpha(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``torch.add`` uses alpha unrounded; CPU kernels round it to lower precisions."""
    one = torch.ones(1, device=device, dtype=dtype)
    return bool(torch.add(-one, one, alpha=1.0001) != 0)


class NoisyEdit(Edit):
    """An injection with Gaussian noise, for calibration (paper, "Noisy Self-calibration").

    Args:
        injection: the edit without noise.
        active: sites that get the injection and noise.
        scale: size of the noise relative to the L2 norm of the signal, which counts as a constant.
        place: add noise to the residual stream after attention and after the MLP (``"residual"``, the paper's
            text), or to each sublayer's output (``"writer"``, the released code).
        writer_scale: factor of a sublayer's output in the residual stream.
        draw: returns Gaussian numbers in the shape of its argument.
    """

    def __init__(
        self,
        injection: PlacedEdit,
        *,
        active: Bool[Tensor, "layers sites"],
        scale: float,
        place: Literal["residual", "writer"],
        writer_scale: float,
        draw: Callable[[Tensor], Tensor],
    ) -> None:
        self.injection = injection
        self.site = injection.site
        self.active = active.tolist()
        self.scale = scale
        self.sees_input = place == "residual" and self.site == "writers" and scale > 0
        self.writer_scale = writer_scale
        self.draw = draw
        self.residual: Tensor | None = None

    def enter(self, _layer: int, residual: States) -> None:
        """Remember the stream, to which the sublayers' outputs are added."""
        self.residual = residual.detach()

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States:
        """Return the linear combination plus noise."""
        active = self.active[layer][index]
        injected = self.injection.output(layer, index, output, batch) if active else output
        if not self.scale:
            return injected
        if self.residual is None:
            return injected + self._noise(injected.detach()) if active else injected
        self.residual = self.residual.to(injected.device).add(injected.detach(), alpha=self.writer_scale)
        if not active:
            return injected
        noise = self._noise(self.residual)
        self.residual = self.residual + noise
        return torch.add(injected, noise, alpha=1 / self.writer_scale)

    def _noise(self, signal: States) -> States:
        size = self.scale * torch.linalg.vector_norm(signal, dim=-1, keepdim=True, dtype=torch.float32)
        return self.draw(signal).mul_(size.to(signal.dtype))  # the norm can overflow in float16


def draw_together(
    generators: Sequence[torch.Generator], alone: Sequence[Batch], shared: Batch, lengths: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return a source of noise for a batch of several runs that gives each the noise of a separate run.

    Args:
        generators: of each run.
        alone: the batch that each run would have separately.
        shared: the common batch, with the queries in the order of the runs. Padding gets no noise.
        lengths: tokens of each query.
    """
    sizes, rest = [one.input_ids.numel() for one in alone], iter(lengths)
    runs = zip(accumulate([0, *sizes]), alone, strict=False)
    source = torch.cat([start + _token_places(one, list(islice(rest, len(one.rows)))) for start, one in runs])
    place = _token_places(shared, lengths)

    def numbers(like: Tensor) -> Tensor:
        d = like.shape[-1]
        each = zip(generators, sizes, strict=True)
        drawn = torch.cat([_normal((size, d), generator, like) for generator, size in each])
        noise = torch.zeros_like(like).view(-1, d)
        noise[place.to(like.device)] = drawn[source.to(like.device)]
        return noise.view(like.shape)

    return numbers


def draw_from(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Return a source of noise for one run."""
    return lambda like: _normal(tuple(like.shape), generator, like)


def _normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.to(like.device)


def _token_places(batch: Batch, lengths: Sequence[int]) -> Int[Tensor, " tokens"]:
    """Return the indices of the queries' tokens in the flattened batch, query by query."""
    width = 0 if batch.packed else batch.input_ids.shape[1]
    starts = (row * width + first for row, first in enumerate(batch.first.tolist()))
    spans = zip(starts, lengths, strict=True)
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


class RowsEdit(PlacedEdit):
    """A linear edit for each query.

    Args:
        scaled: lambda times the vector, of each task.
        keep: beta of each task.
        task: index of each query's task.
        site: hook points.
        positions: see `PlacedEdit`.
        seed: of random positions.
    """

    def __init__(
        self,
        scaled: Float[Tensor, "tasks layers sites d"],
        keep: Float[Tensor, "tasks layers sites"],
        task: Int[Tensor, " queries"],
        site: Site = "writers",
        positions: Positions = "all",
        seed: int = 0,
    ) -> None:
        super().__init__(site, positions, seed)
        self.scaled = scaled
        self.keep = keep
        self.task = task
        # Unbound once: indexing at every hook point would allocate a full-size gradient each time.
        self._vectors = [layer.unbind(1) for layer in scaled.unbind(1)]
        self._keeps = [layer.unbind(1) for layer in keep.unbind(1)]
        self._rows_batch: Batch | None = None  # the batch of `_rows`
        self._rows = task

    def injected(self, layer: int, index: int, output: States, batch: Batch) -> States:
        """Return each row's linear combination."""
        if self._rows_batch is not batch:
            self._rows_batch, self._rows = batch, self._owners(batch)
        across = 0 if batch.packed else 1
        vectors = self._vectors[layer][index].index_select(0, self._rows).unsqueeze(across)
        keep = self._keeps[layer][index].index_select(0, self._rows)[:, None].unsqueeze(across)
        mixed: Tensor = torch.addcmul(vectors.to(output.device), keep.to(output.device), output)
        return mixed.to(output.dtype)

    def _owners(self, batch: Batch) -> Int[Tensor, " owners"]:
        """Return the task of each row, or of each token of a packed batch."""
        rows = self.task[list(batch.rows)]
        if not batch.packed:
            return rows
        width = batch.input_ids.shape[1]
        return rows.repeat_interleave(torch.diff(batch.first, append=batch.first.new_tensor([width])))
