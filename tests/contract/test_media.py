"""Media from a script to the server and back: images, texts, tables and files, each once."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.live_servers import Server
from PIL import Image

import fp8scope
from fp8scope.cli.main import main
from fp8scope.recording import media as recorded
from fp8scope.recording import media_queue
from fp8scope_dashboard.media import contents, limits
from fp8scope_dashboard.media.models import MediaContent, MediaItem
from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.schemas import MediaIn

KILLED = """
import os, signal, sys
import fp8scope
run = fp8scope.init(name="killed", console="off")
for number in range(1, 4):
    with run.step() as step:
        step.log(loss=1.0)
    run.log_text("sample", f"step {number}")
    run.log_file("large", sys.argv[1])
run.session.write_out()
os.kill(os.getpid(), signal.SIGKILL)
"""


def init(server: Server, folder: Path, **options: Any) -> fp8scope.Run:
    return fp8scope.init(
        name="samples",
        url=server.url,
        token=server.token,
        directory=folder / "spool",
        console="off",
        **options,
    )


def output(capsys: pytest.CaptureFixture[str], server: Server, *arguments: str) -> str:
    assert main([*arguments, "--url", server.url]) == 0
    return capsys.readouterr().out


def test_it_works(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    large = os.urandom(300_000)
    (tmp_path / "weights.bin").write_bytes(large)
    run = init(server, tmp_path)
    for number in (1, 2):
        with run.step() as step:
            step.log(loss=1.0)
        run.log_image("weights", pixels, caption="layer 0")
        run.log_text("sample", f"step {number}")
    run.log_table("scores", {"task": ["a", "b"], "score": [0.5, float("nan")]}, step=2)
    run.log_file("file", tmp_path / "weights.bin")
    run.log_file("missing", tmp_path / "missing")
    assert run.finish().complete
    items = list(MediaItem.objects.order_by("pk").select_related("content"))
    assert [(item.name, item.kind, item.step) for item in items] == [
        ("weights", "image", 1),
        ("sample", "text", 1),
        ("weights", "image", 2),
        ("sample", "text", 2),
        ("scores", "table", 2),
        ("file", "file", 2),
    ]
    assert items[0].content == items[2].content and items[0].caption == "layer 0"
    stored = np.asarray(Image.open(io.BytesIO(contents.read(items[0].content))))
    assert np.array_equal(stored, pixels)
    assert Run.objects.get().agent_errors == 1, "the missing file"
    # The client reads what was logged.
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    (stored_run,) = fp8scope.Client(server.url, server.token).runs()
    media = stored_run.media()
    assert [item.sha256 for item in media] == [item.hex for item in items]
    assert media[5].content() == large and media[1].text() == "step 1"
    assert media[4].table() == (["task", "score"], [["a", 0.5], ["b", "nan"]])
    assert [item.step for item in stored_run.media("sample", first=2)] == [2]
    assert "weights.bin" in output(capsys, server, "media", "samples")
    folder = tmp_path / "saved"
    saved = output(capsys, server, "media", "samples", "--kind", "image", "-o", str(folder)).split()
    assert len(saved) == 2 and Path(saved[0]).suffix == ".png" and Path(saved[0]).parent == folder
    card = output(capsys, server, "card", "samples")
    assert card.startswith("## Training precision") and "not judged" in card and stored_run.id in card


def test_a_killed_process_loses_no_media_that_it_has_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = os.urandom(400_000)
    (tmp_path / "large").write_bytes(large)
    # An outage: nothing listens at that address.
    environment = {**os.environ, "FP8SCOPE_DIR": str(tmp_path / "spool"), "FP8SCOPE_TOKEN": server.token}
    environment["FP8SCOPE_URL"] = "http://127.0.0.1:9"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "large")]
    killed = subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    for _ in range(2):
        main(["sync", str(tmp_path / "spool"), "--url", server.url])
    items = MediaItem.objects.select_related("content")
    assert [(item.name, item.step) for item in items.order_by("pk")] == [
        (name, step) for step in (1, 2, 3) for name in ("sample", "large")
    ]
    assert MediaContent.objects.count() == 4 and Receipt.objects.filter(kind="media").count() == 6
    assert items.filter(name="large").latest("pk").hex == hashlib.sha256(large).hexdigest()
    assert not list((tmp_path / "spool").glob("*/*"))


def test_what_the_server_has_is_not_sent_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(2_000_000))
    sizes = []
    for _ in range(2):
        run = init(server, tmp_path)
        with run.step() as step:
            step.log(loss=1.0)
        run.log_file("large", tmp_path / "large")
        sender = run.session.writers.sender
        assert sender is not None
        send = sender._transport.send

        def counted(method: str, path: str, body: bytes, *how: str, send: Any = send) -> Any:
            sizes.append(len(body))
            return send(method, path, body, *how)

        monkeypatch.setattr(sender._transport, "send", counted)
        assert run.finish().complete
    assert sum(size > 2_000_000 for size in sizes) == 1 and MediaItem.objects.count() == 2


def test_the_agent_records_nothing_that_the_server_refuses_by_default() -> None:
    for name in ("FILE_BYTES", "TEXT_BYTES", "TABLE_ROWS", "TABLE_COLUMNS", "CELL_LENGTH", "MAX_SIDE"):
        assert getattr(recorded, name) == getattr(limits, name), name
    assert recorded.MAX_PIXELS <= limits.MAX_PIXELS and media_queue.RUN_BYTES <= limits.RUN_BYTES
    fields = MediaIn.model_fields
    longest = {
        name: max(each.max_length for each in fields[name].metadata if hasattr(each, "max_length"))
        for name in ("name", "caption")
    }
    assert longest == {"name": recorded.NAME_LENGTH, "caption": recorded.CAPTION_LENGTH}
