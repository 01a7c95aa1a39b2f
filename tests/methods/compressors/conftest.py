"""Tiny versions of the released compressors, and the tolerances of their numbers."""

import pytest

from compressed import CLOSE, LOOSE


@pytest.fixture(scope="module")
def decoder(release):
    return release.decoder()


@pytest.fixture(scope="module")
def within(release):
    return LOOSE if release.name in {"autocompressor-llama", "icae-v1"} else CLOSE
