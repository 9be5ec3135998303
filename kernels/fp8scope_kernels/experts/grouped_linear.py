"""`Fp8GroupedLinear`: the linear layers of experts, whose products take FP8 operands."""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from fp8scope_kernels.experts.products import ExpertProducts, Precision, refuse_graphs, spans_of
from fp8scope_kernels.experts.states import ExpertStates
from fp8scope_kernels.linear_product import Product
from fp8scope_kernels.recipes import Recipe, Role
from fp8scope_kernels.torch_internals import break_graph


class Fp8GroupedLinear(nn.Module):
    """A linear layer for each expert, over tokens that are sorted by expert.

    `weight`: [experts, out_features, in_features], `bias`: [experts, out_features] or None. Each expert is
    computed as an `Fp8Linear` with the same recipe, with scaling states and counters of its own. An expert
    without tokens quantises nothing: its state stays as it is, and its gradients are zeros.

    `precision`, `products`, evaluation mode, activation checkpointing and second derivatives are as in
    `Fp8Linear`. A compiled graph breaks at the layer. `torch.export` and `torch.func` are not supported.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(experts, out_features, in_features, device=device, dtype=dtype)
        )
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.recipe = recipe
        self.scaling = ExpertProducts(
            recipe, self.weight.shape, in_features, out_features, self.weight.device
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases as `nn.Linear` does, and reset the scaling states."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self._parameters.values():
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)
        self.scaling.reset()
        if self.recipe.stochastic_gradients:
            self.scaling.rounding.restart()

    @property
    def precision(self) -> Precision:
        """`fp8`, or `bf16`: plain BF16 products. Going back to `fp8` resets the scaling states."""
        return self.scaling.precision

    @precision.setter
    def precision(self, value: Precision) -> None:
        self.scaling.precision = value

    @property
    def products(self) -> frozenset[Product] | None:
        """Return which of `fprop`, `dgrad` and `wgrad` take FP8 operands; None means all."""
        return self.scaling.products

    @products.setter
    def products(self, value: Collection[Product] | None) -> None:
        self.scaling.products = value

    def state_of(self, role: Role) -> ExpertStates:
        """The scaling states of `input`, `weight` or `grad_output`, with a row for each expert."""
        return self.scaling.state_of(role)

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        """The output [tokens, out_features], in the input's dtype, or autocast's.

        input: [tokens, in_features], floating, sorted by expert. offsets: int32 or int64 [experts], where the
        tokens of each expert end, as in torch's grouped product. Tokens behind the last one belong to no
        expert: their outputs and gradients are zeros. On a GPU the offsets are waited for.
        """
        return self._forward(input, offsets)

    @break_graph
    def _forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        refuse_graphs()
        self._check_input(input)
        spans = spans_of(offsets, self.experts, input.shape[0])
        output: Tensor = self.scaling(input, self.weight, self.bias, spans, autocast_dtype(input))
        return output

    def _check_input(self, input: Tensor) -> None:
        """Refuse an input before it changes the scaling states."""
        if input.is_nested or input.dim() != 2 or input.shape[1] != self.in_features:
            raise RuntimeError(
                f"Fp8GroupedLinear takes tokens [tokens, {self.in_features}], got shape {tuple(input.shape)}."
            )
        if not input.is_floating_point():
            raise RuntimeError(f"Fp8GroupedLinear takes floating-point inputs, got {input.dtype}.")
        if input.device != self.weight.device:
            raise RuntimeError(f"The input is on {input.device}, and the weight on {self.weight.device}.")

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


def autocast_dtype(input: Tensor) -> torch.dtype:
    """The dtype of a linear layer's output: autocast's where it is enabled, else the input's."""
    device_type = input.device.type
    # torch has no autocast for the meta device.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype: torch.dtype = torch.get_autocast_dtype(device_type)
        return dtype
    return input.dtype
