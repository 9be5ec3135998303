"""The demo's model."""

import math

import torch
from torch.nn import functional

from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels import DelayedScaling, convert

SMALL = Shape(layers=2, width=32, heads=2, context=16)


def text(batch: int = 3, time: int = 16) -> torch.Tensor:
    return torch.randint(256, (batch, time), generator=torch.Generator().manual_seed(1))


def test_it_works() -> None:
    logits = ByteGpt(SMALL)(text())
    assert logits.shape == (3, 16, 256)
    assert torch.isfinite(logits).all()


def test_attention_is_causal() -> None:
    model = ByteGpt(SMALL)
    before = text()
    after = before.clone()
    after[:, 9:] = (after[:, 9:] + 1) % 256
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert changed[:9].max() < 1e-5
    assert changed[9:].min() > 1e-4


def test_logits_of_a_prefix_do_not_depend_on_the_rest() -> None:
    model = ByteGpt(SMALL)
    torch.testing.assert_close(model(text())[:, :5], model(text()[:, :5]), atol=1e-5, rtol=1e-4)


def test_the_seed_determines_the_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([parameter.detach().flatten() for parameter in ByteGpt(SMALL).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_initial_loss_is_near_uniform() -> None:
    torch.manual_seed(1)
    logits = ByteGpt(Shape())(text(8, 64))
    loss = functional.cross_entropy(logits.flatten(0, 1), text(8, 64).flatten())
    assert abs(loss.item() - math.log(256)) < 1.0


def test_convert_converts_the_blocks_but_not_the_head() -> None:
    report = convert(ByteGpt(Shape()), DelayedScaling())
    assert len(report.converted) == 4 * Shape().layers
    assert "head" in report.left
