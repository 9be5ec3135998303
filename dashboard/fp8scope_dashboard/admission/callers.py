"""The tokens and sessions that this process has seen to be good.

They decide only how a request is treated before it is authenticated: one that carries a token or a session of
these is not limited like a stranger's, and does not wait behind strangers. Whether a token or a session is
valid is asked of the database with every request.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from django.conf import settings
from django.http import HttpRequest

from fp8scope_dashboard.admission import limits


class Callers:
    """A bounded set of secrets, by their hash. Thread-safe."""

    def __init__(self, most: int = limits.CALLERS_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def add(self, secret: str) -> None:
        digest = _digest(secret)
        with self._lock:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
            while len(self._digests) > self._most:
                self._digests.popitem(last=False)

    def discard(self, secret: str) -> None:
        with self._lock:
            self._digests.pop(_digest(secret), None)

    def __contains__(self, secret: str) -> bool:
        digest = _digest(secret)
        with self._lock:
            return digest in self._digests


tokens = Callers()
sessions = Callers()


def remember_session(request: HttpRequest) -> None:
    """Remember the session of an answered request if it is a signed-in person's, else forget it."""
    session = getattr(request, "session", None)
    # Who has not been looked up is not known to be anybody.
    user = getattr(request, "_cached_user", None)
    if session is None or user is None:
        return
    if not user.is_authenticated:
        # Signed out, or expired: the session itself no longer has a key.
        sessions.discard(request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""))
    elif session.session_key:
        sessions.add(session.session_key)


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(errors="replace"), digest_size=16).digest()
