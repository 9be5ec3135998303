"""Read the audit log: filter it, page through it, and delete what is older than it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.audit.models import Action, Entry

READS: Final = (Action.EXPORTED, Action.SIGNED_IN, Action.SIGN_IN_FAILED)
"""Actions that change nothing. There are many of them."""
READ_DAYS: Final = 365
"""For how long entries of READS are kept, or for as long as all are, if that is shorter."""
PIECE: Final = 1_000
MAX_EXPORTED: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class AuditQuery:
    """A filter of entries: by a person or token, of an action, in a range of days (UTC, both included)."""

    by: str = ""
    action: str = ""
    first: date | None = None
    last: date | None = None


def entries(project: Project | None, query: AuditQuery) -> QuerySet[Entry]:
    """The entries of a project that match, the newest first; with None, those of the whole server."""
    matching = Entry.objects.all() if project is None else Entry.objects.filter(project=project)
    if query.by:
        matching = matching.filter(Q(user__username=query.by) | Q(by__icontains=query.by))
    if query.action:
        matching = matching.filter(action=query.action)
    if query.first is not None:
        matching = matching.filter(at__gte=datetime.combine(query.first, time.min, UTC))
    if query.last is not None:
        matching = matching.filter(at__lt=datetime.combine(query.last, time.min, UTC) + timedelta(days=1))
    return matching.select_related("project").order_by("-id")


def in_pieces(matching: QuerySet[Entry]) -> Iterator[list[Entry]]:
    """Up to MAX_EXPORTED entries, PIECE at a time: no database connection is held while a client reads."""
    before, left = None, MAX_EXPORTED
    while left > 0:
        rest = matching if before is None else matching.filter(pk__lt=before)
        piece = list(rest[: min(PIECE, left)])
        if not piece:
            return
        yield piece
        before, left = piece[-1].pk, left - len(piece)


def delete_old(now: datetime | None = None) -> int:
    """Delete up to PIECE entries that are older than they are kept. Returns how many."""
    now = timezone.now() if now is None else now
    days = settings.AUDIT_DAYS
    reads = now - timedelta(days=min(READ_DAYS, days or READ_DAYS))
    old = Q(action__in=READS, at__lt=reads)
    if days:
        old |= Q(at__lt=now - timedelta(days=days))
    ids = list(Entry.objects.filter(old).order_by("pk").values_list("pk", flat=True)[:PIECE])
    return Entry.objects.filter(pk__in=ids).delete()[0]
