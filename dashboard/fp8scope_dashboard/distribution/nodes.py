"""The nodes of a distributed store: list, add, drain, and balance their shards by size."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from django.db import connection

from fp8scope_dashboard.distribution.errors import DistributionError

DEFAULT_PORT: Final = 5432
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:]{2,45}\]")
# A few large runs decide the size of a shard. With Citus' own 100 MB for each shard it would count shards.
SHARD_BASE_BYTES: Final = 1 << 20
# Nodes may differ by this share of their mean.
BALANCE: Final = 0.05
_NODES: Final = """
    SELECT nodename, nodeport, groupid = 0, shouldhaveshards, isactive,
        (SELECT count(DISTINCT shardid) FROM pg_dist_placement JOIN pg_dist_shard USING (shardid)
            WHERE pg_dist_placement.groupid = node.groupid AND logicalrelid = to_regclass('runs_run')),
        coalesce((SELECT sum(shard_size) FROM citus_shards AS shard
            WHERE shard.nodename = node.nodename AND shard.nodeport = node.nodeport
                AND citus_table_type = 'distributed'), 0)::bigint
    FROM pg_dist_node AS node WHERE noderole = 'primary' ORDER BY groupid
"""


class Address(NamedTuple):
    """The address at which all nodes reach one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node: its shards of runs, and the bytes of all tables in shards."""

    address: Address
    is_coordinator: bool
    has_shards: bool
    is_active: bool
    shards: int
    bytes: int


def address(text: str) -> Address:
    """Read HOST or HOST:PORT.

    Raises:
        DistributionError: it is neither.
    """
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, port = (host, port) if colon else (text, str(DEFAULT_PORT))
    if not _NAME.fullmatch(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise DistributionError(f"{text[:80]!r} is no address: use HOST or HOST:PORT")
    return Address(host.strip("[]"), int(port))


def nodes() -> list[Node]:
    """All nodes, the coordinator first."""
    return [
        Node(
            address=Address(host, port),
            is_coordinator=is_coordinator,
            has_shards=has_shards,
            is_active=is_active,
            shards=shards,
            bytes=size,
        )
        for host, port, is_coordinator, has_shards, is_active, shards, size in _rows(_NODES)
    ]


def has_coordinator() -> bool:
    """Return whether the coordinator has an address that other nodes can use."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass('pg_dist_node') IS NOT NULL")
        if not cursor.fetchone()[0]:
            return False
    return any(node.is_coordinator and node.address.host != "localhost" for node in nodes())


def set_coordinator(coordinator: Address) -> None:
    """Tell the nodes where the coordinator is. It has a copy of each table on every node, and no shards."""
    _rows("SELECT citus_set_coordinator_host(%s, %s)", [*coordinator])


def add(node: Address) -> bool:
    """Add a node, with the tables that are on every node; no shards yet. Returns False if it is there."""
    is_new = all(node != present.address for present in nodes())
    _rows("SELECT citus_add_node(%s, %s)", [*node])
    _rows("SELECT replicate_reference_tables('block_writes')")
    return is_new


def rebalance() -> None:
    """Move shards until all nodes have about the same number of bytes. Reads and writes go on."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET citus.rebalancer_by_disk_size_base_cost = '{SHARD_BASE_BYTES}B'")
        cursor.execute(
            "SELECT rebalance_table_shards(rebalance_strategy := 'by_disk_size', threshold := %s)", [BALANCE]
        )


def drain(node: Address, *, remove: bool = False) -> None:
    """Move all shards of a node to the others; with `remove`, take it out of the store then."""
    _rows("SELECT citus_drain_node(%s, %s)", [*node])
    if remove:
        _rows("SELECT citus_remove_node(%s, %s)", [*node])


def _rows(statement: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall())
