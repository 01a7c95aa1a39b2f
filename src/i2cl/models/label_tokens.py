"""Find the tokens of label words after a prompt, and how a label's score is read from them."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.models.batching import Ids
from i2cl.models.encoding import PromptEncoder
from i2cl.tasks import Template

# Word-level scoring clips log-probabilities (nats) here: -inf times a weight of 0 would be NaN.
MIN_TOKEN_SCORE = -65504.0

# How labels are scored: by the first token, the full token sequence, or the words without their order.
# "auto": by the first token if it differs between labels; otherwise fits use words, and other methods full
# sequences.
Scoring = Literal["auto", "first_token", "sequence", "words"]

# Words that the labels of a multi-label task are compared with, in order of preference.
REFERENCE_WORDS = ("none", "other", "nothing", "something", "-", ".")


def require_scoring(scoring: object) -> None:
    """Raise I2CLError unless an argument is one of `Scoring`."""
    if scoring not in get_args(Scoring):
        raise I2CLError(f"scoring is {scoring!r}: choose one of {', '.join(get_args(Scoring))}")


class SharedFirstTokenError(I2CLError):
    """Raised if first-token scoring is requested for labels that share their first token."""


class ScoringWarning(UserWarning):
    """Labels share their first token, so full label sequences are scored."""


@dataclass(frozen=True)
class LabelTokens:
    """The tokens of each label as they follow a prompt.

    Attributes:
        sequences: all tokens of each label.
        full_sequences: whether full sequences are scored.
        query_suffix: text between the template's query and the label, such as a newline; it becomes part of
            the query.
        word_tokens: for word-level scoring, the distinct tokens of each label that enter its score; otherwise
            empty.
        keywords: for word-level scoring, a different token for each label (`choose_keywords`); otherwise
            empty.
        fitted_weights: replace the default `word_weights`. Every token may have a weight for every label.
        reference: in a multi-label task, the token that every label is compared with: label scores are
            log-odds of the label's words against it. None otherwise.
    """

    sequences: tuple[Ids, ...]
    full_sequences: bool
    query_suffix: str = ""
    word_tokens: tuple[Ids, ...] = ()
    keywords: Ids = ()
    fitted_weights: Float[Tensor, "tokens labels"] | None = field(default=None, compare=False)
    reference: int | None = None

    @property
    def representatives(self) -> Ids:
        """One token per label where one is needed, such as in exports: the first token or the keyword."""
        return self.keywords or tuple(ids[0] for ids in self.sequences)

    @cached_property
    def tokens(self) -> Ids:
        """Tokens whose log-probabilities after the query yield the label scores, unless `full_sequences`."""
        tokens = (
            tuple(dict.fromkeys(token for ids in self.word_tokens for token in ids)) or self.representatives
        )
        return tokens if self.reference is None else (*tokens, self.reference)

    @cached_property
    def word_weights(self) -> Float[Tensor, "tokens labels"]:
        """Weight of each token in each label's score, for word-level scoring.

        By default by inverse document frequency: tokens of fewer labels weigh more. The weights of a label
        sum to 1; with a reference, whose weight is -1, to 0.
        """
        if self.fitted_weights is not None:
            return self.fitted_weights
        row_of = {token: row for row, token in enumerate(self.tokens)}
        label_counts = Counter(token for ids in self.word_tokens for token in ids)
        weights = torch.zeros(len(row_of), len(self.word_tokens))
        for label, ids in enumerate(self.word_tokens):
            for token in ids:
                weights[row_of[token], label] = math.log1p(len(self.word_tokens) / label_counts[token])
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

    def scores(self, logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows labels"]:
        """Compute label scores from logits or log-probabilities after a query, unless `full_sequences`."""
        return self.scores_from_tokens(logits[..., list(self.tokens)])

    def scores_from_tokens(self, tokens: Float[Tensor, "*rows tokens"]) -> Float[Tensor, "*rows labels"]:
        """Compute label scores from the values of the `tokens`."""
        if not self.word_tokens:
            return tokens
        return tokens.clamp(min=MIN_TOKEN_SCORE) @ self.word_weights.to(tokens)

    def at_representatives(self, logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Return logits with each label's score at its representative, as the head of an export does."""
        if not self.word_tokens:
            return logits
        replaced = logits.clone()
        replaced[..., list(self.representatives)] = self.scores(logits)
        return replaced

    def target(self, label: int) -> Ids:
        """Return the tokens that training over the whole vocabulary predicts: one, or the full sequence."""
        return self.sequences[label] if self.full_sequences else (self.representatives[label],)

    @property
    def tokens_after_query(self) -> int:
        """Number of context tokens that scoring needs after the query."""
        return max(map(len, self.sequences)) - 1 if self.full_sequences else 0


def find_label_tokens(
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

    With ``multi_label``, labels are scored by their words against a reference: the first token of
    `REFERENCE_WORDS` that is in no label.

    Raises:
        I2CLError: if the tokenizer merges the prompt's last token with a label, two labels have the same
            tokens, no token can end a label that is a prefix of another, a label contains a special token,
            or the template repeats the BOS token; with ``multi_label``, for another scoring than by words.
        SharedFirstTokenError: if labels share their first token and ``scoring`` is ``"first_token"``.
    """
    if multi_label:
        scoring = _require_words(scoring)
    _check_special_tokens(encoder, template, labels)
    suffix = template.lead[: template.lead.rfind("\n") + 1]
    sequences = _continuations(encoder, template, labels, suffix)
    if suffix and not all(sequences):  # this tokenizer does not split at the newline
        suffix, sequences = "", _continuations(encoder, template, labels, "")
    for label, ids in zip(labels, sequences, strict=True):
        if not ids:
            hint = "put a space or a newline before {label} in the template"
            raise I2CLError(f"this tokenizer merges label {label!r} with the end of the prompt: {hint}")
    if len(set(sequences)) < len(sequences):
        raise I2CLError("two labels have the same tokens: give labels that differ")
    if scoring == "words":
        tokens = replace(_word_tokens(encoder, labels, sequences), query_suffix=suffix)
        return _with_reference(encoder, template, tokens) if multi_label else tokens
    shared = len({ids[0] for ids in sequences}) < len(sequences)
    if shared and scoring == "first_token":
        raise SharedFirstTokenError(
            "labels share their first token: use scoring='words' or scoring='sequence', or other label words"
        )
    if shared and scoring == "auto":
        message = "labels share their first token: full label sequences are scored, which is slower"
        warnings.warn(message, ScoringWarning, stacklevel=2)
    if prefix_pair := _find_prefix(sequences):
        separated = _continuations(encoder, template, labels, suffix, template.separator)
        sequences = _with_end_token(sequences, separated, encoder, [labels[index] for index in prefix_pair])
    return LabelTokens(sequences, full_sequences=scoring == "sequence" or shared, query_suffix=suffix)


def _require_words(scoring: Scoring) -> Scoring:
    """Return the scoring of multi-label tasks. Raises I2CLError if another one is requested."""
    if scoring not in {"auto", "words"}:
        raise I2CLError(f"scoring={scoring!r} is not for multi-label tasks: use scoring='words'")
    return "words"


def _word_tokens(encoder: PromptEncoder, labels: Sequence[str], sequences: Sequence[Ids]) -> LabelTokens:
    """Return the tokens for word-level scoring; labels with equal sets of tokens get their keywords."""
    keywords = choose_keywords(encoder, labels, sequences)
    words = [tuple(dict.fromkeys(ids)) for ids in sequences]
    set_counts = Counter(map(frozenset, words))
    while len(set_counts) < len(words):  # repeated, since a keyword may be the only word of another label
        words = [
            ids if set_counts[frozenset(ids)] == 1 else (keyword,)
            for ids, keyword in zip(words, keywords, strict=True)
        ]
        set_counts = Counter(map(frozenset, words))
    return LabelTokens(tuple(sequences), full_sequences=False, word_tokens=tuple(words), keywords=keywords)


def _with_reference(encoder: PromptEncoder, template: Template, labels: LabelTokens) -> LabelTokens:
    """Add the token that the labels of a multi-label task are compared with."""
    for ids in _continuations(encoder, template, REFERENCE_WORDS, labels.query_suffix):
        if unshared := [token for token in ids if token not in labels.tokens]:
            return replace(labels, reference=unshared[0])
    words = ", ".join(REFERENCE_WORDS)
    raise I2CLError(f"the labels share tokens with all of {words}, but one is needed: rename a label")


def _check_special_tokens(encoder: PromptEncoder, template: Template, labels: Sequence[str]) -> None:
    """Raise I2CLError if a label contains a special token, or the template repeats the BOS token."""
    for label in labels:
        if special := encoder.find_special_token(label):
            raise I2CLError(f"label {label!r} contains the special token {special!r}: rename the label")
    size = len(encoder.leading_ids)
    if size and encoder([template.query("text")])[0][size : 2 * size] == encoder.leading_ids:
        bos = encoder.tokenizer.decode(list(encoder.leading_ids))
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
    label_counts = Counter(token for ids in sequences for token in set(ids))
    candidates = []
    for label, ids in zip(labels, sequences, strict=True):
        rarest = sorted(dict.fromkeys(ids), key=lambda token: label_counts[token])
        spellings = [
            f" {spell(word)}" for spell in (str.title, str.upper, str.lower) for word in label.split()
        ]
        first_tokens = [token for word in spellings for token in encoder.plain_ids(word)[:1]]
        spare = [token for token in first_tokens if token not in label_counts]
        candidates.append([*rarest, *dict.fromkeys(spare)])
    owner: dict[int, int] = {}
    unassigned = [label for label in range(len(labels)) if not _assign_token(label, candidates, owner)]
    vocabulary = set(encoder.tokenizer.get_vocab().values())
    unused = sorted(vocabulary - set(label_counts) - set(owner) - encoder.special_ids)
    if len(unused) < len(unassigned):
        raise I2CLError(f"the vocabulary has fewer tokens than there are labels ({len(labels)}): use fewer")
    keywords = {label: token for token, label in owner.items()} | dict(zip(unassigned, unused, strict=False))
    return tuple(keywords[label] for label in range(len(labels)))


def _assign_token(label: int, candidates: Sequence[Sequence[int]], owner: dict[int, int]) -> bool:
    """Assign one of its candidate tokens to a label, if need be by reassigning other labels.

    Depth-first search for an augmenting path (Kuhn 1955) with an explicit stack, since a path may be as long
    as the number of labels.

    Args:
        label: the label without a token.
        candidates: the tokens that each label may have, best first.
        owner: the label that each token is assigned to; updated.

    Returns:
        Whether the label has a token now.
    """
    tried: set[int] = set()
    path: list[tuple[int, Iterator[int]]] = [(label, iter(candidates[label]))]
    tokens: list[int] = []  # the token that each label of the path would take
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
        path.append((owner[token], iter(candidates[owner[token]])))
    return False


def _continuations(
    encoder: PromptEncoder, template: Template, labels: Sequence[str], suffix: str, end: str = ""
) -> tuple[Ids, ...]:
    """Return the tokens of each label, followed by ``end``, after a query that ends in ``suffix``.

    A label that the tokenizer merges with the text before it has no tokens.
    """
    probe = template.query("text") + suffix
    prompt = encoder([probe])[0]
    rest = [template.continuation(label).removeprefix(suffix) for label in labels]
    encoded = encoder([probe + label + end for label in rest])
    return tuple(ids[len(prompt) :] if ids[: len(prompt)] == prompt else () for ids in encoded)


def _find_prefix(sequences: Sequence[Ids]) -> tuple[int, int] | None:
    """Return the indices of a label that is a prefix of another, and of the other; None if there are none."""
    order = sorted(range(len(sequences)), key=lambda label: sequences[label])
    for first, second in pairwise(order):  # in sorted order, a prefix directly precedes a continuation of it
        if sequences[second][: len(sequences[first])] == sequences[first]:
            return first, second
    return None


def _with_end_token(
    sequences: Sequence[Ids], separated: Sequence[Ids], encoder: PromptEncoder, pair: Sequence[str]
) -> tuple[Ids, ...]:
    """Append the separator's first token to each label, or EOS if the separator merges with a label.

    Args:
        sequences: tokens of each label.
        separated: tokens of each label followed by the separator.
        encoder: provides the EOS token.
        pair: a label that is a prefix of another, and the other, for the error message.

    Raises:
        I2CLError: if EOS is needed and the tokenizer has none.
    """
    with_ends = tuple(long[: len(ids) + 1] for ids, long in zip(sequences, separated, strict=True))
    is_separate = all(ended[:-1] == ids for ids, ended in zip(sequences, with_ends, strict=True))
    if is_separate and _find_prefix(with_ends) is None:
        return with_ends
    eos = encoder.tokenizer.eos_token_id
    if eos is None:
        raise I2CLError(
            f"label {pair[0]!r} is a prefix of label {pair[1]!r}, and this tokenizer has no EOS token to "
            "tell them apart: use other label words"
        )
    return tuple((*ids, int(eos)) for ids in sequences)
