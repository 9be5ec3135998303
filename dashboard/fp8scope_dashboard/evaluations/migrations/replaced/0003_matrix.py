"""Cells of the evaluation matrix."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("evaluations", "0002_precision_and_margin"),
    ]

    operations = [
        migrations.AddField(
            model_name="evaluation",
            name="matrix",
            field=models.JSONField(
                blank=True,
                help_text="Bytes, seconds and layers of a cell of the evaluation matrix; null for a score.",
                null=True,
            ),
        ),
    ]
