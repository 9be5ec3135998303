"""The table of evaluations."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    # Version 0.1 had created the table in the app `analysis`. Its first migrations are listed here too, so that Django
    # applies this migration only where they have not created the table.
    replaces = [
        ("analysis", "0001_initial"),
        ("analysis", "0002_evaluation_moves_to_evaluations"),
        ("evaluations", "0001_evaluation"),
        ("evaluations", "0002_precision_and_margin"),
        ("evaluations", "0003_matrix"),
    ]

    initial = True

    dependencies = [
        ("runs", "0001_schema"),
    ]

    operations = [
        migrations.CreateModel(
            name="Evaluation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("writer", models.UUIDField()),
                ("seq", models.BigIntegerField()),
                ("step", models.BigIntegerField()),
                ("name", models.CharField(help_text="The task, e.g. heldout_next_byte", max_length=128)),
                ("metric", models.CharField(help_text="e.g. accuracy, nll", max_length=64)),
                (
                    "kind",
                    models.CharField(choices=[("proportion", "proportion"), ("mean", "mean")], max_length=16),
                ),
                ("higher_is_better", models.BooleanField(default=True)),
                (
                    "items",
                    django.contrib.postgres.fields.ArrayField(base_field=models.FloatField(), size=None),
                ),
                (
                    "item_ids",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=128), blank=True, null=True, size=None
                    ),
                ),
                (
                    "clusters",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=128), blank=True, null=True, size=None
                    ),
                ),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="evaluations", to="runs.run"
                    ),
                ),
                (
                    "margin",
                    models.FloatField(
                        blank=True,
                        help_text="Largest difference that counts as none; null for the default.",
                        null=True,
                    ),
                ),
                (
                    "precision",
                    models.CharField(
                        blank=True,
                        help_text="Of the forward pass, e.g. bf16; null if unknown.",
                        max_length=16,
                        null=True,
                    ),
                ),
                (
                    "matrix",
                    models.JSONField(
                        blank=True,
                        help_text="Bytes, seconds and layers of a cell of the evaluation matrix; null for a score.",
                        null=True,
                    ),
                ),
            ],
            options={
                "db_table": "analysis_evaluation",
                "indexes": [
                    models.Index(
                        fields=["run", "name", "metric", "step"], name="analysis_ev_run_id_536813_idx"
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("run", "writer", "seq"), name="evaluation_once")
                ],
            },
        ),
    ]
