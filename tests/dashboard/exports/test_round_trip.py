"""An export and import preserves every value, gap, writer, score and report of a run."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from contract.helpers.wire_client import WireClient
from dashboard.helpers.logged_media import log, log_examples
from dashboard.helpers.recording import Recorder
from dashboard.helpers.reporting import ANNOTATION, BISECT, REFERENCE
from dashboard.helpers.round_trip import (
    everything,
    moved,
    rewritten,
    settings_of,
)
from django.core.cache import cache
from helpers.live_servers import Server

from fp8scope.cli import export
from fp8scope.cli.archive import Archive
from fp8scope.cli.export import download
from fp8scope.cli.import_run import Upload
from fp8scope.cli.main import main
from fp8scope.config import Settings
from fp8scope.importing.posting import TransferError
from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.media.models import MediaContent
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import compaction

NAMES = ["blocks.0.up.input", "blocks.0.up.weight", 'odd "name", with comma']
FORMATS = ("parquet", "csv")
CONFIG = {"lr": 1e-3, "text": 'a "quoted", text\nof two lines', "nested": {"deep": [1, None, True]}}


@pytest.fixture
def client(server: Server) -> WireClient:
    """Two ranks, one of them with two attempts, values of every kind, and catalogues of different order."""
    first = WireClient(server.url, server.token)
    fields = {
        "name": "the run",
        "precision": "fp8",
        "recipe": {"name": "delayed"},
        "config": CONFIG,
        "seed": 7,
    }
    summary = {"best": {"loss": 1.5}}
    first.register(**fields, tags=["a", "b"], group="g", baseline="bf16", total_steps=99, summary=summary)
    first.catalogue(NAMES)
    nan, inf = math.nan, math.inf
    loss = [1.5, nan, inf, -inf, None]
    amax = [
        [1.0, None, 1e-310],
        [None, None, None],
        [inf, 0.1, -0.0],
        [2.0**-1074, 3.0, 4.0],
        [5.0, 6.0, 1e308],
    ]
    first.send(first.batch(0, [1, 2, 3, 4, 5], scalars={"loss": loss}, tensors={"amax": amax}))
    first.send(first.batch(1, [6, 7], scalars={"loss": [0.1, 0.2], "lr": [None, 1e-5]}))
    scores = {"writer": str(first.writer), "seq": 2, "step": 7, "name": "heldout", "metric": "accuracy",
              "kind": "proportion",
              "items": [1, 0, 1], "item_ids": ["x", "y", "z"], "clusters": ["c", "c", "d"],
              "precision": "fp8", "margin": 0.02}  # fmt: skip
    assert first.request("POST", "/evaluations", json=scores).status == 201
    first.send(first.batch(3, [8], tensors={"amax": [[7.0, 8.0, 9.0]], "underflow": [[1.0, 2.0, None]]}))
    for seq, report in enumerate((BISECT, REFERENCE, ANNOTATION), start=4):
        document = {**report, "writer": str(first.writer), "seq": seq}
        assert first.request("POST", "/reports", json=document).status == 201
    other = WireClient(server.url, server.token, run=first.run)
    other.catalogue(NAMES[::-1][:2], rank=1, hostname="node2")
    other.send(other.batch(0, [1, 2], tensors={"amax": [[1.0, 2.0], [3.0, 4.0]]}))
    sizes = {"weight_bytes": 300, "model_bytes": 700, "seconds": 1.5, "layers": 6, "left": 2}
    cell = {**scores, "writer": str(other.writer), "seq": 1, "precision": "fp6", "matrix": sizes}
    assert other.request("POST", "/evaluations", json=cell).status == 201
    again = WireClient(server.url, server.token, run=first.run)
    again.catalogue(NAMES, attempt=1)
    again.send(again.batch(0, [4, 5], scalars={"loss": [9.0, 8.0]}, tensors={"amax": [[1.0] * 3, [2.0] * 3]}))
    end = {
        "seq": 1,
        "state": "failed",
        "error": "Traceback: é",
        "rows_sent": 2,
        "points_sent": 8,
        "dropped": 3,
        "errors": 1,
    }
    assert again.request("POST", "/finish", json={**end, "writer": str(again.writer)}).status == 201
    return first


@pytest.mark.parametrize("form", FORMATS)
def test_it_works(server: Server, client: WireClient, tmp_path: Path, form: str) -> None:
    new = moved(server, client.run, form, tmp_path / "run")
    assert new != client.run
    assert everything(new) == everything(client.run)


def test_a_compacted_run_survives_a_round_trip(server: Server, client: WireClient, tmp_path: Path) -> None:
    before = everything(client.run)
    while compaction.compact_run(client.run):
        pass
    assert everything(moved(server, client.run, "parquet", tmp_path / "run")) == before


def test_a_second_import_changes_nothing(server: Server, client: WireClient, tmp_path: Path) -> None:
    new = moved(server, client.run, "csv", tmp_path / "run")
    first = everything(new)
    assert moved(server, client.run, "csv", tmp_path / "run") == new
    assert everything(new) == first


def test_media_survive_a_round_trip(server: Server, client: WireClient, tmp_path: Path) -> None:
    """Into another project: there, each content is stored once, too."""
    recorder = Recorder(run=Run.objects.get())
    log_examples(recorder, 1)
    log(recorder, "again", b"lr: 1e-3", step=4)
    other = Project.objects.create(slug="other", name="Other")
    _, token = create_token(other, "agent", scopes=[Scope.WRITE])
    before = everything(client.run)
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)
    assert Archive(path).description["format"] == 5
    upload = Upload(Settings(url=server.url, token=token), Archive(path))
    rows = list(upload.send())
    assert rows[-1] == upload.archive.rows and not upload.left_out
    assert everything(uuid.UUID(upload.run)) == before and len(before["media"]) == 7
    assert MediaContent.objects.filter(project=other).count() == 6
    # As text there are no media.
    assert Archive(_downloaded(server, client.run, "csv", tmp_path / "run")).description["format"] == 4


def test_damaged_media_are_left_out_and_said(server: Server, client: WireClient, tmp_path: Path) -> None:
    log(Recorder(run=Run.objects.get()), "sample", b"Once upon a time", step=4)
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)

    def damage(table: pa.Table, _: dict[str, Any]) -> pa.Table:
        contents = [None if body is None else b"x" for body in table["content"].to_pylist()]
        at = table.schema.get_field_index("content")
        return table.set_column(at, "content", pa.array(contents, pa.binary()))

    rewritten(path, damage)
    upload = Upload(settings_of(server), Archive(path))
    list(upload.send())
    assert sum(upload.left_out.values()) == 1 and "SHA-256" in next(iter(upload.left_out))


def test_pyarrow_reads_a_parquet_export(server: Server, client: WireClient, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)
    table = pyarrow.parquet.read_table(path)
    assert table.num_rows == Run.objects.get().rows_stored + 2 + 3
    assert table.schema.names[:4] == ["writer", "seq", "step", "time"]
    assert {"scalar:loss", "scalar:lr", "tensor:amax", "tensor:underflow", "evaluation", "report"} <= set(
        table.schema.names
    )


def test_a_run_without_rows_survives_a_round_trip(server: Server, tmp_path: Path) -> None:
    empty = WireClient(server.url, server.token)
    empty.register(name="empty")
    for form in FORMATS:
        assert Archive(_downloaded(server, empty.run, form, tmp_path / form)).description["rows"] == 0
    new = moved(server, empty.run, "parquet", tmp_path / "again")
    assert Run.objects.get(pk=new).name == "empty"


def _downloaded(server: Server, run: uuid.UUID, form: str, path: Path) -> Path:
    download(settings_of(server), run, form, path)
    return path


def test_downloads_report_the_rows_written(
    server: Server, client: WireClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    rows_written = export._rows_written

    def recorded(*arguments: Any) -> int:
        counts.append(rows_written(*arguments))
        return counts[-1]

    monkeypatch.setattr(export, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(export, "_rows_written", recorded)
    for form, magic in (("parquet", b"PAR1"), ("csv", b"#fp8")):
        path = _downloaded(server, client.run, form, tmp_path / form)
        assert path.read_bytes().startswith(magic)
        assert counts[-1] == Archive(path).rows == 17
    cache.clear()


def test_progress_is_reported(server: Server, client: WireClient) -> None:
    name = uuid.uuid4()
    answer = client.request("GET", f"/export?format=csv&progress={name}")
    assert answer.status == 200
    assert answer.headers["X-Fp8scope-Rows"] == "17"
    assert "attachment" in answer.headers["Content-Disposition"]
    progress = client.request("GET", f"/export/{name}").json
    assert progress == {"rows": 17, "rows_written": 17}
    progress = client.request("GET", f"/export/{uuid.uuid4()}").json
    assert progress == {"rows": 12, "rows_written": None}
    cache.clear()


def test_unknown_runs_and_formats_are_errors(server: Server, client: WireClient, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no run"):
        download(settings_of(server), uuid.uuid4(), "parquet", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert client.request("GET", "/export?format=xlsx").status == 422


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"step,loss\n1,2\n",
        b"#fp8scope nonsense\n",
        b'#fp8scope {"format": 99}\n',
        b'#fp8scope {"format": 1}\n',
    ],
)
def test_refuses_files_of_other_programs(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TransferError, match="file"):
        Archive(path)


def test_deletion_over_the_api(server: Server, client: WireClient) -> None:
    other = WireClient(server.url, None, run=client.run)
    assert other.request("DELETE").status == 401
    first = client.request("DELETE")
    assert (first.status, first.json["done"]) == (202, False) and first.json["bytes_left"] > 0
    assert client.request("GET").code == "unknown_run"
    assert client.register().code == "run_conflict"
    from fp8scope_dashboard.telemetry.deletion import delete_run

    delete_run(client.run)
    last = client.request("DELETE")
    assert (last.status, last.json) == (200, {"done": True, "share": 1.0, "bytes_left": 0})
    assert WireClient(server.url, server.token).request("DELETE").code == "unknown_run"


def test_the_command_line_exports_and_imports(
    server: Server,
    client: WireClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    assert main(["export", str(client.run), "--format", "csv"]) == 0
    path = Path(f"{client.run}.csv")
    assert f"{path}: {path.stat().st_size:,} bytes" in capsys.readouterr().out
    new = uuid.uuid4()
    assert main(["import", str(path), "--id", str(new)]) == 0
    assert str(new) in capsys.readouterr().out
    assert everything(new) == everything(client.run)
    assert main(["export", str(uuid.uuid4())]) == 1
    assert "has no run" in capsys.readouterr().err
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_wrong")
    assert main(["import", str(path)]) == 1
    assert "token" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [tmp_path / path]
