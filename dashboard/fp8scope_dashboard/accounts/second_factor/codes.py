"""Make and check the codes of an authenticator app (RFC 6238), and recovery codes."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from typing import Final

import pyotp
from django.db import transaction
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Authenticator, RecoveryCode, User
from fp8scope_dashboard.db.encryption import UnreadableSecretError, decrypt_json, encrypt_json

INTERVAL_SECONDS: Final = 30
# The clocks of a phone and the server may differ by one interval in each direction.
TOLERANCE: Final = 1
RECOVERY_CODES: Final = 10
RECOVERY_BYTES: Final = 10
MAX_CODE: Final = 64
ISSUER: Final = "fp8scope"


def authenticator_of(user: User) -> Authenticator | None:
    """The confirmed authenticator of a user; None without one."""
    return Authenticator.objects.filter(user=user, confirmed_at__isnull=False).first()


def begin(user: User) -> Authenticator:
    """Make a new secret for a user without a confirmed authenticator. An earlier unconfirmed one is replaced.

    Raises:
        ValueError: the user has a confirmed one.
        ImproperlyConfigured: the server has no lasting key to encrypt it with.
    """
    if authenticator_of(user) is not None:
        raise ValueError("The user has an authenticator.")
    sealed = encrypt_json({"secret": pyotp.random_base32()})
    stored, _ = Authenticator.objects.update_or_create(
        user=user, defaults={"sealed": sealed, "created_at": timezone.now(), "last_interval": 0}
    )
    return stored


def secret_of(authenticator: Authenticator) -> str:
    """The secret, in base 32.

    Raises:
        UnreadableSecretError: no key of this installation decrypts it.
    """
    return str(decrypt_json(authenticator.sealed)["secret"])


def address_of(authenticator: Authenticator) -> str:
    """The address that apps read from a QR code: `otpauth://totp/fp8scope:ada?secret=...`."""
    totp = pyotp.TOTP(secret_of(authenticator))
    return totp.provisioning_uri(name=authenticator.user.username, issuer_name=ISSUER)


@transaction.atomic
def confirm(
    authenticator: Authenticator, code: str, clock: Callable[[], float] = time.time
) -> list[str] | None:
    """Confirm an authenticator with its first code. Returns the recovery codes; None if the code is wrong."""
    if not _use_app_code(authenticator, code, clock):
        return None
    Authenticator.objects.filter(pk=authenticator.pk).update(confirmed_at=timezone.now())
    return renew_recovery_codes(authenticator.user)


def use_code(user: User, code: str, clock: Callable[[], float] = time.time) -> bool:
    """Use up a code of the user's app, or a recovery code. Returns whether it is right and unused."""
    authenticator = authenticator_of(user)
    if authenticator is None or len(code) > MAX_CODE:
        return False
    return _use_app_code(authenticator, code, clock) or _use_recovery_code(user, code)


@transaction.atomic
def renew_recovery_codes(user: User) -> list[str]:
    """Replace the recovery codes of a user. Only this return value contains them."""
    RecoveryCode.objects.filter(user=user).delete()
    codes = [_recovery_code() for _ in range(RECOVERY_CODES)]
    RecoveryCode.objects.bulk_create(RecoveryCode(user=user, digest=_digest(code)) for code in codes)
    return codes


def recovery_codes_left(user: User) -> int:
    """The number of recovery codes that a user has not used."""
    return RecoveryCode.objects.filter(user=user, used_at=None).count()


@transaction.atomic
def remove(user: User) -> bool:
    """Remove the second factor of a user. Returns whether there was one."""
    RecoveryCode.objects.filter(user=user).delete()
    return bool(Authenticator.objects.filter(user=user).delete()[0])


@transaction.atomic
def rekey() -> tuple[int, list[str]]:
    """Encrypt all secrets with the present key. Returns their number, and the users of unreadable ones."""
    count, unreadable = 0, []
    for authenticator in Authenticator.objects.select_for_update().select_related("user"):
        try:
            sealed = encrypt_json({"secret": secret_of(authenticator)})
        except UnreadableSecretError:
            unreadable.append(authenticator.user.username)
            continue
        Authenticator.objects.filter(pk=authenticator.pk).update(sealed=sealed)
        count += 1
    return count, unreadable


def _use_app_code(authenticator: Authenticator, code: str, clock: Callable[[], float]) -> bool:
    digits = re.sub(r"\s", "", code)
    if not re.fullmatch(r"[0-9]{6}", digits, re.ASCII):
        return False
    try:
        totp = pyotp.TOTP(secret_of(authenticator), interval=INTERVAL_SECONDS)
    except UnreadableSecretError:
        return False
    now = int(clock()) // INTERVAL_SECONDS
    for interval in range(now - TOLERANCE, now + TOLERANCE + 1):
        if secrets.compare_digest(totp.generate_otp(interval), digits):
            # Atomic: of two simultaneous requests with one code, one succeeds.
            unused = Authenticator.objects.filter(pk=authenticator.pk, last_interval__lt=interval)
            return bool(unused.update(last_interval=interval))
    return False


def _use_recovery_code(user: User, code: str) -> bool:
    unused = RecoveryCode.objects.filter(user=user, digest=_digest(code), used_at=None)
    return bool(unused.update(used_at=timezone.now()))


def _recovery_code() -> str:
    """80 random bits, in four groups of five characters."""
    text = secrets.token_hex(RECOVERY_BYTES)
    return "-".join(text[start : start + 5] for start in range(0, len(text), 5))


def _digest(code: str) -> bytes:
    plain = re.sub(r"[\s-]", "", code).lower()
    return hashlib.sha256(plain.encode(errors="replace")).digest()
