"""Store evaluation scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.notifications import run_changed
from fp8scope_dashboard.receipts import dedup
from fp8scope_dashboard.runs import services as runs
from fp8scope_dashboard.runs.models import Run


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one evaluation; see `evaluations.models.Evaluation`."""

    step: int
    name: str
    metric: str
    kind: str
    higher_is_better: bool
    items: Sequence[float]
    item_ids: Sequence[str] | None
    clusters: Sequence[str] | None
    precision: str | None = None
    margin: float | None = None
    matrix: Mapping[str, Any] | None = None


@transaction.atomic
def store_evaluation(run: Run, message: dedup.MessageId, scores: Scores) -> bool:
    """Store an evaluation. Returns False if it is already stored.

    Raises:
        WriterConflictError: another message is stored under this seq.
    """
    writer = runs.writer_of(run, message.writer)
    if not dedup.record(message):
        return False
    Evaluation.objects.create(
        run=run,
        writer=message.writer,
        seq=message.seq,
        step=scores.step,
        name=scores.name,
        metric=scores.metric,
        kind=scores.kind,
        higher_is_better=scores.higher_is_better,
        items=list(scores.items),
        item_ids=None if scores.item_ids is None else list(scores.item_ids),
        clusters=None if scores.clusters is None else list(scores.clusters),
        precision=scores.precision,
        margin=scores.margin,
        matrix=None if scores.matrix is None else dict(scores.matrix),
    )
    runs.note_contact(run, writer)
    run_changed(run.id, run.project_id, "evaluation", scores.step)
    return True
