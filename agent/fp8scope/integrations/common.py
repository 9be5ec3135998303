"""Functions that the integrations share."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fp8scope.scalars import is_tensor
from fp8scope.step import valid_name

if TYPE_CHECKING:
    import torch

    from fp8scope.run import Run
    from fp8scope_kernels import Recipe

Begin = Callable[..., "Run"]
"""Starts a run; takes the arguments of `fp8scope.init` that are known from the trainer."""
Convert = Callable[["torch.nn.Module"], object]
logger = logging.getLogger("fp8scope")


def scalars_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are single numbers, with their names made valid for logging."""
    return {valid_name(name): value for name, value in values.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    if is_tensor(value):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def converter(recipe: "Recipe | None") -> Convert | None:
    """Return a function that converts a model in place and logs the number of layers; None for no recipe."""
    if recipe is None:
        return None

    def convert(model: "torch.nn.Module") -> None:
        from fp8scope_kernels import convert as convert_layers
        from fp8scope_kernels import fp8_experts, fp8_layers

        if any(True for layers in (fp8_layers(model), fp8_experts(model)) for _ in layers):
            return
        report = convert_layers(model, recipe)
        logger.info("%d layers compute in FP8 now (%s).", len(report.converted), type(recipe).__name__)
        if not report.converted:
            logger.warning("no layer was converted to FP8:\n%s", report)

    return convert


def kept(begin: Begin, keep: "Callable[[Run], object]") -> Begin:
    """Return `begin`, extended to pass the run that it starts to `keep`."""

    def begin_and_keep(**arguments: Any) -> "Run":
        run = begin(**arguments)
        keep(run)
        return run

    return begin_and_keep
