"""The logins that read the views, and the history of scalars in a form that SQL reads."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run


class SqlReader(models.Model):
    """A login of PostgreSQL that reads the views: of one project, or of all."""

    role = models.CharField(max_length=63, primary_key=True, help_text="The name of the login.")
    project = models.ForeignKey(
        Project, null=True, blank=True, on_delete=models.CASCADE, related_name="+", help_text="None: all."
    )
    seconds = models.PositiveIntegerField(default=30, help_text="The longest statement.")
    created_at = models.DateTimeField(default=timezone.now)


class HistoryState(models.Model):
    """The state of the copied history of a run."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="+")
    rows_stored = models.BigIntegerField(help_text="Of the run when it was copied.")
    copied_at = models.DateTimeField(default=timezone.now)
    seconds = models.FloatField(default=0.0, help_text="The duration of the copy.")


class ScalarHistory(models.Model):
    """The history of a scalar of a run: the points of its chart, and means over buckets of steps.

    The store keeps compressed blocks, which SQL cannot read. Values are NaN or infinite where the run's are.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="+", db_index=False)
    name = models.TextField()
    thinned = models.BooleanField(help_text="Whether steps are missing among the points.")
    steps = ArrayField(models.BigIntegerField())
    times = ArrayField(models.DateTimeField(null=True))
    values = ArrayField(models.FloatField())
    stride = models.BigIntegerField(help_text="Steps of a bucket.")
    ends = ArrayField(models.BigIntegerField(), help_text="The last step of each bucket.")
    means = ArrayField(models.FloatField())
    lasts = ArrayField(models.FloatField())
    counts = ArrayField(models.BigIntegerField())

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "name"], name="scalar_history_once"),
        ]
