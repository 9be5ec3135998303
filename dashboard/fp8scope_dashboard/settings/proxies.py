"""Parse the list of trusted reverse proxies."""

from ipaddress import ip_network

from django.core.exceptions import ImproperlyConfigured


def networks_from_text(text: str) -> list[str]:
    """Parse comma-separated addresses and networks, such as `127.0.0.1, 10.0.0.0/8`, and normalise them.

    Raises:
        ImproperlyConfigured: a part is neither an address nor a network.
    """
    networks = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            network = ip_network(part, strict=False)
        except ValueError as error:
            raise ImproperlyConfigured(
                f"FP8SCOPE_TRUSTED_PROXIES: {part[:100]!r} is not an address or a network such as 10.0.0.0/8."
            ) from error
        networks.append(str(network))
    return networks
