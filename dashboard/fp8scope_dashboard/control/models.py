"""What goes back to a training process (commands), and what it tells about itself (reports)."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.runs.models import Run


class CommandKind(models.TextChoices):
    FALLBACK = "fallback", "Change precision"
    CHECKPOINT = "checkpoint", "Write a checkpoint"
    PAUSE = "pause", "Pause"
    RESUME = "resume", "Resume"


class ResultState(models.TextChoices):
    # Begun: a pause that lasts.
    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class Command(models.Model):
    """Something that a training process is asked to do, by a person or by a rule.

    It travels in the answers to what the process sends, until that process has answered it or it expires.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="commands")
    kind = models.CharField(max_length=16, choices=CommandKind.choices)
    arguments = models.JSONField(default=dict, blank=True)
    reason = models.CharField(max_length=500, blank=True, default="")
    given_by = models.ForeignKey(User, null=True, blank=True, on_delete=models.SET_NULL, related_name="+")
    # Where a rule gave it.
    event = models.ForeignKey(
        "alerts.Event", null=True, blank=True, on_delete=models.SET_NULL, related_name="commands"
    )
    given_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()
    delivered_at = models.DateTimeField(null=True, blank=True, help_text="First put into an answer.")

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [models.Index(fields=["run", "expires_at"])]


class CommandResult(models.Model):
    """What one writer made of a command. A later word takes the place of an earlier one."""

    command = models.ForeignKey(Command, on_delete=models.CASCADE, related_name="results")
    writer = models.UUIDField()
    state = models.CharField(max_length=16, choices=ResultState.choices)
    message = models.CharField(max_length=500, blank=True, default="")
    step = models.BigIntegerField(null=True, blank=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["id"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["command", "writer"], name="command_result_once"),
        ]


class Listener(models.Model):
    """Which commands one writer takes, as it said last."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="listeners")
    writer = models.UUIDField()
    accepts = ArrayField(models.CharField(max_length=64), default=list, blank=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "writer"], name="listener_once"),
        ]


class ReportKind(models.TextChoices):
    BISECT = "bisect"
    REFERENCE = "reference"
    ANNOTATION = "annotation"


class Report(models.Model):
    """What a run found out about itself: see docs/wire.md for the documents. Stored once by (writer, seq)."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="reports")
    writer = models.UUIDField()
    seq = models.BigIntegerField()
    kind = models.CharField(max_length=16, choices=ReportKind.choices)
    step = models.BigIntegerField()
    document = models.JSONField(default=dict)
    stored_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["-step", "-id"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "writer", "seq"], name="report_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["run", "kind", "-step"])]
