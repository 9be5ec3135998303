"""Celery tasks: each parses ids and calls a plain function."""

from celery import shared_task

from fp8scope_dashboard.alerts import lifecycle, services
from fp8scope_dashboard.alerts.custom_rules import trials
from fp8scope_dashboard.alerts.delivery import outbox, routing
from fp8scope_dashboard.alerts.detection import evaluator
from fp8scope_dashboard.notifications import enqueue_evaluations, redis_client


@shared_task  # type: ignore[untyped-decorator]
def evaluate_waiting(slot: int) -> None:
    """Run the detectors over the new rows of the runs that wait."""
    evaluator.work(slot)


@shared_task  # type: ignore[untyped-decorator]
def sweep() -> None:
    """Evaluate the runs that wait for it unknown to Redis."""
    enqueue_evaluations(redis_client(), services.unread_runs())


# Prefork kills an attempt that takes longer: its claim expires, and another worker sends the same message.
@shared_task(time_limit=outbox.ATTEMPT_SECONDS)  # type: ignore[untyped-decorator]
def deliver(delivery_id: int) -> None:
    """Send one delivery."""
    outbox.deliver(delivery_id)


@shared_task  # type: ignore[untyped-decorator]
def deliver_due() -> None:
    """Send deliveries that failed before or whose Celery messages were lost."""
    for delivery_id in outbox.due():
        deliver.delay(delivery_id)


@shared_task  # type: ignore[untyped-decorator]
def follow_up() -> None:
    """Open the alerts whose silence is over, and escalate those that nobody has acknowledged in time."""
    lifecycle.unmute_due()
    routing.escalate_due()


@shared_task  # type: ignore[untyped-decorator]
def try_rule(trial_id: int) -> None:
    """Try a rule on past runs."""
    trials.carry_out(trial_id)
