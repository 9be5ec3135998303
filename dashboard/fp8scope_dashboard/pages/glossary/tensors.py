"""Terms about one quantised tensor: counts, rates, amax, scale and histogram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

_BEYOND = "|x·s| above M by more than float32 rounding"
_SCALED = "x is the tensor before quantisation, s its scale, M the format's largest finite value."

TENSOR_TERMS: Final[Mapping[str, Term]] = {
    "overflow_rate": Term(
        "Overflow rate",
        "Share of the tensor's elements that were clipped to the format's range (saturated), NaN or "
        "infinite.",
        "A small rate in activations can be harmless. Overflow of one tensor at every step is not. "
        "Saturation is its finite part: what a smaller scale would keep. The alerts of saturation judge the "
        "overflow. Of a client that does not count NaN and infinities, both are the same.",
    ),
    "saturation_rate": Term(
        "Saturation rate",
        f"Share of finite elements with {_BEYOND}. {_SCALED}",
        "With the elements that are NaN or infinite it is the overflow rate.",
    ),
    "saturated": Term(
        "Saturated", f"Number of finite elements with {_BEYOND}, which clipping changed. {_SCALED}"
    ),
    "underflow_rate": Term(
        "Underflow rate",
        "Share of non-zero elements that became zero in FP8.",
        "Gradients lose their small values first. A high rate means that the scale is too small.",
    ),
    "underflow": Term("Underflow", "Number of non-zero elements that became zero in FP8."),
    "subnormal_rate": Term(
        "Subnormal rate",
        "Share of elements stored with fewer bits, below the format's smallest normal number.",
    ),
    "subnormal": Term("Subnormal", "Number of elements stored below the format's smallest normal number."),
    "nonfinite_rate": Term(
        "Non-finite rate", "Share of elements that were NaN or infinite before quantisation."
    ),
    "nonfinite": Term(
        "Non-finite",
        "Number of elements that were NaN or infinite before quantisation. They are excluded from amax.",
    ),
    "amax": Term("amax", "Largest absolute value of the tensor's finite elements in this step."),
    "scale": Term(
        "Scale",
        "The multiplier s used in this step. Delayed scaling computes it from the amax of earlier steps, so "
        "elements saturate for some steps after a sudden rise of amax.",
    ),
    "noise_to_signal": Term(
        "Noise to signal",
        "Σ(x − q/s)² / Σx²: the power of the quantisation error relative to that of the tensor, in sampled "
        "steps. The SQNR in dB is −10 log₁₀ of it.",
        "For normally distributed values, about 0.0008 (31 dB) in E4M3 and 0.003 (25 dB) in E5M2. A larger "
        "value means that elements saturate or become zero.",
    ),
    "sq_error": Term("Squared error", "Σ(x − q/s)² over the elements with finite x and q, in sampled steps."),
    "sq_signal": Term("Squared signal", "Σx² over the same elements as the squared error."),
    "blocks": Term("Blocks", "Number of blocks of the tensor. Each block has its own scale."),
    "saturated_blocks": Term("Saturated blocks", "Number of blocks with at least one clipped element."),
    "saturated_block_rate": Term(
        "Saturated block rate", "Share of blocks with at least one clipped element."
    ),
    "scale_min": Term("Smallest block scale", "The smallest scale of the tensor's blocks."),
    "scale_median": Term("Median block scale", "The median scale of the tensor's blocks."),
    "scale_max": Term("Largest block scale", "The largest scale of the tensor's blocks."),
    "scale_frozen": Term(
        "Frozen scale",
        "1 if delayed scaling cannot compute a new scale because the amax history is all zero or contains an "
        "infinity. The old scale stays in use.",
        "One or two steps are harmless. A scale that stays frozen is a fault.",
    ),
    "scale_stale": Term(
        "Restarted scale",
        "1 if a checkpoint contains no matching scaling state for the tensor, so that the scale was "
        "initialised again.",
    ),
    "history_amax": Term(
        "Largest amax in the history",
        "The largest value in the amax history, from which delayed scaling computes the scale.",
    ),
    "update_ratio": Term(
        "Update to weight",
        "‖update‖ / ‖weight‖ of one optimizer step, in sampled steps, over all elements of the weight or "
        "32,768 evenly spaced ones.",
        "Around 0.001 is common. Updates below the precision of the weight (0.004 in BF16) are lost.",
    ),
    "kurtosis": Term(
        "Kurtosis of inputs",
        "mean((x − m)⁴) / mean((x − m)²)², with m the mean of x, of a layer's input in sampled steps: 3 for "
        "normally distributed values, more with outliers.",
        "Values of 10 are common. A kurtosis that keeps growing shows an outlier feature, which makes the "
        "other elements lose precision in FP8.",
    ),
    "logit_bound": Term(
        "Bound of attention logits",
        "The largest ‖q‖ · ‖k‖ · scale of a sequence and head, in sampled steps: no attention logit of the "
        "module is larger.",
        "The largest logit is often half of it or a quarter. If the bound keeps growing, attention "
        "concentrates on single tokens; QK norm or a cap of the logits prevents that.",
    ),
    "load_max": Term(
        "Largest expert load",
        "The share of the router's choices that the most chosen expert got, in sampled steps.",
        "1 over the number of experts is even.",
    ),
    "load_imbalance": Term(
        "Imbalance of expert loads",
        "1 minus the entropy of the experts' shares over that of equal shares, in sampled steps: 0 if all "
        "experts get the same, 1 if one gets everything.",
    ),
    "exponents": Term(
        "Exponents",
        "Number of elements with floor(log₂ |x|) = e in the last sampled step. The lines are the limits of "
        "the format at the scale of that step (the median scale if there is one per block).",
        "Elements right of the largest value saturate; elements left of the smallest subnormal become zero.",
    ),
    "readiness": Term(
        "Readiness for FP8 and FP4",
        "What a format would do to each tensor of a sampled step, computed from its exponents and its amax. "
        "Ready: at most 0.01 % of the elements saturate, at most 1 % flush to zero beyond what the format "
        "takes from any tensor, and the error is at most twice what its mantissa costs.",
        "A tensor that needs finer scaling is ready with a scale for each row or block.",
    ),
    "flushed": Term(
        "Flushes to zero",
        "Share of elements that are not zero and become zero: at most half of the smallest subnormal after "
        "scaling. A range in brackets holds for every tensor with these exponents.",
    ),
    "what_if_error": Term(
        "Error",
        "Estimated Σ(x − q/s)² / Σx², for elements that are spread evenly between powers of two.",
        "For normally distributed values, about 0.07 % in E4M3, 0.3 % in E5M2 and 1 % in FP4.",
    ),
    "false_discovery_rate": Term(
        "False discovery rate",
        "The tensors that changed are those whose last quarter of the last 1,000 steps differs from those "
        "before, by a test that allows for noise that is correlated over steps. Of all tensors that are "
        "named, at most this share is expected to be named by chance.",
        "A drift that goes on is not a change.",
    ),
    "sustained_onset": Term(
        "First sustained onset",
        "The run is cut into up to 400 spans of steps. An onset is the first span over the limit if, of five "
        "observed spans that begin with it, at least three are over it. Statistics that are no rates are "
        "over the limit when they are that factor from the median of their first tenth. Underflow must also "
        "be twice what the tensor had in its first tenth, or half of its elements.",
        "Those of the earliest spans are searched step by step; a range means that the tensor was not "
        "observed in each step. As in alerts, the first 10 steps of a run, in which scales settle, do not "
        "count. An alert of the same tensor names another step only if its rule has another limit. Changed "
        "most compares the medians of the last and the first tenth.",
    ),
    "tensor_margin": Term(
        "Margin",
        "Head room in powers of two: s = M · 2^−margin / amax. One more halves the scale: fewer elements "
        "saturate when amax rises, and more of the small ones flush to zero.",
        "The advice is the margin nearest to the current one with which at most 0.01 % saturate, at most "
        "1 % flush to zero and the error is at most twice what the mantissa costs.",
    ),
    "numel": Term(
        "Elements", "Number of elements that were quantised in this step, to which all counts refer."
    ),
    "representable": Term(
        "Largest representable",
        "M / s: the largest value that is representable with the scale of this step. If amax is larger, "
        "elements saturate.",
    ),
}

# In the order of their use for finding problems.
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
    "kurtosis",
    "logit_bound",
    "load_imbalance",
    "load_max",
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
