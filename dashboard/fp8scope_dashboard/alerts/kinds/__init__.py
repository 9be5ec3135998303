"""The kinds of alert rules: what each detects, its parameters, their defaults and bounds. Plain data."""

from collections.abc import Mapping

from fp8scope_dashboard.alerts.kinds.base import KindDefinition, Parameter
from fp8scope_dashboard.alerts.kinds.custom import THRESHOLD
from fp8scope_dashboard.alerts.kinds.early_signs import EARLY_SIGNS
from fp8scope_dashboard.alerts.kinds.loss import LOSS_KINDS
from fp8scope_dashboard.alerts.kinds.runs import RUN_KINDS
from fp8scope_dashboard.alerts.kinds.tensors import TENSOR_KINDS

__all__ = ["KINDS", "KindDefinition", "Parameter"]

# In the order in which findings of the same step are applied: kinds that outrank others come first.
KINDS: Mapping[str, KindDefinition] = {
    kind.name: kind for kind in (*LOSS_KINDS, *TENSOR_KINDS, *EARLY_SIGNS, *RUN_KINDS, THRESHOLD)
}
