"""How often plain tensors are read: the rule, and its effect on a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.helpers.watching import NUMEL, Watched
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope import ConfigurationError
from fp8scope.config import Settings, settings_from
from fp8scope.observe.budget import (
    COMPLETE_STEPS,
    PACES,
    PLAIN_EVERY,
    REVIEW_STEPS,
    STEP_SECONDS,
    TimeBudget,
    choose_pace,
)
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run
from fp8scope_kernels import CurrentScaling, DelayedScaling, Pace, convert

MS = 1e-3


def test_it_works() -> None:
    # 2 % of 50 ms is 1 ms, of which 0.5 ms are left: 1.8 ms fit into every fourth step.
    assert choose_pace(50 * MS, 0.5 * MS, 1.8 * MS, 0.02) == 4


@pytest.mark.parametrize(
    ("reading", "every"),
    [(0.0, 1), (0.9, 1), (1.1, 2), (3.9, 4), (4.1, 5), (19.0, 20), (99.0, 100), (500.0, 100)],
)
def test_the_mean_cost_is_inside_the_budget(reading: float, every: int) -> None:
    assert choose_pace(100 * MS, 0.0, reading * MS, 0.01) == every


def test_at_least_a_tenth_of_the_budget_remains() -> None:
    assert choose_pace(100 * MS, 50 * MS, 1 * MS, 0.02) == 5
    assert choose_pace(0.0, 1 * MS, 1 * MS, 0.02) == PACES[-1]


def test_reading_more_often_needs_a_margin() -> None:
    assert choose_pace(100 * MS, 0.0, 1.9 * MS, 0.01, current=2) == 2
    assert choose_pace(100 * MS, 0.0, 1.9 * MS, 0.01, current=4) == 4
    assert choose_pace(100 * MS, 0.0, 1.5 * MS, 0.01, current=4) == 2
    assert choose_pace(100 * MS, 0.0, 2.1 * MS, 0.01, current=2) == 4


@pytest.mark.parametrize("reading", [0.0, 0.3, 1.0, 7.0, 31.0, 1000.0])
@pytest.mark.parametrize("start", PACES)
def test_decisions_settle(reading: float, start: int) -> None:
    first = choose_pace(100 * MS, 0.4 * MS, reading * MS, 0.02, start)
    assert choose_pace(100 * MS, 0.4 * MS, reading * MS, 0.02, first) == first


def test_every_interval_includes_the_sampled_steps() -> None:
    assert all(100 % pace == 0 for pace in PACES)


@pytest.mark.parametrize("overhead", [0, -0.1, 1.01, math.nan, math.inf, True, "2%", [0.02]])
def test_refuses_an_invalid_share(overhead: object, tmp_path: Path) -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigurationError, match="overhead must be a share"):
        fp8scope.attach(model, optimizer, mode="offline", directory=tmp_path, overhead=overhead)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    run = fp8scope.init(mode="disabled")
    with pytest.raises(ConfigurationError, match="overhead must be a share"):
        run.watch(model, overhead=overhead)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "overhead"), [("", 0.02), ("0.05", 0.05), ("1", 1.0), ("none", None), ("None", None)]
)
def test_an_environment_variable_sets_the_budget(text: str, overhead: float | None) -> None:
    assert settings_from(mode="offline", environment={"FP8SCOPE_OVERHEAD": text}).overhead == overhead


@pytest.mark.parametrize("text", ["0", "2", "-1", "nan", "much"])
def test_an_environment_that_sets_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="FP8SCOPE_OVERHEAD must be a number above 0"):
        settings_from(mode="offline", environment={"FP8SCOPE_OVERHEAD": text})


def thinned(model: nn.Module, every: int, steps: int, *, sample_every: int = 0, **how: Any) -> list[int]:
    """The steps in which the first tensor was read, by a run whose pace is `every` from the start."""
    watched = Watched(model, every=sample_every, **how)
    budget = watched.collector._budget = TimeBudget(0.02)
    budget.every, budget._steps = every, COMPLETE_STEPS
    x = torch.randn(4, 16)
    seen = [watched.step(lambda: model(x).sum().backward()) for _ in range(steps)]
    return [number for number, step in enumerate(seen, 1) if step.observed.statistics[0, NUMEL]]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))


def test_plain_tensors_are_read_every_so_many_steps() -> None:
    assert thinned(plain(), 4, 12) == [1, 5, 9]


def test_sampled_steps_are_read() -> None:
    assert thinned(plain(), 5, 12, sample_every=3) == [1, 4, 6, 7, 10, 11]


def test_fp8_layers_are_counted_in_every_step() -> None:
    model = plain()
    convert(model, DelayedScaling())
    assert thinned(model, 4, 6) == [1, 2, 3, 4, 5, 6]


def test_delayed_shadow_scaling_reads_every_step() -> None:
    assert thinned(plain(), 4, 6, shadow=DelayedScaling()) == [1, 2, 3, 4, 5, 6]
    assert thinned(plain(), 4, 6, shadow=CurrentScaling()) == [1, 5]


def paced(budget: TimeBudget, clock: list[float], step: float, reading: float, steps: int) -> list[int]:
    """Simulate steps with a budget and return the steps that were read."""
    pace, read = Pace(), []
    for number in range(1, steps + 1):
        budget.begin(number, False, pace)
        # As if nothing but the reading cost anything.
        budget.fixed_seconds = -STEP_SECONDS
        clock[0] += step
        if pace.observing:
            read.append(number)
            clock[0] += reading
            pace.seconds, pace.calls = reading, 1
        budget.end(False, pace)
    return read


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1.0]
    monkeypatch.setattr("fp8scope.observe.budget.perf_counter", lambda: now[0])
    return now


def test_the_first_steps_are_complete_and_the_rest_inside_the_budget(clock: list[float]) -> None:
    budget = TimeBudget(0.02)
    read = paced(budget, clock, 50 * MS, 3.2 * MS, 1000)
    assert read[:COMPLETE_STEPS] == list(range(1, COMPLETE_STEPS + 1))
    assert budget.every == 4 and budget.was_thinned
    assert 3.2 * len(read[COMPLETE_STEPS:]) <= 0.0201 * 50 * 1000


def test_a_pause_between_steps_has_no_effect(clock: list[float]) -> None:
    budget = TimeBudget(0.02)
    paced(budget, clock, 50 * MS, 3.2 * MS, REVIEW_STEPS - 3)
    clock[0] += 600
    paced(budget, clock, 50 * MS, 3.2 * MS, 10)
    assert budget.every == 4


def test_without_a_budget_every_step_is_read(clock: list[float]) -> None:
    budget = TimeBudget(None)
    assert len(paced(budget, clock, 50 * MS, 40 * MS, 300)) == 300 and not budget.was_thinned


def test_the_other_work_of_the_agent_counts(clock: list[float]) -> None:
    budget = TimeBudget(0.02)
    pace = Pace()
    for number in range(1, COMPLETE_STEPS + 2):
        budget.begin(number, False, pace)
        clock[0] += 50.6 * MS + 0.79 * MS
        budget.fixed_seconds, pace.seconds, pace.calls = 0.6 * MS - STEP_SECONDS, 0.79 * MS, 1
        budget.end(False, pace)
    assert budget.every == 2 and budget.takes_norm


@pytest.mark.parametrize(("norm", "every", "thinned"), [(0.2, 4, False), (0.6, 4, True)])
def test_the_gradient_norm_is_computed_less_often_if_it_is_expensive(
    norm: float, every: int, thinned: bool, clock: list[float]
) -> None:
    budget = TimeBudget(0.02)
    pace = Pace()
    for number in range(1, COMPLETE_STEPS + 2):
        budget.begin(number, False, pace)
        assert budget.takes_norm
        clock[0] += (50.6 + norm + 0.79) * MS
        budget.fixed_seconds, budget.norm_seconds = 0.6 * MS - STEP_SECONDS, norm * MS
        pace.seconds, pace.calls = 0.79 * MS, 1
        budget.end(False, pace)
    assert budget.every == every
    taken = []
    for number in range(COMPLETE_STEPS + 2, COMPLETE_STEPS + 10):
        budget.begin(number, False, pace)
        taken.append(budget.takes_norm)
        assert budget.takes_norm or not pace.observing
    assert all(taken) != thinned and any(taken)


def test_skipped_steps_are_stored_without_tensors(server: WireServer, settings: Settings) -> None:
    model, x = plain(), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = Run(settings, blank_registration("thinned"))
    run.watch(model, optimizer, every=3)
    budget = run.session.steps.budget
    budget.every, budget._steps, budget.was_thinned = 4, COMPLETE_STEPS, True
    for _ in range(9):
        with run.step() as step:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    report = run.finish()
    assert report.complete and report.errors == 0 and report.points_sent == server.run.points
    assert [row["step"] for row in server.run.rows] == list(range(1, 10))
    assert server.run.scalars(PLAIN_EVERY) == [4.0] * 9
    assert None not in server.run.scalars("loss") and None not in server.run.scalars("grad_norm")
    for row in server.run.rows:
        # Every fourth step, and the sampled ones.
        read = row["step"] in (1, 4, 5, 7, 9)
        for name in ("numel", "amax", "nonfinite"):
            values = row["tensors"].get(name, [None] * 6)[:6]
            assert [value is not None for value in values] == [read] * 6, (row["step"], name, values)


def test_a_non_finite_loss_is_stored_in_a_skipped_step(server: WireServer, settings: Settings) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = Run(settings, blank_registration("thinned"))
    run.watch(model, optimizer)
    run.session.steps.budget.every, run.session.steps.budget._steps = 50, COMPLETE_STEPS
    for number in range(1, 4):
        with run.step() as step:
            step.log(loss=model(torch.full((2, 16), math.nan if number == 3 else 1.0)).mean())
    run.finish()
    assert [str(value).lower() == "nan" for value in server.run.scalars("loss")] == [
        False,
        False,
        True,
    ]
