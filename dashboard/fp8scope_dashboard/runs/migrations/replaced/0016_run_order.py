from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    # An index that is built concurrently does not keep agents from writing, and needs no transaction around it.
    atomic = False
    dependencies = [("runs", "0015_step_notes")]

    operations = [
        AddIndexConcurrently(
            "run",
            models.Index(
                fields=["project", "-created_at", "id"],
                include=["group", "archived_at"],
                condition=models.Q(deleted_at=None),
                name="run_order",
            ),
        ),
        RemoveIndexConcurrently("run", "runs_run_project_44b5a3_idx"),
    ]
