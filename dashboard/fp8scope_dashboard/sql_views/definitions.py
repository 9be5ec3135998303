"""The views of the schema `fp8scope_views`.

Names of views and columns are stable. `projects` decides what a login may read; every other view joins it.
"""

from __future__ import annotations

import hashlib
from typing import Final

from fp8scope_dashboard.sql_views.judgement_views import ALERTS, EVALUATIONS, SCORE_VERDICTS, VERDICTS
from fp8scope_dashboard.sql_views.run_views import (
    GPU_HOURS,
    LATEST_VALUES,
    PROJECTS,
    RUNS,
    SCALAR_HISTORY,
    SCALAR_MEANS,
)

VIEWS: Final = (
    *(PROJECTS, RUNS, LATEST_VALUES, SCALAR_HISTORY, SCALAR_MEANS, ALERTS),
    *(VERDICTS, EVALUATIONS, SCORE_VERDICTS, GPU_HOURS),
)
"""In the order in which they can be made."""


def digest() -> str:
    """A digest of all definitions, by which an installation knows whether its views are of this version."""
    return hashlib.sha256(repr(VIEWS).encode()).hexdigest()[:16]
