"""The stored tensors of AdamW in 8 and 16 bits as telemetry."""

import pytest
import torch
from kernels.helpers.optimizer_training import make_model, train
from torch import nn

from fp8scope_kernels import E4M3, STATISTICS, StatisticsBuffer, quantize_blocks, set_backend
from fp8scope_kernels.backends import Backend
from fp8scope_kernels.optimizer import Fp8AdamW
from fp8scope_kernels.optimizer_storage import FP16, GOLDEN_RATIO, SCALING, SEED
from fp8scope_kernels.random_stream import Draw


def test_it_works() -> None:
    model, buffer = make_model(), StatisticsBuffer()
    optimizer = Fp8AdamW(model.parameters())
    assert optimizer.observe(buffer, model.named_parameters()) == 12
    train(model, optimizer, 3)
    buffer.zero_()
    train(model, optimizer, 1, first=3)
    rows = {
        i.name: dict(zip(STATISTICS, row.tolist(), strict=True))
        for i, row in zip(buffer.catalogue, buffer.data, strict=True)
    }
    assert [info.format for info in buffer.catalogue[:3]] == ["E4M3", "FP16", "FP16"]
    assert (buffer.catalogue[0].module, buffer.catalogue[0].role) == ("0.weight", "exp_avg")
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key, format in (("exp_avg", E4M3), ("exp_avg_sq", FP16), ("master", FP16)):
            row = rows[f"{name}.{key}"]
            assert row["numel"] == parameter.numel()
            # Of a first moment the median of the blocks, the lower of the middle two.
            scales = sorted(state[f"{key}_scale"].view(-1).tolist())
            assert row["scale"] == scales[(len(scales) - 1) // 2]
            assert row["amax"] * scales[0] == pytest.approx(format.max, rel=1e-6)
            # Though amax times the scale, both rounded, may be a last place above the maximum.
            assert row["saturated"] == 0
            assert row["nonfinite"] == 0
    # Small first moments are flushed, as the counter says.
    moment = optimizer.state[model.get_parameter("0.weight")]["exp_avg"].float()
    assert rows["0.weight.exp_avg"]["underflow"] == (moment == 0).sum().item()


@pytest.mark.usefixtures("automatic_backend")
@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_first_moments_are_counted_and_rounded_as_by_the_kernels(backend: Backend) -> None:
    """Tensors of one bucket: each as `quantize_blocks` counts and rounds it alone, with its own words."""
    sizes = (700, 1, 0, 256, 300)
    random = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    gradients = [
        torch.randn(size, generator=random) * 2.0 ** torch.randint(-30, 1, (size,), generator=random)
        for size in sizes
    ]
    gradients[0][5], gradients[0][6], gradients[4][:] = torch.nan, -torch.inf, 0.0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    buffer = StatisticsBuffer()
    optimizer = Fp8AdamW(parameters, betas=(0.5, 0.99))
    optimizer.observe(buffer, [(f"p{i}", parameter) for i, parameter in enumerate(parameters)])
    set_backend(backend)
    optimizer.step()
    for number, parameter in enumerate(parameters):
        row = torch.zeros(len(STATISTICS), dtype=torch.float64)
        moment = torch.zeros(sizes[number]).lerp_(gradients[number], 0.5).view(1, -1)
        words = Draw(torch.tensor([SEED, 0]), number, offset=GOLDEN_RATIO)
        blocks = quantize_blocks(
            moment, E4M3, (1, 256), SCALING, row, dtype=torch.float8_e4m3fn, stochastic=words
        )
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"].view(torch.uint8), blocks.values.view(-1).view(torch.uint8))
        assert buffer.data[3 * number, :2].tolist() == row[:2].tolist()
        assert buffer.data[3 * number, 3:].tolist() == row[3:].tolist()
        if sizes[number]:
            assert torch.equal(state["exp_avg_scale"], blocks.scale.view(-1))
            assert buffer.data[3 * number, 2] == row[2]


def test_fp16_is_counted_by_the_definitions() -> None:
    """A second moment with zeros, values that vanish and values that FP16 holds as subnormals."""
    exponents = [0, -20, -37, -38, -39, -40, -41, -60]
    parameter = nn.Parameter(torch.zeros(9))
    # Squared and taken times 2^-10: 2^(e-10), in a tensor whose largest is scaled to just below 2^16.
    parameter.grad = torch.tensor([2.0 ** (e / 2) for e in exponents] + [0.0])
    buffer = StatisticsBuffer()
    optimizer = Fp8AdamW([parameter], betas=(0.0, 1 - 2.0**-10))
    optimizer.observe(buffer, [("p", parameter)])
    optimizer.step()
    row = dict(zip(STATISTICS, buffer.data[1].tolist(), strict=True))
    scaled = [2.0 ** (e - 10) * row["scale"] for e in exponents]
    assert row["underflow"] == sum(x <= 2.0**-25 for x in scaled) == 2
    assert row["subnormal"] == sum(2.0**-25 < x < 2.0**-14 - 2.0**-25 for x in scaled) == 4
    assert (row["numel"], row["nonfinite"]) == (9, 0)
    # What was flushed is kept as the smallest number; zero stays zero.
    stored = optimizer.state[parameter]["exp_avg_sq"].tolist()
    assert stored[-2:] == [2.0**-24, 0.0]


def test_observing_changes_no_number() -> None:
    plain, watched = make_model(), make_model()
    optimizer = Fp8AdamW(watched.parameters())
    optimizer.observe(StatisticsBuffer(), watched.named_parameters())
    assert train(plain, Fp8AdamW(plain.parameters()), 5) == train(watched, optimizer, 5)


def test_a_parameter_that_comes_later_is_not_counted() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(300))
    first.grad, second.grad = torch.ones(3), torch.ones(300)
    buffer, optimizer = StatisticsBuffer(), Fp8AdamW([first])
    optimizer.observe(buffer, [("first", first)])
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert buffer.data[:, 0].tolist() == [3.0, 3.0, 3.0]


def test_o1_has_nothing_to_observe() -> None:
    model = make_model()
    assert Fp8AdamW(model.parameters(), level="O1").observe(StatisticsBuffer(), model.named_parameters()) == 0
