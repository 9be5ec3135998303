"""The level and the format of the logs."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMATS = ("line", "json")


def log_level_from_text(text: str) -> str:
    """The level that FP8SCOPE_LOG_LEVEL names, in any case; INFO if it is empty.

    Raises:
        ImproperlyConfigured: there is no such level.
    """
    level = text.strip().upper() or "INFO"
    if level not in LEVELS:
        raise ImproperlyConfigured(f"FP8SCOPE_LOG_LEVEL must be one of {', '.join(LEVELS)}, not {text!r}")
    return level


def log_format_from_text(text: str) -> str:
    """The format that FP8SCOPE_LOG_FORMAT names, in any case; `line` if it is empty.

    Raises:
        ImproperlyConfigured: there is no such format.
    """
    name = text.strip().lower() or "line"
    if name not in FORMATS:
        raise ImproperlyConfigured(f"FP8SCOPE_LOG_FORMAT must be {' or '.join(FORMATS)}, not {text!r}")
    return name
