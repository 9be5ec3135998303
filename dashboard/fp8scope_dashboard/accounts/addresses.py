"""Addresses: groups of clients, so that one cannot count as many; and the server's, as a client sees it."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from django.conf import settings

if TYPE_CHECKING:
    from django.http import HttpRequest

IPV6_PREFIX_BITS = 64
UNKNOWN = "unknown"


def address_group(host: str | None) -> str:
    """Return the group of an address: an IPv4 address itself, or the /64 network of an IPv6 address.

    An IPv4-mapped IPv6 address counts as the IPv4 address. Anything that is not an address, such as a Unix
    socket or a malformed header, is "unknown".
    """
    try:
        address = ip_address((host or "").partition("%")[0])
    except ValueError:
        return UNKNOWN
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        network = int(address) >> (128 - IPV6_PREFIX_BITS) << (128 - IPV6_PREFIX_BITS)
        return f"{IPv6Address(network)}/{IPV6_PREFIX_BITS}"
    return str(address)


def server_address(request: HttpRequest) -> str:
    """The address of this server for the person or agent who asks, such as "http://gpu-server:8265".

    It is FP8SCOPE_BASE_URL. Where that is a loopback address, which no other machine can use, and the request
    came to another one, it is the address of the request.
    """
    own, reached = settings.BASE_URL, f"{request.scheme}://{request.get_host()}"
    return reached if _is_loopback(own) and not _is_loopback(reached) else own


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
