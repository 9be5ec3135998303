"""Celery's way in: parse ids, call a plain function."""

from uuid import UUID

from celery import shared_task

from fp8scope_dashboard.alerts import outbox, services


@shared_task  # type: ignore[untyped-decorator]
def evaluate_run(run_id: str) -> None:
    """Run the detectors over what is new of a run."""
    services.evaluate(UUID(run_id))


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Start the evaluations that a lost message would have started."""
    for run_id in services.unread_runs():
        evaluate_run.delay(str(run_id))


@shared_task  # type: ignore[untyped-decorator]
def deliver(delivery_id: int) -> None:
    """Send one event to one channel."""
    outbox.deliver(delivery_id)


@shared_task  # type: ignore[untyped-decorator]
def deliver_due() -> None:
    """Send again what failed, and what a lost message would have sent."""
    for delivery_id in outbox.due():
        deliver.delay(delivery_id)
