"""Times of day and ages, as elements that static/pages/js/run.js shows in the browser's time zone."""

from __future__ import annotations

from datetime import UTC, datetime

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from fp8scope_dashboard.pages.formatting import ago

register = template.Library()


@register.simple_tag
def moment(value: datetime | None, form: str = "ago") -> SafeString | str:
    """A time: its age, with the time as its title; or, with `form="full"`, the time itself.

    Both are in UTC until a script replaces them by the browser's time zone.
    """
    if value is None:
        return "never"
    utc = value.astimezone(UTC)
    full = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    text = full if form == "full" else ago(value, timezone.now())
    return format_html(
        '<time datetime="{}" data-moment="{}" title="{}">{}</time>',
        utc.isoformat(timespec="seconds"),
        form,
        full,
        text,
    )
