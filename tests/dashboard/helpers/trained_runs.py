"""Runs whose processes trained for given hours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

from dashboard.helpers.recording import make_run
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run, RunState, Writer

BEGAN = timezone.now() - timedelta(days=2)


def trained(
    project: Project,
    name: str,
    *attempts: tuple[int, int, float],
    ranks: int = 1,
    world_size: int | None = None,
    **fields: Any,
) -> Run:
    """A run whose attempts, one after the other, trained steps first..last in these hours."""
    environment = {"gpu_count": 8, **({} if world_size is None else {"world_size": str(world_size)})}
    last = attempts[-1][1] if attempts else None
    fields = {"state": RunState.FINISHED, "environment": environment, "last_step": last, **fields}
    run = make_run(project, name, created_at=BEGAN, **fields)
    began = BEGAN
    for number, (first, end, duration) in enumerate(attempts):
        finished = began + timedelta(hours=duration)
        for rank in range(ranks):
            Writer.objects.create(
                run=run,
                uuid=uuid4(),
                rank=rank,
                attempt=number,
                first_step=first,
                last_step=end,
                created_at=began,
                seen_at=finished,
            )
        began = finished + timedelta(hours=1)
    return run
