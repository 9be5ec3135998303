"""Commands and reports travel between a real agent that trains a model and a real server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.live_servers import Server
from torch import nn

import fp8scope
from fp8scope.control.precision import fp8_layers_of, precision_of
from fp8scope_dashboard.control import commands
from fp8scope_dashboard.control.models import Command, Report
from fp8scope_dashboard.runs.models import Run

DEADLINE_SECONDS = 60.0


class Training:
    """An FP8 model in training and the run that records it."""

    def __init__(self, server: Server, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        fp8scope.convert(self.model, fp8scope.DelayedScaling())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.run = fp8scope.init(name="looped", url=server.url, token=server.token, directory=folder)
        self.run.watch(self.model)

    def train_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        error: torch.Tensor = (self.model(batch) - batch).square().mean()
        return error

    def train_until(self, done: Callable[[], object]) -> None:
        """Train until `done` returns a true value."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done():
            assert time.monotonic() < deadline, "the condition did not hold in time"
            with self.run.step() as step:
                step.log(loss=self.train_step(torch.randn(16, 32)))
            time.sleep(0.02)

    @property
    def stored(self) -> Run:
        return Run.objects.get(pk=self.run.id)

    def precisions(self) -> dict[str, str]:
        return {path: precision_of(layer) for path, layer in fp8_layers_of(self.model)}


@pytest.fixture
def training(server: Server, tmp_path: Path) -> Training:
    return Training(server, tmp_path / "spool")


def state(command: Command) -> str:
    command.refresh_from_db()
    return commands.state_of(command, command.results.all())


def test_it_works(training: Training) -> None:
    training.run.on_command("checkpoint", lambda command: f"written for {command.given_by}")
    training.train_until(lambda: Run.objects.filter(pk=training.run.id).exists())
    training.train_until(lambda: commands.accepted_kinds(training.stored) == {"checkpoint", "fallback"})
    fallback = commands.give(training.stored, "fallback", {"patterns": ["2"]}, reason="it clips")
    checkpoint = commands.give(training.stored, "checkpoint")
    training.train_until(lambda: state(fallback) == state(checkpoint) == "done")
    assert training.precisions() == {"0": "fp8", "2": "bf16"}
    assert fallback.results.get().message == "1 of 1 layers changed to BF16."
    assert checkpoint.results.get().message == "written for somebody"
    assert training.run.finish().complete
    annotation = Report.objects.get(kind="annotation")
    assert annotation.document["why"] == "somebody: it clips" and annotation.document["layers"] == ["2"]
    assert 0 < annotation.step == fallback.results.get().step
    assert training.stored.rows_stored == training.stored.rows_sent
    assert training.stored.points_stored == training.stored.points_sent


def test_reports_of_windows_and_bisections_are_stored(training: Training) -> None:
    run = training.run
    train_step = run.reference_window(
        training.train_step, training.model, training.optimizer, every=6, steps=3, policy="fallback"
    )
    training.train_step = train_step  # type: ignore[method-assign]
    training.train_until(lambda: run.session.step > 16)
    bisection = run.bisect(torch.randn(16, 32), training.loss)
    assert run.finish().complete
    first, second = Report.objects.filter(kind="reference").order_by("step")
    assert (first.step, second.step) == (7, 13) and len(first.document["fp8"]) == 3
    assert first.document["tolerance"] in (training.stored.project.margin, 0.0025)
    ranking = Report.objects.get(kind="bisect").document
    assert ranking["measured"] == 6 and ranking["products"][0]["layer"] == bisection.worst.layer
    assert ranking["total_error"] == bisection.total.relative_error


def test_a_command_given_while_the_server_is_stopped_is_delivered(training: Training, server: Server) -> None:
    """Commands are stored in the database, so no state of the server process is needed."""
    import signal

    training.train_until(lambda: Run.objects.filter(pk=training.run.id).exists())
    training.train_until(lambda: "fallback" in commands.accepted_kinds(training.stored))
    server.process.send_signal(signal.SIGSTOP)
    try:
        command = commands.give(training.stored, "fallback", {"patterns": ["0"]})
        for _ in range(5):
            with training.run.step() as step:
                step.log(loss=training.train_step(torch.randn(16, 32)))
    finally:
        server.process.send_signal(signal.SIGCONT)
    training.train_until(lambda: state(command) == "done")
    assert training.precisions()["0"] == "bf16"
    assert training.run.finish().complete
    assert command.results.count() == 1
