"""The loop closed, with nothing between: the real agent, the real server, and a real model."""

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

PATIENCE = 60.0


class Training:
    """A model in FP8, and a run that records it."""

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
        found: torch.Tensor = (self.model(batch) - batch).square().mean()
        return found

    def until(self, done: Callable[[], object]) -> None:
        """Train until something is true."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, "It did not happen."
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
    training.run.on_command("checkpoint", lambda asked: f"written for {asked.given_by}")
    training.until(lambda: Run.objects.filter(pk=training.run.id).exists())
    training.until(lambda: commands.accepted_kinds(training.stored) == {"checkpoint", "fallback"})
    fall = commands.give(training.stored, "fallback", {"patterns": ["2"]}, reason="it clips")
    write = commands.give(training.stored, "checkpoint")
    training.until(lambda: state(fall) == state(write) == "done")
    assert training.precisions() == {"0": "fp8", "2": "bf16"}
    assert fall.results.get().message == "1 of 1 layers changed to BF16."
    assert write.results.get().message == "written for somebody"
    assert training.run.finish().complete
    mark = Report.objects.get(kind="annotation")
    assert mark.document["why"] == "somebody: it clips" and mark.document["layers"] == ["2"]
    assert 0 < mark.step == fall.results.get().step
    assert training.stored.rows_stored == training.stored.rows_sent
    assert training.stored.points_stored == training.stored.points_sent


def test_what_it_finds_out_arrives(training: Training) -> None:
    run = training.run
    train_step = run.reference_window(
        training.train_step, training.model, training.optimizer, every=6, steps=3, policy="fallback"
    )
    training.train_step = train_step  # type: ignore[method-assign]
    training.until(lambda: run.session.step > 16)
    found = run.bisect(torch.randn(16, 32), training.loss)
    assert run.finish().complete
    first, second = Report.objects.filter(kind="reference").order_by("step")
    assert (first.step, second.step) == (7, 13) and len(first.document["fp8"]) == 3
    assert first.document["tolerance"] in (training.stored.project.margin, 0.0025)
    ranking = Report.objects.get(kind="bisect").document
    assert ranking["measured"] == 6 and ranking["products"][0]["layer"] == found.worst.layer
    assert ranking["total_error"] == found.total.relative_error


def test_a_command_waits_for_a_server_that_was_away(training: Training, server: Server) -> None:
    """It is in the database: what the server forgets does not matter."""
    import signal

    training.until(lambda: Run.objects.filter(pk=training.run.id).exists())
    training.until(lambda: "fallback" in commands.accepted_kinds(training.stored))
    server.process.send_signal(signal.SIGSTOP)
    try:
        command = commands.give(training.stored, "fallback", {"patterns": ["0"]})
        for _ in range(5):
            with training.run.step() as step:
                step.log(loss=training.train_step(torch.randn(16, 32)))
    finally:
        server.process.send_signal(signal.SIGCONT)
    training.until(lambda: state(command) == "done")
    assert training.precisions()["0"] == "bf16"
    assert training.run.finish().complete
    assert command.results.count() == 1
