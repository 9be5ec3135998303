from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0003_run_deletion")]

    operations = [
        migrations.AddField(
            model_name="writer",
            name="imported",
            field=models.BooleanField(default=False),
        ),
    ]
