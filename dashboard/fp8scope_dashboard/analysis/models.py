"""What the jobs computed, and the evaluation scores they compute it from."""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Evaluation(models.Model):
    """The scores of one evaluation at one step, item by item: what intervals and paired tests need."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evaluations")
    writer = models.UUIDField()
    seq = models.BigIntegerField()
    step = models.BigIntegerField()
    name = models.CharField(max_length=128, help_text="The task, e.g. heldout_next_byte")
    metric = models.CharField(max_length=64, help_text="e.g. accuracy, nll")
    kind = models.CharField(max_length=16, choices=[("proportion", "proportion"), ("mean", "mean")])
    higher_is_better = models.BooleanField(default=True)
    items = ArrayField(models.FloatField())
    item_ids = ArrayField(models.CharField(max_length=128), null=True, blank=True)
    clusters = ArrayField(models.CharField(max_length=128), null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "writer", "seq"], name="evaluation_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["run", "name", "metric", "step"])]


class Comparison(models.Model):
    """The latest BF16-vs-FP8 delta of a run against its baseline group. One row a run, overwritten."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="comparison")
    baseline = models.CharField(max_length=128)
    to_step = models.BigIntegerField()
    verdict = models.CharField(max_length=32)
    result = models.JSONField(help_text="analysis.delta.LossComparison as a dict")
    inputs = models.CharField(max_length=128, default="", help_text="What it was computed from; see lineage.")
    seconds = models.FloatField(default=0.0, help_text="How long that took: dear ones are done less often.")
    computed_at = models.DateTimeField(default=timezone.now)


class EvaluationComparison(models.Model):
    """A run's score at one step against its baseline group's. Overwritten when either side gains a score."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="evaluation_comparisons")
    name = models.CharField(max_length=128)
    metric = models.CharField(max_length=64)
    step = models.BigIntegerField()
    verdict = models.CharField(max_length=32)
    result = models.JSONField(help_text="analysis.scores.ScoreComparison as a dict")
    inputs = models.CharField(max_length=64, default="", help_text="Digest of what it was computed from.")
    computed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["run", "name", "metric", "step"], name="evaluation_comparison_once"
            ),
        ]
