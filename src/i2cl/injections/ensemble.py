"""Fit experts beside an injection, and the weights of the log-linear pool of all members.

Beyond the paper. The weights are a maximum a posteriori estimate from predictions on rows that the members
were not fitted to. Their prior is normal, restricted to weights of at least 0, so a few rows leave them near
the typical weights of other tasks, and many can set the weight of a useless member to 0. The log-loss of the
pool is convex in the weights. A weight is an inverse temperature: a pool of one member is temperature
scaling. In a multi-label task every pair of a row and a label is a row with two labels: no or yes.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field

from i2cl import encoders
from i2cl.core.experts import EXPERTS, LLM, EmbeddingsExpert, StatesExpert, TextExpert, TfidfExpert
from i2cl.core.injection import DEFAULT_THRESHOLD, Injection, LabelHead
from i2cl.core.language import LanguageWarning, knows_language
from i2cl.encoders import EmbeddingsConfig
from i2cl.errors import I2CLError
from i2cl.injections.temperature import MIN_LOG_PROB, Labels, Scores, log_softmax
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

MIN_WEIGHT = 0.001  # practically 0; its inverse is the highest temperature
WEIGHT_FOLDS = 10  # folds of the rows that weights are fitted on, to evaluate them
MEMBERS = (LLM, *EXPERTS)
TEXT_EXPERTS = (EmbeddingsExpert.name, TfidfExpert.name)
STATES_DEPTH = 0.93  # of the block whose input the expert on hidden states sees


class WeightPrior(NamedTuple):
    """Normal prior of a member's weight, restricted to weights of at least 0."""

    mean: float
    std: float


EXPERT_PRIORS: Mapping[str, WeightPrior] = MappingProxyType(
    {
        StatesExpert.name: WeightPrior(0.35, 0.5),
        EmbeddingsExpert.name: WeightPrior(0.8, 0.9),
        TfidfExpert.name: WeightPrior(0.5, 0.9),
    }
)
"""Priors of the experts. The best weights of the text experts on eleven tasks are between 0 and 2.3."""


def _names(value: Any) -> Any:
    """Split a string of names at commas."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


class EnsembleConfig(Settings):
    """Which experts a fit uses.

    Attributes:
        experts: names of the members. Default: the LLM, character n-grams, and a sentence encoder if one is
            given or needs no download. ``"states"``, hidden states of the LLM, needs ``"llm"``.
        encoder: the sentence encoder: ``minilm``, a folder of sentence-transformers, or a hub id.
        embeddings_c: scikit-learn's ``C`` of the classifier on its embeddings.
    """

    experts: Annotated[tuple[str, ...] | None, BeforeValidator(_names)] = None
    encoder: str | None = Field(None, min_length=1)
    embeddings_c: float = Field(10.0, gt=0)

    @classmethod
    def take_from(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split off the options of an ensemble from others. Raises I2CLError on an invalid value."""
        own = {name: value for name, value in options.items() if name in cls.model_fields}
        return cls(**own), {name: value for name, value in options.items() if name not in own}

    @classmethod
    def of(cls, injection: Injection) -> Self:
        """Return the experts of an injection, and the options that they were fitted with."""
        head = injection.head
        stored = {name: value for name, value in injection.settings.items() if name in cls.model_fields}
        encoder = None if head.embeddings is None else head.embeddings.encoder
        return cls(**stored | {"experts": head.members, "encoder": encoder})

    @property
    def uses_llm(self) -> bool:
        """Whether the LLM is one of the experts."""
        return self.experts is None or LLM in self.experts

    @property
    def embeddings(self) -> EmbeddingsConfig | None:
        """Settings of the sentence encoder; None if none is given and none needs no download."""
        encoder = self.encoder or encoders.local_encoder()
        return None if encoder is None else EmbeddingsConfig(encoder=encoder, embeddings_c=self.embeddings_c)

    def members(self) -> tuple[str, ...]:
        """Return the names of the members, the LLM first if it is one of them.

        Raises I2CLError on an unknown name, or if a named encoder is missing.
        """
        if self.experts is None:
            names = (LLM, *([EmbeddingsExpert.name] if self.embeddings else []), TfidfExpert.name)
            return tuple(name for name in MEMBERS if name in names)
        if unknown := [name for name in self.experts if name not in MEMBERS]:
            raise I2CLError(f"unknown expert {unknown[0]!r}: choose from {', '.join(MEMBERS)}")
        if not self.experts:
            raise I2CLError(f"experts is empty: choose from {', '.join(MEMBERS)}")
        if StatesExpert.name in self.experts and LLM not in self.experts:
            raise I2CLError(
                f"the expert {StatesExpert.name!r} sees states of the LLM: add {LLM!r} to experts"
            )
        if EmbeddingsExpert.name in self.experts:
            encoders.encoder_source(self.embeddings.encoder if self.embeddings else encoders.MINILM)
        return tuple(name for name in MEMBERS if name in self.experts)

    def text_experts(self, texts: Sequence[str], device: str) -> tuple[str, ...]:
        """Return the `members` that see the text alone.

        The default encoder is left out if it does not support the language of the texts.

        Emits a `LanguageWarning` if the encoder is left out. Raises I2CLError as `members`.

        Args:
            texts: samples of the language.
            device: device of the sentence encoder.
        """
        names = tuple(name for name in self.members() if name in TEXT_EXPERTS)
        if EmbeddingsExpert.name not in names or self.experts is not None or self.encoder is not None:
            return names
        name = encoders.local_encoder() or encoders.HUB_ID
        if knows_language(encoders.frozen_encoder(name, device).tokenizer, texts):
            return names
        message = f"the sentence encoder {name} hardly knows the language of these texts and is left out"
        hint = "name a multilingual one with --set encoder=NAME (encoder=NAME in Python)"
        warnings.warn(f"{message}: {hint}", LanguageWarning, stacklevel=2)
        return tuple(name for name in names if name != EmbeddingsExpert.name)


def plain_injection(decoder: Decoder, task: Task, demonstrations: Examples, seed: int = 0) -> Injection:
    """Return an injection that leaves the model unchanged, for a task that is fitted without the LLM."""
    shape = (decoder.layers, 2)
    return Injection(
        context=torch.zeros(*shape, decoder.d_model),
        coefficients=torch.tensor([0.0, 1.0]).expand(*shape, 2),
        task=task.without_data(),
        base=decoder.base,
        head=LabelHead(thresholds=(DEFAULT_THRESHOLD,) * len(task.labels) if task.multi_label else None),
        seed=seed,
        demonstrations=len(demonstrations),
    )


def fit_ensemble(
    injection: Injection,
    config: EnsembleConfig,
    llm: WeightPrior,
    demonstrations: Examples,
    device: str,
    progress: Progress | None = None,
) -> Injection:
    """Fit text experts, and pool an injection with them at the prior means of the members' weights.

    Args:
        injection: the fitted injection; without the LLM, the `plain_injection`.
        config: which experts.
        llm: prior of the LLM's weight.
        demonstrations: labelled examples, with their weights.
        device: device of the sentence encoder.
        progress: called as texts are embedded.

    Returns:
        The ensemble; the LLM alone if it is the only member, or if a label has no demonstration, which text
        experts could not predict.

    Raises:
        I2CLError: if a package or the encoder is missing, a text is empty, or a label has no demonstration
            and the LLM is left out.
    """
    task, names = injection.task, config.text_experts([example.text for example in demonstrations], device)
    present = {label for example in demonstrations for label in example.ids}
    if missing := [word for label, word in enumerate(task.labels) if label not in present]:
        if config.uses_llm:
            return injection.llm_alone()
        raise I2CLError(f"no example is labelled {missing[0]!r}, which text experts need: add one")
    if not names:
        return injection.llm_alone()
    experts = tuple(fit_expert(name, config, task, demonstrations, device, progress) for name in names)
    weights = (llm.mean if config.uses_llm else 0.0, *(EXPERT_PRIORS[name].mean for name in names))
    return injection.with_head(experts=experts, expert_weights=weights)


def with_states_expert(
    injection: Injection, decoder: Decoder, llm: WeightPrior, demonstrations: Examples
) -> Injection:
    """Fit an expert on hidden states, and add it to an injection at the prior mean of its weight.

    Args:
        injection: the fitted injection, with its text experts if any.
        decoder: its model.
        llm: prior of the LLM's weight.
        demonstrations: labelled examples, with their weights.

    Returns:
        The ensemble; the same injection if a label has no demonstration, which the expert could not predict.
    """
    task, head = injection.task, injection.head
    if len({label for example in demonstrations for label in example.ids}) < len(task.labels):
        return injection
    started, last = time.perf_counter(), decoder.layers - 1
    layer = min(last, round(STATES_DEPTH * decoder.layers))
    _, states = injection.scores_and_states(decoder, [example.text for example in demonstrations], layer)
    expert = StatesExpert.fit(states, layer, task, demonstrations)
    expert = replace(expert, fit_seconds=time.perf_counter() - started)
    of_llm, *others = head.expert_weights or (llm.mean,)
    weights = (of_llm, EXPERT_PRIORS[expert.name].mean, *others)
    return injection.with_head(experts=(expert, *head.experts), expert_weights=weights)


def fit_expert(
    name: str,
    config: EnsembleConfig,
    task: Task,
    demonstrations: Examples,
    device: str,
    progress: Progress | None = None,
) -> TextExpert:
    """Fit a text expert by its name, and time the fit. Raises I2CLError as `fit_ensemble`."""
    started = time.perf_counter()
    expert: TextExpert
    if name == TfidfExpert.name:
        expert = TfidfExpert.fit(task, demonstrations)
    else:
        embeddings = config.embeddings or EmbeddingsConfig(embeddings_c=config.embeddings_c)
        expert = EmbeddingsExpert.fit(embeddings, task, demonstrations, device, progress)
    return replace(expert, fit_seconds=time.perf_counter() - started)


def likely_weights(
    log_probs: Float[np.ndarray, "members rows labels"], gold: Labels, priors: Sequence[WeightPrior]
) -> tuple[float, ...]:
    """Return the maximum a posteriori weights of a log-linear pool.

    They minimize the summed log-loss plus ``(weight - mean) ** 2 / (2 * std ** 2)`` of each member.

    Args:
        log_probs: log-probabilities of the members on rows that they were not fitted to.
        gold: index of the correct label of each row.
        priors: prior of each member's weight.
    """
    from scipy.optimize import minimize

    means, stds = np.array(priors, float).T
    rows, clipped = np.arange(len(gold)), np.maximum(np.asarray(log_probs, float), MIN_LOG_PROB)

    def objective(weights: Float[np.ndarray, " members"]) -> tuple[float, Float[np.ndarray, " members"]]:
        pooled = log_softmax(np.tensordot(weights, clipped, 1))
        expected = (np.exp(pooled) * clipped).sum(2)
        gradient = (expected - clipped[:, rows, gold]).sum(1)
        deviation = (weights - means) / stds
        loss = (deviation**2).sum() / 2 - pooled[rows, gold].sum()
        return float(loss), gradient + deviation / stds

    bounds = [(MIN_WEIGHT, 1 / MIN_WEIGHT)] * len(means)
    result = minimize(objective, means, jac=True, method="L-BFGS-B", bounds=bounds)
    return tuple(result.x.tolist())


def cross_fitted(
    log_probs: Float[np.ndarray, "members rows labels"],
    gold: Labels,
    priors: Sequence[WeightPrior],
    folds: int = WEIGHT_FOLDS,
    groups: Labels | None = None,
) -> Scores:
    """Return the pool's log-probabilities of each row, with weights fitted to the rows of the other folds.

    Folds are stratified by label if every label has at least one row per fold. With 0 folds, a single row or
    a single group, the weights are the means of the priors.

    Args:
        log_probs: log-probabilities of the members on rows that they were not fitted to.
        gold: index of the correct label of each row.
        priors: prior of each member's weight.
        folds: maximum number of folds.
        groups: group of each row: rows of one group stay in one fold, and folds are not stratified.
    """
    from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold

    folds = min(folds, len(np.unique(np.arange(len(gold)) if groups is None else groups)))
    if folds < 2:
        return pool_log_probs(log_probs, [prior.mean for prior in priors])
    can_stratify = np.unique(gold, return_counts=True)[1].min() >= folds
    splitter_class = GroupKFold if groups is not None else StratifiedKFold if can_stratify else KFold
    splitter = splitter_class(folds, shuffle=True, random_state=0)
    pooled = np.empty(log_probs.shape[1:])
    for train, test in splitter.split(gold, gold, groups):
        weights = likely_weights(log_probs[:, train], gold[train], priors)
        pooled[test] = pool_log_probs(log_probs[:, test], weights)
    return pooled


def pool_log_probs(log_probs: Float[np.ndarray, "members rows labels"], weights: Sequence[float]) -> Scores:
    """Return the log-probabilities of a log-linear pool, normalized over the labels."""
    return log_softmax(np.tensordot(weights, np.maximum(log_probs, MIN_LOG_PROB), 1))
