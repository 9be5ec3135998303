"""Media of a script: what is taken, in which bytes, and within which bounds."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent.helpers.documents import run_block
from agent.helpers.wire_server import WireServer
from helpers.code_blocks import texts_of
from PIL import Image

import fp8scope
from fp8scope.guard import Guard
from fp8scope.recording import media as encoding
from fp8scope.recording import media_queue
from fp8scope.recording.media import PendingImage, image_content, logged, png_of, table_content
from fp8scope.recording.media_queue import MediaQueue

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def decoded(content: bytes | PendingImage) -> Any:
    body = content if isinstance(content, bytes) else content.encode()
    return np.asarray(Image.open(io.BytesIO(body)))


def started(server: WireServer, folder: Path, **how: Any) -> fp8scope.Run:
    server.accepts = ["media"]
    return fp8scope.init(
        name="r", url=server.url, token=server.token, directory=folder / "spool", console="off", **how
    )


def test_it_works(tmp_path: Path) -> None:
    with WireServer() as server:
        run = started(server, tmp_path)
        with run.step() as step:
            step.log(loss=1.0)
        run.log_image("picture", PIXELS, caption="a\nb")
        run.log_image("picture", PIXELS)
        run.log_text("sample", "Once", step=7)
        run.log_table("scores", columns=["a"], rows=[[1]])
        (tmp_path / "f.bin").write_bytes(bytes(100_000))
        run.log_file("file", tmp_path / "f.bin")
        assert run.finish().complete and run.session.guard.errors == 0
    stored = server.run
    assert [(media["name"], media["kind"], media["step"]) for media in stored.media] == [
        ("picture", "image", 1),
        ("picture", "image", 1),
        ("sample", "text", 7),
        ("scores", "table", 1),
        ("file", "file", 1),
    ]
    assert stored.media[0]["caption"] == "a b" and stored.media[4]["file_name"] == "f.bin"
    assert np.array_equal(decoded(stored.contents[stored.media[0]["sha256"]]), PIXELS)
    assert stored.contents[stored.media[2]["sha256"]] == b"Once"
    assert list((tmp_path / "spool").glob("*/*")) == []


@pytest.mark.parametrize("channels", [0, 1, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 3), (257, 3000)])
def test_png_has_the_pixels(channels: int, shape: tuple[int, int]) -> None:
    whole = (*shape, channels) if channels else shape
    pixels = np.random.default_rng(1).integers(0, 256, whole, np.uint8)
    assert np.array_equal(decoded(png_of(pixels)), pixels[..., 0] if channels == 1 else pixels)


def test_images_of_all_kinds() -> None:
    as_floats, chw = PIXELS / 255.0, np.moveaxis(PIXELS, 2, 0)
    for image in (
        PIXELS,
        as_floats,
        chw,
        as_floats.astype(np.float16),
        torch.tensor(chw),
        Image.fromarray(PIXELS),
    ):
        assert np.array_equal(decoded(image_content(image)), PIXELS), type(image)
    tensor = torch.tensor(chw / 255.0, dtype=torch.bfloat16, requires_grad=True)
    assert np.abs(decoded(image_content(tensor)).astype(int) - PIXELS).max() <= 1
    assert decoded(image_content(PIXELS[:, :, 0] > 100)).max() == 255
    assert decoded(image_content(np.array([[np.nan, np.inf, -1.0, 0.5]]))).tolist() == [[0, 255, 0, 128]]
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "JPEG")
    assert image_content(file.getvalue()) == file.getvalue()


@pytest.mark.parametrize(
    "image",
    [
        b"<svg/>",
        np.zeros(3),
        np.zeros((5, 5, 2)),
        np.zeros((0, 4)),
        np.array([["a"]]),
        np.zeros((1, 20_000)),
        object(),
    ],
)
def test_what_is_no_image_is_an_error(image: Any) -> None:
    with pytest.raises(ValueError, match="."):
        image_content(image)


def test_tables() -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")

    columns = {"a": [1, 2], "b": [0.5, float("inf")], "c": [None, "x" * 2_000]}
    rows = [[1, 0.5, None], [2, "inf", "x" * 1_000]]
    for table in (columns, pyarrow.table(columns)):
        body, is_cut = table_content(table, None, None)
        assert json.loads(body) == {"columns": ["a", "b", "c"], "rows": rows} and not is_cut
    frame = pandas.DataFrame({"n": np.arange(5_000), "t": pandas.date_range("2026", periods=5_000)})
    body, is_cut = table_content(frame, None, None)
    document = json.loads(body)
    assert len(document["rows"]) == 1_000 and is_cut and document["rows"][1][1].startswith("2026-01-02")
    wrong: Any
    for wrong in ((None, None, None), (None, ["a"], [[1, 2]]), (3, None, None), ({}, None, None)):
        with pytest.raises(ValueError, match="table|row"):
            table_content(*wrong)


def test_a_training_goes_on_whatever_is_logged(tmp_path: Path) -> None:
    with WireServer() as server:
        run = started(server, tmp_path)
        run.log_image("i", object())
        run.log_text("", "empty name")
        run.log_text("t" * 129, "long name")
        run.log_table("t", 3)
        run.log_file("f", tmp_path / "missing")
        run.log_text("negative", "x", step=-1)
        run.log_text("long", "é" * 100_000)
        with run.step() as step:
            step.log(loss=1.0)
        assert run.finish().complete and run.session.guard.errors == 6
        run.log_text("late", "after the end")
        (media,) = server.run.media
        assert media["name"] == "long" and media["size"] <= encoding.TEXT_BYTES


def test_bounds_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    queue = MediaQueue(guard)

    def add(name: str, size: int = 10) -> bool:
        return queue.add(logged("file", name, os.urandom(size), step=0, caption=""))

    recorded: list[bytes] = []
    monkeypatch.setattr(media_queue, "WAITING_BYTES", 25)
    assert add("a") and add("a") and not add("a")
    queue.drain("w", lambda: True, recorded.append)
    monkeypatch.setattr(media_queue, "NAMES", 1)
    assert add("a") and not add("b")
    queue.drain("w", lambda: False, recorded.append)
    monkeypatch.setattr(media_queue, "RUN_BYTES", 20)
    assert not add("a") and len(recorded) == 2 and guard.errors == 4


def test_a_writer_sends_each_content_once() -> None:
    queue = MediaQueue(Guard())
    recorded: list[bytes] = []
    for writer in ("first", "first", "second"):
        queue.add(logged("text", "t", b"the same", step=0, caption=""))
        queue.drain(writer, lambda: True, recorded.append)
    assert [message.partition(b"\n")[2] for message in recorded] == [b"the same", b"", b"the same"]


def test_images_are_encoded_by_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = PendingImage.encode

    def noting(image: PendingImage) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(image)

    monkeypatch.setattr(PendingImage, "encode", noting)
    with WireServer() as server:
        run = started(server, tmp_path)
        for _ in range(3):
            with run.step() as step:
                step.log(loss=1.0)
            run.log_image("i", PIXELS)
            while len(threads) < run.session.steps.number:
                run.session.writers.pipeline._recorder.wake()
        assert run.finish().complete and len(server.run.media) == 3
    assert set(threads) == {"fp8scope-recorder"}


def test_the_code_of_the_document(server: WireServer, tmp_path: Path) -> None:
    server.accepts = ["media"]
    (block,) = texts_of("docs/media.md")
    run_block(block, server, tmp_path)
    names = [media["name"] for media in server.run.media]
    assert names == [*["samples/a story", "attention"] * 3, "scores", "config"]
    assert server.run.finish["errors"] == 0


def test_an_older_server_gets_none(tmp_path: Path) -> None:
    with WireServer() as server:
        run = started(server, tmp_path)
        server.accepts = []
        run.log_text("t", "text")
        with run.step() as step:
            step.log(loss=1.0)
        report = run.finish()
        assert report.complete and not report.messages_refused and not server.run.media
        assert len(server.run.rows) == 1
