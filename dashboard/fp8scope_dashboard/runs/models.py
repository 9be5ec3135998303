"""Runs, the tensors they observe, and the processes that write to them."""

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project


class RunState(models.TextChoices):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    # No word from any writer for longer than runs.services.SILENT_AFTER: perhaps killed, perhaps cut off.
    SILENT = "silent"


class KeptRuns(models.Manager["Run"]):
    """All runs but those that are being deleted: nobody sees these any more."""

    def get_queryset(self) -> models.QuerySet["Run"]:
        return super().get_queryset().filter(deleted_at=None)


class Run(models.Model):
    """One training run. Its id is chosen by the agent, so that registering twice is registering once.

    `group` names the runs that differ only in their seed. `baseline` names the group (same project) that this
    run is compared with; empty for a baseline itself.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="runs")
    name = models.CharField(max_length=200)
    state = models.CharField(max_length=16, choices=RunState.choices, default=RunState.RUNNING)
    precision = models.CharField(max_length=32, default="unknown", help_text="bf16, fp8, fp16, fp32, unknown")
    recipe = models.JSONField(default=dict, blank=True)
    config = models.JSONField(default=dict, blank=True)
    environment = models.JSONField(default=dict, blank=True)
    summary = models.JSONField(
        default=dict, blank=True, help_text="What the script says of the run as a whole."
    )
    tags = ArrayField(models.CharField(max_length=64), default=list, blank=True)
    group = models.CharField(max_length=128, blank=True, default="")
    baseline = models.CharField(max_length=128, blank=True, default="")
    seed = models.BigIntegerField(null=True, blank=True)
    total_steps = models.BigIntegerField(null=True, blank=True)

    created_at = models.DateTimeField(default=timezone.now)
    heartbeat_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    error = models.TextField(blank=True, default="", help_text="Traceback of a failed run, from the agent.")

    # What the run page's header shows, kept up to date by ingest in the same transaction as the data.
    last_step = models.BigIntegerField(null=True, blank=True)
    rows_stored = models.BigIntegerField(default=0)
    points_stored = models.BigIntegerField(default=0)
    # Every scalar's latest value; NaN and infinities as the strings of docs/wire.md.
    last_scalars = models.JSONField(default=dict, blank=True)
    statistics = ArrayField(models.CharField(max_length=32), default=list, blank=True)
    # What the agent counted: rows it had to drop, exceptions of its own that it kept from the training code.
    rows_dropped = models.BigIntegerField(default=0)
    agent_errors = models.BigIntegerField(default=0)
    # What the writer said it had sent when it finished; equal to *_stored unless something was lost.
    rows_sent = models.BigIntegerField(null=True, blank=True)
    points_sent = models.BigIntegerField(null=True, blank=True)

    # Set at once when somebody deletes it; its data goes bit by bit (telemetry.deletion).
    deleted_at = models.DateTimeField(null=True, blank=True, editable=False)
    deleted_bytes = models.BigIntegerField(default=0, help_text="What it held when its deletion began.")

    objects: ClassVar[models.Manager["Run"]] = KeptRuns()
    with_deleted: ClassVar[models.Manager["Run"]] = models.Manager()

    class Meta:
        ordering: ClassVar = ["-created_at"]
        base_manager_name = "with_deleted"
        indexes: ClassVar = [
            models.Index(fields=["project", "-created_at"]),
            models.Index(fields=["project", "group"]),
        ]

    def __str__(self) -> str:
        return self.name


class DeletedRun(models.Model):
    """What is left of a deleted run: its id, so that an agent which goes on sending does not make it anew."""

    run_id = models.UUIDField(primary_key=True)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="deleted_runs")
    deleted_at = models.DateTimeField(default=timezone.now)


class Tensor(models.Model):
    """One observed tensor of a run. `index` is its row in the run's heat maps, in order of registration."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tensors")
    index = models.IntegerField()
    name = models.CharField(max_length=512, help_text="<module path>.<role>")
    module = models.CharField(max_length=512)
    role = models.CharField(max_length=32, help_text="input, weight, grad_output, ...")
    format = models.CharField(max_length=16, help_text="e4m3, e5m2, ...")
    shape = models.JSONField(default=list)
    numel = models.BigIntegerField(default=0)

    class Meta:
        ordering: ClassVar = ["index"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "index"], name="tensor_index_once"),
            models.UniqueConstraint(fields=["run", "name"], name="tensor_name_once"),
        ]


class Writer(models.Model):
    """One process (rank) writing to a run.

    `attempt` counts the times that the run was begun: a run that is resumed, or goes back to an earlier step,
    has new writers with the next number. All ranks of one attempt share it. `first_step` and `last_step` are
    those stored; `failed` and `error` say how the process ended.

    `catalogue[j]` is the Tensor.index of column j of the writer's tensor lists: each writer numbers the
    tensors it sees in its own order, because it must be able to write before it can ask.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="writers")
    uuid = models.UUIDField()
    rank = models.IntegerField(default=0)
    hostname = models.CharField(max_length=255, blank=True, default="")
    attempt = models.IntegerField(default=0)
    # `fp8scope import` brings it: alert rules have judged it where it was recorded.
    imported = models.BooleanField(default=False)
    first_step = models.BigIntegerField(null=True, blank=True)
    last_step = models.BigIntegerField(null=True, blank=True)
    catalogue = ArrayField(models.IntegerField(), default=list, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    failed = models.BooleanField(default=False)
    error = models.TextField(blank=True, default="")
    # Latest counts of the agent in that process; the run's are their sums.
    rows_dropped = models.BigIntegerField(default=0)
    errors = models.BigIntegerField(default=0)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "uuid"], name="writer_once"),
        ]
