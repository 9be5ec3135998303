"""The words in which two texts differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

# Beyond it only the first difference is looked for: matching takes time with the product of the lengths.
MAX_WORDS: Final = 2_000
FAR: Final = 400
"""Characters in front of a difference from which on it is shown above the text, too."""
AROUND: Final = 60
_WORDS: Final = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True)
class TextPiece:
    """A part of a text, and whether the other text has another one in its place."""

    text: str
    differs: bool


@dataclass(frozen=True)
class MarkedText:
    """A text with its differences from another; `remark` says in words how far they agree."""

    pieces: tuple[TextPiece, ...]
    remark: str = ""

    @property
    def html(self) -> SafeString:
        """The text with its differences marked. Its line ends are those of the text."""
        parts = ((mark, piece.text, end) for piece in self.pieces for mark, end in [_MARKS[piece.differs]])
        return format_html_join("", "{}{}{}", parts)

    @property
    def first(self) -> SafeString | str:
        """The first difference with the words around it; empty if the text shows it at its beginning."""
        at = next((index for index, piece in enumerate(self.pieces) if piece.differs), None)
        before = "".join(piece.text for piece in self.pieces[:at])
        if at is None or len(before) < FAR:
            return ""
        words = before[-AROUND:].partition(" ")[2] or before[-AROUND:]
        rest = "".join(piece.text for piece in self.pieces[at + 1 : at + 4])
        mark, end = _MARKS[True]
        more = "…" if len(rest) > AROUND else ""
        parts = ("…", words, mark, self.pieces[at].text[:AROUND], end, rest[:AROUND], more)
        return format_html("{}{}{}{}{}{}{}", *parts)


_MARKS: Final = {True: (mark_safe("<mark>"), mark_safe("</mark>")), False: ("", "")}


def marked(reference: str, text: str) -> MarkedText:
    """Mark what `text` has in place of words of `reference`."""
    ours, theirs = _WORDS.findall(text), _WORDS.findall(reference)
    common = _common_length(ours, theirs)
    remark = _remark(ours, theirs, common)
    if common == len(ours) == len(theirs):
        return MarkedText((TextPiece(text, False),), remark)
    if max(len(ours), len(theirs)) - common > MAX_WORDS:
        rest = TextPiece("".join(ours[common:]), True)
        return MarkedText((TextPiece("".join(ours[:common]), False), rest), remark)
    # Frequent words, which difflib calls junk, would make it slow.
    matcher = SequenceMatcher(None, theirs[common:], ours[common:], autojunk=True)
    pieces = [TextPiece("".join(ours[:common]), False)]
    for kind, _, _, first, last in matcher.get_opcodes():
        pieces.append(TextPiece("".join(ours[common + first : common + last]), kind != "equal"))
    return MarkedText(tuple(_joined(pieces)), remark)


def _joined(pieces: Iterable[TextPiece]) -> list[TextPiece]:
    """The pieces without empty ones."""
    return [piece for piece in pieces if piece.text]


def _common_length(ours: list[str], theirs: list[str]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(ours), len(theirs)))


def _remark(ours: list[str], theirs: list[str], common: int) -> str:
    if common == len(ours) == len(theirs):
        return "The same text."
    total = sum(1 for word in ours if not word.isspace())
    same = sum(1 for word in ours[:common] if not word.isspace())
    if not same:
        return "Differs from the first word on."
    return f"The first {same:,} of {total:,} words are the same."
