"""What a run says about itself when it begins: the body of PUT /runs/{run}."""

import operator
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fp8scope.config import ConfigurationError

_TEXT_LIMITS = {"name": 200, "group": 128, "baseline": 128, "precision": 32}
MAX_TAGS = 50


def blank_registration(name: str) -> dict[str, Any]:
    """A registration in which only the name is known."""
    return {
        "name": name,
        "precision": "unknown",
        "recipe": {},
        "config": {},
        "environment": {},
        "tags": [],
        "group": "",
        "baseline": "",
        "seed": None,
        "total_steps": None,
        "created_at": datetime.now(UTC).isoformat(),
    }


def whole(name: str, value: int | None) -> int | None:
    """`value` as a plain integer of 64 bits. Raises ConfigurationError when it is none."""
    if value is None:
        return None
    try:
        whole = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, got {value!r}.") from None
    if not -(2**63) <= whole < 2**63:
        raise ConfigurationError(f"{name} must fit 64 bits, got {whole}.")
    return whole


def check_registration(registration: Mapping[str, Any]) -> None:
    """Raise ConfigurationError when the server would refuse the registration."""
    for key, limit in _TEXT_LIMITS.items():
        value = registration[key]
        if not isinstance(value, str) or len(value) > limit:
            raise ConfigurationError(f"{key} must be a text of at most {limit} characters, got {value!r}.")
    if (registration["total_steps"] or 0) < 0:
        raise ConfigurationError(f"total_steps must not be negative, got {registration['total_steps']}.")
    if not registration["name"].strip():
        raise ConfigurationError("name must not be empty; leave it out for a default one.")
    if len(registration["tags"]) > MAX_TAGS or any(not 1 <= len(tag) <= 64 for tag in registration["tags"]):
        raise ConfigurationError(f"tags must be at most {MAX_TAGS} texts of 1 to 64 characters.")
