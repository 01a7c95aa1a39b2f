"""What the methods built on the PEFT library share: training, and prediction with the adapter put on."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from i2cl.adapters import Adapter, adapted, fit_adapter
from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.methods.base import Method
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.scoring import Progress
from i2cl.tasks import Example, Task
from i2cl.training import TrainConfig

if TYPE_CHECKING:
    from peft import PeftConfig


class AdapterMethod(Method):
    """Trains an adapter on the demonstrations as single queries, with the schedule of the paper."""

    needs: ClassVar[str] = "demonstrations, the package peft"
    formula: ClassVar[str] = "as trained"
    training: TrainConfig

    @abstractmethod
    def config(self, decoder: Decoder) -> "PeftConfig":
        """The adapter for this model.

        Raises:
            I2CLError: if the model has nothing that it can adapt.
        """

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> "AdapterPredictor":
        """Train, keep the adapter's tensors, take it off again.

        Raises:
            I2CLError: without the package peft, or on a loss that is not finite.
        """
        if find_spec("peft") is None:
            raise I2CLError(f"{self.name} needs the package peft: pip install 'i2cl[peft]'")
        adapter = fit_adapter(decoder, task, demonstrations, self.config(decoder), self.training, seed)
        return AdapterPredictor(decoder, task, adapter)


@dataclass(frozen=True)
class AdapterPredictor:
    """The model while it wears the adapter; between calls it is as it was."""

    decoder: Decoder
    task: Task
    adapter: Adapter
    held_out: ClassVar[int] = 0

    @property
    def trainable_parameters(self) -> int:
        """All of the adapter."""
        return self.adapter.values

    @property
    def cached_values(self) -> int:
        """All of the adapter."""
        return self.adapter.values

    @property
    def cached_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.adapter.state.values())

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word with the adapter on."""
        with adapted(self.decoder, self.adapter.config, self.adapter.state) as wearing:
            return PromptPredictor(wearing, self.task).scores(texts, progress)
