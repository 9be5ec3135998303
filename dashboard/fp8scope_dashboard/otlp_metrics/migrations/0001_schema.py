"""What one process of an OpenTelemetry exporter has sent so far."""

import django.db.models.deletion
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ("runs", "0002_margin_in_nats"),
    ]

    operations = [
        migrations.CreateModel(
            name='OtlpWriter',
            fields=[
                ('uuid', models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ('next_seq', models.BigIntegerField(default=0)),
                ('state', models.JSONField(blank=True, default=dict)),
                ('meanings', models.JSONField(blank=True, default=dict)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='otlp_writers', to='runs.run')),
            ],
        ),
    ]
