"""Parse lists of addresses and networks from environment variables."""

import os
from ipaddress import ip_network

from django.core.exceptions import ImproperlyConfigured


def networks_from_environment(variable: str) -> list[str]:
    """The networks of an environment variable; none if it is not set."""
    return networks_from_text(os.environ.get(variable, ""), variable)


def networks_from_text(text: str, variable: str) -> list[str]:
    """Parse comma-separated addresses and networks, such as `127.0.0.1, 10.0.0.0/8`, and normalise them.

    Raises:
        ImproperlyConfigured: a part is neither an address nor a network. `variable` is its name in the error.
    """
    networks = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            network = ip_network(part, strict=False)
        except ValueError as error:
            raise ImproperlyConfigured(
                f"{variable}: {part[:100]!r} is not an address or a network such as 10.0.0.0/8."
            ) from error
        networks.append(str(network))
    return networks
