import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="project",
            name="raw_days",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="Days for which every value is kept; roll-ups are kept for ever. Empty: all for ever.",
                null=True,
                validators=[
                    django.core.validators.MinValueValidator(1),
                    django.core.validators.MaxValueValidator(36500),
                ],
            ),
        ),
    ]
