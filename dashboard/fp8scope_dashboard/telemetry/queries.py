"""All queries of the telemetry store. Other apps read its tables only through this module.

Results combine blocks, roll-ups and the chunks that are not compacted yet; callers need not know which.
"""

from __future__ import annotations

from uuid import UUID

from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry.heatmaps import (
    Heatmap,
    Latest,
    available_statistics,
    by_rank,
    heatmap,
    latest_statistics,
    overflow_name,
    statistic_names,
    top,
)
from fp8scope_dashboard.telemetry.histograms import (
    EXPONENT_BINS,
    HistogramRows,
    MergedHistogram,
    StepHistograms,
    histogram,
    histogram_count,
    histogram_rows,
    rank_histograms,
    sampled_steps,
    step_histograms,
    tensor_histograms,
)
from fp8scope_dashboard.telemetry.rank_scalars import RankScalars, lowest_rank_scalars, rank_scalars
from fp8scope_dashboard.telemetry.replay import contiguous_until, stream
from fp8scope_dashboard.telemetry.scalar_means import ScalarMeans, scalar_means
from fp8scope_dashboard.telemetry.series import Series, scalar, scalars, tensor_series
from fp8scope_dashboard.telemetry.unmerged_rows import unmerged_rows
from fp8scope_dashboard.telemetry.writers import sources_of, step_range, stored_of

__all__ = [
    "EXPONENT_BINS",
    "Heatmap",
    "MergedHistogram",
    "HistogramRows",
    "Latest",
    "RankScalars",
    "ScalarMeans",
    "Series",
    "StepHistograms",
    "available_statistics",
    "by_rank",
    "contiguous_until",
    "heatmap",
    "histogram",
    "histogram_count",
    "histogram_rows",
    "latest_statistics",
    "lowest_rank_scalars",
    "overflow_name",
    "rank_histograms",
    "rank_scalars",
    "raw_from",
    "sampled_steps",
    "scalar",
    "scalar_means",
    "scalar_names",
    "scalars",
    "statistic_names",
    "step_histograms",
    "step_range",
    "stream",
    "tensor_histograms",
    "tensor_series",
    "top",
    "unmerged_rows",
    "writers",
]


def scalar_names(run_id: UUID) -> list[str]:
    """The names of the logged scalars, sorted."""
    return sorted(Run.objects.values_list("last_scalars", flat=True).get(pk=run_id))


def writers(run_id: UUID) -> list[UUID]:
    """The writers of the run: lowest rank first, and within a rank the latest attempt first."""
    return list(sources_of(run_id))


def raw_from(run_id: UUID) -> int:
    """The first step with raw values of tensors; retention has left only roll-ups of earlier steps."""
    return stored_of(run_id).tensors_from
