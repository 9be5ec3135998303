"""Uploaded files that wait for their import, and what became of each import."""

from typing import ClassVar
from uuid import uuid4

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project, User


class ImportState(models.TextChoices):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class ImportJob(models.Model):
    """An import of one upload. `claim` is the worker that runs it now; only that one may change the row."""

    id = models.UUIDField(primary_key=True, default=uuid4, editable=False)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    title = models.CharField(max_length=200, help_text="The names of the files.")
    bytes = models.BigIntegerField(help_text="Of the files as they were uploaded.")
    options = models.JSONField(default=dict, help_text="Of the importer: group, baseline, precision, format.")
    state = models.CharField(max_length=16, choices=ImportState, default=ImportState.WAITING)
    attempts = models.PositiveIntegerField(default=0)
    claim = models.UUIDField(null=True, blank=True)
    stage = models.CharField(max_length=200, blank=True, default="")
    share = models.FloatField(default=0.0, help_text="How much of the present file is done, from 0 to 1.")
    results = models.JSONField(default=list, help_text="[id of the run, what was stored of it].")
    notes = models.JSONField(default=list, help_text="What the importer has said beside its errors.")
    problems = models.JSONField(default=list, help_text="Sentences of the importer, or of the job.")
    created_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now, help_text="Last sign of life of the worker.")
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["-created_at"]
        indexes: ClassVar = [models.Index(fields=["project", "-created_at"], name="import_by_time")]

    @property
    def is_over(self) -> bool:
        """Return whether nothing more happens to it."""
        return self.state in (ImportState.DONE, ImportState.FAILED)

    @property
    def percent(self) -> int:
        """The share that is done, in whole per cent."""
        return int(100.0 * self.share)


class ImportAccess(models.Model):
    """The token of a project's imports. It gets another secret for each, and works only while that runs.

    It is one token, because a token that may only write reads the runs that it has registered: so an import
    of a file that has grown learns what is stored, and the importer reads no other runs.
    """

    project = models.OneToOneField(Project, on_delete=models.CASCADE, primary_key=True, related_name="+")
    token = models.OneToOneField(ApiToken, on_delete=models.CASCADE, related_name="+")


class ImportChunk(models.Model):
    """A part of an uploaded file, until its import is over. Workers may run on other machines."""

    job = models.ForeignKey(ImportJob, on_delete=models.CASCADE, related_name="chunks")
    name = models.CharField(max_length=255)
    number = models.PositiveIntegerField(help_text="In the order of the job's chunks.")
    body = models.BinaryField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["job", "number"], name="import_chunk_once"),
        ]
