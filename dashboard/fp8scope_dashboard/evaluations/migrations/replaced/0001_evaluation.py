"""Take over the model Evaluation from the app `analysis`. The table analysis_evaluation stays as it is."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


def labels() -> django.contrib.postgres.fields.ArrayField:
    return django.contrib.postgres.fields.ArrayField(
        base_field=models.CharField(max_length=128), blank=True, null=True, size=None
    )


class Migration(migrations.Migration):
    initial = True

    dependencies = [("analysis", "0002_evaluation_moves_to_evaluations")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
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
                        (
                            "name",
                            models.CharField(help_text="The task, e.g. heldout_next_byte", max_length=128),
                        ),
                        ("metric", models.CharField(help_text="e.g. accuracy, nll", max_length=64)),
                        (
                            "kind",
                            models.CharField(
                                choices=[("proportion", "proportion"), ("mean", "mean")], max_length=16
                            ),
                        ),
                        ("higher_is_better", models.BooleanField(default=True)),
                        (
                            "items",
                            django.contrib.postgres.fields.ArrayField(
                                base_field=models.FloatField(), size=None
                            ),
                        ),
                        ("item_ids", labels()),
                        ("clusters", labels()),
                        ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                        (
                            "run",
                            models.ForeignKey(
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="evaluations",
                                to="runs.run",
                            ),
                        ),
                    ],
                    options={
                        "db_table": "analysis_evaluation",
                        "indexes": [
                            models.Index(
                                fields=["run", "name", "metric", "step"],
                                name="analysis_ev_run_id_536813_idx",
                            )
                        ],
                        "constraints": [
                            models.UniqueConstraint(fields=("run", "writer", "seq"), name="evaluation_once")
                        ],
                    },
                )
            ]
        )
    ]
