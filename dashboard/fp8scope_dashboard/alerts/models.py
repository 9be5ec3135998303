"""Alert rules, their events, and the outbox that delivers events to channels."""

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
    TENSOR_NOT_FINITE = "tensor_not_finite", "NaN or Inf in tensors"
    SATURATION_RATE = "saturation_rate", "Saturation rate"
    SATURATION_RISE = "saturation_rise", "Saturation above its past"
    UNDERFLOW_RATE = "underflow_rate", "Underflow rate"
    UNDERFLOW_RISE = "underflow_rise", "Underflow above its past"
    SCALE_FROZEN = "scale_frozen", "Frozen scale"
    SCALE_STALE = "scale_stale", "Stale scale"
    SCALE_JUMP = "scale_jump", "Scale jump"
    AMAX_GROWTH = "amax_growth", "Growing amax"
    GRAD_NORM = "grad_norm", "Gradient norm"
    THROUGHPUT_DROP = "throughput_drop", "Throughput drop"
    DATA_WAIT = "data_wait", "Wait for data"
    MEMORY_CREEP = "memory_creep", "Memory creep"
    RANK_BEHIND = "rank_behind", "Rank behind"
    RUN_SILENT = "run_silent", "Run silent"
    RUN_FAILED = "run_failed", "Run failed"
    RUN_FINISHED = "run_finished", "Run finished"


class Severity(models.TextChoices):
    WARNING = "warning"
    CRITICAL = "critical"


class RuleAction(models.TextChoices):
    NOTHING = "", "Notify only"
    FALLBACK = "fallback", "Fall back to BF16"


class Rule(models.Model):
    """A detector with its parameters. A new project has one rule of each kind."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="rules")
    kind = models.CharField(max_length=32, choices=RuleKind.choices)
    severity = models.CharField(max_length=16, choices=Severity.choices, default=Severity.CRITICAL)
    parameters = models.JSONField(default=dict, blank=True)
    enabled = models.BooleanField(default=True)
    # The command to give when the rule opens an event: compute the layers that its evidence names in BF16.
    action = models.CharField(max_length=16, choices=RuleAction, default=RuleAction.NOTHING, blank=True)
    created_at = models.DateTimeField(default=timezone.now)


class EventState(models.TextChoices):
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    RESOLVED = "resolved"


class Event(models.Model):
    """One alert with its evidence. Opened once per run, kind, generation and onset step."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    rule = models.ForeignKey(Rule, null=True, on_delete=models.SET_NULL, related_name="events")
    kind = models.CharField(max_length=32, choices=RuleKind.choices)
    severity = models.CharField(max_length=16, choices=Severity.choices)
    state = models.CharField(max_length=16, choices=EventState.choices, default=EventState.OPEN)
    # The start of the training that it belongs to (see generations.py); empty if imported.
    generation = models.CharField(max_length=32, blank=True, default="")
    # The detectors that still see the condition: the stream (a writer, or 'run') and its onset step.
    seen_by = models.JSONField(default=list, blank=True)
    onset_step = models.BigIntegerField(help_text="The first step of the problem.")
    step = models.BigIntegerField(help_text="The step at which the problem was detected.")
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
            models.UniqueConstraint(fields=["run", "kind", "generation", "onset_step"], name="event_once"),
        ]


# The writer id of the run-wide detector state.
RUN_WIDE = UUID(int=0)


class DetectorState(models.Model):
    """How far the detectors have read the messages of one writer, and their state.

    The row of RUN_WIDE belongs to the run: it has the state of the comparison with the baseline, and it is
    locked while the run is evaluated.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="detector_states")
    writer = models.UUIDField()
    next_seq = models.BigIntegerField(default=0)
    state = models.JSONField(default=dict, help_text="The state of each rule's detector.")
    rows = models.BigIntegerField(
        default=-1,
        help_text="Only for RUN_WIDE: rows of the run and its baseline after everything was read; else -1.",
    )
    updated_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "writer"], name="detector_state_once"),
        ]


class Channel(models.Model):
    """A destination of a project's alerts. `config` has the channel's settings, e.g. a webhook's url and
    secret.

    All of `config` is secret; show `address` instead.
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
    """The outbox: one row per event and channel. A worker claims it by setting `claimed_at` from null."""

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
