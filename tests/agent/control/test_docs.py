"""The code of docs/control.md runs as it stands there."""

import re
from pathlib import Path

import pytest
from agent.helpers.documents import run_block
from agent.helpers.wire_server import WireServer
from helpers.code_blocks import texts_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "control.md"
BLOCKS = {re.findall(r'name="(.*?)"', block)[0]: block for block in texts_of(DOCUMENT)}


def test_it_works(server: WireServer, tmp_path: Path) -> None:
    run_block(BLOCKS["falls back"], server, tmp_path)
    (mark,) = server.run.reports_of("annotation")
    assert mark["layers"] == ["2"], "the request to undo it came too late for a step"
    assert server.run.reports_of("accepts")[0]["accepts"] == ["fallback", "pause", "resume"]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [("takes commands", "accepts", 1), ("compared on the way", "reference", 2), ("bisected", "bisect", 1)],
)
def test_every_other_block(name: str, kind: str, count: int, server: WireServer, tmp_path: Path) -> None:
    output = run_block(BLOCKS[name], server, tmp_path)
    assert len(server.run.reports_of(kind)) == count and server.run.finish["errors"] == 0
    assert ("dgrad" in output) == (name == "bisected")


def test_nothing_is_left_out() -> None:
    assert len(BLOCKS) == 4
