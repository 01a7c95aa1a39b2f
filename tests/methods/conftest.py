"""What the methods are fitted to."""

import pytest

from fitting import SHOWN, WORDS, films_in
from i2cl import Example


@pytest.fixture
def films():
    return films_in(WORDS)


@pytest.fixture
def demonstrations():
    return [Example(text, label) for text, label in SHOWN]
