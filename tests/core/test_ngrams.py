"""Hashed n-grams, against scikit-learn's."""

import random

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer

from i2cl.core.ngrams import HASH_BUCKETS, count_ngrams

CHARACTERS = [chr(code) for code in (*range(32, 127), *range(0xC0, 0x250), *range(0x4E00, 0x4E80))]
CHARACTERS += ["😀", "\u3000", "\u00a0", "\u0130", "ẞ", "\n"]


def test_counts_equal_those_of_the_hashing_vectorizer():
    rng = random.Random(0)
    texts = ["".join(rng.choices([*CHARACTERS, *" " * 90], k=rng.randrange(1, 60))) for _ in range(200)]
    texts += ["A", " two  words\tand a line\nbreak", "aaaa aaaa aaaa"]
    vectorizer = HashingVectorizer(
        analyzer="char_wb", ngram_range=(1, 5), n_features=HASH_BUCKETS, norm=None, alternate_sign=False
    )
    for expected, (buckets, counts) in zip(vectorizer.transform(texts), count_ngrams(texts), strict=True):
        np.testing.assert_array_equal(buckets, expected.indices)
        np.testing.assert_array_equal(counts, expected.data)
