"""The costs and savings of FP8: tokens for the same loss, throughput, memory, gradient norm. Pure functions.

docs/methods/costs.md has the formulas and sources.
"""

from fp8scope_dashboard.analysis.quantities.measured import MeasuredRun, MeasuredScalar
from fp8scope_dashboard.analysis.quantities.result import METHOD_VERSION, of
from fp8scope_dashboard.analysis.quantities.tokens_cost import LossSpread

__all__ = ["METHOD_VERSION", "MeasuredScalar", "MeasuredRun", "LossSpread", "of"]
