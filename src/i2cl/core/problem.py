"""Label scores of demonstrations as a function of a vector for every writer, and their derivatives.

Beyond the paper: what anchored calibration minimises a loss of. A vector of its own for every row of a batch
gives the derivatives of all rows by one backward pass a column.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import one_hot

from i2cl.core.context import SITES, ExtractConfig, Writers
from i2cl.core.edits import LinearEdit, RowsEdit
from i2cl.core.tangent import Tangent, balanced, columns, directions, weighted_mean
from i2cl.core.weights import example_weights
from i2cl.errors import I2CLError
from i2cl.models.batching import Batch
from i2cl.models.memory import MemoryWarning, free_memory
from i2cl.models.scoring import Questions, in_order, labelled_batch, score, sequence_log_probabilities
from i2cl.models.training import Backward
from i2cl.tasks import Example

Solver = Literal["auto", "kernel", "descent"]
MOST_COLUMNS = 512  # rows of the kernel; what has more is descended, which then answers better (docs/log.md)
MOST_WHOLE = 1024  # columns of whole label sequences that a kernel takes unasked; beyond, words tell labels
MOST_SEQUENCES = 4096  # those of whole label sequences, where somebody asks for these
SCALED = 256  # demonstrations, at most, whose gold labels set the scale of a descent
HELD = 1.5  # memory that derivatives take at most, times their own size
ROW_COPIES = 4  # of a row's vectors during a backward pass
DESCENT = 5  # copies of all vectors that AdamW holds, with their gradient
KERNELS = 5  # square matrices in double precision that the solver of a step holds at once


Pairs = Sequence[tuple[int, int]]  # a demonstration's row and a label


def memory_taken(rows: int, parameters: int) -> int:
    """Bytes beyond the model that a kernel's rows and their derivatives take at most."""
    return int(HELD * 4 * rows * parameters) + KERNELS * 8 * rows**2


@dataclass(eq=False)
class Problem:
    """Label scores of the demonstrations as a function of u, theta in units of the scale."""

    questions: Questions
    demonstrations: tuple[Example, ...]
    writers: Writers  # which sites have a vector

    def __post_init__(self) -> None:
        decoder = self.questions.decoder
        self.queries = self.questions.queries([example.text for example in self.demonstrations])
        self.every = range(len(self.queries))
        self.gold = torch.tensor([example.label for example in self.demonstrations])
        self.weights = example_weights(self.demonstrations)  # None: 1 each
        self.total_weight = len(self.gold) if self.weights is None else self.weights.sum().item()
        self.site = ExtractConfig(writers=self.writers).site
        active = torch.tensor(SITES[self.writers]).float()[:, None]
        self.scale = active.expand(decoder.layers, -1, decoder.d_model)  # units of theta; `first` sets them

    @property
    def ends_free(self) -> bool:
        """Whether the last writer has a vector, with only the final norm and the LM head behind it."""
        return not self.questions.labels.full and self.writers in {"both", "mlp"}

    def fits(self, memory: float | None, solver: Solver = "auto") -> bool:
        """Whether a kernel is to solve it, with a row for every label but the gold one of each demonstration.
        It and the derivatives may take ``memory`` in gigabytes; None: a quarter of what is free. Raises
        I2CLError if it is too large, and somebody asked for it or for whole sequences, which nothing else
        fits; or if a descent does not go into the memory either.
        """
        count, labels = len(self.queries), len(self.questions.labels.ids)
        full, asked = self.questions.labels.full, solver == "kernel"
        if full and solver == "descent":
            what = "a descent takes first tokens or words of labels, and no whole sequences"
            raise I2CLError(f"{what}: leave out scoring='full' or solver='descent'")
        rows, most = count * (labels - 1), MOST_SEQUENCES if full or asked else MOST_COLUMNS
        taken = memory_taken(rows, self.scale.numel())
        # The same on all processes of a tensor-parallel model, which have to choose the same solver.
        free = self.questions.decoder.consensus.smallest(free_memory())
        room = memory * 1e9 if memory is not None else free / 4
        sizes = f"derivatives take {taken / 1e9:.3g} GB, more than the {room / 1e9:.3g} GB that they may"
        if rows <= most and taken <= room and solver != "descent":
            return True
        if asked or self.questions.scoring == "full":
            what = "whole sequences" if full else "columns"
            option = "solver='kernel'" if asked else "scoring='full'"
            many = f"{rows} {what} are more than the {most} that anchored calibration takes"
            cure = f"leave out {option}, or give fewer of each class (--shots)"
            more = f"{sizes}: give more memory (--memory), or {cure}"
            raise I2CLError(f"{many}: {cure}" if rows > most else more)
        least = 4 * self.scale.numel() * (min(count, SCALED) + DESCENT)
        if least > room:
            sizes = f"{least / 1e9:.3g} GB, more than the {room / 1e9:.3g} GB that they may"
            raise I2CLError(f"vectors and their gradients take {sizes}: give more memory (--memory)")
        if rows <= most and solver == "auto":
            warnings.warn(f"{sizes}: going on by descent, which takes few", MemoryWarning, stacklevel=3)
        return False

    def theta(self, u: Float[Tensor, " parameters"]) -> Float[Tensor, "layers sites d"]:
        """The vectors at a place in units of their scale."""
        return self.scale * u.view_as(self.scale)

    def edit(self, u: Float[Tensor, " parameters"]) -> LinearEdit:
        """The injection of u."""
        vectors = self.theta(u)
        return LinearEdit(vectors, torch.ones(*vectors.shape[:2], 2), self.site)

    def scores(self, u: Float[Tensor, " parameters"]) -> Float[Tensor, "n labels"]:
        """Label scores at u."""
        questions = self.questions
        return score(questions.decoder, self.queries, questions.labels, edit=self.edit(u))

    def first(self) -> tuple[Tangent, Float[Tensor, "n labels"], float]:
        """The tangent at the plain model, once it has set the scale; scores; the variance it gives them."""
        point, scores = self.point(torch.zeros(self.scale.numel()))
        even, variance = self._scaled(point.spread())
        return replace(point, jacobian=point.jacobian.mul_(even)), scores, variance

    def scaled_by_gold(self, most: int = SCALED) -> float:
        """Set the scale by the gold labels of at most so many demonstrations; the variance of their scores.
        It is that of the gold label around the mean of all labels, over demonstrations: the same as over all
        labels where classes are equally frequent, and a backward pass in all.
        """
        if len(self.queries) > most:
            some = replace(self, demonstrations=tuple(Random(0).sample(self.demonstrations, most)))
            variance = some.scaled_by_gold(most)
            self.scale = some.scale
            return variance
        labels = len(self.questions.labels.ids)
        gold_direction = one_hot(self.gold, labels).float() - 1 / labels
        slopes = torch.empty(len(gold_direction), 1, self.scale.numel())
        scores = self._derive(slopes, torch.zeros(self.scale.numel()), self.every, gold_direction[:, None])
        _require_finite(scores, slopes)
        return self._scaled(weighted_mean(slopes[:, 0].square_(), self.weights))[1]

    def _scaled(self, spread: Float[Tensor, " parameters"]) -> tuple[Float[Tensor, " parameters"], float]:
        """Set the scale; what it was multiplied by, and the variance that it gives the scores."""
        even = balanced(spread, self.scale.shape[-1])
        self.scale = self.scale * even.view_as(self.scale)
        return even, float((spread * even.square()).sum())

    def point(self, u: Float[Tensor, " parameters"]) -> tuple[Tangent, Float[Tensor, "n labels"]]:
        """The tangent at u, and the label scores there. Raises I2CLError on any that are not finite."""
        slopes = torch.empty(len(self.queries), len(self.questions.labels.ids) - 1, u.numel())
        scores = self._slopes(slopes, u, self.every)
        return Tangent(columns(scores, self.gold), slopes.flatten(0, 1), self.weights), scores

    def moved(
        self,
        point: Tangent,
        u: Float[Tensor, " parameters"],
        scores: Float[Tensor, "n labels"],
        anew: Sequence[int],
        competing: Bool[Tensor, "n labels"] | None = None,
    ) -> Tangent:
        """The tangent at u, where the label scores are known.
        Some demonstrations are differentiated anew; the others keep the derivatives that they have, and so do
        labels of several tokens that are not ``competing``. Those are written over, so ``point`` is used up.
        """
        if anew:
            self._slopes(point.jacobian.view(*point.values.shape, -1), u, anew, competing)
        return Tangent(columns(scores, self.gold), point.jacobian, self.weights)

    def _slopes(
        self,
        into: Float[Tensor, "n columns parameters"],
        u: Float[Tensor, " parameters"],
        chosen: Sequence[int],
        competing: Bool[Tensor, "n labels"] | None = None,
    ) -> Float[Tensor, "rows labels"]:
        """Scores of some demonstrations; writes the columns' derivatives.
        Of labels of several tokens only those are read that compete, if that is given; others score 0.
        """
        labels = self.questions.labels
        if labels.full:
            scores = self._derive_sequences(into, u, chosen, competing)
        else:
            scores = self._derive(into, u, chosen, directions(self.gold[list(chosen)], len(labels.ids)))
        _require_finite(scores, *(into[row] for row in chosen))
        return scores

    def _derive(
        self,
        into: Float[Tensor, "n columns parameters"],
        u: Float[Tensor, " parameters"],
        chosen: Sequence[int],
        sums: Float[Tensor, "rows columns labels"],
    ) -> Float[Tensor, "rows labels"]:
        """Scores; writes the derivative of each of some sums of them: a backward pass for all rows each."""
        decoder, labels = self.questions.decoder, self.questions.labels

        def run(batch: Batch) -> Tensor:
            rows = [chosen[place] for place in batch.rows]
            leaf, edit = self._rows_edit(u, batch.rows, len(chosen))
            backward = Backward([leaf], decoder.model.dtype)
            with torch.enable_grad():
                values = labels.scores(decoder.forward(batch, edit=edit)[:, 0].float())
                weights = sums[list(batch.rows)].to(values)
                for column in range(weights.shape[1]):
                    decoder.pause()
                    (slopes,) = backward.gradients((values * weights[:, column]).sum())
                    into[rows, column] = self._in_units(slopes)
            return values.detach().cpu()

        queries = [self.queries[row] for row in chosen]
        parts = decoder.run_batches(queries, run, training=True, row_bytes=self._row_bytes)
        return in_order((batch.rows, values) for batch, values in parts)

    def _derive_sequences(
        self,
        into: Float[Tensor, "n others parameters"],
        u: Float[Tensor, " parameters"],
        chosen: Sequence[int],
        competing: Bool[Tensor, "n labels"] | None,
    ) -> Float[Tensor, "rows labels"]:
        """Scores of whole sequences; writes derivatives of the labels but the gold one, less its own."""
        gold: list[int] = self.gold.tolist()
        scores = torch.zeros(len(gold), len(self.questions.labels.ids))
        read = torch.ones_like(scores, dtype=torch.bool) if competing is None else competing
        others = [
            (row, label)
            for row in chosen
            for label in read[row].nonzero()[:, 0].tolist()
            if label != gold[row]
        ]
        # Columns of each row that are written; the column of a label counts the labels but the gold one.
        columns = {row: list[int]() for row in chosen}
        for row, label in others:
            columns[row].append(label - (label > gold[row]))

        def subtract_gold(pairs: Pairs, slopes: Float[Tensor, "batch parameters"]) -> None:
            for (row, _), slope in zip(pairs, slopes, strict=True):
                into[row, columns[row]] = -slope

        def add_other(pairs: Pairs, slopes: Float[Tensor, "batch parameters"]) -> None:
            rows = [row for row, _ in pairs]
            into[rows, [label - (label > gold[row]) for row, label in pairs]] += slopes

        self._derive_pairs(subtract_gold, scores, u, [(row, gold[row]) for row in chosen])
        self._derive_pairs(add_other, scores, u, others)
        return scores[list(chosen)]

    def _derive_pairs(
        self,
        write: Callable[[Pairs, Float[Tensor, "batch parameters"]], None],
        scores: Float[Tensor, "n labels"],
        u: Float[Tensor, " parameters"],
        pairs: Pairs,
    ) -> None:
        """Write the scores of (row, label) pairs, and pass their derivatives to ``write`` batch by batch."""
        decoder, labels = self.questions.decoder, self.questions.labels.ids

        def run(batch: Batch) -> tuple[Pairs, Tensor, Tensor]:
            some = [pairs[place] for place in batch.rows]
            leaf, edit = self._rows_edit(u, batch.rows, len(pairs))
            targets = [labels[label] for _, label in some]
            labelled = labelled_batch([self.queries[row] for row, _ in some], targets, decoder.device)
            labelled = replace(labelled, rows=batch.rows)
            with torch.enable_grad():
                values = sequence_log_probabilities(decoder, labelled, targets, edit)
                decoder.pause()
                (slopes,) = Backward([leaf], decoder.model.dtype).gradients(values.sum())
            return some, values.detach().cpu(), self._in_units(slopes)

        whole = [self.queries[row] + labels[label][:-1] for row, label in pairs]
        parts = decoder.run_batches(whole, run, training=True, row_bytes=self._row_bytes)
        for _, (some, values, slopes) in parts:
            rows, chosen = zip(*some, strict=True)
            scores[rows, chosen] = values
            write(some, slopes)

    @property
    def _row_bytes(self) -> int:
        """Memory of a row's own vectors, their gradient, and the buffers that it is gathered from."""
        return 4 * ROW_COPIES * self.scale.numel()

    def _rows_edit(
        self, u: Float[Tensor, " parameters"], rows: Sequence[int], count: int
    ) -> tuple[torch.nn.Parameter, RowsEdit]:
        """A vector of its own at every writer for every row of a batch, among so many rows."""
        device = self.questions.decoder.device
        leaf = torch.nn.Parameter(self.theta(u).to(device).repeat(len(rows), 1, 1, 1))
        place = torch.zeros(count, dtype=torch.long, device=device)
        place[list(rows)] = torch.arange(len(rows), device=device)
        return leaf, RowsEdit(leaf, torch.ones(leaf.shape[:-1], device=device), place, self.site)

    def _in_units(self, slopes: Tensor | None) -> Float[Tensor, "batch parameters"]:
        if slopes is None:
            raise I2CLError("the label scores do not depend on the writers: is this the right model?")
        return (self.scale * slopes.cpu()).flatten(1)


def _require_finite(*values: Tensor) -> None:
    if not all(one.isfinite().all() for one in values):
        raise I2CLError("label scores or their derivatives are not finite: load the model in float32")
