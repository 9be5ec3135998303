"""What is counted of a tensor when it is quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

_BEYOND = "|x·s| above M by more than float32's own rounding"
_SCALED = "x is the tensor before quantisation, s its scale, M the format's largest finite value."

TENSOR_TERMS: Final[Mapping[str, Term]] = {
    "overflow_rate": Term(
        "Overflow rate",
        "Elements that were clipped to the format's range (saturated) or were NaN or infinite, over all "
        "elements of the tensor in that step.",
        "A little in activations can be harmless. The same tensor step after step is not.",
    ),
    "saturation_rate": Term(
        "Saturation rate", f"Finite elements with {_BEYOND}, over all elements. {_SCALED}"
    ),
    "saturated": Term(
        "Saturated", f"Number of finite elements with {_BEYOND}: what clipping changed. {_SCALED}"
    ),
    "underflow_rate": Term(
        "Underflow rate",
        "Elements that were not zero and became zero in FP8, over all elements.",
        "Gradients lose their small values first: a high rate there means a scale that is too small.",
    ),
    "underflow": Term("Underflow", "Number of elements that were not zero and became zero in FP8."),
    "subnormal_rate": Term(
        "Subnormal rate",
        "Elements stored below the format's smallest normal number, with fewer bits, over all elements.",
    ),
    "subnormal": Term("Subnormal", "Number of elements stored below the format's smallest normal number."),
    "nonfinite_rate": Term(
        "Non-finite rate", "NaN or infinite elements before quantisation, over all elements."
    ),
    "nonfinite": Term(
        "Non-finite", "Number of NaN or infinite elements before quantisation; they never enter amax."
    ),
    "amax": Term("amax", "Largest absolute value among the tensor's finite elements in that step."),
    "scale": Term(
        "Scale",
        "The multiplier s used in this step. With delayed scaling it comes from earlier steps' amax, so a "
        "sudden rise of amax saturates until it follows.",
    ),
    "noise_to_signal": Term(
        "Noise to signal",
        "Σ(x − q/s)² / Σx²: the power that rounding and clipping added, relative to the tensor's own. Taken "
        "in sampled steps. The SQNR in dB is −10 log₁₀ of it.",
        "About 0.0008 (31 dB) is what E4M3 does to bell-shaped values, 0.003 (25 dB) what E5M2 does. More "
        "means that elements saturate or flush.",
    ),
    "sq_error": Term(
        "Squared error", "Σ(x − q/s)² over the elements where both are finite. Taken in sampled steps."
    ),
    "sq_signal": Term("Squared signal", "Σx² over the same elements as the squared error."),
    "blocks": Term("Blocks", "How many blocks the tensor has, each with a scale of its own."),
    "saturated_blocks": Term("Saturated blocks", "Blocks with at least one element that was clipped."),
    "saturated_block_rate": Term(
        "Saturated block rate", "Blocks with at least one element that was clipped, over all blocks."
    ),
    "scale_min": Term("Smallest block scale", "The smallest multiplier among the tensor's blocks."),
    "scale_median": Term("Median block scale", "The median multiplier among the tensor's blocks."),
    "scale_max": Term("Largest block scale", "The largest multiplier among the tensor's blocks."),
    "scale_frozen": Term(
        "Frozen scale",
        "1 where a delayed scale cannot follow its tensor: its whole history of amax is zero, or an infinity "
        "is in it. The old scale is kept meanwhile.",
        "For a step or two after a dead layer this is harmless. A scale that stays frozen is a fault.",
    ),
    "scale_stale": Term(
        "Restarted scale",
        "1 where a checkpoint brought no scaling state for the tensor, or one that did not fit it, so that "
        "the scale was started afresh.",
    ),
    "history_amax": Term(
        "Largest amax in the history", "What a delayed scale follows: the largest amax that it remembers."
    ),
    "update_ratio": Term(
        "Update to weight",
        "‖update‖ / ‖weight‖ of one optimizer step, over all elements of the weight or 32,768 evenly spaced "
        "ones. Taken in sampled steps.",
        "Around 0.001 is common. Updates smaller than the weight's precision (0.004 in BF16) are lost in it.",
    ),
    "exponents": Term(
        "Exponents",
        "How many of the tensor's elements have floor(log₂ |x|) = e, in the last sampled step. The lines are "
        "the limits of its format at that step's scale (the median one, where each block has its own).",
        "What lies right of the largest value saturates, left of the smallest subnormal becomes zero.",
    ),
    "numel": Term("Elements", "Elements that were quantised in that step: what the counts are counts of."),
    "representable": Term(
        "Largest representable",
        "M / s: the largest value that this step's scale can hold. Where amax is above it, elements "
        "saturate.",
    ),
}

# Statistics in the order in which a person looks for trouble.
STATISTICS: Final = (
    "overflow_rate",
    "saturation_rate",
    "underflow_rate",
    "subnormal_rate",
    "nonfinite_rate",
    "amax",
    "scale",
    "saturated",
    "underflow",
    "subnormal",
    "nonfinite",
    "numel",
    "noise_to_signal",
    "saturated_block_rate",
    "update_ratio",
    "history_amax",
    "scale_frozen",
    "scale_stale",
    "scale_min",
    "scale_median",
    "scale_max",
    "blocks",
    "saturated_blocks",
    "sq_error",
    "sq_signal",
)
