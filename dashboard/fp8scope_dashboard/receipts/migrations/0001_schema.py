"""The table of receipts."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    # Version 0.1 had created the table in the app `ingest`.
    replaces = [
        ("ingest", "0001_initial"),
        ("ingest", "0002_receipt_moves_to_receipts"),
        ("receipts", "0001_receipt"),
    ]

    initial = True

    dependencies = [("runs", "0001_schema")]

    operations = [
        migrations.CreateModel(
            name="Receipt",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "run_id",
                        "writer",
                        "seq",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("writer", models.UUIDField()),
                ("seq", models.BigIntegerField()),
                ("kind", models.CharField(max_length=16)),
                ("digest", models.BinaryField(max_length=32)),
                ("received_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="receipts", to="runs.run"
                    ),
                ),
            ],
            options={
                "db_table": "ingest_receipt",
                "indexes": [
                    models.Index(fields=["run", "received_at"], name="ingest_rece_run_id_dc243f_idx")
                ],
            },
        ),
    ]
