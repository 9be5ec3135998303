"""Encrypt the secrets that the database stores, with keys derived from the installation's secret key.

Fernet (AES-128-CBC and HMAC-SHA256) under HKDF-SHA256 of SECRET_KEY. SECRET_KEY_FALLBACKS are former keys:
they decrypt, but never encrypt.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

# Separates this use of the secret key from all others. A change makes everything stored unreadable.
PURPOSE = b"fp8scope: secrets in the database, version 1"


class UnreadableSecretError(Exception):
    """The secret was encrypted with a key that this installation does not have."""


def encrypt_json(content: Mapping[str, Any]) -> str:
    """Encrypt a JSON object with the present key.

    Raises:
        ImproperlyConfigured: there is no lasting key; the secret could never be read again.
    """
    if getattr(settings, "SECRET_KEY_IS_RANDOM", False):
        raise ImproperlyConfigured(
            "Set FP8SCOPE_SECRET_KEY to the installation's key: it encrypts the secrets of alert channels."
        )
    return _keys().encrypt(json.dumps(dict(content)).encode()).decode("ascii")


def decrypt_json(token: str) -> dict[str, Any]:
    """Decrypt a JSON object with the present key or a former one.

    Raises:
        UnreadableSecretError: no key fits, or the stored text was changed.
    """
    try:
        text = _keys().decrypt(token.encode())
    except InvalidToken:
        raise UnreadableSecretError("No key of this installation decrypts the secret.") from None
    content: dict[str, Any] = json.loads(text)
    return content


def _keys() -> MultiFernet:
    return _derived((settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS))


@lru_cache(maxsize=4)
def _derived(secret_keys: tuple[str, ...]) -> MultiFernet:
    return MultiFernet([Fernet(_derive(secret_key)) for secret_key in secret_keys])


def _derive(secret_key: str) -> bytes:
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=PURPOSE).derive(secret_key.encode())
    return base64.urlsafe_b64encode(key)
