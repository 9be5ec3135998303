"""The store's tables. Only telemetry/ reads or writes them; everybody else asks telemetry.queries."""

from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Chunk(models.Model):
    """Rows of one writer: an ingested batch as it came (step-major, cheap to write), or several merged.

    The primary key begins with the run, so that the table can be partitioned by it.
    """

    pk = models.CompositePrimaryKey("run_id", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="chunks")
    writer = models.UUIDField()
    seq = models.BigIntegerField(help_text="The first message that it holds.")
    last_seq = models.BigIntegerField(help_text="The last; equal to seq until chunks are merged.")
    first_step = models.BigIntegerField()
    last_step = models.BigIntegerField()
    rows = models.IntegerField()
    points = models.BigIntegerField()
    body = models.BinaryField(help_text="Arrow IPC stream; see telemetry.codec")
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        indexes: ClassVar = [
            models.Index(fields=["run", "first_step"]),
            # What is not merged yet: small, and empty for a run that is over.
            models.Index(
                name="chunk_unmerged", fields=["run", "writer"], condition=models.Q(seq=models.F("last_seq"))
            ),
        ]
