"""Shadow mode records how a model would behave in FP8 without changing the training."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from agent.helpers.watching import AMAX, NONFINITE, NUMEL, SATURATED, SCALE, UNDERFLOW, Watched
from torch import Tensor, nn

from fp8scope_kernels import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    exponent_histogram,
    observe,
)

RECIPES = [
    DelayedScaling(history_length=3),
    DelayedScaling(amax_compute="most_recent", margin=1, interval=2),
    CurrentScaling(),
    CurrentScaling(power_of_two=True),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8(),
    NVFP4(),
    DelayedScaling(fp8_format="E5M2"),
]


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64, dtype=dtype), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32, dtype=dtype)
    )


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def losses_of(model: nn.Module, watched: Watched | None, steps: int = 6) -> list[float]:
    """Train with AdamW and dropout; every random number counts."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    dtype = next(model.parameters()).dtype
    losses: list[float] = []

    def work() -> None:
        x = torch.randn(16, 32).to(dtype)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for _ in range(steps):
        work() if watched is None else watched.step(work)
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_it_works(recipe: Recipe, dtype: torch.dtype) -> None:
    """The losses are the same numbers, to the last bit, and the tensors are seen."""
    expected = losses_of(plain_model(dtype), None)
    model = plain_model(dtype)
    watched = Watched(model, every=2, shadow=recipe)
    assert watched.tensors == 6
    assert losses_of(model, watched) == expected
    assert watched.collector.recipe == {"shadow": recipe.to_dict()}
    formats = {info.role: info.format for info in watched.catalogue}
    assert formats["grad_output"] == recipe.format_of("grad_output").name


def test_stochastic_rounding_draws_no_random_numbers() -> None:
    recipe = CurrentScaling(stochastic_gradients=True)
    expected = losses_of(plain_model(), None)
    model = plain_model()
    assert losses_of(model, Watched(model, shadow=recipe)) == expected


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_statistics_equal_those_of_an_fp8_layer(recipe: Recipe) -> None:
    """Input and weight of a layer are cast with the same scale, and counted the same, as by `Fp8Linear`."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 48)
    layer, buffer = Fp8Linear.from_linear(copy.deepcopy(linear), recipe), StatisticsBuffer()
    observe(layer, buffer)
    watched = Watched(linear, shadow=recipe)
    for factor in (1.0, 5.0, 0.2, 100.0, 1e-3, 1.0):
        x = torch.randn(16, 32) * factor
        buffer.zero_()
        buffer.sampling = True
        layer(x).square().sum().backward()
        step = watched.step(partial(backward, linear, x))
        for index, name in enumerate(("input", "weight")):
            assert step.row(name).tolist() == buffer.data[index].tolist(), (factor, name)
            assert buffer.sample_data is not None
            assert (step.histograms[name] == buffer.sample_data[index, 2:].numpy()).all()
            assert step.extra("sq_error", name) == pytest.approx(
                float(buffer.sample_data[index, 0]), rel=1e-4
            )
            blocks = buffer.block_data[index]
            assert not blocks[0] or step.extra("saturated_blocks", name) == blocks[1]


def test_unsampled_steps_record_only_amax_and_non_finite_counts() -> None:
    model = plain_model()
    watched = Watched(model, every=3, shadow=CurrentScaling())
    x = torch.randn(4, 32)
    steps = [watched.step(lambda: model(x).sum().backward()) for _ in range(4)]
    for index, step in enumerate(steps):
        row = step.row("0.input")
        assert row[NUMEL] == x.numel() and row[AMAX] == float(x.abs().max()) and row[NONFINITE] == 0
        if index % 3:
            assert torch.isnan(torch.tensor(row[SCALE:NONFINITE])).all() and not step.histograms
        else:
            assert row[SCALE] == pytest.approx(448 / row[AMAX])
            assert (step.histograms["0.input"] == exponent_histogram(x).numpy()).all()


def test_counts_elements_that_would_saturate_or_flush() -> None:
    linear = nn.Linear(16, 16, bias=False)
    watched = Watched(linear, shadow=DelayedScaling(history_length=1))
    watched.step(lambda: linear(torch.ones(4, 16)))
    x = torch.ones(4, 16)
    x[0, :3], x[1, :5], x[2, 0] = 100.0, 1e-9, torch.inf
    row = watched.step(lambda: linear(x)).row("input")
    assert (row[SCALE], row[SATURATED], row[UNDERFLOW], row[NONFINITE]) == (448.0, 3, 5, 1)


def test_delayed_scales_use_the_amax_of_unsampled_steps() -> None:
    linear = nn.Linear(16, 16, bias=False)
    watched = Watched(linear, every=3, shadow=DelayedScaling(history_length=4))
    for amax in (1.0, 7.0, 2.0):
        watched.step(partial(linear, torch.full((4, 16), amax)))
    row = watched.step(lambda: linear(torch.ones(4, 16))).row("input")
    assert row[SCALE] == pytest.approx(448 / 7)


@pytest.mark.parametrize("factor", [65536.0, 3.0])
def test_gradients_are_unscaled(factor: float) -> None:
    def gradients(scaler: Any, every: int) -> list[Any]:
        model = plain_model().eval().train()
        model[2] = nn.Identity()
        watched = Watched(model, every=every, shadow=CurrentScaling(), scaler=scaler)
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def work() -> None:
            loss = model(torch.randn(8, 32)).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()

        steps = [watched.step(work) for _ in range(3)]
        assert scaler is None or float(scaler.get_scale()) != factor, "the factor has to change on the way"
        return [step.row("0.grad_output")[AMAX] for step in steps]

    for every in (1, 2):
        expected = gradients(None, every)
        scaler = torch.amp.GradScaler("cpu", init_scale=factor, growth_interval=1)
        assert gradients(scaler, every) == pytest.approx(expected, rel=1e-5)


def test_a_disabled_scaler_does_not_change_gradients() -> None:
    model = plain_model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    watched = Watched(model, shadow=CurrentScaling(), scaler=scaler)
    row = watched.step(lambda: scaler.scale(model(torch.ones(4, 32)).sum()).backward()).row("3.grad_output")
    assert row[AMAX] == 1.0


def test_counts_fp16_gradients_that_overflowed() -> None:
    model = plain_model(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    watched = Watched(model, shadow=CurrentScaling(), scaler=scaler)
    row = watched.step(lambda: scaler.scale(model(torch.ones(4, 32).half()).sum()).backward()).row(
        "3.grad_output"
    )
    assert row[NONFINITE] == 4 * 32 and row[AMAX] == 0


def test_include_selects_other_modules() -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 24), nn.Conv1d(24, 8, 3), nn.GELU())
    watched = Watched(model, shadow=MXFP8(), include=["0", "2", "3"])

    def work() -> None:
        hidden = model[1](model[0](torch.randn(2, 5, 32)))
        model[3](model[2](hidden.transpose(1, 2))).sum().backward()

    step = watched.step(work)
    assert {name.rpartition(".")[0] for name in watched.names} == {"0", "2", "3"}
    assert step.row("2.weight")[NUMEL] == 24 * 8 * 3 and step.row("0.input")[NUMEL] == 2 * 5 * 32
    assert step.row("3.grad_output")[NUMEL] == 2 * 8 * 3 and "3.weight" not in watched.names


def test_gradient_accumulation_adds_up() -> None:
    model = plain_model()

    def work() -> None:
        for factor in (1.0, 2.0):
            model(torch.full((4, 32), factor)).sum().backward()

    for recipe in (DelayedScaling(), RowwiseScaling()):
        row = Watched(model, shadow=recipe).step(work).row("0.input")
        assert row[NUMEL] == 2 * 4 * 32 and row[AMAX] == 2.0


def test_copies_are_not_counted() -> None:
    model = plain_model()
    watched = Watched(model, shadow=DelayedScaling())
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    seen = watched.step(lambda: [twin(torch.ones(4, 32)).sum().backward() for twin in twins])
    assert not seen.observed.statistics.any()


def test_switching_a_watched_model_to_shadow_counts_once() -> None:
    model = plain_model()
    watched = Watched(model)
    assert watched.step(lambda: model(torch.ones(4, 32))).row("0.input")[SCALE] == 1
    shadowed = Watched(model, shadow=CurrentScaling())
    row = shadowed.step(lambda: model(torch.ones(4, 32))).row("0.input")
    assert row[NUMEL] == 4 * 32 and row[SCALE] == 448
    assert not watched.step(lambda: model(torch.ones(4, 32))).observed.statistics.any()


def test_an_internal_failure_does_not_reach_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor) -> None:
        raise MemoryError("no room")

    model = plain_model()
    watched = Watched(model, shadow=CurrentScaling())
    monkeypatch.setattr("fp8scope.observe.tensors.shadow.measure", broken)
    with pytest.raises(MemoryError):
        watched.step(lambda: model(torch.ones(4, 32)).sum().backward())
    # The test's own collector raises it; the forward and backward passes went through.
    assert len(watched.problems) == 6 and model[0].weight.grad is not None
