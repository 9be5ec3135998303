"""Links in the documents have a target, the paths in ARCHITECTURE.md exist, and sentences can be scanned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Documents on statistics, which grow long sentences.
PLAIN = [
    *(ROOT / "docs" / name for name in ("detectors.md", "statistics.md")),
    *sorted((ROOT / "docs/methods").glob("*.md")),
]
MAX_WORDS = 30
PLACEHOLDER = "NAME"
"""Stands in a path for the name of a file that does not exist yet."""


def slugs(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
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


def sentences(document: Path) -> list[str]:
    """The sentences of a document's paragraphs and lists, without tables, headings and code."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or line.startswith(("|", "#")):
            paragraphs.append([])
            continue
        if re.match(r"\s*(\*|-|\d+\.) ", line):
            paragraphs.append([])
        paragraphs[-1].append(line.strip())
    joined = (re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph)) for paragraph in paragraphs)
    return [
        sentence
        for text in joined
        for sentence in re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*\[(0-9])", text)
        if text
    ]


@pytest.mark.parametrize("document", PLAIN, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_on_statistics_are_short(document: Path) -> None:
    lengths = sorted(len(sentence.split()) for sentence in sentences(document))
    assert lengths[int(0.9 * len(lengths))] < MAX_WORDS


def test_the_paths_in_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`((?:agent|benchmarks|dashboard|docs|kernels|tests)/[\w./-]+)`", text)
    assert len(paths) >= 20
    assert [path for path in paths if PLACEHOLDER not in path and not (ROOT / path).exists()] == []
