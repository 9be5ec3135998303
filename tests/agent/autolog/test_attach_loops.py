"""Training loops with accumulation, scaled losses, closures, and several optimizers and models."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from agent.helpers.loops import TinyLm, batch, language_model, lm_loss, regression, squares, update
from agent.helpers.wire_server import WireServer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fp8scope

pytestmark = pytest.mark.usefixtures("online")


def test_it_works(server: WireServer) -> None:
    """Gradient accumulation: a step is one optimizer.step(), its loss the mean of its micro-batches."""
    model, optimizer = language_model()
    run = fp8scope.attach(model, optimizer)
    losses = []
    for step in range(4):
        parts = [lm_loss(model, 3 * step + part) for part in range(3)]
        torch.autograd.backward(parts[0])
        for part in parts[1:]:
            part.backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        losses.append(sum(float(part.detach()) for part in parts) / 3)
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3, 4] and server.run.scalars("loss") == pytest.approx(losses)
    assert server.run.scalars("tokens") == [96, 192, 288, 384]


@pytest.mark.parametrize("divide", ["by a number", "by a factor", "by a tensor"])
def test_undoes_the_division_of_accumulated_losses(divide: str, server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    losses = []
    # An epoch's last step may have fewer micro-batches than it divides by.
    for step, count in enumerate([4, 4, 3]):
        parts = [squares(model, 4 * step + part) for part in range(count)]
        for part in parts:
            scaled = {
                "by a number": part / 4,
                "by a factor": part * 0.25,
                "by a tensor": part / torch.tensor(4),
            }
            scaled[divide].backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        losses.append(sum(float(part.detach()) for part in parts) / count)
    run.finish()
    assert server.run.scalars("loss") == pytest.approx(losses)


def test_keeps_a_division_that_is_part_of_the_loss(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    losses = []
    for step in range(2):
        for part in range(2):
            # A mean over features, written as a sum over their number.
            loss = (model(batch(step)) - batch(part)).square().sum() / 256
            loss.backward()
            losses.append(float(loss.detach()))
        update(optimizer)
    run.finish()
    assert server.run.scalars("loss") == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])


def test_adds_up_losses_with_reduction_sum(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, reduction="sum")
    first, second = squares(model, 0), squares(model, 1)
    first.backward()  # type: ignore[no-untyped-call]
    second.backward()  # type: ignore[no-untyped-call]
    update(optimizer)
    run.finish()
    assert server.run.scalars("loss") == pytest.approx([float(first.detach() + second.detach())])


def test_counts_steps_that_a_scaler_skips(server: WireServer) -> None:
    model, optimizer = language_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = fp8scope.attach(model, optimizer)
    losses = []
    for number in range(5):
        loss = lm_loss(model, number)
        overflows = number in (1, 2)
        scaler.scale(loss * float("inf") if overflows else loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not overflows:
            losses.append(float(loss.detach()))
    assert run.finish().errors == 0
    # Three steps were made; the two that were not are counted, and neither their losses nor their tokens are.
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss") == pytest.approx(losses)
    assert server.run.scalars("tokens") == [32, 64, 96]
    assert server.run.scalars("skipped_steps") == [None, 2, None]


def test_works_with_a_disabled_scaler(server: WireServer) -> None:
    model, optimizer = regression()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = fp8scope.attach(model, optimizer)
    loss = squares(model, 0)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    run.finish()
    assert server.run.scalars("loss") == pytest.approx([float(loss.detach())])
    assert server.run.scalars("skipped_steps") == [None]


def test_takes_the_first_loss_of_a_repeated_closure(server: WireServer) -> None:
    torch.manual_seed(0)
    model = TinyLm()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    run = fp8scope.attach(model, optimizer)
    evaluations, returned = [], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = lm_loss(model, 0)
        loss.backward()  # type: ignore[no-untyped-call]
        evaluations.append(float(loss.detach()))
        return loss

    for _ in range(3):
        returned.append(float(optimizer.step(closure).detach()))  # type: ignore[no-untyped-call]
    assert run.finish().errors == 0
    assert len(evaluations) > 6
    # The step's loss is the one before it moved, which is also what LBFGS returns.
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss") == pytest.approx(returned)
    assert server.run.scalars("tokens") == [32, 64, 96]


class Recomputing(nn.Module):
    """Drops the activations of its body, and computes them again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = TinyLm()
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.inner.embed(input_ids)
        hidden = checkpoint(self.inner.body, hidden, use_reentrant=self.reentrant)
        logits: Tensor = self.inner.head(hidden)
        return logits


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_makes_no_extra_step(reentrant: bool, server: WireServer) -> None:
    torch.manual_seed(0)
    model = Recomputing(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = fp8scope.attach(model, optimizer)
    losses = []
    for number in range(3):
        loss = lm_loss(model, number)
        loss.backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        losses.append(float(loss.detach()))
    assert run.finish().errors == 0
    assert server.run.scalars("loss") == pytest.approx(losses) and server.run.scalars("tokens") == [
        32,
        64,
        96,
    ]


def test_records_steps_without_a_loss_if_no_scalar_is_differentiated(server: WireServer) -> None:
    """No scalar is differentiated: there are steps, and no loss."""
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    for number in range(2):
        model(batch(number)).backward(batch(number))
        update(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3] and server.run.scalars("loss") == [None, None, None]


def test_errors_of_backward_reach_the_script(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    loss = squares(model, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        model(batch(0)).backward()
    update(optimizer)
    assert run.finish().errors == 0 and server.run.finish["state"] == "finished"
    assert server.run.scalars("loss") == pytest.approx([float(loss.detach())])


def test_an_optimizer_that_raises_makes_no_step(server: WireServer) -> None:
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer)
    losses = []
    for number in range(5):
        loss = squares(model, number)
        if number == 2:

            def broken() -> float:
                raise ZeroDivisionError("as planned")

            with pytest.raises(ZeroDivisionError):
                optimizer.step(broken)
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        update(optimizer)
        losses.append(float(loss.detach()))
    assert run.finish().errors == 0
    assert server.run.steps == [1, 2, 3, 4] and server.run.scalars("loss") == pytest.approx(losses)


def test_works_when_another_tool_wraps_backward(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool replaces `backward` after us, and is there when the next run begins."""
    model, optimizer = regression()
    first = fp8scope.attach(model, optimizer, name="first")
    ours = torch.autograd.backward

    def theirs(*args: object, **kwargs: object) -> None:
        ours(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    first.finish()
    second = fp8scope.attach(model, optimizer, name="second")
    squares(model, 0).backward()  # type: ignore[no-untyped-call]
    update(optimizer)
    second.finish()
    assert server.runs[second.id].steps == [1]
    assert server.runs[second.id].scalars("loss") != [None]
    # Once the other has gone, nothing of ours is left behind either.
    monkeypatch.undo()
    fp8scope.attach(model, optimizer, name="third").finish()
    assert torch.autograd.backward is ours.__wrapped__  # type: ignore[attr-defined]


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sees_every_accumulated_loss_of_sharded_gradients(server: WireServer, alone_in_a_group: None) -> None:
    # FSDP2 adds later gradients to the local part of the first one, whose version stays.
    model = nn.Linear(4, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = fp8scope.attach(model, optimizer)
    expected = []
    for _ in range(3):
        losses = []
        for _ in range(4):
            loss = model(torch.randn(8, 4)).square().mean()
            (loss / 4).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(losses) / 4)
    assert run.finish().errors == 0
    assert server.run.scalars("loss") == pytest.approx(expected)
