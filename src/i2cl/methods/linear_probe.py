"""Linear probe: logistic regression on the model's hidden states.

Layer, tokens and regularization are chosen by cross-validation on the demonstrations. The candidates, and the
defaults with one demonstration per class, were chosen on training rows with SmolLM2-135M.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from i2cl.core.context import require_two_classes
from i2cl.errors import I2CLError
from i2cl.methods.base import Method
from i2cl.methods.classifiers import ClassifierPredictor, regression_cost
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import LabelScorer, Progress
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

# State of the query's last token, mean over the text's tokens, or both concatenated.
Tokens = Literal["last", "mean", "both"]
MAX_FOLDS = 5  # fewer if the rarest class has fewer demonstrations
CANDIDATE_DEPTHS = (0.8, 0.93, 1.0)  # relative position of the layer between the first and the last block
CANDIDATE_C = (0.01, 0.1, 1.0)  # inverse regularization strength


class Choice(NamedTuple):
    """Hyperparameters of a probe: layer, tokens and scikit-learn's ``C``."""

    layer: int
    tokens: Tokens
    c: float


class ProbeConfig(Settings):
    """Hyperparameters; ``"folds"`` chooses by stratified cross-validation on the demonstrations.

    Negative layers count from the last; ``probe_tokens`` is the ``last`` token of the query, the ``mean``
    over the text, or ``both``; ``probe_c`` is scikit-learn's ``C``.
    """

    probe_layer: int | Literal["folds"] = "folds"
    probe_tokens: Literal["folds", "last", "mean", "both"] = "folds"
    probe_c: Annotated[float, Field(gt=0)] | Literal["folds"] = "folds"


@dataclass(frozen=True)
class LinearProbe(Method):
    """Logistic regression on standardized block outputs, which take one forward pass."""

    name = "linear_probe"
    summary = "logistic regression on states chosen by inner folds"
    needs = "demonstrations"
    settings = (ProbeConfig,)
    config: ProbeConfig = field(default_factory=ProbeConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "ProbePredictor":
        """Fit to the states of the demonstrations.

        Raises:
            I2CLError: with fewer than two classes, if the model does not have the layer, or if the tokenizer
                does not report character offsets.
        """
        require_two_classes(self.name, task, demonstrations)
        scorer = LabelScorer(decoder, task)
        choices = self._choices(decoder)
        layers = tuple(sorted({choice.layer for choice in choices}))
        pooled = any(choice.tokens != "last" for choice in choices)
        states = query_states(scorer, [example.text for example in demonstrations], layers, pooled=pooled)
        labels = np.array([example.label for example in demonstrations])
        by_layer = dict(zip(layers, states.unbind(1), strict=True))
        candidates = {choice: _features(by_layer[choice.layer], choice.tokens) for choice in choices}
        best = _cross_validate(candidates, labels, seed)
        model = _make_classifier(best.c).fit(candidates[best], labels)

        def features(texts: Sequence[str], _progress: Progress | None) -> Float[np.ndarray, "texts _"]:
            states = query_states(scorer, texts, [best.layer], pooled=best.tokens != "last")
            return _features(states[:, 0], best.tokens)

        return ProbePredictor(features, model, len(task.labels), regression_cost(model[-1]), best)

    def _choices(self, decoder: Decoder) -> list[Choice]:
        """Return the candidates; the first one is the default if there are too few demonstrations."""
        layer, tokens, c = self.config.probe_layer, self.config.probe_tokens, self.config.probe_c
        if layer != "folds" and not -decoder.layers <= layer < decoder.layers:
            last = decoder.layers - 1
            raise I2CLError(f"probe_layer={layer}: choose a layer from 0 to {last}, or -{last + 1} to -1")
        if tokens not in {"folds", "last"} and not decoder.tokenizer.is_fast:
            raise I2CLError(
                f"probe_tokens={tokens} needs a fast tokenizer (tokenizer.json): use probe_tokens=last"
            )
        # The middle candidate is the default, and therefore first; duplicates are removed at the end.
        depths = (CANDIDATE_DEPTHS[1], *CANDIDATE_DEPTHS)
        candidate_layers = [round(depth * (decoder.layers - 1)) for depth in depths]
        candidate_tokens: list[Tokens] = ["both", "last", "mean"] if decoder.tokenizer.is_fast else ["last"]
        combinations = product(
            candidate_layers if layer == "folds" else [layer % decoder.layers],
            candidate_tokens if tokens == "folds" else [tokens],
            [CANDIDATE_C[1], *CANDIDATE_C] if c == "folds" else [c],
        )
        return list(dict.fromkeys(Choice(*values) for values in combinations))


def _make_classifier(c: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=10_000))


def _cross_validate(
    features: dict[Choice, Float[np.ndarray, "texts _"]], labels: Int[np.ndarray, " texts"], seed: int
) -> Choice:
    """Return the choice with the lowest held-out log-loss; the first if a class has only one text."""
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    default, counts = next(iter(features)), np.unique(labels, return_counts=True)[1]
    if len(features) == 1 or counts.min() < 2:
        return default
    folds = StratifiedKFold(min(MAX_FOLDS, int(counts.min())), shuffle=True, random_state=seed % 2**32)
    columns = np.searchsorted(np.unique(labels), labels)

    def log_likelihood(choice: Choice) -> float:
        model = _make_classifier(choice.c)
        probabilities = cross_val_predict(model, features[choice], labels, cv=folds, method="predict_proba")
        return float(np.log(probabilities[np.arange(len(columns)), columns] + 1e-12).sum())

    return max(features, key=log_likelihood)


def _features(states: Float[Tensor, "texts tokens d"], tokens: Tokens) -> Float[np.ndarray, "texts _"]:
    """Select the classifier's input: the last token's state, the mean over the text, or both."""
    return {"last": states[:, 0], "mean": states[:, -1], "both": states.flatten(1)}[tokens].numpy()


class CapturePooled(Edit):
    """Copies block outputs of some layers at each query's last token, and their mean over its text.

    Attributes:
        layers: the layers to copy.
        spans: first and end token of the text in each query, or None to copy only the last token's state.
        captured: one (batch x tokens x d) tensor per layer, float32 on the CPU; tokens is 2, or 1 without
            spans.
    """

    hook_point = "hidden"

    def __init__(self, layers: Sequence[int], spans: Int[Tensor, "queries 2"] | None) -> None:
        self.layers = layers
        self.spans = spans
        self.captured: list[Tensor] = []

    def output(self, layer: int, _index: int, output: States, batch: Batch) -> None:
        """Copy the states of a layer."""
        if layer not in self.layers:
            return
        states = output.float()
        pooled = [states[torch.arange(len(states), device=states.device), batch.last.to(states.device)]]
        if self.spans is not None:
            spans = self.spans[list(batch.rows)].to(states.device)
            tokens = torch.arange(states.shape[1], device=states.device)
            is_text = (tokens >= spans[:, :1]) & (tokens < spans[:, 1:])
            pooled.append((states * is_text[..., None]).sum(1) / is_text.sum(1, keepdim=True))
        self.captured.append(torch.stack(pooled, 1).cpu())


def query_states(
    scorer: LabelScorer, texts: Sequence[str], layers: Sequence[int], *, pooled: bool
) -> Float[Tensor, "texts layers tokens d"]:
    """Return block outputs (float32) at each query's last token and, if pooled, their mean over its text."""
    decoder, queries = scorer.decoder, scorer.queries(texts)
    spans = torch.tensor(list(_spans(scorer, texts, queries))) if pooled and texts else None
    states = torch.empty(len(queries), len(layers), 2 if pooled else 1, decoder.d_model)

    def run(batch: Batch) -> Tensor:
        capture = CapturePooled(layers, spans)
        decoder.forward(batch, edit=capture)
        return torch.stack(capture.captured, 1)

    with decoder.frozen(), torch.no_grad():
        for batch, captured in decoder.run_batches(queries, run):
            states[list(batch.rows)] = captured
    return states


def _spans(scorer: LabelScorer, texts: Sequence[str], queries: Sequence[Ids]) -> Iterator[tuple[int, int]]:
    """Yield the (first, end) token indices of each text in its query.

    A token that overlaps the text and the template counts as text. The end is counted from the end of the
    query, since a long text was truncated.
    """
    encoder, template, suffix = scorer.decoder.encoder, scorer.task.template, scorer.labels.query_suffix
    # characters of the template before and after the text
    head, tail = len(template.opening + template.head), len(template.middle + suffix)
    for text, ids in zip(texts, queries, strict=True):
        prompt = template.query(encoder.escape(text)) + suffix
        offsets = encoder.spans(prompt)
        before = sum(end <= head for _, end in offsets)
        after = sum(start >= len(prompt) - tail for start, _ in offsets)
        first = len(encoder.leading_ids) + before
        yield first, max(first + 1, len(ids) - after)


@dataclass(frozen=True)
class ProbePredictor(ClassifierPredictor):
    """The fitted classifier, with the hyperparameters that were chosen."""

    choice: Choice
