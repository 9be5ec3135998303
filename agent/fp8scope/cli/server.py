"""The server that a command talks to: its settings, and whether it accepts the token."""

import uuid
from dataclasses import replace

from fp8scope.config import ConfigurationError, Settings, settings_from
from fp8scope.delivery.transport import SendOutcome, Transport

CHECK_SECONDS = 10.0
UNKNOWN_RUN = "unknown_run"
"""The error code with which a server answers `probe` if it accepts the token."""


def server_settings(url: str | None, project: str | None) -> Settings:
    """Return the settings of an online run. Raises ConfigurationError without an address and a token."""
    settings = settings_from(url=url, project=project, mode="online")
    if not settings.url or not settings.token:
        raise ConfigurationError(
            "no server is configured: run `fp8scope login ADDRESS`, or set FP8SCOPE_URL and FP8SCOPE_TOKEN."
        )
    return settings


def probe(settings: Settings) -> SendOutcome:
    """Ask the server for a run that does not exist.

    With a valid token the answer is an error with the code UNKNOWN_RUN, with another one HTTP status 401.
    The status is 0 if there is no answer.
    """
    transport = Transport(replace(settings, connect_timeout=CHECK_SECONDS, read_timeout=CHECK_SECONDS))
    try:
        return transport.send("GET", f"/runs/{uuid.UUID(int=0)}", b"")
    finally:
        transport.close()
