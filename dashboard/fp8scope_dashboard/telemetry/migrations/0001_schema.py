"""The tables of telemetry. The large ones are partitioned by the hash of the run.

Django cannot describe partitions, so SQL creates these tables, and Django's state only learns of the models.
"""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

PARTITIONS = 8
RUN = "run_id uuid NOT NULL REFERENCES runs_run (id) ON DELETE CASCADE"
COUNTS = """
    seq bigint NOT NULL, last_seq bigint NOT NULL, first_step bigint NOT NULL, last_step bigint NOT NULL,
    rows integer NOT NULL, points bigint NOT NULL
"""
CHUNK = f"""
    {RUN}, writer uuid NOT NULL, {COUNTS}, body bytea NOT NULL, received_at timestamptz NOT NULL,
    head integer, PRIMARY KEY (run_id, writer, seq)
"""
BLOCK = f"""
    {RUN}, writer uuid NOT NULL, {COUNTS}, received_at timestamptz NOT NULL,
    PRIMARY KEY (run_id, writer, seq)
"""
TILE = f"""
    {RUN}, name text NOT NULL, tile integer NOT NULL, writer uuid NOT NULL, seq bigint NOT NULL,
    offsets integer[] NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (run_id, name, tile, writer, seq)
"""
ROLLUP = f"""
    {RUN}, name text NOT NULL, stride integer NOT NULL, part text NOT NULL, tile integer NOT NULL,
    span bigint NOT NULL, buckets integer NOT NULL, offsets integer[] NOT NULL, body bytea NOT NULL,
    PRIMARY KEY (run_id, name, stride, part, tile, span)
"""
HISTOGRAM = f"""
    {RUN}, writer uuid NOT NULL, seq bigint NOT NULL, step bigint NOT NULL, tensors integer[] NOT NULL,
    body bytea NOT NULL, received_at timestamptz NOT NULL,
    PRIMARY KEY (run_id, writer, seq)
"""
HISTOGRAM_STEP = "CREATE INDEX histogram_step ON telemetry_histogram (run_id, writer, step)"


def partitioned(table: str, columns: str, model: migrations.CreateModel, *indexes: str) -> migrations.RunSQL:
    """Create a partitioned table for a model.

    The bodies are compressed already, so PostgreSQL must not try.
    """
    statements = [f"CREATE TABLE {table} ({columns}) PARTITION BY HASH (run_id)"]
    if "body bytea" in columns:
        statements.append(f"ALTER TABLE {table} ALTER COLUMN body SET STORAGE EXTERNAL")
    statements += indexes
    statements += [
        f"CREATE TABLE {table}_p{i} PARTITION OF {table}"
        f" FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {i})"
        for i in range(PARTITIONS)
    ]
    return migrations.RunSQL(";\n".join(statements), f"DROP TABLE {table}", state_operations=[model])


class Migration(migrations.Migration):
    replaces = [
        ("telemetry", "0001_initial"),
        ("telemetry", "0002_blocks"),
        ("telemetry", "0003_histogram"),
        ("telemetry", "0004_plain_labels"),
        ("telemetry", "0005_chunk_head"),
    ]

    initial = True

    dependencies = [
        ("runs", "0001_schema"),
    ]

    operations = [
        partitioned(
            "telemetry_chunk",
            CHUNK,
            migrations.CreateModel(
                name="Chunk",
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
                    ("seq", models.BigIntegerField(help_text="The first message that it holds.")),
                    (
                        "last_seq",
                        models.BigIntegerField(
                            help_text="The last message that it holds. Differs from seq only in chunks merged by version 0.1."
                        ),
                    ),
                    ("first_step", models.BigIntegerField()),
                    ("last_step", models.BigIntegerField()),
                    ("rows", models.IntegerField()),
                    ("points", models.BigIntegerField()),
                    ("body", models.BinaryField(help_text="Arrow IPC stream; see telemetry.codec")),
                    (
                        "head",
                        models.IntegerField(
                            help_text="Bytes of the body that hold its scalars, if those of tensors follow; NULL if all may do.",
                            null=True,
                        ),
                    ),
                    ("received_at", models.DateTimeField(default=django.utils.timezone.now)),
                    (
                        "run",
                        models.ForeignKey(
                            db_index=False,
                            on_delete=django.db.models.deletion.CASCADE,
                            related_name="chunks",
                            to="runs.run",
                        ),
                    ),
                ],
            ),
        ),
        partitioned(
            "telemetry_block",
            BLOCK,
            migrations.CreateModel(
                name="Block",
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
                            related_name="blocks",
                            to="runs.run",
                        ),
                    ),
                    ("writer", models.UUIDField()),
                    ("seq", models.BigIntegerField(help_text="The first message that it holds.")),
                    ("last_seq", models.BigIntegerField(help_text="The last message that it holds.")),
                    ("first_step", models.BigIntegerField()),
                    ("last_step", models.BigIntegerField()),
                    ("rows", models.IntegerField()),
                    ("points", models.BigIntegerField()),
                    (
                        "received_at",
                        models.DateTimeField(help_text="When the last of its chunks was received."),
                    ),
                ],
            ),
        ),
        partitioned(
            "telemetry_tile",
            TILE,
            migrations.CreateModel(
                name="Tile",
                fields=[
                    (
                        "pk",
                        models.CompositePrimaryKey(
                            "run_id",
                            "name",
                            "tile",
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
                            related_name="tiles",
                            to="runs.run",
                        ),
                    ),
                    ("name", models.TextField()),
                    ("tile", models.IntegerField()),
                    ("writer", models.UUIDField()),
                    ("seq", models.BigIntegerField(help_text="The seq of the block.")),
                    (
                        "offsets",
                        django.contrib.postgres.fields.ArrayField(
                            base_field=models.IntegerField(),
                            help_text="Start of each series in the body; see telemetry.tile_codec.",
                            size=None,
                        ),
                    ),
                    ("body", models.BinaryField()),
                ],
            ),
        ),
        partitioned(
            "telemetry_rollup",
            ROLLUP,
            migrations.CreateModel(
                name="RollUp",
                fields=[
                    (
                        "pk",
                        models.CompositePrimaryKey(
                            "run_id",
                            "name",
                            "stride",
                            "part",
                            "tile",
                            "span",
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
                            related_name="rollups",
                            to="runs.run",
                        ),
                    ),
                    ("name", models.TextField()),
                    ("stride", models.IntegerField()),
                    ("part", models.TextField()),
                    ("tile", models.IntegerField()),
                    ("span", models.BigIntegerField()),
                    ("buckets", models.IntegerField()),
                    (
                        "offsets",
                        django.contrib.postgres.fields.ArrayField(
                            base_field=models.IntegerField(), size=None
                        ),
                    ),
                    ("body", models.BinaryField()),
                ],
            ),
        ),
        migrations.CreateModel(
            name="Rolling",
            fields=[
                (
                    "run",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="rolling",
                        serialize=False,
                        to="runs.run",
                    ),
                ),
                ("until", models.BigIntegerField(default=0, help_text="A multiple of the smallest stride.")),
                ("stale_first", models.BigIntegerField(null=True)),
                ("stale_last", models.BigIntegerField(help_text="Inclusive.", null=True)),
                ("raw_from", models.BigIntegerField(default=0)),
                (
                    "cutoffs",
                    models.JSONField(
                        default=dict,
                        help_text="For each attempt, the first step of a later one, as of the last roll-up.",
                    ),
                ),
                (
                    "pending",
                    models.BooleanField(default=True, help_text="Whether the run needs another compaction."),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("pending", True)), fields=["run"], name="rolling_pending"
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("stale_first__isnull", True), ("stale_last__isnull", True)),
                            ("stale_first__lte", models.F("stale_last")),
                            _connector="OR",
                        ),
                        name="rolling_stale_both",
                    )
                ],
            },
        ),
        partitioned(
            "telemetry_histogram",
            HISTOGRAM,
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
                    ("seq", models.BigIntegerField(help_text="The message that contained it.")),
                    ("step", models.BigIntegerField()),
                    (
                        "tensors",
                        django.contrib.postgres.fields.ArrayField(
                            base_field=models.IntegerField(),
                            help_text="Tensor.index of each of the body's rows.",
                            size=None,
                        ),
                    ),
                    ("body", models.BinaryField(help_text="Arrow IPC stream; see telemetry.histograms")),
                    ("received_at", models.DateTimeField(default=django.utils.timezone.now)),
                ],
                options={
                    "indexes": [models.Index(fields=["run", "writer", "step"], name="histogram_step")],
                },
            ),
            HISTOGRAM_STEP,
        ),
    ]
