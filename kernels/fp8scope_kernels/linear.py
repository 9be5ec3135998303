"""`Fp8Linear`: a linear layer whose three matrix products take FP8 operands."""

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels.fsdp.gathered_weight import GatheredWeight, as_plain
from fp8scope_kernels.fsdp.weight_shards import WeightShard
from fp8scope_kernels.graph_objects import GraphObject, register
from fp8scope_kernels.kept_weight import KeptWeight
from fp8scope_kernels.linear_product import Product, check_products, linear_product, names_of, text_of
from fp8scope_kernels.matmul import Operand
from fp8scope_kernels.operands import quantize_matrix
from fp8scope_kernels.plain_tensors import is_dtensor
from fp8scope_kernels.random_stream import RandomStream, ignore_stream, stream_of
from fp8scope_kernels.recipes import ROLES, Recipe, Role
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.statistics import Slot
from fp8scope_kernels.tensor_parallel import sharded_linear
from fp8scope_kernels.torch_internals import break_graph

Precision = Literal["fp8", "bf16"]


class Fp8Linear(nn.Linear, GraphObject):
    """`nn.Linear` whose fprop, dgrad and wgrad multiply FP8 operands.

    Takes any leading shape and floating dtype; the output has the input's dtype, or autocast's. Weight and
    bias keep theirs. Three tensors are quantised, each with its own scaling state under `scaling`: `input`,
    `weight` and `grad_output`.

    State and statistics advance once per call in training mode. Evaluation mode quantises with the current
    scales and counts nothing. Neither does the recomputation of activation checkpointing, which has the
    scales of its own forward call, however many calls come between.

    `on_units` says of each product whether the last call computed it on FP8 units of the device.

    `precision` switches the whole layer between `fp8` and `bf16` at run time; `products` does so for each
    product. A backward pass with `create_graph` (a gradient penalty) raises RuntimeError, unless `precision`
    is `bf16`.
    """

    kept_weight: KeptWeight | None = None
    """The operands of the weight that calls share; see `keep_weights`."""
    weight_shard: WeightShard | None = None
    """This rank's part of a weight that FSDP2 gathers in FP8; see `gather_weights_in_fp8`."""
    _products: frozenset[Product] | None = None
    _products_text = names_of(None)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_recipe(recipe)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe) -> "Fp8Linear":
        """An `Fp8Linear` that replaces `linear`, with the same parameters, hooks and mode."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)
        for own in ("_parameters", "_buffers", "_modules"):
            layer.__dict__[own] = dict(linear.__dict__[own])
        layer._set_recipe(recipe)
        return layer

    def _set_recipe(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.slots: dict[Role, Slot] = {}
        self.on_units: dict[Product, bool] = {}
        self._recipe_text = text_of(recipe)
        register(self)
        self._precision: Precision = "fp8"
        device = self.weight.device
        self.scaling = nn.ModuleDict(
            {role: ScalingState(recipe, recipe.format_of(role, device), device) for role in ROLES}
        )
        if recipe.stochastic_gradients:
            self.scaling["rounding"] = RandomStream(device=device)
        self.scaling.register_load_state_dict_pre_hook(ignore_stream)  # type: ignore[no-untyped-call]
        # In evaluation nn.TransformerEncoderLayer reads the weights of its layers instead of calling them,
        # unless a module in it has a hook. This container is never called, so that its hook costs nothing.
        self.scaling.register_forward_pre_hook(_do_nothing)

    def reset_parameters(self) -> None:
        """As in `nn.Linear`; the scaling state, which is that of other weights, is reset too."""
        super().reset_parameters()
        # nn.Linear calls this while it is made, before there is any state.
        if "scaling" in self._modules:
            for role in ROLES:
                self.state_of(role).reset()
            if "rounding" in self.scaling:
                stream_of(self).restart()

    @property
    def precision(self) -> Precision:
        """`fp8`, or `bf16`: plain BF16 products, with nothing quantised and nothing counted.

        Going back to `fp8` resets the scaling state, which is stale by then.
        """
        return self._precision

    @precision.setter
    def precision(self, value: Precision) -> None:
        if value not in ("fp8", "bf16"):
            raise ValueError(f"precision must be 'fp8' or 'bf16', got {value!r}.")
        if value == "fp8" and self._precision == "bf16":
            for role in ROLES:
                self.state_of(role).reset()
        self._precision = value

    @property
    def products(self) -> frozenset[Product] | None:
        """Return which of `fprop`, `dgrad` and `wgrad` take FP8 operands while `precision` is `fp8`; None
        means all.

        The other products multiply BF16 operands. Set it to any collection of these names.
        """
        return self._products

    @products.setter
    def products(self, value: Collection[Product] | None) -> None:
        self._products = check_products(value)
        self._products_text = names_of(self._products)

    @property
    def operator_settings(self) -> tuple[str, str]:
        """The recipe, and the products in FP8, as operators take them."""
        return self._recipe_text, self._products_text

    def state_of(self, role: Role) -> ScalingState:
        """The scaling state of `input`, `weight` or `grad_output`."""
        return cast(ScalingState, self.scaling[role])

    def forward(self, input: Tensor) -> Tensor:
        if self.weight_shard is not None:
            return _forward_outside_of_graphs(self, input)
        return self._forward(input)

    def _forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        device_type = input.device.type
        out_dtype = input.dtype
        # torch has no autocast for the meta device.
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            out_dtype = torch.get_autocast_dtype(device_type)
        if self._precision == "bf16":
            return self._forward_bf16(input).to(out_dtype)
        if is_dtensor(input) or is_dtensor(self.weight):
            return sharded_linear(self, input, out_dtype)
        bias: Tensor | None = self.bias
        x = input.reshape(-1, self.in_features)
        weight = self.weight if self.weight_shard is None else as_plain(self.weight)
        output = linear_product(x, weight, bias, self, out_dtype)
        return output.view(*input.shape[:-1], self.out_features)

    def _check_input(self, input: Tensor) -> None:
        """Refuse an input before it changes the scaling state."""
        if input.is_nested:
            raise TypeError(
                "Fp8Linear does not support nested tensors; pass padded ones. For nn.TransformerEncoder, set "
                "use_nested_tensor = False on it, or call convert on the whole encoder."
            )
        if not input.dim() or input.shape[-1] != self.in_features:
            raise RuntimeError(
                f"Fp8Linear takes inputs with {self.in_features} features in the last dimension, got shape "
                f"{tuple(input.shape)}."
            )
        if not input.is_floating_point():
            raise RuntimeError(f"Fp8Linear takes floating-point inputs, got {input.dtype}.")
        if input.device != self.weight.device:
            raise RuntimeError(f"The input is on {input.device}, and the weight on {self.weight.device}.")

    def _forward_bf16(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        weight = self.weight if self.weight_shard is None else as_plain(self.weight, always=True)
        abstract = input.device.type == "meta"
        with nullcontext() if abstract else torch.autocast(input.device.type, enabled=False):
            return functional.linear(
                input.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()
            )

    def quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        """Quantise one of the three matrices: its operand, and the transpose for its other product.

        With `update`, state and statistics advance; see `quantize_matrix`.
        """
        if role == "weight" and isinstance(x, GatheredWeight) and self.weight_shard is not None:
            return self.weight_shard.operands(x, update=update, transpose=transpose)
        if role == "weight" and self.kept_weight is not None:
            make = partial(self._quantize, role, x)
            return self.kept_weight.operands(x, make, update=update, transpose=transpose)
        return self._quantize(role, x, update=update, transpose=transpose)

    def _quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        slot = self.slots.get(role) if update else None
        at_random = role == "grad_output" and self.recipe.stochastic_gradients
        return quantize_matrix(
            self.recipe, role, self.state_of(role), x, slot,
            update=update, transpose=transpose, stream=stream_of(self) if at_random else None,
        )  # fmt: skip

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in `nn.Module`; ends with the layer itself if its weight becomes another DTensor meanwhile.

        `distribute_module` replaces parameters while it iterates. It would go on to make DTensors of the
        scaling state, which is this rank's own, and ask the states for weights.
        """
        before = self._parameters.get("weight")
        for item in super().named_modules(memo, prefix, remove_duplicate):
            yield item
            weight = self._parameters.get("weight")
            if weight is not before and is_dtensor(weight):
                return

    def __getstate__(self) -> dict[str, Any]:
        # A copy is another model: its tensors must not count in this model's rows.
        return {**self.__dict__, "slots": {}, "kept_weight": None, "weight_shard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.kind}, precision={self._precision}"


@break_graph
def _forward_outside_of_graphs(layer: Fp8Linear, input: Tensor) -> Tensor:
    """The forward pass of a layer whose weight has FP8 in its memory, which a graph cannot take."""
    return layer._forward(input)


def _do_nothing(module: nn.Module, args: Any) -> None:
    """A hook that only has to exist."""
