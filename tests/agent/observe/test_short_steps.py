"""Steps of a few milliseconds: only every nth is measured, and each one's loss is recorded."""

import math
import time

import pytest
import torch
from agent.helpers.stored_run import StoredRun
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope
from fp8scope.config import Settings
from fp8scope.observe.budget import TimeBudget
from fp8scope.run import Run

STEPS = 230


def train(run_it: bool, settings: Settings, *, poison: int = 0) -> tuple[list[float], list[int]]:
    """The losses, and the steps in which the agent measured; NaN weights from step `poison` on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    run: Run | None = None
    if run_it:
        how = {"url": settings.url, "token": settings.token, "directory": settings.directory}
        run = fp8scope.attach(model, optimizer, name="short", **how)  # type: ignore[arg-type]
        # The machine's speed must not decide: as if reviewed after steps of a millisecond.
        run.session.steps.budget._measured_every = 10
        run.session.steps.budget._review = lambda: None  # type: ignore[method-assign]
    losses, measured = [], []
    for number in range(1, STEPS + 1):
        loss = model(torch.randn(4, 8)).square().mean()
        if number == poison:
            loss = loss * math.nan
        optimizer.zero_grad()
        loss.backward()
        if run is not None and not run.session.steps.budget.is_light:
            measured.append(number)
        optimizer.step()
        losses.append(loss.item())
    if run is not None:
        run.finish()
    return losses, measured


def test_it_works(server: WireServer, settings: Settings) -> None:
    """The training is the same bit for bit, and no loss is missing."""
    alone, _ = train(False, settings)
    losses, measured = train(True, settings)
    assert losses == alone
    stored: StoredRun = server.run
    assert stored.scalars("loss") == pytest.approx(losses, rel=1e-6)
    assert measured == [1, *range(11, STEPS + 1, 10)]
    for name in ("time_forward", "grad_norm", "learning_rate"):
        recorded = [step for step, value in zip(stored.steps, stored.scalars(name), strict=True) if value]
        assert recorded == measured, name


def test_times_are_those_of_one_step(server: WireServer, settings: Settings) -> None:
    """The time of the steps in between belongs to none."""
    began = time.perf_counter()
    train(True, settings)
    whole = time.perf_counter() - began
    names = ("time_data", "time_forward", "time_backward", "time_optimizer", "time_other")
    values = [value for name in names for value in server.run.scalars(name) if value]
    # One step of ten is measured; without a restart of the clock they would add up to all steps.
    assert len(values) >= 4 * STEPS // 10 and sum(values) < whole / 2


def test_nan_is_seen_at_once(server: WireServer, settings: Settings) -> None:
    """In a step in which nothing else is measured."""
    losses, measured = train(True, settings, poison=125)
    assert 125 not in measured and math.isnan(losses[124])
    value = server.run.scalars("loss")[124]
    assert value is not None and math.isnan(value)


def test_the_budget_decides() -> None:
    """By what a step takes and what measuring it takes."""
    for step, every in ((1e-3, 50), (4e-3, 10), (0.2, 1)):
        budget = TimeBudget(0.02)
        budget._durations.extend([step] * 50)
        budget._fixed.extend([6e-4] * 50)
        budget._readings.append(1e-4)
        budget._review()
        assert budget._measured_every == every and budget.every >= every, step
        assert (budget.lag > 0) == (every > 1)
        measured = []
        for number in range(1, 201):
            budget.plan(number)
            if not budget.is_light:
                measured.append(number)
        assert measured == list(range(1, 201, every))
