"""Files of other tools, imported into a real server, and read back from its store."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from agent.helpers.import_files import write_neptune
from dashboard.helpers.import_state import state
from helpers.live_servers import Server
from pyarrow import parquet

from fp8scope.cli.import_command import import_
from fp8scope.importing.neptune_loader import NeptuneLoader
from fp8scope_dashboard.receipts.dedup import message_counts
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries


@pytest.fixture(autouse=True)
def login(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


def write_csv(path: Path, rows: int, begin: str = "step,loss,learning_rate\n") -> Path:
    lines = [f"{step},{10 / (step + 1)!r},{1e-3 if step % 2 else ''}\n" for step in range(rows)]
    path.write_text(begin + "".join(lines))
    return path


def scalar(run: Run, name: str) -> tuple[list[int], list[float]]:
    line = queries.scalar(run.pk, name)
    return line.steps.tolist(), line.values.tolist()


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "gpt fp8.csv", 50)
    assert (
        import_([str(path), "--group", "fp8", "--baseline", "bf16", "--precision", "fp8", "--seed", "3"]) == 0
    )
    run = Run.objects.get()
    assert f"/runs/{run.pk}/  gpt fp8: 50 rows, 75 values" in capsys.readouterr().out
    assert (run.name, run.state, run.group, run.baseline) == ("gpt fp8", "finished", "fp8", "bf16")
    assert (run.precision, run.seed, run.rows_stored, run.rows_sent) == ("fp8", 3, 50, 50)
    assert scalar(run, "loss") == (list(range(50)), [10 / (step + 1) for step in range(50)])
    assert scalar(run, "learning_rate")[0] == list(range(1, 50, 2))


def test_importing_again_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "a.csv", 40_000)
    assert import_([str(path)]) == 0
    before = state()
    assert import_([str(path)]) == 0 and state() == before
    assert capsys.readouterr().out.splitlines()[1].endswith("a: nothing new")
    assert import_([str(path), "--copy", "second"]) == 0 and Run.objects.count() == 2


def test_a_file_that_has_grown_sends_only_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    for rows, new in ((20_000, 20_000), (20_001, 1), (50_000, 29_999), (50_000, 0), (90_000, 40_000)):
        write_csv(path, rows)
        assert import_([str(path)]) == 0
        out = capsys.readouterr().out
        assert f"a: {new:,} rows" in out if new else "nothing new" in out
        run = Run.objects.get()
        assert run.rows_stored == run.rows_sent == rows and run.points_stored == run.points_sent
        assert run.state == "finished"
        steps, values = scalar(run, "loss")
        assert steps == list(range(rows)) and values == [10 / (step + 1) for step in range(rows)]
    # A message of a number is never skipped, so that the page shows no gap.
    assert all(missing == 0 for _, missing in message_counts(run.pk).values())


def test_an_import_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", 40_000)
    whole = path.read_bytes()
    # The second half is damaged: what is before it is stored, and the run is not over.
    path.write_bytes(whole[: len(whole) // 2] + b'"' + b"x" * (17 << 20))
    assert import_([str(path)]) == 1
    run = Run.objects.get()
    assert 0 < run.rows_stored < 40_000 and run.state == "running"
    path.write_bytes(whole)
    assert import_([str(path)]) == 0
    run.refresh_from_db()
    assert run.rows_stored == run.rows_sent == 40_000 and run.state == "finished"


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1_000) * 10.0 ** rng.integers(-300, 300, 1_000)
    values[[0, 5, 9]] = math.nan, math.inf, -math.inf
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"step": i, "x": value}) + "\n" for i, value in enumerate(values.tolist()))
    )
    assert import_([str(path)]) == 0
    line = queries.scalar(Run.objects.get().pk, "x")
    np.testing.assert_array_equal(line.values, values)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="aimrocks has no wheels for Python 3.13")
def test_a_repository_of_aim_that_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agent.helpers.aim_repository import AimRepository

    repository, begin = AimRepository(tmp_path), 1.77e9

    def write(first: int, last: int, *names: str, ended: bool = False) -> None:
        metrics = [
            (
                name,
                {"subset": "train"},
                [(step, step / 7, step // 10, begin + step) for step in range(first, last)],
            )
            for name in names
        ]
        end = begin + last if ended else None
        repository.write_run("a1", name="gpt", metrics=metrics, created_at=begin, ended_at=end)

    write(0, 20, "loss")
    assert import_([str(tmp_path)]) == 0 and import_([str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("gpt: 20 rows, 60 values, 0 evaluations") and second.endswith("gpt: nothing new")
    assert Run.objects.get().state == "running"
    write(20, 50, "loss", ended=True)
    write(0, 50, "lr", ended=True)
    assert import_([str(tmp_path)]) == 0
    after = state()
    assert import_([str(tmp_path)]) == 0 and state() == after
    run, values = Run.objects.get(), [step / 7 for step in range(50)]
    assert (run.state, run.rows_sent, run.points_sent) == ("finished", run.rows_stored, run.points_stored)
    assert all(scalar(run, f"train/{name}") == (list(range(50)), values) for name in ("loss", "lr"))
    assert scalar(run, "epoch")[1] == [step // 10 for step in range(50)]


def test_the_loader_for_neptune_exporter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_neptune(tmp_path)
    loader = NeptuneLoader()
    # As its LoaderManager calls it.
    assert loader.find_run(project_id="team/project", run_name="gpt-1", experiment_id="gpt") is None
    target = loader.create_run(
        project_id="team/project",
        run_name="gpt-1",
        experiment_id=loader.create_experiment(project_id="team/project", experiment_name="gpt"),
        parent_run_id=None,
        fork_step=None,
        step_multiplier=10,
    )
    parts = (parquet.read_table(part) for part in sorted(tmp_path.iterdir()))
    loader.upload_run_data(run_data=parts, run_id=target, files_directory=tmp_path, step_multiplier=10)
    run = Run.objects.get()
    assert scalar(run, "train/loss") == (
        [10 * step for step in range(20)],
        [3 / (step + 1) for step in range(20)],
    )
    assert run.config == {"params": {"lr": 1e-3, "layers": 12}} and run.state == "finished"
    # The command knows the run by the same id: only steps that were not multiplied are new.
    assert import_([str(path)]) == 0 and Run.objects.count() == 1
