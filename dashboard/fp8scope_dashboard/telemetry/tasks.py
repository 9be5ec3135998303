from uuid import UUID

from celery import shared_task
from django.core.cache import cache

from fp8scope_dashboard.telemetry import compaction

# A run has one job in the queue at a time; should its mark be lost or left behind, compaction takes care
# itself that nothing is done twice, and the sweeper that it is done at all.
MARK_SECONDS = 300


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start a job for every run that compaction has to look at."""
    for run_id in compaction.runs_to_compact():
        if cache.add(_mark(run_id), 1, timeout=MARK_SECONDS):
            compact_run.delay(str(run_id))


@shared_task  # type: ignore[untyped-decorator]
def compact_run(run_id: str) -> None:
    """Compact some of a run. What is left goes to the end of the queue: other runs have their turn first."""
    if compaction.compact_run(UUID(run_id)) == compaction.CHANGES_AT_ONCE:
        cache.set(_mark(run_id), 1, timeout=MARK_SECONDS)
        compact_run.delay(run_id)
    else:
        cache.delete(_mark(run_id))


def _mark(run_id: UUID | str) -> str:
    return f"compacting:{run_id}"
