"""Fixtures of the tests with stand-ins for vLLM: a tiny saved model."""

import pytest

from i2cl.models.decoder import Decoder
from tiny import tiny_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Decoder.from_pretrained(str(tiny_folder(tmp_path_factory.mktemp("model"))), device="cpu")
