"""Images and texts in TensorBoard's event files, as its own writers write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent.helpers.event_files import scalars, tensor, write
from agent.helpers.import_files import PNG
from torch.utils.tensorboard import SummaryWriter

from fp8scope.event_files.log_run import LogRun, PlacedMedia
from fp8scope.recording import media_bounds


def media_of(*paths: Path) -> tuple[LogRun, list[PlacedMedia]]:
    """Read files to their end."""
    log, media = LogRun(), []
    log.add_files(list(paths))
    has_more = True
    while has_more:
        values, has_more = log.read()
        media += [value for value in values if isinstance(value, PlacedMedia)]
    return log, media


def facts(media: list[PlacedMedia]) -> list[tuple[str, str, int]]:
    return [(item.kind, item.name, item.step) for item in media]


def test_it_works(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    writer.add_text("settings", "a line")
    writer.add_scalar("loss", 1.0, 1)
    writer.add_text("sample", "Once\nupon a time", 2)
    writer.add_image("picture", np.zeros((3, 4, 5), np.uint8), 2)
    writer.close()
    log, media = media_of(*tmp_path.iterdir())
    assert facts(media) == [("text", "sample", 2), ("image", "picture", 2)]
    assert media[0].content == b"Once\nupon a time" and media[1].content.startswith(b"\x89PNG")
    assert log.config == {"settings": "a line"}, "texts before the first value stay settings"


def test_images_of_tensorflow_2(tmp_path: Path) -> None:
    event = tensor(3, "batch", np.array([b"1", b"1", PNG, PNG, b"no image"], object), plugin="images")
    log, media = media_of(write(tmp_path / "events.out.tfevents.1.a", [scalars(3, loss=1.0), event]))
    assert facts(media) == [("image", "batch", 3)] * 2 and media[0].content == PNG
    assert log.left_out.media == "they are no PNG, JPEG, WebP or GIF"


def test_they_begin_no_attempt_and_belong_to_that_of_their_step(tmp_path: Path) -> None:
    def sample(step: int) -> Any:
        return tensor(step, "sample", f"at\n{step}", plugin="text")

    events = [scalars(5, loss=1.0), sample(5), sample(2), scalars(6, loss=1.0), sample(6)]
    again = [scalars(4, loss=1.0), sample(4), sample(3)]
    first = write(tmp_path / "events.out.tfevents.1.a", events)
    second = write(tmp_path / "events.out.tfevents.2.a", again)
    _, media = media_of(first, second)
    assert [(item.step, item.where.attempt) for item in media] == [(5, 0), (2, 0), (6, 0), (4, 1), (3, 0)]


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_bounds, "ITEMS", 3)
    events = [scalars(1, loss=1.0), *(tensor(n, "sample", "a\nb", plugin="text") for n in range(-1, 9))]
    log, media = media_of(write(tmp_path / "events.out.tfevents.1.a", events))
    assert len(media) == 3 and log.left_out.media == "their steps are negative"
