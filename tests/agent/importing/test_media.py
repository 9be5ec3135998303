"""Media beside the numbers in other tools' files: what is read, and what never is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from agent.helpers.import_files import PNG, WRITERS
from agent.helpers.imported import read

from fp8scope.importing import media as importing_media
from fp8scope.importing.media import MediaReader, read_below
from fp8scope.recording import media_bounds
from fp8scope.recording.media import FILE_BYTES
from fp8scope.recording.media_bounds import LeftOutError

ROWS = {"columns": ["prompt", "score"], "rows": [["a", 0.5], ["b", None]]}


@pytest.mark.parametrize(
    ("name", "expected", "notes"),
    [
        (
            "wandb",
            [("image", "picture", 5), ("table", "table", 5), ("image", "several", 5)],
            ["1 media left out: their paths lead out of the folder of the source."],
        ),
        (
            "trackio",
            [("image", "picture", 5), ("text", "sample", 5), ("table", "table", 5)],
            [
                "1 media left out: their paths lead out of the folder of the source.",
                "1 media left out: their type 'trackio.histogram' has no kind here.",
            ],
        ),
        (
            "mlflow",
            [("image", "by/step", 7), ("text", "samples/a.txt", 0), ("table", "tables/a", 0)],
            ["1 media left out: they are artifacts without an image, a text or a table."],
        ),
    ],
)
def test_it_works(name: str, expected: list[tuple[str, str, int]], notes: list[str], tmp_path: Path) -> None:
    run = read(WRITERS[name](tmp_path), name)[0]
    assert sorted((item.kind, item.name, item.step) for item in run.media) == sorted(expected)
    assert sorted(run.run.notes)[: len(notes)] == notes
    contents = {item.kind: item.content for item in run.media}
    assert contents["image"] == PNG and json.loads(contents["table"]) == ROWS
    assert contents.get("text", b"Once upon a time") == b"Once upon a time"
    assert not any("." in scalar or "picture" in scalar for scalar in run.names), (
        "entries of media are no values"
    )


def test_only_regular_files_below_the_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (folder / "empty").write_bytes(b"")
    with (folder / "large").open("wb") as file:
        file.truncate(FILE_BYTES + 1)
    (folder / "fine").write_bytes(b"fine")
    assert read_below(folder, "fine") == read_below(folder, "a/../fine") == b"fine"
    for where in (
        "../secret",
        str(tmp_path / "secret"),
        "link",
        "loop",
        "pipe",
        "empty",
        "large",
        "",
        "a\0b",
    ):
        with pytest.raises(LeftOutError):
            read_below(folder, where)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing_media, "MAX_WAITING", 40)
    monkeypatch.setattr(media_bounds, "NAMES", 2)
    reader = MediaReader()
    for number in range(50):
        reader.add_text("sample", number // 20, "x")
    assert len(list(reader.take())) == 16 + 16
    for name in ("b", "c", ""):
        reader.add_text(name, 0, "x")
    assert [item.name for item in reader.take()] == ["b"]
    reader.add_file("a", 0, "a.png")
    assert list(reader.take()) == [] and sum("left out" in note for note in reader.notes()) == 5
