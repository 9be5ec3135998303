"""The state of what one process exports, which its data points need and the store does not have."""

import uuid

from django.db import models

from fp8scope_dashboard.runs.models import Run


class OtlpWriter(models.Model):
    """A writer of a run that OpenTelemetry's exporters feed. Its row is locked while a request is stored.

    `state` has for each series the numbers that the next data point needs (see `points.SeriesState`).
    `meanings` says which metric is the loss, the learning rate and so on.
    """

    uuid = models.UUIDField(primary_key=True, default=uuid.uuid4)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="otlp_writers")
    next_seq = models.BigIntegerField(default=0)
    state = models.JSONField(default=dict, blank=True)
    meanings = models.JSONField(default=dict, blank=True)
