"""Searches the steps of an incident for the first in which FP8 and BF16 diverge.

The training was replayed over these steps once before, in FP8, and gave the recorded losses. Now each step is
trained twice from the state that FP8 has reached: in FP8, which the search goes on from, and in BF16. So each
step is judged by itself, whatever the steps before it have done.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8scope.incidents.batches import KeptBatch
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.snapshots import Snapshot, Trained
from fp8scope.replay.passes import OnProgress, Pass, Passes, gradient_error
from fp8scope.replay.study import Study
from fp8scope.replay.verdict import SearchedSteps, diverge, loss_in, same_bits

UNFINISHED = (
    "The script ended before the search for the first step in which FP8 and BF16 diverge was over: it needs "
    "three turns of the loop for each step. Use --step for one step alone."
)


@dataclass(frozen=True)
class Stage:
    """The steps that train on one group of batches: their numbers, and their losses in the replay."""

    steps: Sequence[int]
    losses: Sequence[float | None]
    on_begin: Callable[[], None]
    """Called before each pass of these steps."""
    batches: Callable[[], list[KeptBatch]]


@dataclass(frozen=True)
class SearchOutcome:
    """The step that a search ended with: its stage, and its place among the stage's steps."""

    stage: Stage
    index: int
    last: int
    """The last step that was searched."""
    repeated: float | None = None
    is_repeatable: bool = True
    """If not, its loss is `repeated` in the search, and FP8 and BF16 were not compared."""

    @property
    def step(self) -> int:
        return self.stage.steps[self.index]


def search(
    study: Study, flight: FlightRecorder, begin: Snapshot, stages: Sequence[Stage], is_from_start: bool
) -> Iterator[Any]:
    """Yield the batches of a search over the stages, which begin in the state `begin`; then study a step.

    That is the first in which FP8 and BF16 diverge, else the one that was asked for.
    """
    trained = flight.trained
    assert trained is not None
    losses = dict(pair for stage in stages for pair in zip(stage.steps, stage.losses, strict=True))
    study.conclude(losses.get(study.step), UNFINISHED)
    outcome = yield from _outcome(flight, trained, stages, begin, study.step, study.on_progress)
    study.step = outcome.step
    study.search = SearchedSteps(stages[0].steps[0], outcome.last, is_from_start)
    if outcome.is_repeatable:
        stage = outcome.stage
        yield from study.of_step(flight, stage.batches(), index=outcome.index, on_begin=stage.on_begin)
    else:
        study.conclude(losses[outcome.step], repeatable=False, repeated=outcome.repeated)


def _outcome(
    flight: FlightRecorder,
    trained: Trained,
    stages: Sequence[Stage],
    begin: Snapshot,
    wanted: int,
    on_progress: OnProgress,
) -> Generator[Any, None, SearchOutcome]:
    """Yield the batches of the search. In the end the training is in the state before the outcome's stage."""
    trained.load(begin)
    last = stages[-1].steps[-1]
    otherwise: tuple[SearchOutcome, Passes] | None = None
    for number, stage in enumerate(stages):
        passes = Passes(flight, trained, stage.batches(), stage.on_begin)
        with passes.watched():
            in_fp8: Pass = yield from passes.first()
            following = trained.capture()
            index = _first_other(stage.losses, in_fp8)
            if index is not None:
                repeated = _loss(in_fp8, index)
                return SearchOutcome(stage, index, stage.steps[index], repeated, is_repeatable=False)
            in_bf16: Pass = yield from passes.again({})
        index = _parting_step(in_fp8, in_bf16)
        if index is not None:
            passes.restore()
            index = min(index, len(stage.steps) - 1)
            return SearchOutcome(stage, index, stage.steps[index])
        if wanted in stage.steps:
            otherwise = SearchOutcome(stage, stage.steps.index(wanted), last), passes
        trained.load(following)
        on_progress(number + 1, len(stages))
    assert otherwise is not None
    outcome, passes = otherwise
    passes.restore()
    return outcome


def _loss(result: Pass, index: int) -> float | None:
    return loss_in(result.rows[index].scalars) if index < len(result.rows) else None


def _first_other(losses: Sequence[float | None], result: Pass) -> int | None:
    """The first step of a stage whose loss is another one than before; None if there is none."""
    for index, loss in enumerate(losses):
        again = _loss(result, index)
        # Bit for bit: the way gave the recorded losses so, hence this device can.
        is_same = loss is again if loss is None or again is None else same_bits(loss, again)
        if not is_same:
            return index
    return None


def _parting_step(in_fp8: Pass, in_bf16: Pass) -> int | None:
    """The first step of a stage in which the passes part; None if they do not."""
    last = min(len(in_fp8.rows), len(in_bf16.rows)) - 1
    for index in range(last + 1):
        loss_fp8, loss_bf16 = _loss(in_fp8, index), _loss(in_bf16, index)
        if loss_fp8 is None or loss_bf16 is None:
            continue
        # The gradients are those of the last backward pass.
        has_gradient = index == last and bool(in_bf16.gradient)
        if has_gradient and not in_bf16.is_finite:
            continue
        if diverge(loss_fp8, loss_bf16, gradient_error(in_fp8, in_bf16)[0] if has_gradient else 0.0):
            return index
    return None
