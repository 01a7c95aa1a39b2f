"""A change of its own for every query of a batch, gathered by task."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from i2cl.batching import Batch
from i2cl.edits import PlacedEdit, Positions, Site


class RowsEdit(PlacedEdit):
    """A linear edit of its own for every query of a batch.

    Attributes:
        scaled: context vector of every task, times its lambda.
        keep: beta of every task.
        task: each query's task, in the order of the whole list of queries.
    """

    def __init__(
        self,
        scaled: Float[Tensor, "tasks layers sites d"],
        keep: Float[Tensor, "tasks layers sites"],
        task: Int[Tensor, " queries"],
        *,
        site: Site = "writers",
        positions: Positions = "all",
        seed: int = 0,
    ) -> None:
        super().__init__(site, positions, seed)
        self.scaled = scaled
        self.keep = keep
        self.task = task
        self._batch: Batch | None = None
        self._rows = task

    def injected(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], batch: Batch
    ) -> Float[Tensor, "lines tokens d"]:
        """Each row's own linear combination."""
        if self._batch is not batch:
            self._batch, self._rows = batch, self._owners(batch)
        vectors = self.scaled[:, layer, index].index_select(0, self._rows)
        keep = self.keep[:, layer, index].index_select(0, self._rows)[:, None]
        across = 0 if batch.packed else 1
        vectors, keep = vectors.unsqueeze(across), keep.unsqueeze(across)
        mixed: Tensor = torch.addcmul(vectors.to(output.device), keep.to(output.device), output)
        return mixed.to(output.dtype)

    def _owners(self, batch: Batch) -> Int[Tensor, " owners"]:
        """The task of each row, or of each token where all queries are packed into one row."""
        rows = self.task[list(batch.rows)]
        if not batch.packed:
            return rows
        width = batch.input_ids.shape[1]
        return rows.repeat_interleave(torch.diff(batch.first, append=batch.first.new_tensor([width])))
