"""Encrypt the settings of all channels with the present secret key, after it was changed."""

from __future__ import annotations

from django.db import transaction

from fp8scope_dashboard.alerts.models import Channel
from fp8scope_dashboard.db.encryption import UnreadableSecretError, decrypt_json, encrypt_json


@transaction.atomic
def rekey() -> tuple[int, list[str]]:
    """Returns the number of channels that were encrypted, and the names of those that no key decrypts."""
    count, unreadable = 0, []
    for channel in Channel.objects.select_for_update(no_key=True).exclude(sealed="").order_by("id"):
        try:
            channel.sealed = encrypt_json(decrypt_json(channel.sealed))
        except UnreadableSecretError:
            unreadable.append(channel.name)
            continue
        channel.save(update_fields=["sealed"])
        count += 1
    return count, unreadable
