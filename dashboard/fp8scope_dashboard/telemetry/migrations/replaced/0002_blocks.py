"""Blocks and roll-ups; everything large is partitioned by hash of the run.

Django cannot describe partitions: the tables are made in SQL, and its state is told of the models.
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
    PRIMARY KEY (run_id, writer, seq)
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


def table(name: str, columns: str) -> str:
    """SQL that makes a partitioned table. The bodies are compressed already: PostgreSQL must not try again."""
    statements = [f"CREATE TABLE {name} ({columns}) PARTITION BY HASH (run_id)"]
    if "body bytea" in columns:
        statements.append(f"ALTER TABLE {name} ALTER COLUMN body SET STORAGE EXTERNAL")
    statements += [
        f"CREATE TABLE {name}_p{i} PARTITION OF {name} FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {i})"
        for i in range(PARTITIONS)
    ]
    return ";\n".join(statements) + ";"


def in_sql(name: str, columns: str, state: list[migrations.operations.base.Operation]) -> migrations.RunSQL:
    return migrations.RunSQL(table(name, columns), f"DROP TABLE {name}", state_operations=state)


MOVED = "run_id, writer, seq, last_seq, first_step, last_step, rows, points, body, received_at"
REPARTITION = f"""
    ALTER TABLE telemetry_chunk RENAME TO telemetry_chunk_whole;
    ALTER TABLE telemetry_chunk_whole RENAME CONSTRAINT telemetry_chunk_pkey TO telemetry_chunk_whole_pkey;
    {table("telemetry_chunk", CHUNK)}
    INSERT INTO telemetry_chunk ({MOVED}) SELECT {MOVED} FROM telemetry_chunk_whole;
    DROP TABLE telemetry_chunk_whole;
    UPDATE runs_writer AS w SET first_step = c.first_step, last_step = c.last_step
    FROM (
        SELECT run_id, writer, min(first_step) AS first_step, max(last_step) AS last_step
        FROM telemetry_chunk GROUP BY run_id, writer
    ) AS c
    WHERE c.run_id = w.run_id AND c.writer = w.uuid AND w.first_step IS NULL;
    SET CONSTRAINTS ALL IMMEDIATE;
"""
UNDO_REPARTITION = f"""
    ALTER TABLE telemetry_chunk RENAME TO telemetry_chunk_parts;
    ALTER TABLE telemetry_chunk_parts RENAME CONSTRAINT telemetry_chunk_pkey TO telemetry_chunk_parts_pkey;
    CREATE TABLE telemetry_chunk ({CHUNK});
    ALTER TABLE telemetry_chunk ALTER COLUMN body SET STORAGE EXTERNAL;
    CREATE INDEX telemetry_c_run_id_650f44_idx ON telemetry_chunk (run_id, first_step);
    CREATE INDEX chunk_unmerged ON telemetry_chunk (run_id, writer) WHERE seq = last_seq;
    INSERT INTO telemetry_chunk ({MOVED}) SELECT {MOVED} FROM telemetry_chunk_parts;
    DROP TABLE telemetry_chunk_parts;
"""


def run_field(related_name: str) -> models.ForeignKey:
    return models.ForeignKey(
        db_index=False,
        on_delete=django.db.models.deletion.CASCADE,
        related_name=related_name,
        to="runs.run",
    )


def key(*fields: str) -> models.CompositePrimaryKey:
    return models.CompositePrimaryKey(*fields, blank=True, editable=False, primary_key=True, serialize=False)


class Migration(migrations.Migration):

    dependencies = [("runs", "0002_writer_attempt"), ("telemetry", "0001_initial")]

    operations = [
        migrations.RunSQL(
            REPARTITION,
            UNDO_REPARTITION,
            state_operations=[
                migrations.RemoveIndex("chunk", "telemetry_c_run_id_650f44_idx"),
                migrations.RemoveIndex("chunk", "chunk_unmerged"),
                migrations.AlterField("chunk", "run", run_field("chunks")),
                migrations.AlterField(
                    "chunk",
                    "last_seq",
                    models.BigIntegerField(
                        help_text="The last; equal to seq but for chunks merged by version 0.1."
                    ),
                ),
            ],
        ),
        in_sql(
            "telemetry_block",
            BLOCK,
            [
                migrations.CreateModel(
                    name="Block",
                    fields=[
                        ("pk", key("run_id", "writer", "seq")),
                        ("run", run_field("blocks")),
                        ("writer", models.UUIDField()),
                        ("seq", models.BigIntegerField(help_text="The first message that it holds.")),
                        ("last_seq", models.BigIntegerField(help_text="The last.")),
                        ("first_step", models.BigIntegerField()),
                        ("last_step", models.BigIntegerField()),
                        ("rows", models.IntegerField()),
                        ("points", models.BigIntegerField()),
                        ("received_at", models.DateTimeField(help_text="When the last of its chunks was.")),
                    ],
                )
            ],
        ),
        in_sql(
            "telemetry_tile",
            TILE,
            [
                migrations.CreateModel(
                    name="Tile",
                    fields=[
                        ("pk", key("run_id", "name", "tile", "writer", "seq")),
                        ("run", run_field("tiles")),
                        ("name", models.TextField()),
                        ("tile", models.IntegerField()),
                        ("writer", models.UUIDField()),
                        ("seq", models.BigIntegerField(help_text="The block's.")),
                        (
                            "offsets",
                            django.contrib.postgres.fields.ArrayField(
                                base_field=models.IntegerField(),
                                help_text="Where each series begins; see telemetry.tiles",
                                size=None,
                            ),
                        ),
                        ("body", models.BinaryField()),
                    ],
                )
            ],
        ),
        in_sql(
            "telemetry_rollup",
            ROLLUP,
            [
                migrations.CreateModel(
                    name="RollUp",
                    fields=[
                        ("pk", key("run_id", "name", "stride", "part", "tile", "span")),
                        ("run", run_field("rollups")),
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
                )
            ],
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
                (
                    "until",
                    models.BigIntegerField(default=0, help_text="A multiple of the smallest stride."),
                ),
                ("stale_first", models.BigIntegerField(null=True)),
                ("stale_last", models.BigIntegerField(help_text="Inclusive.", null=True)),
                ("raw_from", models.BigIntegerField(default=0)),
                (
                    "cutoffs",
                    models.JSONField(
                        default=dict,
                        help_text="By attempt, the first step of a later one, as the roll-ups know it.",
                    ),
                ),
                (
                    "pending",
                    models.BooleanField(
                        default=True, help_text="Whether compaction has to look at the run again."
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        name="rolling_pending", fields=["run"], condition=models.Q(pending=True)
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(stale_first__isnull=True, stale_last__isnull=True)
                        | models.Q(stale_first__lte=models.F("stale_last")),
                        name="rolling_stale_both",
                    )
                ]
            },
        ),
    ]
