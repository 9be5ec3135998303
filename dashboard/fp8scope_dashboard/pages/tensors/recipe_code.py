"""The Python lines that give one layer a proposed format, scaling and margin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from fp8scope_dashboard.analysis.what_if.targets import Target

# The formats that layers of fp8scope compute in, by target: the value of `fp8_format`.
LAYER_FORMATS: Final = {"hybrid": "HYBRID", "e4m3": "E4M3", "e5m2": "E5M2"}
# The recipes that have the format and the blocks of a target, with the number of elements that share a scale.
BLOCK_RECIPES: Final = {"mxfp8": ("MXFP8", 32), "mxfp4": ("MXFP4", 32), "nvfp4": ("NVFP4", 16)}
# Names of layers are patterns for convert: these characters stand for themselves.
_PLAIN = re.compile(r"[\w.\-/:]+")


def recipe_code(module: str, role: str, target: Target, recipe: Any, margin: int) -> str:
    """The lines to paste into a training script; empty if fp8scope has no layers in this format and scaling.

    Args:
        module: the layer, by its path.
        role: the tensor's role in it: input, weight, grad_output.
        target: the format and the parts that share a scale.
        recipe: the run's recipe, as the agent describes it: whether scales are delayed.
        margin: head room in powers of two, for scales of whole tensors.
    """
    call = _call(target, _layer_format(target, role), recipe, margin)
    if call is None or not _PLAIN.fullmatch(module):
        return ""
    return "\n".join(
        (
            "import fp8scope",
            "",
            f"# Before the other layers: convert leaves alone what is converted. It is all of {module}'s",
            f"# tensors that take this recipe, not only {role}.",
            f"fp8scope.convert(model, {call}, include={module!r})",
        )
    )


def _layer_format(target: Target, role: str) -> str | None:
    """`fp8_format` of the layer. A tensor that keeps its part of HYBRID keeps that of the others as well."""
    name = target.format.name
    if (name, role) in {("e5m2", "grad_output"), ("e4m3", "input"), ("e4m3", "weight")}:
        return "HYBRID"
    return LAYER_FORMATS.get(name)


def _call(target: Target, fp8_format: str | None, recipe: Any, margin: int) -> str | None:
    if target.format.name in BLOCK_RECIPES:
        name, block = BLOCK_RECIPES[target.format.name]
        return f"fp8scope.{name}()" if target.block_size == block else None
    if fp8_format is None:
        return None
    chosen = f'fp8_format="{fp8_format}"'
    if target.scaling == "row":
        return f"fp8scope.RowwiseScaling({chosen})"
    if target.scaling == "block":
        return f"fp8scope.BlockScaling({chosen}, power_of_two=False)" if target.block_size == 128 else None
    kind = "CurrentScaling" if _is_current(recipe) else "DelayedScaling"
    return f"fp8scope.{kind}({chosen}, margin={margin})"


def _is_current(recipe: Any) -> bool:
    name = (recipe.get("recipe") or recipe.get("name") or "") if isinstance(recipe, Mapping) else ""
    return isinstance(name, str) and "current" in name.lower()
