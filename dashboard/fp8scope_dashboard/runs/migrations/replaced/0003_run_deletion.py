import django.db.models.deletion
import django.db.models.manager
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_project_raw_days"),
        ("runs", "0002_writer_attempt"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="run",
            options={"base_manager_name": "with_deleted", "ordering": ["-created_at"]},
        ),
        migrations.AlterModelManagers(
            name="run",
            managers=[
                ("objects", django.db.models.manager.Manager()),
                ("with_deleted", django.db.models.manager.Manager()),
            ],
        ),
        migrations.AddField(
            model_name="run",
            name="deleted_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="run",
            name="deleted_bytes",
            field=models.BigIntegerField(default=0, help_text="Size when the deletion began."),
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
    ]
