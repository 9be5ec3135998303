"""The counters and histograms of the server, and the functions that add to them.

Labels have few values: kinds of addresses, tasks, queues. Nothing is counted by run, token or person.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from django.conf import settings

from fp8scope_dashboard.instrumentation.counts import CountStore, Key, MetricCounts

REQUEST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
JOB_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 600.0)
WAIT_SECONDS: Final = (0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 900.0)
SUM: Final = "sum"
"""The label value under which the sum of a histogram is counted, beside its bounds."""
ABOVE: Final = "+Inf"


@dataclass(frozen=True, kw_only=True)
class ServerMetric:
    """A counter, or with `bounds` a histogram.

    Attributes:
        name: without the suffix `_total` of a counter.
        bounds: upper bounds of the histogram's buckets, inclusive, ascending, in seconds.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def add(self, *values: str, amount: float = 1.0) -> None:
        """Count. `values` are those of the labels, in their order."""
        counts.add((self.name, values, ""), amount)

    def observe(self, seconds: float, *values: str) -> None:
        """Count a duration in its bucket, and add it to the sum."""
        index = bisect_left(self.bounds, seconds)
        bucket = f"{self.bounds[index]:g}" if index < len(self.bounds) else ABOVE
        counts.add((self.name, values, bucket), 1.0)
        counts.add((self.name, values, SUM), seconds)


REQUESTS: Final = ServerMetric(
    name="fp8scope_http_requests",
    help="Answered requests, by kind of address and status.",
    labels=("kind", "status"),
)
REQUEST_DURATION: Final = ServerMetric(
    name="fp8scope_http_request_seconds",
    help="Seconds from a request until its answer is sent, by kind of address, except live updates.",
    labels=("kind",),
    bounds=REQUEST_SECONDS,
)
MESSAGES: Final = ServerMetric(name="fp8scope_ingest_messages", help="Messages with values that were stored.")
REPEATED: Final = ServerMetric(
    name="fp8scope_ingest_repeated_messages", help="Messages that were stored before, sent again by an agent."
)
ROWS: Final = ServerMetric(
    name="fp8scope_ingest_rows", help="Rows, one for each step of a process, that were stored."
)
POINTS: Final = ServerMetric(name="fp8scope_ingest_points", help="Values that were stored.")
BYTES: Final = ServerMetric(name="fp8scope_ingest_bytes", help="Bytes of stored messages, as they came.")
STEP_LAG: Final = ServerMetric(
    name="fp8scope_ingest_lag_seconds",
    help="Seconds from the last step of a message, by the agent's clock, until it is stored.",
    bounds=WAIT_SECONDS,
)
JOBS: Final = ServerMetric(
    name="fp8scope_jobs", help="Ended jobs of the workers, by task and state.", labels=("task", "state")
)
JOB_DURATION: Final = ServerMetric(
    name="fp8scope_job_seconds", help="Seconds that jobs took, by task.", labels=("task",), bounds=JOB_SECONDS
)
JOB_WAIT: Final = ServerMetric(
    name="fp8scope_job_wait_seconds",
    help="Seconds that jobs waited in their queue, by task.",
    labels=("task",),
    bounds=WAIT_SECONDS,
)
ALERTS: Final = ServerMetric(
    name="fp8scope_alerts_opened", help="Opened alerts, by severity.", labels=("severity",)
)
DELIVERIES: Final = ServerMetric(
    name="fp8scope_alert_deliveries",
    help="Attempts to send messages of alerts, by kind of channel and result.",
    labels=("channel", "result"),
)

METRICS: Final = (
    REQUESTS,
    REQUEST_DURATION,
    MESSAGES,
    REPEATED,
    ROWS,
    POINTS,
    BYTES,
    STEP_LAG,
    JOBS,
    JOB_DURATION,
    JOB_WAIT,
    ALERTS,
    DELIVERIES,
)


counts = MetricCounts(CountStore(settings.REDIS_URL))


def read_counts() -> dict[Key, float]:
    """The counts of all processes of the server, those of this one included.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    counts.swap()
    return counts.read()
