"""The ledger that makes every message count once."""

from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Receipt(models.Model):
    """(run, writer, seq) was stored. Written in the transaction that stores the message.

    `digest` tells a retry (same bytes: answered as stored) from a second writer that uses the same id
    (other bytes: refused).
    """

    pk = models.CompositePrimaryKey("run_id", "writer", "seq")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="receipts")
    writer = models.UUIDField()
    seq = models.BigIntegerField()
    kind = models.CharField(max_length=16)
    digest = models.BinaryField(max_length=32)
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["run", "received_at"])]
