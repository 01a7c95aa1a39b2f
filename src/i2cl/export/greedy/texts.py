"""Texts that golden values are made of: no task knows them, and any task can be asked about them."""

from typing import Any

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
    generation = decoder.model.generation_config
    told = None if generation is None else generation.eos_token_id
    found = listed(decoder.tokenizer.eos_token_id if told is None else told)
    return found[0] if found else None


def listed(tokens: Any) -> list[int]:
    """Tokens that end a text, as transformers names one, several or none."""
    if tokens is None:
        return []
    return [int(token) for token in tokens] if isinstance(tokens, list) else [int(tokens)]


def text_behind(decoder: Decoder, query: Ids, ids: Ids) -> str:
    """Tokens as the text that they are behind others: by themselves some tokenizers drop a space in front."""
    before, whole = (decoder.tokenizer.decode(list(one)) for one in (query, query + ids))
    return str(whole).removeprefix(str(before))
