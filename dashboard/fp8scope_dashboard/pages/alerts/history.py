"""The history of an alert, in the words of its page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Self

from fp8scope_dashboard.alerts.models import EntryKind, HistoryEntry
from fp8scope_dashboard.pages.formatting import written


@dataclass(frozen=True)
class HistoryLine:
    """An entry, prepared for the page; `comment` is empty for all but comments."""

    who: str
    action: str
    at: datetime
    comment: str = ""

    @classmethod
    def of(cls, entry: HistoryEntry) -> Self:
        """The line of a stored entry."""
        who = entry.user_name or "Automatically"
        if entry.kind == EntryKind.COMMENT:
            return cls(who, EntryKind.COMMENT.label, entry.at, entry.text)
        # Its kind is called “got worse”, which an update need not be.
        action = "updated" if entry.kind == EntryKind.UPDATED else entry.get_kind_display()
        return cls(who, f"{action}: {written(entry.text)}" if entry.text else action, entry.at)
