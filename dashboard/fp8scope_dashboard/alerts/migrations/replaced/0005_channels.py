"""Encrypt the settings of channels; add their limits and filters, and more kinds of deliveries."""

import uuid

import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

from fp8scope_dashboard.db.encryption import decrypt_json, encrypt_json


def seal(apps, schema_editor):
    for channel in apps.get_model("alerts", "Channel").objects.all():
        channel.sealed = encrypt_json(channel.config)
        channel.save(update_fields=["sealed"])


def unseal(apps, schema_editor):
    for channel in apps.get_model("alerts", "Channel").objects.all():
        channel.config = decrypt_json(channel.sealed) if channel.sealed else {}
        channel.save(update_fields=["config"])


class Migration(migrations.Migration):
    dependencies = [
        ("alerts", "0004_generations"),
    ]

    operations = [
        migrations.AddField(
            model_name="channel",
            name="sealed",
            field=models.TextField(default="", help_text="The config, as `encrypt_json` returns it."),
        ),
        migrations.RunPython(seal, unseal),
        migrations.RemoveField(
            model_name="channel",
            name="config",
        ),
        migrations.AddField(
            model_name="channel",
            name="least_severity",
            field=models.CharField(
                choices=[("warning", "Warning"), ("critical", "Critical")],
                default="warning",
                help_text="Alerts below this severity are not sent.",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="channel",
            name="send_resolved",
            field=models.BooleanField(default=False, help_text="Also send a notice when an alert ends."),
        ),
        migrations.AddField(
            model_name="channel",
            name="per_minute",
            field=models.PositiveIntegerField(
                default=10,
                help_text="Further messages of the same minute are sent together as one digest.",
                validators=[
                    django.core.validators.MinValueValidator(1),
                    django.core.validators.MaxValueValidator(600),
                ],
            ),
        ),
        migrations.AddField(
            model_name="channel",
            name="minute_started_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="channel",
            name="minute_messages",
            field=models.PositiveIntegerField(default=0),
        ),
        # Existing deliveries get a key each.
        migrations.AddField(
            model_name="delivery",
            name="key",
            field=models.UUIDField(null=True),
        ),
        migrations.RunSQL(
            "UPDATE alerts_delivery SET key = gen_random_uuid()", reverse_sql=migrations.RunSQL.noop
        ),
        migrations.AlterField(
            model_name="delivery",
            name="key",
            field=models.UUIDField(
                default=uuid.uuid4,
                help_text="The same in every attempt, so that receivers drop duplicates.",
                unique=True,
            ),
        ),
        migrations.AddField(
            model_name="delivery",
            name="reason",
            field=models.CharField(
                choices=[
                    ("opened", "Opened"),
                    ("reopened", "Reopened"),
                    ("escalated", "Escalated"),
                    ("resolved", "Resolved"),
                    ("test", "Test"),
                ],
                default="opened",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="delivery",
            name="occurrence",
            field=models.PositiveIntegerField(
                default=0,
                help_text="Counts repetitions of a reason, e.g. of an alert that is reopened twice.",
            ),
        ),
        migrations.AddField(
            model_name="delivery",
            name="leader",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="followers",
                to="alerts.delivery",
            ),
        ),
        migrations.AddField(
            model_name="delivery",
            name="held",
            field=models.BooleanField(default=False, help_text="Above the channel's limit: waits for a digest."),
        ),
        migrations.AlterField(
            model_name="delivery",
            name="event",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="deliveries",
                to="alerts.alert",
            ),
        ),
        migrations.RemoveConstraint(
            model_name="delivery",
            name="delivery_once",
        ),
        migrations.AddConstraint(
            model_name="delivery",
            constraint=models.UniqueConstraint(
                fields=("event", "channel", "reason", "occurrence"), name="delivery_once"
            ),
        ),
    ]
