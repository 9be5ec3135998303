"""Everything measured of the server in the text format of Prometheus."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import redis
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fp8scope_dashboard.instrumentation import metrics
from fp8scope_dashboard.instrumentation.counts import Key
from fp8scope_dashboard.monitoring.checks import WORST_FIRST
from fp8scope_dashboard.monitoring.status import Status

logger = logging.getLogger(__name__)

Sample = tuple[tuple[str, ...], float | None]
"""The values of labels, and the value; None: unknown, left out."""
WEB_PROCESS: Final = "fp8scope_web"
"""The prefix of metrics of the web process that answers: fp8scope_web_process_cpu_seconds_total."""


def render(status: Status, accept: str) -> tuple[bytes, str]:
    """Write the metrics in the format that the client accepts: that of Prometheus, or OpenMetrics.

    Without Redis, counters are missing: one that falls would be taken for a restart.

    Returns:
        The body and its content type.
    """
    registry = CollectorRegistry()
    registry.register(_GivenMetrics([*_gauges(status), *_counted(status)]))
    ProcessCollector(namespace=WEB_PROCESS, registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _GivenMetrics(Collector):
    """Metrics that are there already."""

    def __init__(self, given: Sequence[Metric]) -> None:
        self._given = given

    def collect(self) -> Sequence[Metric]:
        return self._given


def _counted(status: Status) -> Iterator[Metric]:
    if status.broker is None:
        return
    try:
        counted = metrics.read_counts()
    except redis.RedisError as error:
        logger.warning("Metrics have no counters, because Redis does not answer (%s).", type(error).__name__)
        return
    by_name: dict[str, dict[Key, float]] = defaultdict(dict)
    for key, value in counted.items():
        by_name[key[0]][key] = value
    for metric in metrics.METRICS:
        yield _family(metric, by_name[metric.name])


def _family(metric: metrics.ServerMetric, counted: Mapping[Key, float]) -> Metric:
    # A metric without labels is 0 from the beginning, so that its rate is there with the first count.
    labels = sorted({key[1] for key in counted}) or ([] if metric.labels else [()])
    # Labels of another version of the server, which used the same Redis.
    labels = [values for values in labels if len(values) == len(metric.labels)]
    if not metric.bounds:
        counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for values in labels:
            counter.add_metric(values, counted.get((metric.name, values, ""), 0.0))
        return counter
    histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for values in labels:
        total, buckets = 0.0, []
        for bound in (*(f"{bound:g}" for bound in metric.bounds), metrics.ABOVE):
            total += counted.get((metric.name, values, bound), 0.0)
            buckets.append((bound, total))
        histogram.add_metric(values, buckets, counted.get((metric.name, values, metrics.SUM), 0.0))
    return histogram


def _gauges(status: Status) -> Iterator[Metric]:
    info = InfoMetricFamily("fp8scope_build", "Versions of the server and its parts.")
    info.add_metric((), {name.lower(): version for name, version in status.versions.items()})
    yield info
    yield _gauge(
        "fp8scope_status",
        "State of the server as on its page: 0 good, 1 information only, 2 look at it, 3 needs action.",
        [((), float(tuple(reversed(WORST_FIRST)).index(status.tone)))],
    )
    yield _gauge(
        "fp8scope_part_up",
        "Whether a part of the server answers in time.",
        [
            (("postgresql",), float(status.database is not None)),
            (("redis",), float(status.broker is not None)),
        ],
        "part",
    )
    yield _gauge("fp8scope_workers", "Celery workers that answer.", [((), float(len(status.workers)))])
    yield from _of_queues(status)
    yield from _of_database(status)
    yield _gauge(
        "fp8scope_disk_bytes",
        "Size of a disk.",
        [((disk.name,), disk.total) for disk in status.disks],
        "disk",
    )
    yield _gauge(
        "fp8scope_disk_free_bytes",
        "Free space of a disk.",
        [((disk.name,), disk.free) for disk in status.disks],
        "disk",
    )


def _of_queues(status: Status) -> Iterator[Metric]:
    if (broker := status.broker) is None:
        return
    yield _gauge(
        "fp8scope_queue_jobs",
        "Jobs that wait in a queue.",
        [((queue.name,), queue.length) for queue in broker.queues],
        "queue",
    )
    yield _gauge(
        "fp8scope_queue_oldest_seconds",
        "Seconds that the first job of a queue waits.",
        [((queue.name,), queue.oldest or 0.0) for queue in broker.queues],
        "queue",
    )
    yield _gauge("fp8scope_jobs_in_progress", "Jobs that workers have taken.", [((), broker.in_progress)])
    yield _gauge("fp8scope_redis_bytes", "Memory of Redis.", [((), broker.memory)])


def _of_database(status: Status) -> Iterator[Metric]:
    if (database := status.database) is None:
        return
    single: dict[str, tuple[str, float | None]] = {
        "fp8scope_database_bytes": ("Size of the database.", database.bytes),
        "fp8scope_database_connections": ("Connections to PostgreSQL.", database.connections),
        "fp8scope_database_max_connections": ("PostgreSQL's max_connections.", database.connection_limit),
        "fp8scope_runs_sending": ("Runs that sent something in the last minute.", database.sending),
        "fp8scope_runs_unread": ("Runs with rows that no detector has read yet.", database.unread),
        "fp8scope_chunks_waiting": ("Messages that wait for compaction.", database.chunks),
        "fp8scope_chunks_oldest_seconds": ("Age of the first of them.", database.oldest_chunk or 0.0),
        "fp8scope_cold_bytes": ("Size of the files in the cold store.", database.cold_bytes),
        "fp8scope_cold_age_seconds": ("Time since the last of them was stored.", database.cold_age),
    }
    for name, (text, value) in single.items():
        yield _gauge(name, text, [((), value)])
    yield _gauge(
        "fp8scope_table_bytes",
        "Size of the largest tables, with indexes and partitions.",
        [((name,), size) for name, size in database.tables],
        "table",
    )
    yield _gauge(
        "fp8scope_project_bytes",
        "Size of a project's values: its share by their number.",
        [((project.slug,), project.bytes) for project in database.projects],
        "project",
    )
    yield _gauge(
        "fp8scope_project_runs",
        "Runs of a project.",
        [((project.slug,), project.runs) for project in database.projects],
        "project",
    )


def _gauge(name: str, text: str, samples: Sequence[Sample], *labels: str) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        if value is not None:
            gauge.add_metric(values, value)
    return gauge
