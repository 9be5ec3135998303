"""Each run's own difference beside the verdict on its group. The sweeper fills in the rows that exist."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("analysis", "0005_loss_result_help")]

    operations = [
        migrations.AddField(
            model_name="comparison",
            name="own_difference",
            field=models.FloatField(
                blank=True,
                help_text=(
                    "This run's own difference, in the unit of the result; null if its loss is not finite."
                ),
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="evaluationcomparison",
            name="own_difference",
            field=models.FloatField(
                blank=True, help_text="This run's own difference, in the unit of the score.", null=True
            ),
        ),
    ]
