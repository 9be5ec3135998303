"""The tables of commands and of what training processes report."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    replaces = [("loop", "0001_commands_and_reports"), ("loop", "0002_plain_labels")]

    initial = True

    dependencies = [
        ("alerts", "0001_schema"),
        ("runs", "0001_schema"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Command",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("fallback", "Change precision"),
                            ("checkpoint", "Write a checkpoint"),
                            ("pause", "Pause"),
                            ("resume", "Resume"),
                        ],
                        max_length=16,
                    ),
                ),
                ("arguments", models.JSONField(blank=True, default=dict)),
                ("reason", models.CharField(blank=True, default="", max_length=500)),
                ("given_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("expires_at", models.DateTimeField()),
                (
                    "delivered_at",
                    models.DateTimeField(
                        blank=True, help_text="When a response first contained the command.", null=True
                    ),
                ),
                (
                    "event",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="commands",
                        to="alerts.alert",
                    ),
                ),
                (
                    "given_by",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="commands", to="runs.run"
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [models.Index(fields=["run", "expires_at"], name="loop_comman_run_id_955576_idx")],
            },
        ),
        migrations.CreateModel(
            name="CommandResult",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("writer", models.UUIDField()),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("accepted", "Accepted"),
                            ("done", "Done"),
                            ("refused", "Refused"),
                            ("failed", "Failed"),
                        ],
                        max_length=16,
                    ),
                ),
                ("message", models.CharField(blank=True, default="", max_length=500)),
                ("step", models.BigIntegerField(blank=True, null=True)),
                ("at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "command",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="results", to="loop.command"
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
                "constraints": [
                    models.UniqueConstraint(fields=("command", "writer"), name="command_result_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="Listener",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("writer", models.UUIDField()),
                (
                    "accepts",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=64), blank=True, default=list, size=None
                    ),
                ),
                ("at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="listeners", to="runs.run"
                    ),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("run", "writer"), name="listener_once")],
            },
        ),
        migrations.CreateModel(
            name="Report",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("writer", models.UUIDField()),
                ("seq", models.BigIntegerField()),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("bisect", "Bisect"),
                            ("reference", "Reference"),
                            ("annotation", "Annotation"),
                        ],
                        max_length=16,
                    ),
                ),
                ("step", models.BigIntegerField()),
                ("document", models.JSONField(default=dict)),
                ("stored_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="reports", to="runs.run"
                    ),
                ),
            ],
            options={
                "ordering": ["-step", "-id"],
                "indexes": [
                    models.Index(fields=["run", "kind", "-step"], name="loop_report_run_id_d8158e_idx")
                ],
                "constraints": [models.UniqueConstraint(fields=("run", "writer", "seq"), name="report_once")],
            },
        ),
    ]
