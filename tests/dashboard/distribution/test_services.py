"""Nodes and errors of the distributed store, on a PostgreSQL without Citus."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connection

from fp8scope_dashboard.administration.command import _parser, _run_action
from fp8scope_dashboard.administration.errors import AdminError
from fp8scope_dashboard.distribution import catalogue, nodes, services
from fp8scope_dashboard.distribution.apps import _without_foreign_keys
from fp8scope_dashboard.distribution.errors import DistributionError
from fp8scope_dashboard.distribution.nodes import Address
from fp8scope_dashboard.servers.configuration import DataDir

pytestmark = pytest.mark.django_db


def test_it_works() -> None:
    assert not catalogue.has_citus(connection) and not catalogue.is_distributed(connection)
    with pytest.raises(DistributionError, match="has no extension Citus: install it"):
        services.create_extension()


def test_migrations_of_one_server_make_foreign_keys() -> None:
    _without_foreign_keys(connection.alias)
    assert connection.features.supports_foreign_keys


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("db1", ("db1", 5432)),
        ("db1.example.org:5433", ("db1.example.org", 5433)),
        ("[fd00::1]:5433", ("fd00::1", 5433)),
        ("[fd00::1]", ("fd00::1", 5432)),
    ],
)
def test_reads_addresses(text: str, expected: tuple[str, int]) -> None:
    assert nodes.address(text) == Address(*expected)


@pytest.mark.parametrize(
    "text", ["", ":5432", "db1:", "db1:0", "db1:65536", "db 1", "a;b", "a:1:2", "fd00::1"]
)
def test_refuses_other_texts(text: str) -> None:
    with pytest.raises(DistributionError, match="is no address: use HOST"):
        nodes.address(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("distribute",), "has no extension Citus"),
        (("distribute", "--shards", "0"), "1 to 1,024 shards"),
        (("distribute", "--node", "db1"), "give --coordinator"),
        (("nodes",), "this store is on one server"),
    ],
)
def test_the_command_says_what_to_do(arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    options = _parser().parse_args(arguments)
    with pytest.raises(AdminError, match=reason):
        _run_action(options, DataDir(tmp_path), is_running=True)
