"""The price of a GPU hour of a project."""

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    # By the name that 0001_schema replaces: an upgrade from a database of version 0.1 has both.
    dependencies = [("accounts", "0007_projects_and_density")]

    operations = [
        migrations.AddField(
            "project",
            "gpu_hour_price",
            models.FloatField(
                blank=True,
                null=True,
                validators=[
                    django.core.validators.MinValueValidator(0.0001),
                    django.core.validators.MaxValueValidator(1000.0),
                ],
                help_text="Price of a GPU hour, in the currency of the project; empty: no costs are shown.",
            ),
        ),
    ]
