"""Runs with other numbers of ranks are paired if each step has the same samples."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from contract.helpers.hashed_training import train, train_ranks
from helpers.live_servers import Server
from helpers.process_group import run_ranks

from fp8scope_dashboard.analysis import reading
from fp8scope_dashboard.analysis.losses.alignment import align
from fp8scope_dashboard.runs.models import Writer


def paired(one: str, other: str) -> str:
    readings, _ = reading.read_arms([UUID(one), UUID(other)], [])
    curves = [each.curve for each in readings]
    assert all(curve.data_hash is not None for curve in curves)
    return align(curves).paired


def test_it_works(server: Server, tmp_path: Path) -> None:
    options = {"url": server.url, "token": server.token, "directory": tmp_path}
    alone = train(0, 1, options)
    ranks = run_ranks(train_ranks, 2, options)
    assert ranks[0] == ranks[1]
    same, other = ranks[0]
    assert [Writer.objects.filter(run__pk=run).count() for run in (alone, same, other)] == [1, 2, 2]
    assert paired(alone, same) == "data"
    assert paired(alone, other) == "no"
