"""The templates: lines short enough to be read, and names in their tags that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fp8scope_dashboard.pages.charts.frames import FRAMES
from fp8scope_dashboard.pages.glossary import GLOSSARY, GROUP_PREFIX, TERM_GROUPS

MAX_WIDTH = 120
TEMPLATES = sorted((Path(__file__).parents[2] / "dashboard").rglob("*.html"))


def tags(name: str) -> Iterator[str]:
    """What follows the name in each of a tag's uses."""
    for path in TEMPLATES:
        yield from re.findall(rf"{{% {name} (.*?) %}}", path.read_text())


def test_lines_are_not_too_long() -> None:
    assert len(TEMPLATES) > 50
    too_long = [
        f"{path.name}:{number}"
        for path in TEMPLATES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_WIDTH
    ]
    assert not too_long, "split the line, or prepare in Python what it decides or says"


def test_every_chart_has_one_frame() -> None:
    without_fields = {
        tag.split()[0].strip('"') for tag in tags("figure") if not re.search(r" (?!drawn=)\w+=", tag)
    }
    assert without_fields == FRAMES.keys()


def test_every_explained_term_is_in_the_glossary() -> None:
    explained = {name for tag in tags("help") for name in re.findall(r'"([^"]+)"', tag)}
    groups = {f"{GROUP_PREFIX}{group}" for group in TERM_GROUPS}
    assert groups <= explained <= GLOSSARY.keys() | groups
    assert {name for members in TERM_GROUPS.values() for name in members} <= GLOSSARY.keys()
