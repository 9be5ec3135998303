"""Reading the reverse proxies that are trusted."""

from ipaddress import ip_network

from django.core.exceptions import ImproperlyConfigured


def networks_from_text(text: str) -> list[str]:
    """Addresses and networks separated by commas, such as `127.0.0.1, 10.0.0.0/8, fd00::/8`, each normalised.

    Raises:
        ImproperlyConfigured: a part is neither.
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
