"""The modules of the example: filters that see two tokens back, and a loss that is computed in blocks."""

from typing import Any

import pytest
import torch
from helpers.examples_folder import example
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fp8scope
from fp8scope.demo.model import Shape
from fp8scope_kernels import fp8_layers

lfa = example("localized_filtering")
SHAPE = Shape(layers=1, width=32, heads=2, context=16)
TOKENS, WIDTH, VOCABULARY = 50, 16, 300


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    targets[::7] = -100
    return hidden, weight, targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.t(), targets)


@pytest.mark.parametrize("rows", [1, 7, 50, 64])
def test_it_works(rows: int) -> None:
    """Loss and gradients of the whole; the last block is shorter, and some targets are ignored."""
    hidden, weight, targets = problem(torch.float64)
    expected = whole(hidden, weight, targets)
    gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    loss = lfa.block_cross_entropy(hidden, weight, targets, rows=rows)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0.0)
    for actual, gradient in zip(torch.autograd.grad(3 * loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-11, atol=1e-15)
    assert not gradients[0][::7].any()
    with torch.no_grad():
        assert lfa.block_cross_entropy(hidden, weight, targets, rows=rows) == loss


def test_the_largest_tensor_is_a_block_of_logits() -> None:
    hidden, weight, targets = problem(torch.float32)
    sizes = []
    for rows in (8, TOKENS):
        with LargestTensor() as seen:
            lfa.block_cross_entropy(hidden, weight, targets, rows=rows).backward()
        sizes.append(seen.elements)
    # The weight and its gradient have the size of 16 rows of logits.
    assert sizes == [VOCABULARY * WIDTH, TOKENS * VOCABULARY]
    with LargestTensor() as seen:
        whole(hidden, weight, targets).backward()  # type: ignore[no-untyped-call]
    assert seen.elements == TOKENS * VOCABULARY


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, targets = problem(torch.float32)
    lfa.block_cross_entropy(hidden.detach(), weight, targets, rows=8).backward()
    assert weight.grad is not None and hidden.grad is None
    with pytest.raises(ValueError, match="rows must be at least 1"):
        lfa.block_cross_entropy(hidden, weight, targets, rows=0)


def test_a_filter_sees_two_tokens_back() -> None:
    torch.manual_seed(0)
    layer = lfa.LocalizedFilter(16)
    x = torch.randn(1, 8, 16)
    changed = x.clone()
    changed[0, 3] += 1
    differs = (layer(x) != layer(changed)).any(-1)[0]
    assert differs.tolist() == [False, False, False, True, True, True, False, False]


def test_a_convolution_is_that_of_torch() -> None:
    torch.manual_seed(0)
    layer = lfa.CausalConvolution(6, 4)
    convolution = nn.Conv1d(6, 4, 2, bias=False)
    with torch.no_grad():
        convolution.weight.copy_(layer.pair.weight.view(4, 2, 6).transpose(1, 2))
    x = torch.randn(2, 9, 6)
    expected = convolution(functional.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)
    torch.testing.assert_close(layer(x), expected)


def test_the_published_number_of_parameters() -> None:
    """Table 1 of the report: 7.1M more than with basic attention, in 6 layers of 768."""
    size = sum(parameter.numel() for parameter in lfa.LocalizedFilter(768).parameters())
    assert 6 * size / 1e6 == pytest.approx(167.4 - 160.3, abs=0.05)


def test_values_are_not_filtered_and_the_convolutions_are_fp8() -> None:
    torch.manual_seed(0)
    model = lfa.FilteredGpt(SHAPE, filtered=True, rows=8)
    fp8scope.convert(model, fp8scope.DelayedScaling())
    names = {path for path, _ in fp8_layers(model)}
    attention = "blocks.0.attention"
    assert {f"{attention}.filter.{part}.pair" for part in ("narrow", "widen")} <= names
    assert f"{attention}.v" in names and "head" not in names
    seen: list[Tensor] = []
    model.blocks[0].attention.v.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    model.blocks[0].attention.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    loss: Tensor = model(torch.randint(256, (2, 17)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert seen[0] is seen[1]
    assert all(parameter.grad is not None for parameter in model.parameters())
