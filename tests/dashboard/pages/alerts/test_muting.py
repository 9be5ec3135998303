"""The times until which an alert can be muted, in the person's time zone."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.utils import timezone

from fp8scope_dashboard.alerts.lifecycle import LifecycleError
from fp8scope_dashboard.pages.alerts.muting import CHOICES, HOURS, muted_until

NOW = datetime(2026, 11, 26, 23, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("form", "expected", "words"),
    [
        ({"until": "2"}, "2026-11-27T01:30:00+00:00", "for 2 hours"),
        ({"until": "tomorrow"}, "2026-11-27T09:00:00+00:00", "until tomorrow, 9:00"),
        # In Tokyo it is the 27th already.
        ({"until": "tomorrow", "zone": "Asia/Tokyo"}, "2026-11-28T00:00:00+00:00", "until tomorrow, 9:00"),
        ({"until": "own", "time": "2026-11-27T18:15"}, "2026-11-27T18:15:00+00:00", "until 2026-11-27 18:15"),
        (
            {"until": "own", "time": "2026-11-27T18:15", "zone": "America/New_York"},
            "2026-11-27T23:15:00+00:00",
            "until 2026-11-27 18:15",
        ),
        ({"until": "own", "time": "2026-11-27T18:15", "zone": "../etc"}, "2026-11-27T18:15:00+00:00", None),
    ],
)
def test_it_works(form: dict[str, str], expected: str, words: str | None) -> None:
    until, text = muted_until(form, NOW)
    assert until == datetime.fromisoformat(expected)
    assert words is None or text == words


def test_the_time_zone_of_the_account_comes_first() -> None:
    with timezone.override("Europe/Berlin"):
        until, _ = muted_until({"until": "own", "time": "2026-11-27T18:15", "zone": "Asia/Tokyo"}, NOW)
    assert until == datetime(2026, 11, 27, 17, 15, tzinfo=UTC)


@pytest.mark.parametrize("form", [{}, {"until": "3"}, {"until": "own"}, {"until": "own", "time": "soon"}])
def test_a_form_without_a_time_says_what_to_do(form: dict[str, str]) -> None:
    with pytest.raises(LifecycleError, match=r"Choose how long|Enter the time"):
        muted_until(form, NOW)


def test_each_choice_means_a_time() -> None:
    assert HOURS.keys() < CHOICES.keys()
    for choice in CHOICES:
        until, _ = muted_until({"until": choice, "time": "2026-11-28T09:00"}, NOW)
        assert until > NOW
