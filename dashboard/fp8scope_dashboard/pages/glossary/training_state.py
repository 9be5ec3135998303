"""Terms about gradients that are averaged in FP8, and about what an optimizer stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

TRAINING_STATE_TERMS: Final[Mapping[str, Term]] = {
    "fp8_gradients/mu_median": Term(
        "Scaling factor, median",
        "The automatic scaling factor of gradients in FP8 (mu of FP8-LM), of the median tensor. Gradients "
        "are cast with the scale of the largest amax of all ranks, times this factor.",
        "It halves in a step in which more than 0.001 % of a tensor's values are at the format's maximum, "
        "and doubles in 1,000 calm steps. A factor that keeps falling means that ranks agree, so that sums "
        "are large.",
    ),
    "fp8_gradients/mu_min": Term("Scaling factor, smallest", "That of the tensor with the smallest one."),
    "fp8_gradients/mu_max": Term("Scaling factor, largest", "That of the tensor with the largest one."),
    "fp8_gradients/saturated_max": Term(
        "Saturated share of gradients",
        "The largest share of a tensor's gradient that was at the format's maximum, in the cast of any rank "
        "or in the sum.",
    ),
    "fp8_gradients/bytes": Term(
        "Bytes of gradients",
        "What a rank sends in a step to average its gradients in FP8: one byte an element, padding, amaxes "
        "and shares.",
    ),
    "fp8_gradients/bytes_bf16": Term(
        "Bytes of gradients in BF16", "What a rank would send in a ring all-reduce in BF16."
    ),
    "fp8_gradients/bytes_float32": Term(
        "Bytes of gradients in float32", "What a rank would send in a ring all-reduce in float32."
    ),
    "optimizer_state/exp_avg_bytes": Term(
        "First moment", "Bytes of the optimizer's running means of gradients on a rank: FP8 at O2 and O3."
    ),
    "optimizer_state/exp_avg_sq_bytes": Term(
        "Second moment",
        "Bytes of the optimizer's running means of squared gradients on a rank: FP16 at O2 and O3.",
    ),
    "optimizer_state/master_bytes": Term(
        "Master weights",
        "Bytes of the weights that the optimizer updates, where the model's own are less exact: FP16 with a "
        "scale for each tensor at O2 and O3.",
    ),
    "optimizer_state/scales_bytes": Term("Scales", "Bytes of the scales of the optimizer's stored tensors."),
    "optimizer_state/parameters": Term("Optimised parameters", "Elements that the optimizer updates."),
    "optimizer_state/level": Term("Optimizer level", "1, 2 or 3 for O1, O2 and O3 of Fp8AdamW."),
}
