"""Encode prompts as token ids; text from users never becomes a special token."""

import copy
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from i2cl.errors import I2CLError, first_line
from i2cl.models.batching import Ids

_MARK = "\ufdd0"  # a noncharacter, reserved by Unicode for internal use
_BREAK = f"{_MARK}1"  # inserted into text that spells a special token
_ESCAPED_MARK = f"{_MARK}2"  # replaces the noncharacter itself
# Prefixes to encode a piece with: after another character, tokenizers do not add a leading space.
_PREFIXES_AFTER_TEXT = ("=", "a", "1", "")


class TooLongError(I2CLError):
    """Raised when a text exceeds the context and may not be truncated."""


class TruncationWarning(UserWarning):
    """Texts were truncated to fit the context. Arguments: the message and, optionally, their number."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts with the special tokens that the tokenizer prepends, such as BOS (`leading_ids`).

    Special tokens at the end, such as EOS, are left out: the last token must be the one that predicts the
    next. Text from users that spells a special token, such as ``<|im_end|>`` or ``</s>``, is encoded as plain
    characters. Special tokens of a template stay special.
    """

    tokenizer: PreTrainedTokenizerBase
    leading_ids: Ids

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "PromptEncoder":
        """Find the special tokens that the tokenizer prepends, by encoding a probe with and without them.

        Raises:
            I2CLError: if the tokenizer cannot encode text, or loses the spaces between words.
        """
        _require_spaces(tokenizer)
        bare = tuple(tokenizer("a", add_special_tokens=False)["input_ids"])
        full = tuple(tokenizer("a")["input_ids"])
        starts = (start for start in range(len(full)) if full[start : start + len(bare)] == bare)
        return cls(tokenizer, full[: next(starts, 0)])

    def __call__(self, prompts: Sequence[str]) -> list[Ids]:
        """Return the token ids of each prompt, including `leading_ids`."""
        plain = [prompt for prompt in prompts if _MARK not in prompt]
        options = {"add_special_tokens": False, "verbose": False}
        ids = map(tuple, self.tokenizer(plain, **options)["input_ids"] if plain else ())
        return [
            self.leading_ids + (self._encode_escaped(prompt)[0] if _MARK in prompt else next(ids))
            for prompt in prompts
        ]

    def plain_ids(self, text: str) -> Ids:
        """Return the token ids of a text, without `leading_ids`."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def escape(self, text: str) -> str:
        """Escape the special tokens that a text spells, so that they are encoded as plain characters.

        The ends of the text are escaped too where a special token could span the text and the template.
        """
        prefixes, suffixes, inner_parts = self._special_affixes
        lengths = range(1, min(len(text), max(map(len, prefixes), default=0)) + 1)
        is_inner = text in inner_parts
        escape_start = is_inner or any(text[:length] in suffixes for length in lengths)
        escape_end = is_inner or any(text[-length:] in prefixes for length in lengths)
        if not (escape_start or escape_end or _MARK in text or self._special_pattern.search(text)):
            return text
        unmarked = text.replace(_MARK, _ESCAPED_MARK)
        broken = self._special_pattern.sub(lambda match: match[0][0] + _BREAK + match[0][1:], unmarked)
        return _BREAK * escape_start + broken + _BREAK * escape_end

    def find_special_token(self, text: str) -> str | None:
        """Return the first special token that a text spells, or None."""
        found = self._special_pattern.search(text)
        return found[0] if found else None

    def spans(self, prompt: str) -> list[tuple[int, int]]:
        """Return the character span of each token, without `leading_ids`. Fast tokenizers only."""
        if _MARK in prompt:
            return self._encode_escaped(prompt)[1]
        options: Any = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return [(start, end) for start, end in self.tokenizer(prompt, **options)["offset_mapping"]]

    def _encode_escaped(self, prompt: str) -> tuple[Ids, list[tuple[int, int]]]:
        """Encode a prompt that contains escapes; return its tokens and their spans."""
        ids, spans = list[int](), list[tuple[int, int]]()
        vocabulary = self.tokenizer.get_vocab()
        # text at even indices, special tokens at odd ones
        parts = re.split(f"({self._special_pattern.pattern})", prompt)
        starts = accumulate(map(len, parts), initial=0)
        for index, (start, part) in enumerate(zip(starts, parts, strict=False)):
            if index % 2:
                tokens, part_spans, stripped = [vocabulary[part]], [(0, len(part))], 0
            else:
                text = part.lstrip() if index and parts[index - 1] in self._strips_right else part
                stripped = len(part) - len(text)  # characters
                if index + 1 < len(parts) and parts[index + 1] in self._strips_left:
                    text = text.rstrip()
                if not text:
                    continue
                prefixes = ("",) if index == 0 else self._prefixes_after_special
                tokens, part_spans = self._encode_text(text, prefixes)
            ids += tokens
            spans += [(start + stripped + first, start + stripped + end) for first, end in part_spans]
        return tuple(ids), spans

    def _encode_text(self, part: str, prefixes: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode text between special tokens; return its tokens, none of them special, and their spans."""
        tokens, spans = self._encode_piece(part, prefixes)
        if self.special_ids.isdisjoint(tokens):
            return tokens, spans
        # Some vocabularies contain special tokens as ordinary pieces too: encode the text around each break.
        tokens, spans, start = [], [], 0
        for piece in part.split(_BREAK):
            piece_prefixes = _PREFIXES_AFTER_TEXT if start else prefixes
            piece_tokens, piece_spans = self._encode_piece(piece, piece_prefixes)
            tokens += piece_tokens
            spans += [(start + first, start + end) for first, end in piece_spans]
            start += len(piece) + len(_BREAK)
        return tokens, spans

    def _encode_piece(self, part: str, prefixes: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a piece after the first of the prefixes that the tokenizer does not merge with it."""
        text, positions = _unescape(part)
        positions.append(len(part))
        for prefix in prefixes:
            prefix_ids = self._encode_split(prefix)["input_ids"]
            encoded = self._encode_split(prefix + text)
            size = len(prefix_ids)
            if encoded["input_ids"][:size] == prefix_ids:
                break
        tokens, shift = list(encoded["input_ids"][size:]), len(prefix)
        offsets = encoded.get("offset_mapping", [(shift, shift)] * (size + len(tokens)))[size:]
        spans = [[positions[max(0, offset - shift)] for offset in span] for span in offsets]
        return tokens, [(start, end) for start, end in spans]

    def _encode_split(self, text: str) -> Any:
        """Encode a text without special tokens, with the spans of its tokens if the tokenizer is fast."""
        plain: Any = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self._splitting_tokenizer(text, return_offsets_mapping=self.tokenizer.is_fast, **plain)

    @cached_property
    def _special_words(self) -> frozenset[str]:
        """Strings that the tokenizer encodes as special tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        words = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        return frozenset(word for word in words if word)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Pattern of special tokens, longest first."""
        longest = sorted(self._special_words, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    @cached_property
    def _special_affixes(self) -> tuple[frozenset[str], frozenset[str], str]:
        """Proper prefixes and suffixes of special tokens, and the inner parts of all, one per line."""
        words = self._special_words
        prefixes = frozenset(word[:cut] for word in words for cut in range(1, len(word)))
        suffixes = frozenset(word[cut:] for word in words for cut in range(1, len(word)))
        return prefixes, suffixes, "\n".join(word[1:-1] for word in words)

    @cached_property
    def _prefixes_after_special(self) -> Sequence[str]:
        """Prefixes to encode text with after a special token, where legacy SentencePiece adds a space."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = next((str(token) for token in added if token.special and not token.rstrip), "")
        ids_after_special = self.plain_ids(f"{special}a")[1 if special else 0 :]
        return ("",) if ids_after_special == self.plain_ids("a") else _PREFIXES_AFTER_TEXT

    @cached_property
    def _strips_left(self) -> frozenset[str]:
        """Special tokens that strip the whitespace on their left."""
        return frozenset(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.lstrip)

    @cached_property
    def _strips_right(self) -> frozenset[str]:
        """Special tokens that strip the whitespace on their right."""
        return frozenset(str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.rstrip)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if token.special)

    @cached_property
    def _splitting_tokenizer(self) -> PreTrainedTokenizerBase:
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
        ids = self([make_prompt(self.escape(text)) for make_prompt, text in zip(builds, texts, strict=True)])
        if limit is None:
            return ids
        too_long = [row for row, row_ids in enumerate(ids) if len(row_ids) > limit]
        if too_long and not cut:
            first = too_long[0]
            problem = f"text {first + 1} takes {len(ids[first]):,} tokens with its prompt"
            raise TooLongError(f"{problem}, and {limit:,} fit into the context", "shorten it")
        for row in too_long:
            ids[row] = self._encode_truncated(builds[row], texts[row], limit)
        if too_long:
            message = f"{len(too_long):,} of {len(texts):,} texts were cut to fit {limit:,} tokens of context"
            warnings.warn(TruncationWarning(message, len(too_long)), stacklevel=2)
        return ids

    def _encode_truncated(self, build: Callable[[str], str], text: str, limit: int) -> Ids:
        """Encode the prompt of the longest start of a text that fits into ``limit`` tokens."""

        def encode(characters: int) -> Ids:
            return self([build(self.escape(text[:characters]))])[0]

        template_ids = encode(0)
        if len(template_ids) > limit:
            raise I2CLError(
                f"the prompt without its text needs {len(template_ids)} tokens, but only {limit} fit into "
                "the context: use fewer or shorter demonstrations, or a model with a longer context"
            )
        lower, upper = 0, 4 * limit  # characters: the longest start that fits is between them
        while upper < len(text) and len(encode(upper)) <= limit:
            lower, upper = upper, 2 * upper
        sizes = range(min(upper, len(text)) - 1, lower - 1, -1)  # descending; the last one fits
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


def _unescape(part: str) -> tuple[str, list[int]]:
    """Remove the escapes of a part; return the text and the original position of each character."""
    characters = list(re.finditer(f"{_BREAK}|{_ESCAPED_MARK}|.", part, re.DOTALL))
    characters = [match for match in characters if match[0] != _BREAK]
    return "".join(match[0][0] for match in characters), [match.start() for match in characters]
