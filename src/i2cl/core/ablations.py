"""Edits for the paper's calibration and ablations: noise, and injection at a single token.

Source: paper, ablation "Injection Position" and subsection "Noisy Self-calibration".
"""

import random
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from i2cl.models.batching import Batch
from i2cl.models.edits import AffineEdit, Edit, States

# Injected tokens of a query: all, the first, the last, or one drawn at random.
Positions = Literal["all", "first", "last", "random"]


def at_positions(edit: AffineEdit, positions: Positions, seed: int = 0) -> Edit:
    """Restrict an edit to some tokens of each query.

    Args:
        edit: acts on all tokens.
        positions: injected tokens. A random one is drawn once per query, from ``seed`` and the query's token
            ids, so that batching does not matter.
        seed: of random positions.
    """
    return edit if positions == "all" else _PositionEdit(edit, positions, seed)


class _PositionEdit(Edit):
    """An edit at one token of each query; see `at_positions`."""

    def __init__(self, edit: Edit, positions: Positions, seed: int) -> None:
        self.edit = edit
        self.hook_point = edit.hook_point
        self.positions = positions
        self.seed = seed
        self._batch: Batch | None = None  # the batch of `_mask`
        self._mask = torch.empty(0, dtype=torch.bool)

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States:
        """Replace the output at injected tokens only."""
        if self._batch is not batch:  # once per pass
            self._batch, self._mask = batch, self._chosen_tokens(batch)
        edited = self.edit.output(layer, index, output, batch)
        return output if edited is None else torch.where(self._mask.to(output.device), edited, output)

    def _chosen_tokens(self, batch: Batch) -> Bool[Tensor, "lines tokens 1"]:
        """Return a mask of the chosen token of each query."""
        index = batch.last if self.positions == "last" else batch.first
        if self.positions == "random":
            index = index + self._random_offsets(batch)
        tokens = torch.arange(batch.input_ids.shape[1], device=index.device)
        chosen: Tensor = tokens == index[:, None]
        if batch.packed:
            chosen = chosen.any(0, keepdim=True)
        return chosen[..., None]

    def _random_offsets(self, batch: Batch) -> Int[Tensor, " batch"]:
        lines = batch.input_ids.tolist()
        spans = enumerate(zip(batch.first.tolist(), batch.last.tolist(), strict=True))
        queries = [lines[0 if batch.packed else row][first : last + 1] for row, (first, last) in spans]
        offsets = [random.Random(f"{self.seed} {ids}").randrange(len(ids)) for ids in queries]
        return torch.tensor(offsets, device=batch.last.device)


class NoisyEdit(Edit):
    """An injection with Gaussian noise, for calibration (paper, "Noisy Self-calibration").

    Args:
        injection: the edit without noise.
        active: sublayers that get the injection and noise.
        scale: size of the noise relative to the L2 norm of the signal, through which no gradient flows.
        place: add noise to the residual stream after attention and after the MLP (``"residual"``, the paper's
            text), or to each sublayer's output (``"sublayer"``, the released code).
        sublayer_scale: factor of a sublayer's output in the residual stream.
        generator: source of the noise.
    """

    def __init__(
        self,
        injection: Edit,
        *,
        active: Bool[Tensor, "layers sublayers"],
        scale: float,
        place: Literal["residual", "sublayer"],
        sublayer_scale: float,
        generator: torch.Generator,
    ) -> None:
        self.injection = injection
        self.hook_point = injection.hook_point
        self.active = active.tolist()
        self.scale = scale
        self.sees_input = place == "residual" and self.hook_point == "sublayers" and scale > 0
        self.sublayer_scale = sublayer_scale
        self.generator = generator
        self.residual: Tensor | None = None

    def enter(self, _layer: int, residual: States) -> None:
        """Store the residual stream, to which the sublayers' outputs will be added."""
        self.residual = residual.detach()

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States:
        """Return the edited output plus noise."""
        active = self.active[layer][index]
        edited = self.injection.output(layer, index, output, batch) if active else None
        injected = output if edited is None else edited
        if not self.scale:
            return injected
        if self.residual is None:
            return injected + self._noise(injected.detach()) if active else injected
        self.residual = self.residual.to(injected.device).add(injected.detach(), alpha=self.sublayer_scale)
        if not active:
            return injected
        noise = self._noise(self.residual)
        self.residual = self.residual + noise
        return torch.add(injected, noise, alpha=1 / self.sublayer_scale)

    def _noise(self, signal: States) -> Float[Tensor, "lines tokens d"]:
        # in float32, since the norm can overflow in float16
        size = self.scale * torch.linalg.vector_norm(signal, dim=-1, keepdim=True, dtype=torch.float32)
        device = self.generator.device
        noise = torch.randn(signal.shape, generator=self.generator, device=device, dtype=signal.dtype)
        return noise.to(signal.device).mul_(size.to(signal.dtype))
