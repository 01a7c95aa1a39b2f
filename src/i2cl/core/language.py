"""Detect texts in a language that a tokenizer was hardly trained on, by its tokens per character."""

import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

from i2cl.models.decoder import Decoder

# Tokens per UTF-8 byte of letters, above which an LLM is assumed not to know the language. SmolLM2 has 0.2 on
# English, 0.4 on German and Russian, 0.55 on Arabic and Chinese; a multilingual tokenizer stays below 0.3.
MAX_TOKENS_PER_BYTE = 0.4
# Tokens per letter, above which an English sentence encoder is assumed not to know the language. MiniLM has
# 0.2 to 0.4 in Latin scripts, 0.7 to 1.2 in Korean, Russian, Arabic, Japanese and Chinese, where a classifier
# on its embeddings is worse than guessing the majority class (docs/experiments/real_files.md).
MAX_TOKENS_PER_LETTER = 0.6
MIN_FOREIGN_SHARE = 0.005  # share of letters outside ASCII, below which texts are assumed to be English
MAX_TEXTS_CHECKED = 64


class LanguageWarning(UserWarning):
    """A tokenizer splits the texts into unusually many tokens."""


def warn_of_language(decoder: Decoder, texts: Sequence[str]) -> None:
    """Emit a `LanguageWarning` if the LLM's tokenizer needs unusually many tokens for these texts."""
    words = _foreign_words(texts)
    tokens = sum(len(decoder.encoder.plain_ids(text)) for text in words)
    if tokens > MAX_TOKENS_PER_BYTE * len("".join(words).encode()):
        rate = tokens / max(1, sum(map(len, words)))
        message = f"the tokenizer of {decoder.name} needs {rate:.1f} tokens per character of these texts"
        consequence = "the model hardly knows their language, so answers will be slow and inaccurate"
        warnings.warn(f"{message}: {consequence}; use a multilingual model", LanguageWarning, stacklevel=3)


def knows_language(tokenizer: Any, texts: Sequence[str]) -> bool:
    """Return whether the tokenizer of an English sentence encoder splits these texts into few enough tokens.

    Args:
        tokenizer: of transformers.
        texts: samples of the language; the first `MAX_TEXTS_CHECKED` are read.
    """
    words = _foreign_words(texts)
    ids = tokenizer(words, add_special_tokens=False)["input_ids"] if words else []
    return sum(map(len, ids)) <= MAX_TOKENS_PER_LETTER * sum(map(len, words))


def _foreign_words(texts: Sequence[str]) -> list[str]:
    """Return texts without digits, punctuation and symbols; an empty list if nearly all letters are ASCII."""
    words = [_letters(text) for text in texts[:MAX_TEXTS_CHECKED]]
    letters = "".join(words).replace(" ", "")
    foreign = sum(not letter.isascii() for letter in letters)
    return words if letters and foreign >= MIN_FOREIGN_SHARE * len(letters) else []


def _letters(text: str) -> str:
    """Replace everything but letters and combining marks by single spaces."""
    characters = (character if unicodedata.category(character)[0] in "LM" else " " for character in text)
    return " ".join("".join(characters).split())
