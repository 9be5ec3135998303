"""Alert rules, their alerts, and the outbox that delivers alerts to channels."""

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import UUID, uuid4

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.alerts import beginnings
from fp8scope_dashboard.alerts.channels import CHANNELS
from fp8scope_dashboard.db.encryption import UnreadableSecretError, decrypt_json, encrypt_json
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.onsets import steps_in_words


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
    SCALE_DISAGREEMENT = "scale_disagreement", "Scales differ between ranks"
    AMAX_GROWTH = "amax_growth", "Growing amax"
    NOISE_GROWTH = "noise_growth", "Growing quantisation noise"
    KURTOSIS_GROWTH = "kurtosis_growth", "Growing outliers"
    LOGIT_GROWTH = "logit_growth", "Growing attention logits"
    ROUTER_COLLAPSE = "router_collapse", "Uneven expert load"
    UPDATE_GROWTH = "update_growth", "Growing updates"
    GRAD_NORM = "grad_norm", "Gradient norm"
    THROUGHPUT_DROP = "throughput_drop", "Throughput drop"
    DATA_WAIT = "data_wait", "Wait for data"
    MEMORY_CREEP = "memory_creep", "Memory creep"
    RANK_BEHIND = "rank_behind", "Rank behind"
    RUN_SILENT = "run_silent", "Run silent"
    RUN_FAILED = "run_failed", "Run failed"
    RUN_FINISHED = "run_finished", "Run finished"
    THRESHOLD = "threshold", "Own rule"


class Severity(models.TextChoices):
    WARNING = "warning"
    CRITICAL = "critical"


class RuleAction(models.TextChoices):
    NOTHING = "", "Notify only"
    FALLBACK = "fallback", "Fall back to BF16"
    CHECKPOINT = "checkpoint", "Write a checkpoint"
    PAUSE = "pause", "Pause the training"


class Condition(models.TextChoices):
    """The quantity that a rule of kind THRESHOLD compares. docs/alerts.md has the definitions."""

    ABOVE = "above", "is above"
    BELOW = "below", "is below"
    RISES_BY = "rises_by", "rises by"
    FALLS_BY = "falls_by", "falls by"
    CHANGES_BY_FACTOR = "changes_by_factor", "changes by a factor of"
    NOT_FINITE = "not_finite", "is not finite"


class Rule(models.Model):
    """A detector with its parameters. A new project has one rule of each built-in kind.

    Rules of kind THRESHOLD are those that people add. Built-in rules have no `name`, `statistic`, `tensors`
    or `condition`.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="rules")
    # A rule of one run. A built-in kind then replaces the project's rule of this kind in this run.
    run = models.ForeignKey(Run, null=True, blank=True, on_delete=models.CASCADE, related_name="rules")
    kind = models.CharField(max_length=32, choices=RuleKind.choices)
    name = models.CharField(max_length=128, blank=True, default="")
    statistic = models.CharField(max_length=64, blank=True, default="")
    tensors = models.CharField(
        max_length=512, blank=True, default="", help_text="A pattern such as blocks.*.input; empty: a scalar."
    )
    condition = models.CharField(max_length=32, choices=Condition, blank=True, default="")
    severity = models.CharField(max_length=16, choices=Severity.choices, default=Severity.CRITICAL)
    parameters = models.JSONField(default=dict, blank=True)
    enabled = models.BooleanField(default=True)
    # The command to give when the rule opens an alert. A fallback is for the layers that its evidence names.
    action = models.CharField(max_length=16, choices=RuleAction, default=RuleAction.NOTHING, blank=True)
    channels: "models.ManyToManyField[Channel, Any]" = models.ManyToManyField(
        "Channel", blank=True, related_name="+", help_text="None: all channels of the project."
    )
    quiet_from = models.TimeField(null=True, blank=True)
    quiet_to = models.TimeField(null=True, blank=True)
    quiet_zone = models.CharField(max_length=64, blank=True, default="")
    critical_breaks_quiet = models.BooleanField(default=True)
    escalate_minutes = models.PositiveIntegerField(null=True, blank=True)
    escalation_channels: "models.ManyToManyField[Channel, Any]" = models.ManyToManyField(
        "Channel", blank=True, related_name="+"
    )
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["project", "name"], condition=~models.Q(name=""), name="rule_name_once"
            ),
        ]

    @property
    def title(self) -> str:
        """The rule's name for people."""
        return self.name or str(self.get_kind_display())


class AlertState(models.TextChoices):
    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"
    MUTED = "muted"
    RESOLVED = "resolved"


class Alert(models.Model):
    """One alert with its evidence. lifecycle.py has its states, and the only functions that change them."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="alerts")
    rule = models.ForeignKey(Rule, null=True, on_delete=models.SET_NULL, related_name="alerts")
    kind = models.CharField(max_length=32, choices=RuleKind.choices)
    severity = models.CharField(max_length=16, choices=Severity.choices)
    state = models.CharField(max_length=16, choices=AlertState.choices, default=AlertState.OPEN)
    rule_name = models.CharField(max_length=128, blank=True, default="", help_text="Kept if the rule goes.")
    # The number under which a reopened alert is sent to the training process again; without it, the id.
    sent_again_as = models.BigIntegerField(null=True, blank=True)
    # The start of the training that it belongs to (see generations.py); empty if imported.
    generation = models.CharField(max_length=32, blank=True, default="")
    # The detectors that still see the condition: the stream (a writer, or 'run') and its onset step; with the
    # rule's id, if it is not the alert's own.
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
    resolved_step = models.BigIntegerField(null=True, blank=True, help_text="Where the condition ended.")
    acknowledged_by = models.ForeignKey(
        User, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    muted_until = models.DateTimeField(null=True, blank=True, help_text="Set while the state is muted.")
    reopened = models.PositiveIntegerField(default=0, help_text="How often it was reopened.")
    waiting_since = models.DateTimeField(
        default=timezone.now, help_text="When it last became open: escalation counts from here."
    )
    escalated_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        db_table = "alerts_event"
        ordering: ClassVar = ["-opened_at"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["run", "kind", "rule_name", "generation", "onset_step"], name="event_once"
            ),
        ]

    @property
    def title(self) -> str:
        """Return what happened, for people."""
        return self.rule_name or str(self.get_kind_display())

    @property
    def after_step(self) -> int | None:
        """The last step before the onset at which the condition was looked for; see `text.onsets`."""
        return beginnings.after_step(self.evidence, self.onset_step)

    @property
    def onset_in_words(self) -> str:
        """The step of the onset, or the steps between which it lies, as every place writes it."""
        return steps_in_words(self.onset_step, self.after_step)

    @property
    def further(self) -> list[dict[str, Any]]:
        """The findings of other rules about the same tensors, each with its onset in words, `since`."""
        entries = self.evidence.get("further", [])
        return [{**entry, "since": beginnings.further_in_words(entry)} for entry in entries]


class EntryKind(models.TextChoices):
    OPENED = "opened", "opened"
    UPDATED = "updated", "got worse"
    ACKNOWLEDGED = "acknowledged", "acknowledged"
    UNACKNOWLEDGED = "unacknowledged", "undid the acknowledgement"
    MUTED = "muted", "muted"
    UNMUTED = "unmuted", "unmuted"
    RESOLVED = "resolved", "resolved"
    REOPENED = "reopened", "reopened"
    ESCALATED = "escalated", "escalated"
    ORDERED = "ordered", "ordered"
    COMMENT = "comment", "commented"


class HistoryEntry(models.Model):
    """The audit trail of an alert: who did what, and when. Entries are never changed."""

    event = models.ForeignKey(Alert, on_delete=models.CASCADE, related_name="history")
    kind = models.CharField(max_length=16, choices=EntryKind.choices)
    at = models.DateTimeField(default=timezone.now)
    # None: the change was automatic, or the user was deleted; `user_name` tells which.
    user = models.ForeignKey(User, null=True, blank=True, on_delete=models.SET_NULL, related_name="+")
    user_name = models.CharField(max_length=150, blank=True, default="")
    text = models.CharField(max_length=2_000, blank=True, default="")

    class Meta:
        ordering: ClassVar = ["id"]


class TrialState(models.TextChoices):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class RuleTrial(models.Model):
    """A rule, saved or not, that is tried on past runs: what it would have reported."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="rule_trials")
    document = models.JSONField(help_text="The rule, in the form of rule_documents.py.")
    runs = models.JSONField(default=list, help_text="The ids of the runs.")
    state = models.CharField(max_length=16, choices=TrialState, default=TrialState.WAITING)
    share = models.FloatField(default=0.0, help_text="How much is done, from 0 to 1.")
    result = models.JSONField(default=list)
    problem = models.CharField(max_length=500, blank=True, default="")
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField(default=timezone.now)


# The writer id of the run-wide detector state.
RUN_WIDE = UUID(int=0)


class DetectorState(models.Model):
    """The position of the detectors in the messages of one writer, and their state.

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
    """A destination of a project's alerts, e.g. a webhook, with its limits and filters.

    `config` has the settings of the channel's kind. All of it is secret and encrypted in the database; show
    `address` instead.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="channels")
    kind = models.CharField(max_length=32, default="webhook")
    name = models.CharField(max_length=128)
    sealed = models.TextField(default="", help_text="The config, as `encrypt_json` returns it.")
    enabled = models.BooleanField(default=True)
    least_severity = models.CharField(
        max_length=16,
        choices=Severity.choices,
        default=Severity.WARNING,
        help_text="Alerts below this severity are not sent.",
    )
    send_resolved = models.BooleanField(default=False, help_text="Also send a notice when an alert ends.")
    per_minute = models.PositiveIntegerField(
        default=10,
        validators=[MinValueValidator(1), MaxValueValidator(600)],
        help_text="Further messages of the same minute are sent together as one digest.",
    )
    # The minute that is being counted, and the messages in it.
    minute_started_at = models.DateTimeField(null=True, blank=True)
    minute_messages = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now)

    @property
    def config(self) -> dict[str, Any]:
        """The decrypted settings.

        Raises:
            UnreadableSecretError: they were encrypted with a key that this installation does not have.
        """
        return decrypt_json(self.sealed) if self.sealed else {}

    @config.setter
    def config(self, config: Mapping[str, Any]) -> None:
        self.sealed = encrypt_json(config)

    @property
    def address(self) -> str:
        """The receiver's address without its secrets; empty if the config cannot be decrypted."""
        try:
            return CHANNELS[self.kind].masked(self.config)
        except UnreadableSecretError:
            return ""


class Reason(models.TextChoices):
    OPENED = "opened", "Opened"
    REOPENED = "reopened", "Reopened"
    WORSE = "worse", "Got worse"
    ESCALATED = "escalated", "Escalated"
    RESOLVED = "resolved", "Resolved"
    TEST = "test", "Test"


class Delivery(models.Model):
    """The outbox: one row per alert, channel and reason. A worker claims it by setting `claimed_at`.

    A test of a channel has no alert. Deliveries above the channel's limit are sent with another one, their
    `leader`, as one digest.
    """

    event = models.ForeignKey(Alert, null=True, on_delete=models.CASCADE, related_name="deliveries")
    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="deliveries")
    reason = models.CharField(max_length=16, choices=Reason.choices, default=Reason.OPENED)
    occurrence = models.PositiveIntegerField(
        default=0, help_text="Counts repetitions of a reason, e.g. of an alert that is reopened twice."
    )
    key = models.UUIDField(
        default=uuid4, unique=True, help_text="The same in every attempt, so that receivers drop duplicates."
    )
    # Without its leader, e.g. because that run was deleted, a delivery is sent by itself.
    leader = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="followers"
    )
    held = models.BooleanField(default=False, help_text="Above the channel's limit: waits for a digest.")
    attempts = models.IntegerField(default=0)
    due_at = models.DateTimeField(default=timezone.now)
    claimed_at = models.DateTimeField(null=True, blank=True)
    delivered_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True, help_text="Set when no attempt is left.")
    last_error = models.CharField(max_length=500, blank=True, default="")

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["event", "channel", "reason", "occurrence"], name="delivery_once"
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["delivered_at", "due_at"])]
