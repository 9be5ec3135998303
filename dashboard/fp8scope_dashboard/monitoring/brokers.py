"""Redis and the Celery workers, with bounded time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from celery import current_app
from django.conf import settings

from fp8scope_dashboard.db.redis_client import bounded_client
from fp8scope_dashboard.instrumentation.jobs import QUEUED_AT

TIMEOUT_SECONDS: Final = 1.0
QUEUES: Final = ("deliveries", "evaluations", "celery")
MAX_MESSAGE_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Queue:
    """A queue of tasks; `oldest`: seconds that its first task waits."""

    name: str
    length: int
    oldest: float | None


@dataclass(frozen=True)
class Broker:
    """Redis: its queues, the tasks that are being worked on, and its memory in bytes."""

    version: str
    memory: int
    in_progress: int
    queues: list[Queue]


@dataclass(frozen=True)
class CeleryWorker:
    """A worker that answered, with the tasks that it is working on."""

    name: str
    tasks: list[str] = field(default_factory=list)


def read_broker() -> Broker:
    """Ask Redis.

    Raises:
        redis.RedisError: it does not answer in time.
    """
    client = bounded_client(settings.REDIS_URL, TIMEOUT_SECONDS)
    with client:
        asked = client.pipeline(transaction=False)
        for name in QUEUES:
            asked.llen(name)
            # Tasks are pushed at the left and taken at the right.
            asked.lindex(name, -1)
        asked.hlen("unacked")
        asked.info("server")
        asked.info("memory")
        answers = asked.execute()
    queues = [
        Queue(name, int(answers[2 * index]), waiting_since(answers[2 * index + 1], time.time()))
        for index, name in enumerate(QUEUES)
    ]
    in_progress, server, memory = answers[-3:]
    return Broker(
        str(server.get("valkey_version") or server.get("redis_version", "")),
        int(memory.get("used_memory", 0)),
        int(in_progress),
        queues,
    )


def waiting_since(message: bytes | None, now: float) -> float | None:
    """Seconds since a task was queued; None without a task, or if it does not say."""
    if not message or len(message) > MAX_MESSAGE_BYTES:
        return None
    try:
        queued_at = json.loads(message)["headers"][QUEUED_AT]
        return max(0.0, now - float(queued_at))
    except (ValueError, KeyError, TypeError):
        return None


def read_workers() -> list[CeleryWorker]:
    """The workers that answer within TIMEOUT_SECONDS, by name.

    Raises:
        Exception: what the broker's client raises if there is no connection.
    """
    answers: Mapping[str, list[Mapping[str, Any]]] | None = current_app.control.inspect(
        timeout=TIMEOUT_SECONDS
    ).active()
    return [
        CeleryWorker(name, [str(task.get("name", "")).rpartition(".")[2] for task in tasks])
        for name, tasks in sorted((answers or {}).items())
    ]
