"""Stored results of comparing runs with their baselines."""

from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Comparison(models.Model):
    """The latest BF16-vs-FP8 delta of a run against its baseline group. One row a run, overwritten.

    Verdict and delta are those of the run's seed group.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="comparison")
    baseline = models.CharField(max_length=128)
    to_step = models.BigIntegerField()
    verdict = models.CharField(max_length=32)
    result = models.JSONField(help_text="analysis.losses.result.LossComparison as a dict")
    own_difference = models.FloatField(
        null=True,
        blank=True,
        help_text="This run's own difference, in the unit of the result; null if its loss is not finite.",
    )
    inputs = models.CharField(
        max_length=128, default="", help_text="Summary of the inputs; see comparison_runs."
    )
    seconds = models.FloatField(
        default=0.0, help_text="Duration of the computation. Slow comparisons are repeated less often."
    )
    computed_at = models.DateTimeField(default=timezone.now)


class EvaluationComparison(models.Model):
    """A run's score at one step against its baseline group's. Overwritten when either side gains a score."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evaluation_comparisons")
    name = models.CharField(max_length=128)
    metric = models.CharField(max_length=64)
    step = models.BigIntegerField()
    verdict = models.CharField(max_length=32)
    result = models.JSONField(help_text="analysis.scores.ScoreComparison as a dict")
    own_difference = models.FloatField(
        null=True, blank=True, help_text="This run's own difference, in the unit of the score."
    )
    inputs = models.CharField(max_length=64, default="", help_text="Digest of the inputs.")
    computed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["run", "name", "metric", "step"], name="evaluation_comparison_once"
            ),
        ]


class JobProgress(models.Model):
    """The progress of a long job of a run. The row exists only while the job runs; see analysis.progress."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="running_jobs")
    kind = models.CharField(max_length=32)
    job = models.UUIDField(help_text="The job that wrote the row last.")
    stage = models.CharField(max_length=128)
    share = models.FloatField(help_text="From 0 to 1.")
    started_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [models.UniqueConstraint(fields=["run", "kind"], name="job_progress_once")]

    @property
    def percent(self) -> int:
        """The share that is done, in whole per cent."""
        return int(100.0 * self.share)
