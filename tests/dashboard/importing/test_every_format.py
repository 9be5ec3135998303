"""Files of every format on a real server: their values are stored, and importing again stores nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from agent.helpers.import_files import WRITERS, write_csv, write_inspect_log, write_megatron, write_wandb
from agent.helpers.imported import ReadRun, read
from dashboard.helpers.import_state import state
from helpers.live_servers import Server

from fp8scope.cli.import_command import import_
from fp8scope.importing.registry import sources_of
from fp8scope.importing.sending import Wishes, run_id_of
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries


@pytest.fixture(autouse=True)
def login(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


def stored_run(name: str, run: ReadRun) -> Run:
    return Run.objects.get(pk=run_id_of(name, run.run.key, Wishes()))


def check_stored(run: Run, imported: ReadRun) -> None:
    """Every value of a file is stored, bit for bit, and nothing else."""
    for scalar in imported.names:
        line = queries.scalar(run.pk, scalar)
        expected = imported.series(scalar)
        assert line.steps.tolist() == sorted(expected), scalar
        np.testing.assert_array_equal(line.values, [expected[step] for step in sorted(expected)])
    assert set(run.last_scalars or {}) == {name for table in imported.tables for name in table.scalars}
    assert Evaluation.objects.filter(run=run).count() == len(imported.evaluations)
    for scores in imported.evaluations:
        row = Evaluation.objects.get(run=run, name=scores.name, metric=scores.metric, step=scores.step)
        assert row.items == list(scores.items) and row.item_ids == (scores.item_ids and list(scores.item_ids))
    assert run.rows_stored == sum(map(len, imported.tables))
    # A run that has not ended reports later what was sent.
    if imported.run.state != "running":
        assert (run.rows_sent, run.points_sent) == (run.rows_stored, run.points_stored)


def test_it_works(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    assert import_([str(tmp_path)]) == 0
    for name in WRITERS:
        for imported in read(tmp_path / name):
            run = stored_run(name, imported)
            check_stored(run, imported)
            assert (run.name, run.state) == (imported.run.name[:200], imported.run.state)
            assert run.environment["imported_from"] == name
    before = state()
    assert import_([str(tmp_path)]) == 0
    assert state() == before


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("csv", write_csv),
        ("wandb", write_wandb),
        ("te-inspect", write_inspect_log),
        ("megatron", write_megatron),
    ],
)
def test_files_that_grow(name: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    begin = whole[: len(whole) // 2] if name == "wandb" else b"".join(lines[: len(lines) * 3 // 5])
    for content in (begin, whole, whole):
        path.write_bytes(content)
        assert import_([str(path)]) == 0
    (form,) = [form for _, form in sources_of(path)]
    (imported,) = read(path)
    assert form.name == name
    run = stored_run(name, imported)
    for scalar in imported.names:
        expected = imported.series(scalar)
        line = queries.scalar(run.pk, scalar)
        assert dict(zip(line.steps.tolist(), line.values.tolist(), strict=True)) == expected, scalar
    assert run.rows_stored == run.rows_sent and run.state == imported.run.state
    assert Run.objects.count() == 1


def test_the_id_is_always_the_same() -> None:
    # Published: runs that were imported before are found again by it.
    assert run_id_of("wandb", '["e", "p", "r"]', Wishes()) == uuid.UUID(
        "fd49705f-34f5-5f54-8de1-646609dab863"
    )
    assert run_id_of("wandb", "a", Wishes()) != run_id_of("wandb", "a", Wishes(copy="b"))
    assert run_id_of("csv", "a", Wishes()) != run_id_of("wandb", "a", Wishes())
