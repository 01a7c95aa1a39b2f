"""Choose which texts to label, from a file of unlabelled texts (pool-based active learning).

The choice covers the texts: they are clustered, and the most typical text of each cluster without a label is
chosen (TypiClust, Hacohen et al. 2022, https://arxiv.org/abs/2202.02794). Texts that a fitted task is
uncertain about were a worse choice (docs/guide/label.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from i2cl import encoders
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.injections.label_prior import prior_bias
from i2cl.methods.linear_probe import query_states
from i2cl.models.decoder import Decoder
from i2cl.models.loading import usable_device
from i2cl.models.scoring import LabelScorer, Progress, label_log_probs, map_batches, require_decoder_and_task
from i2cl.tasks import Task
from i2cl.tasks.sample import text_key

PRIOR_TEXTS = 64  # texts that the label prior of zero-shot proposals is measured on
NEIGHBOURS = 20  # nearest texts in a cluster, which show how typical a text is
STATE_DEPTH = 0.93  # relative position of the layer whose states stand in for a sentence embedding

Vectors = Float[np.ndarray, "texts d"]


@dataclass(frozen=True)
class Suggestion:
    """A text to label.

    Attributes:
        index: index into the texts given to `suggest`.
        text: the text.
        label: proposed label word, the most probable one.
        probabilities: probability of each label, in the order of the task's labels.
    """

    index: int
    text: str
    label: str
    probabilities: tuple[float, ...]


def suggest(
    decoder: Decoder | None,
    task: Task | Injection,
    texts: Sequence[str],
    n: int = 20,
    *,
    labelled: Sequence[str] = (),
    seed: int = 0,
    encoder: str | None = None,
    progress: Progress | None = None,
    device: str | None = None,
) -> list[Suggestion]:
    """Choose the texts to label next, and propose a label for each.

    Chooses typical texts that cover all kinds of texts without a label. An `Injection` proposes its
    answer, a `Task` the zero-shot answer, after division by the mean label probabilities.
    Deterministic for a seed.

    Every text is embedded; `i2cl.tasks.sample.sample_texts` draws from a long file.

    Args:
        decoder: the model, of the injection if there is one. Not used, and may be None, if `needs_decoder` is
            False for the injection.
        task: label words and template, or a fitted task.
        texts: candidates. A text is chosen at most once, and never if it is in ``labelled``; texts that
            differ only in case or whitespace count as equal.
        n: number of texts to choose.
        labelled: texts that have a label already, or that another person is labelling.
        seed: seed of the clustering.
        encoder: sentence encoder of `text_vectors`. Default: the injection's, if it has one.
        progress: called as texts are embedded.
        device: device of the sentence encoder if ``decoder`` is None. Default: an accelerator if there is
            one.

    Returns:
        The suggestions, best first.

    Raises:
        I2CLError: if fewer than ``n`` candidates are left or a text is empty, or for a multi-label task.
    """
    injection, plain = (task, task.task) if isinstance(task, Injection) else (None, task)
    if decoder is not None or injection is None or needs_decoder(injection, encoder):
        require_decoder_and_task(decoder, plain)
    if encoder is None and injection is not None and injection.head.embeddings is not None:
        encoder = injection.head.embeddings.encoder
    plain.require_single_label("the choice of texts to label")
    first_index: dict[str, int] = {}
    for index, text in enumerate(texts):
        first_index.setdefault(text_key(text), index)
    labelled_keys = dict.fromkeys(map(text_key, labelled))
    candidates = [index for key, index in first_index.items() if key not in labelled_keys]
    if not 1 <= n <= len(candidates):
        message = f"cannot suggest {n} of {len(candidates)} distinct texts without a label"
        raise I2CLError(message, "give more texts, or ask for fewer")
    vectors = text_vectors(decoder, plain, texts, encoder, progress, device)
    covered = vectors[[first_index[key] for key in labelled_keys if key in first_index]]
    if others := [text for text in labelled if text_key(text) not in first_index]:
        covered = np.concatenate([covered, text_vectors(decoder, plain, others, encoder, progress, device)])
    chosen = [candidates[at] for at in choose_typical(vectors[candidates], n, covered, seed)]
    if injection is not None:
        answers = injection.log_probs(decoder, [texts[at] for at in chosen], device=device)
    else:
        assert decoder is not None  # noqa: S101 - checked above
        answers = zero_shot_log_probs(decoder, plain, texts, chosen, seed)
    return [
        Suggestion(index, texts[index], plain.labels[int(row.argmax())], tuple(row.exp().tolist()))
        for index, row in zip(chosen, answers, strict=True)
    ]


def needs_decoder(injection: Injection, encoder: str | None = None) -> bool:
    """Return whether `suggest` runs the LLM: for the injection's answers, or to compare texts.

    ``encoder``: the sentence encoder given to `suggest`, if any.
    """
    known = (encoder, injection.head.embeddings, encoders.local_encoder())
    return injection.head.uses_llm or all(one is None for one in known)


def text_vectors(
    decoder: Decoder | None,
    task: Task,
    texts: Sequence[str],
    encoder: str | None = None,
    progress: Progress | None = None,
    device: str | None = None,
) -> Vectors:
    """Return a vector of unit length for each text, in float32. It does not depend on the other texts.

    Args:
        decoder: its hidden states, averaged over the text's tokens, are used without a sentence encoder. With
            one, it may be None.
        task: gives the template.
        texts: what to embed.
        encoder: a sentence encoder. Default: the one that is installed, if any.
        progress: called as texts finish.
        device: device of the sentence encoder if ``decoder`` is None. Default: an accelerator if there is
            one.

    Raises:
        I2CLError: on an empty text, if there is no such encoder, or without an encoder and a decoder.
    """
    name = encoder or encoders.local_encoder()
    if name is not None:
        place = usable_device(device) if decoder is None else decoder.device
        return encoders.embed(encoders.frozen_encoder(name, str(place)), texts, progress)
    require_decoder_and_task(decoder, task)
    assert decoder is not None  # noqa: S101 - checked above
    scorer, layer = LabelScorer(decoder, task), round(STATE_DEPTH * (decoder.layers - 1))
    pooled = decoder.tokenizer.is_fast  # others do not say which tokens belong to the text

    def states(batch: Sequence[str]) -> Tensor:
        return query_states(scorer, batch, [layer], pooled=pooled)[:, 0, -1]

    vectors = torch.cat(list(map_batches(states, texts, encoders.PROGRESS_TEXTS, progress)))
    return torch.nn.functional.normalize(vectors, dim=-1).numpy()


def choose_typical(vectors: Vectors, n: int, covered: Vectors, seed: int = 0) -> list[int]:
    """Choose typical candidates that cover all kinds of candidates.

    All vectors are clustered by k-means, with one cluster for each labelled text and each choice. Clusters
    with the fewest labelled texts come first, then the largest; of each, the most typical candidate is
    chosen.

    Args:
        vectors: of the candidates, of unit length.
        n: how many to choose, at most all.
        covered: vectors of the labelled texts.
        seed: seed of the clustering.

    Returns:
        Indices of candidates.
    """
    from sklearn.cluster import KMeans

    together = np.concatenate([vectors, covered]) if len(covered) else vectors
    distinct = len(np.unique(together.round(5), axis=0))  # more clusters would be empty
    clusters = KMeans(min(n + len(covered), distinct), n_init=1, random_state=seed).fit(together).labels_
    sizes, labelled = np.bincount(clusters), np.bincount(clusters[len(vectors) :], minlength=len(together))
    clusters = clusters[: len(vectors)]
    ranks = _rank_within(clusters, -typicality(vectors, clusters))
    return [int(at) for at in np.lexsort((-sizes[clusters], labelled[clusters] + ranks))[:n]]


def typicality(vectors: Vectors, clusters: Int[np.ndarray, " texts"]) -> Float[np.ndarray, " texts"]:
    """Return the mean cosine of each vector with its `NEIGHBOURS` nearest ones in its cluster."""
    typical = np.zeros(len(vectors))
    for cluster in np.unique(clusters):
        members = np.flatnonzero(clusters == cluster)
        if len(members) > 1:
            cosines = vectors[members] @ vectors[members].T
            np.fill_diagonal(cosines, -np.inf)
            typical[members] = np.sort(cosines, axis=1)[:, 1:][:, -NEIGHBOURS:].mean(1)
    return typical


def _rank_within(
    clusters: Int[np.ndarray, " texts"], values: Float[np.ndarray, " texts"]
) -> Int[np.ndarray, " texts"]:
    """Return the rank of each value within its cluster, from 0 for the smallest."""
    order = np.lexsort((values, clusters))
    ranks = np.empty(len(order), dtype=int)
    ranks[order] = np.arange(len(order)) - np.searchsorted(clusters[order], clusters[order])
    return ranks


def zero_shot_log_probs(
    decoder: Decoder,
    task: Task,
    texts: Sequence[str],
    chosen: Sequence[int],
    seed: int = 0,
) -> Float[Tensor, "chosen labels"]:
    """Return the zero-shot log-probabilities of the chosen texts, with the label prior divided out."""
    rest = sorted(set(range(len(texts))) - set(chosen))
    extra = Random(seed).sample(rest, min(len(rest), max(0, PRIOR_TEXTS - len(chosen))))
    scores = LabelScorer(decoder, task).scores([texts[at] for at in (*chosen, *extra)])
    return label_log_probs(scores, prior_bias(None, scores))[: len(chosen)]
