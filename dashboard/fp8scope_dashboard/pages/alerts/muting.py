"""The times until which an alert can be muted."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from django.utils import timezone

from fp8scope_dashboard.accounts.time_zones import zone_names
from fp8scope_dashboard.alerts.lifecycle import LifecycleError

HOURS: Final = {"1": "1 hour", "2": "2 hours", "4": "4 hours", "24": "1 day", "168": "1 week"}
TOMORROW: Final = "tomorrow"
MORNING_HOUR: Final = 9
OWN: Final = "own"
CHOICES: Final = {
    "1": "for 1 hour",
    "2": "for 2 hours",
    "4": "for 4 hours",
    TOMORROW: f"until tomorrow, {MORNING_HOUR}:00",
    "24": "for 1 day",
    "168": "for 1 week",
    OWN: "until a time …",
}
"""The choices of the page, with its words."""


def muted_until(form: Mapping[str, str], now: datetime) -> tuple[datetime, str]:
    """The time that a form's `until`, `time` and `zone` mean, and its words.

    `time` is that of a field for a local time, `zone` the time zone of the browser.

    Raises:
        LifecycleError: the form chooses no time; the message says what to do.
    """
    choice, zone = form.get("until", ""), _zone(form.get("zone", ""))
    if choice in HOURS:
        return now + timedelta(hours=int(choice)), f"for {HOURS[choice]}"
    if choice == TOMORROW:
        morning = now.astimezone(zone) + timedelta(days=1)
        return morning.replace(hour=MORNING_HOUR, minute=0, second=0, microsecond=0), CHOICES[TOMORROW]
    if choice != OWN:
        raise LifecycleError("Choose how long to mute the alert.")
    try:
        chosen = datetime.fromisoformat(form.get("time", ""))
    except ValueError:
        raise LifecycleError("Enter the time until which the alert is muted.") from None
    until = chosen if chosen.tzinfo else chosen.replace(tzinfo=zone)
    return until, f"until {until:%Y-%m-%d %H:%M}"


def _zone(name: str) -> ZoneInfo:
    """The time zone that a user has chosen for the pages, else that of the browser, else UTC."""
    chosen = timezone.get_current_timezone_name()
    names = (chosen if chosen != "UTC" else name, "UTC")
    return ZoneInfo(next(candidate for candidate in names if candidate in zone_names()))
