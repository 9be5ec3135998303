"""Repositories as Aim writes them, read to the last value; docs/importing.md has what Aim itself wrote."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
from agent.helpers.import_files import WRITERS
from agent.helpers.import_score_files import BEGIN
from agent.helpers.imported import read

from fp8scope.importing.aim_encoding import decode_path, encode_path
from fp8scope.importing.formats.aim import FORMAT
from fp8scope.importing.model import UnreadableError
from fp8scope.importing.source import ImportSource

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="aimrocks has no wheels for Python 3.13")
LOSS = {step: 3 / (step + 1) for step in range(20)}


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """The files of a folder, with their times."""
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_it_works(tmp_path: Path) -> None:
    WRITERS["aim"](tmp_path)
    before = contents(tmp_path)
    ended, killed = read(tmp_path)
    for run in (ended, killed):
        assert run.series("train/loss") == run.series("loss") == LOSS
        assert run.series("0/val/loss") == {step: LOSS[step] for step in range(0, 20, 5)}
        odd = {step: math.nan if step == 3 else 10.0**-step for step in range(20)}
        assert repr(run.series("odd")) == repr(odd)
        assert run.series("epoch") == {step: step // 10 for step in range(20)}
        hyper = {"lr": 1e-3, "seed": 7, "layers": [1, {"x": True}], "none": None}
        assert run.run.config == {"hparams": hyper, "batch": 4} and run.run.seed == 7
        assert run.run.tags == ["a", "b"] and run.run.environment["experiment"] == "exp"
        assert "Sequences that are no numbers were left out: 1 of aim.image." in run.run.notes
        (table,) = run.tables
        # A row has the time of its latest value.
        assert table.times is not None and table.times[0] == round((BEGIN + 0.5) * 1e6)
    assert (ended.run.name, ended.run.state) == ("gpt fp8", "finished")
    assert (ended.run.created_at, ended.run.finished_at) == (BEGIN, BEGIN + 20)
    assert (killed.run.state, killed.run.finished_at) == ("running", None)
    assert contents(tmp_path) == before


def test_contexts_that_share_a_name_stay_apart(tmp_path: Path) -> None:
    from agent.helpers.aim_repository import AimRepository

    def points(first: int) -> list[tuple[int, float, float | None, float]]:
        return [(step, step / first, None, BEGIN + first + step) for step in range(3)]

    metrics = [("loss", {"b": 1}, points(9)), ("loss", {"a": 1}, points(7)), ("1/loss", {}, points(8))]
    system = [("__system__cpu", {"gpu": 0}, [(0, 5.0, None, BEGIN + 8.5), (1, 6.0, None, BEGIN + 100)])]
    AimRepository(tmp_path).write_run("a1", metrics=[*metrics, *system], created_at=BEGIN, ended_at=None)
    (run,) = read(tmp_path)
    assert run.series("1/loss") == {step: step / 7 for step in range(3)}
    others = {name: run.series(name) for name in run.names - {"1/loss", "system/0/cpu"}}
    assert {values[2] for values in others.values()} == {2 / 8, 2 / 9} and len(others) == 2
    # Aim counts what it measures of the machine apart: it lies where the training was.
    assert run.series("system/0/cpu") == {1: 5.0, 2: 6.0}


def test_a_damaged_run_keeps_back_no_other(tmp_path: Path) -> None:
    WRITERS["aim"](tmp_path)
    store = tmp_path / ".aim" / "seqs" / "chunks" / "3f0c9c5e00004000"
    (store / "CURRENT").write_bytes(b"MANIFEST-999999\n")
    tables = []
    with pytest.raises(UnreadableError, match=r"1 of 2 runs are damaged.*cannot be read as RocksDB"):
        for run in FORMAT.read(ImportSource(path=tmp_path)):
            tables.append(len(list(run.parts)))
    assert tables == [0, 1]


def test_without_aimrocks_the_refusal_says_what_to_install(tmp_path: Path) -> None:
    WRITERS["aim"](tmp_path)
    program = (
        "import sys; sys.modules['aimrocks'] = None; from fp8scope.cli.main import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "import", "--dry-run", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.endswith("pip install 'fp8scope[aim]'") and "damaged" not in line


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".aim").mkdir()
    with pytest.raises(UnreadableError, match="has no runs of Aim"):
        read(tmp_path)


def test_a_path_is_what_it_was_made_of() -> None:
    for parts in ((), ("meta", "α-γ", 0), (-1, 2**63 - 1, -(2**63), "x"), (0xFEFEFEFEFEFEFE,)):
        assert decode_path(encode_path(*parts)) == parts
    for damaged in (b"x", b"\xfe", b"\xfe123", b"\xff\xfe", b"\xfe" + bytes(8)):
        with pytest.raises(UnreadableError, match="malformed"):
            decode_path(damaged)
