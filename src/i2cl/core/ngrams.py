"""Count hashed character n-grams as scikit-learn's ``HashingVectorizer`` does, with NumPy alone.

Importing scikit-learn, with pandas and SciPy's statistics, takes longer than classifying a few texts.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, UInt32

NGRAMS = (1, 5)  # minimum and maximum length of the n-grams, in characters
HASH_BUCKETS = 2**18  # n-grams are stored as hashes, so that an artefact contains no fragments of texts

Counts = tuple[Int[np.ndarray, " buckets"], Float[np.ndarray, " buckets"]]


def count_ngrams(texts: Sequence[str]) -> list[Counts]:
    """Return the buckets of each text, ascending, and how often each occurs.

    Equals ``HashingVectorizer(analyzer="char_wb", norm=None, alternate_sign=False)`` with `HASH_BUCKETS`
    features and n-grams of `NGRAMS` characters.
    """
    counters = [Counter(_ngrams(text)) for text in texts]
    ngrams = list(set().union(*counters))
    buckets = dict(zip(ngrams, (_murmurhash3(ngrams) % HASH_BUCKETS).tolist(), strict=True))
    counts = []
    for counter in counters:
        text_buckets, inverse = np.unique([buckets[ngram] for ngram in counter], return_inverse=True)
        counts.append((text_buckets, np.bincount(inverse, list(counter.values()))))
    return counts


def _ngrams(text: str) -> list[str]:
    """Return the n-grams of lower-cased words with a space on both sides."""
    words = [f" {word} " for word in text.lower().split()]
    return [
        word[start : start + length]
        for word in words
        for length in range(NGRAMS[0], NGRAMS[1] + 1)
        for start in range(len(word) - length + 1)
    ]


def _murmurhash3(strings: Sequence[str]) -> Int[np.ndarray, " strings"]:
    """Return the absolute value of the 32-bit hash of strings in UTF-8, with seed 0.

    Source: ``MurmurHash3_x86_32`` in https://github.com/aappleby/smhasher.
    """
    encoded = [string.encode() for string in strings]
    lengths, result = np.array([len(text) for text in encoded]), np.empty(len(encoded), np.int64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        padded = np.zeros((len(rows), -(-length // 4) * 4), np.uint8)
        joined = b"".join(encoded[row] for row in rows)
        padded[:, :length] = np.frombuffer(joined, np.uint8).reshape(len(rows), length)
        state = np.zeros(len(rows), np.uint32)
        for index, block in enumerate(padded.view("<u4").T, start=1):
            state ^= _rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            if 4 * index <= length:  # skipped for a last block of fewer than four bytes
                state = _rotate(state, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        state ^= np.uint32(length)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            state = (state ^ state >> np.uint32(shift)) * np.uint32(factor)
        result[rows] = abs(state.view(np.int32).astype(np.int64))
    return result


def _rotate(values: UInt32[np.ndarray, " rows"], bits: int) -> UInt32[np.ndarray, " rows"]:
    return values << np.uint32(bits) | values >> np.uint32(32 - bits)
