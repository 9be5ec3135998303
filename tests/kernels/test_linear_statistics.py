"""What a layer counts, and when: once per training call, however the training is arranged."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope_kernels import (
    STATISTICS,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    StatisticsBuffer,
    convert,
    fp8_layers,
    observe,
    unobserve,
)

recipes = pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=["delayed", "current"])


def make_model(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert(model, recipe)
    return model


def batch(seed: int = 1, rows: int = 16) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def rows_of(buffer: StatisticsBuffer) -> dict[str, dict[str, float]]:
    return {
        info.name: dict(zip(STATISTICS, row, strict=True))
        for info, row in zip(buffer.catalogue, buffer.data.tolist(), strict=True)
    }


def test_it_works() -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer()
    assert observe(model, buffer) == 6
    model(batch()).square().mean().backward()
    stats = rows_of(buffer)
    assert list(stats) == [f"{layer}.{role}" for layer in "02" for role in ("input", "weight", "grad_output")]
    assert {name: row["numel"] for name, row in stats.items()} == {
        "0.input": 16 * 32,
        "0.weight": 32 * 64,
        "0.grad_output": 16 * 64,
        "2.input": 16 * 64,
        "2.weight": 32 * 64,
        "2.grad_output": 16 * 32,
    }
    assert stats["0.input"]["amax"] == batch().abs().max().item()
    assert stats["0.input"]["scale"] == (torch.tensor(448.0) / batch().abs().max()).item()
    assert (
        stats["2.weight"]["amax"]
        == torch.linalg.vector_norm(model.get_parameter("2.weight"), torch.inf).item()
    )


def test_observing_changes_no_number_of_the_training() -> None:
    plain, watched = make_model(DelayedScaling()), make_model(DelayedScaling())
    observe(watched, StatisticsBuffer())
    for seed in range(3):
        for model in (plain, watched):
            model(batch(seed)).square().mean().backward()
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@recipes
def test_gradient_accumulation_adds_up(recipe: Recipe) -> None:
    model, buffer = make_model(recipe), StatisticsBuffer()
    observe(model, buffer)
    for seed in range(4):
        model(batch(seed)).square().mean().backward()
    row = rows_of(buffer)["0.input"]
    assert row["numel"] == 4 * 16 * 32
    assert row["amax"] == max(batch(seed).abs().max().item() for seed in range(4))


@recipes
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_counts_once(recipe: Recipe, use_reentrant: bool) -> None:
    """Recomputation leaves counters, state and gradients as they are without it."""
    results = []
    for recompute in (False, True):
        model, buffer = make_model(recipe), StatisticsBuffer()
        observe(model, buffer)
        for seed in range(3):
            x = batch(seed).requires_grad_()
            y = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
            y.square().mean().backward()
        results.append((rows_of(buffer), model.state_dict(), [p.grad for p in model.parameters()]))
    (rows, state, grads), (rows_again, state_again, grads_again) = results
    assert rows == rows_again
    assert state.keys() == state_again.keys()
    assert all(torch.equal(state[key], state_again[key]) for key in state)
    for grad, again in zip(grads, grads_again, strict=True):
        assert grad is not None and again is not None and torch.equal(grad, again)


def test_a_layer_used_twice_counts_both() -> None:
    layer, buffer = Fp8Linear(32, 32, recipe=DelayedScaling()), StatisticsBuffer()
    model = nn.ModuleDict({"shared": layer})
    observe(model, buffer)
    layer(layer(batch())).sum().backward()
    assert [row["numel"] for row in rows_of(buffer).values()] == [2 * 16 * 32, 2 * 32 * 32, 2 * 16 * 32]


def test_evaluation_is_not_counted() -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer()
    observe(model, buffer)
    model.eval()
    model(batch())
    with torch.no_grad():
        model(batch())
    assert torch.count_nonzero(buffer.data) == 0


def test_training_without_gradients_counts_the_forward_only() -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer()
    observe(model, buffer)
    with torch.no_grad():
        model(batch())
    numels = {name: row["numel"] for name, row in rows_of(buffer).items()}
    assert numels["0.grad_output"] == 0
    assert numels["0.input"] == 16 * 32


def test_bf16_layers_are_not_counted() -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer()
    observe(model, buffer)
    next(layer for _, layer in fp8_layers(model)).precision = "bf16"
    model(batch()).sum().backward()
    numels = [row["numel"] for row in rows_of(buffer).values()]
    assert numels == [0, 0, 0, 16 * 64, 32 * 64, 16 * 32]


def test_a_non_finite_element_is_counted_and_does_not_freeze_the_scale() -> None:
    model, buffer = make_model(DelayedScaling(history_length=1)), StatisticsBuffer()
    observe(model, buffer)
    x = batch()
    x[3, 5] = torch.inf
    x[4, 6] = torch.nan
    model(x)
    assert rows_of(buffer)["0.input"]["nonfinite"] == 2
    assert rows_of(buffer)["0.input"]["amax"] == x[torch.isfinite(x)].abs().max().item()
    model(10 * batch())
    buffer.zero_()
    model(batch())
    assert rows_of(buffer)["0.input"]["scale"] == (torch.tensor(448.0) / (10 * batch()).abs().max()).item()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_is_not_counted(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer()
    observe(model, buffer)
    twin = duplicate(model)
    twin(batch())
    assert torch.count_nonzero(buffer.data) == 0
    model(batch())
    assert rows_of(buffer)["0.input"]["numel"] == 16 * 32


def test_unobserve_stops_counting() -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer()
    observe(model, buffer)
    unobserve(model)
    model(batch()).sum().backward()
    assert torch.count_nonzero(buffer.data) == 0


def test_modules_that_appear_later_get_rows_of_their_own() -> None:
    model, buffer = make_model(DelayedScaling()), StatisticsBuffer(capacity=6)
    observe(model, buffer)
    model(batch())
    before = rows_of(buffer)
    model.append(Fp8Linear(32, 16, recipe=DelayedScaling()))
    assert observe(model, buffer) == 9
    assert {name: rows_of(buffer)[name] for name in before} == before
    buffer.zero_()
    model(batch())
    assert rows_of(buffer)["3.input"]["numel"] == 16 * 32
    assert rows_of(buffer)["0.input"]["numel"] == 16 * 32


def test_a_buffer_on_another_device_is_refused() -> None:
    model = make_model(DelayedScaling())
    with pytest.raises(ValueError, match="on cpu, but the statistics buffer is on meta"):
        observe(model, StatisticsBuffer(device="meta"))
    assert all(not layer.slots for layer in model if isinstance(layer, Fp8Linear))
