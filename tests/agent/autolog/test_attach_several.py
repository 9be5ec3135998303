"""Several optimizers, several models: which step is whose."""

import pytest
import torch
from agent.helpers.loops import batch, language_model, lm_loss, regression, squares, update
from agent.helpers.wire_server import WireServer
from torch import nn

import fp8scope

pytestmark = pytest.mark.usefixtures("online")


@pytest.mark.parametrize("forward_seen", [True, False])
def test_it_works(forward_seen: bool, server: WireServer) -> None:
    """A step of two optimizers is complete when both have stepped."""
    model, _ = language_model()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1])
    called = model
    if not forward_seen:
        called = torch.compile(model, backend="eager")  # type: ignore[assignment]
    run = fp8scope.attach(model, [matrices, vectors])
    losses = []
    for number in range(3):
        loss = lm_loss(called, number)
        loss.backward()  # type: ignore[no-untyped-call]
        update(matrices)
        update(vectors)
        losses.append(float(loss.detach()))
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss") == pytest.approx(losses)


def test_stops_waiting_for_an_optimizer_that_never_steps(server: WireServer) -> None:
    model, optimizer = regression()
    idle = torch.optim.SGD(model.parameters(), lr=0.1)
    run = fp8scope.attach(model, [optimizer, idle])
    for number in range(150):
        squares(model, number).backward()  # type: ignore[no-untyped-call]
        update(optimizer)
    run.finish()
    # The first step was waited with for a hundred; then it is one for one.
    assert server.run.steps == list(range(1, 51))


class Gan:
    """A generator of 32 features from 16, a discriminator, and their optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.discriminator = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        self.for_generator = torch.optim.Adam(self.generator.parameters())
        self.for_discriminator = torch.optim.Adam(self.discriminator.parameters())

    def attach(self) -> fp8scope.Run:
        return fp8scope.attach(
            {"generator": self.generator, "discriminator": self.discriminator},
            {"generator": self.for_generator, "discriminator": self.for_discriminator},
        )

    def train(self, critics: int = 1) -> tuple[float, float]:
        """One round; returns the losses of generator and discriminator, the latter the critics' mean."""
        of_discriminator = 0.0
        for number in range(critics):
            self.for_discriminator.zero_grad()
            fake = self.generator(batch(number, 8)[:, :16])
            loss = self.discriminator(fake.detach()).mean() - self.discriminator(batch(number)).mean()
            loss.backward()
            self.for_discriminator.step()
            of_discriminator += float(loss.detach()) / critics
        self.for_generator.zero_grad()
        loss = -self.discriminator(self.generator(batch(7, 8)[:, :16])).mean()
        loss.backward()
        self.for_generator.step()
        return float(loss.detach()), of_discriminator


@pytest.mark.parametrize("critics", [1, 3])
def test_records_two_models_that_are_trained_together(critics: int, server: WireServer) -> None:
    gan = Gan()
    run = gan.attach()
    losses = [gan.train(critics) for _ in range(3)]
    assert run.finish().errors == 0
    stored = server.run
    assert stored.steps == [1, 2, 3]
    assert stored.scalars("loss/generator") == pytest.approx([first for first, _ in losses])
    assert stored.scalars("loss/discriminator") == pytest.approx([second for _, second in losses])
    # Charts and alerts look at `loss`: the first model's.
    assert stored.scalars("loss") == stored.scalars("loss/generator")
    names = {tensor["name"] for tensor in next(iter(stored.catalogues.values()))}
    assert {"generator.0.weight", "discriminator.0.grad_output"} <= names


def test_ignores_other_models(server: WireServer) -> None:
    model, optimizer = regression()
    other, for_other = language_model()
    run = fp8scope.attach(model, optimizer)
    losses = []
    for number in range(3):
        for _ in range(2):
            lm_loss(other, number).backward()  # type: ignore[no-untyped-call]
            update(for_other)
        loss = squares(model, number)
        loss.backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        losses.append(float(loss.detach()))
    run.finish()
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss") == pytest.approx(losses)
    assert "tokens" not in server.run.rows[0]["scalars"]
