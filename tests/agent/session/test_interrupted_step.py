"""Ctrl-C while a step is being recorded: the run ends as failed, with every step once."""

from typing import Any

import pytest
import torch
from agent.helpers.interrupts import Interrupter, points_to_try
from agent.helpers.reference_training import begin
from agent.helpers.stored_run import StoredRun
from agent.helpers.wire_server import WireServer
from torch import nn

from fp8scope.autolog.attach import attach_run
from fp8scope.config import Settings

# The files in which the training thread shares data with other threads.
QUEUE = ("/session/pipeline.py", "/recording/recorder.py", "/recording/spool.py", "/recording/segments.py")
EVERY = 40


def interrupted(
    server: WireServer, settings: Settings, at: int, *, steps_before: int, watching: dict[str, Any]
) -> tuple[Interrupter, StoredRun]:
    """Train, with Ctrl-C at point `at` of two steps; returns what was interrupted, and the stored run."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = begin(settings)
    attach_run(run, model, optimizer, watching=watching)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()

    train(steps_before)
    interrupter = Interrupter(at)
    error = interrupter.call(lambda: train(2))
    if error is not None:
        run.session.note_failure(error)
    assert run.finish().complete, f"at {interrupter.places[-1:]}"
    return interrupter, server.runs[run.id]


@pytest.mark.parametrize(
    ("steps_before", "watching"), [(4, {"overhead": None}), (12, {})], ids=["all tensors", "light steps"]
)
def test_it_works(
    steps_before: int, watching: dict[str, Any], server: WireServer, settings: Settings
) -> None:
    def at(point: int) -> tuple[Interrupter, StoredRun]:
        return interrupted(server, settings, point, steps_before=steps_before, watching=watching)

    points = points_to_try(at(0)[0].places, QUEUE, EVERY)
    assert len(points) > 20
    tried = 0
    for point in points:
        interrupter, stored = at(point)
        if len(interrupter.places) < point:
            continue  # Other threads did some of the work this time.
        tried += 1
        where = f"Ctrl-C at point {point}, {interrupter.places[-1]}"
        finishes = [(each["state"], each["ends_run"], each["errors"]) for each in stored.finishes]
        assert finishes == [("failed", True, 0)], where
        assert stored.steps == list(range(1, len(stored.steps) + 1)), where
        # The last completed step is recorded when the next one begins: it alone may be lost.
        assert len(stored.steps) >= steps_before - 1, where
    assert tried > len(points) / 2
