"""`fp8scope export --to`: other tools read the same values, steps and times as the client."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
import urllib3
from contract.helpers.wire_client import TIME, WireClient
from helpers.live_servers import Server
from pyarrow import parquet

import fp8scope
from fp8scope.cli.main import main
from fp8scope.client import StoredRun
from fp8scope.exporting import mlflow_run
from fp8scope.exporting.content import ExportError, content_of
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.runs.models import Run

NAMES: Final = ["blocks.0.up.input", "blocks.0.up.weight", "模型 1"]
NAN, INF = math.nan, math.inf
LOSS: Final = [1.5, NAN, INF, -INF, None, 0.1, 1e-310, 1e300]
STEPS: Final = [1, 2, 3, 4, 5, 6, 300, 2**40]
MODEL: Final = {"name": "gpt\n2", "sizes": [1, 2]}
CONFIG: Final = {"lr": 1e-3, "steps": 7, "fast": True, "model": MODEL, "none": None}
Points = Mapping[str, Mapping[int, tuple[float, float]]]
"""Of each series: by step the value, and seconds since 1970."""


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """Values of every kind, two ranks, a resumed attempt, scores and an alert; the login is set."""
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    first = WireClient(server.url, server.token)
    first.register(
        name="odd/ name\x1b[1m", precision="fp8", config=CONFIG, seed=7, group="g", tags=["a", "b"]
    )
    first.catalogue(NAMES)
    amax = [[1.0, None, 1e-310], [None, None, None], [INF, 0.1, 0.0], *[[2.0**-1074, 3.0, 4.0]] * 5]
    scalars = {"loss": LOSS, "lr/group_1": [None, *[1e-3 / 3] * 7]}
    assert first.send(first.batch(0, STEPS, scalars=scalars, tensors={"amax": amax})).status == 201
    for seq, (step, items) in enumerate(((2, [1, 0, 1]), (6, [1, 1, 1, 0, 0, 0, 1])), start=1):
        scores = {"writer": str(first.writer), "seq": seq, "step": step, "name": "heldout",
                  "metric": "accuracy", "kind": "proportion", "items": items}  # fmt: skip
        assert first.request("POST", "/evaluations", json=scores).status == 201
    other = WireClient(server.url, server.token, run=first.run)
    other.catalogue(NAMES[:2], rank=1)
    other.send(other.batch(0, [1, 2], tensors={"amax": [[7.0, 2.0], [3.0, 4.0]]}))
    again = WireClient(server.url, server.token, run=first.run)
    again.catalogue(NAMES, attempt=1)
    again.send(
        again.batch(0, [300, 301], scalars={"loss": [9.0, 8.0]}, tensors={"amax": [[1.0] * 3, [2.0] * 3]})
    )
    Alert.objects.create(
        run=Run.objects.get(pk=first.run),
        kind="loss_spike",
        severity="warning",
        onset_step=3,
        step=4,
        message="Up.",
    )
    return fp8scope.Client().run(str(first.run))


def expected(run: StoredRun, *, tensors: bool = True) -> dict[str, dict[int, tuple[float, float]]]:
    """What the client reads of each series, which other tests compare with the pages."""
    kinds = {name: (name, "") for name in run.scalars()}
    if tensors:
        kinds |= {f"amax/{name}": ("", name) for name in NAMES}
    read = {}
    for tag, (scalar, tensor) in kinds.items():
        history = run.history(scalar, tensor=tensor, times=True)
        assert history.times is not None
        seconds = (history.times.astype("datetime64[us]").astype(np.int64) / 1e6).tolist()
        points = zip(history.values.tolist(), seconds, strict=True)
        read[tag] = dict(zip(history.steps.tolist(), points, strict=True))
    return read


def check(read: Points, wanted: Points, *, seconds: float = 0.0) -> None:
    """Values bit for bit, NaN equal to NaN; times to `seconds`."""
    assert read.keys() == wanted.keys()
    for tag, points in wanted.items():
        assert list(read[tag]) == list(points), tag
        values = [[value for value, _ in series.values()] for series in (read[tag], points)]
        np.testing.assert_array_equal(np.array(values[0]), np.array(values[1]), tag)
        times = [[time for _, time in series.values()] for series in (read[tag], points)]
        np.testing.assert_allclose(times[0], times[1], rtol=0, atol=seconds, err_msg=tag)


def test_times_are_those_that_were_sent(run: StoredRun) -> None:
    history = run.history("loss", times=True)
    assert history.times is not None and history.times.dtype == np.dtype("datetime64[us]")
    assert history.times[0] == np.datetime64(TIME, "us") and not np.isnat(history.times).any()
    thinned = run.history("loss", points=100_000, times=True)
    np.testing.assert_array_equal(thinned.times, history.times)
    assert run.history("loss").times is None


# --- TensorBoard


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_every_value(run: StoredRun, tmp_path: Path) -> None:
    from tensorboard.util import tensor_util

    for _ in range(2):  # A second export replaces the first.
        assert main(["export", run.id, "--to", "tensorboard", str(tmp_path), "--tensors", ""]) == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"odd_ name__1m {run.id[:8]}" and len(list(folder.iterdir())) == 1
    accumulator = events_of(folder)
    scalars = accumulator.PluginTagToContent("scalars")
    read = {
        tag: {
            event.step: (event.tensor_proto.double_val[0], event.wall_time)
            for event in accumulator.Tensors(tag)
        }
        for tag in scalars
    }
    scores = read.pop("evaluation/heldout/accuracy")
    check(read, expected(run), seconds=1e-6)
    assert {step: value for step, (value, _) in scores.items()} == {2: 2 / 3, 6: 4 / 7}
    assert scores[6][1] == read["loss"][6][1]
    with np.errstate(over="ignore"):
        drawn = np.array([value for value, _ in read["loss"].values()]).astype(np.float32)
    shown = [tensor_util.make_ndarray(event.tensor_proto).item() for event in accumulator.Tensors("loss")]
    np.testing.assert_array_equal(np.array(shown, np.float32), drawn)
    (text,) = accumulator.Tensors("alerts/loss_spike")
    assert text.step == 3 and "Up." in tensor_util.make_ndarray(text.tensor_proto).item().decode()


def test_tensorboard_has_the_settings(run: StoredRun, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    assert main(["export", run.id, "--to", "tensorboard", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    accumulator = events_of(folder)
    assert "amax/blocks.0.up.input" not in accumulator.PluginTagToContent("scalars")
    content = accumulator.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    settings = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert settings == content_of(run, None).settings()
    assert settings["lr"] == 1e-3 and settings["fast"] is True and settings["model.name"] == "gpt\n2"
    assert start.group_name == "g" and start.start_time_secs == run.created_at.timestamp()
    experiment = metadata.parse_experiment_plugin_data(content["_hparams_/experiment"])
    assert {info.name for info in experiment.hparam_infos} == settings.keys()
    metadata.parse_session_end_info_plugin_data(content["_hparams_/session_end_info"])


@pytest.mark.slow
def test_tensorboard_shows_the_charts(run: StoredRun, tmp_path: Path) -> None:
    """TensorBoard itself, with its default loader, which shows fewer kinds of values than its library."""
    assert main(["export", run.id, "--to", "tensorboard", str(tmp_path)]) == 0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    program = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", str(port)]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([*program, "--load_fast=true"], stdout=log, stderr=log)
    try:
        deadline, tags = time.monotonic() + 120, dict[str, Any]()
        while not tags:
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                answer = urllib3.request("GET", f"{address}/data/plugin/scalars/tags", retries=False)
                tags = answer.json() if answer.status == 200 else {}
    finally:
        process.terminate()
        process.wait(30)
        log.close()
    ((name, scalars),) = tags.items()
    assert (
        name.endswith(run.id[:8]) and {"loss", "lr/group_1", "evaluation/heldout/accuracy"} == scalars.keys()
    )


# --- Parquet


def test_parquet_has_every_value(run: StoredRun, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["export", run.id, "--to", "parquet", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("scalars.parquet", "tensors.parquet", "evaluations.parquet", "alerts.parquet", "run.json")
    }
    read: dict[str, dict[int, tuple[float, float]]] = {}
    for name, tag_of in (
        ("scalars", lambda row: row["scalar"]),
        ("tensors", lambda row: f"{row['statistic']}/{row['tensor']}"),
    ):
        table = parquet.read_table(tmp_path / f"{name}.parquet")
        assert table.column("value").null_count == 0 and not any(table.column("thinned").to_pylist())
        assert table.column("time").null_count == 0
        times = table.column("time").cast(pa.int64()).to_numpy().tolist()
        for row, microseconds in zip(table.to_pylist(), times, strict=True):
            read.setdefault(tag_of(row), {})[row["step"]] = (row["value"], microseconds / 1e6)
    check(read, expected(run))
    scores = parquet.read_table(tmp_path / "evaluations.parquet").to_pylist()
    for row, score in zip(scores, run.evaluations(), strict=True):
        assert (row["step"], row["score"], row["items"]) == (score.step, score.score, score.items)
        assert (row["low"], row["high"]) == (score.interval or (None, None))
    (alert,) = parquet.read_table(tmp_path / "alerts.parquet").to_pylist()
    (shown,) = run.alerts()
    assert (alert["id"], alert["message"], alert["onset_step"]) == (shown.id, "Up.", 3)
    assert alert["opened_at"] == shown.opened_at
    assert json.loads((tmp_path / "run.json").read_text())["config"] == CONFIG


# --- MLflow


def test_mlflow_reads_every_value(
    run: StoredRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    assert (
        main(["export", run.id, "--to", "mlflow", uri, "--experiment", "fp8", "--tensors", "up.input"]) == 0
    )
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fp8")
    assert experiment is not None
    (stored,) = client.search_runs([experiment.experiment_id])
    read = {
        name: {
            metric.step: (metric.value, metric.timestamp / 1e3)
            for metric in client.get_metric_history(stored.info.run_id, name)
        }
        for name in stored.data.metrics
    }
    scores = read.pop("evaluation/heldout/accuracy")
    assert {step: value for step, (value, _) in scores.items()} == {2: 2 / 3, 6: 4 / 7}
    wanted = expected(run)
    check(read, {name: wanted[name] for name in (*run.scalars(), "amax/blocks.0.up.input")}, seconds=1e-3)
    assert stored.data.params == {key: str(value) for key, value in content_of(run, None).settings().items()}
    assert stored.data.tags["fp8scope.run"] == run.id and stored.info.run_name == run.name
    capsys.readouterr()
    assert main(["export", run.id, "--to", "mlflow", uri, "--experiment", "fp8"]) == 1
    assert "has this run already" in capsys.readouterr().err


def test_what_mlflow_refuses_is_said(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    assert main(["export", run.id, "--to", "mlflow", tmp_path.as_uri()]) == 1
    assert "MLflow refuses" in (error := capsys.readouterr().err) and "Traceback" not in error


def test_two_names_that_mlflow_would_make_one_are_refused(
    run: StoredRun, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = WireClient(server.url, server.token)
    client.register(name="r")
    client.catalogue(["a*b", "a#b"])
    client.send(client.batch(0, [1], tensors={"amax": [[1.0, 2.0]]}))
    content = content_of(fp8scope.Client().run(str(client.run)), "")
    with pytest.raises(ExportError, match="two metrics 'amax/a_b'"):
        mlflow_run.write(content, tmp_path.as_uri(), "e", lambda done, total: None)


# --- W&B


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format after seven bytes, each a protocol buffer."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    data, position, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # A whole record, or its last part.
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_has_every_value(run: StoredRun, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fp8scope", "export", run.id, "--to", "wandb", str(tmp_path), "--tensors", ""],
        capture_output=True,
        text=True,
        env={**os.environ, "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().removeprefix("wandb sync "))
    assert folder.parent == tmp_path / "wandb" and folder.name.startswith("offline-run-")
    (file,) = folder.glob("*.wandb")
    read: dict[str, dict[int, tuple[float, float]]] = {}
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            assert (
                record.run.run_id == run.id
                and record.run.run_group == "g"
                and list(record.run.tags) == ["a", "b"]
            )
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            settings = content_of(run, None).settings()
            assert {key: config[key] for key in settings} == settings
        if kind == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step, time = int(row.pop("_step", record.history.step.num)), row.pop("_timestamp")
            for tag, value in row.items():
                if not tag.startswith("_"):
                    read.setdefault(tag, {})[step] = (float(value), time)
    scores = read.pop("evaluation/heldout/accuracy")
    assert {step: value for step, (value, _) in scores.items()} == {2: 2 / 3, 6: 4 / 7}
    check(read, expected(run), seconds=1e-6)


# --- The command


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "tensorboard"], "expected 2 arguments"),
        (["somewhere"], "unrecognized arguments"),
        (["--to", "excel", "x"], "there is no target 'excel': name tensorboard, wandb, mlflow, parquet"),
        ([], "is not the id of a run"),
    ],
    ids=str,
)
def test_wrong_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["export", "a name", *arguments])
    except SystemExit as wrong:
        status = wrong.code
    assert status == 2 and text in capsys.readouterr().err


def test_a_run_that_is_not_there(run: StoredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(uuid.UUID(int=5)), "--to", "tensorboard", str(tmp_path)]) == 1
    assert "has no run" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "package", "install"),
    [("parquet", "pyarrow", "pyarrow"), ("mlflow", "mlflow", "mlflow-skinny"), ("wandb", "wandb", "wandb")],
)
def test_a_missing_package_is_named(
    run: StoredRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    package: str,
    install: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fp8scope.exporting.parquet_files", raising=False)
    monkeypatch.delattr("fp8scope.exporting.parquet_files", raising=False)
    assert main(["export", run.id, "--to", target, str(tmp_path)]) == 1
    assert f"which is missing: pip install {install}" in capsys.readouterr().err
