"""Tasks, demonstrations and an encoder for the tests of methods."""

import pytest
import torch
from transformers import BertConfig, BertModel

from fitting import SHOWN, WORDS, films_in
from i2cl import Example
from tiny import redrawn, tiny_tokenizer


@pytest.fixture
def films():
    return films_in(WORDS)


@pytest.fixture
def demonstrations():
    return [Example(text, label) for text, label in SHOWN]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A folder of sentence-transformers: a tiny random BERT with mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    plain, folder = (tmp_path_factory.mktemp("encoder") / name for name in ("plain", "whole"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bert = BertModel(BertConfig(vocab_size=300, max_position_embeddings=64, **sizes))
        redrawn(bert).save_pretrained(plain)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(plain)
    layers = [Transformer(str(plain)), Pooling(32)]
    SentenceTransformer(modules=layers, device="cpu").save(str(folder))
    return str(folder)
