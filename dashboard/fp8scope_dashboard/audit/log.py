"""Write the audit log. Call `record` in the transaction of the change, or right after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project, User
from fp8scope_dashboard.audit.models import Action, Entry

MAX_TEXT: Final = 500
MAX_NAME: Final = 300
MAX_ADDRESS: Final = 64


class NotUndoableError(Exception):
    """The change cannot be undone; the message says why."""


@dataclass(frozen=True)
class Actor:
    """The author of a change, and the address: a person, a token, or without both `label`."""

    user: User | None = None
    token: ApiToken | None = None
    address: str = ""
    label: str = "fp8scope admin"

    def __str__(self) -> str:
        if self.token is not None:
            owner = f" of {self.user.username}" if self.user is not None else ""
            return f"token “{self.token.name}” ({self.token.prefix}…){owner}"
        return self.user.username if self.user is not None else self.label


def actor_of(request: HttpRequest) -> Actor:
    """The person who is signed in, or the token of a request to the API."""
    address = request.META.get("REMOTE_ADDR") or ""
    token = getattr(request, "auth", None)
    if isinstance(token, ApiToken):
        return Actor(token.created_by, token, address)
    return Actor(request.user if isinstance(request.user, User) else None, None, address)


def record(actor: Actor, project: Project | None, action: Action, text: str, **details: Any) -> Entry:
    """Write an entry; `project` is None for what concerns the server. `details` is JSON."""
    return Entry.objects.create(
        project=project,
        action=action,
        text=text[:MAX_TEXT],
        details=details,
        user=actor.user,
        token=actor.token,
        by=str(actor)[:MAX_NAME],
        address=actor.address[:MAX_ADDRESS],
    )


def claim_undo(entry: Entry) -> None:
    """Mark an entry as undone. Of two simultaneous requests one succeeds.

    Raises:
        NotUndoableError: if it is undone already.
    """
    if not Entry.objects.filter(pk=entry.pk, undone_at=None).update(undone_at=timezone.now()):
        raise NotUndoableError("This change is undone already.")
