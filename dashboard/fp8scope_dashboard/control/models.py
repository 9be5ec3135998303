"""Commands to training processes, their results, and the reports of training processes."""

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
    # Started but not done, such as a pause that still lasts.
    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class Command(models.Model):
    """A request to the training processes of a run, from a person or an alert rule.

    It is part of the responses to a process's messages until that process has answered it or it expires.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="commands")
    kind = models.CharField(max_length=16, choices=CommandKind.choices)
    arguments = models.JSONField(default=dict, blank=True)
    reason = models.CharField(max_length=500, blank=True, default="")
    given_by = models.ForeignKey(User, null=True, blank=True, on_delete=models.SET_NULL, related_name="+")
    # The alert whose rule gave the command, if any.
    event = models.ForeignKey(
        "alerts.Alert", null=True, blank=True, on_delete=models.SET_NULL, related_name="commands"
    )
    given_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()
    delivered_at = models.DateTimeField(
        null=True, blank=True, help_text="When a response first contained the command."
    )

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [models.Index(fields=["run", "expires_at"])]


class CommandResult(models.Model):
    """One writer's result of a command. A later result replaces an earlier one."""

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
    """The commands that one writer accepts, as last reported."""

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
    """A bisection, reference window or annotation that a run reported. Stored once per (writer, seq).

    docs/wire.md describes the documents.
    """

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
