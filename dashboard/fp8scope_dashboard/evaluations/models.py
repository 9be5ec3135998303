"""Evaluation scores as training processes send them."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class RunScores(models.Manager["Evaluation"]):
    """The scores of runs, which are compared with those of their baselines; without cells of matrices."""

    def get_queryset(self) -> models.QuerySet[Evaluation]:
        return super().get_queryset().filter(matrix__isnull=True)


class Evaluation(models.Model):
    """The scores of one evaluation at one step, item by item, as intervals and paired tests need them."""

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
    precision = models.CharField(
        max_length=16,
        null=True,
        blank=True,
        help_text="Of the forward pass, e.g. bf16; null if unknown.",
    )
    margin = models.FloatField(
        null=True, blank=True, help_text="Largest difference that counts as none; null for the default."
    )
    matrix = models.JSONField(
        null=True,
        blank=True,
        help_text="Bytes, seconds and layers of a cell of the evaluation matrix; null for a score.",
    )
    created_at = models.DateTimeField(default=timezone.now)

    objects = models.Manager()
    scores = RunScores()

    class Meta:
        # The table's name from before evaluations had an app of their own.
        db_table = "analysis_evaluation"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "writer", "seq"], name="evaluation_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["run", "name", "metric", "step"])]
