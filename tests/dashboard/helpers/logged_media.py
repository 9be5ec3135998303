"""Media of runs for tests, stored as messages of their processes are."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import numpy as np
from dashboard.helpers.recording import Recorder
from PIL import Image

from fp8scope_dashboard.media import services
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.media.services import NewMedia
from fp8scope_dashboard.receipts.dedup import identify


def picture(width: int = 8, height: int = 4, seed: int = 0, kind: str = "PNG") -> bytes:
    """An encoded image of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def table(columns: list[str], rows: list[list[Any]]) -> bytes:
    """The content of a table."""
    return json.dumps({"columns": columns, "rows": rows}).encode()


def sent(name: str, content: bytes, **how: Any) -> NewMedia:
    """A text at step 1, or what `how` says; `body=None` sends the hash alone."""
    sha256 = hashlib.sha256(content).digest()
    chosen: dict[str, Any] = {"kind": "text", "step": 1, "sha256": sha256, "body": content, **how}
    return NewMedia(name=name, **chosen)


def log_examples(recorder: Recorder, seed: int) -> None:
    """Store media of each kind at two steps."""
    for step in (50, 100):
        text = f"Once upon a time there was a model. It had {seed + step} weights and a long_word_{'x' * 90}."
        log(recorder, "samples/a story", text.encode(), step=step, caption="Tell me a story")
        log(recorder, "attention", picture(64, 48, seed + step), kind="image", step=step)
    rows = [["arc_challenge", 0.5 + seed, True, None], ["hellaswag", 0.25, False, "x" * 60]]
    log(recorder, "scores", table(["task", "score", "judged", "remark"], rows), kind="table", step=100)
    log(recorder, "config", b"lr: 1e-3", kind="file", step=0, file_name="train.yaml")


def log(recorder: Recorder, name: str, content: bytes, **how: Any) -> MediaItem:
    """Store a media, and return it."""
    message = identify(recorder.run.id, recorder.uuid, recorder.seq, "media", name.encode())
    assert services.store(recorder.run, message, sent(name, content, **how))
    recorder.seq += 1
    return MediaItem.objects.latest("pk")
