"""The tables of the store. Only telemetry/ reads and writes them; other apps use telemetry.queries.

Every primary key but that of ColdFile begins with the run, because the large tables are partitioned by its
hash. Each row of telemetry is either in a chunk or in a block. Roll-ups are computed from blocks.
"""

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Chunk(models.Model):
    """Rows of one writer as received: step-major, cheap to write. Compaction turns chunks into blocks."""

    pk = models.CompositePrimaryKey("run_id", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="chunks", db_index=False)
    writer = models.UUIDField()
    seq = models.BigIntegerField(help_text="The first message that it holds.")
    last_seq = models.BigIntegerField(
        help_text="The last message that it holds. Differs from seq only in chunks merged by version 0.1."
    )
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    rows = models.IntegerField()
    points = models.BigIntegerField()
    body = models.BinaryField(help_text="Arrow IPC stream; see telemetry.codec")
    head = models.IntegerField(
        null=True,
        help_text="Bytes of the body that hold its scalars, if those of tensors follow; NULL if all may do.",
    )
    received_at = models.DateTimeField(default=timezone.now)


class Block(models.Model):
    """The header of a block: the rows of several chunks of one writer, stored series-major in its tiles.

    If a batch arrived late, the seq ranges of two blocks overlap; each row has its own seq (see Tile).
    """

    pk = models.CompositePrimaryKey("run_id", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="blocks", db_index=False)
    writer = models.UUIDField()
    seq = models.BigIntegerField(help_text="The first message that it holds.")
    last_seq = models.BigIntegerField(help_text="The last message that it holds.")
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    rows = models.IntegerField()
    points = models.BigIntegerField()
    received_at = models.DateTimeField(help_text="When the last of its chunks was received.")


class Tile(models.Model):
    """The series of one statistic for up to 128 neighbouring tensors, or of one scalar, in one block.

    `name` is the column name on the wire (`tensor:amax`, `scalar:loss`), or `axis` for the step, time and seq
    of the rows. Tile k holds the tensors with Tensor.index 128 k to 128 k + 127.
    """

    pk = models.CompositePrimaryKey("run_id", "name", "tile", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tiles", db_index=False)
    name = models.TextField()
    tile = models.IntegerField()
    writer = models.UUIDField()
    seq = models.BigIntegerField(help_text="The seq of the block.")
    offsets = ArrayField(
        models.IntegerField(), help_text="Start of each series in the body; see telemetry.tile_codec."
    )
    body = models.BinaryField(help_text="Empty if it is in the cold store.")
    location = models.BinaryField(null=True, help_text="Of a body in the cold store: cold_store.locations.")


class RollUp(models.Model):
    """One part of up to 128 series over up to 1,024 neighbouring buckets of `stride` steps.

    Ranks and attempts are merged as in a query. `part` is one of telemetry.aggregates.PARTS; parts that
    aggregates.implied can compute have no row. Span j holds the first `buckets` of the buckets 1024 j to
    1024 j + 1023.
    """

    pk = models.CompositePrimaryKey("run_id", "name", "stride", "part", "tile", "span")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="rollups", db_index=False)
    name = models.TextField()
    stride = models.IntegerField()
    part = models.TextField()
    tile = models.IntegerField()
    span = models.BigIntegerField()
    buckets = models.IntegerField()
    offsets = ArrayField(models.IntegerField())
    body = models.BinaryField()


class Rolling(models.Model):
    """The state of the roll-ups of a run: they cover all steps below `until`, except stale ones.

    Retention has deleted the raw tensor values below `raw_from`; their roll-ups are kept.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="rolling")
    until = models.BigIntegerField(default=0, help_text="A multiple of the smallest stride.")
    stale_first = models.BigIntegerField(null=True)
    stale_last = models.BigIntegerField(null=True, help_text="Inclusive.")
    raw_from = models.BigIntegerField(default=0)
    cutoffs = models.JSONField(
        default=dict,
        help_text="For each attempt, the first step of a later one, as of the last roll-up.",
    )
    pending = models.BooleanField(default=True, help_text="Whether the run needs another compaction.")
    cold_due = models.BooleanField(
        db_default=True, help_text="Whether the run has values to move into the cold store once it is old."
    )

    class Meta:
        indexes: ClassVar = [
            models.Index(name="rolling_pending", fields=["run"], condition=models.Q(pending=True))
        ]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="rolling_stale_both",
                condition=models.Q(stale_first__isnull=True, stale_last__isnull=True)
                | models.Q(stale_first__lte=models.F("stale_last")),
            )
        ]


class Histogram(models.Model):
    """Histograms of exponents of the tensors of one writer in one step, as received."""

    pk = models.CompositePrimaryKey("run_id", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="histograms", db_index=False)
    writer = models.UUIDField()
    seq = models.BigIntegerField(help_text="The message that contained it.")
    step = models.BigIntegerField()
    tensors = ArrayField(models.IntegerField(), help_text="Tensor.index of each of the body's rows.")
    body = models.BinaryField(
        help_text="Arrow IPC stream; see telemetry.histograms. Empty if it is in the cold store."
    )
    location = models.BinaryField(null=True, help_text="As that of a tile.")
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["run", "writer", "step"], name="histogram_step")]


class ColdFileState(models.TextChoices):
    """The states of a file in the cold store."""

    # A worker writes it, or was killed while it did: then it is deleted after an hour.
    WRITING = "writing"
    STORED = "stored"
    # Nothing refers to it any more: the next sweep deletes it.
    UNNEEDED = "unneeded"


class ColdFile(models.Model):
    """A file in the cold store. It has no foreign key: the file must be deleted after its run."""

    run_id = models.UUIDField()
    digest = models.BinaryField(help_text="The SHA-256 of the file.")
    bytes = models.BigIntegerField()
    bodies = models.IntegerField(help_text="The bodies that were moved into it.")
    state = models.CharField(max_length=16, choices=ColdFileState.choices)
    changed_at = models.DateTimeField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run_id", "digest"], name="cold_file_once"),
        ]
        indexes: ClassVar = [models.Index(fields=["state", "changed_at"], name="cold_file_state")]
