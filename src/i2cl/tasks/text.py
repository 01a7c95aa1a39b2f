"""Comparing and checking text: blank texts, Unicode normalization, words that look alike."""

import unicodedata

# Format and control characters (zero-width space, byte order mark, word joiner) and all kinds of space.
_INVISIBLE = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})


def is_blank(text: str) -> bool:
    """Return whether a text is empty or consists of invisible characters only, such as spaces or U+200B."""
    return all(character.isspace() or unicodedata.category(character) in _INVISIBLE for character in text)


def normalize_word(word: str) -> str:
    """Return a label word or task name in Unicode NFC: macOS and some exports write 'é' as 'e' + accent."""
    return unicodedata.normalize("NFC", word)


def fold(word: str) -> str:
    """Return a key that is equal for words that differ in case or in invisible characters only.

    Dotted and dotless i are equal too: casefolding alone keeps the Turkish 'İade', 'iade' and 'ıade' apart.
    """
    visible = "".join(one for one in word if unicodedata.category(one) != "Cf")
    decomposed = unicodedata.normalize("NFD", " ".join(visible.split()).casefold())
    return unicodedata.normalize("NFC", decomposed.replace("i\u0307", "i").replace("\u0131", "i"))
