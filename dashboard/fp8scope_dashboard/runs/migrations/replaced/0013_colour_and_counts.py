from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    # An index that is built concurrently does not keep agents from writing, and needs no transaction around it.
    atomic = False
    dependencies = [("runs", "0012_run_registered_with")]

    operations = [
        migrations.AddField(
            model_name="run",
            name="colour",
            field=models.PositiveSmallIntegerField(blank=True, null=True),
        ),
        migrations.AddField(model_name="run", name="margin", field=models.FloatField(blank=True, null=True)),
        AddIndexConcurrently(
            "run",
            models.Index(
                "project",
                "precision",
                "state",
                "recipe_name",
                "archived_at",
                condition=models.Q(deleted_at=None),
                name="run_counts",
            ),
        ),
    ]
