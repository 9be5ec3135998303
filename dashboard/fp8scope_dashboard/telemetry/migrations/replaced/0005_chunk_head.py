from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0004_plain_labels")]

    operations = [
        migrations.AddField(
            model_name="chunk",
            name="head",
            field=models.IntegerField(
                help_text="Bytes of the body that hold its scalars, if those of tensors follow; NULL if all may do.",
                null=True,
            ),
        ),
    ]
