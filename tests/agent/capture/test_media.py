"""Images, texts, tables and files that real trackers are given are recorded, too."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.launching import here
from agent.helpers.loops import regression, squares, update
from agent.helpers.wire_server import WireServer
from PIL import Image

import fp8scope
import fp8scope.compat.wandb as compat
from fp8scope.capture import media as capture_media

__all__ = ["here"]
pytestmark = pytest.mark.usefixtures("online")
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)


def trained(steps: int = 2, **how: Any) -> fp8scope.Run:
    """An attached run after some steps."""
    model, optimizer = regression()
    run = fp8scope.attach(model, optimizer, overhead=None, console="off", **how)
    for number in range(steps):
        squares(model, number).backward()  # type: ignore[no-untyped-call]
        update(optimizer)
    return run


def media(server: WireServer) -> list[tuple[str, str, int]]:
    return [(item["name"], item["kind"], item["step"]) for item in server.run.media]


def pixels(server: WireServer, index: int) -> Any:
    body = server.run.contents[server.run.media[index]["sha256"]]
    return np.asarray(Image.open(io.BytesIO(body)))


@pytest.fixture(autouse=True)
def taking(server: WireServer) -> None:
    server.accepts = ["media"]


@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_it_works(module: str, server: WireServer, tmp_path: Path) -> None:
    writer = pytest.importorskip(module).SummaryWriter(str(tmp_path))
    run = trained()
    writer.add_image("chw", torch.tensor(np.moveaxis(PIXELS, 2, 0)), 5)
    writer.add_image("hwc", PIXELS / 255.0, 5, dataformats="HWC")
    writer.add_images("batch", np.stack([PIXELS, PIXELS]), 5, dataformats="NHWC")
    writer.add_text("sample", "Once upon a time", 5)
    writer.close()
    run.finish()
    names = ["chw", "hwc", "batch", "batch"]
    assert media(server) == [*((name, "image", 2) for name in names), ("sample", "text", 2)]
    assert all(np.array_equal(pixels(server, index), PIXELS) for index in range(4))
    assert server.run.finish["errors"] == 0


def test_wandb(
    server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wandb = pytest.importorskip("wandb")
    # Settings are read once in a process: those of this test are not for the next.
    request.addfinalizer(wandb.teardown)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracked = wandb.init(mode="offline", project="p")
    run = trained()
    image = wandb.Image(PIXELS, caption="field 0")
    table = wandb.Table(columns=["prompt", "answer"], data=[["a", "b"], ["c", "d"]])
    tracked.log({"loss": 0.5, "image": image, "several": [image, image], "table": table})
    tracked.finish()
    run.finish()
    expected = [("image", "image"), ("several", "image"), ("several", "image"), ("table", "table")]
    assert [(name, kind) for name, kind, _ in media(server)] == expected
    assert np.array_equal(pixels(server, 0), PIXELS) and server.run.media[0]["caption"] == "field 0"
    assert 0.5 in server.run.scalars("logged/loss"), "values beside media are recorded as before"


def test_the_compatible_module(server: WireServer) -> None:
    run = trained()
    compat.init()
    compat.log({"image": compat.Image(PIXELS, caption="c"), "table": compat.Table(["a"], [[1]])})
    compat.finish()
    run.finish()
    assert [(name, kind) for name, kind, _ in media(server)] == [("image", "image"), ("table", "table")]


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trackio, whose folder is chosen while it is imported; other tests have a module of its name."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield pytest.importorskip("trackio")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]


def test_trackio(server: WireServer, tmp_path: Path, trackio: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fp8scope")
    (tmp_path / "clip.mp4").write_bytes(b"no film")
    trackio.init(project="p", name="r", embed=False)
    run = trained()
    image = trackio.Image(PIXELS, caption="field 0")
    trackio.log({
        "loss": 0.5,
        "image": image,
        "sample": trackio.Markdown("Once upon a time"),
        "table": trackio.Table(columns=["prompt", "answer"], data=[["a", "b"], ["c", image]]),
        "clip": trackio.Video(str(tmp_path / "clip.mp4"), caption="a clip"),
        "page": trackio.Html("<b>x</b>"),
        "histogram": trackio.Histogram([1, 2, 3]),
    })  # fmt: skip
    trackio.finish()
    run.finish()
    kinds = {"image": "image", "sample": "text", "table": "table", "clip": "file", "page": "file"}
    assert media(server) == [(name, kind, 2) for name, kind in kinds.items()]
    assert np.array_equal(pixels(server, 0), PIXELS) and server.run.media[0]["caption"] == "field 0"
    table = json.loads(server.run.contents[server.run.media[2]["sha256"]])
    assert table == {"columns": ["prompt", "answer"], "rows": [["a", "b"], ["c", "(TrackioImage)"]]}
    assert server.run.contents[server.run.media[3]["sha256"]] == b"no film"
    assert server.run.media[3]["file_name"] == "clip.mp4"
    assert 0.5 in server.run.scalars("logged/loss"), "values beside media are recorded as before"
    assert server.run.registration["environment"]["capture"]["left_out"] == {"trackio": {"Histogram": 1}}
    assert [r.getMessage() for r in caplog.records if "given to trackio" in r.getMessage()] == [
        "media given to trackio are recorded, except the objects in cells of tables, such as TrackioImage in "
        "'table': use run.log_file."
    ]
    assert server.run.finish["errors"] == 0


def test_mlflow(server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"\0\1")
    (tmp_path / "large.bin").write_bytes(bytes(capture_media.MAX_EACH + 1))
    run = trained()
    with mlflow.start_run():
        mlflow.log_text("Once upon a time", "samples/a.txt")
        mlflow.log_image(PIXELS, "picture.png")
        mlflow.log_image(PIXELS, key="by step", step=3, synchronous=True)
        mlflow.log_artifact(str(tmp_path / "weights.bin"), "model")
        mlflow.log_artifact(str(tmp_path / "large.bin"))
    run.finish()
    assert [(name, kind) for name, kind, _ in media(server)] == [
        ("samples/a.txt", "text"),
        ("picture.png", "image"),
        ("by step", "image"),
        ("model/weights.bin", "file"),
    ]


def test_it_can_be_switched_off(server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_CAPTURE_MEDIA", "off")
    run = trained()
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    writer.add_text("sample", "Once", 5)
    writer.close()
    run.finish()
    assert media(server) == []


def test_bounds(server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_media, "MAX_TOTAL", 100)
    run = trained()
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    for number in range(5):
        writer.add_text("sample", "x" * 40, number)
    writer.close()
    run.finish()
    assert len(media(server)) == 2 and server.run.finish["errors"] == 0
