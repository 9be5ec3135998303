"""Show times in the time zone that a user has chosen on the account page."""

from __future__ import annotations

from functools import cache
from zoneinfo import available_timezones

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils import timezone
from django.utils.deprecation import MiddlewareMixin

SESSION_ENTRY = "time_zone"
"""A copy of the user's choice: reading the session is cheaper than reading the user."""


@cache
def zone_names() -> tuple[str, ...]:
    """The names that can be chosen, by region."""
    return tuple(sorted(name for name in available_timezones() if "/" in name or name == "UTC"))


class UseTimeZone(MiddlewareMixin):
    """Activate the time zone of the session for the templates of this request."""

    def process_request(self, request: HttpRequest) -> None:
        # Requests of agents have no session, and their answers are in UTC.
        if request.path.startswith("/api/"):
            return
        name = request.session.get(SESSION_ENTRY, "")
        if name in zone_names():
            timezone.activate(name)

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        timezone.deactivate()
        return response
