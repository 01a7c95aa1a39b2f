"""Encode prompts and label words as token ids; text from users never becomes a special token."""

import copy
import math
import re
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from i2cl.errors import I2CLError, first_line
from i2cl.models.batching import Ids
from i2cl.tasks import Template

_MARK = "\ufdd0"  # a noncharacter, reserved by Unicode for internal use
_BROKEN = f"{_MARK}1"  # inserted into text that spells a special token
_KEPT = f"{_MARK}2"  # replaces the noncharacter itself
_BEHIND_TEXT = ("=", "a", "1", "")  # after another character, tokenizers do not add a leading space


class TooLongError(I2CLError):
    """Raised when a text exceeds the context and may not be truncated."""


class TruncationWarning(UserWarning):
    """Texts were truncated to fit the context. Arguments: the message and, optionally, their number."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts with the special tokens that the tokenizer adds in front, such as BOS.

    Special tokens at the end, such as EOS, are left out: the last token must be the one that predicts the
    next. Text from users that spells a special token, such as ``<|im_end|>`` or ``</s>``, is encoded as plain
    characters. Special tokens of a template stay special.
    """

    tokenizer: PreTrainedTokenizerBase
    front: Ids

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "PromptEncoder":
        """Find the special tokens that the tokenizer adds in front by encoding a probe with and without them.

        Raises:
            I2CLError: if the tokenizer cannot encode text, or loses the spaces between words.
        """
        _require_spaces(tokenizer)
        bare = tuple(tokenizer("a", add_special_tokens=False)["input_ids"])
        full = tuple(tokenizer("a")["input_ids"])
        starts = (start for start in range(len(full)) if full[start : start + len(bare)] == bare)
        return cls(tokenizer, full[: next(starts, 0)])

    def __call__(self, prompts: Sequence[str]) -> list[Ids]:
        """Return the token ids of each prompt, including the special tokens in front."""
        plain = [prompt for prompt in prompts if _MARK not in prompt]
        options = {"add_special_tokens": False, "verbose": False}
        ids = map(tuple, self.tokenizer(plain, **options)["input_ids"] if plain else ())
        return [self.front + (self._marked(one)[0] if _MARK in one else next(ids)) for one in prompts]

    def plain(self, text: str) -> Ids:
        """Return the token ids of a text without special tokens in front."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def literal(self, text: str) -> str:
        """Mark the special tokens that a text spells, so that they are encoded as plain characters.

        The ends of the text are marked where a special token could span the text and the template around it.
        """
        starts, ends, inside = self._parts
        sizes = range(1, min(len(text), max(map(len, starts), default=0)) + 1)
        first = any(text[:size] in ends for size in sizes) or text in inside
        last = any(text[-size:] in starts for size in sizes) or text in inside
        if not (first or last or _MARK in text or self._special.search(text)):
            return text
        kept = text.replace(_MARK, _KEPT)
        broken = self._special.sub(lambda match: match[0][0] + _BROKEN + match[0][1:], kept)
        return _BROKEN * first + broken + _BROKEN * last

    def special_in(self, text: str) -> str | None:
        """Return the first special token that a text spells, or None."""
        found = self._special.search(text)
        return found[0] if found else None

    def spans(self, prompt: str) -> list[tuple[int, int]]:
        """Return the span of each token in the prompt, without the ones in front. Fast tokenizers only."""
        if _MARK in prompt:
            return self._marked(prompt)[1]
        options: Any = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return [(left, right) for left, right in self.tokenizer(prompt, **options)["offset_mapping"]]

    def _marked(self, prompt: str) -> tuple[Ids, list[tuple[int, int]]]:
        """Encode a marked prompt; return tokens and their spans."""
        ids, spans = list[int](), list[tuple[int, int]]()
        vocabulary = self.tokenizer.get_vocab()
        parts = re.split(f"({self._special.pattern})", prompt)  # text at even places, special tokens at odd
        for place, (start, part) in enumerate(
            zip(accumulate(map(len, parts), initial=0), parts, strict=False)
        ):
            if place % 2:
                tokens, places, shift = [vocabulary[part]], [(0, len(part))], 0
            else:
                text = part.lstrip() if place and parts[place - 1] in self._strips_right else part
                shift = len(part) - len(text)
                if place + 1 < len(parts) and parts[place + 1] in self._strips_left:
                    text = text.rstrip()
                if not text:
                    continue
                tokens, places = self._text(text, ("",) if place == 0 else self._behind_special)
            ids += tokens
            spans += [(start + shift + left, start + shift + right) for left, right in places]
        return tuple(ids), spans

    def _text(self, part: str, behind: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        tokens, spans = self._piece(part, behind)
        if self.special.isdisjoint(tokens):
            return tokens, spans
        # Some vocabularies contain special tokens as ordinary pieces too: encode the parts separately.
        tokens, spans, start = [], [], 0
        for piece in part.split(_BROKEN):
            more, places = self._piece(piece, _BEHIND_TEXT if start else behind)
            tokens += more
            spans += [(start + left, start + right) for left, right in places]
            start += len(piece) + len(_BROKEN)
        return tokens, spans

    def _piece(self, part: str, behind: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a piece after the first of some prefixes that stays separate from the piece's tokens."""
        text, places = _unmarked(part)
        places.append(len(part))
        for before in behind:
            front, whole = self._split(before), self._split(before + text)
            size = len(front["input_ids"])
            if whole["input_ids"][:size] == front["input_ids"]:
                break
        tokens, shift = list(whole["input_ids"][size:]), len(before)
        offsets = whole.get("offset_mapping", [(shift, shift)] * (size + len(tokens)))[size:]
        spans = [[places[max(0, end - shift)] for end in span] for span in offsets]
        return tokens, [(left, right) for left, right in spans]

    def _split(self, text: str) -> Any:
        """Encode a text without special tokens, with the spans of its tokens if the tokenizer is fast."""
        plain: Any = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self._splitting(text, return_offsets_mapping=self.tokenizer.is_fast, **plain)

    @cached_property
    def _special_words(self) -> frozenset[str]:
        """Strings that the tokenizer encodes as special tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        words = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        return frozenset(word for word in words if word)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Pattern of special tokens, longest first."""
        longest = sorted(self._special_words, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str], str]:
        """Proper prefixes and suffixes of special tokens, and the inner parts of all, one per line."""
        words = self._special_words
        starts = frozenset(word[:cut] for word in words for cut in range(1, len(word)))
        ends = frozenset(word[cut:] for word in words for cut in range(1, len(word)))
        return starts, ends, "\n".join(word[1:-1] for word in words)

    @cached_property
    def _behind_special(self) -> Sequence[str]:
        """Prefixes to encode text after a special token with: legacy SentencePiece adds a leading space."""
        decoder = self.tokenizer.added_tokens_decoder.values()
        word = next((str(token) for token in decoder if token.special and not token.rstrip), "")
        options: Any = {"add_special_tokens": False, "verbose": False}
        after = self.tokenizer(f"{word}a", **options)["input_ids"][1 if word else 0 :]
        return ("",) if after == list(self.plain("a")) else _BEHIND_TEXT

    @cached_property
    def _strips_left(self) -> frozenset[str]:
        """Special tokens that strip the whitespace on their left."""
        return frozenset(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.lstrip)

    @cached_property
    def _strips_right(self) -> frozenset[str]:
        """Special tokens that strip the whitespace on their right."""
        return frozenset(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.rstrip)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if token.special)

    @cached_property
    def _splitting(self) -> PreTrainedTokenizerBase:
        """A copy of the tokenizer: ``split_special_tokens`` changes its state for all threads."""
        return copy.deepcopy(self.tokenizer)

    def encode(
        self,
        build: Callable[[str], str] | Sequence[Callable[[str], str]],
        texts: Sequence[str],
        limit: int | None,
        *,
        cut: bool = True,
    ) -> list[Ids]:
        """Encode ``build(text)`` of each text, truncating texts at their end to fit into ``limit`` tokens.

        Args:
            build: makes the prompt of a text; one for all texts, or one for each.
            texts: what to encode. Only the text is truncated, never the template.
            limit: maximum number of tokens, or None.
            cut: truncate, with one warning, instead of raising an error.

        Raises:
            I2CLError: if the prompt exceeds the limit even with an empty text.
            TooLongError: if a text exceeds the limit and ``cut`` is False.
        """
        builds = [build] * len(texts) if callable(build) else build
        ids = self([one(self.literal(text)) for one, text in zip(builds, texts, strict=True)])
        if limit is None:
            return ids
        long = [row for row, row_ids in enumerate(ids) if len(row_ids) > limit]
        if long and not cut:
            problem = f"text {long[0] + 1} takes {len(ids[long[0]])} tokens with its prompt"
            raise TooLongError(f"{problem}, and {limit} fit into the context", "shorten it")
        for row in long:
            ids[row] = self._cut(builds[row], texts[row], limit)
        if long:
            message = f"{len(long)} of {len(texts)} texts were cut to fit {limit} tokens of context"
            warnings.warn(TruncationWarning(message, len(long)), stacklevel=2)
        return ids

    def _cut(self, build: Callable[[str], str], text: str, limit: int) -> Ids:
        def encode(characters: int) -> Ids:
            return self([build(self.literal(text[:characters]))])[0]

        best = encode(0)
        if len(best) > limit:
            raise I2CLError(
                f"the prompt without its text needs {len(best)} tokens, but only {limit} fit into the "
                "context: use fewer or shorter demonstrations, or a model with a longer context"
            )
        fits, over = 0, 4 * limit
        while over < len(text) and len(encode(over)) <= limit:
            fits, over = over, 2 * over
        sizes = range(min(over, len(text)) - 1, fits - 1, -1)  # the last one fits
        longest = bisect_left(sizes, True, hi=len(sizes) - 1, key=lambda size: len(encode(size)) <= limit)
        return encode(sizes[longest])


def _require_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise I2CLError if a tokenizer class does not fit its tokenizer.json.

    An example is a Llama class with byte-level BPE (https://github.com/huggingface/transformers/issues/45488).
    """
    hint = "compare tokenizer_class in tokenizer_config.json with tokenizer.json, or update transformers"
    try:
        ids = tokenizer("one two", add_special_tokens=False)["input_ids"]
    except Exception as error:  # tokenizers raises bare exceptions
        raise I2CLError(f"the tokenizer cannot encode text ({first_line(error)}): {hint}") from error
    decoded = str(tokenizer.decode(ids))
    if not re.search(r"\S\s+\S", decoded):
        raise I2CLError(f"the tokenizer loses spaces: 'one two' is decoded as {decoded!r}: {hint}")
    if set(ids) == {tokenizer.unk_token_id}:
        raise I2CLError(f"the tokenizer encodes every word as {tokenizer.unk_token!r}: {hint}")


def _unmarked(part: str) -> tuple[str, list[int]]:
    """Remove the marks of a part; return the text and the original position of each character."""
    characters = re.finditer(f"{_BROKEN}|{_KEPT}|.", part, re.DOTALL)
    kept = [one for one in characters if one[0] != _BROKEN]
    return "".join(one[0][0] for one in kept), [one.start() for one in kept]


# Log-probability, in nats, that replaces -inf in word-level scoring; far below any other.
MIN_TOKEN_SCORE = -65504.0

# How labels are scored: by the first token, the full token sequence, or the words without their order.
# "auto": by the first token if it differs between labels; otherwise fits use words, and other methods full
# sequences.
Scoring = Literal["auto", "first_token", "sequence", "words"]


# What the labels of a multi-label task are compared with, in order of preference.
REFERENCE_WORDS = ("none", "other", "nothing", "something", "-", ".")


class SharedFirstTokenError(I2CLError):
    """Raised if first-token scoring is requested for labels that share their first token."""


class ScoringWarning(UserWarning):
    """Labels share their first token, so full label sequences are scored."""


@dataclass(frozen=True)
class LabelTokens:
    """The tokens of each label as they follow a prompt.

    Attributes:
        sequences: all tokens of each label.
        full: whether full sequences are scored.
        line: text between the template's query and the label, which becomes part of the query.
        words: for word-level scoring, the tokens of each label that count, each once; otherwise empty.
        keywords: for word-level scoring, a different token for each label (`choose_keywords`); otherwise
            empty.
        fitted_weights: replace the default `word_weights`. Every token may count for every label.
        reference: in a multi-label task, the token that every label is compared with: label scores are
            log-odds of the label's words against it. None otherwise.
    """

    sequences: tuple[Ids, ...]
    full: bool
    line: str = ""
    words: tuple[Ids, ...] = ()
    keywords: Ids = ()
    fitted_weights: Float[Tensor, "tokens labels"] | None = field(default=None, compare=False)
    reference: int | None = None

    @property
    def representatives(self) -> Ids:
        """One token per label where one is needed, such as in exports: the first token or the keyword."""
        return self.keywords or tuple(ids[0] for ids in self.sequences)

    @cached_property
    def tokens(self) -> Ids:
        """Tokens whose log-probabilities after the query yield the label scores, unless `full`."""
        tokens = tuple(dict.fromkeys(token for ids in self.words for token in ids)) or self.representatives
        return tokens if self.reference is None else (*tokens, self.reference)

    @cached_property
    def word_weights(self) -> Float[Tensor, "tokens labels"]:
        """Weight of each token in each label's score, for word-level scoring.

        By default by inverse document frequency: tokens of fewer labels weigh more. The weights of a label
        sum to 1; with a reference, whose weight is -1, to 0.
        """
        if self.fitted_weights is not None:
            return self.fitted_weights
        place = {token: row for row, token in enumerate(self.tokens)}
        labels = Counter(token for ids in self.words for token in ids)
        weights = torch.zeros(len(place), len(self.words))
        for label, ids in enumerate(self.words):
            for token in ids:
                weights[place[token], label] = math.log1p(len(self.words) / labels[token])
        weights = weights / weights.sum(0)
        if self.reference is not None:
            weights[-1] = -1.0
        return weights

    def with_word_weights(self, fitted: Float[Tensor, "tokens labels"]) -> "LabelTokens":
        """Return a copy with fitted word weights. Raises I2CLError if their shape does not fit."""
        if fitted.shape != (sizes := (len(self.tokens), len(self.sequences))):
            raise I2CLError(
                f"word weights have (tokens, labels) {tuple(fitted.shape)}, but these labels need {sizes}: "
                "fit it again"
            )
        return replace(self, fitted_weights=fitted)

    def scores(self, wide: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows labels"]:
        """Compute label scores from logits or log-probabilities after a query, unless `full`."""
        return self.mean(wide[..., list(self.tokens)])

    def mean(self, tokens: Float[Tensor, "*rows tokens"]) -> Float[Tensor, "*rows labels"]:
        """Compute label scores from the values of the `tokens`."""
        if not self.words:
            return tokens
        # A token of another label may have probability 0, and 0 * -inf is NaN.
        return tokens.clamp(min=MIN_TOKEN_SCORE) @ self.word_weights.to(tokens)

    def at_representatives(self, wide: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Return logits with each label's score at its representative, as the head of an export does."""
        if not self.words:
            return wide
        made = wide.clone()
        made[..., list(self.representatives)] = self.scores(wide)
        return made

    def target(self, label: int) -> Ids:
        """Return the target of calibration over the vocabulary: the representative, or the full sequence."""
        return self.sequences[label] if self.full else (self.representatives[label],)

    @property
    def room(self) -> int:
        """Number of context tokens that scoring needs after the query."""
        return max(map(len, self.sequences)) - 1 if self.full else 0


def label_tokens(
    encoder: PromptEncoder,
    template: Template,
    labels: Sequence[str],
    scoring: Scoring = "auto",
    *,
    multi_label: bool = False,
) -> LabelTokens:
    """Find the tokens of each label by encoding it after a prompt.

    A newline between query and label becomes part of the query if the tokenizer splits after it; otherwise it
    would be the first token of every label. With full sequences, if one label is a prefix of another, such as
    "not" and "not spam", all labels include an end token: without it "not spam" could never be more probable
    than "not". With ``scoring="words"`` a label's score is the weighted mean of its tokens' log-probabilities
    at the one position after the query, so one pass scores all labels. Labels with the same set of tokens,
    such as "card lost" and "lost card", are scored by one token each (`choose_keywords`), whose meaning a fit
    learns.

    With ``multi_label``, labels are scored by their words against a token of the first of `REFERENCE_WORDS`
    that has one which is in no label.

    Raises:
        I2CLError: if the tokenizer merges the prompt's last token with a label, two labels have the same
            tokens, no token can end a label that is a prefix of another, a label contains a special token,
            or the template repeats the BOS token; with ``multi_label``, for another scoring than by words.
        SharedFirstTokenError: if labels share their first token and ``scoring`` is ``"first_token"``.
    """
    if multi_label:
        scoring = _require_words(scoring)
    _check_special_tokens(encoder, template, labels)
    line = template.lead[: template.lead.rfind("\n") + 1]
    sequences = _behind(encoder, template, labels, line)
    if line and not all(sequences):  # this tokenizer does not split at the newline
        line, sequences = "", _behind(encoder, template, labels, "")
    for label, ids in zip(labels, sequences, strict=True):
        if not ids:
            hint = "put a space or a newline before {label} in the template"
            raise I2CLError(f"this tokenizer merges label {label!r} with the end of the prompt: {hint}")
    if len(set(sequences)) < len(sequences):
        raise I2CLError("two labels have the same tokens: give labels that differ")
    if scoring == "words":
        made = replace(_word_tokens(encoder, labels, sequences), line=line)
        return replace(made, reference=_reference(encoder, template, made)) if multi_label else made
    shared = len({ids[0] for ids in sequences}) < len(sequences)
    if shared and scoring == "first_token":
        raise SharedFirstTokenError(
            "labels share their first token: use scoring='words' or scoring='sequence', or other label words"
        )
    if shared and scoring == "auto":
        message = "labels share their first token: full label sequences are scored, which is slower"
        warnings.warn(message, ScoringWarning, stacklevel=2)
    if begun := _begun(sequences):
        ended = _behind(encoder, template, labels, line, template.separator)
        sequences = _ended(sequences, ended, encoder, [labels[one] for one in begun])
    return LabelTokens(sequences, full=scoring == "sequence" or shared, line=line)


def _require_words(scoring: Scoring) -> Scoring:
    """Return the scoring of multi-label tasks. Raises I2CLError if another one is requested."""
    if scoring not in {"auto", "words"}:
        raise I2CLError(f"scoring={scoring!r} is not for multi-label tasks: use scoring='words'")
    return "words"


def _word_tokens(encoder: PromptEncoder, labels: Sequence[str], sequences: Sequence[Ids]) -> LabelTokens:
    chosen = choose_keywords(encoder, labels, sequences)
    words = [tuple(dict.fromkeys(ids)) for ids in sequences]
    sets = Counter(map(frozenset, words))
    while len(sets) < len(words):  # again, since the keyword may be another label's word
        words = [
            ids if sets[frozenset(ids)] == 1 else (token,) for ids, token in zip(words, chosen, strict=True)
        ]
        sets = Counter(map(frozenset, words))
    return LabelTokens(tuple(sequences), full=False, words=tuple(words), keywords=chosen)


def _reference(encoder: PromptEncoder, template: Template, labels: LabelTokens) -> int:
    """Return the token that the labels of a multi-label task are compared with."""
    for ids in _behind(encoder, template, REFERENCE_WORDS, labels.line):
        if unshared := [token for token in ids if token not in labels.tokens]:
            return unshared[0]
    words = ", ".join(REFERENCE_WORDS)
    raise I2CLError(f"the labels share tokens with all of {words}, but one is needed: rename a label")


def _check_special_tokens(encoder: PromptEncoder, template: Template, labels: Sequence[str]) -> None:
    """Raise I2CLError if a label contains a special token, or the template repeats the BOS token."""
    for label in labels:
        if special := encoder.special_in(label):
            raise I2CLError(f"label {label!r} contains the special token {special!r}: rename the label")
    size = len(encoder.front)
    if size and encoder([template.query("text")])[0][size : 2 * size] == encoder.front:
        bos = encoder.tokenizer.decode(list(encoder.front))
        raise I2CLError(
            f"the template starts with {bos!r}, which this tokenizer adds too: remove it from the template"
        )


def choose_keywords(encoder: PromptEncoder, labels: Sequence[str], sequences: Sequence[Ids]) -> Ids:
    """Choose a different token for each label.

    Candidates are the label's tokens, rarest first, then its words in other spellings. If a token is taken,
    labels are reassigned along augmenting paths (Kuhn 1955), so every label that can have one of its
    candidates gets one. The others, such as "label22" among a hundred like it, get unused tokens of the
    vocabulary, whose meaning a fit learns. Raises I2CLError if the vocabulary has too few tokens.
    """
    common = Counter(token for ids in sequences for token in set(ids))
    choices = []
    for label, ids in zip(labels, sequences, strict=True):
        rarest = sorted(dict.fromkeys(ids), key=lambda token: common[token])
        words = [f" {spelt(word)}" for spelt in (str.title, str.upper, str.lower) for word in label.split()]
        spare = [token for word in words for token in encoder.plain(word)[:1] if token not in common]
        choices.append([*rarest, *dict.fromkeys(spare)])
    owner: dict[int, int] = {}
    left = [label for label in range(len(labels)) if not _assign_token(label, choices, owner)]
    plain = sorted(set(encoder.tokenizer.get_vocab().values()) - set(common) - set(owner) - encoder.special)
    if len(plain) < len(left):
        raise I2CLError(f"the vocabulary has fewer tokens than there are labels ({len(labels)}): use fewer")
    chosen = {place: token for token, place in owner.items()} | dict(zip(left, plain, strict=False))
    return tuple(chosen[place] for place in range(len(labels)))


def _assign_token(label: int, choices: Sequence[Sequence[int]], owner: dict[int, int]) -> bool:
    """Give a label one of its tokens, if need be by moving other labels to another one of theirs.

    Depth-first search for an augmenting path (Kuhn 1955) with an explicit stack: a path may be as long as
    there are labels.

    Args:
        label: the label without a token.
        choices: the tokens that each label may have, best first.
        owner: the label that each token is assigned to; updated.

    Returns:
        Whether the label has a token now.
    """
    tried: set[int] = set()
    path: list[tuple[int, Iterator[int]]] = [(label, iter(choices[label]))]
    tokens: list[int] = []  # that each label of the path would take
    while path:
        token = next((token for token in path[-1][1] if token not in tried), None)
        if token is None:
            path.pop()
            del tokens[-1:]
            continue
        tried.add(token)
        tokens.append(token)
        if token not in owner:
            owner.update((token, taker) for (taker, _), token in zip(path, tokens, strict=True))
            return True
        path.append((owner[token], iter(choices[owner[token]])))
    return False


def _behind(
    encoder: PromptEncoder, template: Template, labels: Sequence[str], line: str, end: str = ""
) -> tuple[Ids, ...]:
    """Return the tokens of each label, followed by ``end``, after a query that ends in ``line``.

    A label that the tokenizer merges with the text before it has no tokens.
    """
    probe = template.query("text") + line
    prompt = encoder([probe])[0]
    rest = [template.continuation(label).removeprefix(line) for label in labels]
    whole = encoder([probe + label + end for label in rest])
    return tuple(ids[len(prompt) :] if ids[: len(prompt)] == prompt else () for ids in whole)


def _begun(sequences: Sequence[Ids]) -> tuple[int, int] | None:
    """Return the indices of two labels of which the first is a prefix of the second, or None."""
    places = sorted(range(len(sequences)), key=lambda one: sequences[one])
    for first, second in pairwise(places):  # in sorted order a prefix directly precedes a label it starts
        if sequences[second][: len(sequences[first])] == sequences[first]:
            return first, second
    return None


def _ended(
    sequences: Sequence[Ids], ended: Sequence[Ids], encoder: PromptEncoder, begun: Sequence[str]
) -> tuple[Ids, ...]:
    """Append the separator's first token to each label, or EOS if the separator merges with a label."""
    with_ends = tuple(long[: len(short) + 1] for short, long in zip(sequences, ended, strict=True))
    apart = all(whole[:-1] == short for short, whole in zip(sequences, with_ends, strict=True))
    if apart and _begun(with_ends) is None:
        return with_ends
    end = encoder.tokenizer.eos_token_id
    if end is None:
        raise I2CLError(
            f"label {begun[0]!r} is a prefix of label {begun[1]!r}, and this tokenizer has no EOS token to "
            "tell them apart: use other label words"
        )
    return tuple((*ids, int(end)) for ids in sequences)
