"""The result of a comparison of losses is described by another module."""

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Change a help text; the database stays as it is."""

    dependencies: ClassVar = [("analysis", "0004_job_progress")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="comparison",
            name="result",
            field=models.JSONField(help_text="analysis.losses.result.LossComparison as a dict"),
        ),
    ]
