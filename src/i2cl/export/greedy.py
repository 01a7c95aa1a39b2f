"""What greedy decoding of an export says, and what makes a program say a label where it says none.

First come the texts that golden values are made of: no task knows them, and any task can be asked about them.

Sources: ``sequence_bias``, ``num_beams`` and ``length_penalty`` of
https://huggingface.co/docs/transformers/main_classes/text_generation, ``logit_bias`` of
https://platform.openai.com/docs/api-reference/completions, and
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import GenerationConfig

from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder

TEXTS = (
    "the letter arrived on a quiet morning",
    "nobody had expected the river to rise so early in the year",
    "a small shop at the corner sells bread, paper and string",
    "it was not clear to anyone why the train had stopped",
    "she opened the window and listened for a while",
    "two engineers counted the lamps along the road",
    "Where do the herons of this lake spend the winter?",
    "How many steps are there from the harbour up to the lighthouse, and who has counted them?",
    "Who wrote the first timetable?",
    "My order came a week late, the box was torn, and nobody answers my letters. I want my money back.",
    "The heating in our flat has been broken since Monday!",
    "I was charged twice for one ticket and cannot find a form to say so",
    (
        "The council voted on Tuesday to close the old bridge for repairs; buses will run along the northern "
        "bank until the end of May, and cyclists are asked to take the ferry."
    ),
    "Grain prices fell for the third day after rain in the east",
    "The home side won by a single point in front of nine thousand people.",
    "A slow, warm film that trusts its actors. I left the cinema smiling",
    "The second half of the book repeats the first, and its hero never says a word worth keeping...",
    "Good soup, friendly waiters, terrible chairs",
    "Please send the minutes of the last meeting to everyone on the list (see page 4)",
    'He said "later" and went back to sleep.',
)
"""Made-up texts of several kinds and lengths: sentences, questions, complaints, news, reviews, notes."""

ENDS = ("a", "a.", "a\n", "a ", "1", 'a"', "\u00e9")
"""Texts that end in different ways, which tell what of a prompt's tokens no text changes."""


def end_of(decoder: Decoder) -> int | None:
    """The token that generation ends with, the first where there are more."""
    stop = getattr(decoder.model.generation_config, "eos_token_id", None)
    stops = listed(decoder.tokenizer.eos_token_id if stop is None else stop)
    return stops[0] if stops else None


def listed(tokens: Any) -> list[int]:
    """Tokens that end a text, as transformers names one, several or none."""
    if tokens is None:
        return []
    return [int(token) for token in tokens] if isinstance(tokens, list) else [int(tokens)]


def text_behind(decoder: Decoder, query: Ids, ids: Ids) -> str:
    """Tokens as the text that they are behind others: by themselves some tokenizers drop a space in front."""
    before, whole = (decoder.tokenizer.decode(list(one)) for one in (query, query + ids))
    return str(whole).removeprefix(str(before))


# Added to the logits of a label's tokens: above any difference of logits, and the most that servers take.
FORCE = 100.0
ENOUGH = 0.95  # share of the prompts that greedy decoding has to answer with the expected label
SHARED_END = 4  # how many of the tokens that end every prompt a bias asks for, at most
MOST_BEAMS = 64  # labels that `generate` compares as wholes, at most: it runs a row for each


def enough(right: Sequence[bool]) -> bool:
    """Whether as many answers are right as have to be."""
    return sum(right) >= ENOUGH * len(right)


def label_in(text: str, words: Sequence[str], *, whole: bool) -> int | None:
    """The label that begins an answer's text, blanks in front aside; None where none does.
    ``whole``: the text may go on behind a word; False where it is one token, which has to be the word.
    """
    answer, bare = text.lstrip(), [word.lstrip() for word in words]
    if not whole:
        return next((place for place, word in enumerate(bare) if word.rstrip() == answer.rstrip()), None)
    fitting = [
        (len(word), place)
        for place, word in enumerate(bare)
        if answer.startswith(word) and not (word[-1:].isalnum() and answer[len(word) :][:1].isalnum())
    ]
    return max(fitting)[1] if fitting else None


def shared_end(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The last tokens that all prompts share, `SHARED_END` at most."""
    columns = zip(*(prompt[: -SHARED_END - 1 : -1] for prompt in prompts), strict=False)
    shared = takewhile(lambda column: len(set(column)) == 1, columns)
    return tuple(column[0] for column in shared)[::-1]


def forced_sequences(
    labels: Sequence[Sequence[int]], prior: Sequence[float], tail: Sequence[int], end: int | None
) -> dict[tuple[int, ...], float]:
    """A ``sequence_bias`` under which transformers' `generate` says a label, and then stops.
    Every beginning of a label is lifted behind the prompt's last tokens, a longer one more than a shorter
    one: so a label is said to its end where a token of it also begins another label. Of labels that share a
    beginning the model's own logits choose. ``labels``: tokens of each, of which none begins another;
    ``prior``: added to each label's first token; ``tail``: tokens that end every prompt; ``end``: of a text;
    None where the model has none.
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
    sums: dict[tuple[int, ...], float] = {}
    for sequence in sorted(wanted, key=len):
        shorter = (sums.get(sequence[start:], 0.0) for start in range(1, len(sequence)))
        sums[sequence] = wanted[sequence] - sum(shorter)
    return sums


def forced_tokens(labels: Sequence[Sequence[int]], prior: Sequence[float]) -> dict[int, float]:
    """A ``logit_bias`` that lifts every token of a label, by `FORCE` at most.
    By itself it makes a program say one of some labels of one token each; a grammar says how longer ones
    go on.
    """
    bias = {token: FORCE for ids in labels for token in ids}
    if prior:
        bias |= {ids[0]: FORCE + more - max(prior) for ids, more in zip(labels, prior, strict=True)}
    return bias


def grammar_of(words: Sequence[str]) -> str:
    """A grammar of llama.cpp (GBNF) that takes one of these words and nothing else."""
    return "root ::= " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)


def biases_of(generation: GenerationConfig) -> dict[tuple[int, ...], float]:
    """What a generation config adds to the logits of some tokens, in either of the forms that it takes."""
    biases: Any = generation.sequence_bias or {}
    pairs = biases.items() if isinstance(biases, dict) else biases
    return {tuple(tokens): float(value) for tokens, value in pairs}


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
