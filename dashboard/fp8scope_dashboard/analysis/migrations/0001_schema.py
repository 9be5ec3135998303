"""The tables of comparisons and of the progress of jobs."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    replaces = [
        ("analysis", "0001_initial"),
        ("analysis", "0002_evaluation_moves_to_evaluations"),
        ("analysis", "0003_plain_labels"),
        ("analysis", "0004_job_progress"),
        ("analysis", "0005_loss_result_help"),
        ("analysis", "0006_own_differences"),
    ]

    initial = True

    dependencies = [
        ("runs", "0001_schema"),
    ]

    operations = [
        migrations.CreateModel(
            name="Comparison",
            fields=[
                (
                    "run",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="comparison",
                        serialize=False,
                        to="runs.run",
                    ),
                ),
                ("baseline", models.CharField(max_length=128)),
                ("to_step", models.BigIntegerField()),
                ("verdict", models.CharField(max_length=32)),
                ("result", models.JSONField(help_text="analysis.losses.result.LossComparison as a dict")),
                (
                    "inputs",
                    models.CharField(
                        default="", help_text="Summary of the inputs; see comparison_runs.", max_length=128
                    ),
                ),
                (
                    "seconds",
                    models.FloatField(
                        default=0.0,
                        help_text="Duration of the computation. Slow comparisons are repeated less often.",
                    ),
                ),
                ("computed_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "own_difference",
                    models.FloatField(
                        blank=True,
                        help_text="This run's own difference, in the unit of the result; null if its loss is not finite.",
                        null=True,
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="EvaluationComparison",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=128)),
                ("metric", models.CharField(max_length=64)),
                ("step", models.BigIntegerField()),
                ("verdict", models.CharField(max_length=32)),
                ("result", models.JSONField(help_text="analysis.scores.ScoreComparison as a dict")),
                ("inputs", models.CharField(default="", help_text="Digest of the inputs.", max_length=64)),
                ("computed_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="evaluation_comparisons",
                        to="runs.run",
                    ),
                ),
                (
                    "own_difference",
                    models.FloatField(
                        blank=True,
                        help_text="This run's own difference, in the unit of the score.",
                        null=True,
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("run", "name", "metric", "step"), name="evaluation_comparison_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="JobProgress",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("kind", models.CharField(max_length=32)),
                ("job", models.UUIDField(help_text="The job that wrote the row last.")),
                ("stage", models.CharField(max_length=128)),
                ("share", models.FloatField(help_text="From 0 to 1.")),
                ("started_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="running_jobs",
                        to="runs.run",
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("run", "kind"), name="job_progress_once")],
            },
        ),
    ]
