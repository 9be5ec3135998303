"""The split of a model's layers over the stages of a pipeline whose worst stage is best.

With the schedule 1F1B stage s of P (from 0) holds the activations of up to P - s micro-batches, so that a
uniform split uses the most memory in its first stage, and the last stage also computes the head and the loss.
The split is found exactly, by dynamic programming over the ends of stages: O(stages * layers^2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

Aim = Literal["time", "memory"]
AIMS: tuple[Aim, ...] = ("time", "memory")

MAX_LAYERS = 4096
MAX_STAGES = 1024


class SplitError(ValueError):
    """There is no split, or the costs cannot be costs."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of a layer, or of what else a stage computes.

    `seconds`: forward and backward pass of one micro-batch. `weights`: bytes that stay (parameters,
    gradients, optimizer state). `activations`: bytes that one micro-batch leaves for its backward pass.
    """

    seconds: float = 0.0
    weights: float = 0.0
    activations: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        for kind in ("seconds", "weights", "activations"):
            value = getattr(self, kind)
            if not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise SplitError(
                    f"{kind} of {self.name or 'a layer'} must be a number from 0 on, got {value!r}."
                )


NOTHING = LayerCost()


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of a stage: `seconds` of a micro-batch, and the most bytes of `memory`."""

    layers: int
    seconds: float
    memory: float
    in_flight: int


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """A model's layers in order, and the stages to put them on.

    `first` and `last`: what the first stage computes besides its layers (an embedding), and the last one
    (head and loss). `micro_batches`: of one step; with fewer than stages, fewer are in flight. `in_flight`:
    micro-batches whose activations each stage holds, where the schedule is not 1F1B.
    """

    layers: Sequence[LayerCost]
    stages: int
    first: LayerCost = NOTHING
    last: LayerCost = NOTHING
    micro_batches: int | None = None
    in_flight: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= MAX_STAGES:
            raise SplitError(f"stages must be from 1 to {MAX_STAGES}, got {self.stages}.")
        if not self.stages <= len(self.layers) <= MAX_LAYERS:
            raise SplitError(
                f"{self.stages} stages need {self.stages} to {MAX_LAYERS} layers, got {len(self.layers)}."
            )
        if self.in_flight and (len(self.in_flight) != self.stages or min(self.in_flight) < 0):
            raise SplitError("in_flight must have one whole number from 0 on for each stage.")

    def held(self, stage: int) -> int:
        """The number of micro-batches whose activations a stage holds at once."""
        if self.in_flight:
            return self.in_flight[stage]
        held = self.stages - stage
        return held if self.micro_batches is None else min(held, self.micro_batches)

    def cost(self, split: Sequence[int]) -> list[StageCost]:
        """The cost of each stage under a split, which is the number of layers of each."""
        if len(split) != self.stages or sum(split) != len(self.layers) or min(split) < 1:
            raise SplitError(f"A split has {self.stages} numbers from 1 on, of {len(self.layers)} in total.")
        ends = np.cumsum([0, *split])
        return [
            StageCost(
                layers=split[stage],
                seconds=float(self._seconds(stage)[begin, end]),
                memory=float(self._memory(stage)[begin, end]),
                in_flight=self.held(stage),
            )
            for stage, (begin, end) in enumerate(zip(ends, ends[1:], strict=False))
        ]

    def costs(self, aim: Aim) -> list[Float64s]:
        """For each stage float64 [layers + 1, layers + 1]: the cost of layers begin to end, Inf for none."""
        of = self._seconds if aim == "time" else self._memory
        return [of(stage) for stage in range(self.stages)]

    def _extra(self, stage: int) -> list[LayerCost]:
        return [self.first] * (stage == 0) + [self.last] * (stage == self.stages - 1)

    def _seconds(self, stage: int) -> Float64s:
        extra = sum(layer.seconds for layer in self._extra(stage))
        return _between([layer.seconds for layer in self.layers]) + extra

    def _memory(self, stage: int) -> Float64s:
        held = self.held(stage)
        extra = sum(layer.weights + held * layer.activations for layer in self._extra(stage))
        return _between([layer.weights + held * layer.activations for layer in self.layers]) + extra


@dataclass(frozen=True, kw_only=True)
class PipelineSplit:
    """A split, as the number of layers of each stage, and what it costs."""

    layers: tuple[int, ...]
    stages: tuple[StageCost, ...]

    @property
    def seconds(self) -> float:
        """The time of a micro-batch in the slowest stage."""
        return max(stage.seconds for stage in self.stages)

    @property
    def memory(self) -> float:
        """The bytes of the stage that needs most."""
        return max(stage.memory for stage in self.stages)

    def step_seconds(self, micro_batches: int) -> float:
        """The time of a step: micro-batches pass the slowest stage in turn, and once all the others."""
        return (micro_batches - 1) * self.seconds + sum(stage.seconds for stage in self.stages)


def split_of(pipeline: PipelineCosts, layers: Sequence[int]) -> PipelineSplit:
    """The cost of a given split. Raises SplitError if it does not fit the pipeline."""
    return PipelineSplit(layers=tuple(layers), stages=tuple(pipeline.cost(layers)))


def uniform_split(pipeline: PipelineCosts) -> PipelineSplit:
    """Equal numbers of layers; where they do not divide, the first stages have one more."""
    whole, more = divmod(len(pipeline.layers), pipeline.stages)
    return split_of(pipeline, [whole + (stage < more) for stage in range(pipeline.stages)])


def best_split(
    pipeline: PipelineCosts, first: Aim = "time", memory_limit: float | None = None
) -> PipelineSplit:
    """The split whose worst stage takes the least time, and of those the one that needs least memory there.

    `first="memory"` puts memory before time. `memory_limit`: bytes that no stage may exceed. Of splits that
    are equal in both, stages differ least in their time. Raises SplitError if no split keeps the limit.
    """
    if first not in AIMS:
        raise SplitError(f"first must be one of {', '.join(AIMS)}, got {first!r}.")
    costs = {aim: pipeline.costs(aim) for aim in AIMS}
    if memory_limit is not None:
        allowed = [memory <= memory_limit for memory in costs["memory"]]
        costs = {aim: _only(matrices, allowed) for aim, matrices in costs.items()}
    for aim in (first, *(other for other in AIMS if other != first)):
        worst, _ = _path(costs[aim], np.maximum)
        if worst == np.inf:
            raise SplitError(f"No split keeps each stage below {memory_limit:.3g} bytes.")
        allowed = [matrix <= worst for matrix in costs[aim]]
        costs = {kind: _only(matrices, allowed) for kind, matrices in costs.items()}
    _, layers = _path([seconds**2 for seconds in costs["time"]], np.add)
    return split_of(pipeline, layers)


def _between(values: Sequence[float]) -> Float64s:
    """float64 [n + 1, n + 1]: the sum of values[begin:end]; Inf where that is empty."""
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    between = sums[None, :] - sums[:, None]
    return np.where(np.tri(len(sums), dtype=bool), np.inf, between)


def _only(matrices: Sequence[Float64s], allowed: Sequence[NDArray[np.bool_]]) -> list[Float64s]:
    return [np.where(may, matrix, np.inf) for matrix, may in zip(matrices, allowed, strict=True)]


def _path(costs: Sequence[Float64s], join: np.ufunc) -> tuple[float, list[int]]:
    """The least joined cost of all stages, Inf if there is no split, and the layers of each stage.

    `join`: maximum or sum of the stages' costs.
    """
    layers = len(costs[0]) - 1
    reached = np.full(layers + 1, np.inf)
    reached[0] = 0.0
    begins: list[NDArray[np.intp]] = []
    for matrix in costs:
        joined = join(reached[:, None], matrix)
        begins.append(joined.argmin(0))
        reached = joined.min(0)
    if reached[layers] == np.inf:
        return np.inf, []
    ends = [layers]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return float(reached[layers]), [
        int(end - start) for end, start in zip(ends[-2::-1], ends[:0:-1], strict=True)
    ]


def pipeline_from(document: Any, stages: int) -> PipelineCosts:
    """The pipeline that a JSON document describes: `layers`, `first`, `last`, `micro_batches`, `in_flight`.

    Raises SplitError on anything else, and on costs that are not numbers.
    """
    names = {"layers", "first", "last", "micro_batches", "in_flight"}
    if not isinstance(document, Mapping) or not isinstance(document.get("layers"), list):
        raise SplitError("The document needs a list `layers`.")
    if unknown := sorted(set(document) - names):
        raise SplitError(f"Unknown: {', '.join(unknown)}; there are {', '.join(sorted(names))}.")
    micro_batches = document.get("micro_batches")
    if micro_batches is not None and (not isinstance(micro_batches, int) or micro_batches < 1):
        raise SplitError(f"micro_batches must be a whole number from 1 on, got {micro_batches!r}.")
    return PipelineCosts(
        layers=[_layer(entry) for entry in document["layers"]],
        stages=stages,
        first=_layer(document.get("first", {})),
        last=_layer(document.get("last", {})),
        micro_batches=micro_batches,
        in_flight=document.get("in_flight", ()),
    )


def _layer(entry: Any) -> LayerCost:
    if not isinstance(entry, Mapping) or not set(entry) <= {"name", "seconds", "weights", "activations"}:
        raise SplitError(f"A layer has name, seconds, weights and activations, got {entry!r}.")
    return LayerCost(**entry)
