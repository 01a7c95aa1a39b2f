"""Label scores of the demonstrations as a function of the parameters of anchored calibration.

Beyond the paper. The parameters are a vector for every sublayer and, for word-level scoring, how much each
word counts. In a batch every row gets its own copy of the vectors, so one backward pass yields the
derivatives for one wrong label of each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from i2cl.core.plan import MAX_UNIT_EXAMPLES, FitSize
from i2cl.core.recipe import ACTIVE_SUBLAYERS, ExtractConfig, Sublayers
from i2cl.core.weights import example_weights, mean_cross_entropy
from i2cl.core.word_weights import WordWeights
from i2cl.errors import I2CLError
from i2cl.models.batching import Batch
from i2cl.models.edits import AffineEdit
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.scoring import LabelScorer, score, stack_rows
from i2cl.models.training import Backward
from i2cl.tasks import Example

ROW_COPIES = 4  # copies of a row's vectors during a backward pass
MIN_RELATIVE_RMS = 1e-3  # lower bound of a sublayer's RMS derivative, relative to the mean of all sublayers
SLICE = 2**14  # columns of the Jacobian that are processed at once
WORD_SHARE = 0.3  # prior variance of label scores due to word weights, relative to the one due to vectors


class Solution(NamedTuple):
    """Result of a solver."""

    parameters: Float[Tensor, " parameters"]  # vectors in their unit, then word weights, if any
    tau: float | None  # strength of the prior; None if prior_std is 0 or no sublayer moves the scores
    # Mean cross-entropy in nats, without the prior. Gauss-Newton: at the start and after each step. AdamW: at
    # the start, the average of each epoch, and at the end.
    history: tuple[float, ...]


class Linearization(NamedTuple):
    """Label scores linearized around some parameters.

    A pair is an example and one of its wrong labels; its difference is the wrong label's score minus the gold
    label's.
    """

    differences: Float[Tensor, "n wrong_labels"]  # of the pairs, in nats, float64
    jacobian: Float[Tensor, "n_pairs parameters"]  # derivatives of the differences
    example_weights: Float[Tensor, " n"] | None = None  # weights of the examples' losses; None: 1 each


@dataclass(eq=False)
class Objective:
    """The loss of anchored calibration as a function of its parameters.

    This class has the cross-entropy among the labels; `i2cl.core.multi_label` has the logistic loss of each
    label.

    Attributes:
        scorer: the task on the frozen model.
        demonstrations: labelled examples.
        sublayers: which sublayers have a vector.
        unit: factor from parameters to vectors; set by `linearize_start` or `set_unit_by_gold`.
        word_parameters: the word weights, once `linearize_start` or `fit_words` has added them; None
            without word-level scoring.
    """

    scorer: LabelScorer
    demonstrations: tuple[Example, ...]
    sublayers: Sublayers

    def __post_init__(self) -> None:
        decoder = self.scorer.decoder
        self.queries = self.scorer.queries([example.text for example in self.demonstrations])
        self.rows = range(len(self.queries))
        self.gold = torch.tensor([example.label for example in self.demonstrations])
        self.example_weights = example_weights(self.demonstrations)  # None: 1 each
        weights = self.example_weights
        self.total_weight = len(self.gold) if weights is None else weights.sum().item()
        self.hook_point = ExtractConfig(sublayers=self.sublayers).hook_point
        active = torch.tensor(ACTIVE_SUBLAYERS[self.sublayers]).float()[:, None]
        self.unit = active.expand(decoder.layers, -1, decoder.d_model)
        self.word_parameters: WordWeights | None = None

    @property
    def vector_size(self) -> int:
        """Number of parameters of the vectors."""
        return self.unit.numel()

    @property
    def size(self) -> FitSize:
        """Size of the fit."""
        labels = self.scorer.labels
        words = len(labels.tokens) * len(labels.sequences) if labels.word_tokens else 0
        return FitSize(len(self.queries), len(labels.sequences), self.vector_size + words, words > 0)

    @property
    def has_last_vector(self) -> bool:
        """Whether the last sublayer, followed only by the final norm and the LM head, has a vector."""
        return self.sublayers in {"both", "mlp"}

    def vectors(self, parameters: Float[Tensor, " parameters"]) -> Float[Tensor, "layers sublayers d"]:
        """Convert parameters to the vectors of all sublayers; zero for sublayers without a vector."""
        return self.unit * parameters[: self.vector_size].view_as(self.unit)

    def edit(self, parameters: Float[Tensor, " parameters"]) -> AffineEdit:
        """Return the edit that adds the vectors."""
        vectors = self.vectors(parameters)
        return AffineEdit(vectors, torch.ones(vectors.shape[:2]), self.hook_point)

    def word_weights(self, parameters: Float[Tensor, " parameters"]) -> Float[Tensor, "tokens labels"] | None:
        """Convert parameters to word weights; None without word-level scoring."""
        if self.word_parameters is None:
            return None
        return self.word_parameters.at(parameters[self.vector_size :].view_as(self.word_parameters.start))

    def labels(self, parameters: Float[Tensor, " parameters"]) -> LabelTokens:
        """Return the label tokens with the word weights of these parameters, if any."""
        weights, labels = self.word_weights(parameters), self.scorer.labels
        return labels if weights is None else labels.with_word_weights(weights)

    def scores(self, parameters: Float[Tensor, " parameters"]) -> Float[Tensor, "n labels"]:
        """Compute the label scores of all demonstrations."""
        labels, edit = self.labels(parameters), self.edit(parameters)
        return score(self.scorer.decoder, self.queries, labels, edit=edit)

    def linearize_start(self) -> tuple[Linearization, Float[Tensor, "n labels"], float]:
        """Linearize around the plain model, and set the units of the vectors and of the word weights.

        Returns:
            The linearization, the label scores, and the variance of the label scores under a unit prior.

        Raises:
            I2CLError: if scores or derivatives are not finite.
        """
        size, labels = self.size, self.scorer.labels
        jacobian = torch.empty(size.examples, size.labels - 1, size.parameters)
        vector_columns = jacobian[..., : self.vector_size]
        zeros = torch.zeros(size.parameters)
        tokens = self._differentiate(jacobian, zeros, self.rows, self._directions())
        factor, variance = self._set_unit(self._score_variance(vector_columns))
        vector_columns.mul_(factor)
        if labels.word_tokens:
            self.fit_words(tokens, variance)
            self._differentiate_words(jacobian, tokens, self.rows)
        scores = self.start_scores(tokens)
        return self._linearization(scores, jacobian), scores, variance

    def start_scores(self, tokens: Float[Tensor, "n tokens"]) -> Float[Tensor, "n labels"]:
        """Return the label scores at the start, under the plain model, given its `token_scores`."""
        return self.scorer.labels.scores_from_tokens(tokens)

    def label_scores(
        self, tokens: Float[Tensor, "n tokens"], parameters: Float[Tensor, " parameters"]
    ) -> Float[Tensor, "n labels"]:
        """Compute label scores from the log-probabilities or logits of the labels' tokens."""
        return self.labels(parameters).scores_from_tokens(tokens)

    def losses(self, scores: Float[Tensor, "n labels"]) -> Float[Tensor, " n"]:
        """Return the loss of each demonstration, in nats."""
        return cross_entropy(scores, self.gold, reduction="none")

    def mean_loss(self, scores: Float[Tensor, "chosen labels"], rows: Sequence[int] | None = None) -> float:
        """Return the weighted mean loss of some demonstrations, by default of all, in nats."""
        rows = list(self.rows if rows is None else rows)
        return mean_cross_entropy(
            scores, self.gold[rows], None if self.example_weights is None else self.example_weights[rows]
        )

    def batch_loss(self, scores: Float[Tensor, "chosen labels"], rows: Sequence[int]) -> Float[Tensor, ""]:
        """Return the summed loss of some demonstrations, in nats; weights count relative to their mean."""
        gold = self.gold[rows].to(scores.device)
        if self.example_weights is None:
            return cross_entropy(scores, gold, reduction="sum")
        return self.relative_weights(rows, scores) @ cross_entropy(scores, gold, reduction="none")

    def relative_weights(self, rows: Sequence[int], like: Tensor) -> Float[Tensor, " chosen"]:
        """Return the weights of some demonstrations, divided by the mean of all, in the dtype of ``like``."""
        if self.example_weights is None:
            return like.new_ones(len(rows))
        return self.example_weights[rows].to(like) * (len(self.queries) / self.total_weight)

    def _directions(self) -> Float[Tensor, "n wrong_labels labels"]:
        """Return the derivative of each pair's difference with respect to the label scores."""
        return score_directions(self.gold, len(self.scorer.labels.sequences))

    def _score_variance(
        self, jacobian: Float[Tensor, "n wrong_labels parameters"]
    ) -> Float[Tensor, " parameters"]:
        return score_variance(jacobian, self.example_weights)

    def _linearization(
        self, scores: Float[Tensor, "n labels"], jacobian: Float[Tensor, "n wrong_labels parameters"]
    ) -> Linearization:
        return Linearization(
            score_differences(scores, self.gold), jacobian.flatten(0, 1), self.example_weights
        )

    def fit_words(self, tokens: Float[Tensor, "n tokens"], variance: float | None = None) -> None:
        """Add word weights to the parameters.

        Args:
            tokens: the `token_scores` under the plain model.
            variance: prior variance of the label scores due to the vectors. If given, the unit of the word
                weights is set so that they add `WORD_SHARE` of it. AdamW, whose steps do not depend on the
                unit of a gradient, keeps the unit of a single sublayer.
        """
        self.word_parameters = WordWeights(self.scorer.labels, tokens)
        if variance is not None:
            self.word_parameters.unit *= (WORD_SHARE * variance / self.word_parameters.start.numel()) ** 0.5

    def set_unit_by_gold(self, max_examples: int = MAX_UNIT_EXAMPLES) -> float:
        """Set the unit from the gold labels of up to ``max_examples`` demonstrations.

        A cheap estimate of `score_variance`: with balanced classes the gold label stands in for a label drawn
        at random, so one backward pass per demonstration is enough.

        Returns:
            The variance of the label scores under a unit prior.
        """
        if len(self.queries) > max_examples:
            sample = replace(self, demonstrations=tuple(Random(0).sample(self.demonstrations, max_examples)))
            variance = sample.set_unit_by_gold(max_examples)
            self.unit = sample.unit
            return variance
        directions = self._gold_directions()
        jacobian = torch.empty(len(directions), 1, self.vector_size)
        self._differentiate(jacobian, torch.zeros(self.vector_size), self.rows, directions[:, None])
        return self._set_unit(weighted_mean(jacobian[:, 0].square_(), self.example_weights))[1]

    def _gold_directions(self) -> Float[Tensor, "n labels"]:
        """Return the derivative of the gold label's score minus the mean score, for each demonstration."""
        labels = len(self.scorer.labels.sequences)
        return one_hot(self.gold, labels).float() - 1 / labels

    def _set_unit(
        self, variances: Float[Tensor, " parameters"]
    ) -> tuple[Float[Tensor, " parameters"], float]:
        """Set the unit to `balanced_unit`.

        Returns:
            The factor by which the unit changed, and the variance of the label scores under a unit prior.
        """
        factor = balanced_unit(variances, self.unit.shape[-1])
        self.unit = self.unit * factor.view_as(self.unit)
        return factor, float((variances * factor.square()).sum())

    def relinearize(
        self,
        point: Linearization,
        parameters: Float[Tensor, " parameters"],
        scores: Float[Tensor, "n labels"],
        chosen: Sequence[int],
    ) -> Linearization:
        """Linearize again around other parameters, whose label scores are known.

        Only the ``chosen`` demonstrations are differentiated again. Overwrites ``point.jacobian`` in place.
        """
        jacobian = point.jacobian.view(len(self.queries), -1, point.jacobian.shape[1])
        if chosen:
            tokens = self._differentiate(jacobian, parameters, chosen, self._directions())
            self._differentiate_words(jacobian, tokens, chosen)
        return self._linearization(scores, jacobian)

    def _differentiate(
        self,
        jacobian: Float[Tensor, "n pairs parameters"],
        parameters: Float[Tensor, " parameters"],
        rows: Sequence[int],
        directions: Float[Tensor, "n pairs labels"],
    ) -> Float[Tensor, "rows tokens"]:
        """Compute the derivatives of the pairs of some rows with respect to the vectors.

        Args:
            jacobian: receives the derivatives, in the columns of the vectors.
            parameters: where to differentiate.
            rows: the demonstrations to differentiate.
            directions: derivative of each pair's difference with respect to the label scores.

        Returns:
            The `token_scores` of the rows.

        Raises:
            I2CLError: if a derivative or a token score is not finite.
        """
        decoder, labels = self.scorer.decoder, self.labels(parameters)

        def differentiate(batch: Batch) -> Tensor:
            chosen = [rows[index] for index in batch.rows]
            vectors, edit = self._row_vectors(parameters, batch.rows, len(rows))
            backward = Backward([vectors], decoder.model.dtype)
            with torch.enable_grad():
                logits = decoder.forward(batch, edit=edit)[:, 0].float()
                tokens = logits[:, list(labels.tokens)]
                scores = labels.scores_from_tokens(tokens)
                for pair in range(directions.shape[1]):
                    decoder.pause()
                    (gradient,) = backward.gradients((scores * directions[chosen, pair].to(scores)).sum())
                    jacobian[chosen, pair, : self.vector_size] = self._chain_unit(gradient)
            return tokens.detach().cpu()

        batches = decoder.run_batches(
            [self.queries[row] for row in rows], differentiate, training=True, row_bytes=self._row_bytes
        )
        tokens = stack_rows((batch.rows, tokens) for batch, tokens in batches)
        _require_finite(tokens, *(jacobian[row, :, : self.vector_size] for row in rows))
        return tokens

    def _differentiate_words(
        self,
        jacobian: Float[Tensor, "n wrong_labels parameters"],
        tokens: Float[Tensor, "rows tokens"],
        rows: Sequence[int],
    ) -> None:
        """Write the derivatives of the pairs of some rows with respect to the word weights, if any."""
        if self.word_parameters is not None:
            directions = self._directions()[list(rows)]
            jacobian[list(rows), :, self.vector_size :] = self.word_parameters.jacobian(tokens, directions)

    @property
    def _row_bytes(self) -> int:
        """Memory of a row's copy of the vectors, its gradient, and the buffers of the backward pass."""
        return 4 * ROW_COPIES * self.vector_size

    def _row_vectors(
        self, parameters: Float[Tensor, " parameters"], rows: Sequence[int], count: int
    ) -> tuple[torch.nn.Parameter, AffineEdit]:
        """Copy the vectors for each row of a batch, so that one backward pass yields a gradient per row.

        Args:
            parameters: of the vectors.
            rows: the rows of the batch.
            count: number of rows in all batches.

        Returns:
            The copies, and the edit that adds to each row its own copy.
        """
        device = self.scorer.decoder.device
        copies = torch.nn.Parameter(self.vectors(parameters).to(device).repeat(len(rows), 1, 1, 1))
        copy_of_row = torch.zeros(count, dtype=torch.long, device=device)
        copy_of_row[list(rows)] = torch.arange(len(rows), device=device)
        scale = torch.ones(copies.shape[:-1], device=device)
        return copies, AffineEdit(copies, scale, self.hook_point, copy_of_row)

    def _chain_unit(self, gradient: Tensor | None) -> Float[Tensor, "batch parameters"]:
        """Convert gradients with respect to the vectors to gradients with respect to the parameters."""
        if gradient is None:
            raise I2CLError("the label scores do not depend on the sublayers: is this the right model?")
        return (self.unit * gradient.cpu()).flatten(1)


def wrong_labels(gold: Int[Tensor, " n"], labels: int) -> Int[Tensor, "n wrong_labels"]:
    """Return every label but the gold one, in order."""
    candidates = torch.arange(labels).expand(len(gold), -1)
    return candidates[candidates != gold[:, None]].view(len(gold), labels - 1)


def score_directions(gold: Int[Tensor, " n"], labels: int) -> Float[Tensor, "n wrong_labels labels"]:
    """Return the derivative of each `score_differences` with respect to the label scores."""
    return (one_hot(wrong_labels(gold, labels), labels) - one_hot(gold, labels)[:, None]).float()


def score_differences(
    scores: Float[Tensor, "n labels"], gold: Int[Tensor, " n"]
) -> Float[Tensor, "n wrong_labels"]:
    """Return each wrong label's score minus the gold label's, in float64."""
    scores = scores.double()
    return scores.gather(1, wrong_labels(gold, scores.shape[1])) - scores.gather(1, gold[:, None])


def score_variance(
    jacobian: Float[Tensor, "n wrong_labels parameters"], weights: Float[Tensor, " n"] | None
) -> Float[Tensor, " parameters"]:
    """Return the variance over labels of the scores' derivatives, averaged over demonstrations.

    This is the diagonal of the Fisher information where all labels are equally probable. A change that all
    label scores share does not count.
    """
    labels = jacobian.shape[1] + 1
    means = []
    for part in jacobian.split(SLICE, dim=2):
        # The gold label's own difference is 0.
        mean, squares = part.sum(1) / labels, part.square().sum(1) / labels
        means.append(weighted_mean(squares - mean.square(), weights))
    return torch.cat(means)


def balanced_unit(
    variances: Float[Tensor, " parameters"], vector_length: int
) -> Float[Tensor, " parameters"]:
    """Return the unit in which all sublayers move the label scores equally.

    Args:
        variances: the `score_variance` of each parameter.
        vector_length: number of consecutive parameters that form a vector and share a unit.
    """
    rms = variances.view(-1, vector_length).mean(1).sqrt().repeat_interleave(vector_length)
    return 1 / rms.clamp_min(MIN_RELATIVE_RMS * rms.mean()) if rms.any() else torch.ones_like(rms)


def weighted_mean(
    values: Float[Tensor, "n parameters"], weights: Float[Tensor, " n"] | None
) -> Float[Tensor, " parameters"]:
    """Return the average over demonstrations."""
    return values.mean(0) if weights is None else (weights / weights.sum()).to(values) @ values


def _require_finite(*values: Tensor) -> None:
    if not all(value.isfinite().all() for value in values):
        raise I2CLError("label scores or their derivatives are not finite: load the model in float32")
