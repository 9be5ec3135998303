"""Distribute the test database over the nodes of FP8SCOPE_TEST_NODES; see benchmarks/citus.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote

import psycopg
from django.conf import settings
from django.db import connection

NODES: Final = "FP8SCOPE_TEST_NODES"
"""The addresses of the coordinator, which DATABASE_URL names too, and of the workers, separated by commas."""
# Few: each test that commits ends with emptying the tables of all shards.
SHARDS: Final = 4


@contextmanager
def distributed() -> Iterator[None]:
    """Distribute the test database, if there are nodes. The workers' databases are dropped afterwards."""
    from fp8scope_dashboard.distribution import nodes, services

    addresses = [nodes.address(text) for text in os.environ.get(NODES, "").split(",") if text]
    if not addresses:
        yield
        return
    coordinator, *workers = addresses
    name = str(settings.DATABASES["default"]["NAME"])
    for worker in workers:
        _drop(worker, name)
        _run(worker, "postgres", f'CREATE DATABASE "{name}"')
        _run(worker, name, "CREATE EXTENSION citus")
    services.create_extension()
    nodes.set_coordinator(coordinator)
    for worker in workers:
        nodes.add(worker)
    services.distribute(shards=SHARDS)
    # The settings of the database are those of new connections.
    connection.close()
    yield
    for worker in workers:
        _drop(worker, name)


def _drop(node: tuple[str, int], name: str) -> None:
    _run(node, "postgres", f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _run(node: tuple[str, int], database: str, statement: str) -> None:
    user = quote(str(connection.settings_dict["USER"]))
    url = f"postgresql://{user}@{node[0]}:{node[1]}/{quote(database)}"
    with psycopg.connect(url, autocommit=True) as worker:
        worker.execute(statement)
