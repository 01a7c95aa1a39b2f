"""Which label an answer says, and what makes a program say one.

Sources: ``sequence_bias`` of
https://huggingface.co/docs/transformers/main_classes/text_generation, ``logit_bias`` of
https://platform.openai.com/docs/api-reference/completions, and
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

FORCE = 100.0
"""Added to the logits of a label's tokens: above any difference of logits, and the most that servers take."""

ENOUGH = 0.95
"""Share of the prompts that greedy decoding has to answer with the expected label."""

SHARED_END = 4
"""How many of the tokens that end every prompt a bias asks for, at most."""


def enough(right: Sequence[bool]) -> bool:
    """Whether as many answers are right as have to be."""
    return sum(right) >= ENOUGH * len(right)


def label_of(tokens: Sequence[int], targets: Sequence[Sequence[int]]) -> int | None:
    """The label whose tokens begin an answer, as those of one at most do; None where none do."""
    each = enumerate(targets)
    return next((at for at, target in each if list(tokens[: len(target)]) == list(target)), None)


def label_in(text: str, words: Sequence[str], *, whole: bool) -> int | None:
    """The label that begins an answer's text, blanks in front aside; None where none does.

    ``whole``: the text may go on behind a word; False where it is one token, which has to be the word.
    """
    told = text.lstrip()
    if not whole:
        return next((place for place, word in enumerate(words) if word.strip() == told.strip()), None)
    fitting = [
        (len(word.lstrip()), place)
        for place, word in enumerate(words)
        if told.startswith(word.lstrip()) and not _goes_on(word, told[len(word.lstrip()) :])
    ]
    return max(fitting)[1] if fitting else None


def _goes_on(word: str, rest: str) -> bool:
    return word[-1:].isalnum() and rest[:1].isalnum()


def shared_end(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The last tokens that all prompts share, `SHARED_END` at most."""
    end: list[int] = []
    for column in zip(*(list(prompt)[: -SHARED_END - 1 : -1] for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        end.insert(0, column[0])
    return tuple(end)


def forced_sequences(
    labels: Sequence[Sequence[int]], prior: Sequence[float], tail: Sequence[int], end: int | None
) -> dict[tuple[int, ...], float]:
    """A ``sequence_bias`` under which transformers' `generate` says a label, and then stops.

    Every beginning of a label is lifted behind the prompt's last tokens, a longer one more than a shorter
    one: so a label is said to its end where a token of it also begins another label. Of labels that share
    a beginning the model's own logits choose.

    ``labels``: tokens of each, of which none begins another; ``prior``: added to each label's first token;
    ``tail``: tokens that end every prompt; ``end``: of a text; None where the model has none.
    """
    wanted: dict[tuple[int, ...], float] = {}
    for place, ids in enumerate(labels):
        ended = (*ids, end) if end is not None and ids[-1] != end else tuple(ids)
        for length in range(1, len(ended) + 1):
            more = prior[place] if prior and length == 1 else 0.0
            wanted[(*tail, *ended[:length])] = FORCE * length + more
    return added(wanted)


def added(wanted: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """What each sequence adds, so that with those which end it the last token has what is wanted."""
    found: dict[tuple[int, ...], float] = {}
    for sequence in sorted(wanted, key=len):
        shorter = (found.get(sequence[start:], 0.0) for start in range(1, len(sequence)))
        found[sequence] = wanted[sequence] - sum(shorter)
    return found


def forced_tokens(labels: Sequence[Sequence[int]], prior: Sequence[float]) -> dict[int, float]:
    """A ``logit_bias`` that lifts every token of a label, by `FORCE` at most.

    By itself it makes a program say one of some labels of one token each; a grammar says how longer ones
    go on.
    """
    found = {token: FORCE for ids in labels for token in ids}
    if prior:
        found |= {ids[0]: FORCE + more - max(prior) for ids, more in zip(labels, prior, strict=True)}
    return found


def grammar_of(words: Sequence[str]) -> str:
    """A grammar of llama.cpp (GBNF) that takes one of these words and nothing else."""
    return "root ::= " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)


def biases_of(generation: GenerationConfig) -> dict[tuple[int, ...], float]:
    """What a generation config adds to the logits of some tokens, in either of the forms that it takes."""
    told: Any = generation.sequence_bias or {}
    pairs = told.items() if isinstance(told, dict) else told
    return {tuple(tokens): float(value) for tokens, value in pairs}
