"""Make reports, and the links that show them without an account."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink

MAX_REPORTS: Final = 1_000
MAX_LINKS: Final = 50
"""Links of one report that work at a time."""
MAX_BYTES: Final = 16 << 20
TITLE_LENGTH: Final = 200
SECRET_BYTES: Final = 32
LIFETIMES: Final[Mapping[str, timedelta | None]] = {
    "1 day": timedelta(days=1),
    "7 days": timedelta(days=7),
    "30 days": timedelta(days=30),
    "1 year": timedelta(days=365),
    "until revoked": None,
}


class ReportError(Exception):
    """The request is not possible; the message says what to do."""


def create_report(project: Project, title: str, content: Mapping[str, Any], user: User) -> SharedReport:
    """Store a report. `content` is JSON, see pages.reports.sections.

    Raises:
        ReportError: the title is empty or too long, the report is too large, or the project has too many.
    """
    title = title.strip()
    if not title or len(title) > TITLE_LENGTH:
        raise ReportError(f"Give the report a title of at most {TITLE_LENGTH} characters.")
    size = len(json.dumps(content))
    if size > MAX_BYTES:
        raise ReportError(
            f"The report has {size / 2**20:.0f} MiB, the maximum is {MAX_BYTES >> 20}: choose fewer charts."
        )
    if SharedReport.objects.filter(project=project).count() >= MAX_REPORTS:
        raise ReportError(f"The project has {MAX_REPORTS} reports, which is the maximum. Delete some.")
    return SharedReport.objects.create(project=project, title=title, content=dict(content), created_by=user)


@transaction.atomic
def create_link(report: SharedReport, user: User, lifetime: timedelta | None) -> tuple[ShareLink, str]:
    """A new link and its secret, of which only the hash is stored.

    Raises:
        ReportError: the report has too many links that work.
    """
    SharedReport.objects.select_for_update().get(pk=report.pk)
    if working_links().filter(report=report).count() >= MAX_LINKS:
        raise ReportError(f"The report has {MAX_LINKS} links, which is the maximum. Revoke some.")
    secret = secrets.token_urlsafe(SECRET_BYTES)
    expires_at = None if lifetime is None else timezone.now() + lifetime
    link = ShareLink.objects.create(
        report=report, digest=_digest(secret), created_by=user, expires_at=expires_at
    )
    return link, secret


def open_link(secret: str) -> SharedReport | None:
    """The report of a link, and count the visit; None if the link is unknown, expired or revoked."""
    links = working_links().filter(digest=_digest(secret))
    if not links.update(times_opened=F("times_opened") + 1, opened_at=timezone.now()):
        return None
    link = ShareLink.objects.select_related("report").filter(digest=_digest(secret)).first()
    return link.report if link is not None else None


def revoke_link(link: ShareLink) -> None:
    """End a link at once. Idempotent."""
    ShareLink.objects.filter(pk=link.pk, revoked_at=None).update(revoked_at=timezone.now())


def links_of(project: Project, user: User) -> QuerySet[ShareLink]:
    """The links to reports of a project that a person made and that work."""
    return working_links().filter(report__project=project, created_by=user)


def end_links(project: Project, user: User, keep_for: User | None, **_: Any) -> dict[str, list[int]]:
    """Receiver of `access_ended`: a person's links end, or become those of `keep_for`."""
    ids = list(links_of(project, user).values_list("pk", flat=True))
    chosen = ShareLink.objects.filter(pk__in=ids)
    if keep_for is None:
        chosen.update(revoked_at=timezone.now())
    else:
        chosen.update(created_by=keep_for)
    return {"links": ids}


def restore_links(
    project: Project, user: User, ended: Mapping[str, list[int]], works_again: Mapping[str, Any], **_: Any
) -> None:
    """Receiver of `access_restored`."""
    links = ShareLink.objects.filter(report__project=project, pk__in=ended.get("links", []))
    links.update(created_by=user, **works_again)


def working_links() -> QuerySet[ShareLink]:
    """The links that are neither revoked nor expired, and not of a deactivated account."""
    unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
    in_use = Q(created_by=None) | Q(created_by__is_active=True)
    return ShareLink.objects.filter(unexpired, in_use, revoked_at=None)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
