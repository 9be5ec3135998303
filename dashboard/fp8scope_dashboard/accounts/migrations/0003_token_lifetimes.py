"""The expiry of tokens, and their former secrets after a rotation."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0002_gpu_hour_price")]

    operations = [
        migrations.AddField(
            "apitoken",
            "expires_at",
            models.DateTimeField(blank=True, null=True, help_text="Null: when it is revoked."),
        ),
        migrations.AddField("apitoken", "rotated_at", models.DateTimeField(blank=True, null=True)),
        migrations.AddField(
            "apitoken",
            "former_digest",
            models.BinaryField(blank=True, max_length=32, null=True, unique=True),
        ),
        migrations.AddField("apitoken", "former_until", models.DateTimeField(blank=True, null=True)),
    ]
