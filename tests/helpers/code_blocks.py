"""The code blocks of the documents, by language, and the command lines in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """One block: the document's path below the repository, its language, its text and its number there."""

    document: str
    language: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.document}-{self.number}"


def code_blocks(*languages: str) -> list[CodeBlock]:
    """Return the blocks of these languages in all documents; of all languages without an argument."""
    blocks = [
        CodeBlock(str(path.relative_to(ROOT)), language, text, number)
        for path in DOCUMENTS
        for number, (language, text) in enumerate(BLOCK.findall(path.read_text()))
    ]
    return [block for block in blocks if not languages or block.language in languages]


def texts_of(document: str | Path, language: str = "python") -> list[str]:
    """Return the blocks of one document in this language, as they stand there."""
    name = str((ROOT / document).relative_to(ROOT))
    return [block.text for block in code_blocks(language) if block.document == name]


def command_lines(pattern: str) -> list[tuple[str, str]]:
    """Return (document, words) for each different line of a shell block in which `pattern` finds a command.

    `words` is what the first group of `pattern` has, up to a comment.
    """
    lines = [
        (block.document, match[1].strip())
        for block in code_blocks("bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        if (match := re.search(pattern, line.split("  #")[0].split(" # ")[0]))
    ]
    return list(dict.fromkeys(lines))
