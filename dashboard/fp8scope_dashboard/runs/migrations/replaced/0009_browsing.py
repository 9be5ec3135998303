import uuid

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

KINDS = [
    ("tag", "Tag"),
    ("untag", "Untag"),
    ("archive", "Archive"),
    ("unarchive", "Unarchive"),
    ("delete", "Delete"),
]


def person(**more):
    return models.ForeignKey(
        null=True, on_delete=django.db.models.deletion.SET_NULL, related_name="+",
        to=settings.AUTH_USER_MODEL, **more
    )


class Migration(migrations.Migration):
    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("accounts", "0001_initial"),
        ("runs", "0008_kin_indexes"),
    ]

    operations = [
        migrations.AddField("run", "erase_at", models.DateTimeField(blank=True, editable=False, null=True)),
        migrations.AddField("run", "archived_at", models.DateTimeField(blank=True, editable=False, null=True)),
        migrations.CreateModel(
            name="BulkAction",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ("kind", models.CharField(choices=KINDS, max_length=16)),
                ("tag", models.CharField(blank=True, default="", max_length=64)),
                (
                    "runs",
                    django.contrib.postgres.fields.ArrayField(base_field=models.UUIDField(), size=None),
                ),
                ("done_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("undone_at", models.DateTimeField(blank=True, null=True)),
                ("done_by", person()),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="bulk_actions",
                        to="accounts.project",
                    ),
                ),
                ("undone_by", person()),
            ],
            options={"ordering": ["-done_at"]},
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
            ],
            options={"ordering": ["name", "id"]},
        ),
        migrations.AddIndex(
            "bulkaction", models.Index(fields=["project", "-done_at"], name="runs_bulkac_project_ef4b26_idx")
        ),
        migrations.AddConstraint(
            "savedview",
            models.UniqueConstraint(fields=("project", "owner", "name"), name="saved_view_once"),
        ),
    ]
