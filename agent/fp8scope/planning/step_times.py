"""The time of a training step by its parts, from the model's shape, the plan and the rates of the cluster.

Equations 1, 2 and 4 of the Yuan 2.0 report (arXiv 2311.15786): tensor, pipeline and data parallelism (`method
1`) against pipeline, data and optimizer parallelism without tensor parallelism (`method 2`).
docs/methods/step_times.md says which terms the report prints in two ways, which of them its tables follow,
and how well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Literal

Architecture = Literal["gpt", "lfa"]
ARCHITECTURES: tuple[Architecture, ...] = ("gpt", "lfa")
"""`gpt`: attention of GPT. `lfa`: with localized filtering, whose convolutions add a third to the work."""

# Work of a layer in H^2 for each token: 24 S H^2 B for the forward pass of GPT's products, times 4 for
# backward and recomputation. Localized filtering: 32.
WORK = {"gpt": 96, "lfa": 128}
# Of attention's scores and values, as a share of the above: S / (6 H) and S / (8 H).
ATTENTION_SHARE = {"gpt": 6, "lfa": 8}
# Parameters of a layer in H^2.
PARAMETERS = {"gpt": 12, "lfa": 16}
# Bytes of tensor parallelism for each layer, token and hidden element, over the number of devices.
TENSOR_BYTES = {"gpt": 48, "lfa": 64}

GRADIENT_BYTES = 4
"""For each parameter and step: the all-reduce of gradients."""
OPTIMIZER_BYTES = 8
"""The same with optimizer parallelism in addition, whose ranks exchange what they have updated."""
PIPELINE_BYTES = 8
"""For each token and hidden element: activations and their gradients between two stages."""


class PlanError(ValueError):
    """A number that a shape, a plan or a cluster cannot have."""


def _check(of: object) -> None:
    for entry in fields(of):  # type: ignore[arg-type]
        value = getattr(of, entry.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < float("inf"):
            raise PlanError(f"{entry.name} must be a number above 0, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer: `layers` L, `hidden` H, `sequence` S tokens, `vocabulary` V."""

    layers: int
    hidden: int
    sequence: int
    vocabulary: int
    architecture: Architecture = "gpt"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise PlanError(
                f"architecture must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}."
            )
        _check(self)

    @property
    def parameters(self) -> float:
        """The number of parameters: of layers with their biases and norms, and of the embedding."""
        in_layers = PARAMETERS[self.architecture] * self.layers * self.hidden**2
        small = 13 / (12 * self.hidden) if self.architecture == "gpt" else 1 / (4 * self.hidden)
        return in_layers * (1 + small) + self.vocabulary * self.hidden

    @property
    def token_flops(self) -> float:
        """Operations of a token in forward, backward and recomputation, without the head (flop)."""
        attention = self.sequence / (ATTENTION_SHARE[self.architecture] * self.hidden)
        return WORK[self.architecture] * self.layers * self.hidden**2 * (1 + attention)


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Devices and work of a step: `pipeline` Ps stages, `tensor` Ts, `data` Ds, `accumulation` A
    micro-batches of
    `micro_batch` B sequences.

    `optimizer_parallel`: data-parallel ranks share the optimizer's state, and exchange what they have
    updated. `stages_share_node`: transfers between stages stay inside of a node.
    """

    pipeline: int
    tensor: int
    data: int
    accumulation: int
    micro_batch: int = 1
    optimizer_parallel: bool = False
    stages_share_node: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def devices(self) -> int:
        return self.pipeline * self.tensor * self.data


@dataclass(frozen=True, kw_only=True)
class ClusterRates:
    """`flops`: of one device on a smaller model of the same shape (flop/s). `link`: inside of a node, in one
    direction
    (bytes/s). `network`: of one connector (bytes/s), of which a node has `connectors`.
    """

    flops: float
    link: float
    network: float
    connectors: int = 1

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The parts of a step's time in seconds. Nothing overlaps in this model.

    `compute` T0, `bubble` T1 (stages that wait at both ends of a step), `pipeline` T2 (between stages),
    `tensor` (all-reduces inside of layers), `data` (gradients), `optimizer` (updated parameters).
    """

    compute: float
    bubble: float
    pipeline: float
    tensor: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.pipeline + self.tensor + self.data + self.optimizer


def step_times(shape: ModelShape, plan: ParallelPlan, cluster: ClusterRates) -> StepTimes:
    """The parts of a step's time in seconds: equations 1 (gpt), 2 (lfa) and 4 (no tensor parallelism)."""
    tokens = plan.accumulation * plan.micro_batch * shape.sequence
    elements = tokens * shape.hidden
    in_layers = plan.pipeline * plan.tensor
    network = cluster.network * cluster.connectors
    compute = tokens * shape.token_flops / (in_layers * cluster.flops)
    between_stages = cluster.link * cluster.connectors if plan.stages_share_node else network
    of_tensor = TENSOR_BYTES[shape.architecture] * shape.layers * (plan.tensor - 1) * elements
    # Gradients leave a node through its links, so that the slower of both bounds them.
    shared = shape.parameters * (plan.data - 1) / plan.data / (plan.pipeline * min(network, cluster.link))
    return StepTimes(
        compute=compute,
        bubble=compute * (plan.pipeline - 1) / plan.accumulation,
        pipeline=PIPELINE_BYTES * elements / between_stages if plan.pipeline > 1 else 0.0,
        tensor=of_tensor / (in_layers * cluster.link),
        data=GRADIENT_BYTES * shared,
        optimizer=OPTIMIZER_BYTES * shared if plan.optimizer_parallel else 0.0,
    )


def flops_for(shape: ModelShape, plan: ParallelPlan, compute_seconds: float) -> float:
    """The rate of one device (flop/s) with which `compute` takes this time, for `ClusterRates.flops`."""
    tokens = plan.accumulation * plan.micro_batch * shape.sequence
    return tokens * shape.token_flops / (plan.pipeline * plan.tensor * compute_seconds)


def utilisation(shape: ModelShape, plan: ParallelPlan, seconds: float, peak_flops: float) -> float:
    """The share of the devices' peak (flop/s) that a step of this time uses; recomputation counts as work."""
    tokens = plan.accumulation * plan.micro_batch * shape.sequence * plan.data
    return tokens * shape.token_flops / (seconds * plan.devices * peak_flops)


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """The model against a run: `predicted` and `measured` seconds of a step, and `error`, their quotient
    minus 1.

    `flops`: the rate with which the model's computation would fill what its transfers leave of the measured
    step; None if they leave nothing.
    """

    predicted: float
    measured: float
    error: float
    flops: float | None


def compare_with_steps(
    shape: ModelShape, plan: ParallelPlan, cluster: ClusterRates, seconds: Sequence[float]
) -> StepComparison:
    """Compare the model with the median of a run's measured steps (`step_seconds` of each).

    Raises PlanError without a step of a positive time.
    """
    steps = [value for value in seconds if 0 < value < float("inf")]
    if not steps:
        raise PlanError("There is no measured step with a time above 0.")
    times, measured = step_times(shape, plan, cluster), median(steps)
    transfers = times.total - times.compute - times.bubble
    left = (measured - transfers) / (times.compute + times.bubble)
    return StepComparison(
        predicted=times.total,
        measured=measured,
        error=times.total / measured - 1,
        flops=cluster.flops / left if left > 0 else None,
    )
