"""Receipts of stored messages: each message is stored exactly once."""

from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Receipt(models.Model):
    """A record that the message (run, writer, seq) is stored, written in the transaction that stores it.

    `digest` distinguishes a retry, which has the same bytes, from a message of another writer that uses the
    same id, which is refused.
    """

    pk = models.CompositePrimaryKey("run_id", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="receipts")
    writer = models.UUIDField()
    seq = models.BigIntegerField()
    kind = models.CharField(max_length=16)
    digest = models.BinaryField(max_length=32)
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        # The table's name from before receipts had an app of their own.
        db_table = "ingest_receipt"
        indexes: ClassVar = [models.Index(fields=["run", "received_at"])]
