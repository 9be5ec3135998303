"""Ed25519 signatures over JSON documents, and the keys that make them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fp8scope_dashboard.certificates.errors import CertificateError

ALGORITHM: Final = "ed25519"
MAX_KEY_BYTES: Final = 1 << 14


def canonical(document: Any) -> bytes:
    """Return a document as the bytes that are signed: sorted keys, no spaces, ASCII.

    Raises CertificateError for values that JSON does not have.
    """
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise CertificateError("the certificate has values that JSON does not have") from None
    return text.encode("ascii")


def sign(document: dict[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """Return the document with its signature in place of any that it has."""
    body = {name: value for name, value in document.items() if name != "signature"}
    public = _raw(key.public_key())
    signature = {
        "algorithm": ALGORITHM,
        "public_key": base64.b64encode(public).decode("ascii"),
        "value": base64.b64encode(key.sign(canonical(body))).decode("ascii"),
    }
    return {**body, "signature": signature}


def check_signature(document: dict[str, Any]) -> str:
    """Return the fingerprint of the key that has signed a document.

    Raises CertificateError if there is no signature, or if the document was changed after it.
    """
    signature = document.get("signature")
    body = {name: value for name, value in document.items() if name != "signature"}
    try:
        if set(signature) != {"algorithm", "public_key", "value"} or signature["algorithm"] != ALGORITHM:  # type: ignore[arg-type, index]
            raise CertificateError(f"the signature is not of {ALGORITHM}")
        public = _exact(signature["public_key"])  # type: ignore[index]
        Ed25519PublicKey.from_public_bytes(public).verify(_exact(signature["value"]), canonical(body))  # type: ignore[index]
    except InvalidSignature:
        raise CertificateError("the file was changed after it was signed") from None
    except CertificateError:
        raise
    except (ValueError, TypeError, KeyError):
        raise CertificateError("the file has no signature that can be read") from None
    return fingerprint_of(public)


def _exact(text: str) -> bytes:
    """Decode base64 of which each value has one text only."""
    raw = base64.b64decode(text, validate=True)
    if base64.b64encode(raw).decode("ascii") != text:
        raise ValueError("not canonical")
    return raw


def fingerprint(key: Ed25519PrivateKey) -> str:
    """Return the fingerprint of a key: 64 hexadecimal digits, SHA-256 of its public half."""
    return fingerprint_of(_raw(key.public_key()))


def fingerprint_of(public: bytes) -> str:
    """Return the fingerprint of 32 bytes of a public key."""
    return hashlib.sha256(public).hexdigest()


def key_from_seed(seed: bytes) -> Ed25519PrivateKey:
    """Return the key of 32 secret bytes."""
    return Ed25519PrivateKey.from_private_bytes(seed)


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """Read the private key in a PEM file, or make one there that only its owner can read.

    Raises CertificateError if the file has no Ed25519 key, or cannot be read or written.
    """
    try:
        if path.exists():
            with path.open("rb") as file:
                key = serialization.load_pem_private_key(file.read(MAX_KEY_BYTES), password=None)
            if not isinstance(key, Ed25519PrivateKey):
                raise CertificateError(f"{path} has a key of another kind; certificates need Ed25519")
            return key
        made = Ed25519PrivateKey.generate()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(
                made.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
        return made
    except FileExistsError:
        # Another process has made it meanwhile.
        return load_or_make_key(path)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, CertificateError):
            raise
        raise CertificateError(f"{path} cannot be used as a key: {type(error).__name__}") from None


def _raw(public: Ed25519PublicKey) -> bytes:
    return public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
