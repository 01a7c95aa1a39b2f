"""Unicode helpers: blank texts, normalized words, and words that differ only in case."""

import unicodedata

# Control and format characters (zero-width space, byte order mark, word joiner) and all kinds of space.
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})


def is_blank(text: str) -> bool:
    """Return whether a text has no visible characters: it is empty, or only spaces, U+200B and the like."""
    return all(
        character.isspace() or unicodedata.category(character) in _INVISIBLE_CATEGORIES for character in text
    )


def normalize_word(word: str) -> str:
    """Return a label word or task name in Unicode NFC: macOS and some exports write 'é' as 'e' + accent."""
    return unicodedata.normalize("NFC", word)


def fold(word: str) -> str:
    """Return a key that is the same for words that differ only in case or in invisible characters.

    Also maps dotted and dotless i to the same key: case folding alone keeps the Turkish words 'İade', 'iade'
    and 'ıade' apart.
    """
    visible = "".join(character for character in word if unicodedata.category(character) != "Cf")
    decomposed = unicodedata.normalize("NFD", " ".join(visible.split()).casefold())
    return unicodedata.normalize("NFC", decomposed.replace("i\u0307", "i").replace("\u0131", "i"))
