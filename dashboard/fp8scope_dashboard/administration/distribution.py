"""The actions of `fp8scope admin` for a store on several servers: distribute, nodes, rebalance, drain."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fp8scope_dashboard.administration.errors import AdminError
from fp8scope_dashboard.servers.configuration import DataDir


def add_parsers(actions: Any) -> None:
    """Add the four actions to the parsers of `fp8scope admin`."""
    distribute = actions.add_parser(
        "distribute",
        help="distribute the tables of runs over servers with Citus, or add servers; may be repeated",
    )
    distribute.add_argument(
        "--coordinator", metavar="HOST[:PORT]", help="where the other nodes reach this database"
    )
    distribute.add_argument(
        "--node", metavar="HOST[:PORT]", action="append", default=[], help="a node to add; may be repeated"
    )
    distribute.add_argument(
        "--shards", type=int, help="the number of shards; only before the first time (default: 32)"
    )
    actions.add_parser("nodes", help="list the nodes of a distributed store, with their shards and bytes")
    actions.add_parser("rebalance", help="move shards until all nodes have about the same number of bytes")
    drain = actions.add_parser("drain", help="move all shards of a node to the others")
    drain.add_argument("node", metavar="HOST[:PORT]")
    drain.add_argument("--remove", action="store_true", help="take it out of the store then")


def distribute(options: argparse.Namespace, data: DataDir) -> None:
    """Add the nodes that are given, and bring every table to its location."""
    # Settings must be set up before the database is used; this also applies below.
    from fp8scope_dashboard.distribution import nodes, services

    shards = services.DEFAULT_SHARDS if options.shards is None else options.shards
    with _errors():
        if not 1 <= shards <= services.MAX_SHARDS:
            raise AdminError(f"a store has 1 to {services.MAX_SHARDS:,} shards")
        if options.node and not options.coordinator and not nodes.has_coordinator():
            raise AdminError("nodes need the address of this database: give --coordinator HOST[:PORT]")
        coordinator = nodes.address(options.coordinator) if options.coordinator else None
        added = [nodes.address(text) for text in options.node]
        services.create_extension()
        if coordinator is not None:
            nodes.set_coordinator(coordinator)
        for node in added:
            print(f"{node}: {'added' if nodes.add(node) else 'is there'}", file=sys.stderr, flush=True)
        count = services.distribute(shards=shards, note=_note)
        print(f"{count} statements. Every table is at its location.", file=sys.stderr)
        if added:
            print("New nodes have no shards yet: `fp8scope admin rebalance` moves some.", file=sys.stderr)


def show(options: argparse.Namespace, data: DataDir) -> None:
    """List the nodes."""
    from fp8scope_dashboard.distribution import nodes

    with _errors():
        _check_distributed()
        for node in nodes.nodes():
            role = "coordinator" if node.is_coordinator else "worker"
            state = "" if node.is_active else "\tnot active"
            print(f"{node.address}\t{role}\t{node.shards} shards\t{node.bytes / 1e6:,.0f} MB{state}")


def rebalance(options: argparse.Namespace, data: DataDir) -> None:
    """Move shards between nodes."""
    from fp8scope_dashboard.distribution import nodes

    with _errors():
        _check_distributed()
        nodes.rebalance()
    show(options, data)


def drain(options: argparse.Namespace, data: DataDir) -> None:
    """Move all shards of a node away."""
    from fp8scope_dashboard.distribution import nodes

    with _errors():
        _check_distributed()
        nodes.drain(nodes.address(options.node), remove=options.remove)
    show(options, data)


def _check_distributed() -> None:
    from django.db import connection

    from fp8scope_dashboard.distribution import catalogue

    if not catalogue.is_distributed(connection):
        raise AdminError("this store is on one server: `fp8scope admin distribute` distributes it")


def _note(statement: str) -> None:
    print(statement, file=sys.stderr, flush=True)


@contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of the distribution into those of the command."""
    from fp8scope_dashboard.distribution.errors import DistributionError

    try:
        yield
    except DistributionError as error:
        raise AdminError(str(error)) from error
