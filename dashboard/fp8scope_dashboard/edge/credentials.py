"""The token in a request's Authorization header."""

from __future__ import annotations

import base64
import binascii


def secret_in(authorization: str) -> str:
    """The secret of `Bearer SECRET`, or the password of `Basic`; empty if there is none."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2].strip()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
