"""The server's state as PostgreSQL knows it, with bounded time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.db import connection, transaction
from django.db.models import Count, Sum
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.services import unread_runs
from fp8scope_dashboard.runs.models import Run

STATEMENT_MILLISECONDS: Final = 2_000
MINUTES: Final = 5
MAX_RUNS: Final = 5_000
MAX_PROJECTS: Final = 100
MAX_TABLES: Final = 10

SIZES: Final = """
    SELECT coalesce(parent.relname, own.relname) AS name, sum(pg_total_relation_size(own.oid))::bigint AS size
    FROM pg_class own
    LEFT JOIN pg_inherits link ON link.inhrelid = own.oid
    LEFT JOIN pg_class parent ON parent.oid = link.inhparent
    WHERE own.relkind = 'r' AND own.relnamespace = current_schema()::regnamespace
    GROUP BY 1 ORDER BY 2 DESC
"""
COLD: Final = """
    SELECT coalesce(sum(bytes), 0)::bigint, extract(epoch FROM now() - max(changed_at))
    FROM telemetry_coldfile WHERE state = 'stored'
"""
# By run, because the table is partitioned and indexed so: most runs send nothing.
RECENT: Final = """
    SELECT greatest(0, floor(extract(epoch FROM clock_timestamp() - received_at) / 60))::int AS age, count(*)
    FROM ingest_receipt
    WHERE run_id = ANY(%s) AND received_at > clock_timestamp() - make_interval(mins => %s)
    GROUP BY 1
"""


@dataclass(frozen=True)
class ProjectStorage:
    """A project with its runs and points; `bytes` is its share of the telemetry's size, by points."""

    name: str
    slug: str
    runs: int
    points: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Database:
    """PostgreSQL's answers.

    Attributes:
        per_minute: messages stored in each of the last MINUTES minutes, the newest first.
        chunks, oldest_chunk: batches that wait for compaction, and the seconds since the first arrived.
        cold_bytes, cold_age: bytes of files in the cold store, and the seconds since the last was stored.
        tables: the largest, with their partitions and indexes, in bytes.
    """

    version: str
    bytes: int
    connections: int
    connection_limit: int
    sending: int
    per_minute: list[int]
    chunks: int
    oldest_chunk: float | None
    unread: int
    cold_bytes: int
    cold_age: float | None
    tables: list[tuple[str, int]]
    projects: list[ProjectStorage]


def read_database() -> Database:
    """Ask PostgreSQL; each statement has STATEMENT_MILLISECONDS.

    Raises:
        django.db.Error: it does not answer, or not in time.
    """
    with _bounded():
        version = _one("SHOW server_version")
        size, used, limit = _row(
            "SELECT pg_database_size(current_database()), (SELECT count(*) FROM pg_stat_activity), "
            "current_setting('max_connections')::int"
        )
        sending = _sending_runs()
        chunks, oldest = _row(
            "SELECT count(*), extract(epoch FROM now() - min(received_at)) FROM telemetry_chunk"
        )
        cold_bytes, cold_age = _row(COLD)
        tables = _rows(SIZES)
        return Database(
            version=str(version).partition(" ")[0],
            bytes=int(size),
            connections=int(used),
            connection_limit=int(limit),
            sending=len(sending),
            per_minute=_per_minute(sending),
            chunks=int(chunks),
            oldest_chunk=None if oldest is None else float(oldest),
            unread=len(unread_runs()),
            cold_bytes=int(cold_bytes),
            cold_age=None if cold_age is None else float(cold_age),
            tables=[(str(name), int(bytes_)) for name, bytes_ in tables[:MAX_TABLES]],
            projects=_projects(sum(int(bytes_) for name, bytes_ in tables if name.startswith("telemetry_"))),
        )


@contextmanager
def _bounded() -> Iterator[None]:
    with transaction.atomic():
        with connection.cursor() as cursor:
            # For this transaction only.
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(STATEMENT_MILLISECONDS)])
        yield


def _sending_runs() -> list[Any]:
    recent = Run.objects.filter(heartbeat_at__gt=timezone.now() - timedelta(minutes=1))
    return list(recent.order_by("-heartbeat_at").values_list("pk", flat=True)[:MAX_RUNS])


def _per_minute(sending: list[Any]) -> list[int]:
    counts = {int(age): int(number) for age, number in _rows(RECENT, [sending, MINUTES])}
    return [counts.get(age, 0) for age in range(MINUTES)]


def _projects(telemetry_bytes: int) -> list[ProjectStorage]:
    """The largest projects with runs. Sizes are shares by points: measuring runs would read all of them."""
    rows = Project.objects.annotate(number=Count("runs"), points=Sum("runs__points_stored"))
    # Of a project without runs the sum is NULL, which PostgreSQL calls the largest.
    listed = list(rows.exclude(points=None).order_by("-points", "slug")[:MAX_PROJECTS])
    total = sum(row.points or 0 for row in listed) or 1
    return sorted(
        (
            ProjectStorage(
                row.name,
                row.slug,
                row.number,
                row.points or 0,
                round(telemetry_bytes * (row.points or 0) / total),
            )
            for row in listed
        ),
        key=lambda row: (-row.bytes, row.slug),
    )


def _one(query: str) -> Any:
    return _row(query)[0]


def _row(query: str) -> tuple[Any, ...]:
    return _rows(query)[0]


def _rows(query: str, values: list[Any] | None = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        return list(cursor.fetchall())
