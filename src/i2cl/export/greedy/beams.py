"""Beam search that compares whole labels, as transformers' `generate` does it by a generation config alone.

Source: ``num_beams``, ``length_penalty`` and ``sequence_bias`` of
https://huggingface.co/docs/transformers/main_classes/text_generation.
"""

from collections.abc import Sequence

from transformers import GenerationConfig

from i2cl.export.greedy.labels import FORCE, added
from i2cl.export.greedy.texts import listed

MOST_BEAMS = 64
"""Labels that `generate` compares as wholes, at most: it runs a row for each."""


def beams_for(labels: Sequence[Sequence[int]], tail: Sequence[int]) -> int:
    """How many beams compare whole labels in transformers' `generate`: one for each; 0 where none do.

    A label has to be over with its last token, which ends a beam, so that token stands nowhere else in a
    label. And the bias has to know where a prompt ends. ``labels``: tokens of each, of which none begins
    another; ``tail``: tokens that end every prompt.
    """
    last = {ids[-1] for ids in labels}
    inside = any(token in last for ids in labels for token in ids[:-1])
    longer = any(len(ids) > 1 for ids in labels)
    return len(labels) if tail and longer and not inside and len(labels) <= MOST_BEAMS else 0


def compared_sequences(labels: Sequence[Sequence[int]], tail: Sequence[int]) -> dict[tuple[int, ...], float]:
    """A ``sequence_bias`` under which beam search says the most probable whole label.

    Beam search adds it to log-probabilities. Each beginning of a label is lifted above all other text, and
    whole labels all by the same sum, so what is left between them is their log-probabilities. With a beam
    for each label, and without a length penalty, none is lost on the way. ``labels``: tokens of each, for
    which `beams_for` finds beams; ``tail``: tokens that end every prompt.
    """
    longest = max(map(len, labels))
    wanted = {(*tail, *ids[: place + 1]): FORCE for ids in labels for place in range(len(ids) - 1)}
    wanted |= {(*tail, *ids): FORCE * (longest - len(ids) + 1) for ids in labels}
    return added(wanted)


def search_whole(
    generation: GenerationConfig, beams: int, labels: Sequence[Sequence[int]], end: int | None
) -> None:
    """Make `generate` under a generation config compare whole labels: their last tokens end an answer.

    ``beams``: see `beams_for`; ``labels``: tokens of each; ``end``: of a text, which pads where the config
    names nothing: else the first of the ends does.
    """
    ends = listed(generation.eos_token_id)
    generation.num_beams, generation.length_penalty, generation.early_stopping = beams, 0.0, False
    generation.eos_token_id = [*ends, *sorted({ids[-1] for ids in labels} - {*ends})]
    if generation.pad_token_id is None:
        generation.pad_token_id = end


def searches(generation: GenerationConfig, beams: int, labels: Sequence[Sequence[int]]) -> bool:
    """Whether a generation config does what `search_whole` has made it do."""
    ends = {*listed(generation.eos_token_id)}
    enough = (generation.num_beams or 1) >= beams and generation.length_penalty == 0
    return enough and {ids[-1] for ids in labels} <= ends
