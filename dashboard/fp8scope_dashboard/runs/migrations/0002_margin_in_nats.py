"""The margin of a comparison in the unit of the loss."""

from django.db import migrations, models


class Migration(migrations.Migration):
    # By the name that 0001_schema replaces: an upgrade from a database of version 0.1 has both.
    dependencies = [("runs", "0016_run_order")]

    operations = [
        migrations.AddField("run", "margin_nats", models.FloatField(blank=True, null=True)),
    ]
