"""Runs with one fault each, as different clients send them, and the tensor and step at which it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from numpy.typing import NDArray

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run, Tensor

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LAYERS: Final = 6
ROLES: Final = ("input", "weight", "grad_output")
NAMES: Final = [f"blocks.{layer}.mlp.up.{role}" for layer in range(LAYERS) for role in ROLES]
NUMEL: Final = 100_000.0
LARGEST: Final = 448.0
COUNTS: Final = ("saturated", "underflow", "nonfinite")
CURRENT: Final = {"recipe": "CurrentScaling", "margin": 0, "power_of_two": False}
DELAYED: Final = {"recipe": "DelayedScaling", "margin": 0, "history_length": 4}


@dataclass
class Rows:
    """What a training sends: float64[N] of the loss, float64[N, T] of each statistic."""

    steps: NDArray[np.int64]
    loss: Floats
    statistics: dict[str, Floats]

    def column(self, tensor: str, statistic: str) -> Floats:
        """A view of one tensor's statistic, float64[N]."""
        return self.statistics[statistic][:, NAMES.index(tensor)]

    def since(self, step: int) -> Bools:
        return np.asarray(self.steps >= step)


Inject = Callable[[Rows], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One injected fault.

    Attributes:
        kind: of the alert that reports it.
        statistic: what the ranking and the map show of it; `is_ranked`: whether they see it there at all.
        tensor: the one in which it begins.
        step: the first step at which the client shows it; `after`: the last one before it that was looked at.
        inject: changes the rows of a healthy training.
        every: the client sends the statistics of each `every`th step.
        without: statistics that the client does not send.
        missing: the first and the last step of a gap.
        resumed_at: the first step of a second attempt.
        ranks: processes that send.
        loss_step: where the loss begins to rise; None if it does not.
    """

    name: str
    kind: str
    statistic: str
    tensor: str
    step: int
    inject: Inject
    after: int | None = None
    is_ranked: bool = True
    steps: int = 600
    recipe: Mapping[str, Any] = field(default_factory=lambda: CURRENT)
    every: int = 1
    without: tuple[str, ...] = ()
    missing: tuple[int, int] | None = None
    resumed_at: int | None = None
    ranks: int = 1
    loss_step: int | None = None

    @property
    def in_words(self) -> str:
        """The steps that every place must name, written here by hand."""
        if self.after is None or self.after == self.step - 1:
            return f"{self.step:,}"
        return f"{self.after + 1:,}–{self.step:,}"


def healthy(steps: NDArray[np.int64], seed: int, recipe: Mapping[str, Any]) -> Rows:
    """A training in which every scale follows its amax."""
    chance = np.random.default_rng(seed)
    shape = (len(steps), len(NAMES))
    amax = np.exp(chance.normal(0.0, 0.2, shape))
    followed = amax
    if recipe["recipe"] == "DelayedScaling":
        length = int(recipe["history_length"])
        past = [np.vstack([amax[:1]] * lag + [amax[:-lag]]) for lag in range(1, length + 1)]
        followed = np.max(past, axis=0)
        followed[0] = amax[0]
    statistics = {"amax": amax, "scale": LARGEST / followed, "numel": np.full(shape, NUMEL)}
    statistics |= {name: np.zeros(shape) for name in COUNTS}
    loss = (2.0 + 2.0 * np.exp(-steps / 100.0)) * (1.0 + chance.normal(0.0, 0.01, len(steps)))
    return Rows(steps, loss, statistics)


def record(project: Project, fault: Fault) -> Run:
    """Send the run with the fault, and a healthy BF16 run to compare with."""
    steps = np.arange(1, fault.steps + 1)
    baseline = make_run(project, "bf16", group="bf16", precision="bf16", seed=1)
    theirs = healthy(steps, 1, CURRENT)
    counted = {"amax": theirs.statistics["amax"], "numel": theirs.statistics["numel"]}
    counted |= {name: theirs.statistics[name] for name in COUNTS if name not in fault.without}
    recorder = Recorder(run=baseline, tensors=NAMES)
    recorder.rows(steps, {"loss": theirs.loss}, counted, rows_per_batch=300)
    recorder.finish()
    run = make_run(project, fault.name, baseline="bf16", precision="fp8", seed=1, recipe=dict(fault.recipe))
    rows = healthy(steps, 2, fault.recipe)
    fault.inject(rows)
    for rank in range(fault.ranks):
        _send(run, fault, rows, rank)
    return run


def _send(run: Run, fault: Fault, rows: Rows, rank: int) -> None:
    observed = rows.steps % fault.every == 0
    statistics = {
        name: np.where(observed[:, None], matrix, np.nan)
        for name, matrix in rows.statistics.items()
        if name not in (*fault.without, "scale of rank 1")
    }
    if rank and "scale of rank 1" in rows.statistics:
        statistics["scale"] = rows.statistics["scale of rank 1"]
    sent = np.ones(len(rows.steps), bool)
    if fault.missing is not None:
        sent = (rows.steps < fault.missing[0]) | (rows.steps > fault.missing[1])
    begins = [int(rows.steps[0]), *([] if fault.resumed_at is None else [fault.resumed_at])]
    for attempt, begin in enumerate(begins):
        recorder = Recorder(run=run, rank=rank, tensors=NAMES, attempt=attempt)
        Tensor.objects.filter(run=run).update(format="E4M3", numel=int(NUMEL))
        # The first start goes a little further than what the second one replaces.
        ends = begins[attempt + 1] + 20 if attempt + 1 < len(begins) else int(rows.steps[-1]) + 1
        part = sent & (rows.steps >= begin) & (rows.steps < ends)
        recorder.rows(
            rows.steps[part],
            {"loss": rows.loss[part]},
            {name: matrix[part] for name, matrix in statistics.items()},
            rows_per_batch=150,
        )


def counted(tensor: str, statistic: str, step: int, share: float) -> Inject:
    """A share of the elements of one tensor is counted from a step on."""

    def inject(rows: Rows) -> None:
        chance = np.random.default_rng(3)
        since = rows.since(step)
        rows.column(tensor, statistic)[since] = chance.binomial(int(NUMEL), share, int(since.sum()))

    return inject


def frozen(tensor: str, step: int) -> Inject:
    """The scale is the same from a step on, while the amax grows slowly."""

    def inject(rows: Rows) -> None:
        since = rows.since(step)
        scale, amax = rows.column(tensor, "scale"), rows.column(tensor, "amax")
        scale[since] = scale[since][0]
        amax[since] *= np.exp2(np.linspace(0.0, 5.0, int(since.sum())))

    return inject


def stale(tensor: str, step: int) -> Inject:
    """The scale is made for an amax that is 2^8 times larger, as after loading another checkpoint's state."""

    def inject(rows: Rows) -> None:
        rows.column(tensor, "scale")[rows.since(step)] /= 2.0**8

    return inject


def jump(tensor: str, step: int) -> Inject:
    """The amax jumps, and the scale follows at once."""

    def inject(rows: Rows) -> None:
        since = rows.since(step)
        rows.column(tensor, "amax")[since] *= 2.0**10
        rows.column(tensor, "scale")[since] /= 2.0**10

    return inject


def growth(tensor: str, step: int, octaves: float = 6.0) -> Inject:
    """The amax grows from a step on, and the scale follows."""

    def inject(rows: Rows) -> None:
        since = rows.since(step)
        factor = np.exp2(np.linspace(0.0, octaves, int(since.sum())))
        rows.column(tensor, "amax")[since] *= factor
        rows.column(tensor, "scale")[since] /= factor

    return inject


def apart(tensor: str, step: int) -> Inject:
    """The second rank has twice the scale of the first from a step on."""

    def inject(rows: Rows) -> None:
        theirs = rows.statistics["scale"].copy()
        theirs[rows.since(step), NAMES.index(tensor)] *= 2.0
        rows.statistics["scale of rank 1"] = theirs

    return inject


def diverging(step: int, begin: Inject) -> Inject:
    """The loss rises from a step on, after something else has begun."""

    def inject(rows: Rows) -> None:
        begin(rows)
        rows.loss[:] *= 1.0 + 1.5 * np.clip((rows.steps - step) / 200.0, 0.0, None)

    return inject


def settling(tensor: str, then: Inject) -> Inject:
    """A working delayed scale clips elements in the first steps, too."""

    def inject(rows: Rows) -> None:
        rows.column(tensor, "saturated")[:6] = 3_000.0
        then(rows)

    return inject


def both(*faults: Inject) -> Inject:
    """Several faults in one run."""

    def inject(rows: Rows) -> None:
        for fault in faults:
            fault(rows)

    return inject


def noisy_layer(tensor: str, step: int) -> Inject:
    """The quantisation error of a tensor is that of noise from a step on; it is measured every tenth step."""

    def inject(rows: Rows) -> None:
        chance = np.random.default_rng(4)
        shape = rows.statistics["amax"].shape
        error = 1e-3 * np.exp(chance.normal(0.0, 0.05, shape))
        error[rows.since(step), NAMES.index(tensor)] = 0.3
        measured = (rows.steps % 10 == 0)[:, None]
        rows.statistics["sq_error"] = np.where(measured, error, np.nan)
        rows.statistics["sq_signal"] = np.where(measured, np.ones(shape), np.nan)

    return inject


def name_of(layer: int, role: str) -> str:
    return f"blocks.{layer}.mlp.up.{role}"


SATURATES, FREEZES, STALE = name_of(2, "input"), name_of(3, "weight"), name_of(4, "input")
VANISHES, BREAKS, GROWS = name_of(1, "input"), name_of(1, "grad_output"), name_of(5, "weight")
NOISY, LATE, GAP = name_of(0, "input"), name_of(5, "input"), name_of(3, "input")

FAULTS: Final = (
    Fault(
        name="saturation after scales settled, without nonfinite",
        kind="saturation_rate", statistic="saturation_rate", tensor=SATURATES, step=311,
        inject=settling(SATURATES, counted(SATURATES, "saturated", 311, 0.1)),
        without=("nonfinite",), recipe=DELAYED,
    ),
    Fault(
        name="saturation from the first step",
        kind="saturation_rate", statistic="overflow_rate", tensor=STALE, step=11, after=0,
        inject=counted(STALE, "saturated", 1, 0.2),
    ),
    Fault(
        name="saturation of two tensors, first the smaller one",
        kind="saturation_rate", statistic="overflow_rate", tensor=GAP, step=207,
        inject=both(counted(GAP, "saturated", 207, 0.01), counted(LATE, "saturated", 240, 0.3)),
    ),
    Fault(
        name="saturation in a gap of the steps",
        kind="saturation_rate", statistic="overflow_rate", tensor=GAP, step=281, after=239,
        inject=counted(GAP, "saturated", 250, 0.05), missing=(240, 280),
    ),
    Fault(
        name="frozen scale",
        kind="scale_frozen", statistic="scale", is_ranked=False, tensor=FREEZES, step=240,
        inject=frozen(FREEZES, 240),
    ),
    Fault(
        name="stale scale after a resume",
        kind="scale_stale", statistic="scale", tensor=STALE, step=350, inject=stale(STALE, 350),
        resumed_at=350, recipe=DELAYED,
    ),
    Fault(
        name="jump of an amax",
        kind="scale_jump", statistic="amax", tensor=STALE, step=257, inject=jump(STALE, 257),
    ),
    Fault(
        name="underflow",
        kind="underflow_rate", statistic="underflow_rate", tensor=VANISHES, step=402,
        inject=counted(VANISHES, "underflow", 402, 0.8), without=("nonfinite",),
    ),
    Fault(
        name="gradients that are not finite, each tenth step",
        kind="tensor_not_finite", statistic="nonfinite_rate", tensor=BREAKS, step=310, after=300,
        inject=counted(BREAKS, "nonfinite", 303, 0.01), every=10,
    ),
    Fault(
        # It grows from step 900 on, and is out of the range of its beginning at 1,088.
        name="amax that grows",
        kind="amax_growth", statistic="amax", tensor=GROWS, step=1088, inject=growth(GROWS, 900), steps=1500,
    ),
    Fault(
        name="a layer that loses precision, sampled",
        kind="noise_growth", statistic="noise_to_signal", tensor=NOISY, step=360, after=350,
        inject=noisy_layer(NOISY, 355),
    ),
    Fault(
        name="ranks that disagree",
        kind="scale_disagreement", statistic="scale", is_ranked=False, tensor=GROWS, step=410, after=400,
        inject=apart(GROWS, 405), ranks=2, recipe=DELAYED,
    ),
    Fault(
        name="divergence after saturation",
        kind="saturation_rate", statistic="overflow_rate", tensor=LATE, step=222,
        inject=diverging(300, counted(LATE, "saturated", 222, 0.2)), loss_step=300,
    ),
)  # fmt: skip
