"""Rules, what they found (events), and the outbox that carries events to people and to training processes."""

from typing import ClassVar
from uuid import UUID

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts.channels import CHANNELS
from fp8scope_dashboard.runs.models import Run


class RuleKind(models.TextChoices):
    LOSS_NOT_FINITE = "loss_not_finite", "Loss not finite"
    LOSS_SPIKE = "loss_spike", "Loss spike"
    LOSS_DIVERGENCE = "loss_divergence", "Loss divergence"
    ABOVE_BASELINE = "above_baseline", "FP8 above baseline"
    SATURATION_RATE = "saturation_rate", "Saturation rate"


class Severity(models.TextChoices):
    WARNING = "warning"
    CRITICAL = "critical"


class RuleAction(models.TextChoices):
    NOTHING = "", "Only tell"
    FALLBACK = "fallback", "Fall back to BF16"


class Rule(models.Model):
    """A detector with its parameters. Every project begins with one rule of each kind."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="rules")
    kind = models.CharField(max_length=32, choices=RuleKind.choices)
    severity = models.CharField(max_length=16, choices=Severity.choices, default=Severity.CRITICAL)
    parameters = models.JSONField(default=dict, blank=True)
    enabled = models.BooleanField(default=True)
    # What else happens when it opens an event: the layers that its evidence names are computed in BF16.
    action = models.CharField(max_length=16, choices=RuleAction, default=RuleAction.NOTHING, blank=True)
    created_at = models.DateTimeField(default=timezone.now)


class EventState(models.TextChoices):
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    RESOLVED = "resolved"


class Event(models.Model):
    """One alert: opened once per run, rule and onset step, with the evidence in it."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    rule = models.ForeignKey(Rule, null=True, on_delete=models.SET_NULL, related_name="events")
    kind = models.CharField(max_length=32, choices=RuleKind.choices)
    severity = models.CharField(max_length=16, choices=Severity.choices)
    state = models.CharField(max_length=16, choices=EventState.choices, default=EventState.OPEN)
    onset_step = models.BigIntegerField(help_text="The first step of what was detected.")
    step = models.BigIntegerField(help_text="The step at which it was detected.")
    step_time = models.DateTimeField(
        null=True, blank=True, help_text="When that step ended, by the agent's clock."
    )
    value = models.FloatField(null=True, blank=True)
    threshold = models.FloatField(null=True, blank=True)
    message = models.CharField(max_length=500)
    evidence = models.JSONField(default=dict, blank=True)
    opened_at = models.DateTimeField(default=timezone.now)
    resolved_at = models.DateTimeField(null=True, blank=True)
    acknowledged_by = models.ForeignKey(
        User, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    acknowledged_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["-opened_at"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "kind", "onset_step"], name="event_once"),
        ]


# The writer of a run's own detector state.
RUN_WIDE = UUID(int=0)


class DetectorState(models.Model):
    """How far the detectors have read one writer's stream, and what they remember of it.

    The row of RUN_WIDE is the run's own: it holds what is not one writer's (the comparison with the
    baseline) and its lock is held while the run is evaluated.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="detector_states")
    writer = models.UUIDField()
    next_seq = models.BigIntegerField(default=0)
    state = models.JSONField(default=dict, help_text="By rule: what its detector remembers.")
    rows = models.BigIntegerField(
        default=-1,
        help_text="In the run's own row: rows of the run and its baseline when all was read; else -1.",
    )
    updated_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "writer"], name="detector_state_once"),
        ]


class Channel(models.Model):
    """Where a project's alerts go. `config` holds what the channel needs, e.g. a webhook's url and secret.

    All of `config` is secret; `address` is what may be shown.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="channels")
    kind = models.CharField(max_length=32, default="webhook")
    name = models.CharField(max_length=128)
    config = models.JSONField(default=dict)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now)

    @property
    def address(self) -> str:
        """The receiver's address without its secrets."""
        return CHANNELS[self.kind].masked(self.config)


class Delivery(models.Model):
    """The outbox: one row per event and channel, claimed by an UPDATE of `claimed_at` where it is null."""

    event = models.ForeignKey(Event, on_delete=models.CASCADE, related_name="deliveries")
    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="deliveries")
    attempts = models.IntegerField(default=0)
    due_at = models.DateTimeField(default=timezone.now)
    claimed_at = models.DateTimeField(null=True, blank=True)
    delivered_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True, help_text="Set when no attempt is left.")
    last_error = models.CharField(max_length=500, blank=True, default="")

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event", "channel"], name="delivery_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["delivered_at", "due_at"])]
