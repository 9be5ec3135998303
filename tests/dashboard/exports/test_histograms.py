"""Exponent histograms survive an export and import; damaged files are refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from contract.helpers.histograms import counts, message, send
from contract.helpers.wire_client import WireClient
from dashboard.helpers.round_trip import everything, moved, rewritten, settings_of
from helpers.live_servers import Server
from pyarrow import parquet

from fp8scope.cli.archive import BINS, Archive
from fp8scope.cli.export import download
from fp8scope.cli.import_command import import_
from fp8scope.cli.import_run import Upload
from fp8scope.importing.posting import TransferError
from fp8scope_dashboard.exports import content
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.histograms import EXPONENT_BINS
from fp8scope_dashboard.telemetry.models import Histogram

NAMES = ["a.input", "b.input", "c.input"]
# 3 + 1 + 1 of the first writer, 1 + 1 of the other rank, 1 of the second attempt.
HISTOGRAMS = 8


def put(client: WireClient, seq: int, step: int, histograms: Mapping[int, Sequence[float]]) -> None:
    assert send(client, message(client, seq, step, histograms)).status == 201


@pytest.fixture
def client(server: Server) -> WireClient:
    """Two ranks and a second attempt with catalogues of different order. One step was sampled twice."""
    first = WireClient(server.url, server.token)
    first.register(name="sampled")
    first.catalogue(NAMES)
    put(first, 0, 0, {0: counts(e0=5, zero=2), 1: counts(em3=7, bad=1), 2: counts(em149=2**53, e127=1)})
    first.send(first.batch(1, [0, 1], scalars={"loss": [2.0, 1.0]}, tensors={"amax": [[1.0, 2.0, 3.0]] * 2}))
    put(first, 2, 100, {1: counts(e1=6)})
    put(first, 3, 100, {1: counts(e2=16)})
    other = WireClient(server.url, server.token, run=first.run)
    other.catalogue([NAMES[2], NAMES[0]], rank=1)
    put(other, 0, 0, {1: counts(e0=3, e5=2), 0: counts(e9=1)})
    other.send(other.batch(1, [0], tensors={"amax": [[1.0, 2.0]]}))
    again = WireClient(server.url, server.token, run=first.run)
    again.catalogue([NAMES[1]], attempt=1)
    again.send(again.batch(0, [50], scalars={"loss": [3.0]}))
    put(again, 1, 60, {0: counts(em1=9)})
    return first


def answers(run_id: uuid.UUID, tensors: int = len(NAMES)) -> list[Any]:
    """The results of `queries.histogram` for each tensor at some steps and over all steps."""
    results = []
    for tensor in range(tensors):
        for step in (None, 0, 10, 60, 100):
            histogram = queries.histogram(run_id, tensor, step)
            results.append(
                histogram
                and (histogram.step, histogram.zeros, histogram.counts.tobytes(), histogram.nonfinite)
            )
    return results


def stored(run_id: uuid.UUID) -> list[Any]:
    """Every histogram in the order of sending, regardless of its message."""
    histograms: list[Any] = []
    for writer in queries.writers(run_id):
        seq = 0
        while (rows := queries.histogram_rows(run_id, writer, seq, 1)) is not None:
            seq = int(rows.seqs[-1]) + 1
            columns = (rows.steps, rows.times.astype(str), rows.tensors, rows.counts)
            histograms += [(writer, *row) for row in zip(*(each.tolist() for each in columns), strict=True)]
    return histograms


def test_it_works(server: Server, client: WireClient, tmp_path: Path) -> None:
    new = moved(server, client.run, "parquet", tmp_path / "run")
    assert answers(new) == answers(client.run) and None not in answers(new)
    assert stored(new) == stored(client.run) and len(stored(new)) == HISTOGRAMS
    assert everything(new) == everything(client.run)
    merged = queries.histogram(new, 0)
    assert merged is not None and merged.total == 5 + 2 + 3 + 2


def test_a_second_import_changes_nothing(server: Server, client: WireClient, tmp_path: Path) -> None:
    new = moved(server, client.run, "parquet", tmp_path / "run")
    assert moved(server, client.run, "parquet", tmp_path / "run") == new
    assert stored(new) == stored(client.run)


def test_a_csv_export_has_no_histograms(server: Server, client: WireClient, tmp_path: Path) -> None:
    new = moved(server, client.run, "csv", tmp_path / "run")
    assert stored(new) == [] and everything(new) == everything(client.run)


def test_an_export_has_a_row_per_histogram(server: Server, client: WireClient, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)
    frame = parquet.read_table(path).to_pylist()
    rows = [row for row in frame if row["histogram"] is not None]
    assert len(rows) == HISTOGRAMS and len(frame) == Archive(path).rows == HISTOGRAMS + 4
    assert (rows[1]["writer"], rows[1]["seq"], rows[1]["step"], rows[1]["tensor"]) == (0, 0, 0, 1)
    assert rows[1]["histogram"] == counts(em3=7, bad=1) and rows[1]["scalar:loss"] is None
    assert rows[1]["tensor:amax"] is None and rows[1]["time"] is not None


def test_progress_counts_histograms(client: WireClient) -> None:
    name = uuid.uuid4()
    answer = client.request("GET", f"/export?progress={name}")
    rows = HISTOGRAMS + 4
    assert answer.headers["X-Fp8scope-Rows"] == str(rows)
    assert client.request("GET", f"/export/{name}").json == {"rows": rows, "rows_written": rows}


def test_splits_histograms_of_many_tensors_into_messages(server: Server, tmp_path: Path) -> None:
    """The import splits a step of 4,500 tensors into several messages, and the export into several pieces."""
    big = WireClient(server.url, server.token)
    big.register(name="big")
    big.catalogue([f"layers.{i}.input" for i in range(4500)])
    for seq in range(2):
        put(big, seq, seq, {i: counts(e0=i + 1, em2=seq) for i in range(4500)})
    new = moved(server, big.run, "parquet", tmp_path / "run")
    assert Histogram.objects.filter(run_id=new).count() > 2
    assert stored(new) == stored(big.run) and len(stored(new)) == 9000
    for tensor in (0, 3800, 4499):
        for step in (0, None):
            (imported, original) = (queries.histogram(run, tensor, step) for run in (new, big.run))
            assert imported is not None and original is not None
            assert (imported.step, list(imported.counts)) == (original.step, list(original.counts))
    pieces = list(content.content_of(Run.objects.get(pk=big.run), with_binary=True).pieces())
    assert max(piece.nbytes for piece in pieces) < 10 * content.MAX_CELLS


def test_an_export_continues_if_retention_deletes_histograms(server: Server, client: WireClient) -> None:
    pieces = content.content_of(Run.objects.get(), with_binary=True).pieces()
    next(pieces)
    Histogram.objects.all().delete()
    rows = sum(piece.num_rows for piece in pieces)
    assert rows == 2


def test_an_export_omits_tensors_registered_after_its_start(client: WireClient) -> None:
    begun = content.content_of(Run.objects.get(), with_binary=True)
    client.catalogue(["d.input"], offset=3)
    put(client, 4, 200, {3: counts(e0=1), 0: counts(e0=2)})
    rows = pa.Table.from_batches(list(begun.pieces())).to_pylist()
    assert [(row["step"], row["tensor"]) for row in rows if row["step"] == 200] == [(200, 0)]


def column(table: pa.Table, name: str, change: Callable[[Any], Any]) -> pa.Table:
    """The table with the values of a column changed, nulls excepted."""
    values = [None if value is None else change(value) for value in table.column(name).to_pylist()]
    field = table.schema.field(name)
    return table.set_column(table.schema.names.index(name), field, pa.array(values, field.type))


def test_imports_a_file_of_the_first_format(server: Server, client: WireClient, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)

    def earlier(table: pa.Table, description: dict[str, Any]) -> pa.Table:
        description["format"] = 1
        del description["histograms"], description["documents"]
        chosen = [row is None for row in table.column("histogram").to_pylist()]
        return table.filter(pa.array(chosen)).drop_columns(["report", "tensor", "histogram"])

    rewritten(path, earlier)
    upload = Upload(settings_of(server), Archive(path))
    assert list(upload.send())[-1] == Archive(path).rows == 4
    assert everything(uuid.UUID(upload.run)) == everything(client.run)


BAD: dict[str, tuple[Callable[[pa.Table, dict[str, Any]], pa.Table], str]] = {
    "too few bins": (lambda t, d: column(t, "histogram", lambda _: [1.0]), "does not have 279 numbers"),
    "no list": (
        lambda t, d: t.set_column(t.schema.names.index("histogram"), "histogram", t.column("tensor")),
        "does not have 279 numbers",
    ),
    "a count that is missing": (
        lambda t, d: column(t, "histogram", lambda _: [None] * BINS),
        "count is null",
    ),
    "a negative count": (lambda t, d: column(t, "histogram", lambda _: [-1.0] * BINS), "negative"),
    "an unknown tensor": (lambda t, d: column(t, "tensor", lambda _: 3), "tensor 3 of a histogram"),
    "no tensor": (lambda t, d: column(t, "tensor", lambda _: None), "tensor None of a histogram"),
    "no tensors": (lambda t, d: t.drop_columns(["tensor"]), "histograms have no tensor"),
    "a tensor twice": (lambda t, d: column(t, "tensor", lambda _: 1), "repeated"),
    "no time": (lambda t, d: column(t, "time", lambda _: None), "time"),
    "an unknown writer": (lambda t, d: column(t, "writer", lambda _: 3), "does not describe"),
    "no step": (lambda t, d: t.drop_columns(["step"]), "no column step"),
    "no writers": (lambda t, d: d.pop("writers") and t, "has no writers"),
    "no document": (
        lambda t, d: t.set_column(
            t.schema.names.index("report"), "report", pa.array(["{"] * t.num_rows, pa.string())
        ).drop_columns(["histogram"]),
        "report is not a JSON object",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_refuses_a_damaged_file(server: Server, client: WireClient, tmp_path: Path, what: str) -> None:
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)
    change, message = BAD[what]
    rewritten(path, change)
    with pytest.raises(TransferError, match=message):
        list(Upload(settings_of(server), Archive(path)).send())


def test_the_command_prints_the_error(
    server: Server,
    client: WireClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", str(server.token))
    path = tmp_path / "run.parquet"
    download(settings_of(server), client.run, "parquet", path)
    assert import_([str(path)]) == 0
    rewritten(path, BAD["too few bins"][0])
    assert import_([str(path), "--id", str(uuid.uuid4())]) == 1
    assert "does not have 279 numbers" in capsys.readouterr().err


def test_agent_and_server_have_the_same_bins() -> None:
    assert BINS == EXPONENT_BINS
