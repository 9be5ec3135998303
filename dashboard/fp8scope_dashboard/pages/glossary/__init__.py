"""The definitions that the pages show as help beside each number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.quantities import QUANTITY_TERMS
from fp8scope_dashboard.pages.glossary.runs import RUN_TERMS
from fp8scope_dashboard.pages.glossary.steps import STEP_TERMS
from fp8scope_dashboard.pages.glossary.tensors import TENSOR_TERMS
from fp8scope_dashboard.pages.glossary.term import Term
from fp8scope_dashboard.pages.glossary.training_state import TRAINING_STATE_TERMS

GLOSSARY: Final[Mapping[str, Term]] = {
    **RUN_TERMS,
    **QUANTITY_TERMS,
    **STEP_TERMS,
    **TRAINING_STATE_TERMS,
    **TENSOR_TERMS,
}
TERM_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "quantities": (
        "net_speed",
        "throughput_ratio",
        "tokens_cost",
        "time_to_loss",
        "memory_ratio",
        "energy_ratio",
        "gradient_norm_delta",
    ),
    "training_state": (
        "fp8_gradients/mu_median",
        "fp8_gradients/saturated_max",
        "fp8_gradients/bytes",
        "optimizer_state/exp_avg_bytes",
        "optimizer_state/master_bytes",
    ),
    "anatomy": (
        "wait_bound",
        "anatomy/data_seconds",
        "anatomy/copy_seconds",
        "anatomy/forward_seconds",
        "anatomy/loss_seconds",
        "anatomy/backward_seconds",
        "anatomy/communication_seconds",
        "anatomy/optimizer_seconds",
        "anatomy/checkpoint_seconds",
        "anatomy/rest_seconds",
        "launch_bound_seconds",
    ),
    "efficiency": (
        "time_forward",
        "time_backward",
        "time_optimizer",
        "time_other",
        "time_data",
        "mfu",
        "fp8_units",
        "model_flops_per_second",
        "memory_reserved",
        "memory_peak",
        "memory_rss",
        "gpu_utilization",
        "gpu_power_watts",
        "gpu_sm_clock_mhz",
        "gpu_ecc_uncorrected",
        "gpu_xid",
    ),
    "step_times": ("step_times", "step_times_casts", "step_times_held"),
    "advice": ("advice", "advice_evidence", "advice_gain", "advice_change", "advice_gained"),
}
"""Terms that one button explains together."""
GROUP_PREFIX: Final = "group:"


def terms(name: str) -> list[Term]:
    """The term of a name, or those of `group:NAME`."""
    if name.startswith(GROUP_PREFIX):
        return [GLOSSARY[member] for member in TERM_GROUPS[name.removeprefix(GROUP_PREFIX)]]
    return [GLOSSARY[name]]


def title(name: str) -> str:
    """The title of a statistic or scalar; its name with spaces if the glossary has no entry."""
    return GLOSSARY[name].title if name in GLOSSARY else name.replace("_", " ")
