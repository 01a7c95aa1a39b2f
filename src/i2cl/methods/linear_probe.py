"""Linear probe: logistic regression on the model's states, what a practitioner would try first.

Which states, and how strong the penalty is, is chosen by folds of the demonstrations alone. What it is chosen
from, and what is taken with one demonstration a class, was settled on training rows with SmolLM2-135M.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from i2cl.errors import I2CLError, needs
from i2cl.methods.base import ClassifierPredictor, Method, head_cost, require_two_classes
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, States
from i2cl.models.scoring import Progress, Questions
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

# The query's last token, the mean over the text's tokens, or one behind the other.
Tokens = Literal["last", "mean", "both"]
FOLDS = 5  # at most; no more than the rarest class has demonstrations
DEPTHS = (0.8, 0.93, 1.0)  # layers that are tried, as shares of the way from the first block to the last
STRENGTHS = (0.01, 0.1, 1.0)  # of the penalty, inverse, that are tried


class Choice(NamedTuple):
    """What a probe is made with: a block's output, at which tokens, and its ``C``."""

    layer: int
    tokens: Tokens
    c: float


class ProbeConfig(Settings):
    """The states and the classifier; ``folds`` chooses by stratified folds of the demonstrations.
    A negative layer counts from the last; tokens are the query's ``last``, the ``mean`` over the text's, or
    ``both``; ``probe_c`` is scikit-learn's ``C``.
    """

    probe_layer: int | Literal["folds"] = "folds"
    probe_tokens: Literal["folds", "last", "mean", "both"] = "folds"
    probe_c: Annotated[float, Field(gt=0)] | Literal["folds"] = "folds"


@dataclass(frozen=True)
class LinearProbe(Method):
    """Standardised block outputs of one pass, then scikit-learn's logistic regression."""

    name: ClassVar[str] = "linear_probe"
    summary: ClassVar[str] = "logistic regression on states chosen by inner folds"
    needs: ClassVar[str] = "demonstrations, scikit-learn"
    formula: ClassVar[str] = "(D+1) per label, twice that of both tokens"
    settings = (ProbeConfig,)
    config: ProbeConfig = field(default_factory=ProbeConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "ProbePredictor":
        """Fit on the demonstrations' states. Raises I2CLError without scikit-learn or demonstrations of two
        classes, if the model has no such layer, or if its tokenizer cannot tell which tokens are the text's.
        """
        needs(self.name, "sklearn", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        questions = Questions(decoder, task)
        choices = self._choices(decoder)
        layers = tuple(sorted({choice.layer for choice in choices}))
        pooled = any(choice.tokens != "last" for choice in choices)
        states = query_states(questions, [example.text for example in demonstrations], layers, pooled=pooled)
        labels = np.array([example.label for example in demonstrations])
        of_layer = dict(zip(layers, states.unbind(1), strict=True))
        best = _best({one: _features(of_layer[one.layer], one.tokens) for one in choices}, labels, seed)
        model = _classifier(best.c).fit(_features(of_layer[best.layer], best.tokens), labels)

        def features(texts: Sequence[str], _progress: Progress | None) -> Float[np.ndarray, "texts _"]:
            states = query_states(questions, texts, [best.layer], pooled=best.tokens != "last")
            return _features(states[:, 0], best.tokens)

        return ProbePredictor(features, model, len(task.labels), head_cost(model[-1]), best)

    def _choices(self, decoder: Decoder) -> list[Choice]:
        """All that the folds choose from; first what is taken without folds: the second of the layers."""
        layer, tokens, c = self.config.probe_layer, self.config.probe_tokens, self.config.probe_c
        if layer != "folds" and not -decoder.layers <= layer < decoder.layers:
            raise I2CLError(f"probe_layer={layer}: the model has {decoder.layers} layers")
        if tokens not in {"folds", "last"} and not decoder.tokenizer.is_fast:
            what = "a fast tokenizer (tokenizer.json), which knows where tokens stand"
            raise I2CLError(f"probe_tokens={tokens} needs {what}: give probe_tokens=last")
        deep = [round(depth * (decoder.layers - 1)) for depth in (DEPTHS[1], *DEPTHS)]
        known: list[Tokens] = ["both", "last", "mean"] if decoder.tokenizer.is_fast else ["last"]
        layers = deep if layer == "folds" else [layer % decoder.layers]
        strengths = [STRENGTHS[1], *STRENGTHS] if c == "folds" else [c]
        each = product(layers, known if tokens == "folds" else [tokens], strengths)
        return list(dict.fromkeys(Choice(*one) for one in each))


def _classifier(c: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=10_000))


def _best(
    features: dict[Choice, Float[np.ndarray, "texts _"]], labels: Int[np.ndarray, " texts"], seed: int
) -> Choice:
    """That with the least log-loss on folds; the first, where there is nothing to choose or no fold."""
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    first, counts = next(iter(features)), np.unique(labels, return_counts=True)[1]
    if len(features) == 1 or counts.min() < 2:
        return first
    folds = StratifiedKFold(min(FOLDS, int(counts.min())), shuffle=True, random_state=seed % 2**32)
    classes = np.searchsorted(np.unique(labels), labels)

    def likelihood(choice: Choice) -> float:
        model = _classifier(choice.c)
        probabilities = cross_val_predict(model, features[choice], labels, cv=folds, method="predict_proba")
        return float(np.log(probabilities[np.arange(len(classes)), classes] + 1e-12).sum())

    return max(features, key=likelihood)


def _features(states: Float[Tensor, "texts tokens d"], tokens: Tokens) -> Float[np.ndarray, "texts _"]:
    """What a classifier is given: of the query's last token, the text's mean, or both."""
    return {"last": states[:, 0], "mean": states[:, -1], "both": states.flatten(1)}[tokens].numpy()


class KeepPooled(Edit):
    """Copies some layers' block outputs, at each query's last token and as the mean over its text.
    ``kept`` has one (batch x tokens x d) tensor a layer, in float32 on the CPU; tokens are 1 without spans.
    """

    site = "hidden"

    def __init__(self, layers: Sequence[int], spans: Int[Tensor, "queries 2"] | None) -> None:
        self.layers = layers
        self.spans = spans
        self.kept: list[Tensor] = []

    def output(self, layer: int, _index: int, output: States, batch: Batch) -> None:
        """Copy them."""
        if layer not in self.layers:
            return
        states = output.float()
        kept = [states[torch.arange(len(states), device=states.device), batch.last.to(states.device)]]
        if self.spans is not None:
            spans = self.spans[list(batch.rows)].to(states.device)
            tokens = torch.arange(states.shape[1], device=states.device)
            inside = (tokens >= spans[:, :1]) & (tokens < spans[:, 1:])
            kept.append((states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True))
        self.kept.append(torch.stack(kept, 1).cpu())


def query_states(
    questions: Questions, texts: Sequence[str], layers: Sequence[int], *, pooled: bool
) -> Float[Tensor, "texts layers tokens d"]:
    """Block outputs (float32) at each query's last token and, if pooled, their mean over its text."""
    decoder, queries = questions.decoder, questions.queries(texts)
    spans = torch.tensor(list(_spans(questions, texts, queries))) if pooled and texts else None
    states = torch.empty(len(queries), len(layers), 2 if pooled else 1, decoder.d_model)

    def run(batch: Batch) -> Tensor:
        keep = KeepPooled(layers, spans)
        decoder.forward(batch, edit=keep)
        return torch.stack(keep.kept, 1)

    with decoder.frozen(), torch.no_grad():
        for batch, kept in decoder.run_batches(queries, run):
            states[list(batch.rows)] = kept
    return states


def _spans(questions: Questions, texts: Sequence[str], queries: Sequence[Ids]) -> Iterator[tuple[int, int]]:
    """First token of each text in its query, and the one behind its last; a token of two parts is the text's.
    What follows a text is counted from the end, since a long one was cut there.
    """
    encoder, template, line = questions.decoder.encoder, questions.task.template, questions.labels.line
    start, behind = len(template.opening + template.head), len(template.middle + line)
    for text, ids in zip(texts, queries, strict=True):
        prompt = template.query(encoder.literal(text)) + line
        places = encoder.spans(prompt)
        before = sum(right <= start for _, right in places)
        after = sum(left >= len(prompt) - behind for left, _ in places)
        first = len(encoder.front) + before
        yield first, max(first + 1, len(ids) - after)


@dataclass(frozen=True)
class ProbePredictor(ClassifierPredictor):
    """Keeps the fitted classifier alone, in its own precision."""

    choice: Choice
