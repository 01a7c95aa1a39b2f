"""Linear probe: logistic regression on the query's last state, what a practitioner would try first."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from i2cl.errors import I2CLError, needs
from i2cl.methods.base import Cost, Method, require_two_classes
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, Questions
from i2cl.tasks import Example, Task


class ProbeConfig(BaseModel):
    """The classifier.

    Attributes:
        probe_layer: block whose output is used; negative counts from the last.
        probe_c: inverse strength of the L2 penalty (scikit-learn's ``C``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    probe_layer: int = -1
    probe_c: float = Field(1.0, gt=0)


@dataclass(frozen=True)
class LinearProbe(Method):
    """Standardised block output at the query's last token, then scikit-learn's logistic regression."""

    name: ClassVar[str] = "linear_probe"
    summary: ClassVar[str] = "logistic regression on the query's last state"
    needs: ClassVar[str] = "demonstrations, scikit-learn"
    formula: ClassVar[str] = "(D+1) per label"
    settings = (ProbeConfig,)

    config: ProbeConfig = field(default_factory=ProbeConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> "ProbePredictor":
        """Fit on the demonstrations' states.

        Raises:
            I2CLError: without scikit-learn or demonstrations of two classes, or if the model has no such
                layer.
        """
        needs(self.name, "sklearn", "sklearn")
        require_two_classes(self.name, task, demonstrations)
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        if not -decoder.layers <= self.config.probe_layer < decoder.layers:
            raise I2CLError(f"probe_layer={self.config.probe_layer}: the model has {decoder.layers} layers")
        questions = Questions(decoder, task)
        texts = [example.text for example in demonstrations]
        states = last_states(questions, texts, self.config.probe_layer)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=self.config.probe_c, max_iter=10_000))
        model.fit(states.numpy(), [example.label for example in demonstrations])
        weights = model[-1].coef_, model[-1].intercept_
        values, size = sum(one.size for one in weights), sum(one.nbytes for one in weights)
        return ProbePredictor(questions, self.config.probe_layer, model, Cost(values, values, size))


def last_states(questions: Questions, texts: Sequence[str], layer: int) -> Float[Tensor, "texts d"]:
    """Block output of one layer at each query's last token, in float32."""
    decoder, queries = questions.decoder, questions.queries(texts)
    states = torch.empty(len(queries), decoder.d_model)
    for batch, captured in decoder.run_batches(queries, partial(decoder.capture, site="hidden")):
        states[list(batch.rows)] = captured[:, layer, 0]
    return states


@dataclass(frozen=True)
class ProbePredictor:
    """Scores by the fitted classifier, which is all that is kept, in its own precision."""

    questions: Questions
    layer: int
    model: Any
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label; minus infinity for one without demonstrations."""
        scores = torch.full((len(texts), len(self.questions.task.labels)), -torch.inf)
        if not texts:
            return scores
        states = last_states(self.questions, texts, self.layer)
        found = torch.from_numpy(self.model.predict_log_proba(states.numpy())).float()
        scores[:, self.model.classes_.tolist()] = found
        return scores
