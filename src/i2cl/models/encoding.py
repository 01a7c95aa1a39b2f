"""From strings to token ids: what a user wrote, as text and never as a control token, and label words."""

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

_MARK = "\ufdd0"  # a noncharacter, which Unicode keeps for a program's own use
_BROKEN = f"{_MARK}1"  # stands inside what would be a control token
_KEPT = f"{_MARK}2"  # stands for the noncharacter itself
_BEHIND_TEXT = ("=", "a", "1", "")  # after another character, tokenizers do not add a leading space


class TooLongError(I2CLError):
    """A text exceeds the context and is not to be cut."""


class TruncationWarning(UserWarning):
    """Texts were cut to fit the model's context: a message, and how many texts where these may be added."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Encoder:
    """Encodes strings with the special tokens that the tokenizer puts in front (such as BOS).
    Special tokens that it would put behind (such as EOS) are left out, since the last token must be the one
    that predicts the next. Where a text of the user holds what the tokenizer would take for a special token,
    such as ``<|im_end|>`` or ``</s>``, it is encoded as the characters it is made of; a template's own
    special tokens are special.
    """

    tokenizer: PreTrainedTokenizerBase
    front: Ids

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Encoder":
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
        """Token ids of each prompt, special tokens in front included."""
        plain = [prompt for prompt in prompts if _MARK not in prompt]
        options = {"add_special_tokens": False, "verbose": False}
        ids = map(tuple, self.tokenizer(plain, **options)["input_ids"] if plain else ())
        return [self.front + (self._marked(one)[0] if _MARK in one else next(ids)) for one in prompts]

    def plain(self, text: str) -> Ids:
        """Token ids of a piece of text, with nothing in front."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def literal(self, text: str) -> str:
        """The same text, marked where it holds a special token, so that a prompt with it holds none.
        Its ends are marked where a special token could span the text and the template around it.
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
        """The first special token that a text spells out, or None."""
        found = self._special.search(text)
        return found[0] if found else None

    def spans(self, prompt: str) -> list[tuple[int, int]]:
        """Where in the prompt each of its tokens stands, those in front left out; of fast tokenizers."""
        if _MARK in prompt:
            return self._marked(prompt)[1]
        options: Any = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return [(left, right) for left, right in self.tokenizer(prompt, **options)["offset_mapping"]]

    def _marked(self, prompt: str) -> tuple[Ids, list[tuple[int, int]]]:
        """Tokens and their places; what is marked is text, other special tokens are special."""
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
        # Some vocabularies hold special tokens as ordinary pieces too: keep the marked places apart.
        tokens, spans, start = [], [], 0
        for piece in part.split(_BROKEN):
            more, places = self._piece(piece, _BEHIND_TEXT if start else behind)
            tokens += more
            spans += [(start + left, start + right) for left, right in places]
            start += len(piece) + len(_BROKEN)
        return tokens, spans

    def _piece(self, part: str, behind: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a piece as they are behind the first of these that no token of it merges with."""
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
        """Encode a text with no token of it special, and with the tokens' places where they are known."""
        plain: Any = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self._splitting(text, return_offsets_mapping=self.tokenizer.is_fast, **plain)

    @cached_property
    def _special_words(self) -> frozenset[str]:
        """What the tokenizer takes for special tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        words = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        return frozenset(word for word in words if word)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Finds special tokens; longer ones first."""
        longest = sorted(self._special_words, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str], str]:
        """Starts and ends of special tokens, without the whole tokens; and all tokens without their first and
        last character, one per line.
        """
        words = self._special_words
        starts = frozenset(word[:cut] for word in words for cut in range(1, len(word)))
        ends = frozenset(word[cut:] for word in words for cut in range(1, len(word)))
        return starts, ends, "\n".join(word[1:-1] for word in words)

    @cached_property
    def _behind_special(self) -> Sequence[str]:
        """What to encode text behind that follows a special token: some tokenizers add a leading space to it
        as at the start of a prompt (legacy SentencePiece), others do not.
        """
        decoder = self.tokenizer.added_tokens_decoder.values()
        word = next((str(token) for token in decoder if token.special and not token.rstrip), "")
        options: Any = {"add_special_tokens": False, "verbose": False}
        after = self.tokenizer(f"{word}a", **options)["input_ids"][1 if word else 0 :]
        return ("",) if after == list(self.plain("a")) else _BEHIND_TEXT

    @cached_property
    def _strips_left(self) -> frozenset[str]:
        """Special tokens that drop the whitespace in front of them."""
        return frozenset(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.lstrip)

    @cached_property
    def _strips_right(self) -> frozenset[str]:
        """Special tokens that drop the whitespace behind them."""
        return frozenset(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.rstrip)

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if token.special)

    @cached_property
    def _splitting(self) -> PreTrainedTokenizerBase:
        """A copy that is told so every time, since telling a tokenizer so changes it for all threads."""
        return copy.deepcopy(self.tokenizer)

    def fitted(
        self,
        build: Callable[[str], str] | Sequence[Callable[[str], str]],
        texts: Sequence[str],
        limit: int | None,
        *,
        cut: bool = True,
    ) -> list[Ids]:
        """Token ids of ``build(text)``, the text cut at its end where the whole exceeds ``limit`` tokens.
        There may be one ``build`` for each text. Template and label positions are never cut. Warns once with
        the number of texts cut. Raises I2CLError if not even an empty text leaves room, TooLongError on a
        text that exceeds it and is not to be cut.
        """
        builds = [build] * len(texts) if callable(build) else build
        ids = self([one(self.literal(text)) for one, text in zip(builds, texts, strict=True)])
        if limit is None:
            return ids
        long = [row for row, row_ids in enumerate(ids) if len(row_ids) > limit]
        if long and not cut:
            problem = f"text {long[0] + 1} takes {len(ids[long[0]])} tokens with its prompt"
            raise TooLongError(f"{problem}, and {limit} fit into the context: shorten it")
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
        sizes = range(min(over, len(text)) - 1, fits - 1, -1)  # the last of which fits
        longest = bisect_left(sizes, True, hi=len(sizes) - 1, key=lambda size: len(encode(size)) <= limit)
        return encode(sizes[longest])


def _require_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer class that does not fit its tokenizer.json, such as a Llama class on byte-level BPE.
    Source: https://github.com/huggingface/transformers/issues/45488. Raises I2CLError.
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
    """A part without its marks, and where each of its characters stood."""
    characters = re.finditer(f"{_BROKEN}|{_KEPT}|.", part, re.DOTALL)
    kept = [one for one in characters if one[0] != _BROKEN]
    return "".join(one[0][0] for one in kept), [one.start() for one in kept]


# Value in nats that stands for a token of probability 0 where words are scored; far below any other.
MIN_TOKEN_SCORE = -65504.0

# By a label's first token, its whole token sequence, its words in any order, or as the labels demand.
Scoring = Literal["auto", "first_token", "full", "words"]


class SharedFirstTokenError(I2CLError):
    """First-token scoring was requested for labels that share their first token."""


class ScoringWarning(UserWarning):
    """Labels share their first token, so whole label sequences are scored."""


@dataclass(frozen=True)
class LabelTokens:
    """The tokens of each label word as they follow a prompt."""

    ids: tuple[Ids, ...]  # token ids per label; where words are scored, one token that stands for it
    full: bool  # whether whole sequences are scored instead of first tokens
    line: str = ""  # what stands between the template's query and these tokens, and is asked with the query
    words: tuple[Ids, ...] = ()  # tokens of each label whose mean is its score; empty where a token is
    # in the place of `weights` those of a fit, in which every token may count for every label
    fitted: Float[Tensor, "read labels"] | None = field(default=None, compare=False)

    @property
    def first(self) -> Ids:
        """First token of each label."""
        return tuple(ids[0] for ids in self.ids)

    @cached_property
    def read(self) -> Ids:
        """Tokens whose log-probabilities behind the query tell the scores of labels that are not full."""
        return tuple(dict.fromkeys(token for ids in self.words for token in ids)) or self.first

    @cached_property
    def weights(self) -> Float[Tensor, "read labels"]:
        """How much of a label's score each of these tokens is where words are scored.
        Like inverse document frequency: what fewer labels have weighs more. A label's weights add up to 1;
        those that a fit found do so too, and each label has one for every token.
        """
        if self.fitted is not None:
            return self.fitted
        place = {token: row for row, token in enumerate(self.read)}
        labels = Counter(token for ids in self.words for token in ids)  # how many have it
        weights = torch.zeros(len(place), len(self.words))
        for label, ids in enumerate(self.words):
            for token in ids:
                weights[place[token], label] = math.log1p(len(self.words) / labels[token])
        return weights / weights.sum(0)

    def weighted(self, fitted: Float[Tensor, "tokens labels"]) -> "LabelTokens":
        """With the weights that a fit found. Raises I2CLError on those of more or fewer tokens or labels."""
        if fitted.shape != (sizes := (len(self.read), len(self.ids))):
            shapes = f"{tuple(fitted.shape)}, and these labels have {sizes}"
            raise I2CLError(f"word weights are of (tokens, labels) {shapes}: fit it again")
        return replace(self, fitted=fitted)

    def scores(self, wide: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows labels"]:
        """Of labels that are not full, from logits or log-probabilities behind a query."""
        return self.mean(wide[..., list(self.read)])

    def mean(self, tokens: Float[Tensor, "*rows read"]) -> Float[Tensor, "*rows labels"]:
        """Label scores from the values of the tokens in `read`."""
        if not self.words:
            return tokens
        # A token of another label may be impossible: 0 * -inf is NaN.
        return tokens.clamp(min=MIN_TOKEN_SCORE) @ self.weights.to(tokens)

    def at_first(self, wide: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Logits with each label's score in place of its first token's: what an export's head puts out."""
        if not self.words:
            return wide
        made = wide.clone()
        made[..., list(self.first)] = self.scores(wide)
        return made

    def target(self, label: int) -> Ids:
        """What calibration learns to predict: the first token, or all of them."""
        return self.ids[label] if self.full else self.ids[label][:1]

    @property
    def room(self) -> int:
        """Context tokens that scoring needs behind the query."""
        return max(map(len, self.ids)) - 1 if self.full else 0


def label_tokens(
    encoder: Encoder, template: Template, labels: Sequence[str], scoring: Scoring = "auto"
) -> LabelTokens:
    """Find the tokens of each label by encoding it in the context of a prompt.
    A newline between query and label belongs to the query where the tokenizer cuts behind it in any case:
    else it would be the first token of every label. Where a label is how another one begins, such as "not"
    and "not spam", all labels are taken with what ends them: the sum of log-probabilities of "not" alone is
    never below that of "not spam". Under ``scoring="words"`` a label's score is the mean of its tokens' own
    behind the query, whatever their order, so that all labels take one pass; labels of the same tokens get
    one of their own each (`keywords`). Raises I2CLError if the prompt's last token and a label merge, if
    two labels are the same under the chosen scoring, if one begins another and nothing can end them, if a
    label contains a special token, or if the template repeats the BOS that the tokenizer adds.
    """
    _check_special_tokens(encoder, template, labels)
    line = template.lead[: template.lead.rfind("\n") + 1]
    sequences = _behind(encoder, template, labels, line)
    if line and not all(sequences):  # this tokenizer does not cut at the line's end
        line, sequences = "", _behind(encoder, template, labels, "")
    for label, ids in zip(labels, sequences, strict=True):
        if not ids:
            cure = "put a space or a newline before {label} in the template"
            raise I2CLError(f"this tokenizer merges label {label!r} with the end of the prompt: {cure}")
    if len(set(sequences)) < len(sequences):
        raise I2CLError("two labels have the same tokens: give labels that differ")
    if scoring == "words":
        first = [(token,) for token in keywords(encoder, labels, sequences)]
        words = [tuple(dict.fromkeys(ids)) for ids in sequences]
        sets = Counter(map(frozenset, words))
        while len(sets) < len(words):  # the token of one may be another's word
            words = [ids if sets[frozenset(ids)] == 1 else one for ids, one in zip(words, first, strict=True)]
            sets = Counter(map(frozenset, words))
        return LabelTokens(tuple(first), full=False, line=line, words=tuple(words))
    shared = len({ids[0] for ids in sequences}) < len(sequences)
    if shared and scoring == "first_token":
        hint = "use scoring='full', or other label words"
        raise SharedFirstTokenError(f"labels share their first token: {hint}")
    if shared and scoring == "auto":
        message = "labels share their first token; scoring whole label sequences instead"
        warnings.warn(message, ScoringWarning, stacklevel=2)
    if begun := _begun(sequences):
        ended = _behind(encoder, template, labels, line, template.separator)
        sequences = _ended(sequences, ended, encoder, [labels[one] for one in begun])
    return LabelTokens(sequences, full=scoring == "full" or shared, line=line)


def _check_special_tokens(encoder: Encoder, template: Template, labels: Sequence[str]) -> None:
    """Refuse (I2CLError) labels that contain special tokens, and a template that begins with those that the
    tokenizer adds in front anyway.
    """
    for label in labels:
        if special := encoder.special_in(label):
            raise I2CLError(f"label {label!r} contains the special token {special!r}: rename the label")
    size = len(encoder.front)
    if size and encoder([template.query("text")])[0][size : 2 * size] == encoder.front:
        bos = encoder.tokenizer.decode(list(encoder.front))
        raise I2CLError(
            f"the template begins with {bos!r}, which this tokenizer adds by itself, so that prompts would "
            "begin with it twice: remove it from the template"
        )


def keywords(encoder: Encoder, labels: Sequence[str], sequences: Sequence[Ids]) -> Ids:
    """One token for each label, all different: of its own tokens, of its words in other spellings, or any.
    A label takes the token that fewest labels have, the earlier one of two; where that is taken, labels
    change places (augmenting paths, Kuhn 1955), so that no label goes without one that could have one. What
    is left, such as "label22" among a hundred of its kind, takes the first tokens of the vocabulary that no
    label has: the fit teaches them. Raises I2CLError if the vocabulary has fewer tokens than there are
    labels.
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
        raise I2CLError(f"the vocabulary has fewer tokens than there are labels, {len(labels)}: give fewer")
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
    encoder: Encoder, template: Template, labels: Sequence[str], line: str, end: str = ""
) -> tuple[Ids, ...]:
    """Tokens of each label, and of an end behind it, after a query that ends in ``line``.
    No tokens for a label that the tokenizer merges with what stands before it.
    """
    probe = template.query("text") + line
    prompt = encoder([probe])[0]
    rest = [template.continuation(label).removeprefix(line) for label in labels]
    whole = encoder([probe + label + end for label in rest])
    return tuple(ids[len(prompt) :] if ids[: len(prompt)] == prompt else () for ids in whole)


def _begun(sequences: Sequence[Ids]) -> tuple[int, int] | None:
    """Two labels the first of which begins the second, if there are any."""
    places = sorted(range(len(sequences)), key=lambda one: sequences[one])
    for first, second in pairwise(places):  # in this order nothing stands between a prefix and what it begins
        if sequences[second][: len(sequences[first])] == sequences[first]:
            return first, second
    return None


def _ended(
    sequences: Sequence[Ids], ended: Sequence[Ids], encoder: Encoder, begun: Sequence[str]
) -> tuple[Ids, ...]:
    """Labels with the separator's first token behind them, or with EOS where that merges with one."""
    with_ends = tuple(long[: len(short) + 1] for short, long in zip(sequences, ended, strict=True))
    apart = all(whole[:-1] == short for short, whole in zip(sequences, with_ends, strict=True))
    if apart and _begun(with_ends) is None:
        return with_ends
    end = encoder.tokenizer.eos_token_id
    if end is None:
        raise I2CLError(
            f"label {begun[0]!r} is how label {begun[1]!r} begins, and this tokenizer has no token that ends "
            "them (EOS): use other label words"
        )
    return tuple((*ids, int(end)) for ids in sequences)
