"""Scaling recipes: frozen, validated, and convertible to and from a plain dict.

A recipe chooses the format of each of a layer's tensors, and how its scale s (the multiplier applied before
rounding) is computed. The state that a recipe needs between steps is in `fp8scope_kernels.scaling_state`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import torch

from fp8scope_kernels.devices import capabilities_of
from fp8scope_kernels.formats import E2M1, E4M3, E5M2, ENCODINGS, Encoding, Format, in_encoding

Role = Literal["input", "weight", "grad_output"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")

Block = tuple[int, int]
"""Height and width of the part of a matrix that shares a scale; 0 means the whole dimension."""

Nonfinite = Literal["propagate", "clamp"]
"""The result of an Inf element: NaN (`propagate`), or the format's largest value (`clamp`). NaN stays NaN."""
NONFINITE: tuple[Nonfinite, ...] = ("propagate", "clamp")

FP8_ENCODINGS = ("device", *ENCODINGS)

Formats = Literal["HYBRID", "E4M3", "E5M2", "E2M1"]
"""The formats of a layer's three tensors: E4M3 forward and E5M2 backward (`HYBRID`), or one for all."""

MAX_HISTORY = 65_536
MAX_MARGIN = 64


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The fields that all recipes have.

    `fp8_format`: `HYBRID` (E4M3 forward, E5M2 backward), `E4M3` or `E5M2` for all three tensors; the recipes
    of four bits have `E2M1`.
    `fp8_encoding`: `device` takes the pair of formats that the tensor's device computes in, by the table in
    devices.py. `ocp` (E4M3 and E5M2) and `fnuz` (E4M3FNUZ and E5M2FNUZ) take one pair on every device.
    `saturate`: clamp to the largest finite value before rounding. With False, larger values become NaN, and
    Inf in E5M2; this exists to demonstrate that fault.
    `stochastic_gradients`: round `grad_output` at random, so that small gradients are kept on average.
    `nonfinite`: `propagate` turns an Inf element into NaN, so that a `GradScaler` or a check of the loss sees
    it; `clamp` turns it into the largest finite value, which hides it. NaN stays NaN in both. Stored recipes
    without the field have the default.
    """

    kind: ClassVar[str] = ""
    formats: ClassVar[tuple[Formats, ...]] = ("HYBRID", "E4M3", "E5M2")
    """The values that `fp8_format` may have."""
    fp8_format: Formats = "HYBRID"
    saturate: bool = True
    stochastic_gradients: bool = False
    nonfinite: Nonfinite = "propagate"
    fp8_encoding: Literal["device", "ocp", "fnuz"] = "device"

    def __post_init__(self) -> None:
        _one_of(self, "fp8_format", self.formats)
        _one_of(self, "fp8_encoding", FP8_ENCODINGS)
        _one_of(self, "nonfinite", NONFINITE)
        _boolean(self, "saturate")
        _boolean(self, "stochastic_gradients")
        if self.stochastic_gradients and not self.saturate:
            raise ValueError(f"{self.kind}: stochastic_gradients needs saturate=True.")

    def format_of(self, role: Role, device: torch.device | None = None) -> Format:
        """The format of a layer's `input`, `weight` or `grad_output` on a device, by default a CPU.

        Raises ValueError for another role.
        """
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}.")
        if self.fp8_format == "E2M1":
            return E2M1
        five_bits = role == "grad_output" if self.fp8_format == "HYBRID" else self.fp8_format == "E5M2"
        return in_encoding(E5M2 if five_bits else E4M3, self.encoding_on(device))

    def encoding_on(self, device: torch.device | None) -> Encoding:
        """The pair of FP8 formats on a device, by default a CPU."""
        if self.fp8_encoding != "device":
            return self.fp8_encoding
        return "ocp" if device is None else capabilities_of(device).encoding

    def block_of(self, role: Role) -> Block | None:
        """The block that shares a scale, (rows, columns) with the dimension that a product sums over last.

        0 stands for all rows or columns; None for one scale of the whole tensor. Raises ValueError if `role`
        is not `input`, `weight` or `grad_output`.
        """
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}.")
        return None

    def rotates(self, role: Role) -> bool:
        """Return whether the tensor is rotated, along the tokens, for the product that sums over them."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of strings, numbers and booleans, with the recipe's name under `recipe`."""
        values = {"recipe": self.kind, **asdict(self)}
        # Runs of earlier versions have no such field, and the default changes nothing for them.
        if self.fp8_encoding == "device":
            del values["fp8_encoding"]
        return values


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """s from the amax of past calls: s = M * 2^-margin / amax (the delayed recipe of Transformer Engine).

    `history_length`: the number of past calls. `amax_compute`: their `max`, or the `most_recent` one.
    `margin`: head room in powers of two. `interval`: calls between two updates of s.
    `reduce_amax`: `fp8scope_kernels.distributed.sync_amaxes` makes the histories and scales of all ranks
    equal. The first call has no history and takes s from its own tensor.
    """

    kind: ClassVar[str] = "DelayedScaling"
    history_length: int = 16
    amax_compute: Literal["max", "most_recent"] = "max"
    margin: int = 0
    interval: int = 1
    reduce_amax: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _integer(self, "history_length", 1, MAX_HISTORY)
        _one_of(self, "amax_compute", ("max", "most_recent"))
        _integer(self, "margin", -MAX_MARGIN, MAX_MARGIN)
        _integer(self, "interval", 1, 2**31)
        _boolean(self, "reduce_amax")


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(Recipe):
    """s from the tensor itself: s = M * 2^-margin / amax; `power_of_two` rounds it down to a power of two."""

    kind: ClassVar[str] = "CurrentScaling"
    power_of_two: bool = False
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _boolean(self, "power_of_two")
        _integer(self, "margin", -MAX_MARGIN, MAX_MARGIN)


@dataclass(frozen=True, kw_only=True)
class _Blockwise(Recipe):
    """Base of the recipes with a scale from each block's own amax. They always saturate."""

    rounds_at_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.saturate:
            raise ValueError(f"{self.kind} always saturates: its scales leave nothing to overflow.")
        if self.stochastic_gradients and not self.rounds_at_random:
            raise ValueError(f"{self.kind} rounds to nearest; stochastic_gradients needs a scale per tensor.")


@dataclass(frozen=True, kw_only=True)
class RowwiseScaling(_Blockwise):
    """One scale per row of each operand: s = M / amax of the row. Products do not sum over rows."""

    kind: ClassVar[str] = "RowwiseScaling"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _boolean(self, "power_of_two")

    def block_of(self, role: Role) -> Block | None:
        super().block_of(role)
        return (1, 0)


@dataclass(frozen=True, kw_only=True)
class BlockScaling(_Blockwise):
    """One scale per 1x128 of activations and gradients, and per 128x128 of weights (as in DeepSeek-V3).

    With `power_of_two` the dequantised operands are exact in BF16. Otherwise they are multiplied in float32
    on hardware that has no such product.
    """

    kind: ClassVar[str] = "BlockScaling"
    fp8_format: Formats = "E4M3"
    power_of_two: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _boolean(self, "power_of_two")

    def block_of(self, role: Role) -> Block | None:
        super().block_of(role)
        return (128, 128) if role == "weight" else (1, 128)


@dataclass(frozen=True, kw_only=True)
class Microscaling(_Blockwise):
    """Base of the MX recipes: one E8M0 scale per 32 elements along the dimension summed over.

    From the OCP Microscaling Formats specification 1.0. `rounding`: `up` takes the smallest scale with which
    nothing saturates; `floor` is the rule of the specification, with which a block's largest elements may
    saturate.
    """

    rounding: Literal["up", "floor"] = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "rounding", ("up", "floor"))

    def block_of(self, role: Role) -> Block | None:
        super().block_of(role)
        return (1, 32)


@dataclass(frozen=True, kw_only=True)
class MXFP8(Microscaling):
    """One E8M0 scale per 32 elements in FP8; see `Microscaling`."""

    kind: ClassVar[str] = "MXFP8"
    fp8_format: Formats = "E4M3"


@dataclass(frozen=True, kw_only=True)
class MXFP4(Microscaling):
    """One E8M0 scale per 32 elements in E2M1, all three tensors; see `Microscaling`.

    `stochastic_gradients`: with rounding `up` nothing saturates, and the rounding is unbiased.
    """

    kind: ClassVar[str] = "MXFP4"
    formats: ClassVar[tuple[Formats, ...]] = ("E2M1",)
    rounds_at_random: ClassVar[bool] = True
    fp8_format: Formats = "E2M1"


@dataclass(frozen=True, kw_only=True)
class NVFP4(_Blockwise):
    """E2M1 with E4M3 scales of blocks and a float32 scale of the tensor (NVIDIA, arXiv 2509.25149).

    Blocks are 1x16 along the dimension summed over, and 16x16 of weights, so that both products of a weight
    see the same numbers. `reference.nvfp4_scales` defines the scales. Leave the layers that the paper keeps
    in BF16 (some of the last) out of `convert`.

    `stochastic_gradients`: round `grad_output` at random, for both of its products.
    `hadamard`: rotate both operands of the weight's gradient by a random Hadamard transform of 16 tokens.
    """

    kind: ClassVar[str] = "NVFP4"
    formats: ClassVar[tuple[Formats, ...]] = ("E2M1",)
    rounds_at_random: ClassVar[bool] = True
    fp8_format: Formats = "E2M1"
    stochastic_gradients: bool = True
    hadamard: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _boolean(self, "hadamard")

    def block_of(self, role: Role) -> Block | None:
        super().block_of(role)
        return (16, 16) if role == "weight" else (1, 16)

    def rotates(self, role: Role) -> bool:
        return self.hadamard and role != "weight"


RECIPES: dict[str, type[Recipe]] = {
    recipe.kind: recipe
    for recipe in (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling, MXFP8, MXFP4, NVFP4)
}


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_dict` described. Raises ValueError on an unknown recipe, field or value."""
    kind = values.get("recipe")
    cls = RECIPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"'recipe' must be one of {', '.join(RECIPES)}, got {kind!r}.")
    names = {field.name for field in fields(cls)}
    unknown = sorted(str(key) for key in values if key != "recipe" and key not in names)
    if unknown:
        raise ValueError(f"{kind} has no field {', '.join(unknown)}; it has {', '.join(sorted(names))}.")
    return cls(**{key: value for key, value in values.items() if key != "recipe"})


def _one_of(recipe: Recipe, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(recipe, name)
    if value not in allowed:
        raise ValueError(f"{recipe.kind}.{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _boolean(recipe: Recipe, name: str) -> None:
    value = getattr(recipe, name)
    if not isinstance(value, bool):
        raise ValueError(f"{recipe.kind}.{name} must be True or False, got {value!r}.")


def _integer(recipe: Recipe, name: str, low: int, high: int) -> None:
    value = getattr(recipe, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{recipe.kind}.{name} must be a whole number from {low} to {high}, got {value!r}.")
