"""A snapshot restores a training in another process, bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from fp8scope.incidents.snapshots import SnapshotError, Trained, random_state, restore_random
from fp8scope_kernels import DelayedScaling, convert


class Training:
    """A small FP8 model whose steps use everything that a snapshot has to hold."""

    def __init__(self, seed: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 32))
        convert(self.model, DelayedScaling())
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)  # type: ignore[call-arg]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.trained = Trained([self.model], [self.optimizer], [self.scheduler])

    def step(self) -> float:
        noise = torch.from_numpy(np.random.standard_normal((16, 32)).astype("float32"))
        inputs = torch.randn(16, 32) + random.random() * noise
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_another_training_goes_on_with_the_same_losses(optimizer: type[torch.optim.Optimizer]) -> None:
    one, other = Training(1, optimizer), Training(2, optimizer)
    other.step()
    for _ in range(3):
        one.step()
    snapshot = one.trained.capture()
    kept = copy.deepcopy(snapshot)
    losses = [one.step() for _ in range(4)]
    other.trained.load(snapshot)
    assert [other.step() for _ in range(4)] == losses
    # Neither the training that was captured nor the one that loaded it has changed the snapshot.
    one.trained.load(snapshot)
    assert [one.step() for _ in range(4)] == losses
    for name, tensor in kept["models"][0]["tensors"].items():
        assert torch.equal(tensor, snapshot["models"][0]["tensors"][name])


def test_an_optimizer_that_has_not_stepped_loads_it_too() -> None:
    one, other = Training(1), Training(2)
    one.step()
    snapshot, loss = one.trained.capture(), one.step()
    other.trained.load(snapshot)
    assert other.step() == loss


def test_another_model_is_an_error() -> None:
    snapshot = Training(1).trained.capture()
    other = nn.Linear(4, 4)
    with pytest.raises(SnapshotError, match="is in only one of them"):
        Trained([other], [torch.optim.SGD(other.parameters())], [nn.Linear(1, 1)]).load(snapshot)
    with pytest.raises(SnapshotError, match="the script passes 0 to"):
        Trained([other], [torch.optim.SGD(other.parameters())]).load(snapshot)
    wider = nn.Sequential(nn.Linear(32, 16))
    narrow = nn.Sequential(nn.Linear(32, 8))
    with pytest.raises(SnapshotError, match=r"0.weight is torch.float32 \[8, 32\] here"):
        Trained([narrow], []).load(Trained([wider], []).capture())


def test_random_states() -> None:
    state = random_state()
    drawn = torch.rand(2).tolist(), random.random(), np.random.random()
    restore_random(state)
    assert (torch.rand(2).tolist(), random.random(), np.random.random()) == drawn


def test_its_size_is_known_before() -> None:
    training = Training(1)
    before = training.trained.nbytes
    training.step()
    parameters = sum(p.numel() for p in training.model.parameters())
    # AdamW has two float32 moments a parameter, and a count of steps a tensor.
    tensors = len(list(training.model.parameters()))
    assert training.trained.nbytes == before + 8 * parameters + 4 * tensors
