"""Addresses of an alert's chart, for chats that show pictures but accept none.

Chats such as Slack fetch the picture from the internet, without an account. So the address is the permission:
it is signed with the installation's key, names one delivery by its random key, and expires. It shows the
chart and nothing else. It ends before its time if the channel or the run is deleted, or the key is changed.
"""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings
from django.core.signing import BadSignature, TimestampSigner
from django.urls import reverse

from fp8scope_dashboard.alerts.channels.outgoing import is_public
from fp8scope_dashboard.alerts.models import Alert, Delivery

# Chats keep their own copy once they have shown a picture.
LIFETIME: Final = timedelta(days=7)
# Names that are only known inside a network.
PRIVATE_ENDINGS: Final = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".test", ".invalid")


def address_of(delivery: Delivery) -> str:
    """The public address of a delivery's chart; empty if nobody outside could open it."""
    if delivery.event is None or not is_reachable(settings.BASE_URL):
        return ""
    path = reverse("alert_picture", args=[_signer().sign(delivery.key.hex)])
    return f"{settings.BASE_URL}{path}"


def alert_of(signed: str) -> Alert | None:
    """The alert of an address; None if the address is not genuine, has expired, or its alert is gone."""
    try:
        key = UUID(_signer().unsign(signed, max_age=LIFETIME))
    except (BadSignature, ValueError):
        return None
    delivery = Delivery.objects.filter(key=key).select_related("event").first()
    return None if delivery is None else delivery.event


def is_reachable(base_url: str) -> bool:
    """Return whether the internet may be able to open an address: https, and no private name or address."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme != "https" or not host:
        return False
    try:
        return is_public(ip_address(host))
    except ValueError:
        return "." in host and not host.endswith(PRIVATE_ENDINGS)


def _signer() -> TimestampSigner:
    # A full stop, because some chats end an address at a colon.
    return TimestampSigner(sep=".", salt="fp8scope: pictures of alerts")
