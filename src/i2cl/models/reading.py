"""What the LM head is given, by itself: what read-outs and maps of the last hidden state are fitted to."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.prefix import Prefix


def head_states(
    decoder: Decoder, queries: Sequence[Ids], *, edit: Edit | None = None, prefix: Prefix | None = None
) -> Float[Tensor, "queries d"]:
    """What the LM head is given behind each query, in float32 on the CPU; arguments as of `score`."""
    found = torch.empty(len(queries), decoder.d_model)

    def run(batch: Batch) -> Tensor:
        states: list[Tensor] = []
        decoder.forward(batch, edit=edit, prefix=prefix, states=states)
        return states[-1][:, 0].float().cpu()

    with decoder.frozen(), torch.no_grad():
        for batch, states in decoder.run_batches(queries, run, reserve=len(prefix.ids) if prefix else 0):
            found[list(batch.rows)] = states
    return found
