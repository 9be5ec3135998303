import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_project_raw_days"),
    ]

    operations = [
        migrations.AlterField(
            model_name="project",
            name="raw_days",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="Days to keep tensor values; roll-ups and scalars are kept. Empty: keep everything.",
                null=True,
                validators=[
                    django.core.validators.MinValueValidator(1),
                    django.core.validators.MaxValueValidator(36500),
                ],
            ),
        ),
    ]
