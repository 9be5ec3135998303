"""Histograms of exponents, partitioned by hash of the run as the other large tables are."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

PARTITIONS = 8
TABLE = """
    CREATE TABLE telemetry_histogram (
        run_id uuid NOT NULL REFERENCES runs_run (id) ON DELETE CASCADE, writer uuid NOT NULL,
        seq bigint NOT NULL, step bigint NOT NULL, tensors integer[] NOT NULL, body bytea NOT NULL,
        received_at timestamptz NOT NULL, PRIMARY KEY (run_id, writer, seq)
    ) PARTITION BY HASH (run_id);
    ALTER TABLE telemetry_histogram ALTER COLUMN body SET STORAGE EXTERNAL;
    CREATE INDEX histogram_step ON telemetry_histogram (run_id, writer, step);
"""
PARTS = "".join(
    f"CREATE TABLE telemetry_histogram_p{i} PARTITION OF telemetry_histogram"
    f" FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {i});"
    for i in range(PARTITIONS)
)


class Migration(migrations.Migration):

    dependencies = [("telemetry", "0002_blocks")]

    operations = [
        migrations.RunSQL(
            TABLE + PARTS,
            "DROP TABLE telemetry_histogram",
            state_operations=[
                migrations.CreateModel(
                    name="Histogram",
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
                        (
                            "run",
                            models.ForeignKey(
                                db_index=False,
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="histograms",
                                to="runs.run",
                            ),
                        ),
                        ("writer", models.UUIDField()),
                        ("seq", models.BigIntegerField(help_text="The message that it came in.")),
                        ("step", models.BigIntegerField()),
                        (
                            "tensors",
                            django.contrib.postgres.fields.ArrayField(
                                base_field=models.IntegerField(),
                                help_text="Tensor.index of each of the body's rows.",
                                size=None,
                            ),
                        ),
                        (
                            "body",
                            models.BinaryField(help_text="Arrow IPC stream; see telemetry.histograms"),
                        ),
                        ("received_at", models.DateTimeField(default=django.utils.timezone.now)),
                    ],
                    options={
                        "indexes": [
                            models.Index(fields=["run", "writer", "step"], name="histogram_step")
                        ]
                    },
                )
            ],
        )
    ]
