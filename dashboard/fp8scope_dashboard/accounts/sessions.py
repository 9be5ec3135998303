"""The browsers in which a user is signed in.

Django stores sessions encoded, without their user. So a user's are found among the unexpired ones, the newest
first; what is shown of a browser is stored in its session when it signs in.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.models import Session
from django.http import HttpRequest
from django.utils import timezone

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.accounts.time_zones import SESSION_ENTRY

MAX_SESSIONS: Final = 5_000
"""Sessions of all users that are searched."""
BROWSER: Final = "browser"
AGENT_LENGTH: Final = 300
BROWSERS: Final = (
    ("Edge", r"Edg/"), ("Firefox", r"Firefox/"), ("Chrome", r"Chrome/|Chromium/"), ("Safari", r"Safari/")
)  # fmt: skip
SYSTEMS: Final = (
    ("Windows", "Windows"), ("Android", "Android"), ("iOS", "iPhone|iPad"), ("macOS", "Mac OS X"),
    ("Linux", "Linux"),
)  # fmt: skip


@dataclass(frozen=True)
class SignedIn:
    """One session of a user. `number` names it in forms; the key itself is a secret."""

    number: str
    browser: str
    since: datetime | None
    is_this: bool


def note_browser(sender: Any, request: HttpRequest | None, user: User, **_: Any) -> None:
    """Store what the account page shows of a new session."""
    if request is not None and hasattr(request, "session"):
        agent = request.headers.get("User-Agent", "")[:AGENT_LENGTH]
        request.session[SESSION_ENTRY] = user.time_zone
        request.session[BROWSER] = {"agent": agent, "since": timezone.now().isoformat()}


user_logged_in.connect(note_browser, dispatch_uid="accounts.sessions.note_browser")


def sessions_of(user: User, this_key: str | None) -> list[SignedIn]:
    """The sessions in which a user is signed in, this one first, then the newest."""
    listed = []
    for session in _sessions_of(user):
        noted = session.get_decoded().get(BROWSER) or {}
        since = noted.get("since")
        listed.append(
            SignedIn(
                _number(session.session_key),
                browser_name(str(noted.get("agent", ""))),
                datetime.fromisoformat(since) if since else None,
                session.session_key == this_key,
            )
        )
    return sorted(listed, key=lambda session: not session.is_this)


def sign_out(user: User, this_key: str | None, number: str | None = None) -> int:
    """End the other sessions of a user, or that with this number. Returns how many were ended."""
    ended = 0
    for session in _sessions_of(user):
        if session.session_key == this_key:
            continue
        if number is None or hmac.compare_digest(_number(session.session_key).encode(), number.encode()):
            session.delete()
            ended += 1
    return ended


def browser_name(agent: str) -> str:
    """A browser and its system in words, from the header User-Agent: `Firefox on Linux`."""
    browser = next((name for name, form in BROWSERS if re.search(form, agent)), "An unknown browser")
    system = next((name for name, form in SYSTEMS if re.search(form, agent)), "")
    return f"{browser} on {system}" if system else browser


def _sessions_of(user: User) -> list[Session]:
    unexpired = Session.objects.filter(expire_date__gt=timezone.now()).order_by("-expire_date")
    valid = {user.get_session_auth_hash(), *user.get_session_auth_fallback_hash()}
    own = []
    for session in unexpired[:MAX_SESSIONS]:
        data = session.get_decoded()
        # A session from before the last change of the password no longer counts.
        if data.get(SESSION_KEY) == str(user.pk) and data.get(HASH_SESSION_KEY) in valid:
            own.append(session)
    return own


def _number(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
