import uuid

import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

from fp8scope_dashboard.runs.configuration import config_digest, recipe_name


def derive(apps, schema_editor):
    runs = apps.get_model("runs", "Run").with_deleted
    for run in runs.only("id", "recipe", "config", "baseline", "created_at").iterator(chunk_size=100):
        runs.filter(pk=run.pk).update(
            agent_baseline=run.baseline,
            agent_baseline_at=run.created_at if run.baseline else None,
            recipe_name=recipe_name(run.recipe),
            config_digest=config_digest(run.config),
        )


def text(length, **more):
    # `db_default`: a server of the previous version may still register runs.
    return models.CharField(blank=True, db_default="", default="", max_length=length, **more)


RELATIONS = [("resumed", "Resumed"), ("reference", "Reference")]


class Migration(migrations.Migration):
    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("runs", "0006_plain_labels"),
    ]

    operations = [
        migrations.AddField("run", "agent_baseline", text(128)),
        migrations.AddField("run", "agent_baseline_at", models.DateTimeField(blank=True, null=True)),
        migrations.AddField("run", "parent", text(128)),
        migrations.AddField("run", "relation", text(16, choices=RELATIONS)),
        migrations.AddField("run", "recipe_name", text(64)),
        migrations.AddField("run", "config_digest", text(64)),
        migrations.CreateModel(
            name="Choice",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("act", models.UUIDField(db_index=True, default=uuid.uuid4)),
                (
                    "field",
                    models.CharField(choices=[("baseline", "Baseline"), ("group", "Group")], max_length=16),
                ),
                ("value", models.CharField(blank=True, default="", max_length=128)),
                ("suggested", models.BooleanField(default=False, help_text="The page had suggested it.")),
                ("chosen_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("undone_at", models.DateTimeField(blank=True, null=True)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="choices", to="runs.run"
                    ),
                ),
                (
                    "chosen_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "undone_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={"ordering": ["-id"]},
        ),
        migrations.AddIndex(
            "choice", models.Index(fields=["run", "field", "-id"], name="runs_choice_run_id_939e01_idx")
        ),
        migrations.RunPython(derive, migrations.RunPython.noop),
    ]

