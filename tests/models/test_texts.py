"""Texts that cannot be classified are named, one by one."""

import pytest

from i2cl import I2CLError
from i2cl.models.scoring import TextError, require_texts


def test_invalid_texts_are_named_with_their_reason():
    with pytest.raises(TextError, match="3 of 5 texts cannot be classified: text 2 is empty") as caught:
        require_texts(["fine", "", "fine", "\u200b", "\ud83d"])
    assert list(caught.value.problems) == [1, 3, 4]
    assert "surrogate" in caught.value.problems[4]


def test_one_invalid_text_gives_one_short_line():
    with pytest.raises(I2CLError, match=r"^text 2 is empty: correct or remove it$"):
        require_texts(["fine", " "])


def test_many_invalid_texts_are_counted():
    with pytest.raises(TextError, match=r"12 of 12 texts .*text 5 is empty; and 7 more: correct or"):
        require_texts([""] * 12)


@pytest.mark.parametrize("text", ["\U0001f600", "a\u200b", "\u3042", "."], ids=ascii)
def test_text_with_a_visible_character_is_valid(text):
    require_texts([text])
