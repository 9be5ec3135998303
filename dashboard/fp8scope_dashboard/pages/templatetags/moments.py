"""Times of day and ages, as elements that static/pages/js/run.js shows in the browser's time zone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from fp8scope_dashboard.accounts.time_zones import SESSION_ENTRY
from fp8scope_dashboard.pages.formatting import ago

register = template.Library()


@register.simple_tag(takes_context=True)
def moment(context: dict[str, Any], value: datetime | None, form: str = "ago") -> SafeString | str:
    """A time: its age, with the time as its title; or, with `form="full"`, the time itself.

    Both are in the time zone that the user has chosen. Without a choice they are in UTC until a script
    replaces them by the browser's time zone.
    """
    if value is None:
        return "never"
    local = timezone.localtime(value)
    full = f"{local:%Y-%m-%d %H:%M:%S %Z}"
    chosen = context["request"].session.get(SESSION_ENTRY)
    return format_html(
        '<time datetime="{}"{} title="{}">{}</time>',
        value.astimezone(UTC).isoformat(timespec="seconds"),
        "" if chosen else format_html(' data-moment="{}"', form),
        full,
        full if form == "full" else ago(value, timezone.now()),
    )
