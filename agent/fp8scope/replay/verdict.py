"""The conclusion from a replayed step.

Whether it is the recorded one, and whether FP8 and BF16 diverge in it.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fp8scope.control.bisection import Bisection, ProductDeviation
from fp8scope.recording.records import wire_number

DIVERGED_LOSS = 0.01
"""A loss that is higher by this share than BF16's, from the same state on the same batches."""
DIVERGED_GRADIENT = 0.5
"""A relative error of the gradient. Of healthy layers all products together stay far below it."""
STANDS_OUT = 2.0
"""A product is named alone if its error is so many times the worst of the other layers."""


def diverge(loss_fp8: float, loss_bf16: float, gradient_error: float) -> bool:
    """Return whether FP8 and BF16 diverge in a step.

    `gradient_error` is relative; NaN if a gradient is not finite.
    """
    if not math.isfinite(loss_bf16):
        return False
    if not math.isfinite(loss_fp8) or math.isnan(gradient_error):
        return True
    return loss_fp8 - loss_bf16 > DIVERGED_LOSS * abs(loss_bf16) or gradient_error > DIVERGED_GRADIENT


@dataclass(frozen=True)
class SearchedSteps:
    """The steps `first` to `last` were searched for the first in which FP8 and BF16 diverge."""

    first: int
    last: int
    is_from_start: bool
    """True if `first` is the first step of the script, so that nothing before it can be searched."""


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The result of a replay. Losses are None where they are not known."""

    step: int
    recorded: float | None
    replayed: float | None
    repeatable: bool | None = None
    """True if the step gave the same loss and gradient twice in this process. If not, there is no verdict:
    the passes in FP8 and in BF16 would not be of the same step."""
    repeated: float | None = None
    """The loss of the second pass."""
    first_difference: int | None = None
    """The first step since the snapshot whose loss differs from the recorded one."""
    bisection: Bisection | None = None
    search: SearchedSteps | None = None
    """None if only `step` was studied."""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def equal(self) -> bool | None:
        """Return whether both losses are the same float64, bit for bit; None if one is unknown."""
        if self.recorded is None or self.replayed is None:
            return None
        return same_bits(self.recorded, self.replayed)

    @property
    def loss_bf16(self) -> float | None:
        return None if self.bisection is None else self.bisection.loss_bf16

    @property
    def diverges(self) -> bool | None:
        """Return whether FP8 and BF16 diverge in this step.

        None if BF16 was not run, or the step is not repeatable.
        """
        if self.bisection is None or self.repeatable is False:
            return None
        bisection = self.bisection
        return not self._bf16_fails and diverge(
            bisection.loss_fp8, bisection.loss_bf16, bisection.total.relative_error
        )

    @property
    def _bf16_fails(self) -> bool:
        bisection = self.bisection
        return bisection is not None and not (
            math.isfinite(bisection.loss_bf16) and bisection.exact_is_finite
        )

    @property
    def product(self) -> ProductDeviation | None:
        """The product in which they diverge; None if they do not, or if no layer stands out."""
        if not self.diverges or self.bisection is None or not self.bisection.products:
            return None
        worst = self.bisection.products[0]
        others = [other.relative_error for other in self.bisection.products if other.layer != worst.layer]
        if math.isnan(worst.relative_error) or not others:
            return worst
        rest = max(others)
        return worst if worst.relative_error >= STANDS_OUT * rest else None

    def sentences(self) -> list[str]:
        """The finding in words, one sentence each."""
        said = (
            self._searching(),
            self._sameness(),
            self._repetition(),
            self._parting(),
            self._ordinary(),
        )
        return [*filter(None, said), *self.notes]

    def document(self) -> dict[str, Any]:
        """The finding as JSON."""
        product = self.product
        return {
            "step": self.step,
            "recorded_loss": _number(self.recorded),
            "replayed_loss": _number(self.replayed),
            "equal": self.equal,
            "repeatable": self.repeatable,
            "repeated_loss": _number(self.repeated),
            "first_difference": self.first_difference,
            "search": None
            if self.search is None
            else {"first_step": self.search.first, "last_step": self.search.last},
            "parted": self.diverges,
            "product": None if product is None else {"layer": product.layer, "product": product.product},
            "bisection": None if self.bisection is None else self.bisection.document(),
            "sentences": self.sentences(),
        }

    def _searching(self) -> str:
        search = self.search
        if search is None:
            return ""
        if self.repeatable is False:
            return (
                f"The search for the first step in which FP8 and BF16 diverge ended at step {self.step}; "
                "--step studies one step alone."
            )
        if not self.diverges:
            return f"FP8 and BF16 diverge in none of the steps {search.first} to {search.last}."
        if self.step > search.first:
            return f"FP8 and BF16 diverge first in step {self.step}, of the steps from {search.first} on."
        if search.is_from_start:
            return f"FP8 and BF16 diverge in step {self.step}, the first of the script."
        return (
            f"FP8 and BF16 diverge in step {self.step}, the first that was searched: an earlier one may be "
            "the first. Use --from-start, or keep snapshots more often."
        )

    def _sameness(self) -> str:
        if self.equal is None:
            missing = "recorded" if self.recorded is None else "replayed"
            return f"Step {self.step} has no {missing} loss to compare."
        if self.equal:
            return f"Step {self.step} gives the recorded loss {self.recorded!r}, bit for bit."
        text = f"Step {self.step} gives the loss {self.replayed!r}; recorded is {self.recorded!r}."
        if self.repeatable is False:
            return text
        if self.first_difference not in (None, self.step):
            return f"{text} The replay differs from step {self.first_difference} on."
        return f"{text} The script, its batches or its random numbers are not those of the run."

    def _repetition(self) -> str:
        if self.repeatable is not False:
            return ""
        same = self.repeated is None or self.replayed is None or same_bits(self.repeated, self.replayed)
        losses = "the gradient differs" if same else f"loss {self.replayed!r}, then {self.repeated!r}"
        return (
            f"Step {self.step} is not repeatable: two passes from the same state on the same batches differ "
            f"({losses}). So FP8 and BF16 cannot be compared. The script may count its own steps (a "
            "schedule, 'if step == ...'), keep state that run.allow_snapshots was not given, or be random on "
            "this device."
        )

    def _parting(self) -> str:
        bisection = self.bisection
        if bisection is None or self.repeatable is False:
            return ""
        losses = f"loss {bisection.loss_fp8:.6g} in FP8, {bisection.loss_bf16:.6g} in BF16"
        if self._bf16_fails:
            return f"BF16 fails in this step too ({losses}): FP8 is not the cause."
        if not self.diverges:
            error = bisection.total.relative_error
            return (
                f"FP8 and BF16 do not part in this step ({losses}, gradient error {error:.1%}): look at the "
                "batches, the learning rate, or an earlier step."
            )
        product = self.product
        if product is None:
            return f"FP8 and BF16 diverge in this step ({losses}); no single product stands out."
        return (
            f"FP8 and BF16 diverge in {product.layer} {product.product} ({losses}; gradient error "
            f"{product.relative_error:.1%} with this product alone in FP8)."
        )

    def _ordinary(self) -> str:
        if not self.diverges or self.product is None or self.bisection is None:
            return ""
        others = [e.relative_error for e in self.bisection.products if e.layer != self.product.layer]
        return f"The median of the products of other layers is {median(others):.1%}." if others else ""


def same_bits(first: float, other: float) -> bool:
    """Return whether two numbers are the same float64. All NaN count as the same."""
    return struct.pack("<d", first) == struct.pack("<d", other) or (math.isnan(first) and math.isnan(other))


def loss_in(scalars: Mapping[str, float] | None) -> float | None:
    """The loss among the scalars of a row; None without one."""
    return None if scalars is None else scalars.get("loss")


def _number(value: float | None) -> float | str | None:
    return None if value is None else wire_number(value)
