"""FP8 layers: the statistics of sampled steps, and the state behind a delayed scale."""

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from agent.helpers.watching import AMAX, NONFINITE, NUMEL, SCALE, Watched
from torch import nn

from fp8scope_kernels import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    convert,
    exponent_histogram,
    fp8_layers,
)


def fp8_model(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    convert(model, recipe)
    return model


def train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8(), NVFP4()]
)
def test_it_works(recipe: Recipe) -> None:
    model = fp8_model(recipe)
    watched = Watched(model, every=3)
    x = torch.randn(16, 32)
    steps = [watched.step(lambda: train(model, x)) for _ in range(5)]
    assert watched.names == [f"{p}.{r}" for p in (0, 2) for r in ("input", "weight", "grad_output")]
    for index, step in enumerate(steps):
        assert step.row("0.input")[NUMEL] == 16 * 32 and step.row("0.input")[AMAX] == float(x.abs().max())
        sampled = index % 3 == 0
        assert len(step.histograms) == (6 if sampled else 0)
        assert bool(step.observed.extras) == sampled
        if sampled:
            assert (step.histograms["0.input"] == exponent_histogram(x).numpy()).all()
            decibels = (
                10
                * torch.tensor(step.extra("sq_signal", "0.input") / step.extra("sq_error", "0.input")).log10()
            )
            # Four bits have two significant ones, FP8 three and four.
            assert (14 < decibels < 24) if recipe.kind == "NVFP4" else (24 < decibels < 36)
    blocks = steps[0].extra("blocks", "0.input")
    expected = {"RowwiseScaling": 16, "BlockScaling": 16, "MXFP8": 16, "NVFP4": 32}
    assert blocks == expected[recipe.kind] if recipe.kind in expected else blocks != blocks
    assert watched.collector.recipe == recipe.to_dict()


def test_a_history_without_an_amax_freezes_its_scale() -> None:
    model = fp8_model(DelayedScaling(history_length=2))
    watched = Watched(model)
    zeros, ones = torch.zeros(4, 32), torch.ones(4, 32)
    frozen = watched.step(lambda: train(model, zeros))
    assert frozen.extra("scale_frozen", "0.input") == 1 and frozen.extra("history_amax", "0.input") == 0
    thawed = watched.step(lambda: train(model, 3 * ones))
    assert thawed.extra("scale_frozen", "0.input") == 0 and thawed.extra("history_amax", "0.input") == 3
    assert thawed.row("0.input")[SCALE] == pytest.approx(448 / 3)
    # Zeros do not enter the history.
    watched.step(lambda: train(model, zeros))
    later = watched.step(lambda: train(model, zeros))
    assert later.extra("scale_frozen", "0.input") == 0 and later.extra("history_amax", "0.input") == 3
    assert later.row("0.input")[SCALE] == pytest.approx(448 / 3)


def test_reports_tensors_whose_scaling_state_a_checkpoint_lacks() -> None:
    model = fp8_model(DelayedScaling())
    plain = {k: v for k, v in model.state_dict().items() if "0.scaling" not in k}
    watched = Watched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_state_dict(plain, strict=False)
    step = watched.step(lambda: train(model, torch.randn(4, 32)))
    assert step.extra("scale_stale", "0.input") == 1 and step.extra("scale_stale", "2.input") == 0


def test_recipes_without_a_history_have_no_history_statistics() -> None:
    model = fp8_model(CurrentScaling())
    step = Watched(model).step(lambda: train(model, torch.randn(4, 32)))
    assert set(step.observed.extras) == {"sq_error", "sq_signal", "kurtosis"}


def test_observes_high_precision_layers_next_to_fp8_layers() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    convert(model, DelayedScaling(), include="0")
    watched = Watched(model)
    x = torch.randn(4, 32)
    x[0, 0] = torch.nan
    step = watched.step(lambda: train(model, x))
    assert watched.tensors == 6
    assert {info.format for info in watched.catalogue} == {"E4M3", "E5M2", ""}
    assert step.row("0.input")[NONFINITE] == 1 and step.row("2.input")[NUMEL] == 4 * 64
    assert "2.input" not in step.histograms


def test_sampling_can_be_disabled() -> None:
    model = fp8_model(DelayedScaling())
    watched = Watched(model, every=0)
    step = watched.step(lambda: train(model, torch.randn(4, 32)))
    assert step.row("0.input")[NUMEL] > 0 and not step.histograms and not step.observed.extras


def test_names_omit_wrappers() -> None:
    model = fp8_model(DelayedScaling())
    assert Watched(torch.compile(model, backend="eager")).tensors == 6  # type: ignore[arg-type]
    inner = fp8_model(DelayedScaling())
    inner[0] = torch.compile(inner[0], backend="eager")  # type: ignore[assignment]
    watched = Watched(inner)
    watched.step(lambda: train(inner, torch.randn(4, 32)))
    assert "0.input" in watched.names and not any("_orig_mod" in name for name in watched.names)


def test_does_not_keep_the_model_alive() -> None:
    model = fp8_model(DelayedScaling())
    watched = Watched(model)
    watched.step(partial(train, model, torch.randn(4, 32)))
    gone = weakref.ref(next(layer for _, layer in fp8_layers(model)))
    del model
    gc.collect()
    assert gone() is None
    assert not watched.step(lambda: None).observed.statistics.any()
