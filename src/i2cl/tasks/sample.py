"""Draw distinct texts from a large file, in one pass and in bounded memory."""

import heapq
from collections.abc import Collection, Iterable
from hashlib import blake2b


def text_key(text: str) -> str:
    """Return a text without differences in case and whitespace: texts with equal keys are duplicates."""
    return " ".join(text.casefold().split())


def sample_texts(
    texts: Iterable[str], limit: int, *, seed: int = 0, exclude: Collection[str] = ()
) -> list[str]:
    """Draw up to ``limit`` distinct texts, in their order; each distinct text is equally likely.

    Keeps the texts whose keyed hashes are smallest (bottom-k sampling), so the sample does not depend on the
    order of the texts or on how often one is repeated.

    Args:
        texts: read once.
        limit: maximum number of texts; memory use grows with it, not with the number of texts.
        seed: seed of the sample.
        exclude: texts that are not drawn, compared by `text_key`.
    """
    excluded = set(map(text_key, exclude))
    heap: list[tuple[int, int, str]] = []  # negated hash, so that the largest is on top; number; text
    hashes: set[int] = set()
    for number, text in enumerate(texts):
        key = text_key(text)
        if key in excluded:
            continue
        digest = blake2b(key.encode(), digest_size=8, key=str(seed).encode()).digest()
        rank = -int.from_bytes(digest, "big")
        if rank in hashes or (len(heap) == limit and rank < heap[0][0]):
            continue
        hashes.add(rank)
        if len(heap) < limit:
            heapq.heappush(heap, (rank, number, text))
        else:
            hashes.remove(heapq.heappushpop(heap, (rank, number, text))[0])
    return [text for _, _, text in sorted(heap, key=lambda kept: kept[1])]
