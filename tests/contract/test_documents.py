"""Links in the documents have a target, and the paths named in ARCHITECTURE.md exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PLACEHOLDER = "NAME"
"""Stands in a path for the name of a file that does not exist yet."""


def slugs(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_points_to_a_file_and_a_heading(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path) if path else document
        if not linked.exists() or (anchor and anchor not in slugs(linked)):
            broken.append(target)
    assert not broken


def test_the_paths_in_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`((?:agent|benchmarks|dashboard|docs|kernels|tests)/[\w./-]+)`", text)
    assert len(paths) >= 20
    assert [path for path in paths if PLACEHOLDER not in path and not (ROOT / path).exists()] == []
