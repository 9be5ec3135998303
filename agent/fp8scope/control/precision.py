"""Switches layers, or single products of them, between FP8 and BF16 while the model trains.

| layer                 | `bf16`                                                                          |
|-----------------------|---------------------------------------------------------------------------------|
| `Fp8Linear`, experts  | BF16 products (their `precision`)                                               |
| torchao Float8Linear  | a configuration without casts: products in the precision of the operands        |
| Transformer Engine    | not possible per layer: its autocast decides for all layers inside it           |
"""

import dataclasses
import re
import weakref
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

from torch import nn

from fp8scope.observe.tensors.base import path_of
from fp8scope_kernels import PRODUCTS, ExpertProducts, Fp8Linear, Product, fp8_experts

Precision = Literal["fp8", "bf16"]
Pattern: TypeAlias = str | re.Pattern[str]

NOT_FP8 = "is not FP8"
_CASTS: dict[Product, tuple[str, str]] = {
    "fprop": ("cast_config_input", "cast_config_weight"),
    "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
    "wgrad": ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"),
}
"""The casts of torchao's configuration for each product."""

_configurations: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()
"""The original configurations of torchao layers that are switched."""


@dataclasses.dataclass(frozen=True)
class MatchedLayers:
    """The result of `find`: matched layers that can be switched, and the reasons why others cannot."""

    layers: tuple[tuple[str, nn.Module], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path, _ in self.layers)


def fp8_layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can be switched, with their paths (without the names of wrappers)."""
    for path, module in _modules_of(model):
        if _why_not(module) == "":
            yield path, module


def _modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their paths; those of experts' products are the paths of their tensors."""
    experts: dict[nn.Module, str] = {products: path for path, products in fp8_experts(model)}
    for path, module in model.named_modules():
        yield path_of(experts.get(module, path)), module


def find(models: Sequence[nn.Module], patterns: Pattern | Sequence[Pattern]) -> MatchedLayers:
    """Return the layers whose path matches a pattern.

    A pattern is a glob (`blocks.*.mlp.down`), or a compiled regular expression that is searched in the path.
    """
    wanted = (patterns,) if isinstance(patterns, str | re.Pattern) else tuple(patterns)
    layers: list[tuple[str, nn.Module]] = []
    problems: list[str] = []
    for model in models:
        for path, module in _modules_of(model):
            if not any(_matches(pattern, path) for pattern in wanted):
                continue
            problem = _why_not(module)
            if problem == "":
                layers.append((path, module))
            elif problem is not None:
                problems.append(f"{path}: {problem}")
    if layers:
        # A pattern for FP8 layers may match other layers too; that is not a problem.
        problems = [problem for problem in problems if not problem.endswith(NOT_FP8)]
    return MatchedLayers(tuple(layers), tuple(problems))


def precision_of(layer: nn.Module) -> Precision:
    """Return the precision in which the layer computes now."""
    if isinstance(layer, Fp8Linear | ExpertProducts):
        return layer.precision
    return "bf16" if _casts(layer.config) == frozenset() else "fp8"


def set_precision(layer: nn.Module, precision: Precision) -> None:
    """Switch a layer from `fp8_layers_of`. Switching back to `fp8` resets the scaling state, if any."""
    if isinstance(layer, Fp8Linear | ExpertProducts):
        layer.precision = precision
    else:
        _set_torchao(layer, () if precision == "bf16" else None)


def products_of(layer: nn.Module) -> frozenset[Product]:
    """Return the products that the layer computes in FP8 when none is switched off."""
    if isinstance(layer, Fp8Linear | ExpertProducts):
        return frozenset(PRODUCTS)
    return _casts(_configurations.get(layer, layer.config))


def set_products(layer: nn.Module, products: Collection[Product] | None) -> None:
    """Compute these products of a layer in FP8, the others in high precision; None restores the original."""
    if isinstance(layer, Fp8Linear | ExpertProducts):
        layer.products = products
    else:
        _set_torchao(layer, products)


def _set_torchao(layer: nn.Module, products: Collection[Product] | None) -> None:
    original = _configurations.setdefault(layer, layer.config)
    if products is None:
        layer.config = original
        del _configurations[layer]
        return
    from torchao.float8.config import CastConfig, ScalingType

    off: dict[str, Any] = {}
    for product, casts in _CASTS.items():
        if product not in products:
            for name in casts:
                dtype = getattr(original, name).target_dtype
                off[name] = CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=dtype)
    layer.config = cast(Any, dataclasses.replace(original, **off))


def _casts(config: Any) -> frozenset[Product]:
    """Return the products that a torchao configuration computes in FP8."""
    return frozenset(
        product
        for product, casts in _CASTS.items()
        if getattr(config, casts[0]).scaling_type.value != "disabled"
    )


def _why_not(module: nn.Module) -> str | None:
    """Return "" if the module can be switched, the reason if it cannot, None if nobody expects it to."""
    if isinstance(module, Fp8Linear | ExpertProducts):
        return ""
    kind = type(module)
    if kind.__name__ == "Float8Linear" and kind.__module__.startswith("torchao."):
        if getattr(module.config, "enable_fsdp_float8_all_gather", False):
            return "its weight is gathered in FP8 (enable_fsdp_float8_all_gather), and there is no other copy"
        return ""
    if kind.__module__.startswith("transformer_engine.") and hasattr(module, "fp8_meta"):
        return (
            "Transformer Engine's autocast applies to all layers inside it and cannot be switched per layer"
        )
    if isinstance(module, nn.Linear):
        return NOT_FP8
    return None


def _matches(pattern: Pattern, path: str) -> bool:
    return fnmatchcase(path, pattern) if isinstance(pattern, str) else pattern.search(path) is not None


class WatchedLayers:
    """The layers of the watched models, and which of them fell back. Holds only weak references."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self.fallen: dict[str, weakref.ref[nn.Module]] = {}

    @property
    def models(self) -> list[nn.Module]:
        return [model for reference in self._models if (model := reference()) is not None]

    def watch(self, model: nn.Module) -> None:
        """Include this model's layers."""
        if not any(reference() is model for reference in self._models):
            self._models.append(weakref.ref(model))

    def __bool__(self) -> bool:
        """Return whether there are layers to switch."""
        return any(True for model in self.models for _ in fp8_layers_of(model))

    def find(self, patterns: Pattern | Sequence[Pattern]) -> MatchedLayers:
        return find(self.models, patterns)

    def switch(self, matches: MatchedLayers, precision: Precision, *, only_fallen: bool = False) -> list[str]:
        """Switch layers; returns the paths of those that were in the other precision.

        With `only_fallen`, switch back to `fp8` only layers that `switch` had switched to `bf16`.
        """
        changed = []
        for path, layer in matches.layers:
            fallen = self.fallen.get(path)
            if precision == "fp8" and only_fallen and (fallen is None or fallen() is not layer):
                continue
            if precision_of(layer) == precision:
                continue
            set_precision(layer, precision)
            changed.append(path)
            if precision == "bf16":
                self.fallen[path] = weakref.ref(layer)
            else:
                self.fallen.pop(path, None)
        return changed
