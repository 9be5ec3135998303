"""The tables of runs, their writers and tensors, and what people add to them."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.manager
import django.utils.timezone
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    replaces = [
        ("runs", "0001_initial"),
        ("runs", "0002_writer_attempt"),
        ("runs", "0003_run_deletion"),
        ("runs", "0004_writer_imported"),
        ("runs", "0005_run_summary"),
        ("runs", "0006_plain_labels"),
        ("runs", "0007_kin"),
        ("runs", "0008_kin_indexes"),
        ("runs", "0009_browsing"),
        ("runs", "0010_notes"),
        ("runs", "0011_console_log"),
        ("runs", "0012_run_registered_with"),
        ("runs", "0013_colour_and_counts"),
        ("runs", "0014_chart_views"),
        ("runs", "0015_step_notes"),
        ("runs", "0016_run_order"),
    ]

    initial = True

    dependencies = [
        ("accounts", "0001_schema"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Run",
            fields=[
                (
                    "id",
                    models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                ),
                ("name", models.CharField(max_length=200)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "Running"),
                            ("finished", "Finished"),
                            ("failed", "Failed"),
                            ("silent", "Silent"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                (
                    "precision",
                    models.CharField(
                        default="unknown", help_text="bf16, fp8, fp16, fp32, unknown", max_length=32
                    ),
                ),
                ("recipe", models.JSONField(blank=True, default=dict)),
                ("config", models.JSONField(blank=True, default=dict)),
                ("environment", models.JSONField(blank=True, default=dict)),
                (
                    "tags",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=64), blank=True, default=list, size=None
                    ),
                ),
                ("group", models.CharField(blank=True, default="", max_length=128)),
                ("baseline", models.CharField(blank=True, default="", max_length=128)),
                ("seed", models.BigIntegerField(blank=True, null=True)),
                ("total_steps", models.BigIntegerField(blank=True, null=True)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("heartbeat_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
                (
                    "error",
                    models.TextField(
                        blank=True, default="", help_text="Traceback of a failed run, from the agent."
                    ),
                ),
                ("last_step", models.BigIntegerField(blank=True, null=True)),
                ("rows_stored", models.BigIntegerField(default=0)),
                ("points_stored", models.BigIntegerField(default=0)),
                ("last_scalars", models.JSONField(blank=True, default=dict)),
                (
                    "statistics",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.CharField(max_length=32), blank=True, default=list, size=None
                    ),
                ),
                ("rows_dropped", models.BigIntegerField(default=0)),
                ("agent_errors", models.BigIntegerField(default=0)),
                ("rows_sent", models.BigIntegerField(blank=True, null=True)),
                ("points_sent", models.BigIntegerField(blank=True, null=True)),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="runs",
                        to="accounts.project",
                    ),
                ),
                ("deleted_at", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "deleted_bytes",
                    models.BigIntegerField(default=0, help_text="Size of the run when its deletion began."),
                ),
                (
                    "summary",
                    models.JSONField(
                        blank=True,
                        default=dict,
                        help_text="Results of the whole run, set by the training script.",
                    ),
                ),
                ("agent_baseline", models.CharField(blank=True, db_default="", default="", max_length=128)),
                ("agent_baseline_at", models.DateTimeField(blank=True, null=True)),
                ("parent", models.CharField(blank=True, db_default="", default="", max_length=128)),
                (
                    "relation",
                    models.CharField(
                        blank=True,
                        choices=[("resumed", "Resumed"), ("reference", "Reference")],
                        db_default="",
                        default="",
                        max_length=16,
                    ),
                ),
                ("recipe_name", models.CharField(blank=True, db_default="", default="", max_length=64)),
                ("config_digest", models.CharField(blank=True, db_default="", default="", max_length=64)),
                ("erase_at", models.DateTimeField(blank=True, editable=False, null=True)),
                ("archived_at", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "registered_with",
                    models.ForeignKey(
                        blank=True,
                        editable=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accounts.apitoken",
                    ),
                ),
                ("colour", models.PositiveSmallIntegerField(blank=True, null=True)),
                ("margin", models.FloatField(blank=True, null=True)),
            ],
            options={
                "ordering": ["-created_at"],
                "indexes": [
                    models.Index(
                        fields=["project", "-created_at", "id"],
                        include=["group", "archived_at"],
                        condition=models.Q(("deleted_at", None)),
                        name="run_order",
                    ),
                    models.Index(fields=["project", "group"], name="runs_run_project_30d157_idx"),
                    models.Index(fields=["project", "baseline"], name="runs_run_project_ca9365_idx"),
                    models.Index(
                        fields=["project", "precision", "-created_at"], name="runs_run_project_0ea4e3_idx"
                    ),
                    models.Index(
                        fields=["project", "recipe_name", "-created_at"], name="runs_run_project_94e592_idx"
                    ),
                    models.Index(fields=["project", "config_digest"], name="runs_run_project_f98257_idx"),
                    models.Index(fields=["project", "parent"], name="runs_run_project_813db0_idx"),
                    models.Index(
                        models.F("project"),
                        models.F("precision"),
                        models.F("state"),
                        models.F("recipe_name"),
                        models.F("archived_at"),
                        condition=models.Q(("deleted_at", None)),
                        name="run_counts",
                    ),
                ],
                "base_manager_name": "with_deleted",
            },
            managers=[
                ("objects", django.db.models.manager.Manager()),
                ("with_deleted", django.db.models.manager.Manager()),
            ],
        ),
        migrations.CreateModel(
            name="Tensor",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("index", models.IntegerField()),
                ("name", models.CharField(help_text="<module path>.<role>", max_length=512)),
                ("module", models.CharField(max_length=512)),
                ("role", models.CharField(help_text="input, weight, grad_output, ...", max_length=32)),
                ("format", models.CharField(help_text="e4m3, e5m2, ...", max_length=16)),
                ("shape", models.JSONField(default=list)),
                ("numel", models.BigIntegerField(default=0)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="tensors", to="runs.run"
                    ),
                ),
            ],
            options={
                "ordering": ["index"],
                "constraints": [
                    models.UniqueConstraint(fields=("run", "index"), name="tensor_index_once"),
                    models.UniqueConstraint(fields=("run", "name"), name="tensor_name_once"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Writer",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("uuid", models.UUIDField()),
                ("rank", models.IntegerField(default=0)),
                ("hostname", models.CharField(blank=True, default="", max_length=255)),
                (
                    "catalogue",
                    django.contrib.postgres.fields.ArrayField(
                        base_field=models.IntegerField(), blank=True, default=list, size=None
                    ),
                ),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("seen_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("finished_at", models.DateTimeField(blank=True, null=True)),
                ("rows_dropped", models.BigIntegerField(default=0)),
                ("errors", models.BigIntegerField(default=0)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="writers", to="runs.run"
                    ),
                ),
                ("attempt", models.IntegerField(default=0)),
                ("error", models.TextField(blank=True, default="")),
                ("failed", models.BooleanField(default=False)),
                ("first_step", models.BigIntegerField(blank=True, null=True)),
                ("last_step", models.BigIntegerField(blank=True, null=True)),
                ("imported", models.BooleanField(default=False)),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("run", "uuid"), name="writer_once")],
            },
        ),
        migrations.CreateModel(
            name="DeletedRun",
            fields=[
                ("run_id", models.UUIDField(primary_key=True, serialize=False)),
                ("deleted_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deleted_runs",
                        to="accounts.project",
                    ),
                ),
            ],
        ),
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
            options={
                "ordering": ["-id"],
                "indexes": [
                    models.Index(fields=["run", "field", "-id"], name="runs_choice_run_id_939e01_idx")
                ],
            },
        ),
        migrations.CreateModel(
            name="BulkAction",
            fields=[
                (
                    "id",
                    models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("tag", "Tag"),
                            ("untag", "Untag"),
                            ("archive", "Archive"),
                            ("unarchive", "Unarchive"),
                            ("delete", "Delete"),
                        ],
                        max_length=16,
                    ),
                ),
                ("tag", models.CharField(blank=True, default="", max_length=64)),
                ("runs", django.contrib.postgres.fields.ArrayField(base_field=models.UUIDField(), size=None)),
                ("done_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("undone_at", models.DateTimeField(blank=True, null=True)),
                (
                    "done_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="bulk_actions",
                        to="accounts.project",
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
            options={
                "ordering": ["-done_at"],
                "indexes": [
                    models.Index(fields=["project", "-done_at"], name="runs_bulkac_project_ef4b26_idx")
                ],
            },
        ),
        migrations.CreateModel(
            name="SavedView",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=80)),
                ("query", models.CharField(blank=True, default="", max_length=2000)),
                ("shared", models.BooleanField(default=False)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "owner",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="saved_views",
                        to="accounts.project",
                    ),
                ),
                (
                    "changed_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        default=django.utils.timezone.now,
                    ),
                ),
                ("is_default", models.BooleanField(db_default=False, default=False)),
                (
                    "page",
                    models.CharField(
                        choices=[("runs", "Runs"), ("charts", "Charts")],
                        db_default="runs",
                        default="runs",
                        max_length=16,
                    ),
                ),
                (
                    "panels",
                    models.JSONField(
                        blank=True, db_default=models.Value([], models.JSONField()), default=list
                    ),
                ),
            ],
            options={
                "ordering": ["name", "id"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("project", "owner", "page", "name"), name="saved_view_once"
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("is_default", True)),
                        fields=("project", "page"),
                        name="saved_view_default_once",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Note",
            fields=[
                (
                    "run",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="note",
                        serialize=False,
                        to="runs.run",
                    ),
                ),
                ("text", models.TextField(blank=True, default="")),
                ("version", models.PositiveIntegerField(default=0)),
                ("edited_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "edited_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Artefact",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=128)),
                ("address", models.CharField(help_text="http, https, s3, gs or file.", max_length=1000)),
                ("added_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "added_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="artefacts", to="runs.run"
                    ),
                ),
                ("step", models.BigIntegerField(blank=True, null=True)),
                ("writer", models.UUIDField(blank=True, null=True)),
            ],
            options={
                "ordering": ["id"],
                "constraints": [models.UniqueConstraint(fields=("run", "address"), name="artefact_once")],
            },
        ),
        migrations.CreateModel(
            name="ConsoleLine",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("number", models.BigIntegerField()),
                ("time", models.DateTimeField()),
                ("step", models.BigIntegerField(default=0)),
                (
                    "stream",
                    models.CharField(
                        choices=[("stdout", "Stdout"), ("stderr", "Stderr"), ("agent", "Agent")],
                        default="stdout",
                        max_length=8,
                    ),
                ),
                ("text", models.TextField(blank=True, default="")),
                ("received_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="console_lines",
                        to="runs.run",
                    ),
                ),
                (
                    "writer",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="console_lines",
                        to="runs.writer",
                    ),
                ),
            ],
            options={
                "ordering": ["writer", "number"],
                "constraints": [
                    models.UniqueConstraint(fields=("writer", "number"), name="console_line_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="StepNote",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("step", models.BigIntegerField()),
                ("text", models.CharField(max_length=1000)),
                ("written_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="step_notes", to="runs.run"
                    ),
                ),
                (
                    "written_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["step", "id"],
                "indexes": [models.Index(fields=["run", "step"], name="step_note_by_step")],
            },
        ),
    ]
