"""How coefficients are calibrated: the paper's recipe, its released code's, and a fast one.

Source: paper, subsection "Noisy Self-calibration" and appendix "Reproduction Details".
"""

from types import MappingProxyType
from typing import Literal, Self

import torch
from jaxtyping import Bool
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from i2cl.core.context import SITES, Writers
from i2cl.core.edits import Positions
from i2cl.core.weights import ClassWeight
from i2cl.errors import I2CLError
from i2cl.models.training import TrainConfig

Formula = Literal["linear", "add", "balance"]

# What each recipe changes in the defaults, which are the paper's text. "released" is its code, "fast" takes
# few passes over all demonstrations at once: docs/performance.md has its speed and accuracy.
_RECIPES: dict[str, dict[str, object]] = {
    "paper": {},
    "released": {"draw": "step", "lr_final": 0.0, "warmup": 0.05, "noise_place": "writer"},
    "fast": {"optimizer": "lbfgs"},
}
RECIPES = MappingProxyType({name: MappingProxyType(changes) for name, changes in _RECIPES.items()})


class CalibrationConfig(TrainConfig):
    """How coefficients are fitted. Defaults are the paper's text; `recipe` gives others by name.

    Attributes:
        layers: all, a third of them, or a list of indices ("Target Layer" ablation).
        positions: query tokens that are injected ("Injection Position" ablation).
        formula: ``linear`` lambda v + beta a; ``add`` lambda v + a with lambda > 0; ``balance``
            (lambda v + (1 - lambda) a) beta with beta > 0 ("Injection Formula" ablation).
        noise: gamma, the noise's size relative to the L2 norm of what it is added to.
        noise_place: on the residual stream, or on each writer's output (released code).
        init_lambda: first value of lambda.
        init_beta: first value of beta.
        optimizer: AdamW on small batches, or L-BFGS on all demonstrations at once under one draw of
            the noise, for which epochs, batches, rates and decay mean nothing.
        passes: of L-BFGS over the demonstrations, at most.
        pull: of L-BFGS: loss per squared distance of the coefficients from their start, in nats.
        class_weight: ``"balanced"``, weights of the classes by label word, or None for equal weights of all
            demonstrations (`i2cl.core.weights.apply_class_weight`).
    """

    layers: Literal["all", "early", "middle", "late"] | tuple[int, ...] = "all"
    positions: Positions = "all"
    formula: Formula = "linear"
    noise: float = Field(1e-3, ge=0)
    noise_place: Literal["residual", "writer"] = "residual"
    init_lambda: float = 0.1
    init_beta: float = 1.0
    optimizer: Literal["adamw", "lbfgs"] = "adamw"
    passes: int = Field(60, ge=0)
    pull: float = Field(3e-3, ge=0)
    class_weight: ClassWeight = None

    @field_validator("layers", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """Accept ``"0,3,5"``, as the command line gives it."""
        if isinstance(value, str) and value.replace(",", "").replace(" ", "").isdigit():
            return tuple(int(part) for part in value.split(","))
        return value

    @model_validator(mode="after")
    def _can_move(self) -> Self:
        """These formulas take the positive part of a coefficient, whose gradient is 0 elsewhere."""
        if (self.formula == "add" and self.init_lambda <= 0) or (
            self.formula == "balance" and self.init_beta <= 0
        ):
            name = "init_lambda" if self.formula == "add" else "init_beta"
            raise ValueError(f"formula {self.formula} never leaves {name} at 0 or below: start above 0")
        return self

    @classmethod
    def recipe(cls, name: str, **changes: object) -> "CalibrationConfig":
        """The recipe of that name, with changes. Raises I2CLError if there is none of that name."""
        if name not in RECIPES:
            raise I2CLError(f"unknown recipe {name!r}: choose one of {', '.join(RECIPES)}")
        return cls.model_validate({**RECIPES[name], **changes})

    @property
    def rounds(self) -> int:
        """How often progress is told: after each epoch, or each pass."""
        return self.passes if self.optimizer == "lbfgs" else self.epochs

    @property
    def joint(self) -> bool:
        """Whether runs of several seeds take their steps together; see `i2cl.core.calibration`."""
        return self.optimizer == "adamw" and self.positions != "random"

    def active(self, layers: int, writers: Writers) -> Bool[Tensor, "layers sites"]:
        """Which sites are trained; the others keep (0, 1). Raises I2CLError on no such layer, or none."""
        ends = {"all": (0, 3), "early": (0, 1), "middle": (1, 2), "late": (2, 3)}  # in thirds
        if isinstance(self.layers, str):
            chosen = list(range(*(third * layers // 3 for third in ends[self.layers])))
        else:
            chosen = list(self.layers)
        if not chosen or not all(0 <= layer < layers for layer in chosen):
            known = f"this model, which has {layers} (0 to {layers - 1})"
            raise I2CLError(f"{self.layers!r} names no layers of {known}: choose others, or all")
        mask = torch.zeros(layers, len(SITES[writers]), dtype=torch.bool)
        mask[chosen] = torch.tensor(SITES[writers])
        return mask

    def parameters(self, layers: int, writers: Writers) -> int:
        """How many scalars are trained: lambda at each active site, and beta unless fixed."""
        return int(self.active(layers, writers).sum()) * (1 + (self.formula != "add"))
