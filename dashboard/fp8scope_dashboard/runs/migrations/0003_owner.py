"""The owner of a run: the person whose token registered it."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

OWNERS_OF_TOKENS = """
    UPDATE runs_run run SET owner_id = token.created_by_id
    FROM accounts_apitoken token
    WHERE token.id = run.registered_with_id AND token.created_by_id IS NOT NULL
"""


class Migration(migrations.Migration):
    dependencies = [("runs", "0002_margin_in_nats"), ("accounts", "0002_gpu_hour_price")]

    operations = [
        migrations.AddField(
            "run",
            "owner",
            models.ForeignKey(
                blank=True,
                editable=False,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.RunSQL(OWNERS_OF_TOKENS, migrations.RunSQL.noop),
    ]
