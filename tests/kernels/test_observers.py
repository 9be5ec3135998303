"""Observing a model whose layers stay in high precision."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    STATISTICS,
    DelayedScaling,
    StatisticsBuffer,
    convert,
    observable_layers,
    observe,
    unobserve,
)

NUMEL, AMAX, SCALE, NONFINITE = (STATISTICS.index(name) for name in ("numel", "amax", "scale", "nonfinite"))
CLAMPED = [STATISTICS.index(name) for name in ("saturated", "underflow", "subnormal")]


class Net(nn.Module):
    """Two layers that `convert` takes and a head that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(torch.relu(self.up(x))))
        return out


def observed(model: nn.Module) -> tuple[StatisticsBuffer, dict[str, int]]:
    buffer = StatisticsBuffer()
    observe(model, buffer)
    return buffer, {info.name: index for index, info in enumerate(buffer.catalogue)}


def test_it_works() -> None:
    torch.manual_seed(0)
    model = Net()
    buffer, rows = observed(model)
    x = torch.randn(3, 5, 16)
    hidden: list[Tensor] = []
    model.up.register_forward_hook(lambda _, __, output: hidden.append(output))
    out = model(x).square().sum()
    (gradient,) = torch.autograd.grad(out, hidden[0])
    for name, tensor in (
        ("up.input", x),
        ("up.weight", model.up.weight.detach()),
        ("up.grad_output", gradient),
    ):
        row = buffer.data[rows[name]]
        assert row[NUMEL] == tensor.numel()
        assert row[AMAX] == tensor.abs().max().double()
        assert row[SCALE] == 1
        assert row[NONFINITE] == 0
        assert row[CLAMPED].tolist() == [0, 0, 0]


def test_the_names_are_those_of_the_converted_model() -> None:
    plain, converted = Net(), Net()
    convert(converted, DelayedScaling())
    _, rows = observed(plain)
    _, fp8_rows = observed(converted)
    assert rows == fp8_rows
    assert not any(name.startswith("head") for name in rows)


def test_nothing_is_quantised_and_the_catalogue_says_so() -> None:
    model = Net()
    expected = model(torch.ones(2, 16))
    buffer, _ = observed(model)
    assert torch.equal(model(torch.ones(2, 16)), expected)
    assert {info.format for info in buffer.catalogue} == {""}


def test_layers_that_convert_left_are_observed_beside_the_fp8_ones() -> None:
    model = Net()
    convert(model, DelayedScaling(), include="up")
    buffer, rows = observed(model)
    formats = {info.name: info.format for info in buffer.catalogue}
    assert formats["up.input"] == "E4M3"
    assert formats["down.input"] == ""
    assert [name for name, _ in observable_layers(model)] == ["up", "down"]
    model(torch.randn(4, 16)).sum().backward()
    assert (buffer.data[:, NUMEL] > 0).all()


class RoundedLinear(nn.Linear):
    """A layer that `convert` must leave, and that can be observed all the same."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.bfloat16().float())


def test_subclasses_of_linear_are_observed() -> None:
    model = nn.Sequential(RoundedLinear(16, 16), nn.Linear(16, 24))
    buffer, rows = observed(model)
    assert set(rows) == {"0.input", "0.weight", "0.grad_output"}
    model(torch.full((2, 16), 1.001)).sum().backward()
    assert buffer.data[rows["0.input"], AMAX] == torch.tensor(1.001).double()
    assert buffer.data[rows["0.grad_output"], NUMEL] == 32


def test_a_model_that_is_one_layer_is_observed() -> None:
    _, rows = observed(nn.Linear(16, 16))
    assert set(rows) == {"input", "weight", "grad_output"}


def test_non_finite_elements_are_counted_and_do_not_reach_amax() -> None:
    model = Net()
    buffer, rows = observed(model)
    x = torch.ones(2, 16)
    x[0, 0], x[0, 1], x[1, 0] = torch.nan, torch.inf, -3.0
    model(x)
    row = buffer.data[rows["up.input"]]
    assert row[NONFINITE] == 2
    assert row[AMAX] == 3


def test_calls_of_one_step_add_up() -> None:
    model = Net()
    buffer, rows = observed(model)
    model(torch.full((2, 16), 2.0)).sum().backward()
    model(torch.full((4, 16), 1.0)).sum().backward()
    assert buffer.data[rows["up.input"], NUMEL] == 6 * 16
    assert buffer.data[rows["up.input"], AMAX] == 2
    assert buffer.data[rows["down.grad_output"], NUMEL] == 6 * 16


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_count_twice(reentrant: bool) -> None:
    model = Net()
    buffer, rows = observed(model)
    x = torch.randn(2, 16, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    for role in ("input", "grad_output"):
        assert buffer.data[rows[f"up.{role}"], NUMEL] == 2 * (16 if role == "input" else 32)


def test_evaluation_is_not_counted() -> None:
    model = Net()
    buffer, _ = observed(model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert not buffer.data.any()


def test_observing_twice_counts_once() -> None:
    model = Net()
    buffer, rows = observed(model)
    assert observe(model, buffer) == 6
    model(torch.ones(2, 16))
    assert buffer.data[rows["up.input"], NUMEL] == 32


def test_unobserve_removes_the_hooks() -> None:
    model = Net()
    buffer, _ = observed(model)
    unobserve(model)
    model(torch.ones(2, 16)).sum().backward()
    assert not buffer.data.any()
    assert not model.up._forward_hooks


def test_copies_are_not_counted() -> None:
    model = Net()
    buffer, _ = observed(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    for twin in twins:
        twin(torch.ones(2, 16)).sum().backward()
    assert not buffer.data.any()
    other, rows = observed(twins[0])
    twins[0](torch.ones(2, 16))
    assert other.data[rows["up.input"], NUMEL] == 32


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(1)
    model = Net()
    buffer, rows = observed(model)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
    assert buffer.data[rows["up.input"], AMAX] == x.abs().max().double()
    assert buffer.data[rows["up.grad_output"], NUMEL] == 4 * 32


def test_another_device_is_refused() -> None:
    model = Net().to("meta")
    with pytest.raises(ValueError, match="one buffer per device"):
        observe(model, StatisticsBuffer())
