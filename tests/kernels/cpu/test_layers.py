"""`Fp8Linear` on the CPU's compiled kernels against `Fp8Linear` on the definition: equal to the last bit."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    StatisticsBuffer,
    backends,
    convert,
    observe,
    set_backend,
)
from fp8scope_kernels.backends import Backend
from fp8scope_kernels.cpu import backend as cpu_backend

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(history_length=3),
    "delayed, most recent": DelayedScaling(amax_compute="most_recent", margin=-1),
    "every third call": DelayedScaling(history_length=2, interval=3),
    "delayed, unsaturated": DelayedScaling(saturate=False, margin=-3),
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two=True, margin=1),
    "rows": RowwiseScaling(),
    "blocks": BlockScaling(),
    "blocks, float32 scales": BlockScaling(power_of_two=False),
    "MX": MXFP8(),
}
SIZES = (1.0, 3.0, 9.0, 0.3)
"""Of the inputs, step by step: beyond the scale of the past, and within it."""
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


pytestmark = pytest.mark.usefixtures("automatic_backend")


def spoil(x: Tensor) -> Tensor:
    """An input with what must not reach a scale."""
    x[0, 0], x[1, 7], x[2, 3] = torch.nan, torch.inf, -torch.inf
    return x


def train(backend: Backend, recipe: Recipe, dtype: torch.dtype, spoilt: bool) -> list[Tensor]:
    """Steps with one or two calls, with inputs of other sizes: all that is computed, scaled and counted."""
    set_backend(backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 80)).to(dtype)
    convert(model, recipe, exclude=())
    buffer = StatisticsBuffer()
    observe(model, buffer)
    seen: list[Tensor] = []
    for step in range(4):
        for micro in range(1 + step % 2):
            x = torch.randn(24, 48, generator=torch.Generator().manual_seed(10 * step + micro)) * SIZES[step]
            x = (spoil(x) if spoilt and step == 2 else x).to(dtype).requires_grad_()
            output = model(x)
            torch.autograd.backward(output.square().mean())
            assert x.grad is not None
            seen += [output.detach(), x.grad]
        model.eval()
        seen.append(model(torch.full((3, 48), 2.0, dtype=dtype)).detach())
        model.train()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [buffer.data.clone(), buffer.block_data.clone()]
        buffer.zero_()
        model.zero_grad()
    assert backends.get_backend() == backend
    return seen + [value for _, value in model.named_buffers()]


@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "spoilt"])
def test_it_works(recipe: Recipe, dtype: torch.dtype, spoilt: bool) -> None:
    """Every output, gradient, statistic and scaling state is the same."""
    actual, expected = (train(b, recipe, dtype, spoilt) for b in ("compiled", "reference"))
    assert len(actual) == len(expected) > 20
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


Pass = tuple[str, bool, bool]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """Each pass over a tensor, as it happens: what it is, whether it measures, whether it counts."""
    noted: list[Pass] = []
    measure: Callable[[Tensor], float] = cpu_backend.measure
    quantize: Callable[..., cpu_backend.Quantized] = cpu_backend.quantize

    def measuring(x: Tensor) -> float:
        noted.append(("measure", True, False))
        return measure(x)

    def quantizing(
        *args: object, row: Tensor | None = None, extent: object = None, **options: bool
    ) -> cpu_backend.Quantized:
        names = ("x", "scale", "format", "dtype", "row", "extent")
        given = {"row": row, "extent": extent, **dict(zip(names, args, strict=False))}
        counts = given["row"] is not None
        noted.append(("cast", options.get("measure", False) or (counts and given["extent"] is None), counts))
        return quantize(**given, **options)

    monkeypatch.setattr(cpu_backend, "measure", measuring)
    monkeypatch.setattr(cpu_backend, "quantize", quantizing)
    return noted


def test_delayed_scaling_reads_a_tensor_once(passes: list[Pass]) -> None:
    """After the first call, one pass casts, counts and measures; evaluation only casts."""
    set_backend("compiled")
    layer = Fp8Linear(32, 32, recipe=DelayedScaling())
    observe(torch.nn.Sequential(layer), StatisticsBuffer())
    x = torch.randn(16, 32)
    layer(x)
    assert passes == [("measure", True, False), ("cast", False, True)] * 2
    passes.clear()
    layer(x)
    assert passes == [("cast", True, True)] * 2
    passes.clear()
    layer.eval()(x)
    assert passes == [("cast", False, False)] * 2


def test_an_unobserved_layer_goes_on_measuring(passes: list[Pass]) -> None:
    set_backend("compiled")
    layer = Fp8Linear(32, 32, recipe=DelayedScaling(history_length=2))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    for factors in ((1, 2, 4), (3, 2, 1)):
        for factor in factors:
            passes.clear()
            layer(factor * x)
        assert passes == [("cast", True, False)] * 2
        expected = [(f * x).abs().max().item() for f in (factors[2], factors[1])]
        assert layer.state_of("input").amax_history.tolist() == expected


def test_what_saturates_beyond_an_old_scale_is_counted() -> None:
    """The scale is known before the tensor is: what is beyond it shows up in the same pass."""
    rows = []
    for backend in ("compiled", "reference"):
        set_backend(backend)
        torch.manual_seed(0)
        layer, buffer = Fp8Linear(32, 16, recipe=DelayedScaling()), StatisticsBuffer()
        observe(torch.nn.Sequential(layer), buffer)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        layer(x)
        buffer.zero_()
        layer(spoil(5 * x))
        rows.append(dict(zip(STATISTICS, buffer.data[0].tolist(), strict=True)))
    assert rows[0] == rows[1]
    assert rows[0]["nonfinite"] == 3
    limit = x.abs().max()
    assert rows[0]["saturated"] == (spoil(5 * x).nan_to_num(0, 0, 0).abs() > limit).sum().item() > 10


@pytest.fixture
def defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """What model code sets while it builds a model, and sometimes leaves."""
    dtype, device = request.param
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize(
    "defaults",
    [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")],
    ids=["bfloat16", "float64", "meta"],
    indirect=True,
)
@recipes
def test_defaults_of_torch_change_nothing(backend: Backend, recipe: Recipe, defaults: None) -> None:
    """What kernels write has the dtype and the device that they think it has."""
    set_backend(backend)
    weight = torch.linspace(-1, 1, 40 * 48, dtype=torch.float32, device="cpu").view(40, 48)
    x = torch.linspace(-3, 5, 24 * 48, dtype=torch.float32, device="cpu").view(24, 48)
    results = []
    for standard in (False, True):
        if standard:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        layer = Fp8Linear(48, 40, bias=False, device="cpu", dtype=torch.float32, recipe=recipe)
        buffer = StatisticsBuffer(device="cpu")
        observe(torch.nn.Sequential(layer), buffer)
        with torch.no_grad():
            layer.weight.copy_(weight)
        for factor in (1, 2):
            # The gradient by hand, because loss functions follow the defaults too.
            layer(factor * x).backward(torch.ones(24, 40, dtype=torch.float32, device="cpu"))
        assert layer.weight.grad is not None
        results.append((layer.weight.grad, buffer.data, buffer.block_data, *layer.buffers()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
