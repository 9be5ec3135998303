"""MXFP4 and NVFP4: their definitions in float64, block by block, and layers that train with them."""

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernels.helpers.values import all_bfloat16
from torch import Tensor, nn

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E2M1,
    MXFP4,
    NVFP4,
    STATISTICS,
    Fp8Linear,
    RandomStream,
    Recipe,
    StatisticsBuffer,
    backends,
    convert,
    observe,
    quantize_blocks,
    quantize_nvfp4,
    recipe_from_dict,
)
from fp8scope_kernels.hadamard import MINUS, rotate, signs
from fp8scope_kernels.random_stream import philox
from fp8scope_kernels.recipes import Block, Role
from fp8scope_kernels.weight_only import unpack_nibbles

Doubles = npt.NDArray[np.float64]

CASES: dict[str, tuple[Recipe, Block]] = {
    "NVFP4": (NVFP4(), (1, 16)),
    "NVFP4, squares": (NVFP4(), (16, 16)),
    "MXFP4": (MXFP4(), (1, 32)),
    "MXFP4, floor": (MXFP4(rounding="floor"), (1, 32)),
}
cases = pytest.mark.parametrize(("recipe", "grid"), CASES.values(), ids=CASES)


@pytest.fixture(params=["reference", "compiled"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    monkeypatch.setattr(backends, "_chosen", request.param)
    return str(request.param)


def f32(x: float | Doubles) -> Doubles:
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def scaled_block(block: Doubles, recipe: Recipe, t: float) -> tuple[Doubles, float]:
    """The elements as they are rounded to E2M1, and the multiplier that statistics take."""
    amax = float(np.abs(block[np.isfinite(block)]).max(initial=0.0))
    if isinstance(recipe, NVFP4):
        ideal = min(float(f32(f32(amax / 6.0) / t)), 448.0)
        d = float(f32(float(ml_dtypes.float8_e4m3fn(ideal)) * t))
        if d == 0.0:
            return np.where(np.isinf(block), block, np.copysign(0.0, block)), 1.0
        return f32(block / d), float(f32(1.0 / d))
    if amax == 0:
        return f32(block), 1.0
    assert isinstance(recipe, MXFP4)
    log = math.floor(math.log2(amax)) - 2 if recipe.rounding == "floor" else math.ceil(math.log2(amax / 6.0))
    scale = 2.0 ** -max(log, -127)
    return f32(block * scale), scale


def brute_force(
    x: Doubles, recipe: Recipe, grid: Block
) -> tuple[Doubles, dict[str, float], dict[str, float]]:
    """q, and both kinds of statistics, one block after another."""
    finite = np.isfinite(x)
    t = max(float(f32(np.abs(x[finite]).max(initial=0.0) / 2688.0)), 2.0**-126)
    q, used, saturated_blocks = np.empty_like(x), [], 0
    total = dict.fromkeys(STATISTICS, 0.0)
    for top in range(0, x.shape[0], grid[0]):
        for left in range(0, x.shape[1], grid[1]):
            where = (slice(top, top + grid[0]), slice(left, left + grid[1]))
            block, good = x[where], finite[where]
            scaled, multiplier = scaled_block(block, recipe, t)
            clamped = np.where(np.isnan(block), 0.0, np.clip(scaled, -6.0, 6.0))
            part = clamped.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
            q[where] = np.where(good, part, np.nan)
            saturated = int((good & (np.abs(scaled) > np.nextafter(np.float32(6), np.float32(7)))).sum())
            saturated_blocks += saturated > 0
            used.append(multiplier)
            total["saturated"] += saturated
            total["underflow"] += (good & (block != 0) & (part == 0)).sum()
            total["subnormal"] += (good & (part != 0) & (np.abs(part) < 1.0)).sum()
    median = sorted(used)[(len(used) - 1) // 2]
    total |= {"numel": x.size, "nonfinite": (~finite).sum(), "scale": median}
    total["amax"] = np.abs(x[finite]).max(initial=0.0)
    blocks = (len(used), saturated_blocks, min(used), median, max(used))
    return q, total, dict(zip(BLOCK_STATISTICS, blocks, strict=True))


def spread(*shape: int) -> Tensor:
    """Values over many powers of two, within a block and between blocks."""
    draw = torch.Generator().manual_seed(1)
    exponents = torch.randint(-9, 9, shape, generator=draw) + torch.randint(-12, 5, (shape[0], 1))
    x = torch.randn(shape, generator=draw) * torch.exp2(exponents.float())
    return x.masked_fill(torch.rand(shape, generator=draw) < 0.05, 0.0)


def rows() -> tuple[Tensor, Tensor]:
    return (
        torch.zeros(len(STATISTICS), dtype=torch.float64),
        torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64),
    )


def assert_as_defined(x: Tensor, recipe: Recipe, grid: Block) -> None:
    row, block_row = rows()
    quantized = quantize_blocks(x, E2M1, grid, recipe, row, block_row)
    q, total, blocks = brute_force(x.double().numpy(), recipe, grid)
    np.testing.assert_array_equal(quantized.values.double().numpy(), q)
    assert dict(zip(STATISTICS, row.tolist(), strict=True)) == total
    assert dict(zip(BLOCK_STATISTICS, block_row.tolist(), strict=True)) == blocks
    scale, height, width = quantized.scale.double().numpy(), *grid
    if quantized.tensor_scale is not None:
        scale = f32(scale * quantized.tensor_scale.item())
        exact = (
            torch.from_numpy(q)
            * quantized.scale.double()[:, 0, :, 0]
            .repeat_interleave(height, 0)
            .repeat_interleave(width, 1)[: x.shape[0], : x.shape[1]]
        )
        operand = quantized.without_tensor_scale()
        assert operand.dtype == torch.bfloat16
        torch.testing.assert_close(operand.double(), exact, rtol=0.0, atol=0.0, equal_nan=True)
    else:
        scale = 1.0 / scale
    every = np.repeat(np.repeat(scale[:, 0, :, 0], height, 0), width, 1)[: x.shape[0], : x.shape[1]]
    np.testing.assert_array_equal(quantized.dequantize().double().numpy(), f32(q * every))


@cases
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 16), (50, 70), (33, 300)])
def test_it_works(backend: str, recipe: Recipe, grid: Block, shape: tuple[int, int]) -> None:
    assert_as_defined(spread(*shape), recipe, grid)
    assert_as_defined(spread(*shape).bfloat16().t(), recipe, grid)


@cases
def test_every_bfloat16(backend: str, recipe: Recipe, grid: Block) -> None:
    """Among their neighbours, so that every exponent is that of a block; and in a mixed order."""
    x = all_bfloat16()
    assert_as_defined(x.view(512, 128), recipe, grid)
    mixed = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[: 2**14]]
    assert_as_defined(mixed.view(128, 128), recipe, grid)


@cases
def test_nonfinite_elements(backend: str, recipe: Recipe, grid: Block) -> None:
    x = spread(40, 64)
    x[0, 3], x[1, 40], x[17, 7] = torch.nan, torch.inf, -torch.inf
    x[32:] = 0.0
    x[33, 5], x[34, 6] = torch.inf, -torch.inf
    assert_as_defined(x, recipe, grid)
    clamping = recipe_from_dict({**recipe.to_dict(), "nonfinite": "clamp"})
    q = quantize_blocks(x, E2M1, grid, clamping).values
    assert [q[1, 40], q[17, 7], q[33, 5], q[34, 6]] == [6.0, -6.0, 6.0, -6.0]
    assert q.isnan().nonzero().tolist() == [[0, 3]]


def test_it_is_the_definition_of_weights_for_evaluation() -> None:
    """The same codes and scales as `quantize_nvfp4`."""
    weight = spread(48, 80)
    packed, blocks = quantize_nvfp4(weight), quantize_blocks(weight, E2M1, (1, 16), NVFP4())
    codes = unpack_nibbles(packed.codes, packed.columns)
    assert torch.equal(E2M1.table[codes.int()], blocks.values.float())
    assert torch.equal(packed.block_scale.float(), blocks.scale.view(48, 5))
    assert blocks.tensor_scale is not None and torch.equal(packed.tensor_scale, blocks.tensor_scale)
    assert torch.equal(packed.dequantize(), blocks.dequantize())


@cases
def test_an_empty_matrix(recipe: Recipe, grid: Block) -> None:
    quantized = quantize_blocks(torch.empty(0, 64), E2M1, grid, recipe, *rows())
    assert quantized.values.shape == quantized.dequantize().shape == (0, 64)


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP4()], ids=lambda recipe: recipe.kind)
def test_rounding_at_random(backend: str, recipe: Recipe) -> None:
    """Neighbours of the value, unbiased within 5 sigma of the mean, and counted as they were rounded."""
    grid = recipe.block_of("grad_output")
    assert grid is not None
    x = torch.rand(1, 160, generator=torch.Generator().manual_seed(2)) * 5.5
    x[0, ::16] = 6.0
    trials = 4096
    many = x.expand(trials, -1)
    row, block_row = rows()
    stream = RandomStream(5)
    blocks = quantize_blocks(many, E2M1, grid, recipe, row, block_row, stochastic=stream)
    q = blocks.values.double()
    step = torch.where(x < 2.0, 0.5, torch.where(x < 4.0, 1.0, 2.0)).double()
    scale = blocks.scale[0, 0, 0, 0].double() * (1.0 if blocks.tensor_scale is None else blocks.tensor_scale)
    scale = scale if isinstance(recipe, NVFP4) else 1.0 / scale
    assert (scale - 1.0).abs() < 1e-6
    assert ((q - x).abs() < step + 1e-6).all()
    # A rounded element deviates by half a step at most, so that its mean has this standard deviation.
    assert ((q.mean(0) - x[0]).abs() <= 5 * step[0] / 2 / trials**0.5).all()
    named = dict(zip(STATISTICS, row.tolist(), strict=True))
    assert named["underflow"] == (q == 0).sum() > 0
    assert named["subnormal"] == ((q != 0) & (q.abs() < 1.0)).sum() > 0
    assert named["saturated"] == 0 and stream.state[1] == 1


def test_backends_round_alike_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    for recipe in (NVFP4(), MXFP4(), MXFP4(rounding="floor")):
        grid = recipe.block_of("grad_output")
        assert grid is not None
        for x in (spread(37, 4100), spread(600, 37).bfloat16(), spread(70, 40).t()):
            x[0, 0], x[3, 5], x[7, 30] = torch.nan, torch.inf, -torch.inf
            results = []
            for chosen in ("reference", "compiled"):
                monkeypatch.setattr(backends, "_chosen", chosen)
                row, block_row = rows()
                blocks = quantize_blocks(x, E2M1, grid, recipe, row, block_row, stochastic=RandomStream(9))
                results.append((blocks.values, blocks.scale, row, block_row))
            for one, other in zip(*results, strict=True):
                assert torch.equal(one.isnan(), other.isnan())
                assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


# The random Hadamard transform


def hadamard_matrix() -> Doubles:
    """Sylvester's construction, with the signs, over 4."""
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signed: Doubles = matrix * signs().double().numpy() / 4.0
    return signed


def test_the_signs_are_bits_of_a_random_word() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox((zero, zero, zero, zero), (0, 0))[0].item() == MINUS
    assert signs().tolist() == [-1.0 if MINUS >> bit & 1 else 1.0 for bit in range(16)]


@pytest.mark.parametrize("columns", [16, 48, 50, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_is_the_product_with_the_matrix(backend: str, columns: int, dtype: torch.dtype) -> None:
    # Whole numbers, so that the sums are exact in float32.
    x = torch.randint(-99, 100, (37, columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    padded = np.zeros((37, -(-columns // 16), 16))
    padded.reshape(37, -1)[:, :columns] = x.double().numpy()
    expected = (padded @ hadamard_matrix().T).reshape(37, -1)
    np.testing.assert_array_equal(rotate(x).double().numpy(), expected)
    np.testing.assert_array_equal(rotate(x.t().contiguous().t()).double().numpy(), expected)


def test_a_rotation_changes_no_product() -> None:
    matrix = hadamard_matrix()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16), atol=1e-15)
    a, b = spread(20, 50), spread(30, 50)
    exact = a.double() @ b.double().t()
    rotated = rotate(a).double() @ rotate(b).double().t()
    assert (
        (rotated - exact).abs() <= 2**-20 * (a.double().abs() @ b.double().abs().t() + exact.abs().max())
    ).all()


def test_backends_rotate_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    x = spread(300, 301)
    x[0, 0], x[1, 20], x[2, 40] = torch.nan, torch.inf, 3e38
    results = []
    for chosen in ("reference", "compiled"):
        monkeypatch.setattr(backends, "_chosen", chosen)
        results.append([rotate(y).view(torch.int32) for y in (x, x.bfloat16(), x.t())])
        nan = [part.view(torch.float32).isnan() for part in results[-1]]
        results[-1] = [part.masked_fill(mask, 0) for part, mask in zip(results[-1], nan, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# Layers

LAYERS: dict[str, Recipe] = {
    "NVFP4": NVFP4(),
    "NVFP4 to nearest": NVFP4(stochastic_gradients=False, hadamard=False),
    "MXFP4": MXFP4(),
    "MXFP4 at random": MXFP4(stochastic_gradients=True),
}
layers = pytest.mark.parametrize("recipe", LAYERS.values(), ids=LAYERS)


def quantized(
    x: Tensor, recipe: Recipe, role: Role, stream: RandomStream | None, over_tokens: bool
) -> Tensor:
    """The matrix as the layer is said to multiply it, the dimension summed over last: float64."""
    grid = recipe.block_of(role)
    assert grid is not None
    if over_tokens and isinstance(recipe, NVFP4) and recipe.hadamard and role != "weight":
        x = rotate(x)
    at_random = (
        stream if stream is not None and recipe.stochastic_gradients and role == "grad_output" else False
    )
    blocks = quantize_blocks(x, E2M1, grid, recipe, stochastic=at_random)
    if blocks.tensor_scale is None:
        return blocks.dequantize().double()
    return blocks.without_tensor_scale().double() * blocks.tensor_scale.double()


@layers
@pytest.mark.parametrize("tokens", [64, 50])
def test_a_layer_multiplies_its_quantised_operands(recipe: Recipe, tokens: int) -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(96, 80, bias=False, recipe=recipe)
    x, grad = torch.randn(tokens, 96).requires_grad_(), torch.randn(tokens, 80)
    stream = layer.scaling["rounding"] if recipe.stochastic_gradients else None
    replay = RandomStream(int(stream.state[0])) if isinstance(stream, RandomStream) else None
    output = layer(x)
    output.backward(grad)
    data, weight = x.detach(), layer.weight.detach()

    def of(matrix: Tensor, role: Role, over_tokens: bool = False) -> Tensor:
        return quantized(matrix, recipe, role, replay, over_tokens)

    assert x.grad is not None and layer.weight.grad is not None
    exact = (
        of(data, "input") @ of(weight, "weight").t(),
        of(grad, "grad_output") @ of(weight.t(), "weight").t(),
        of(grad.t(), "grad_output", True) @ of(data.t(), "input", True).t(),
    )
    for actual, expected in zip((output.detach(), x.grad, layer.weight.grad), exact, strict=True):
        # Within BF16's rounding of the product, and float32's of the sum.
        bound = expected.abs() * 2 * 2**-8 + expected.abs().max() * 2**-18
        assert ((actual.double() - expected).abs() <= bound).all()


@layers
def test_gradients_are_within_the_format_s_error(recipe: Recipe) -> None:
    """Against float64. E2M1 has steps of 1/4 to 1/2 of a value: 10 to 17 % in the root mean square."""
    torch.manual_seed(0)
    layer = Fp8Linear(128, 128, bias=False, recipe=recipe)
    buffer = StatisticsBuffer()
    observe(nn.Sequential(layer), buffer)
    x, grad = torch.randn(256, 128).requires_grad_(), torch.randn(256, 128)
    output = layer(x)
    output.backward(grad)
    assert x.grad is not None and layer.weight.grad is not None
    weight, data = layer.weight.detach().double(), x.detach().double()
    exact = data @ weight.t(), grad.double() @ weight, grad.double().t() @ data
    for actual, expected in zip((output.detach(), x.grad, layer.weight.grad), exact, strict=True):
        assert 0.05 < (actual.double() - expected).norm() / expected.norm() < 0.25
    counts = dict(
        zip((info.role for info in buffer.catalogue), buffer.block_data[:, 0].tolist(), strict=True)
    )
    width = 16 if isinstance(recipe, NVFP4) else 32
    area = 16 * 16 if isinstance(recipe, NVFP4) else 32
    expected_counts = {
        "input": 256 * 128 / width,
        "weight": 128 * 128 / area,
        "grad_output": 256 * 128 / width,
    }
    assert counts == expected_counts
    assert buffer.data[:, STATISTICS.index("numel")].tolist() == [256 * 128, 128 * 128, 256 * 128]
    assert {info.format for info in buffer.catalogue} == {"E2M1"}


def test_a_transposed_weight_has_the_same_numbers() -> None:
    """Both products of a weight see one matrix, which blocks of 16x16 are for."""
    weight = spread(96, 80)
    one, other = (quantize_blocks(w, E2M1, (16, 16), NVFP4()).dequantize() for w in (weight, weight.t()))
    assert torch.equal(one, other.t())


@layers
def test_a_model_learns(recipe: Recipe) -> None:
    """A small regression: the loss falls to where float32's is, within a half of its fall."""
    losses = {}
    for name in ("float32", "four bits"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        if name != "float32":
            convert(model, recipe, exclude="4")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        teacher = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) / 32**0.5
        values = []
        for step in range(60):
            x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - (x @ teacher).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        losses[name] = values
    assert losses["four bits"][0] == pytest.approx(losses["float32"][0], rel=0.1)
    fall = losses["float32"][0] - losses["float32"][-1]
    assert losses["four bits"][-1] < losses["float32"][-1] + 0.5 * fall
