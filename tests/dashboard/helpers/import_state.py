"""Everything that importing a file again must leave as it is."""

from __future__ import annotations

from typing import Any

from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.receipts.dedup import message_counts
from fp8scope_dashboard.runs.models import Run, Writer


def state() -> dict[str, Any]:
    """What an import that changes nothing leaves as it is."""
    return {
        str(run.pk): (
            *(
                run.rows_stored,
                run.points_stored,
                run.rows_sent,
                run.points_sent,
                run.state,
                run.last_scalars,
            ),
            *(message_counts(run.pk), run.config, run.summary, run.created_at, run.finished_at),
            *(Writer.objects.filter(run=run).count(), Evaluation.objects.filter(run=run).count()),
        )
        for run in Run.objects.all()
    }
