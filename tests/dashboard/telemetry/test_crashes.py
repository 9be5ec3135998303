"""A worker that is killed between any two statements neither loses nor duplicates rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recorder import Recorder
from django.db import connection
from helpers.live_servers import process_environment
from helpers.waiting import wait_until

from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.models import Block, Chunk, Rolling, RollUp, Tile

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def recorder() -> Recorder:
    """A finished run of two ranks with several batches, one of which arrived late."""
    recorder = Recorder.of_new_run(["a", "b"])
    second = recorder.another(rank=1, tensors=["b", "a"])
    random = np.random.default_rng(0)
    for batch in (0, 1, 3, 4, 2, 5):
        for writer in (recorder, second):
            steps = range(batch * 30, batch * 30 + 30)
            values = random.integers(0, 5, (30, 2)).astype(float)
            writer.send(steps, {"loss": random.random(30).tolist()}, {"amax": values}, seq=batch)
    Run.objects.update(state=RunState.FINISHED)
    return recorder


@pytest.fixture
def worker(recorder: Recorder) -> Iterator[subprocess.Popen[str]]:
    """A process that compacts and kills itself at a given moment; see helpers/crashing.py."""
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "crashing.py"),
        str(recorder.run.id),
    ]
    with subprocess.Popen(
        command, env=process_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def compact_until(worker: subprocess.Popen[str], moments: int) -> str:
    """Let the worker make one change and die at this moment. Returns its answer once its lock is free."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{moments}\n")
    worker.stdin.flush()
    answer = worker.stdout.readline().strip()
    # PostgreSQL releases the lock when it detects that the client is gone.
    wait_until(is_unlocked, "PostgreSQL releases the lock")
    return answer


def is_unlocked() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        return bool(cursor.fetchone() == (0,))


def everything(recorder: Recorder) -> list[Any]:
    run = recorder.run.id
    loss = queries.scalar(run, "loss")
    results: list[Any] = [loss.steps.tolist(), loss.values.tolist(), loss.times.tolist()]
    for index in range(2):
        series = queries.tensor_series(run, index, "amax")
        results += [series.steps.tolist(), series.values.tolist()]
    results.append(queries.heatmap(run, "amax", columns=2).values.tolist())
    for writer in queries.writers(run):
        pieces = queries.stream(run, writer, 0, 1000)
        results.append(np.concatenate([data.scalars["loss"] for _, data in pieces]).tolist())
    return results


def check_store_is_consistent() -> None:
    """Each row is stored once, and each block has its tiles."""
    rows = [*Chunk.objects.values_list("rows", flat=True), *Block.objects.values_list("rows", flat=True)]
    assert sum(rows) == 2 * 180
    axes = Tile.objects.filter(name="axis").values_list("writer", "seq")
    assert sorted(axes) == sorted(Block.objects.values_list("writer", "seq"))


def test_it_works(recorder: Recorder, worker: subprocess.Popen[str]) -> None:
    """Half of the changes are killed at every 21st moment, the others before and after the commit."""
    before = everything(recorder)
    kills = {"between statements": 0, "before the commit": 0, "after the commit": 0}
    for change in range(100):
        if change % 2:
            assert compact_until(worker, -1) == "killed"
            kills["before the commit"] += 1
            check_store_is_consistent()
            assert compact_until(worker, -2) == "killed"
            kills["after the commit"] += 1
            check_store_is_consistent()
            assert everything(recorder) == before
            continue
        # An odd stride alternates between moments before and after a statement.
        for moment in range(1, 1000, 21):
            answer = compact_until(worker, moment)
            if answer != "killed":
                break
            kills["between statements"] += 1
            check_store_is_consistent()
        assert everything(recorder) == before
        if answer == "done 0":
            break
    assert not Chunk.objects.exists()
    assert RollUp.objects.exists()
    assert not Rolling.objects.get().pending
    assert kills["between statements"] >= 8
    assert kills["after the commit"] >= 2


def test_the_database_ends_the_connection(recorder: Recorder, worker: subprocess.Popen[str]) -> None:
    """As after a crash or restart of PostgreSQL: the whole change is rolled back."""
    from fp8scope_dashboard.telemetry import compaction

    before = everything(recorder)
    ended: list[int] = []

    def end(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if "telemetry_block" in sql and sql.startswith("INSERT") and not ended:
            ended.append(connection.connection.info.backend_pid)
            with context["connection"].connection.__class__.connect(
                connection.connection.info.dsn, autocommit=True
            ) as other:
                other.execute("SELECT pg_terminate_backend(%s)", ended)
        return result

    with connection.execute_wrapper(end), pytest.raises(Exception, match=r"terminat|closed|lost"):
        compaction.compact_run(recorder.run.id)
    connection.close()
    assert ended
    assert not Block.objects.exists()
    assert everything(recorder) == before
    while compaction.compact_run(recorder.run.id):
        pass
    assert everything(recorder) == before
    assert not Chunk.objects.exists()
