"""Group client addresses, so that one client cannot count as many."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

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
