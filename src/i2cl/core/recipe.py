"""Settings of extraction, and of calibration: recipes of the paper, of its released code, and a fast one.

Source: paper, subsections "Context Vectorization" and "Noisy Self-calibration", and appendix "Reproduction
Details".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from i2cl.core.ablations import Positions
from i2cl.core.weights import ClassWeight
from i2cl.errors import I2CLError
from i2cl.models.edits import HookPoint
from i2cl.models.training import Settings, TrainConfig

Sublayers = Literal["both", "mha", "mlp", "hidden"]

# Whether each output of a layer has a vector: the sublayers (mha, mlp), or the block's output alone.
ACTIVE_SUBLAYERS = {"both": (True, True), "mha": (True, False), "mlp": (False, True), "hidden": (True,)}

Formula = Literal["linear", "add", "balance"]

# Changes of each recipe to the defaults, which follow the paper's text. "released" follows its code; "fast"
# takes few passes over all demonstrations at once (speed and accuracy: docs/performance.md).
_RECIPES: dict[str, dict[str, object]] = {
    "paper": {},
    "released": {"draw": "step", "lr_final": 0.0, "warmup": 0.05, "noise_place": "sublayer"},
    "fast": {"optimizer": "lbfgs"},
}
RECIPES = MappingProxyType({name: MappingProxyType(changes) for name, changes in _RECIPES.items()})


def find_recipe(name: str) -> Mapping[str, object]:
    """Return the options that a recipe changes. Raises I2CLError if the name is unknown."""
    if name not in tuple(RECIPES):  # also for a name that is not hashable
        raise I2CLError(f"unknown recipe {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


class ExtractConfig(Settings):
    """How demonstrations become a context vector. Defaults are the paper's.

    Attributes:
        sublayers: whose outputs are captured and later edited: both sublayers, one of them, or each block's
            output, called hidden ("Target Module" ablation).
        token: which token of a demonstration is captured.
        separator: end each demonstration with the template's separator, whose token is then the last one (as
            in the released code behind all published numbers), or with the label.
    """

    sublayers: Sublayers = "both"
    token: Literal["last", "first", "random"] = "last"
    separator: bool = True

    @property
    def hook_point(self) -> HookPoint:
        """Modules to hook for `sublayers`."""
        return "hidden" if self.sublayers == "hidden" else "sublayers"


class CalibrationConfig(TrainConfig):
    """Settings of calibration. Defaults follow the paper's text; `recipe` returns others by name.

    Attributes:
        layers: all, a third of them, or a list of indices ("Target Layer" ablation).
        positions: injected tokens of the query ("Injection Position" ablation).
        formula: ``linear`` lambda v + beta a; ``add`` lambda v + a with lambda > 0; ``balance``
            (lambda v + (1 - lambda) a) beta with beta > 0 ("Injection Formula" ablation).
        noise: gamma, the size of the noise relative to the L2 norm of the signal.
        noise_place: on the residual stream, or on each sublayer's output (released code).
        init_lambda: initial lambda.
        init_beta: initial beta.
        optimizer: AdamW on small batches, or L-BFGS on all demonstrations at once under one draw of the
            noise. L-BFGS ignores epochs, batches, learning rates and weight decay.
        passes: maximum number of evaluations of L-BFGS.
        pull: penalty of L-BFGS in nats per squared distance of the coefficients from their start.
        class_weight: ``"balanced"``, weights of the classes by label word, or None for equal weights of all
            demonstrations (`i2cl.core.weights.apply_class_weight`).
    """

    layers: Literal["all", "early", "middle", "late"] | tuple[int, ...] = "all"
    positions: Positions = "all"
    formula: Formula = "linear"
    noise: float = Field(1e-3, ge=0)
    noise_place: Literal["residual", "sublayer"] = "residual"
    init_lambda: float = 0.1
    init_beta: float = 1.0
    optimizer: Literal["adamw", "lbfgs"] = "adamw"
    passes: int = Field(60, ge=0)
    pull: float = Field(3e-3, ge=0)
    class_weight: ClassWeight = None

    @field_validator("layers", mode="before")
    @classmethod
    def _parse_layers(cls, value: object) -> object:
        """Parse ``"0,3,5"`` from the command line."""
        if isinstance(value, str) and value.replace(",", "").replace(" ", "").isdigit():
            return tuple(int(part) for part in value.split(","))
        return value

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        """Check the start of formulas that clip a coefficient at 0, where its gradient vanishes."""
        if (self.formula == "add" and self.init_lambda <= 0) or (
            self.formula == "balance" and self.init_beta <= 0
        ):
            name = "init_lambda" if self.formula == "add" else "init_beta"
            raise ValueError(f"formula={self.formula!r} cannot train {name} <= 0: start above 0")
        return self

    @classmethod
    def recipe(cls, name: str, **changes: object) -> "CalibrationConfig":
        """Return a recipe with changes. Raises I2CLError if the name is unknown or a change invalid."""
        options: dict[str, Any] = {**find_recipe(name), **changes}
        return cls(**options)

    @property
    def rounds(self) -> int:
        """Number of progress updates: one per epoch or evaluation."""
        return self.passes if self.optimizer == "lbfgs" else self.epochs

    def active(self, layers: int, sublayers: Sublayers) -> Bool[Tensor, "layers sublayers"]:
        """Return which sublayers are trained; the others keep (0, 1).

        Raises I2CLError if a layer does not exist, or none is chosen.
        """
        thirds = {"all": (0, 3), "early": (0, 1), "middle": (1, 2), "late": (2, 3)}  # start and end
        if isinstance(self.layers, str):
            chosen = list(range(*(third * layers // 3 for third in thirds[self.layers])))
        else:
            chosen = list(self.layers)
        if not chosen or not all(0 <= layer < layers for layer in chosen):
            raise I2CLError(
                f"layers={self.layers!r} does not fit this model: choose from 0 to {layers - 1}, or 'all'"
            )
        mask = torch.zeros(layers, len(ACTIVE_SUBLAYERS[sublayers]), dtype=torch.bool)
        mask[chosen] = torch.tensor(ACTIVE_SUBLAYERS[sublayers])
        return mask

    def start(self, active: Bool[Tensor, "layers sublayers"]) -> Float[Tensor, "layers sublayers 2"]:
        """Return the initial coefficients; (0, 1) for sublayers that are not trained."""
        initial = torch.tensor([self.init_lambda, 1.0 if self.formula == "add" else self.init_beta])
        return torch.where(active[..., None], initial, torch.tensor([0.0, 1.0]))

    def parameters(self, layers: int, sublayers: Sublayers) -> int:
        """Return the number of trained scalars: lambda of each active sublayer, and beta unless fixed."""
        return int(self.active(layers, sublayers).sum()) * (1 + (self.formula != "add"))
