"""The statistics of a run's tensors over a window of steps, and the recipe of their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats

Int64s = NDArray[np.int64]
Role = Literal["input", "weight", "grad_output"]
LARGEST: Final[Mapping[str, float]] = {"e4m3": 448.0, "e5m2": 57_344.0}
"""The largest finite value of each FP8 format."""

Kind = Literal["delayed", "current", "blocks", "unknown"]
# The length of a delayed history that a recipe does not state: Transformer Engine's default.
LONG_HISTORY: Final = 1024


@dataclass(frozen=True, kw_only=True)
class CataloguedTensor:
    """A tensor of the run; `largest` is that of its format, NaN if it is not FP8."""

    index: int
    name: str
    module: str
    role: str
    largest: float
    numel: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorSeries:
    """N steps of T tensors, float64[T, N] each, NaN where nothing was observed.

    Attributes:
        steps: int64[N], increasing.
        error: the quantisation error relative to the signal (noise to signal), known at sampled steps only.
        begins: whether the window begins with the run, so that no history precedes it.
    """

    tensors: tuple[CataloguedTensor, ...]
    steps: Int64s
    amax: Floats
    scale: Floats
    saturated: Floats
    underflow: Floats
    nonfinite: Floats
    numel: Floats
    error: Floats
    begins: bool = True

    def share(self, counts: Floats) -> Floats:
        """Counts over the number of elements; NaN for a tensor that was not observed."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.numel > 0, counts / self.numel, np.nan)

    @property
    def roles(self) -> NDArray[np.str_]:
        return np.array([tensor.role for tensor in self.tensors], dtype=str)

    @property
    def modules(self) -> NDArray[np.str_]:
        return np.array([tensor.module for tensor in self.tensors], dtype=str)

    @property
    def largest(self) -> Floats:
        return np.array([tensor.largest for tensor in self.tensors])

    @property
    def calls(self) -> Floats:
        """Quantisations of each tensor in a step, float64[T]: those of its layer's weight. 1 if unknown.

        More than one with gradient accumulation, or in a layer that a step calls repeatedly, as the
        discriminator of a GAN.
        """
        calls = {}
        for row, tensor in zip(self.numel, self.tensors, strict=True):
            counted = row[np.isfinite(row) & (row > 0)]
            if tensor.role == "weight" and tensor.numel > 0 and len(counted):
                calls[tensor.module] = max(1.0, float(np.median(counted)) / tensor.numel)
        usual = float(np.median(list(calls.values()))) if calls else 1.0
        return np.array([calls.get(tensor.module, usual) for tensor in self.tensors])


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The formula of a tensor's scale from its amax: s = M 2^-margin / amax.

    Attributes:
        kind: `delayed`, from the largest amax of the last `history` calls; `current`, from the tensor itself;
            `blocks`, one scale for each row or block, of which the median is recorded.
        interval: calls between two updates of a delayed scale.
    """

    kind: Kind = "unknown"
    history: int = LONG_HISTORY
    margin: float = 0.0
    interval: int = 1
    most_recent: bool = False
    power_of_two: bool = False


def scaling_of(recipe: Mapping[str, Any], role: str) -> Scaling:
    """The scaling of a role under the recipe that the agent recorded; `unknown` for other libraries'."""
    kind = recipe.get("recipe")
    power_of_two = recipe.get("power_of_two") is True
    if kind == "DelayedScaling":
        return Scaling(
            kind="delayed",
            history=int(_number(recipe, "history_length", 16)),
            margin=_number(recipe, "margin", 0),
            interval=int(_number(recipe, "interval", 1)),
            most_recent=recipe.get("amax_compute") == "most_recent",
        )
    if kind == "CurrentScaling":
        return Scaling(kind="current", margin=_number(recipe, "margin", 0), power_of_two=power_of_two)
    if kind in ("RowwiseScaling", "BlockScaling", "MXFP8", "MXFP4", "NVFP4"):
        return Scaling(kind="blocks", power_of_two=power_of_two or kind in ("MXFP8", "MXFP4"))
    if kind == "torchao.float8":
        cast = str(recipe.get(role, ""))
        granularity: Kind = (
            "blocks" if "rowwise" in cast else "current" if "tensorwise" in cast else "unknown"
        )
        return Scaling(kind=granularity, power_of_two=power_of_two)
    return Scaling()


def _number(recipe: Mapping[str, Any], name: str, default: float) -> float:
    value = recipe.get(name, default)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
