"""The token of monitoring."""

from __future__ import annotations

import hmac

from django.conf import settings


def has_status_token(authorization: str) -> bool:
    """Return whether the header Authorization has FP8SCOPE_STATUS_TOKEN. Nobody has an empty one."""
    expected = settings.STATUS_TOKEN
    scheme, _, sent = authorization.partition(" ")
    if not expected or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(sent.strip().encode(), expected.encode())
