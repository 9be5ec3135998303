from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("alerts", "0009_early_signs")]

    operations = [
        migrations.AlterField(
            model_name="delivery",
            name="reason",
            field=models.CharField(
                choices=[
                    ("opened", "Opened"),
                    ("reopened", "Reopened"),
                    ("worse", "Got worse"),
                    ("escalated", "Escalated"),
                    ("resolved", "Resolved"),
                    ("test", "Test"),
                ],
                default="opened",
                max_length=16,
            ),
        ),
    ]
