"""All queries of the telemetry store. Other apps read its tables only through this module.

Results combine blocks, roll-ups and the chunks that are not compacted yet; callers need not know which.
"""

from __future__ import annotations

from uuid import UUID

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.heatmaps import (
    Heatmap,
    Latest,
    by_rank,
    heatmap,
    latest_statistics,
    statistic_names,
    top,
)
from fp8scope_dashboard.telemetry.histograms import (
    EXPONENT_BINS,
    Histogram,
    HistogramRows,
    histogram,
    histogram_count,
    histogram_rows,
)
from fp8scope_dashboard.telemetry.replay import contiguous_until, stream
from fp8scope_dashboard.telemetry.scalar_means import ScalarMeans, scalar_means
from fp8scope_dashboard.telemetry.series import Series, scalar, scalars, tensor_series
from fp8scope_dashboard.telemetry.writers import sources_of, step_range

__all__ = [
    "EXPONENT_BINS",
    "Heatmap",
    "Histogram",
    "HistogramRows",
    "Latest",
    "ScalarMeans",
    "Series",
    "by_rank",
    "contiguous_until",
    "heatmap",
    "histogram",
    "histogram_count",
    "histogram_rows",
    "latest_statistics",
    "scalar",
    "scalar_means",
    "scalar_names",
    "scalars",
    "statistic_names",
    "step_range",
    "stream",
    "tensor_series",
    "top",
    "writers",
]


def scalar_names(run_id: UUID) -> list[str]:
    """The names of the logged scalars, sorted."""
    return sorted(Run.objects.values_list("last_scalars", flat=True).get(pk=run_id))


def writers(run_id: UUID) -> list[UUID]:
    """The writers of the run: lowest rank first, and within a rank the latest attempt first."""
    return list(sources_of(run_id))
