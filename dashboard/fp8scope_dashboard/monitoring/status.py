"""The state of the whole server, measured at most every few seconds."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTimeError
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

import django
import psutil
from django.conf import settings
from django.db import Error, InterfaceError
from django.utils import timezone

from fp8scope_dashboard.monitoring import checks
from fp8scope_dashboard.monitoring.brokers import Broker, CeleryWorker, read_broker, read_workers
from fp8scope_dashboard.monitoring.checks import Check, Tone
from fp8scope_dashboard.monitoring.database import Database, read_database
from fp8scope_dashboard.text.numbers import count

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

ANSWER_SECONDS: Final = 2.5
FRESH_SECONDS: Final = 3.0
"""Several people, and monitoring, share one measurement."""

# Two threads: one each for Redis and the workers, which may both hang.
_threads = ThreadPoolExecutor(2, thread_name_prefix="status")
_lock = threading.Lock()


@dataclass(frozen=True)
class Disk:
    """The disk of a directory, in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of the server; parts that did not answer are None."""

    measured_at: datetime
    checks: list[Check]
    versions: dict[str, str]
    process: dict[str, Any]
    broker: Broker | None = None
    workers: list[CeleryWorker] = field(default_factory=list)
    database: Database | None = None
    disks: list[Disk] = field(default_factory=list)

    @property
    def tone(self) -> Tone:
        return checks.worst(self.checks)

    def as_dict(self) -> dict[str, Any]:
        """JSON types; `status` is good, warning or danger."""
        return {"status": self.tone, **asdict(self), "measured_at": self.measured_at.isoformat()}


_latest: tuple[float, Status] | None = None


def current() -> Status:
    """The state as of at most FRESH_SECONDS ago. Takes a little more than ANSWER_SECONDS at most."""
    global _latest
    with _lock:
        if _latest is None or time.monotonic() - _latest[0] > FRESH_SECONDS:
            _latest = (time.monotonic(), measure())
        return _latest[1]


def measure() -> Status:
    """Measure everything now."""
    asked_broker, asked_workers = _threads.submit(read_broker), _threads.submit(read_workers)
    database = _attempt(read_database)
    deadline = time.monotonic() + ANSWER_SECONDS
    broker = _answer(asked_broker, deadline)
    answered = _answer(asked_workers, deadline)
    disks = read_disks()
    measured = [
        *_of_broker(broker, answered),
        *_of_database(database),
        *(checks.disk(disk.name, disk.total, disk.free) for disk in disks),
    ]
    order = checks.WORST_FIRST
    return Status(
        measured_at=timezone.now(),
        checks=sorted(measured, key=lambda check: order.index(check.tone)),
        versions=_versions(broker, database),
        process=_process(),
        broker=broker,
        workers=answered or [],
        database=database,
        disks=disks,
    )


def _attempt(read: Callable[[], Result]) -> Result | None:
    try:
        return read()
    except (Error, InterfaceError) as error:
        logger.warning("PostgreSQL did not answer for the server's status: %s", type(error).__name__)
        return None


def _answer(future: Future[Result], deadline: float) -> Result | None:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except OutOfTimeError:
        future.cancel()
    except Exception as error:  # Redis' and Celery's clients raise errors of several libraries.
        logger.warning("The status of queues or workers is unknown: %s", type(error).__name__)
    return None


def _of_broker(broker: Broker | None, workers: list[CeleryWorker] | None) -> list[Check]:
    if broker is None:
        advice = (
            "Live updates and jobs wait; data is stored all the same. Look at logs/redis.log in the data "
            "directory, or at the server in REDIS_URL."
        )
        return [checks.unanswered("redis", "Redis", ANSWER_SECONDS, advice)]
    waiting = sum(queue.length for queue in broker.queues)
    memory = f"{broker.memory / 2**20:.0f} MiB, {count(broker.in_progress, 'task')} in progress"
    return [
        Check(key="redis", title="Redis", value="answers", tone="good", detail=memory),
        checks.workers(len(workers or []), waiting),
        *(checks.queue(queue.name, queue.length, queue.oldest) for queue in broker.queues),
    ]


def _of_database(database: Database | None) -> list[Check]:
    if database is None:
        advice = (
            "Agents keep their data and send it later. Look at logs/postgres.log in the data directory, or "
            "at the server in DATABASE_URL."
        )
        return [checks.unanswered("postgresql", "PostgreSQL", ANSWER_SECONDS, advice)]
    return [
        Check(
            key="postgresql",
            title="PostgreSQL",
            value="answers",
            tone="good",
            detail=f"{database.bytes / 2**20:,.0f} MiB stored",
        ),
        checks.ingest(database.per_minute, database.sending),
        checks.compaction(database.chunks, database.oldest_chunk),
        checks.detectors(database.unread, database.sending),
        checks.connections(database.connections, database.connection_limit),
    ]


def read_disks() -> list[Disk]:
    """The disks of the data directory and of the embedded PostgreSQL; of other servers it is unknown."""
    measured: dict[int, Disk] = {}
    for name, folder in (("database", settings.DATABASE_DIR), ("data directory", str(settings.DATA_DIR))):
        try:
            device = os.stat(folder).st_dev if folder else -1
            usage = shutil.disk_usage(folder) if folder else None
        except OSError:
            continue
        if usage is not None:
            measured.setdefault(device, Disk(name, usage.total, usage.free))
    return list(measured.values())


def _versions(broker: Broker | None, database: Database | None) -> dict[str, str]:
    try:
        own = version("fp8scope")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "fp8scope": own,
        "Python": platform.python_version(),
        "Django": django.get_version(),
        "Celery": version("celery"),
        "PostgreSQL": database.version if database else "unknown",
        "Redis": broker.version if broker else "unknown",
    }


def _process() -> dict[str, Any]:
    """The web process that answers."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "pid": process.pid,
            "memory_bytes": process.memory_info().rss,
            "threads": process.num_threads(),
            "seconds": round(time.time() - process.create_time()),
        }
